"""The groups in flight: open, then ready, then in the batch, until they were trained or dropped. It starts no work."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

from grmpipe.config.train import AlgorithmConfig
from grmpipe.pipeline.counters import without_signal
from grmpipe.pipeline.group import Group
from grmpipe.pipeline.interfaces import Journal
from grmpipe.pipeline.stall_times import Waits
from grmpipe.types import GroupEnd, JudgedGroup
from scheduler.admission import Admission


class Flight:
    """Between those who open groups and the one who trains them. Both wait here: for room, and for news."""

    def __init__(
        self,
        admission: Admission,
        waits: Waits,
        journal: Journal,
        max_no_signal_groups: int = 0,
        algorithm: AlgorithmConfig | None = None,
    ) -> None:
        """`algorithm`: by which a group has a signal or none."""
        self.admission = admission
        self.waits = waits
        self.groups: dict[str, Group] = {}
        self.prompts_over = False
        self._journal = journal
        self._max_no_signal_groups = max_no_signal_groups
        self._algorithm = algorithm or AlgorithmConfig()
        self._ready: dict[str, JudgedGroup] = {}  # by group_id, in order of arrival
        self._unweighed: list[str] = []  # ready, their age not looked at since they came or since the last step
        self._num_resampled = 0  # groups without signal that were dropped since the last step
        self._news = asyncio.Event()  # a group ended, the prompts are over, or the run is to stop
        self._room = asyncio.Event()

    @property
    def open_groups(self) -> Iterator[Group]:
        return (group for group in self.groups.values() if group.state == "open")

    # -- for who opens groups ------------------------------------------------------------------------------------------

    async def until_room(self) -> None:
        while self.admission.capacity <= 0:
            self._room.clear()
            await self._room.wait()

    def open(self, group: Group, version: int | None) -> None:
        """`version`: the lowest of the tokens that it comes with."""
        self.admission.open(group.group_id, version=version)
        self.groups[group.group_id] = group
        self.waits.opened(group.group_id, self.admission.in_flight[group.group_id])

    def ended(self, group: Group) -> None:
        """It left `open`: the learner may have it, or another prompt takes its place."""
        if group.state == "failed":
            self.drop(group.group_id, group.cause)
        elif self._num_resampled < self._max_no_signal_groups and without_signal(group.judged(), self._algorithm):
            self._num_resampled += 1
            self.drop(group.group_id, "no_signal")
        else:
            self._ready[group.group_id] = group.judged()
            self.admission.ready(group.group_id)
            self._unweighed.append(group.group_id)
            self.waits.judged(group.group_id)
        self.tell()

    def no_more_prompts(self) -> None:
        self.prompts_over = True
        self.tell()

    # -- for who trains them -------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """No group will become ready any more."""
        return self.prompts_over and next(self.open_groups, None) is None

    def tell(self) -> None:
        """Wake who waits for news."""
        self._news.set()

    async def news(self, within_s: float) -> bool:
        """Whether there was any in that time."""
        self._news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._news.wait()
        return self._news.is_set()

    def take(self) -> JudgedGroup | None:
        """The group that is due first, if the open batch may have it now. Stale ones are dropped on the way."""
        unweighed, self._unweighed = self._unweighed, []
        for group_id in unweighed:
            if self.admission.is_stale(self._ready[group_id].version):
                del self._ready[group_id]
                self.drop(group_id, "stale")
        if (due := self.admission.take()) is None:
            return None
        self.waits.gone(due)
        return self._ready.pop(due)

    def trained(self, batch: Sequence[JudgedGroup], early: Collection[str]) -> None:
        """It was stepped: the version is the next one, and there is room. `early`: see `Trainer.while_waiting`."""
        self._num_resampled = 0
        self.admission.stepped([group.group_id for group in batch])
        self._unweighed = list(self._ready)
        step = self.admission.version
        for judged in batch:
            group = self.groups.pop(judged.group_id)
            end = GroupEnd(
                group_id=group.group_id,
                draw=group.draw,
                prompt_id=group.prompt.prompt_id,
                outcome="trained",
                step=step,
                version=judged.version,
                early=group.group_id in early,
            )
            self._journal.group_ended(end)
        self.admission.check()
        assert set(self.groups) == set(self.admission.in_flight)
        self._room.set()

    def give_up(self) -> None:
        """The prompts are over, and what is left fills no batch."""
        for group_id in list(self.groups):
            self.drop(group_id, "end_of_prompts")
        self._ready, self._unweighed = {}, []
        self.admission.check()

    def drop(self, group_id: str, cause: str) -> None:
        """Given up, and replaced by another prompt."""
        group = self.groups.pop(group_id)
        self.waits.gone(group_id)
        self.admission.drop(group_id, cause)
        end = GroupEnd(
            group_id=group_id, draw=group.draw, prompt_id=group.prompt.prompt_id, outcome="dropped", cause=cause
        )
        self._journal.group_ended(end)
        self._room.set()


def describe(group: Group) -> str:
    """What a group still lacks, for a log."""
    rollouts, verdicts = _listed(group.missing_rollouts()), _listed(group.missing_verdicts())
    return f"rollouts missing: {rollouts}; verdicts missing: {verdicts}"


def _listed(siblings: Sequence[int]) -> str:
    return ", ".join(map(str, siblings)) or "none"
