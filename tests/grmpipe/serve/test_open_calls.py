"""Equal questions at the same time, and questions whose asker has gone."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from grmpipe.serve.open_calls import OpenCalls


class SlowJudge:
    """Counts what it was asked and what it ended."""

    def __init__(self, takes_s: float = 0.05) -> None:
        self.begun, self.ended = Counter[str](), Counter[str]()
        self._takes_s = takes_s

    async def judge(self, question: str) -> str:
        self.begun[question] += 1
        await asyncio.sleep(self._takes_s)
        self.ended[question] += 1
        if question == "broken":
            raise ValueError("it can't be judged")
        return question.upper()


def test_equal_questions_at_the_same_time_are_asked_once_later_ones_again() -> None:
    async def run() -> None:
        judge, calls = SlowJudge(), OpenCalls[str](30)
        answers = await asyncio.gather(*(calls.ask(["a"], "", lambda: judge.judge("a")) for _ in range(5)))
        assert answers == ["A"] * 5 and judge.begun["a"] == 1
        assert await calls.ask(["a"], "", lambda: judge.judge("a")) == "A" and judge.begun["a"] == 2

    asyncio.run(run())


def test_two_questions_with_one_name_wait_for_each_other() -> None:
    async def run() -> None:
        judge, calls = SlowJudge(), OpenCalls[str](30)
        first = asyncio.create_task(calls.ask(["a"], "p", lambda: judge.judge("a")))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(calls.ask(["b"], "p", lambda: judge.judge("b")))
        await asyncio.sleep(0.01)
        assert not judge.begun["b"]
        assert [await first, await second] == ["A", "B"]

    asyncio.run(run())


def test_who_comes_back_gets_the_judgement_that_was_begun() -> None:
    async def run() -> None:
        judge, calls = SlowJudge(), OpenCalls[str](30)
        for wait_s in (0.01, 0.1):  # while it is judged, and after it
            asked = asyncio.create_task(calls.ask([wait_s], "", lambda: judge.judge("a")))
            await asyncio.sleep(0.01)
            asked.cancel()
            await asyncio.sleep(wait_s)
            assert await calls.ask([wait_s], "", lambda: judge.judge("a")) == "A"
        assert judge.begun["a"] == 2, "once for each"

    asyncio.run(run())


def test_what_nobody_waits_for_is_ended() -> None:
    async def run() -> None:
        judge, calls = SlowJudge(), OpenCalls[str](0.01)
        gone, stays = (asyncio.create_task(calls.ask(["a"], "", lambda: judge.judge("a"))) for _ in range(2))
        alone = asyncio.create_task(calls.ask(["b"], "", lambda: judge.judge("b")))
        await asyncio.sleep(0.01)
        gone.cancel()
        alone.cancel()
        assert await stays == "A", "one of two has gone"
        await asyncio.sleep(0.1)
        assert judge.begun == {"a": 1, "b": 1} and judge.ended == {"a": 1}

    asyncio.run(run())


def test_an_error_goes_to_all_who_asked_and_isn_t_kept() -> None:
    async def run() -> None:
        judge, calls = SlowJudge(), OpenCalls[str](30)
        for _ in range(2):
            found = await asyncio.gather(
                *(calls.ask(["a"], "p", lambda: judge.judge("broken")) for _ in range(2)), return_exceptions=True
            )
            assert [str(one) for one in found] == ["it can't be judged"] * 2
        assert judge.begun["broken"] == 2

    asyncio.run(run())


def test_the_end_of_the_service_ends_what_is_open() -> None:
    async def run() -> None:
        judge, calls = SlowJudge(takes_s=60), OpenCalls[str](30)
        asked = asyncio.create_task(calls.ask(["a"], "p", lambda: judge.judge("a")))
        await asyncio.sleep(0.01)
        await calls.close()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(run())
