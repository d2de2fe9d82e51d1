"""Two learners in step: neither runs ahead of the other, and neither waits forever."""

from __future__ import annotations

import asyncio
import random

import pytest

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.run.features.cotrain.cotraining import StepPacer


@pytest.mark.parametrize(("warmup", "rate"), [(0, 1.0), (3, 1.0), (2, 0.5), (0, 0.3), (1, 2.5)])
def test_both_trainings_reach_their_last_step_and_keep_their_ratio(warmup: int, rate: float) -> None:
    async def go() -> None:
        pacer = StepPacer(warmup_steps=warmup, grm_steps_per_policy_step=rate)
        rng = random.Random(0)

        async def policy() -> None:
            for version in range(1, 21):
                await pacer.until_policy_may_step()
                assert pacer.grm_version >= warmup + int(rate * (version - 1) + 1e-9)
                await asyncio.sleep(rng.random())
                pacer.policy_stepped(version)

        async def grm() -> None:
            for version in range(1, warmup + int(rate * 20 + 1e-9) + 1):
                await pacer.until_grm_may_step()
                assert version <= warmup + rate * (pacer.policy_version + 1) + 1e-9
                await asyncio.sleep(rng.random())
                pacer.grm_stepped(version)

        async with asyncio.timeout(1e6):
            await asyncio.gather(policy(), grm())

    run_virtually(go)


def test_the_policy_waits_for_the_warm_up_and_the_grm_doesnt_wait_for_the_policy_in_it() -> None:
    async def go() -> None:
        pacer = StepPacer(warmup_steps=3, grm_steps_per_policy_step=1.0)
        waiting = asyncio.ensure_future(pacer.until_policy_may_step())
        for version in (1, 2, 3):
            await asyncio.wait_for(pacer.until_grm_may_step(), timeout=1.0)
            assert not pacer.is_warm
            assert not waiting.done()
            pacer.grm_stepped(version)
        await asyncio.wait_for(waiting, timeout=1.0)
        assert pacer.is_warm

    run_virtually(go)


def test_steps_that_had_nothing_to_learn_from_are_neither_waited_nor_made_up_for() -> None:
    pacer = StepPacer(warmup_steps=0, grm_steps_per_policy_step=1.0)
    pacer.policy_stepped(3)
    assert not pacer.policy_may_step
    pacer.skip_due()
    assert pacer.policy_may_step
    pacer.grm_stepped(1)
    pacer.policy_stepped(4)
    assert pacer.policy_may_step and pacer.grm_version == 1
    pacer.policy_stepped(5)
    assert not pacer.policy_may_step
