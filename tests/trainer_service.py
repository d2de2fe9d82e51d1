"""A service on loopback whose judge depends on each character that it sees."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aiohttp import ClientSession, web

import grmpipe
from grmpipe.config.run_config import RunConfig
from grmpipe.data.rows import Findings, Row
from grmpipe.judge.verdict import make_failure, outcome, report_failures, report_score
from grmpipe.observe.guard import Guard
from grmpipe.observe.recorder import JudgedSibling
from grmpipe.observe.spending import Spending
from grmpipe.run.tasks.score import parse_responses
from grmpipe.run.tasks.serve import find_served_judges
from grmpipe.serve.call_log import CallLog
from grmpipe.serve.service import AskByName, JudgeService


async def judge_by_text(row: Row, name: str, priority: int) -> Sequence[JudgedSibling]:
    """The reward is a digest of prompt, reference and response; "lost" fails."""
    group = parse_responses(row, "judge", "g", Findings(Path("judge")))
    judged = []
    for one in group.rollouts:
        seen = [[[said.role, said.content] for said in group.prompt.messages], group.prompt.reference, one.text]
        reward = int.from_bytes(hashlib.sha256(json.dumps(seen).encode()).digest()[:7]) / 2**56
        report = report_score(outcome(one, reward), reward, {})
        if one.text == "lost":
            report = report_failures(make_failure("unparseable", "it ends with 'hm'", 1))
        judged.append(JudgedSibling(group_id="g", sibling=one.sibling, report=report))
    return judged


@functools.cache
def compose(*overrides: str) -> RunConfig:
    return grmpipe.compose(overrides=["task=serve", *overrides])


@asynccontextmanager
async def serving(
    *overrides: str, judge: AskByName = judge_by_text, spending: Spending | None = None
) -> AsyncIterator[ClientSession]:
    folder, config = TemporaryDirectory(), compose(*overrides)
    call_log = CallLog(Path(folder.name), "run", Guard(), config.serve.cache_size)
    longest_s = config.rollout.group_deadline_s
    service = JudgeService(config.serve, find_served_judges(config), judge, call_log, longest_s, spending)
    runner = web.AppRunner(service.app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
        yield session
    await runner.cleanup()
    call_log.close()
    folder.cleanup()


async def post(session: ClientSession, path: str, body: object) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.post(path, data=data) as answer:
        return answer.status, await answer.json()


async def ask_natively(session: ClientSession, **row: Any) -> float:
    """The reward of a response on the native wire."""
    status, found = await post(session, "/v1/judge", row)
    assert status == 200, found
    return float(found["verdicts"][0]["reward"])
