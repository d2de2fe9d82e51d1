"""Mixes judges into one reward. A component that fails fails the mixture: weights are never shifted to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from grmpipe.judge.verdict import mixed
from grmpipe.types import Failed, Judge, JudgeReport, Prompt, Rollout, Verdict


class MixedJudge:
    """The weighted mean of its components' rewards: name -> (judge, weight above 0), weights normalised."""

    def __init__(self, components: Mapping[str, tuple[Judge, float]]) -> None:
        if not components:
            raise ValueError("mix: is empty; give at least one component and its weight")
        for name, (_, weight) in components.items():
            if not weight > 0:
                raise ValueError(f"mix.{name}: a weight must be above 0, got {weight}")
        self._judges = {name: judge for name, (judge, _) in components.items()}
        self._weights = {name: weight for name, (_, weight) in components.items()}

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        async with asyncio.TaskGroup() as tasks:
            asked = {
                name: tasks.create_task(judge.judge(prompt, rollout, priority)) for name, judge in self._judges.items()
            }
        reports = {name: task.result() for name, task in asked.items()}
        return JudgeReport(
            verdict=self._verdict({name: report.verdict for name, report in reports.items()}),
            judgements=tuple(judgement for report in reports.values() for judgement in report.judgements),
            failures=tuple(failure for report in reports.values() for failure in report.failures),
        )

    def _verdict(self, parts: Mapping[str, Verdict | Failed]) -> Verdict | Failed:
        """The mixture; or else the first failure, in the order of the components."""
        verdicts: dict[str, Verdict] = {}
        for name, part in parts.items():
            if isinstance(part, Failed):
                return part
            verdicts[name] = part
        return mixed(verdicts, self._weights)
