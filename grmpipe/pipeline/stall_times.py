"""Who holds up whom, in seconds of a step. Kept by changes of state, without polling; it decides nothing.

The learner is in one of four states at any moment of a step, so that these never overlap:

    wants a group, and has to wait -> policy_s or judge_s, by what the open batch lacks
    takes groups, steps            -> its work; batch_s of it while nobody else could work
    pushes its weights             -> weights_s
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from scheduler.stream import BusyMeter, StateMeter


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitTimes:
    """Seconds by the loop's clock.

    steps_s:   of the steps themselves; what is done between two of them (looks, checkpoints) isn't in it.
    policy_s:  the learner wanted a group, and the batch lacked rollouts: fewer groups were rolled out than it has
               places left, or one that is due in this batch still rolled out.
    judge_s:   the learner wanted a group, and the batch lacked only verdicts.
    batch_s:   the learner worked, no rollout and no judgement was in flight, and the step's end would let new groups
               in: engines idle because admission held.
    weights_s: the push that ends a step: pauses of the engines, transfer, confirmation.
    """

    steps_s: float = 0.0
    policy_s: float = 0.0
    judge_s: float = 0.0
    batch_s: float = 0.0
    weights_s: float = 0.0

    @property
    def for_groups_s(self) -> float:
        return self.policy_s + self.judge_s

    def plus(self, other: WaitTimes) -> WaitTimes:
        return WaitTimes(
            steps_s=self.steps_s + other.steps_s,
            policy_s=self.policy_s + other.policy_s,
            judge_s=self.judge_s + other.judge_s,
            batch_s=self.batch_s + other.batch_s,
            weights_s=self.weights_s + other.weights_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSupply:
    """What there is for the open batch beside the groups that it has.

    oldest_rolling_out: the lowest version that a group which lacks rollouts was opened at; None: there is none.
    num_judging:        groups that lack verdicts only.
    num_ready:          groups that lack nothing.
    """

    oldest_rolling_out: int | None = None
    num_judging: int = 0
    num_ready: int = 0


class Waits:
    """Told of every change: of what there is for the learner, and of the learner itself (the three contexts)."""

    def __init__(self, max_staleness: int) -> None:
        self.engines = BusyMeter()  # rollouts and judgements in flight
        self._max_staleness = max_staleness
        self._supply = GroupSupply()
        self._learner = StateMeter()
        self._batch_s = 0.0
        self._wanted: tuple[int, int] | None = None  # places left, the batch's version

    def groups_changed(self, supply: GroupSupply) -> None:
        self._supply = supply
        self._look()

    # -- the learner -------------------------------------------------------------------------------------------------

    @contextmanager
    def wanting(self, places: int, version: int) -> Iterator[None]:
        """The batch of `version` has so many places left, and the learner asks for a group."""
        self._wanted = (places, version)
        self._look()
        try:
            yield
        finally:
            self._wanted = None
            self._learner.enter(None)

    @contextmanager
    def learning(self, makes_room: bool) -> Iterator[None]:
        """`makes_room`: the end of this step will let new groups in."""
        self._learner.enter("work")
        idle_s = -self._learner.seconds("work") + self.engines.busy_s
        try:
            yield
        finally:
            self._learner.enter(None)
            idle_s += self._learner.seconds("work") - self.engines.busy_s
            self._batch_s += max(0.0, idle_s) if makes_room else 0.0

    @contextmanager
    def pushing(self) -> Iterator[None]:
        self._learner.enter("weights")
        try:
            yield
        finally:
            self._learner.enter(None)

    def close_step(self, steps_s: float) -> WaitTimes:
        """What this step was held up by; the next begins."""
        times = WaitTimes(
            steps_s=steps_s,
            policy_s=self._learner.seconds("policy"),
            judge_s=self._learner.seconds("judge"),
            batch_s=self._batch_s,
            weights_s=self._learner.seconds("weights"),
        )
        self._learner.clear()
        self._batch_s = 0.0
        return times

    def _look(self) -> None:
        """Something changed: whom does the learner wait for now?"""
        if self._wanted is not None:
            self._learner.enter("judge" if self._lacks_only_verdicts(*self._wanted) else "policy")

    def _lacks_only_verdicts(self, places: int, version: int) -> bool:
        due = version - self._max_staleness  # opened under this version or an older one: no later batch may train it
        supply = self._supply
        late = supply.oldest_rolling_out is not None and supply.oldest_rolling_out <= due
        return supply.num_judging > 0 and not late and supply.num_judging + supply.num_ready >= places
