"""The hearing of a whole group at once: all siblings in one prompt, in another order for each judgement (SPCT)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from grmpipe.judge.grm_client import Question
from grmpipe.judge.meta_rm import JudgedResponses
from grmpipe.judge.protocols.base import Court
from grmpipe.judge.protocols.sampling import Panel, Results, convene
from grmpipe.judge.verdict import COMPONENT, Vote, all_failed, voted
from grmpipe.types import Failed, Judgement, JudgeReport, Prompt, Rollout, Sitting, Verdict
from models.seeds import derive_seed


class ListwiseHearing:
    """It sits once, when the last sibling has ended. What it was asked stands in the first sibling's report."""

    def __init__(self, court: Court, prompt: Prompt, group_id: str, size: int) -> None:
        self._court = court
        self._prompt = prompt
        self._group_id = group_id
        self._size = size
        self._principles = court.principles_of(prompt, group_id)
        self._rollouts: dict[int, Rollout] = {}

    def begin(self) -> Sequence[Sitting]:
        return self._principles.sittings()

    def add(self, rollout: Rollout) -> Sequence[Sitting]:
        self._rollouts[rollout.sibling] = rollout
        return (Sitting(members=tuple(sorted(self._rollouts))),) if len(self._rollouts) == self._size else ()

    async def judge(self, sitting: Sitting, priority: int = 0) -> Mapping[int, JudgeReport]:
        principles = await self._principles.text(priority)
        if not sitting.members:
            return {}
        questions = self._questions(sitting.members, principles)
        if isinstance(questions, Failed):
            return self._failed_for_all(sitting.members, [questions])

        async def ask(index: int) -> Results:
            return await self._court.asker.judgement(questions[index], index, priority)

        panel = await convene(ask, self._court.config.num_judgements)
        return await self._reports(sitting.members, panel, priority)

    def _questions(self, members: Sequence[int], principles: str | Failed | None) -> list[Question] | Failed:
        """One for each judgement, every one with an order of its own."""
        if isinstance(principles, Failed):
            return principles
        questions = []
        for index in range(self._court.config.num_judgements):
            order = self._order(members, index)
            texts = [self._rollouts[sibling].text for sibling in order]
            asked_for = self._court.prompt(self._prompt, texts, principles)
            if isinstance(asked_for, Failed):
                return asked_for
            questions.append(
                Question(
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
        random.Random(derive_seed(self._court.seed, f"order {self._group_id}/{index}")).shuffle(shuffled)
        return tuple(shuffled)

    async def _reports(self, members: Sequence[int], panel: Panel, priority: int) -> dict[int, JudgeReport]:
        if not panel.judgements:
            return self._failed_for_all(members, panel.failures)
        judged = [self._with_responses(judgement) for judgement in panel.judgements]
        counted = await self._court.counted(judged, priority)
        reports = {sibling: JudgeReport(verdict=self._verdict(sibling, counted)) for sibling in members}
        evidence = replace(reports[members[0]], judgements=panel.judgements, failures=panel.failures)
        return reports | {members[0]: self._principles.told_in(evidence)}

    def _verdict(self, sibling: int, counted: tuple[Sequence[Judgement], Vote] | Failed) -> Verdict | Failed:
        if isinstance(counted, Failed):
            return counted
        judgements, vote = counted
        scores = [judgement.scores[judgement.siblings.index(sibling)] for judgement in judgements]
        verdict = voted(COMPONENT, self._rollouts[sibling], scores, vote, self._court.scale)
        abstained = self._court.abstention(verdict.agreement)
        return abstained or replace(verdict, score=self._court.config.shown_score(verdict.score))

    def _with_responses(self, judgement: Judgement) -> JudgedResponses:
        responses = tuple(self._rollouts[sibling].text for sibling in judgement.siblings)
        return JudgedResponses(prompt=self._prompt, responses=responses, judgement=judgement)

    def _failed_for_all(self, members: Sequence[int], failures: Sequence[Failed]) -> dict[int, JudgeReport]:
        reports = {sibling: JudgeReport(verdict=all_failed(failures)) for sibling in members}
        evidence = replace(reports[members[0]], failures=tuple(failures))
        return reports | {members[0]: self._principles.told_in(evidence)}
