"""The bottleneck of a run and what to change, in one sentence, from its stall times. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from grmpipe.config.keys.entry_names import GRM
from grmpipe.pipeline.stall_times import StallTimes

MIN_SHARE = 0.2  # in the steps' time: a smaller share isn't reported
MIN_LEAD = 1.25  # times the second longest stall: below it, neither of the two is the bottleneck

Holder = Literal["policy", "env", "judge", "batch", "weights"]

SUBJECTS: Mapping[Holder, str] = {
    "policy": "the learner waited for rollouts for",
    "env": "the learner waited for environments for",
    "judge": "the learner waited for judging for",
    "batch": "the engines waited for the learner for",
    "weights": "the run waited for weight pushes for",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings of a run that decide which changes are possible.

    judge: where judgements are made; None if only a rule judges.
    grms:  roles of the models here that judge.
    env_hosts: whether environments have hosts of their own.
    cores_taken: cores of this machine, if the run's slots are on them and leave none free; else 0.
    """

    judge: Literal["here", "outside"] | None
    num_judgements: int
    max_staleness: int
    rate_limited: bool = False
    env_hosts: bool = False
    grms: Sequence[str] = (GRM,)
    cores_taken: int = 0
    elastic_pools: Mapping[str, str] = field(default_factory=dict)  # role -> the elastic pool that its slots are in


def bottleneck(times: StallTimes, setup: Setup) -> str | None:
    """The sentence for the report. None if no stall dominates."""
    stalls: dict[Holder, float] = {
        "policy": times.rollouts_s - times.envs_s,
        "env": times.envs_s,
        "judge": times.verdicts_s,
        "batch": times.training_s,
        "weights": times.weight_sync_s,
    }
    first, second, *_ = sorted(stalls, key=lambda name: -stalls[name])
    if not times.steps_s > 0 or stalls[first] < MIN_SHARE * times.steps_s or stalls[first] < MIN_LEAD * stalls[second]:
        return None
    share = f"{100 * stalls[first] / times.steps_s:.0f} %"
    return f"{SUBJECTS[first]} {share} of the step time: {', or '.join(advice(first, setup))}"


def advice(holder: Holder, setup: Setup) -> list[str]:
    """Changes that would shorten a stall, each as a key and a direction. The most certain first."""
    changes = {
        "policy": [more_slots("policy", setup), "lower rollout.max_new_tokens"],
        "env": [
            *([more_slots("env", setup)] if setup.env_hosts else []),
            "raise env.capacity, if the machine has room",
            "make the environment's answers faster",
        ],
        "judge": advise_on_judging(setup),
        "batch": [more_slots("learner", setup)],
        "weights": ["train on more groups per step (train.groups_per_batch)", "see sync.transport"],
    }[holder]
    if holder in ("policy", "env", "judge", "batch") and setup.max_staleness == 0:
        changes.append("let rollouts run ahead of training (train.max_staleness=1)")
    return changes


def advise_on_judging(setup: Setup) -> list[str]:
    if setup.judge is None:
        return ["use a faster rule (judge.rule)"]
    if setup.judge == "here" and len(setup.grms) > 1:
        return [f"give more slots to the busiest of {', '.join(setup.grms)} (busy_s; placement.roles.<name>.replicas)"]
    if setup.judge == "here":
        changes = [more_slots(setup.grms[0], setup)]
    elif setup.rate_limited:
        changes = ["raise engine.openai.requests_per_minute or tokens_per_minute, if the endpoint allows it"]
    else:
        changes = ["raise engine.openai.max_connections, if the endpoint allows it"]
    if setup.num_judgements > 1:
        return [*changes, "lower judge.num_judgements"]
    return [*changes, "lower judge.max_new_tokens"]


def more_slots(role: str, setup: Setup) -> str:
    where = f", on a machine with more than these {setup.cores_taken} cores" if setup.cores_taken else ""
    if pool := setup.elastic_pools.get(role):
        return f"give the elastic pool more slots{where} (placement.pools.{pool}.slots)"
    return f"give {role} more slots{where} (placement.roles.{role}.replicas)"
