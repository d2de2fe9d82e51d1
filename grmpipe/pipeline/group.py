"""A group: the siblings of one prompt, from opening to its end. A state machine."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from grmpipe.pipeline.interfaces import RolloutTimes
from grmpipe.types import Failed, GroupEnd, JudgedGroup, JudgeSession, Prompt, RewardsByPart, Rollout, Verdict


class GroupState(Enum):
    """The state of a group. The table in `Group` has the transitions."""

    ROLLING_OUT = "rolling out"
    JUDGING = "judging"
    READY = "ready"
    TAKEN = "taken"
    TRAINED = "trained"
    DROPPED = "dropped"


NEXT: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.ROLLING_OUT: frozenset({GroupState.JUDGING, GroupState.DROPPED}),
    GroupState.JUDGING: frozenset({GroupState.READY, GroupState.DROPPED}),
    GroupState.READY: frozenset({GroupState.TAKEN, GroupState.DROPPED}),
    GroupState.TAKEN: frozenset({GroupState.TRAINED, GroupState.DROPPED}),
    GroupState.TRAINED: frozenset(),
    GroupState.DROPPED: frozenset(),
}
OPEN = frozenset({GroupState.ROLLING_OUT, GroupState.JUDGING})  # rollouts and verdicts are accepted


class Group:
    """All that is known about a group, and its state:

        state        it has                        goes to   when
        ROLLING_OUT  some rollouts, some verdicts  JUDGING   its last rollout ends
                                                   DROPPED   rollout_*: a rollout fails, or is missing at the deadline
                                                             prompt_too_long
        JUDGING      all rollouts, some verdicts   READY     its last verdict comes; at the deadline those that are
                                                             missing become timeouts
                                                   DROPPED   judge_*, teacher_*: fewer than `min_valid_siblings` are
                                                             valid
        READY        all verdicts                  TAKEN     it is due, and the open batch has room for it
                                                   DROPPED   zero_advantage: its rewards are all alike
                                                             stale: too old for the open batch
        TAKEN        a place in the open batch     TRAINED   the batch was stepped and its weights pushed
                                                   DROPPED   not_finite: the numbers of its batch aren't
        all of these                               DROPPED   end_of_prompts: what is left fills no batch

    Late or repeated results are refused: the first one counts. A missing rollout drops the group, because the remaining
    ones are the short ones and would bias the baseline. Missing verdicts don't, down to `min_valid_siblings`. When the
    judge changes, the verdicts are void and the state stays the same.

    opened_at:  version at which `GroupBuffer.open` opened it: no token of the group is older.
    session:    the judge's session; None before it is opened and after the group has left JUDGING.
    judging_begun: whether a judge task has begun since its verdicts were last voided.
    started:    whether its first token was sampled.
    limit_s:    how long it may take. deadline_s: when that is over, on the clock of group deadlines, which stands still
                during pushes and pauses.
    cause, detail: why the group was dropped.
    early:      the learner trained on it before the next group was ready (early start).
    times:      sibling -> when it was played and judged, if this process played it.
    """

    def __init__(
        self,
        *,
        group_id: str,
        prompt_index: int,
        prompt: Prompt,
        size: int,
        min_valid_siblings: int,
        opened_at: int = 0,
        limit_s: float = math.inf,
    ) -> None:
        self.group_id = group_id
        self.prompt_index = prompt_index
        self.prompt = prompt
        self.size = size
        self.min_valid_siblings = min_valid_siblings
        self.opened_at = opened_at
        self.limit_s = limit_s
        self.state = GroupState.ROLLING_OUT
        self.session: JudgeSession | None = None
        self.judging_begun = False
        self.started = False
        self.deadline_s = math.inf
        self.cause = ""
        self.detail = ""
        self.early = False
        self.times: dict[int, RolloutTimes] = {}
        self._rollouts: dict[int, Rollout] = {}
        self._verdicts: dict[int, Verdict | Failed] = {}
        self._by_part: dict[int, RewardsByPart] = {}

    # -- what it has ---------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self.state in OPEN

    @property
    def rollouts(self) -> Sequence[Rollout]:
        """Rollouts that ended, in sibling order."""
        return [self._rollouts[sibling] for sibling in sorted(self._rollouts)]

    @property
    def is_rolled_out(self) -> bool:
        return len(self._rollouts) == self.size

    @property
    def num_done(self) -> tuple[int, int]:
        """How many verdicts and how many rollouts it has."""
        return len(self._verdicts), len(self._rollouts)

    @property
    def version(self) -> int:
        """The lowest version of its tokens sampled so far."""
        return min(rollout.oldest_version for rollout in self._rollouts.values())

    def get_rollout(self, sibling: int) -> Rollout:
        return self._rollouts[sibling]

    def lacks_verdicts(self, siblings: Iterable[int]) -> bool:
        """Whether any of these siblings has no verdict."""
        return any(sibling not in self._verdicts for sibling in siblings)

    def list_missing_rollouts(self) -> list[int]:
        return [sibling for sibling in range(self.size) if sibling not in self._rollouts]

    def list_missing_verdicts(self) -> list[int]:
        return [sibling for sibling in range(self.size) if sibling not in self._verdicts]

    def to_judged_group(self) -> JudgedGroup:
        """The group as training takes it. Valid from READY on."""
        assert not self.is_open and self.state is not GroupState.DROPPED, self.state
        return JudgedGroup(
            group_id=self.group_id,
            prompt=self.prompt,
            rollouts=tuple(self._rollouts[sibling] for sibling in range(self.size)),
            verdicts=tuple(self._verdicts[sibling] for sibling in range(self.size)),
            by_part=tuple(self._by_part.get(sibling, {}) for sibling in range(self.size)),
        )

    def end(self, version: int) -> GroupEnd:
        """How it ended. `version`: completed optimizer steps, the group's own included if it was trained."""
        trained = self.state is GroupState.TRAINED
        return GroupEnd(
            group_id=self.group_id,
            prompt_index=self.prompt_index,
            prompt_id=self.prompt.prompt_id,
            outcome="trained" if trained else "dropped",
            step=version if trained else None,
            cause=None if trained else self.cause,
            version=self.version if trained else None,
            early=trained and self.early,
        )

    # -- what happens to it --------------------------------------------------------------------------------------------

    def set_deadline(self, now_s: float) -> None:
        self.deadline_s = now_s + self.limit_s

    def first_token(self, now_s: float) -> None:
        """Restart its deadline when the first of its siblings has a token."""
        # The limit is on its own work: the wait for a row of an engine has had a limit of its own, the same one.
        if self.is_open and not self.started:
            self.started = True
            self.set_deadline(now_s)

    def add_rollout(self, rollout: Rollout) -> bool:
        """Add a finished rollout. Returns False if it is late or repeated."""
        if not self.is_open or rollout.sibling in self._rollouts:
            return False
        self._rollouts[rollout.sibling] = rollout
        if self.is_rolled_out:
            self._enter(GroupState.JUDGING)
        return True

    def add_verdict(self, sibling: int, verdict: Verdict | Failed, by_part: RewardsByPart | None = None) -> bool:
        """Add a verdict, or the failure to get one. Returns False if it is late or repeated."""
        if not self.is_open or sibling not in self._rollouts or sibling in self._verdicts:
            return False
        self._verdicts[sibling] = verdict
        self._by_part[sibling] = by_part or {}
        if len(self._verdicts) == self.size:
            self._close()
        return True

    def void_verdicts(self) -> int:
        """Remove all verdicts, because the judge changed. Returns how many there were."""
        assert self.is_open, self.state
        num_void = len(self._verdicts)
        self._verdicts.clear()
        self._by_part.clear()
        self.judging_begun = False
        return num_void

    def expire(self) -> list[Failed]:
        """End the group at its deadline: missing verdicts become timeouts, a missing rollout drops the group.

        Returns the timeouts; none if a rollout is missing, which is not the judge's fault.
        """
        if missing := self.list_missing_rollouts():
            siblings = ", ".join(map(str, missing))
            self.drop("rollout_timeout", f"no rollout by the group deadline of {self.group_id}'s siblings {siblings}")
        late = Failed(stage="judge", cause="timeout", attempts=1, detail="no verdict by the group deadline")
        return [late for sibling in self.list_missing_verdicts() if self.add_verdict(sibling, late)]

    def take(self) -> None:
        """Move it into the open batch."""
        self._enter(GroupState.TAKEN)

    def train(self) -> None:
        """Mark it as trained: its batch was stepped and pushed."""
        self._enter(GroupState.TRAINED)

    def drop(self, cause: str, detail: str = "") -> None:
        self.cause, self.detail = cause, detail
        self._enter(GroupState.DROPPED)

    def _close(self) -> None:
        failures = [verdict for verdict in self._verdicts.values() if isinstance(verdict, Failed)]
        if self.size - len(failures) < self.min_valid_siblings:
            (cause, _), *_ = Counter(f"{failure.stage}_{failure.cause}" for failure in failures).most_common(1)
            self.drop(cause)
        else:
            self._enter(GroupState.READY)

    def _enter(self, state: GroupState) -> None:
        assert state in NEXT[self.state], f"{self.group_id}: from {self.state.value} to {state.value}"
        self.state = state
        if not self.is_open:
            self.session = None
