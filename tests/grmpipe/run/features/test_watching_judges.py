"""Judges that only watch: who is drawn, what is dropped, what failed, how they agree; the run never waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from simulated_workload import COSTS, seats, workload

from grmpipe.capacity.simulate.simulated_cluster import SimulatedRun, Simulation, simulate
from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.judge.pointwise_adapter import HandOver, rollout_of_text
from grmpipe.judge.verdict import make_failure, report_failures, report_score
from grmpipe.pipeline.interfaces import StepReport
from grmpipe.run.features.run_feature import StepEnd
from grmpipe.run.features.watching_judges import LAST, Watcher, WatchingJudges, summaries
from grmpipe.types import JudgedGroup, JudgeReport, JudgeSession, Prompt, RewardSpan, Rollout
from models.types import Message

PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="how many?"),))


def report_of(reward: float | None) -> JudgeReport:
    if reward is None:
        return report_failures(make_failure("unparseable", "no score", attempts=1))
    return report_score((RewardSpan(turn=0, start=0, end=0, value=reward),), score=1.0, breakdown={})


class SlowJudge:
    """Gives these rewards to the siblings, `seconds` after it was asked; on one slot of its own."""

    def __init__(self, rewards: Sequence[float | None] = (0.1, 0.2), seconds: float = 0.0) -> None:
        self.rewards = rewards
        self.seconds = seconds
        self.priorities: set[int] = set()
        self.slot = asyncio.Semaphore(1)

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        async def judge(rollouts: Sequence[Rollout], priority: int) -> Sequence[JudgeReport]:
            self.priorities.add(priority)
            async with self.slot:
                await asyncio.sleep(self.seconds)
            return [report_of(self.rewards[one.sibling % len(self.rewards)]) for one in rollouts]

        return HandOver(judge, 1)


class BrokenJudge(SlowJudge):
    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        raise RuntimeError("a defect")


def watching(judge: SlowJudge, run_dir: Path, share: float = 1.0, num_queued: int = 8) -> WatchingJudges:
    watcher = Watcher(name="gold", judge=judge, share=share, num_queued=num_queued, at_once=1, deadline_s=100)
    return WatchingJudges([watcher], run_dir, seed=0)


def step(number: int, *groups: Sequence[float | None]) -> StepEnd:
    """groups: the trained rewards of each."""
    judged = []
    for index, rewards in enumerate(groups):
        group_id = f"g{number:06d}{index}"
        rollouts = tuple(rollout_of_text(group_id, sibling, "5") for sibling in range(len(rewards)))
        verdicts = tuple(report_of(reward).verdict for reward in rewards)
        judged.append(JudgedGroup(group_id=group_id, prompt=PROMPT, rollouts=rollouts, verdicts=verdicts))
    report = cast(StepReport, SimpleNamespace(step=number, groups=tuple(judged)))
    return StepEnd(report=report, counts=cast(Any, None), pipeline=cast(Any, None), metrics={}, is_last=False)


def watch(feature: WatchingJudges, *steps: StepEnd, pause_s: float = 1.0) -> tuple[list[Mapping[str, float]], dict]:
    """The metrics of each step, `pause_s` of virtual time after the one before, and the state at the end."""

    async def run() -> tuple[list[Mapping[str, float]], dict]:
        metrics = []
        for end in steps:
            began_s = asyncio.get_running_loop().time()
            metrics.append(await feature.after_step(end))
            assert asyncio.get_running_loop().time() == began_s, "a step waited"
            await asyncio.sleep(pause_s)
        await feature.close()
        return metrics, json.loads(json.dumps(feature.state()))

    return run_virtually(run)


def test_it_agrees_as_its_verdicts_do_and_they_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    judge = SlowJudge(rewards=(0.1, 0.9, 0.5, None))
    feature = watching(judge, tmp_path)
    metrics, state = watch(feature, step(1, (0.1, 0.2, 0.3, 0.4)), step(2, (0.3, 0.2, None, 0.4)), step(3))
    assert metrics[0] == {"watch/gold/groups": 0, "watch/gold/dropped_groups": 0}
    assert metrics[1]["watch/gold/rank_correlation"] == pytest.approx(0.5)  # 1, 3, 2 beside 1, 2, 3
    assert metrics[1]["watch/gold/flips"] == pytest.approx(1 / 3)
    assert metrics[1]["watch/gold/reward"] == pytest.approx(0.5) and metrics[1]["watch/gold/failed_unparseable"] == 1
    assert metrics[2]["watch/gold/rank_correlation"] == -1
    found = summaries(state)["gold"]
    assert (found.groups, found.dropped_groups, found.unfinished_groups, found.failed) == (2, 0, 0, {"unparseable": 2})
    assert (found.rank_correlation, found.flips) == (pytest.approx(-0.25), pytest.approx(2 / 4))
    lines = [json.loads(line) for line in (tmp_path / "watched.jsonl").read_text().splitlines()]
    assert [(line["watcher"], line["step"], line["sibling"]) for line in lines[:2]] == [("gold", 1, 0), ("gold", 1, 1)]
    assert "failed" in lines[3] and "verdict" not in lines[3]
    assert judge.priorities == {LAST}


def test_what_does_not_fit_its_queue_is_dropped_and_the_end_waits_for_nothing(tmp_path: Path) -> None:
    feature = watching(SlowJudge(seconds=50), tmp_path, num_queued=2)
    metrics, state = watch(feature, *(step(number, (0.1, 0.2), (0.1, 0.3)) for number in range(1, 4)))
    assert [one["watch/gold/dropped_groups"] for one in metrics] == [0, 1, 2]  # one is judged, two wait
    found = summaries(state)["gold"]
    assert (found.groups, found.dropped_groups, found.unfinished_groups, found.rank_correlation) == (0, 3, 3, None)


def test_groups_past_their_deadline_and_a_broken_judge_are_failures_and_never_numbers(tmp_path: Path) -> None:
    _, state = watch(watching(SlowJudge(seconds=1000), tmp_path), step(1, (0.1, 0.2)), pause_s=200)
    assert (summaries(state)["gold"].failed, summaries(state)["gold"].reward) == ({"timeout": 2}, None)
    _, state = watch(watching(BrokenJudge(), tmp_path), step(1, (0.1, 0.2)), step(2, (0.1, 0.2)))
    assert summaries(state)["gold"].failed == {"died": 4}, "it goes on with the next group"


def test_its_share_is_drawn_by_seed_and_its_counts_go_on_after_a_resume(tmp_path: Path) -> None:
    ends = [step(number, *[(0.1, 0.2)] * 4) for number in range(1, 51)]
    _, state = watch(watching(SlowJudge(), tmp_path / "one", share=0.2), *ends)
    assert 25 <= summaries(state)["gold"].groups <= 55
    resumed = watching(SlowJudge(), tmp_path / "two", share=0.2)
    resumed.restore(watch(watching(SlowJudge(), tmp_path / "three", share=0.2), *ends[:20])[1])
    assert watch(resumed, *ends[20:])[1] == state


def simulated(feature: WatchingJudges | None, patch: pytest.MonkeyPatch) -> SimulatedRun:
    after_step = Simulation._after_step

    async def watched(cluster: Simulation, report: StepReport) -> None:
        await after_step(cluster, report)
        if feature is not None:
            await feature.after_step(
                StepEnd(report=report, counts=cast(Any, None), pipeline=cast(Any, None), metrics={}, is_last=False)
            )

    with patch.context() as here:
        here.setattr(Simulation, "_after_step", watched)
        return simulate(workload(), seats(), COSTS, 6)


def test_a_watcher_on_slots_of_its_own_leaves_every_step_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = SlowJudge(seconds=0.7)
    feature = watching(judge, tmp_path, num_queued=4)
    with_watcher, without = simulated(feature, monkeypatch), simulated(None, monkeypatch)
    assert with_watcher.steps == without.steps
    found = summaries(feature.state())["gold"]
    assert found.groups > 0 and found.unfinished_groups > 0, "it judged, and nobody waited for the rest"
