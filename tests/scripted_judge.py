"""A service that answers POST /v1/judge as docs/serving.md says: the reward is the length of a response; "no" fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class ScriptedJudge:
    """script: status codes of the first answers, 0 to hang up; later ones are 200."""

    url: str = ""
    script: list[int] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        row = await request.json()
        self.asked.append(row)
        self.headers.append(dict(request.headers))
        status = self.script.pop(0) if self.script else 200
        if status == 0:
            assert request.transport is not None
            request.transport.close()
        if status != 200:
            return web.json_response({"error": f"judge: words of {status}"}, status=status or 500)
        return web.json_response({"verdicts": [verdict_on(one) for one in row["responses"]]})


def verdict_on(response: str | list[dict[str, str]]) -> dict[str, Any]:
    text = response if isinstance(response, str) else response[-1]["content"]
    if text == "no":
        return {"reward": None, "score": None, "critiques": [], "failed": "unparseable", "detail": "it ends with hm"}
    length = float(len(text))
    return {
        "reward": length, "score": 10 * length, "critiques": [f"{text}!"], "score_std": 0.0, "num_judgements": 1,
        "version": 3,
    }  # fmt: skip


@asynccontextmanager
async def scripted_judge(script: Sequence[int] = ()) -> AsyncIterator[ScriptedJudge]:
    judge, app = ScriptedJudge(script=list(script)), web.Application()
    app.router.add_post("/v1/judge", judge.answer)
    app.router.add_post("/v1/judges/strict", judge.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    judge.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield judge
    finally:
        await runner.cleanup()
