"""Judges that only watch: who is drawn, what is dropped, what failed, how they agree; the run never waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from simulated_workload import COSTS, seats, workload

from grmpipe.capacity.simulate.simulated_answers import lognormal
from grmpipe.capacity.simulate.simulated_cluster import SimulatedRun, Simulation
from grmpipe.capacity.simulate.simulated_learner import SimulatedDriver
from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.capacity.simulate.workload import make_judge, make_writer
from grmpipe.judge.pointwise_adapter import HandOver, rollout_of_text
from grmpipe.judge.verdict import get_reward, make_failure, report_failures, report_score
from grmpipe.models.engines.simulated.simulated_engine import SimulatedEngine
from grmpipe.models.types import EngineSpeed, Message
from grmpipe.pipeline.interfaces import PipelineComponents, StepReport
from grmpipe.run.build.compose_pipeline import Learners
from grmpipe.run.features.run_feature import StepEnd
from grmpipe.run.features.watching_judges import LAST, Watcher, WatchingJudges, summaries
from grmpipe.scheduler.events import NoEvents
from grmpipe.scheduler.routing.router import Router
from grmpipe.types import JudgedGroup, JudgeReport, JudgeSession, Prompt, RewardSpan, Rollout

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
    assert metrics[2]["watch/gold/rank_correlation"] == pytest.approx(-1)
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


QUICK, SLOW = (
    EngineSpeed(step_s=step_s, row_s=0.001, cached_token_s=0.0, prefill_token_s=0.0, max_rows=16)
    for step_s in (0.01, 0.05)
)


class WatchedSimulation(Simulation):
    """A simulated run of 6 steps that a real judge watches, on a slow simulated engine: a slot of its own, or the slots
    of the judge that is trained on. Half of its judgements can't be parsed.
    """

    def __init__(self, run_dir: Path | None, *, own_slot: bool = True) -> None:
        costs = replace(COSTS, engines={"policy": QUICK, "grm": QUICK})
        super().__init__(workload(lengths=lognormal(100, 0.6)), seats(), costs, 6, NoEvents())
        self._run_dir, self._own_slot = run_dir, own_slot
        self.feature: WatchingJudges | None = None
        self.trained: list[tuple[object, ...]] = []
        self.ended_s = 0.0

    def _compose(self, learners: Learners, routers: Mapping[str, Router]) -> PipelineComponents:
        if self._run_dir is not None:
            watched = workload(unparseable_share=0.5)
            engine = SimulatedEngine("gold", make_writer(watched, "grm"), speed=SLOW)
            own = Router("gold", {"gold-0": engine}, NoEvents())
            judge = make_judge(watched, {"grm": own if self._own_slot else routers["grm"]}, SimulatedDriver(0.0))
            watcher = Watcher(name="gold", judge=judge, share=1.0, num_queued=2, at_once=1, deadline_s=100)
            self.feature = WatchingJudges([watcher], self._run_dir, seed=0)
        return super()._compose(learners, routers)

    async def _after_step(self, report: StepReport) -> None:
        await super()._after_step(report)
        for group in report.groups:
            rewards = [get_reward(verdict) for verdict in group.verdicts]
            self.trained.append((report.step, group.group_id, rewards, [one.turns for one in group.rollouts]))
        if self.feature is not None:
            await self.feature.after_step(
                StepEnd(report=report, counts=cast(Any, None), pipeline=cast(Any, None), metrics={}, is_last=False)
            )

    async def run(self) -> SimulatedRun:
        found = await super().run()
        if self.feature is not None:
            await self.feature.close()
        self.ended_s = asyncio.get_running_loop().time()
        return found


def simulated(run_dir: Path | None, *, own_slot: bool = True) -> tuple[WatchedSimulation, SimulatedRun]:
    made: list[WatchedSimulation] = []

    def run() -> Coroutine[Any, Any, SimulatedRun]:
        made.append(WatchedSimulation(run_dir, own_slot=own_slot))
        return made[0].run()

    found = run_virtually(run)
    return made[0], found


def test_a_watcher_on_an_engine_of_its_own_leaves_every_token_and_step_as_it_was(tmp_path: Path) -> None:
    (watched, result), (plain, expected) = simulated(tmp_path / "own"), simulated(None)
    assert watched.trained == plain.trained
    assert result.steps == expected.steps
    assert watched.ended_s == plain.ended_s, "the end waited for it"
    assert watched.feature is not None
    found = summaries(watched.feature.state())["gold"]
    assert found.groups > 0 and found.dropped_groups > 0 and found.unfinished_groups > 0
    assert found.groups + found.dropped_groups + found.unfinished_groups == len(plain.trained)
    assert found.failed["unparseable"] > 0 and result.failed_judgements == {}, "its failures aren't the run's"
    _, delayed = simulated(tmp_path / "shared", own_slot=False)
    assert delayed.steps != expected.steps, "on the slots of the judge that is trained on it would show"
