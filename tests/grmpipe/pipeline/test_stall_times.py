"""Every second of a step counts once, for the cause that the learner really waited for."""

from __future__ import annotations

import asyncio

import pytest

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.pipeline.counters import FlowCounters
from grmpipe.pipeline.stall_times import GroupSupply, StallTimes, StallTracker


def near(seconds: float) -> object:
    return pytest.approx(seconds, abs=1e-3)


def test_a_wait_is_the_policys_while_a_rollout_is_missing_and_the_judges_from_then_on() -> None:
    async def go() -> StallTimes:
        stalls = StallTracker()
        stalls.groups_changed(GroupSupply(lacks_due=True))
        with stalls.track_wait(1):
            await asyncio.sleep(3)
            stalls.groups_changed(GroupSupply(num_judging=1))
            await asyncio.sleep(2)
            stalls.groups_changed(GroupSupply(num_ready=1))
        stalls.groups_changed(GroupSupply())
        return stalls.close_step(5.0)

    times = run_virtually(go)
    assert (times.rollouts_s, times.verdicts_s, times.for_groups_s) == (near(3), near(2), near(5))


def test_batch_that_lacks_a_rollout_waits_for_the_policy() -> None:
    async def go() -> StallTimes:
        stalls = StallTracker()
        stalls.groups_changed(GroupSupply(lacks_due=True, num_judging=1))
        with stalls.track_wait(2):
            await asyncio.sleep(4)
            stalls.groups_changed(GroupSupply(num_judging=2))
            await asyncio.sleep(1)
        return stalls.close_step(5.0)

    times = run_virtually(go)
    assert (times.rollouts_s, times.verdicts_s) == (near(4), near(1))


def test_groups_of_a_later_batch_cause_no_wait() -> None:
    async def go() -> StallTimes:
        stalls = StallTracker()
        stalls.groups_changed(GroupSupply(num_judging=1))
        with stalls.track_wait(1):
            await asyncio.sleep(2)
        return stalls.close_step(2.0)

    assert run_virtually(go).verdicts_s == near(2)


def test_a_straggler_that_is_due_is_waited_for_although_others_wait_for_verdicts() -> None:
    async def go() -> StallTimes:
        stalls = StallTracker()
        stalls.groups_changed(GroupSupply(lacks_due=True, num_judging=1))
        with stalls.track_wait(1):
            await asyncio.sleep(2)
            stalls.groups_changed(GroupSupply(num_judging=1))  # the due group is dropped: now any group will do
            await asyncio.sleep(1)
        return stalls.close_step(3.0)

    times = run_virtually(go)
    assert (times.rollouts_s, times.verdicts_s) == (near(2), near(1))


def test_engines_idle_for_the_learner_only_while_it_works_and_only_if_its_step_makes_room() -> None:
    async def go() -> StallTimes:
        stalls = StallTracker()
        with stalls.track_learner(makes_room=True):
            with stalls.engines:
                await asyncio.sleep(2)
            await asyncio.sleep(3)
        await asyncio.sleep(5)  # between two calls of the learner: counts for none
        with stalls.track_learner(makes_room=False):
            await asyncio.sleep(7)
        with stalls.track_push():
            await asyncio.sleep(1)
        return stalls.close_step(18.0)

    times = run_virtually(go)
    assert (times.training_s, times.weight_sync_s, times.for_groups_s) == (near(3), near(1), 0.0)


def test_a_closed_step_leaves_nothing_to_the_next() -> None:
    async def go() -> StallTimes:
        stalls = StallTracker()
        with stalls.track_wait(1):
            await asyncio.sleep(1)
        stalls.close_step(1.0)
        return stalls.close_step(0.0)

    assert run_virtually(go) == StallTimes()


def test_waits_add_up_over_a_resume_and_are_optional_in_a_checkpoint() -> None:
    counters, restored = FlowCounters(), FlowCounters()
    counters.add_stalls(StallTimes(steps_s=10.0, verdicts_s=4.0), push_pause_s=0.25)
    counters.close_step()
    restored.restore(counters.total.to_dict(), {})
    restored.add_stalls(StallTimes(steps_s=5.0, verdicts_s=1.0), push_pause_s=0.5)
    assert restored.total_so_far().stalls == StallTimes(steps_s=15.0, verdicts_s=5.0)
    assert restored.total_so_far().push_pause_s == 0.75
    old = {name: value for name, value in counters.total.to_dict().items() if name != "stalls"}
    restored.restore(old, {})
    assert restored.total.stalls == StallTimes()
