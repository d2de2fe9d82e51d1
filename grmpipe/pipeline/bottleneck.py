"""Who held up whom over a run, and what to change: one sentence from its waits. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from grmpipe.pipeline.stall_times import StallTimes

MIN_SHARE = 0.2  # of the time of the steps: less isn't worth a sentence
MIN_LEAD = 1.25  # over the next longest wait: where two are alike, neither is the bottleneck

Holder = Literal["policy", "judge", "batch", "weights"]

SUBJECTS: Mapping[Holder, str] = {
    "policy": "the learner waited for rollouts for",
    "judge": "the learner waited for judging for",
    "batch": "the engines waited for the learner for",
    "weights": "the run waited for weight pushes for",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What of a run decides which change is possible.

    judge: where judgements are made; None where only a rule judges.
    """

    judge: Literal["here", "outside"] | None
    num_judgements: int
    max_staleness: int
    rate_limited: bool = False
    elastic_pools: Mapping[str, str] = field(default_factory=dict)  # role -> the pool whose slots come and go


def bottleneck(times: StallTimes, setup: Setup) -> str | None:
    """None where nothing dominates."""
    stalls: dict[Holder, float] = {
        "policy": times.rollouts_s,
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
    """What would shorten a wait, each as a key and a direction; the surest first."""
    changes = {
        "policy": [more_slots("policy", setup), "lower rollout.max_new_tokens"],
        "judge": judging(setup),
        "batch": [more_slots("learner", setup)],
        "weights": ["train on more groups per step (train.groups_per_batch)", "see sync.transport"],
    }[holder]
    if holder in ("policy", "judge", "batch") and setup.max_staleness == 0:
        changes.append("let rollouts run ahead of training (train.max_staleness=1)")
    return changes


def judging(setup: Setup) -> list[str]:
    if setup.judge is None:
        return ["use a faster rule (judge.rule)"]
    if setup.judge == "here":
        changes = [more_slots("grm", setup)]
    elif setup.rate_limited:
        changes = ["raise engine.openai.requests_per_minute or tokens_per_minute, if the endpoint allows it"]
    else:
        changes = ["raise engine.openai.max_connections, if the endpoint allows it"]
    if setup.num_judgements > 1:
        return [*changes, "lower judge.num_judgements"]
    return [*changes, "lower judge.max_new_tokens"]


def more_slots(role: str, setup: Setup) -> str:
    if pool := setup.elastic_pools.get(role):
        return f"give the elastic pool more slots (placement.pools.{pool}.slots)"
    return f"give {role} more slots (placement.roles.{role}.replicas)"
