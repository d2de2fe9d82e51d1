"""Every second of a step has one owner, and the owner is the one that the learner really waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import looptime
import pytest

from grmpipe.pipeline.counters import Tally
from grmpipe.pipeline.stall_times import GroupSupply, Waits, WaitTimes


def virtually(go: Callable[[], Coroutine[object, object, WaitTimes]]) -> WaitTimes:
    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        return runner.run(go())


def near(seconds: float) -> object:
    return pytest.approx(seconds, abs=1e-3)


def test_a_wait_is_the_policys_while_a_rollout_is_missing_and_the_judges_from_then_on() -> None:
    async def go() -> WaitTimes:
        waits = Waits(max_staleness=0)
        waits.groups_changed(GroupSupply(oldest_rolling_out=0))
        with waits.wanting(1, 0):
            await asyncio.sleep(3)
            waits.groups_changed(GroupSupply(num_judging=1))
            await asyncio.sleep(2)
            waits.groups_changed(GroupSupply(num_ready=1))
        waits.groups_changed(GroupSupply())
        return waits.close_step(5.0)

    times = virtually(go)
    assert (times.policy_s, times.judge_s, times.for_groups_s) == (near(3), near(2), near(5))


def test_a_batch_that_lacks_a_rollout_waits_for_the_policy_whatever_is_being_judged() -> None:
    async def go() -> WaitTimes:
        waits = Waits(max_staleness=0)
        waits.groups_changed(GroupSupply(oldest_rolling_out=0, num_judging=1))
        with waits.wanting(2, 0):
            await asyncio.sleep(4)
            waits.groups_changed(GroupSupply(num_judging=2))
            await asyncio.sleep(1)
        return waits.close_step(5.0)

    times = virtually(go)
    assert (times.policy_s, times.judge_s) == (near(4), near(1))


def test_groups_of_a_later_batch_that_still_roll_out_hold_nobody_up() -> None:
    async def go() -> WaitTimes:
        waits = Waits(max_staleness=1)
        waits.groups_changed(GroupSupply(oldest_rolling_out=1, num_judging=1))
        with waits.wanting(1, 1):
            await asyncio.sleep(2)
        return waits.close_step(2.0)

    assert virtually(go).judge_s == near(2)


def test_a_straggler_that_is_due_is_waited_for_although_others_wait_for_verdicts() -> None:
    async def go() -> WaitTimes:
        waits = Waits(max_staleness=1)
        waits.groups_changed(GroupSupply(oldest_rolling_out=0, num_judging=1))
        with waits.wanting(1, 1):
            await asyncio.sleep(2)
            waits.groups_changed(GroupSupply(num_judging=1))  # what was due is dropped: from now on any group will do
            await asyncio.sleep(1)
        return waits.close_step(3.0)

    times = virtually(go)
    assert (times.policy_s, times.judge_s) == (near(2), near(1))


def test_engines_idle_for_the_learner_only_while_it_works_and_only_if_its_step_makes_room() -> None:
    async def go() -> WaitTimes:
        waits = Waits(max_staleness=0)
        with waits.learning(makes_room=True):
            with waits.engines:
                await asyncio.sleep(2)
            await asyncio.sleep(3)
        await asyncio.sleep(5)  # nobody's: between two calls of the learner
        with waits.learning(makes_room=False):
            await asyncio.sleep(7)
        with waits.pushing():
            await asyncio.sleep(1)
        return waits.close_step(18.0)

    times = virtually(go)
    assert (times.batch_s, times.weights_s, times.for_groups_s) == (near(3), near(1), 0.0)


def test_a_closed_step_leaves_nothing_to_the_next() -> None:
    async def go() -> WaitTimes:
        waits = Waits(max_staleness=0)
        with waits.wanting(1, 0):
            await asyncio.sleep(1)
        waits.close_step(1.0)
        return waits.close_step(0.0)

    assert virtually(go) == WaitTimes()


def test_waits_go_on_over_a_resume_and_a_checkpoint_from_before_they_were_counted_is_read() -> None:
    tally, restored = Tally(), Tally()
    tally.waited(WaitTimes(steps_s=10.0, judge_s=4.0))
    tally.close_step()
    restored.restore(tally.saved())
    restored.waited(WaitTimes(steps_s=5.0, judge_s=1.0))
    assert restored.total_so_far().waits == WaitTimes(steps_s=15.0, judge_s=5.0)
    old = {name: value for name, value in tally.saved().items() if name != "waits"}
    restored.restore(old)
    assert restored.total.waits == WaitTimes()
