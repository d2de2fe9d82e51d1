"""The service of a judge: what it answers, to whom, and how it ends."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trainer_service
from aiohttp import BasicAuth, ClientSession, ClientTimeout

import grmpipe
from grmpipe.config.budget import BudgetConfig
from grmpipe.data.rows import Findings, Row
from grmpipe.judge.verdict import make_failure, outcome, report_failures, report_score
from grmpipe.models.settings import PriceConfig
from grmpipe.models.types import BudgetSpent
from grmpipe.observe.journal import read_journal
from grmpipe.observe.judge_requests import RequestTotals
from grmpipe.observe.recorder import JudgedSibling
from grmpipe.observe.spending import Spending
from grmpipe.run.tasks.score import parse_responses
from grmpipe.run.tasks.serve import bind
from grmpipe.serve.open_calls import OpenCalls
from grmpipe.serve.service import AskByName

ROOT = Path(__file__).parents[3]
ROW = {"prompt": "6 x 7?", "responses": ["42", "no"]}


async def judge_by_length(row: Row, name: str = "reward", priority: int = 0) -> Sequence[JudgedSibling]:
    """The length is the reward; "no" fails."""
    group = parse_responses(row, "judge", "g", Findings(Path("judge")))
    return [
        JudgedSibling(
            group_id="g",
            sibling=one.sibling,
            report=report_failures(make_failure("unparseable", "it ends with 'hm'", 1))
            if one.text == "no"
            else report_score(outcome(one, float(len(one.text))), float(len(one.text)), {}),
        )
        for one in group.rollouts
    ]


def serving(
    judge: AskByName = judge_by_length, *overrides: str, spending: Spending | None = None
) -> AbstractAsyncContextManager[ClientSession]:
    return trainer_service.serving(*overrides, judge=judge, spending=spending)


async def post(session: ClientSession, row: object, **options: Any) -> tuple[int, Any]:
    body = row if isinstance(row, bytes) else json.dumps(row).encode()
    async with session.post("/v1/judge", data=body, **options) as answer:
        return answer.status, await answer.json()


def test_each_response_gets_a_verdict_or_why_there_is_none() -> None:
    async def check() -> None:
        async with serving() as session:
            status, found = await post(session, ROW)
            right, failed = found["verdicts"]
            assert status == 200 and right["reward"] == 2 and right["num_judgements"] == 1
            assert failed == {
                "reward": None, "score": None, "critiques": [], "failed": "unparseable", "detail": "it ends with 'hm'"
            }  # fmt: skip
            async with session.get("/metrics") as metrics:
                lines = (await metrics.text()).splitlines()
            assert "grmpipe_responses_judged_total 2" in lines
            assert 'grmpipe_responses_failed_total{cause="unparseable"} 1' in lines
            assert 'grmpipe_requests_total{status="200"} 1' in lines

    asyncio.run(check())


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "judge: not JSON"),
        (b"\xff", 400, "judge: not JSON in UTF-8"),
        (b"[]", 400, "expected a JSON object"),
        ({"prompt": "a"}, 400, "exactly one of the fields response and responses"),
        ({"prompt": "a", "responses": ["x", 3]}, 400, r"responses\[1\]: expected a text"),
        ({"prompt": "a", "responses": ["\ud83d"]}, 400, "half of a surrogate pair"),
        (b'{"prompt": "a", "response": "b", "reference": NaN}', 400, "reference: expected a text or a finite number"),
        ({"prompt": "a", "responses": ["x" * 1_100_000]}, 413, "Too Large"),
        ({"prompt": "a", "responses": ["x"] * 5}, 429, r"serve\.max_in_flight=4"),
    ],
)
def test_a_bad_request_is_answered_by_its_field(body: object, status: int, words: str) -> None:
    async def check() -> None:
        async with serving(judge_by_length, "serve.max_body_mb=1", "serve.max_in_flight=4") as session:
            found, answer = await post(session, body)
            assert found == status and re.search(words, answer["error"])
            assert (await post(session, ROW))[0] == 200, "nothing ends the service"

    asyncio.run(check())


def test_a_misspelt_field_is_a_column_and_the_answer_and_the_log_say_so(caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    async def judge(row: Row, name: str, priority: int) -> Sequence[JudgedSibling]:
        seen.append(row)
        return await judge_by_length(row)

    async def check() -> None:
        async with serving(judge) as session:
            asked = ROW | {"refernce": "42", "prompt_id": "p", "prompt_ids": [1], "difficulty": "hard"}
            for _ in range(2):
                status, answer = await post(session, asked)
                assert status == 200 and len(answer["verdicts"]) == 2 and seen[-1]["refernce"] == "42"
                assert answer["warnings"] == ["field 'refernce' is taken as a column; is it reference?"]
            assert "warnings" not in (await post(session, ROW | {"reference": "42", "references": ["42"]}))[1]

    asyncio.run(check())
    assert [one.getMessage() for one in caplog.records if "taken as a column" in one.getMessage()] == [
        "a request's field 'refernce' is taken as a column; is it reference?"
    ], "once for each name"


def test_what_is_in_flight_is_bounded_and_freed() -> None:
    async def check() -> None:
        going_on = asyncio.Event()

        async def slow(row: Row, name: str, priority: int) -> Sequence[JudgedSibling]:
            await going_on.wait()
            return await judge_by_length(row)

        async with serving(slow, "serve.max_in_flight=3") as session:
            first = asyncio.create_task(post(session, ROW))
            await asyncio.sleep(0.1)
            async with session.post("/v1/judge", json=ROW) as refused:
                assert refused.status == 429 and refused.headers["Retry-After"]
            going_on.set()
            assert (await first)[0] == 200 and (await post(session, ROW))[0] == 200

    asyncio.run(check())


def test_no_text_of_a_judge_and_no_error_ends_the_service() -> None:
    async def odd(row: Row, name: str, priority: int) -> Sequence[JudgedSibling]:
        if row["prompt"] == "broken":
            raise KeyError("x")
        (one,) = (await judge_by_length(row))[1:]
        return [replace(one, report=report_failures(make_failure("unparseable", "it ends with \ud83d", 1)))]

    async def check() -> None:
        async with serving(odd) as session:
            status, found = await post(session, ROW)
            assert status == 200 and found["verdicts"][0]["detail"] == "it ends with \ud83d"
            status, found = await post(session, ROW | {"prompt": "broken"})
            assert status == 500 and "run.log" in found["error"] and "KeyError" not in found["error"]

    asyncio.run(check())


def test_without_a_key_only_this_machine_is_answered() -> None:
    async def check() -> None:
        async with serving() as session:
            assert (await post(session, ROW, headers={"Host": "evil.example"}))[0] == 403
            assert (await post(session, ROW, headers={"Host": "localhost:1"}))[0] == 200

    asyncio.run(check())


def test_a_question_ends_after_its_client_and_an_equal_one_takes_it_over() -> None:
    async def check() -> None:
        begun, ended = [], []

        async def slow(row: Row, name: str, priority: int) -> Sequence[JudgedSibling]:
            async def judge() -> Sequence[JudgedSibling]:
                begun.append(row)
                await asyncio.sleep(0.3)
                ended.append(row)
                return await judge_by_length(row)

            return await calls.ask(row, "", judge)

        calls = OpenCalls[Sequence[JudgedSibling]](0.1)
        async with serving(slow) as session:
            for row in (ROW, ROW, ROW | {"prompt": "another"}):
                with pytest.raises(asyncio.TimeoutError):
                    await post(session, row, timeout=ClientTimeout(total=0.05))
            assert (await post(session, ROW))[0] == 200
            await asyncio.sleep(0.3)
            assert len(begun) == 2 and ended == [ROW]

    asyncio.run(check())


def test_a_key_is_asked_for_as_a_bearer_or_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-0123456789")

    async def check() -> None:
        async with serving(judge_by_length, "serve.key_env=JUDGE_KEY") as session:
            basic = base64.b64encode(b"me:secret-0123456789").decode()
            for given, status in (
                ("Bearer secret-0123456789", 200), (f"Basic {basic}", 200), ("Bearer secret", 401), ("Basic %%", 401),
                ("", 401), ("Bearer \u00e9", 401),
            ):  # fmt: skip
                headers = {"Authorization": given} if given else {}
                assert (await post(session, ROW, headers=headers))[0] == status, given
            async with session.get("/health") as health:
                assert (health.status, (await health.json())["status"]) == (200, "ok")
            async with session.get("/v1/judges") as judges:
                assert judges.status == 401

    asyncio.run(check())


def test_a_judge_that_fails_too_often_is_degraded_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with serving() as session:
            for _ in range(70):
                await post(session, {"prompt": "a", "response": "no"})
            (said,) = [one.message for one in caplog.records if one.name.startswith("grmpipe")]
            assert said == "of the latest 64 responses 64 have no verdict; the last one: unparseable: it ends with 'hm'"
            async with session.get("/health") as health:
                assert (await health.json())["status"] == "degraded"

    asyncio.run(check())


def test_an_open_door_needs_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(grmpipe.ConfigError, match=r"serve\.host: .*type serve\.key_env="):
        grmpipe.compose(overrides=["task=serve", "serve.host=0.0.0.0"])
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = grmpipe.compose(overrides=["task=serve", f"serve.port={other.getsockname()[1]}"])
        with pytest.raises(grmpipe.ConfigError, match=r"serve\.port: 127.0.0.1:[0-9]+ can't be taken \(.* in use"):
            bind(taken.serve)
    monkeypatch.setenv("EMPTY_KEY", "")
    with pytest.raises(grmpipe.ConfigError, match=r"serve\.key_env: the environment variable EMPTY_KEY is empty"):
        grmpipe.launch(grmpipe.compose(overrides=["task=serve", "serve.host=0.0.0.0", "serve.key_env=EMPTY_KEY"]))


OWN = """
import time

def reward(prompts, completions, **columns):
    with open("asked", "a") as file:
        file.write("x")
    time.sleep(1)
    return [0.5] * len(completions)

def strict(prompts, completions, **columns):
    return [0.25] * len(completions)
"""


@contextmanager
def start_service(folder: Path, *overrides: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address."""
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    command = [
        sys.executable, str(ROOT / "launch.py"), "task=serve", "serve.port=0", "judge=function",
        "judge.function=own.reward", "+judge@judges.strict=function", "judges.strict.function=own.strict",
        "run_dir=judge", *overrides,
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=os.environ) as service:
        assert service.stdout is not None
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+", service.stdout.readline())
        try:
            yield service, url
        finally:
            service.terminate()


def test_a_service_is_asked_ends_what_it_judges_and_ends_well(tmp_path: Path) -> None:
    with start_service(tmp_path) as (service, url):

        async def ask() -> tuple[int, Any]:
            async with ClientSession(url) as session:
                async with session.post("/v1/judges/strict", json=ROW) as strict:
                    assert [one["reward"] for one in (await strict.json())["verdicts"]] == [0.25, 0.25]
                async with session.post("/v1/judges/nobody", json=ROW) as nobody:
                    assert nobody.status == 404 and "known: judge, reward, strict" in (await nobody.json())["error"]
                asked = asyncio.create_task(post(session, ROW | {"step": 3}, auth=BasicAuth("me", "")))
                await asyncio.sleep(0.5)
                service.send_signal(signal.SIGTERM)  # it is judging
                return await asked

        status, found = asyncio.run(ask())
        assert status == 200 and [one["reward"] for one in found["verdicts"]] == [0.5, 0.5]
        assert service.wait(timeout=60) == 0
    run = grmpipe.read_run(tmp_path / "judge")
    assert run.summary["status"] == "completed" and len(list(run.judgements)) == 4
    assert (run.summary["serving"]["calls"], run.summary["serving"]["responses"]) == (2, 4)
    assert run.summary["serving"]["seconds"]["p99"] < 1 < time_of(tmp_path, "reward")
    first, second = read_calls(tmp_path)
    assert (first["judge"], first["step"]) == ("strict", None)
    assert (second["judge"], second["step"], second["client"]) == ("reward", 3, "me")


def test_a_service_goes_on_where_it_was_and_answers_what_it_has_judged(tmp_path: Path) -> None:
    named = ROW | {"prompt_id": "p"}

    async def ask(url: str, *rows: Row) -> list[Any]:
        async with ClientSession(url) as session:
            return [(await post(session, row))[1] for row in rows]

    with start_service(tmp_path, "serve.cache_size=2") as (_, url):
        first = asyncio.run(ask(url, ROW, named, named))
    with start_service(tmp_path, "serve.cache_size=2", "resume=auto") as (_, url):
        assert asyncio.run(ask(url, named, ROW)) == [first[1], first[0]]
        asyncio.run(ask(url, {"prompt": "another", "response": "b"}))
    assert (tmp_path / "asked").read_text(encoding="utf-8") == "x" * 5, "one for each response"
    run = grmpipe.read_run(tmp_path / "judge")
    assert {one.group_id for one in run.judgements} == {"call0", "p", "call2"}
    assert [call["from_cache"] for call in read_calls(tmp_path)] == [False, False, True, True, True, False]


@pytest.mark.long
def test_a_judge_is_loaded_anew_between_two_groups(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    named = {"prompt": "3 + 4?", "responses": ["7", "8"], "prompt_id": "p"}

    async def ask(url: str) -> None:
        async with ClientSession(url) as session:

            async def load(path: str, judge: str = "judge") -> tuple[int, Any]:
                async with session.post(f"/v1/judges/{judge}/reload", json={"path": path}) as answer:
                    return answer.status, await answer.json()

            before = await post(session, named)
            assert await post(session, named) == before, "from the cache"
            status, found = await load(str(tmp_path))
            assert status == 400 and found["error"].startswith("grm.path:")
            status, found = await load("tiny://grm", judge="nobody")
            assert status == 400 and "nobody" in found["error"]
            loading = asyncio.create_task(load("tiny://weak_grm"))
            await asyncio.sleep(0.2)
            during = await post(session, named | {"prompt_id": "q"})
            assert await loading == (200, {"version": 1})
            after = await post(session, named)
            for (_, answer), version in ((before, 0), (during, 1), (after, 1)):
                assert [one["version"] for one in answer["verdicts"]] == [version, version]

    judge = ["judge=generative", "grm=tiny", "serve.cache_size=4"]
    with start_service(tmp_path, *judge) as (service, url):
        asyncio.run(ask(url))
        service.send_signal(signal.SIGTERM)
        assert service.wait(timeout=60) == 0
    assert "grmpipe: starting grm (" in capfd.readouterr().err
    run = grmpipe.read_run(tmp_path / "judge")
    assert run.summary["versions"] == {"grm": 1}
    assert run.summary["engines_replaced"] == {"grm": 0}
    versions = {one.group_id: one.report.verdict.grm_version for one in run.judgements}
    assert versions == {"p": 1, "q": 1}, "of two answers to one question the later one"


def test_what_a_service_judged_is_judged_again_like_a_run_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_logging: None
) -> None:
    monkeypatch.chdir(tmp_path)

    async def ask(url: str) -> None:
        async with ClientSession(url) as session:
            await post(session, ROW)

    with start_service(tmp_path) as (_, url):
        asyncio.run(ask(url))
    again = grmpipe.launch(
        grmpipe.compose(
            overrides=["task=rejudge", "run_dir=judge", "judge=function", "judge.function=own.strict", "tracking=none"]
        )
    )
    assert again is not None and [one.reward for one in again.judgements] == [0.25, 0.25]
    with pytest.raises(grmpipe.ConfigError, match=r"run_dir: 1 of 1 prompts have no reference .* type judge=pointwise"):
        grmpipe.launch(
            grmpipe.compose(
                overrides=["task=rejudge", "run_dir=judge", "judge=rule", "rejudge.name=rule", "tracking=none"]
            )
        )


def read_calls(folder: Path) -> list[dict[str, Any]]:
    return list(read_journal(folder / "judge" / "calls.jsonl"))


def time_of(folder: Path, judge: str) -> float:
    return next(call["seconds"] for call in read_calls(folder) if call["judge"] == judge)


def test_a_question_above_the_budget_gets_402_and_the_service_goes_on() -> None:
    async def check() -> None:
        async def spent(row: Row, name: str, priority: int) -> Sequence[JudgedSibling]:
            if row["prompt"] == "dear":
                raise BudgetSpent("budget.max_requests: 3 of 3 requests are spent")
            return await judge_by_length(row)

        totals = RequestTotals()
        totals.count({"n": 1, "model": "grm", "purpose": "evaluation"})
        totals.count({"n": 1, "prompt": 1000, "cached": 0, "sampled": 100})
        spending = Spending({"grm": PriceConfig(input=1, output=2)}, BudgetConfig(max_requests=3), totals)
        async with serving(spent, spending=spending) as session:
            status, answer = await post(session, {"prompt": "dear", "response": "42"})
            assert (status, answer) == (402, {"error": "budget.max_requests: 3 of 3 requests are spent"})
            assert (await post(session, ROW))[0] == 200
            async with session.get("/metrics") as metrics:
                lines = (await metrics.text()).splitlines()
        shown = {line.split()[0]: line.split()[1] for line in lines if line.startswith("grmpipe_endpoint_")}
        assert shown == {
            "grmpipe_endpoint_requests_total": "1", "grmpipe_endpoint_tokens_total": "1100",
            "grmpipe_endpoint_cost_usd_total": "0.0012", "grmpipe_endpoint_unknown_requests": "0",
            "grmpipe_endpoint_unknown_tokens": "0", "grmpipe_endpoint_unknown_cost_usd": "0",
            "grmpipe_endpoint_left_requests": "2",
        }  # fmt: skip

    asyncio.run(check())
