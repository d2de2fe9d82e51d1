"""Judges that only watch: each judges a share of the trained groups, at the lowest priority, and nothing waits for it.

    trained groups of a step -> drawn by seed -> queue (what doesn't fit is dropped) -> judge -> watched.jsonl, counts

Its verdicts enter no training, no count of judgements and no failure rate.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grmpipe.evaluation.verdict_comparison import ComparedGroup, ComparedRollout, flips, rank_correlation
from grmpipe.judge.grm import set_purpose
from grmpipe.judge.judge_in_time import judge_in_time
from grmpipe.judge.verdict import get_reward, make_failure, report_failures
from grmpipe.models.seeds import is_drawn
from grmpipe.models.types import BudgetSpent
from grmpipe.observe.guard import Guard
from grmpipe.observe.journal import Journal
from grmpipe.observe.records import encode_report
from grmpipe.observe.summary import WatchSummary
from grmpipe.run.features.run_feature import RunFeature, StepEnd
from grmpipe.types import Failed, Judge, JudgedGroup, JudgeReport, Metrics

log = logging.getLogger(__name__)

WATCHED = "watched.jsonl"
LAST = 1 << 30  # the priority of its requests: after all others
STEPS_WAITING = 2  # a queue holds the groups of this many steps


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchCounts:
    """What a judge that watches has done.

    drawn:       groups that were meant for it; some of them are dropped, or still wait.
    failed:      rollouts without a verdict, by cause.
    correlation: sum of the rank correlations with the trained reward, of `correlated` groups.
    pairs:       pairs of siblings that both order; `flipped`: those that they order in opposite ways.
    """

    drawn: int = 0
    dropped: int = 0
    judged: int = 0
    verdicts: int = 0
    rewards: float = 0.0
    failed: Mapping[str, int] = field(default_factory=dict)
    correlation: float = 0.0
    correlated: int = 0
    pairs: int = 0
    flipped: int = 0

    @staticmethod
    def of(group: JudgedGroup, reports: Sequence[JudgeReport]) -> WatchCounts:
        """The counts of a judged group."""
        rollouts = tuple(
            ComparedRollout(old=get_reward(trained), new=get_reward(report.verdict))
            for trained, report in zip(group.verdicts, reports, strict=True)
        )
        compared = ComparedGroup(group_id=group.group_id, step=None, rollouts=rollouts)
        rewards = [one.new for one in rollouts if one.new is not None]
        correlations, flipped = rank_correlation(compared), flips(compared)
        return WatchCounts(
            judged=1,
            verdicts=len(rewards),
            rewards=sum(rewards),
            failed=dict(Counter(report.verdict.cause for report in reports if isinstance(report.verdict, Failed))),
            correlation=sum(correlations),
            correlated=len(correlations),
            pairs=len(flipped),
            flipped=round(sum(flipped)),
        )

    def __add__(self, other: WatchCounts) -> WatchCounts:
        failed = dict(Counter(self.failed) + Counter(other.failed))
        sums = {key: value + getattr(other, key) for key, value in asdict(self).items() if key != "failed"}
        return WatchCounts(failed=failed, **sums)

    @property
    def summary(self) -> WatchSummary:
        return WatchSummary(
            groups=self.judged,
            dropped_groups=self.dropped,
            unfinished_groups=self.drawn - self.dropped - self.judged,
            failed=dict(self.failed),
            reward=ratio(self.rewards, self.verdicts),
            rank_correlation=ratio(self.correlation, self.correlated),
            flips=ratio(self.flipped, self.pairs),
        )

    def metrics(self, name: str) -> Metrics:
        """The figures of a step: what isn't known is missing."""
        found = self.summary
        figures = {"reward": found.reward, "rank_correlation": found.rank_correlation, "flips": found.flips}
        counts = {"groups": self.judged, "dropped_groups": self.dropped}
        counts |= {f"failed_{cause}": count for cause, count in self.failed.items()}
        known = {key: value for key, value in {**figures, **counts}.items() if value is not None}
        return {f"watch/{name}/{key}": float(value) for key, value in known.items()}


def ratio(total: float, count: int) -> float | None:
    return total / count if count else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """A judge that watches.

    share:      the share of groups that it judges.
    num_queued: groups that may wait.
    at_once:    groups that it judges at the same time.
    deadline_s: for a group, from its first request on.
    """

    name: str
    judge: Judge
    share: float
    num_queued: int
    at_once: int
    deadline_s: float

    def draws(self, group_id: str, seed: int) -> bool:
        """Whether it judges a group: the same ones every time."""
        return is_drawn(seed, f"watch/{self.name}/{group_id}", self.share)


class WatchingJudges(RunFeature):
    """All judges of a run that only watch. There may be none."""

    name = "watching"

    def __init__(
        self, watchers: Sequence[Watcher], run_dir: Path, seed: int, run_id: str = "", guard: Guard | None = None
    ) -> None:
        self._watchers = {watcher.name: watcher for watcher in watchers}
        self._seed = seed
        self._journal = Journal(run_dir / WATCHED, run_id=run_id)
        self._guard = guard or Guard()
        self._queues: dict[str, asyncio.Queue[tuple[int, JudgedGroup]]] = {}
        self._workers: list[asyncio.Task[None]] = []
        self._total = dict.fromkeys(self._watchers, WatchCounts())
        self._step = dict.fromkeys(self._watchers, WatchCounts())

    async def after_step(self, end: StepEnd) -> Metrics:
        """Queue the groups of a step. The metrics are of the verdicts that came since the last step."""
        self._start()
        for watcher in self._watchers.values():
            for group in end.report.groups:
                if not group.prompt.self_judging and watcher.draws(group.group_id, self._seed):
                    self._queue(watcher, end.step, group)
        metrics: Metrics = {}
        for name, counts in self._step.items():
            metrics |= counts.metrics(name)
            self._total[name] += counts
            self._step[name] = WatchCounts()
        return metrics

    def _queue(self, watcher: Watcher, step: int, group: JudgedGroup) -> None:
        dropped = 0
        try:
            self._queues[watcher.name].put_nowait((step, group))
        except asyncio.QueueFull:
            dropped = 1
        self._step[watcher.name] += WatchCounts(drawn=1, dropped=dropped)

    def _start(self) -> None:
        """Start the workers with the first step."""
        if self._workers:
            return
        with set_purpose("monitoring"):
            for watcher in self._watchers.values():
                self._queues[watcher.name] = asyncio.Queue(watcher.num_queued)
                self._workers += [asyncio.create_task(self._watch(watcher)) for _ in range(watcher.at_once)]

    async def _watch(self, watcher: Watcher) -> None:
        while True:
            step, group = await self._queues[watcher.name].get()
            try:
                limit = asyncio.timeout(watcher.deadline_s)
                reports = await judge_in_time(watcher.judge, group.prompt, group.rollouts, limit, LAST)
            except BudgetSpent as error:  # no failure: the group stays unfinished
                log.info("the judge %s that watches stops: %s", watcher.name, error)
                return
            except Exception as error:  # of a judge that only watches: it never ends a run
                log.exception("the judge %s that watches failed on group %s", watcher.name, group.group_id)
                broken = report_failures(make_failure("died", repr(error), attempts=1))
                reports = (broken,) * len(group.rollouts)
            self._step[watcher.name] += WatchCounts.of(group, reports)
            self._write(watcher.name, step, group, reports)

    def _write(self, name: str, step: int, group: JudgedGroup, reports: Sequence[JudgeReport]) -> None:
        for rollout, report in zip(group.rollouts, reports, strict=True):
            with self._guard.watch(WATCHED):
                who = {"watcher": name, "step": step, "group_id": group.group_id, "sibling": rollout.sibling}
                self._journal.append({**who, **encode_report(report)})

    async def close(self) -> None:
        """End the workers: what still waits stays unfinished."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        with self._guard.watch(WATCHED):
            self._journal.close()

    def state(self) -> Mapping[str, Any]:
        return {name: asdict(self._total[name] + self._step[name]) for name in self._watchers}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._total |= {name: WatchCounts(**counts) for name, counts in state.items() if name in self._watchers}


def summaries(state: Mapping[str, Any]) -> dict[str, WatchSummary]:
    """By judge that watches, from the state of the feature."""
    return {name: WatchCounts(**counts).summary for name, counts in state.items()}
