"""Whose question goes first, and which is refused."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from grmpipe.models.request_gates import PrioritySemaphore
from grmpipe.serve.admission import Admission, Refused


def test_a_client_with_ten_times_the_questions_leaves_the_other_its_half() -> None:
    """Both always have all their questions in flight, of which the judge takes eight at once."""
    done = Counter[str]()

    async def run() -> None:
        admission, places = Admission(most=4096), PrioritySemaphore(8)

        async def ask_again_and_again(client: str) -> None:
            while done.total() < 4000:
                with admission.admit(client, 1) as priority:
                    async with places.enter(priority):
                        await asyncio.sleep(0)
                    done[client] += 1

        async with asyncio.TaskGroup() as tasks:
            for client, questions in (("large", 200), ("small", 20)):
                for _ in range(questions):
                    tasks.create_task(ask_again_and_again(client))

    asyncio.run(run())
    assert 0.45 < done["small"] / done.total() < 0.55, done


def test_a_client_that_was_idle_saves_nothing_up_and_owes_nothing() -> None:
    admission = Admission(most=4096)
    for _ in range(10):
        with admission.admit("busy", 4):
            pass
    with admission.admit("busy", 4) as busy, admission.admit("new", 4) as new:
        assert new <= busy <= new + 4
    assert admission.in_flight == 0


def test_who_floods_the_service_is_refused_and_nobody_else() -> None:
    admission = Admission(most=8)
    with admission.admit("large", 8):
        flooded = pytest.raises(Refused, match=r"8 of your responses .*serve\.max_in_flight=8")
        with flooded as refused, admission.admit("large", 1):
            pass
        assert refused.value.status == 429
        with admission.admit("small", 4), pytest.raises(Refused), admission.admit("small", 1):
            pass
    with admission.admit("large", 8):
        assert admission.in_flight == 8
