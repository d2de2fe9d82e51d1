"""A journal that tells the critic of rollouts as well. Writes nothing itself."""

from __future__ import annotations

from grmpipe.pipeline.interfaces import Journal
from grmpipe.train.critic.values import Valuer
from grmpipe.types import GroupEnd, JudgeReport, Prompt, Rollout


class ValuedJournal:
    """A journal whose rollouts the critic hears of as well, until their group ends."""

    def __init__(self, journal: Journal, valuer: Valuer) -> None:
        self._journal = journal
        self._valuer = valuer

    def rollout(self, draw: int, prompt: Prompt, rollout: Rollout) -> None:
        self._journal.rollout(draw, prompt, rollout)
        self._valuer.add(rollout)

    def judged(self, rollout: Rollout, report: JudgeReport) -> None:
        self._journal.judged(rollout, report)

    def group_ended(self, end: GroupEnd) -> None:
        self._journal.group_ended(end)
        self._valuer.forget(end.group_id)
