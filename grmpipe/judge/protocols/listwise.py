"""The judge session of a whole group: all siblings in one prompt, in another order for each judgement (SPCT)."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from grmpipe.judge.grm import GrmQuestion
from grmpipe.judge.protocols.group_session import GroupSession
from grmpipe.judge.protocols.sampled_judgements import Results, SampledJudgements, sample_judgements
from grmpipe.judge.verdict import all_failed, outcome_place
from grmpipe.judge.votes import ONE_PART, Vote
from grmpipe.models.seeds import derive_seed, first_name
from grmpipe.types import Failed, Judgement, JudgeReport, JudgeTask, Rollout, Verdict


class ListwiseSession(GroupSession):
    """Judges once, when the last sibling has ended. The first sibling's report holds all judgements."""

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        self._rollouts[rollout.sibling] = rollout
        return (JudgeTask(members=tuple(sorted(self._rollouts))),) if len(self._rollouts) == self._size else ()

    async def _judge(
        self, judge_task: JudgeTask, principles: str | Failed | None, priority: int
    ) -> Mapping[int, JudgeReport]:
        first, *_ = members = judge_task.members
        sampled = await self._sample(members, principles, priority)
        verdicts = await self._verdicts(members, sampled, priority)
        reports = {sibling: JudgeReport(verdict=verdict) for sibling, verdict in verdicts.items()}
        evidence = replace(reports[first], judgements=sampled.judgements, failures=sampled.failures)
        return reports | {first: self._principles.add_to(evidence)}

    async def _sample(
        self, members: Sequence[int], principles: str | Failed | None, priority: int
    ) -> SampledJudgements:
        questions = await self._questions(members, principles)
        if isinstance(questions, Failed):
            return SampledJudgements(failures=(questions,))

        async def ask(index: int) -> Results:
            return await self._context.client.judgement(questions[index], index, priority)

        return await sample_judgements(ask, self._context.config.num_judgements)

    async def _questions(self, members: Sequence[int], principles: str | Failed | None) -> list[GrmQuestion] | Failed:
        """One question per judgement, each with its own order of siblings."""
        questions = []
        for index in range(self._context.config.num_judgements):
            order = self._order(members, index)
            prompt = await self._prompt_for(order, principles)
            if isinstance(prompt, Failed):
                return prompt
            name = f"{self._group_id}/all"
            questions.append(
                GrmQuestion(group_id=self._group_id, name=name, siblings=order, num_scores=len(order), prompt=prompt)
            )
        return questions

    def _order(self, members: Sequence[int], index: int) -> tuple[int, ...]:
        shuffled = list(members)
        random.Random(derive_seed(self._context.seed, first_name(f"order {self._group_id}/{index}"))).shuffle(shuffled)
        return tuple(shuffled)

    async def _verdicts(
        self, members: Sequence[int], sampled: SampledJudgements, priority: int
    ) -> dict[int, Verdict | Failed]:
        if not sampled.judgements:
            return dict.fromkeys(members, all_failed(sampled.failures))
        counted = await self._context.vote.select(sampled.judgements, priority)
        return {sibling: self._verdict(sibling, counted) for sibling in members}

    def _verdict(self, sibling: int, counted: tuple[Sequence[Judgement], Vote] | Failed) -> Verdict | Failed:
        if isinstance(counted, Failed):
            return counted
        judgements, vote = counted
        scores = [(judgement.scores[judgement.siblings.index(sibling)],) for judgement in judgements]
        place = outcome_place(self._rollouts[sibling])
        return self._context.vote.make_verdict(scores, vote, ONE_PART, (place,))
