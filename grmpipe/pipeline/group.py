"""A group: the siblings of one prompt, from opening to its end. A state machine; it neither waits nor knows a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from grmpipe.types import Failed, JudgedGroup, Prompt, Rollout, Verdict

State = Literal["open", "complete", "partial", "failed"]


class Group:
    """open -> complete | partial | failed. Whatever comes late or twice is refused: the first answer wins.

    A missing rollout fails the group: the survivors are the short ones, a biased baseline.
    Missing verdicts leave it partial, down to `min_valid_siblings`.
    """

    def __init__(self, *, group_id: str, draw: int, prompt: Prompt, size: int, min_valid_siblings: int) -> None:
        self.group_id = group_id
        self.draw = draw
        self.prompt = prompt
        self.size = size
        self.min_valid_siblings = min_valid_siblings
        self.state: State = "open"
        self.cause = ""  # of a failed group
        self.detail = ""  # what was said of it
        self._rollouts: dict[int, Rollout] = {}
        self._verdicts: dict[int, Verdict | Failed] = {}

    @property
    def rollouts(self) -> Sequence[Rollout]:
        """Those that ended, in sibling order."""
        return [self._rollouts[sibling] for sibling in sorted(self._rollouts)]

    @property
    def is_rolled_out(self) -> bool:
        return len(self._rollouts) == self.size

    def add_rollout(self, rollout: Rollout) -> bool:
        """False: refused."""
        if self.state != "open" or rollout.sibling in self._rollouts:
            return False
        self._rollouts[rollout.sibling] = rollout
        return True

    def add_verdict(self, sibling: int, verdict: Verdict | Failed) -> bool:
        """False: refused."""
        if self.state != "open" or sibling not in self._rollouts or sibling in self._verdicts:
            return False
        self._verdicts[sibling] = verdict
        if len(self._verdicts) == self.size:
            self._close()
        return True

    def void_verdicts(self) -> int:
        """Forget them: the judge that gave them is another now. Returns how many there were."""
        num_void = len(self._verdicts)
        self._verdicts.clear()
        return num_void

    def fail(self, cause: str, detail: str = "") -> None:
        """End the group: a rollout is missing, or the run gave up on it."""
        if self.state == "open":
            self.state, self.cause, self.detail = "failed", cause, detail

    def expire(self) -> list[Failed]:
        """The deadline has passed: missing verdicts become timeouts, a missing rollout fails the group.

        Returns the timeouts: none where a rollout is missing, which is no fault of the judge."""
        if missing := self.missing_rollouts():
            siblings = ", ".join(map(str, missing))
            self.fail("rollout_timeout", f"no rollout by the group deadline of {self.group_id}'s siblings {siblings}")
        late = Failed(stage="judge", cause="timeout", attempts=1, detail="no verdict by the group deadline")
        return [late for sibling in self.missing_verdicts() if self.add_verdict(sibling, late)]

    def rollout_of(self, sibling: int) -> Rollout:
        return self._rollouts[sibling]

    def lacks_verdicts(self, siblings: Iterable[int]) -> bool:
        """Of any of these."""
        return any(sibling not in self._verdicts for sibling in siblings)

    def missing_rollouts(self) -> list[int]:
        return [sibling for sibling in range(self.size) if sibling not in self._rollouts]

    def missing_verdicts(self) -> list[int]:
        return [sibling for sibling in range(self.size) if sibling not in self._verdicts]

    def judged(self) -> JudgedGroup:
        """The group as training takes it. Complete or partial groups only."""
        assert self.state in ("complete", "partial"), self.state
        return JudgedGroup(
            group_id=self.group_id,
            prompt=self.prompt,
            rollouts=tuple(self._rollouts[sibling] for sibling in range(self.size)),
            verdicts=tuple(self._verdicts[sibling] for sibling in range(self.size)),
        )

    def _close(self) -> None:
        failures = [verdict for verdict in self._verdicts.values() if isinstance(verdict, Failed)]
        if self.size - len(failures) < self.min_valid_siblings:
            (cause, _), *_ = Counter(failure.cause for failure in failures).most_common(1)
            self.fail(f"judge_{cause}")
        else:
            self.state = "partial" if failures else "complete"
