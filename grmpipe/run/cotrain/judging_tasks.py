"""The next judging task of a GRM trained next to the policy: a stored one, or one of the run's rollouts. Judges
none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from grmpipe.data.stream import PromptStream
from grmpipe.judge.labels import JudgingTasks
from grmpipe.judge.rule import Rule
from grmpipe.judge.trajectory import trajectory_of
from grmpipe.types import Prompt, Rollout
from models.seeds import derive_seed

Own = tuple[Prompt, Rollout]


@dataclass(slots=True)
class Recent:
    """The latest rollouts that the rule calls right, and those that it calls wrong."""

    window: int
    right: deque[Own] = field(init=False)
    wrong: deque[Own] = field(init=False)

    def __post_init__(self) -> None:
        self.right, self.wrong = deque(maxlen=self.window), deque(maxlen=self.window)

    def of(self, right: bool) -> deque[Own]:
        return self.right if right else self.wrong

    @property
    def has_both(self) -> bool:
        return bool(self.right and self.wrong)


class JudgingTaskStream:
    """A stream of judging tasks. A share of `rollout_share` are the run's rollouts, right and wrong ones alternately;
    the others are stored judging tasks.

    They alternate because a judge that sees more wrong than right ones learns to reject. Until there are rollouts of
    both kinds, stored judging tasks take their place.
    """

    def __init__(
        self,
        judging_tasks: JudgingTasks,
        rule: Rule,
        stored: PromptStream | None,
        *,
        rollout_share: float,
        window: int,
        seed: int,
    ) -> None:
        self._judging_tasks = judging_tasks
        self._rule = rule
        self._stored = stored
        self._share = rollout_share if stored is not None else 1.0
        self._recent = Recent(window)
        self._seed = seed
        self._usable = asyncio.Event()
        if stored is not None:
            self._usable.set()

    def add(self, prompt: Prompt, rollout: Rollout) -> None:
        """Add an ended rollout. It is ignored if no rule knows its truth."""
        if prompt.reference is None or self._share == 0:
            return
        try:
            right = self._rule(rollout.answer, prompt.reference)
        except ValueError:  # for example a rubric, which the rule can't read
            return
        self._recent.of(right).append((prompt, rollout))
        if self._recent.has_both:
            self._usable.set()

    async def until_usable(self) -> None:
        """Return once there is a judging task."""
        await self._usable.wait()

    def at(self, prompt_index: int) -> Prompt:
        before, own = (
            int(prompt_index * self._share),
            int((prompt_index + 1) * self._share) > int(prompt_index * self._share),
        )
        if not (own and self._recent.has_both):
            assert self._stored is not None, "until_usable was waited for"
            return self._stored.at(prompt_index - before)
        right = before % 2 == 0
        candidates = self._recent.of(right)
        prompt, rollout = candidates[derive_seed(self._seed, f"lesson {prompt_index}") % len(candidates)]
        task_id = f"{rollout.group_id}/{rollout.sibling}"
        shown = trajectory_of(prompt, rollout, thoughts=self._judging_tasks.show_thoughts)
        return self._judging_tasks.right_or_wrong(task_id, prompt, shown, right=right)
