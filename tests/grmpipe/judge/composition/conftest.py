"""Simulated judges of rewards that are known, a composition of them, and a driver that does tasks in any order."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from configs import judge_config

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.config.judge import JudgeConfig, Scale
from grmpipe.config.reward import RewardConfig, RewardTree
from grmpipe.config.reward_checks import check_rewards
from grmpipe.judge.composition.combine_verdicts import MeasuredSkill
from grmpipe.judge.composition.composed_judge import compose_judge
from grmpipe.judge.pointwise_adapter import PointwiseAdapter, rollout_of_text
from grmpipe.judge.votes import mean, voted
from grmpipe.models.types import Completion, Message, VersionSpan
from grmpipe.types import Failed, Judge, Judgement, JudgeReport, JudgeSession, JudgeTask, Prompt, Rollout, Verdict

REFUSED = Failed(stage="judge", cause="refused", attempts=0, detail="won't")
Given = Callable[[str, int], float | tuple[float, ...] | Verdict | Failed]  # (group, sibling) -> reward, votes, ..


def judgement(group_id: str, siblings: tuple[int, ...], num_tokens: int = 3) -> Judgement:
    completion = Completion(
        token_ids=(7,) * num_tokens,
        logprobs=(-1.0,) * num_tokens,
        text="?" * num_tokens,
        finish_reason="stop",
        versions=(VersionSpan(model="grm", version=0, start=0, end=num_tokens),),
    )
    scores = (5.0,) * len(siblings)
    return Judgement(
        group_id=group_id, siblings=siblings, scores=scores, prompt_ids=(1,), completion=completion, grm="g", version=0
    )


@dataclass
class Simulated:
    """A judge with known rewards. asked: (group, sibling) in the order in which it was asked."""

    given: Given
    scale: Scale = field(default_factory=Scale)
    delay_s: Callable[[], float] = lambda: 0.0
    asked: list[tuple[str, int]] = field(default_factory=list)

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        self.asked.append((rollout.group_id, rollout.sibling))
        await asyncio.sleep(self.delay_s())
        return self.report(rollout)

    def report(self, rollout: Rollout, seen: tuple[int, ...] | None = None) -> JudgeReport:
        given = self.given(rollout.group_id, rollout.sibling)
        if isinstance(given, Failed):
            return JudgeReport(verdict=given, failures=(given,))
        if isinstance(given, Verdict):
            return JudgeReport(verdict=given)
        rewards = given if isinstance(given, tuple) else (given,)
        scores = [self.scale.low + (self.scale.high - self.scale.low) * reward for reward in rewards]
        shown = () if seen == () else (judgement(rollout.group_id, seen or (rollout.sibling,)),)
        return JudgeReport(verdict=voted("generative", rollout, scores, mean, self.scale), judgements=shown)


@dataclass
class Listwise:
    """The same, for all siblings at once: the first one's report has the judgement. fewest: siblings that it compares;
    it has no task for fewer.
    """

    judge: Simulated
    fewest: int = 1

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        return ListwiseSession(self.judge, size, self.fewest)


class ListwiseSession:
    def __init__(self, judge: Simulated, size: int, fewest: int) -> None:
        self._judge = judge
        self._size = size
        self._fewest = fewest
        self._rollouts: dict[int, Rollout] = {}

    def begin(self) -> Sequence[JudgeTask]:
        return (JudgeTask(members=()),)

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        assert rollout.sibling not in self._rollouts, "a rollout is given once"
        self._rollouts[rollout.sibling] = rollout
        is_whole = len(self._rollouts) == self._size >= self._fewest
        return (JudgeTask(members=tuple(range(self._size))),) if is_whole else ()

    async def judge(self, judge_task: JudgeTask, priority: int = 0) -> Mapping[int, JudgeReport]:
        await asyncio.sleep(self._judge.delay_s())
        members = judge_task.members
        self._judge.asked += [(self._rollouts[sibling].group_id, sibling) for sibling in members]
        return {one: self._judge.report(self._rollouts[one], members if one == 0 else ()) for one in members}


@dataclass
class Table:
    """A composition of simulated judges, by name; a judge called `list...` sees all siblings at once, one called
    `list_pairs` needs two.
    """

    judges: dict[str, Simulated]
    judge: Judge
    seed: int = 0

    def reports(
        self, size: int = 4, group_id: str = "g000000", order: int = 0, source: str = "", done: Collection[int] = ()
    ) -> dict[int, JudgeReport]:
        """The reports on a group whose rollouts and tasks come in a random order. done: siblings with a verdict from
        before a resume, whose tasks are skipped.
        """
        prompt = Prompt(prompt_id="p", messages=(Message(role="user", content="?"),), source=source)
        return run_virtually(lambda: drive(self.judge.open(prompt, group_id, size), size, group_id, order, set(done)))

    def outcomes(self, size: int = 4, **how: Any) -> list[float | str]:
        """What training gets of the siblings, or the causes of their failures."""
        return [outcome_of(report) for _, report in sorted(self.reports(size, **how).items())]

    def asked(self, name: str) -> list[int]:
        return sorted(sibling for _, sibling in self.judges[name].asked)


def outcome_of(report: JudgeReport) -> float | str:
    verdict = report.verdict
    if isinstance(verdict, Failed):
        return verdict.cause
    return round(math.fsum(span.value for span in verdict.normalised or verdict.rewards), 9)


async def drive(session: JudgeSession, size: int, group_id: str, order: int, done: set[int]) -> dict[int, JudgeReport]:
    """Do what the pipeline does with a session, in an order drawn from `order`."""
    draw = random.Random(order)
    found: dict[int, JudgeReport] = {}

    async def do(judge_task: JudgeTask) -> None:
        await asyncio.sleep(draw.random())
        if judge_task.members and done.union(found).issuperset(judge_task.members):
            return
        for sibling, report in (await session.judge(judge_task)).items():
            assert sibling not in found, "a report is given once"
            found[sibling] = report

    async with asyncio.TaskGroup() as tasks:
        for judge_task in session.begin():
            tasks.create_task(do(judge_task))
        for sibling in draw.sample(range(size), size):
            await asyncio.sleep(draw.random())
            for judge_task in session.add(rollout_of_text(group_id, sibling, f"text {sibling}")):
                tasks.create_task(do(judge_task))
    return {sibling: report for sibling, report in found.items() if sibling not in done}


def composed(
    reward: Mapping[str, Any],
    judges: Mapping[str, Given],
    *,
    rewards: Mapping[str, Mapping[str, Any]] | None = None,
    scales: Mapping[str, Scale] | None = None,
    skill: MeasuredSkill | None = None,
    delays: int | None = None,
    seed: int = 0,
) -> Table:
    draw = random.Random(delays)
    delay_s = (lambda: 0.0) if delays is None else draw.random
    scales = scales or {}
    made = {name: Simulated(given, scales.get(name, Scale()), delay_s) for name, given in judges.items()}
    as_judges: dict[str, Judge] = {
        name: Listwise(judge, 1 + (name == "list_pairs")) if name.startswith("list") else PointwiseAdapter(judge)
        for name, judge in made.items()
    }
    configs = {
        name: judge_config(
            score_min=judge.scale.low,
            score_max=judge.scale.high,
            **({"protocol": "listwise", "template": "listwise", "parser": "boxed"} if name.startswith("list") else {}),
        )
        for name, judge in made.items()
    }
    nested = {name: RewardConfig(**values) for name, values in (rewards or {}).items()}
    root = RewardConfig(**reward)
    tree = RewardTree.of(root, nested)
    check_rewards(tree, made, group_baseline=False)
    configs.setdefault("judge", JudgeConfig())
    return Table(judges=made, judge=compose_judge(tree, as_judges, configs, seed, skill))


@dataclass(frozen=True)
class GroupBench:
    """Helpers for the tests of compositions."""

    refused = REFUSED
    composed = staticmethod(composed)
    outcome_of = staticmethod(outcome_of)


@pytest.fixture(scope="session")
def group_bench() -> GroupBench:
    return GroupBench()
