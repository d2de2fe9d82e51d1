"""Stall times of a step, and the bottleneck that they show: who waited for whom, in seconds. Updated by changes of
state, without polling; decides nothing.

The learner is in exactly one of these states at any moment, so the times never overlap:

    wants a group, and has to wait -> rollouts_s or verdicts_s, by what the open batch lacks
    takes groups, steps            -> its work; training_s is the part in which nothing else could work
    pushes its weights             -> weight_sync_s
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from grmpipe.config.keys.entry_names import GRM
from grmpipe.counts import Counts
from grmpipe.scheduler.work_queue import BusyMeter, StateMeter


@dataclass(frozen=True, slots=True, kw_only=True)
class StallTimes(Counts):
    """Stall times, in seconds on the event loop's clock.

    steps_s:   duration of the steps, without what is done between them (evaluations, checkpoints).
    rollouts_s: the learner waited for a group, and the batch lacked rollouts: fewer groups were rolled out than it has
               places left, or one that is due in this batch was still rolling out.
    envs_s:    the part of rollouts_s for which environments are to blame: it, times their share of the time of all
               episodes that ended in the step. An estimate.
    verdicts_s: the learner waited for a group, and the batch lacked only verdicts.
    training_s: the learner worked, no rollout and no judgement was in flight, and the end of the step would admit new
               groups: the engines were idle because of admission.
    weight_sync_s: the push that ends a step: pauses of the engines, transfer, confirmation.
    """

    steps_s: float = 0.0
    rollouts_s: float = 0.0
    envs_s: float = 0.0
    verdicts_s: float = 0.0
    training_s: float = 0.0
    weight_sync_s: float = 0.0

    @property
    def for_groups_s(self) -> float:
        return self.rollouts_s + self.verdicts_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSupply:
    """The groups that the open batch can still get.

    lacks_due:   whether a group that lacks rollouts is due in the open batch: no later one may train it.
    num_judging: number of groups that lack only verdicts.
    num_ready:   number of groups that lack nothing.
    """

    lacks_due: bool = False
    num_judging: int = 0
    num_ready: int = 0


class StallTracker:
    """Measures stall times. Must be notified of every change: of the supply of groups and of the learner (three
    contexts).
    """

    def __init__(self) -> None:
        self.engines = BusyMeter()  # runs while rollouts or judgements are in flight
        self._supply = GroupSupply()
        self._learner = StateMeter()
        self._training_s = 0.0
        self._wanted: int | None = None  # places left in the batch, while the learner waits for a group

    def groups_changed(self, supply: GroupSupply) -> None:
        self._supply = supply
        self._look()

    @property
    def learner_state(self) -> str | None:
        """`work`, `weights` (a push), what it waits for (`policy`, `judge`), or None between these."""
        return self._learner.state

    # -- the learner -------------------------------------------------------------------------------------------------

    @contextmanager
    def track_wait(self, places: int) -> Iterator[None]:
        """Context: the learner waits for a group, and the open batch has `places` places left."""
        self._wanted = places
        self._look()
        try:
            yield
        finally:
            self._wanted = None
            self._learner.enter(None)

    @contextmanager
    def track_learner(self, makes_room: bool) -> Iterator[None]:
        """Context: the learner works. `makes_room`: whether the end of this step will admit new groups."""
        self._learner.enter("work")
        idle_s = -self._learner.seconds("work") + self.engines.busy_s
        try:
            yield
        finally:
            self._learner.enter(None)
            idle_s += self._learner.seconds("work") - self.engines.busy_s
            self._training_s += max(0.0, idle_s) if makes_room else 0.0

    @contextmanager
    def track_push(self) -> Iterator[None]:
        self._learner.enter("weights")
        try:
            yield
        finally:
            self._learner.enter(None)

    def close_step(self, steps_s: float) -> StallTimes:
        """Return the stall times of this step and start the next."""
        times = StallTimes(
            steps_s=steps_s,
            rollouts_s=self._learner.seconds("policy"),
            verdicts_s=self._learner.seconds("judge"),
            training_s=self._training_s,
            weight_sync_s=self._learner.seconds("weights"),
        )
        self._learner.clear()
        self._training_s = 0.0
        return times

    def _look(self) -> None:
        """Update whom the learner waits for now."""
        if self._wanted is not None:
            supply, places = self._supply, self._wanted
            can_fill = supply.num_judging > 0 and supply.num_judging + supply.num_ready >= places
            self._learner.enter("judge" if can_fill and not supply.lacks_due else "policy")


# -- the bottleneck of a run and what to change, in one sentence -------------------------------------------------------


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
