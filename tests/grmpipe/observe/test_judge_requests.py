"""judge_requests.jsonl: what is noted before a request is sent outlives a kill; totals by model and purpose."""

from __future__ import annotations

import asyncio
from dataclasses import astuple
from pathlib import Path

import pytest

from grmpipe.judge.grm import set_purpose
from grmpipe.models.types import EngineDied, Usage
from grmpipe.observe.judge_requests import JUDGE_REQUESTS, RequestCounts, RequestJournal, read_totals
from grmpipe.run.build.start_models import LoggedScorer


def test_requests_in_flight_at_a_kill_stay_counted_with_unknown_tokens(tmp_path: Path) -> None:
    before = RequestJournal(tmp_path)  # never closed
    grm = before.of_model("grm")
    first, *_ = (grm.begin_request(retry=False) for _ in range(3))
    grm.end_request(first, Usage(prompt=100, cached=64, sampled=7))
    with (tmp_path / JUDGE_REQUESTS).open("ab") as file:
        file.write(b'{"n":2,"pro')  # torn by the kill
    after = RequestJournal(tmp_path)
    grm = after.of_model("grm")
    grm.end_request(grm.begin_request(retry=True), Usage(prompt=10, sampled=1))
    counts = RequestCounts(requests=4, retries=1, prompt_tokens=110, cached_tokens=64, sampled_tokens=8, unknown=2)
    assert after.totals.by_purpose == {"training": counts} == read_totals(tmp_path).by_purpose
    assert not after.failures


def test_lines_of_wrong_types_count_nothing_and_stop_no_request(tmp_path: Path) -> None:
    good = '{"n":1,"model":"grm","purpose":"training"}\n{"n":1,"prompt":5,"cached":0,"sampled":2}\n'
    bad = (
        '{"n":"2","model":"grm","purpose":"training"}\n{"n":[1],"prompt":5}\n{"n":1,"prompt":"5"}\n{"n":3}\n'
        '{"n":4,"model":7,"purpose":"training"}\n{"n":5,"model":[],"purpose":"training"}\n'
    )
    (tmp_path / JUDGE_REQUESTS).write_text(bad + good)
    journal = RequestJournal(tmp_path)
    assert journal.totals.of("grm", "training") == RequestCounts(requests=1, prompt_tokens=5, sampled_tokens=2)
    assert journal.of_model("grm").begin_request(retry=False) == 2


def test_a_request_that_never_left_is_taken_off_again(tmp_path: Path) -> None:
    journal = RequestJournal(tmp_path)
    grm = journal.of_model("grm")
    grm.unsent(grm.begin_request(retry=True))
    assert journal.totals.of("grm", "training") == RequestCounts()


def test_requests_belong_to_the_purpose_of_the_task_that_asks(tmp_path: Path) -> None:
    """Tasks that are begun for an evaluation go on beside those of the training."""
    journal = RequestJournal(tmp_path)
    grm, other = journal.of_model("grm"), journal.of_model("other")

    async def ask() -> None:
        await asyncio.sleep(0)
        grm.end_request(grm.begin_request(retry=False), Usage(prompt=1))

    async def go() -> None:
        with set_purpose("held_out"):
            evaluation = [asyncio.create_task(ask()) for _ in range(3)]
        await asyncio.gather(ask(), ask(), *evaluation)
        with set_purpose("monitoring"):
            other.end_request(other.begin_request(retry=False), Usage(sampled=5))

    asyncio.run(go())
    asked = {m: {name: counts.requests for name, counts in own.items()} for m, own in journal.totals.by_model.items()}
    assert asked == {"grm": {"training": 2, "held_out": 3}, "other": {"monitoring": 1}}
    assert journal.totals.texts == [
        "grm: 5 requests (training 2, held-out 3), 5 prompt tokens, 0 sampled",
        "other: 1 requests (monitoring 1), 0 prompt tokens, 5 sampled",
    ]


def test_a_model_that_no_request_reached_is_told_without_purposes(tmp_path: Path) -> None:
    journal = RequestJournal(tmp_path)
    grm = journal.of_model("grm")
    grm.unsent(grm.begin_request(retry=False))
    assert journal.totals.texts == ["grm: 0 requests, 0 prompt tokens, 0 sampled"]


def test_a_full_disk_costs_the_file_and_not_the_totals(tmp_path: Path) -> None:
    (tmp_path / JUDGE_REQUESTS).mkdir()
    journal = RequestJournal(tmp_path)
    grm = journal.of_model("grm")
    grm.end_request(grm.begin_request(retry=False), Usage(prompt=3))
    assert astuple(journal.totals.of("grm", "training")) == (1, 0, 3, 0, 0, 0)
    assert journal.failures[JUDGE_REQUESTS] >= 2


def test_a_scorer_here_counts_its_tokens_unless_it_died(tmp_path: Path) -> None:
    journal = RequestJournal(tmp_path)

    class Dying:
        async def score(self, token_ids: object, priority: int = 0) -> float:
            if priority:
                raise EngineDied
            return 0.5

    async def go() -> None:
        scorer = LoggedScorer(Dying(), journal.of_model("rm"))
        assert await scorer.score([1, 2, 3]) == 0.5
        with pytest.raises(EngineDied):
            await scorer.score([1, 2], 1)

    asyncio.run(go())
    assert astuple(journal.totals.of("rm", "training")) == (2, 0, 3, 0, 0, 1)
