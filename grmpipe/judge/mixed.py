"""Mixes judges into one reward. If a component fails, the mixture fails: weights never shift to the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from grmpipe.judge.verdict import mixed
from grmpipe.types import Failed, Judge, JudgeReport, JudgeSession, JudgeTask, Prompt, Rollout, Verdict


class MixedJudge:
    """The weighted mean of its components' rewards. Components: name -> (judge, weight above 0); weights are
    normalised.
    """

    def __init__(self, components: Mapping[str, tuple[Judge, float]]) -> None:
        if not components:
            raise ValueError("mix: is empty; give at least one component and its weight")
        for name, (_, weight) in components.items():
            if not weight > 0:
                raise ValueError(f"mix.{name}: a weight must be above 0, got {weight}")
        self._judges = {name: judge for name, (judge, _) in components.items()}
        self._weights = {name: weight for name, (_, weight) in components.items()}

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        sessions = {name: judge.open(prompt, group_id, size) for name, judge in self._judges.items()}
        return MixedSession(sessions, self._weights)


class MixedSession:
    """The sessions of all components. A sibling's report is final when every component has reported on it."""

    def __init__(self, sessions: Mapping[str, JudgeSession], weights: Mapping[str, float]) -> None:
        self._sessions = sessions
        self._weights = weights
        self._reports: dict[int, dict[str, JudgeReport]] = {}  # sibling -> component -> its report

    def begin(self) -> Sequence[JudgeTask]:
        return [own for name, session in self._sessions.items() for own in marked(name, session.begin())]

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        return [own for name, session in self._sessions.items() for own in marked(name, session.add(rollout))]

    async def judge(self, judge_task: JudgeTask, priority: int = 0) -> Mapping[int, JudgeReport]:
        name = judge_task.component
        final = await self._sessions[name].judge(dataclasses.replace(judge_task, component=""), priority)
        for sibling, report in final.items():
            self._reports.setdefault(sibling, {})[name] = report
        return {
            sibling: self._mixed(self._reports[sibling])
            for sibling in final
            if len(self._reports[sibling]) == len(self._sessions)
        }

    def _mixed(self, by_name: Mapping[str, JudgeReport]) -> JudgeReport:
        reports = {name: by_name[name] for name in self._sessions}  # in the order of the components
        all_reports = list(reports.values())
        return JudgeReport(
            verdict=self._verdict({name: report.verdict for name, report in reports.items()}),
            judgements=tuple(judgement for report in all_reports for judgement in report.judgements),
            failures=tuple(failure for report in all_reports for failure in report.failures),
            principles=next((report.principles for report in all_reports if report.principles is not None), None),
            saved_tokens=sum(report.saved_tokens for report in all_reports),
            audit=next((report.audit for report in all_reports if report.audit is not None), None),
        )

    def _verdict(self, parts: Mapping[str, Verdict | Failed]) -> Verdict | Failed:
        """The mixture, or the first failure in the order of the components."""
        verdicts: dict[str, Verdict] = {}
        for name, part in parts.items():
            if isinstance(part, Failed):
                return part
            verdicts[name] = part
        return mixed(verdicts, self._weights)


def marked(name: str, judge_tasks: Sequence[JudgeTask]) -> list[JudgeTask]:
    """The judge tasks marked with the name of their component, which must not itself be a mixture."""
    assert not any(judge_task.component for judge_task in judge_tasks), "mixtures don't nest"
    return [dataclasses.replace(judge_task, component=name) for judge_task in judge_tasks]
