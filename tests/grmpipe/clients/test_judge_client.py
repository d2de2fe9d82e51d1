"""The client of a served judge: what it asks again, what it raises, and what it needs of its environment."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scripted_judge import scripted_judge

from grmpipe.clients import judge_client
from grmpipe.clients.judge_client import JudgeClient, NotJudgedError, write_plain
from grmpipe.serve.service import read_credentials

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_client, "FIRST_PAUSE_S", 0.01)


def test_what_passes_with_time_is_asked_again_under_the_same_name() -> None:
    async def check() -> None:
        async with scripted_judge([429, 503, 0, 500]) as judge:
            verdicts = await JudgeClient(judge.url).ask("6 x 7?", ["42", "no"], reference="42")
            assert [one["reward"] for one in verdicts] == [2.0, None]
            assert len(judge.asked) == 5
            assert judge.asked == [judge.asked[0]] * 5, "a service that is judging it knows it by its prompt_id"
            await JudgeClient(judge.url).ask("6 x 7?", ["42", "no"], reference="42")
            assert judge.asked[5].pop("prompt_id") != judge.asked[0].pop("prompt_id"), "it is another question"
            assert judge.asked[5] == {"prompt": "6 x 7?", "responses": ["42", "no"], "reference": "42"}

    asyncio.run(check())


def test_a_service_that_stays_away_ends_in_an_error_and_never_in_a_number() -> None:
    async def check() -> None:
        async with scripted_judge([503] * 99) as judge:
            with pytest.raises(NotJudgedError, match=r"within 2 s; the last try: status 503: judge: words of 503"):
                await JudgeClient(judge.url, timeout_s=2).ask("a", ["b"])
        with pytest.raises(NotJudgedError, match=r"the last try: ConnectError"):  # it has gone
            await JudgeClient(judge.url, timeout_s=2).ask("a", ["b"])

    asyncio.run(check())


def test_a_refused_request_says_why_at_once() -> None:
    async def check() -> None:
        async with scripted_judge([400]) as judge:
            with pytest.raises(ValueError, match=r"/v1/judge: status 400: judge: words of 400"):
                await JudgeClient(judge.url).ask("a", ["b"])
            assert len(judge.asked) == 1

    asyncio.run(check())


def test_one_response_without_a_verdict_is_an_error_with_its_cause() -> None:
    async def check() -> None:
        async with scripted_judge() as judge:
            assert (await JudgeClient(judge.url).ask_one("a", "bcd"))["reward"] == 3.0
            with pytest.raises(NotJudgedError, match="unparseable: it ends with hm"):
                await JudgeClient(judge.url).ask_one("a", "no")

    asyncio.run(check())


def test_key_name_path_and_arrays_go_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-0123456789")

    async def check() -> None:
        async with scripted_judge() as judge:
            address = judge.url.removeprefix("http://")
            client = JudgeClient(f"http://me@{address}/v1/judges/strict", key_env="JUDGE_KEY")
            columns = {"level": np.int64(3), "steps": np.array([1, 2]), "gap": None, "responses": 7, "prompt_id": "p1"}
            await client.ask("a", ["b"], **columns)
            assert client.url == f"http://{address}/v1/judges/strict"
            assert read_credentials(judge.headers[0]) == ("me", "secret-0123456789")
            assert judge.asked[0].pop("prompt_id").startswith("p1/")
            assert judge.asked[0] == {"prompt": "a", "responses": ["b"], "level": 3, "steps": [1, 2]}
            with pytest.raises(ValueError, match=r"picture: can't be sent as JSON .*columns=\['reference'\]"):
                await client.ask("a", ["b"], picture=object())
            await JudgeClient(f"http://:p%2Fw@{address}").ask("a", ["b"])
            assert read_credentials(judge.headers[1]) == ("", "p/w")
            judge.script.append(401)
            with pytest.raises(ValueError, match=r"^(?!.*p%2Fw)http://127.*status 401"):
                await JudgeClient(f"http://:p%2Fw@{address}").ask("a", ["b"])

    asyncio.run(check())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"url": "127.0.0.1:8710"}, "url: expected the address of a service"),
        ({"url": "http://h", "timeout_s": 0}, "timeout_s: must be above 0"),
        ({"url": "http://h", "key_env": "NO_SUCH_KEY"}, "key_env: the environment variable NO_SUCH_KEY is empty"),
    ],
)
def test_a_wrong_setting_is_named(given: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        JudgeClient(**given)


def test_messages_become_texts() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    written = write_plain(
        [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]},
        ]
    )
    shown = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert written == [{"role": "assistant", "content": shown}, {"role": "tool", "content": "42"}]
    with pytest.raises(ValueError, match="content of type 'image'"):
        write_plain([{"role": "user", "content": [{"type": "image"}]}])


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
def test_trl_s_client_needs_one_http_library_and_nothing_else(library: str) -> None:
    """As beside a trainer, by `pip install --no-deps`: every other library of ours can't be imported."""
    script = f"""
import importlib.abc, importlib.metadata, re, sys
ours = importlib.metadata.requires("grmpipe")
blocked = {{re.match(r"[\\w-]+", one)[0].replace("-", "_").replace("pyyaml", "yaml") for one in ours}}
blocked = blocked - {{"grmpipe"}} | {{"hydra", "httpx2"}}
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in blocked - {{{library!r}}}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
from grmpipe.clients.trl import JudgeReward
JudgeReward("https://judge.example")
print(sorted(blocked & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == f"['{library}']\n", done.stderr
