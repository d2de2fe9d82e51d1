"""A journal that also reports rollouts to the critic. Writes nothing itself."""

from __future__ import annotations

from grmpipe.pipeline.interfaces import GroupJournal
from grmpipe.train.critic.values import ValueCache
from grmpipe.types import GroupEnd, JudgeReport, Prompt, Rollout


class ValuedJournal:
    """A journal that passes rollouts on to the critic's value cache, and removes them when their group ends."""

    def __init__(self, journal: GroupJournal, value_cache: ValueCache) -> None:
        self._journal = journal
        self._value_cache = value_cache

    def rollout(self, prompt_index: int, prompt: Prompt, rollout: Rollout) -> None:
        self._journal.rollout(prompt_index, prompt, rollout)
        self._value_cache.add(rollout)

    def judged(self, rollout: Rollout, report: JudgeReport) -> None:
        self._journal.judged(rollout, report)

    def group_ended(self, end: GroupEnd) -> None:
        self._journal.group_ended(end)
        self._value_cache.forget(end.group_id)
