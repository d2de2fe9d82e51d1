"""The judge session of rubrics: single rollouts, with a score for each criterion, by one judgement or several."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from grmpipe.config.judge import Scale
from grmpipe.config.judge_tables import VOTES_WITH_META_RM
from grmpipe.data.rubrics import name_criteria
from grmpipe.judge.evidence import find_fault, is_quoted, normalise, read_quotes
from grmpipe.judge.grm import CheckedScores, GrmQuestion, current_purpose
from grmpipe.judge.parse import Scores
from grmpipe.judge.protocols.group_session import JudgeContext
from grmpipe.judge.protocols.pointwise import PointwiseSession, ScoredParts
from grmpipe.judge.protocols.sampled_judgements import SampledJudgements
from grmpipe.judge.protocols.stepwise import ResponseStep, split_steps
from grmpipe.judge.trajectory import Trajectory
from grmpipe.judge.verdict import all_failed, make_failure, outcome_place, report_failures, sum_spans
from grmpipe.judge.votes import MET, Weights, mean
from grmpipe.models.seeds import first_name, is_drawn
from grmpipe.types import (
    Criterion,
    Failed,
    JudgedCriterion,
    Judgement,
    JudgeReport,
    JudgeTask,
    Prompt,
    RewardSpan,
    Rollout,
    Verdict,
)

ROUNDING = 1e-9  # in a share


# -- what a judgement says of each criterion -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CriteriaCheck:
    """Reads the scores of one judgement, criterion by criterion: an impossible score, or a quote that the response
    doesn't have, fails that criterion alone.

    asked: the criteria in the order shown, with their names. work: what the policy wrote.
    """

    asked: Sequence[tuple[str, Criterion]]
    scale: Scale
    work: str

    def __call__(self, written: Scores, scores: Scores, answer: str) -> CheckedScores:
        quotes = read_quotes(answer, len(self.asked)) if any(one.evidence for _, one in self.asked) else {}
        kept, unread, evidence = dict[str, float](), dict[str, str](), dict[str, str]()
        for number, (name, criterion) in enumerate(self.asked, 1):
            score, why = self._read(criterion, written[number - 1], scores[number - 1])
            if not why and criterion.evidence and self.scale.to_reward(score) >= MET:
                why = find_fault(quotes.get(number, ()), self.work)
            if why:
                unread[name] = why
                continue
            kept[name] = score
            if criterion.evidence and number in quotes:
                evidence[name] = quotes[number][0].strip()
        return CheckedScores(
            scores=tuple(kept.values()), criteria=tuple(kept) if unread else (), unread=unread, quotes=evidence
        )

    def _read(self, criterion: Criterion, written: float, score: float) -> tuple[float, str]:
        """The score on the judge's scale, or why there is none. A score by tokens may lie between two levels."""
        if criterion.kind == "yes_no" and written not in (self.scale.low, self.scale.high):
            return score, f"{written:g} is neither {self.scale.high} (met) nor {self.scale.low} (not met)"
        if not criterion.levels:
            return score, ""
        known = [level for level, _ in criterion.levels]
        if not known[0] <= written <= known[-1]:
            return score, f"{written:g} is no level from {known[0]} to {known[-1]}"
        return self.scale.to_score(min(max((score - known[0]) / (known[-1] - known[0]), 0.0), 1.0)), ""


# -- from judgements to verdicts -------------------------------------------------------------------------------------


def choose_left_out(
    rubric: Mapping[str, Criterion], failed: Mapping[int, Collection[str]], min_share: float
) -> frozenset[str]:
    """The criteria that no sibling of a group is judged by, because their judgement failed for one of them: a sibling
    without its hardest criterion would look better than the others. The verdicts of siblings that lack another one
    fail.

    failed: sibling -> names. At least `min_share` of the weight above 0 is kept. Siblings that lack the least come
    first; one that lacks an essential criterion, or a fault, has no verdict.
    """
    total = sum(one.weight for one in rubric.values() if one.weight > 0)
    left_out: frozenset[str] = frozenset()
    weights = {sibling: sum(abs(rubric[name].weight) for name in names) for sibling, names in failed.items()}
    for sibling in sorted(failed, key=lambda one: (weights[one], one)):
        more = left_out.union(failed[sibling])
        lost = sum(rubric[name].weight for name in more)
        may_lack = all(rubric[name].weight > 0 and not rubric[name].essential for name in more)
        if may_lack and total - lost >= min_share * total - ROUNDING:
            left_out = more
    return left_out


def credit_evidence(
    verdict: Verdict,
    rollout: Rollout,
    points: Mapping[str, float],
    places: Mapping[str, ResponseStep],
    steps: Sequence[ResponseStep],
) -> Verdict:
    """The verdict with the points of a criterion on the tokens where its evidence is, and the rest of the reward on the
    whole, also what an essential criterion took away. The sum stays. Where it would be below 0, faults cost less:
    on the whole the difference would be a prize for whoever has them.

    A step without points has a reward of 0: without one its tokens would belong to the step of the next reward, and the
    k-th steps of siblings, which estimators compare, would be different turns.
    """
    merits, costs = (math.fsum(max(sign * one, 0.0) for one in points.values()) for sign in (1, -1))
    if costs > merits:
        points = {name: one * merits / costs if one < 0 else one for name, one in points.items()}
    earned = [*((step, 0.0) for step in steps), *((place, points.get(name, 0.0)) for name, place in places.items())]
    credited = [RewardSpan(turn=step.turn, start=step.start, end=step.end, value=value) for step, value in earned]
    rest = verdict.outcome - math.fsum(span.value for span in credited)
    return replace(verdict, rewards=sum_spans([*credited, replace(outcome_place(rollout), value=rest)]))


def drop_some(rubric: Mapping[str, Criterion], share: float, seed: int, group_id: str) -> dict[str, Criterion]:
    """The criteria that a group of training is judged by: the essential ones, and each other with the probability of
    1 - share; all of them if none would be left by which a response could earn anything.
    """
    return keep(
        rubric,
        lambda name: rubric[name].essential or not is_drawn(seed, first_name(f"dropout {group_id}/{name}"), share),
    )


def keep(rubric: Mapping[str, Criterion], is_kept: Callable[[str], bool]) -> dict[str, Criterion]:
    """The criteria that are kept; all of them if none would be left by which a response could earn anything."""
    kept = {name: criterion for name, criterion in rubric.items() if is_kept(name)}
    return kept if any(one.weight > 0 for one in kept.values()) else dict(rubric)


class RubricSession(PointwiseSession):
    """Like pointwise, with a score per criterion. A report waits for the siblings only where criteria may be left out
    for all of them.
    """

    def __init__(self, context: JudgeContext, prompt: Prompt, group_id: str, size: int) -> None:
        super().__init__(context, prompt, group_id, size)
        rubric = context.template.find_rubric(prompt)
        self._version: int | None = None
        if context.evolving is not None:  # frozen here: all siblings are judged by one version
            self._version, shared = context.evolving.select(group_id)
            rubric = shared.join(prompt)
        self._rubric = dict(zip(name_criteria(rubric), rubric, strict=True))
        self._num_criteria = len(self._rubric)
        if (step := prompt.step) is not None:
            every = self._rubric
            self._rubric = keep(every, lambda name: every[name].from_step <= step)
        if (share := context.config.rubric.dropout) and current_purpose() == "training":
            self._rubric = drop_some(self._rubric, share, context.seed, group_id)
        self._sampled: dict[int, SampledJudgements | Failed] = {}  # sibling -> its judgements

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        (own,) = super().add(rollout)
        if not self._context.config.waits_for_siblings:
            return (own,)
        return (JudgeTask(members=tuple(range(self._size)), part=own),)

    async def _judge(
        self, judge_task: JudgeTask, principles: str | Failed | None, priority: int
    ) -> Mapping[int, JudgeReport]:
        (sibling,) = (judge_task.part or judge_task).members
        self._sampled[sibling] = await self._sample_criteria(self._rollouts[sibling], principles, priority)
        if not self._context.config.waits_for_siblings:
            judged = [sibling]
        elif len(self._sampled) == self._size:
            judged = sorted(self._sampled)
        else:
            return {}
        failed = {
            one: self._rubric.keys() - list_judged(sampled, self._rubric)
            for one in judged
            if isinstance(sampled := self._sampled[one], SampledJudgements)
        }
        # Of a response that is judged alone nobody knows whether its siblings have what it lacks.
        min_share = self._context.config.rubric.min_share if self._size > 1 else 1.0
        left_out = choose_left_out(self._rubric, failed, min_share)
        reports = {one: self._principles.add_to(await self._report(one, left_out, priority)) for one in judged}
        return {one: replace(report, rubric_version=self._version) for one, report in reports.items()}

    async def _sample_criteria(
        self, rollout: Rollout, principles: str | Failed | None, priority: int
    ) -> SampledJudgements | Failed:
        if isinstance(principles, Failed):
            return principles
        if not self._rubric:
            return make_failure("refused", f"prompt {self._prompt.prompt_id} has no rubric")
        parts = self._make_parts(rollout)
        questions = await self._make_questions(rollout, parts.shown, principles)
        if isinstance(questions, Failed):
            return questions
        return await self._sample(rollout, parts, questions, priority)

    def _make_parts(self, rollout: Rollout, left_out: Collection[str] = ()) -> ScoredParts:
        kept = {name: criterion for name, criterion in self._rubric.items() if name not in left_out}
        weights = Weights.of_rubric([*self._rubric.values()], self._context.config.rubric.essential_cap, kept.values())
        shown = self._context.show_rollout(self._prompt, rollout)
        return ScoredParts(shown=(shown,), weights=weights, places=(outcome_place(rollout),))

    async def _make_questions(
        self, rollout: Rollout, shown: Sequence[Trajectory], principles: str | None
    ) -> list[GrmQuestion] | Failed:
        """A question for each call: `judge.rubric.criteria_per_call` at a time, fewer where they don't fit the window.
        Their prompts begin alike, up to the criteria, so that an engine's prefix cache has most of all but the first.
        """
        names, context = list(self._rubric), self._context
        per_call = context.config.rubric.criteria_per_call or len(names)
        waiting = [names[start : start + per_call] for start in range(0, len(names), per_call)]
        name = f"{rollout.group_id}/{rollout.sibling}"
        work = "\n".join(one.policy_text for one in shown)
        questions: list[GrmQuestion] = []
        while waiting:
            some = waiting.pop(0)
            asked = [(one, self._rubric[one]) for one in some]
            prompt = await context.prompt(
                self._prompt,
                shown,
                principles,
                [one for _, one in asked],
                shorten=len(some) == 1,
                state=rollout.state,
            )
            if isinstance(prompt, Failed) and prompt.cause == "too_long" and len(some) > 1:
                waiting[:0] = [some[: (len(some) + 1) // 2], some[(len(some) + 1) // 2 :]]
                continue
            if isinstance(prompt, Failed):
                return prompt
            check = CriteriaCheck(asked=asked, scale=context.scale, work=work)
            questions.append(
                GrmQuestion(
                    group_id=rollout.group_id,
                    name=name if len(some) == len(names) else f"{name}/c{names.index(some[0])}",
                    siblings=(rollout.sibling,),
                    num_scores=len(some),
                    prompt=prompt,
                    criteria=tuple(some) if len(some) < self._num_criteria else (),
                    check=check,
                )
            )
        return questions

    async def _report(self, sibling: int, left_out: Collection[str], priority: int) -> JudgeReport:
        sampled, rollout, vote = self._sampled[sibling], self._rollouts[sibling], self._context.vote
        if isinstance(sampled, Failed):
            return report_failures(sampled)
        judgements = sampled.judgements
        if self._context.config.vote in VOTES_WITH_META_RM:  # which weigh judgements of the whole rubric
            judgements = tuple(one for one in judgements if not one.criteria)
        counted = await vote.select(judgements, priority) if judgements else (judgements, mean)
        chosen, count = ((), mean) if isinstance(counted, Failed) else counted
        rows = [gather_scores(some, chosen, self._rubric) for some in sampled.by_index]
        given = {name: [row[name] for row in rows if name in row] for name in self._rubric}
        met = {name: self._context.scale.to_reward(count(scores)) if scores else None for name, scores in given.items()}
        parts = self._make_parts(rollout, left_out)
        verdict: Verdict | Failed
        if isinstance(counted, Failed):
            verdict = counted
        elif lacking := [name for name, scores in given.items() if not scores and name not in left_out]:
            verdict = self._fail(sampled, lacking)
        else:
            kept = [name for name in self._rubric if name not in left_out]
            scores = [[row.get(name) for name in kept] for row in rows if row]
            verdict = vote.make_verdict(scores, count, parts.weights, parts.places)
            if isinstance(verdict, Verdict) and self._context.config.rubric.credit == "evidence":
                points = {name: part * (met[name] or 0.0) for name, part in zip(kept, parts.weights.parts, strict=True)}
                verdict = credit_evidence(verdict, rollout, points, *self._place_evidence(rollout, chosen))
        criteria = tuple(
            JudgedCriterion(
                name=name,
                met=met[name],
                tags=criterion.tags,
                shared=criterion not in self._prompt.rubric,
                left_out=name in left_out,
                fault=criterion.weight < 0,
                caps=criterion.essential and (far := met[name]) is not None and far < MET,
            )
            for name, criterion in self._rubric.items()
        )
        return replace(self._make_report(rollout, parts, sampled, verdict), criteria=criteria)

    def _place_evidence(
        self, rollout: Rollout, judgements: Sequence[Judgement]
    ) -> tuple[dict[str, ResponseStep], Sequence[ResponseStep]]:
        """Criterion -> the first step or turn that has what a judgement quotes for it, by the first that quotes any;
        and all steps or turns.
        """
        decode, config = self._context.decode, self._context.config
        step_end = config.split.step_end if len(rollout.turns) == 1 and decode is not None else ""
        steps = split_steps(rollout, step_end, decode or str, thoughts=config.format.show_thoughts)
        texts, places = [(one, normalise(one.text)) for one in steps], dict[str, ResponseStep]()
        for judgement in judgements:
            for name, quote in judgement.quotes.items():
                found = next((step for step, text in texts if is_quoted(quote, text)), None)
                if found is not None:
                    places.setdefault(name, found)
        return places, steps

    def _fail(self, sampled: SampledJudgements, lacking: Sequence[str]) -> Failed:
        """The failure of a verdict that lacks criteria: the last cause of a judgement, or why one couldn't be read."""
        if not sampled.judgements:
            return all_failed(sampled.failures)
        unread = [
            f"criterion {name}: {one.unread[name]}"
            for one in sampled.judgements
            for name in lacking
            if name in one.unread
        ]
        if unread:
            return make_failure("unparseable", unread[-1], len(sampled.judgements))
        # A call that failed asked about what is lacking, in its order: the first one begins its failure's words.
        whose = [one for one in sampled.failures if one.detail.startswith(f"criteria {lacking[0]}")]
        return all_failed(whose or sampled.failures)


def list_judged(sampled: SampledJudgements, rubric: Collection[str]) -> set[str]:
    """The criteria that at least one judgement has a score for."""
    return {name for one in sampled.judgements for name in one.criteria or rubric}


def gather_scores(
    judgements: Sequence[Judgement], chosen: Sequence[Judgement], rubric: Collection[str]
) -> dict[str, float]:
    """Criterion -> score, by those of these judgements that are chosen."""
    return {
        name: score
        for one in judgements
        if any(one is each for each in chosen)
        for name, score in zip(one.criteria or rubric, one.scores, strict=True)
    }
