"""The judge session of single rollouts, each judged as a whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grmpipe.judge.grm import GrmQuestion
from grmpipe.judge.protocols.group_session import GroupSession, JudgeContext
from grmpipe.judge.protocols.sampled_judgements import (
    IN_FULL,
    Results,
    SampledJudgements,
    Stop,
    is_sure,
    sample_judgements,
)
from grmpipe.judge.trajectory import Trajectory
from grmpipe.judge.verdict import outcome_place, report_failures
from grmpipe.judge.votes import ONE_PART, Weights, mean
from grmpipe.models.seeds import first_name, is_drawn
from grmpipe.scheduler.run_together import raise_first_failure
from grmpipe.types import Failed, Judgement, JudgeReport, JudgeTask, Prompt, RewardSpan, Rollout, StopAudit, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredParts:
    """The parts of a rollout that get scores, their weights, and the tokens that get the rewards.

    shown:  what the judge reads, in the order of the template's fields.
    places: one for all scores together, or one per score. Their values are ignored.
    """

    shown: tuple[Trajectory, ...]
    places: tuple[RewardSpan, ...]
    weights: Weights = ONE_PART


class PointwiseSession(GroupSession):
    """Judges a rollout as soon as it has ended. From its siblings it uses only the spread of their scores."""

    def __init__(self, context: JudgeContext, prompt: Prompt, group_id: str, size: int) -> None:
        super().__init__(context, prompt, group_id, size)
        self._means: dict[int, float] = {}  # sibling -> mean score so far

    def scored_parts_of(self, rollout: Rollout) -> ScoredParts | Failed:
        """The parts that get scores, or the failure if there are none."""
        shown = self._context.show_rollout(self._prompt, rollout)
        return ScoredParts(shown=(shown,), places=(outcome_place(rollout),))

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        self._rollouts[rollout.sibling] = rollout
        return (JudgeTask(members=(rollout.sibling,)),)

    async def _judge(
        self, judge_task: JudgeTask, principles: str | Failed | None, priority: int
    ) -> Mapping[int, JudgeReport]:
        (sibling,) = judge_task.members
        rollout = self._rollouts[sibling]
        report = await self._judged(rollout, self.scored_parts_of(rollout), principles, priority)
        return {sibling: self._principles.add_to(report)}

    async def _judged(
        self,
        rollout: Rollout,
        parts: ScoredParts | Failed,
        principles: str | Failed | None,
        priority: int,
        mark: str = "",
    ) -> JudgeReport:
        """The report on some parts of a rollout. mark: tells these parts apart in the ids of requests."""
        if isinstance(principles, Failed):
            return report_failures(principles)
        if isinstance(parts, Failed):
            return report_failures(parts)
        asked_for = await self._context.prompt(self._prompt, parts.shown, principles, state=rollout.state)
        if isinstance(asked_for, Failed):
            return report_failures(asked_for)
        question = GrmQuestion(
            group_id=rollout.group_id,
            name=f"{rollout.group_id}/{rollout.sibling}{mark}",
            siblings=(rollout.sibling,),
            num_scores=len(parts.weights.parts),
            prompt=asked_for,
        )
        sampled = await self._sample(rollout, parts, [question], priority)
        if not sampled.judgements:
            return report_failures(*sampled.failures)
        verdict = await self._context.vote.count(sampled.judgements, parts.weights, parts.places, priority)
        return self._make_report(rollout, parts, sampled, verdict)

    def _make_report(
        self, rollout: Rollout, parts: ScoredParts, sampled: SampledJudgements, verdict: Verdict | Failed
    ) -> JudgeReport:
        return JudgeReport(
            verdict=verdict,
            judgements=sampled.judgements,
            failures=sampled.failures,
            saved_tokens=sampled.saved_tokens,
            audit=self._audit(rollout, parts, sampled),
        )

    async def _sample(
        self, rollout: Rollout, parts: ScoredParts, questions: Sequence[GrmQuestion], priority: int
    ) -> SampledJudgements:
        """The judgements of a rollout. questions: those that together ask for one."""
        client, config = self._context.client, self._context.config

        async def ask(index: int) -> Results:
            if len(questions) == 1:
                return await client.judgement(questions[0], index, priority)
            async with raise_first_failure() as calls:
                asked = [calls.create_task(client.judgement(one, index, priority)) for one in questions]
            return [result for call in asked for result in call.result()]

        stop = self._stop(rollout, parts) if len(questions) == 1 else IN_FULL
        sampled = await sample_judgements(ask, config.num_judgements, stop)
        if config.early_stop.kind == "relaxed":
            self._context.noise.add(self._score_each(parts, sampled.judgements))
        return sampled

    def _stop(self, rollout: Rollout, parts: ScoredParts) -> Stop:
        """The relaxed early stop: the standard error of this rollout's score against the spread of its group so far."""
        rules = self._context.config.early_stop
        if rules.kind != "relaxed":
            return IN_FULL

        def enough(judgements: Sequence[Judgement], num_left: int) -> bool:
            scores = self._score_each(parts, judgements)
            if not scores:
                return False
            self._means[rollout.sibling] = mean(scores)
            return is_sure(scores, list(self._means.values()), self._context.noise, rules.max_error)

        return Stop(first=rules.first, enough=enough, auditing=self._is_audited(rollout))

    def _score_each(self, parts: ScoredParts, judgements: Sequence[Judgement]) -> list[float]:
        """The scores of judgements, without those that lack a part."""
        whole = [one.scores for one in judgements if not one.criteria]
        return [parts.weights.to_score(scores, self._context.config.scale) for scores in whole]

    def _is_audited(self, rollout: Rollout) -> bool:
        name = first_name(f"audit {rollout.group_id}/{rollout.sibling}")
        return is_drawn(self._context.seed, name, self._context.config.early_stop.audit_share)

    def _audit(self, rollout: Rollout, parts: ScoredParts, sampled: SampledJudgements) -> StopAudit | None:
        if self._context.config.early_stop.kind != "relaxed" or not self._is_audited(rollout):
            return None
        enough, full = (self._score_each(parts, some) for some in (sampled.enough, sampled.judgements))
        if not enough:
            return None
        return StopAudit(
            stopped_after=sampled.stopped_after or self._context.config.num_judgements,
            stopped_score=mean(enough),
            full_score=mean(full),
        )
