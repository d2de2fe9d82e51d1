"""The judge session of a whole group: all siblings in one prompt, in another order for each judgement (SPCT)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from grmpipe.judge.fence import plain
from grmpipe.judge.grm_client import GrmQuestion
from grmpipe.judge.meta_rm import JudgedResponses
from grmpipe.judge.protocols.judge_context import JudgeContext
from grmpipe.judge.protocols.sampled_judgements import Results, SampledJudgements, sample_judgements
from grmpipe.judge.verdict import COMPONENT, Vote, all_failed, voted
from grmpipe.types import Failed, Judgement, JudgeReport, JudgeTask, Prompt, Rollout, Verdict
from models.seeds import derive_seed, first_name


class ListwiseSession:
    """Judges once, when the last sibling has ended. The first sibling's report holds all judgements."""

    def __init__(self, context: JudgeContext, prompt: Prompt, group_id: str, size: int) -> None:
        self._context = context
        self._prompt = prompt
        self._group_id = group_id
        self._size = size
        self._principles = context.principles_of(prompt, group_id)
        self._rollouts: dict[int, Rollout] = {}

    def begin(self) -> Sequence[JudgeTask]:
        return self._principles.judge_tasks()

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        self._rollouts[rollout.sibling] = rollout
        return (JudgeTask(members=tuple(sorted(self._rollouts))),) if len(self._rollouts) == self._size else ()

    async def judge(self, judge_task: JudgeTask, priority: int = 0) -> Mapping[int, JudgeReport]:
        principles = await self._principles.text(priority)
        if not judge_task.members:
            return {}
        questions = await self._questions(judge_task.members, principles)
        if isinstance(questions, Failed):
            return self._failed_for_all(judge_task.members, [questions])

        async def ask(index: int) -> Results:
            return await self._context.client.judgement(questions[index], index, priority)

        sampled = await sample_judgements(ask, self._context.config.num_judgements)
        return await self._reports(judge_task.members, sampled, priority)

    async def _questions(self, members: Sequence[int], principles: str | Failed | None) -> list[GrmQuestion] | Failed:
        """One question per judgement, each with its own order of siblings."""
        if isinstance(principles, Failed):
            return principles
        questions = []
        for index in range(self._context.config.num_judgements):
            order = self._order(members, index)
            responses = [self._context.shown(self._prompt, self._rollouts[sibling]) for sibling in order]
            asked_for = await self._context.prompt(self._prompt, responses, principles)
            if isinstance(asked_for, Failed):
                return asked_for
            questions.append(
                GrmQuestion(
                    group_id=self._group_id,
                    name=f"{self._group_id}/all",
                    siblings=order,
                    num_scores=len(order),
                    prompt=asked_for,
                )
            )
        return questions

    def _order(self, members: Sequence[int], index: int) -> tuple[int, ...]:
        shuffled = list(members)
        random.Random(derive_seed(self._context.seed, first_name(f"order {self._group_id}/{index}"))).shuffle(shuffled)
        return tuple(shuffled)

    async def _reports(
        self, members: Sequence[int], sampled: SampledJudgements, priority: int
    ) -> dict[int, JudgeReport]:
        if not sampled.judgements:
            return self._failed_for_all(members, sampled.failures)
        judged = [self._with_responses(judgement) for judgement in sampled.judgements]
        counted = await self._context.counted(judged, priority)
        reports = {sibling: JudgeReport(verdict=self._verdict(sibling, counted)) for sibling in members}
        evidence = replace(reports[members[0]], judgements=sampled.judgements, failures=sampled.failures)
        return reports | {members[0]: self._principles.added_to(evidence)}

    def _verdict(self, sibling: int, counted: tuple[Sequence[Judgement], Vote] | Failed) -> Verdict | Failed:
        if isinstance(counted, Failed):
            return counted
        judgements, vote = counted
        scores = [judgement.scores[judgement.siblings.index(sibling)] for judgement in judgements]
        verdict = voted(COMPONENT, self._rollouts[sibling], scores, vote, self._context.scale)
        abstained = self._context.abstention(verdict.score_std)
        return abstained or replace(verdict, score=self._context.config.shown_score(verdict.score))

    def _with_responses(self, judgement: Judgement) -> JudgedResponses:
        responses = [self._context.shown(self._prompt, self._rollouts[sibling]) for sibling in judgement.siblings]
        return JudgedResponses(prompt=self._prompt, responses=tuple(map(plain, responses)), judgement=judgement)

    def _failed_for_all(self, members: Sequence[int], failures: Sequence[Failed]) -> dict[int, JudgeReport]:
        reports = {sibling: JudgeReport(verdict=all_failed(failures)) for sibling in members}
        evidence = replace(reports[members[0]], failures=tuple(failures))
        return reports | {members[0]: self._principles.added_to(evidence)}
