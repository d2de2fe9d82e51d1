"""One sentence names the longest stall, its share and a key to change; nothing if none dominates."""

from __future__ import annotations

import dataclasses

import pytest

from grmpipe.config.run_sections import RunSections
from grmpipe.pipeline.stall_times import Setup, StallTimes, bottleneck

SETUP = Setup(judge="here", num_judgements=4, max_staleness=1)


def test_the_longest_wait_is_named_with_its_share_and_what_to_change() -> None:
    said = bottleneck(
        StallTimes(steps_s=100.0, verdicts_s=41.0, rollouts_s=20.0, training_s=3.0, weight_sync_s=5.0), SETUP
    )
    assert said == (
        "the learner waited for judging for 41 % of the step time: "
        "give grm more slots (placement.roles.grm.replicas), or lower judge.num_judgements"
    )


@pytest.mark.parametrize(
    ("times", "key"),
    [
        (StallTimes(steps_s=10.0, rollouts_s=5.0), "placement.roles.policy.replicas"),
        (StallTimes(steps_s=10.0, verdicts_s=5.0), "placement.roles.grm.replicas"),
        (StallTimes(steps_s=10.0, training_s=5.0), "placement.roles.learner.replicas"),
        (StallTimes(steps_s=10.0, weight_sync_s=5.0), "train.groups_per_batch"),
    ],
)
def test_each_wait_has_advice_of_its_own(times: StallTimes, key: str) -> None:
    said = bottleneck(times, SETUP)
    assert said is not None
    assert key in said


@pytest.mark.parametrize(
    "times",
    [
        StallTimes(),
        StallTimes(steps_s=100.0),
        StallTimes(steps_s=100.0, verdicts_s=15.0),  # too small
        StallTimes(steps_s=100.0, verdicts_s=30.0, rollouts_s=29.0),  # neither dominates
    ],
)
def test_nothing_is_said_when_nothing_dominates(times: StallTimes) -> None:
    assert bottleneck(times, SETUP) is None


def test_synchronous_run_gets_the_advice_to_overlap_and_an_asynchronous_one_does_not() -> None:
    times = StallTimes(steps_s=10.0, training_s=5.0)
    synchronous = bottleneck(times, dataclasses.replace(SETUP, max_staleness=0))
    assert "train.max_staleness=1" in str(synchronous)
    assert "train.max_staleness" not in str(bottleneck(times, SETUP))


def test_a_judge_outside_has_no_slots_to_be_given_and_one_judgement_can_t_be_fewer() -> None:
    times = StallTimes(steps_s=10.0, verdicts_s=5.0)
    outside = Setup(judge="outside", num_judgements=1, max_staleness=1)
    assert "engine.openai.max_connections" in str(bottleneck(times, outside))
    assert "placement" not in str(bottleneck(times, outside))
    assert "num_judgements" not in str(bottleneck(times, outside))
    limited = dataclasses.replace(outside, rate_limited=True)
    assert "requests_per_minute" in str(bottleneck(times, limited))


def test_a_role_whose_slots_move_has_no_replicas_to_add() -> None:
    setup = dataclasses.replace(SETUP, elastic_pools={"policy": "engines", "grm": "engines"})
    for times in (StallTimes(steps_s=10.0, rollouts_s=5.0), StallTimes(steps_s=10.0, verdicts_s=5.0)):
        said = str(bottleneck(times, setup))
        assert "give the elastic pool more slots (placement.pools.engines.slots)" in said
        assert "replicas" not in said


def test_more_slots_on_cores_that_are_all_taken_need_another_machine() -> None:
    times, taken = StallTimes(steps_s=10.0, verdicts_s=5.0), dataclasses.replace(SETUP, cores_taken=2)
    more = "give grm more slots, on a machine with more than these 2 cores (placement.roles.grm.replicas)"
    assert more in str(bottleneck(times, taken))
    assert "cores" not in str(bottleneck(times, SETUP))


def test_every_key_that_is_advised_exists() -> None:
    keys = {
        "rollout.max_new_tokens", "judge.num_judgements", "judge.max_new_tokens", "judge.rule", "sync.transport",
        "train.groups_per_batch", "train.max_staleness", "engine.openai.max_connections",
        "engine.openai.requests_per_minute", "engine.openai.tokens_per_minute", "placement.roles",
    }  # fmt: skip
    for key in keys:
        node: object = RunSections()
        for name in key.split("."):
            node = getattr(node, name)


def test_busiest_judge_model_needs_more_slots() -> None:
    told = bottleneck(StallTimes(steps_s=10.0, verdicts_s=5.0), dataclasses.replace(SETUP, grms=("grm", "safety")))
    assert told is not None
    assert "give more slots to the busiest of grm, safety (busy_s; placement.roles.<name>.replicas)" in told
    one = bottleneck(StallTimes(steps_s=10.0, verdicts_s=5.0), dataclasses.replace(SETUP, grms=("safety",)))
    assert one is not None and "give safety more slots (placement.roles.safety.replicas)" in one


def test_environments_with_hosts_of_their_own_may_get_more_of_them() -> None:
    times = StallTimes(steps_s=10.0, rollouts_s=5.0, envs_s=5.0)
    assert "placement.roles.env" not in str(bottleneck(times, SETUP))
    hosted = bottleneck(times, dataclasses.replace(SETUP, env_hosts=True))
    assert "the learner waited for environments for 50 %" in str(hosted)
    assert "give env more slots (placement.roles.env.replicas)" in str(hosted)
