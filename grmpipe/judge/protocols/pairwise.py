"""The judge session of pairs of siblings: each pair in both orders; the score is the share of pairs won, or the mean
margin (`judge.vote=mean`).
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from grmpipe.config.judge import Scale
from grmpipe.judge.calibration import CALIBRATED
from grmpipe.judge.grm import GrmQuestion
from grmpipe.judge.protocols.group_session import GroupSession, JudgeContext
from grmpipe.judge.protocols.sampled_judgements import (
    IN_FULL,
    OrderCounts,
    Results,
    SampledJudgements,
    Stop,
    fewest_for_a_winner,
    sample_judgements,
    winner_is_fixed,
)
from grmpipe.judge.verdict import COMPONENT, all_failed, outcome
from grmpipe.judge.votes import LOST, TIED, WON, pair_result
from grmpipe.types import Failed, Judgement, JudgeReport, JudgeTask, Prompt, Rollout, Verdict

Pair = tuple[int, int]  # siblings, the lower one first
Votes = tuple[tuple[float, ...], tuple[float, ...]]  # from judgements that showed the lower sibling first, last


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A judged pair. votes: each judgement's for the lower sibling. sampled: the judgements behind them. by_margin: see
    read_vote.
    """

    votes: Votes
    sampled: SampledJudgements
    by_margin: bool

    @property
    def counts(self) -> bool:
        """Whether both orders have votes. With one order only, the judge's position bias could decide the pair."""
        return all(self.votes)

    def all_votes(self) -> tuple[float, ...]:
        return self.votes[0] + self.votes[1]

    def result_for(self, is_lower: bool) -> float:
        if self.by_margin:
            return self.share_for(is_lower)
        result = pair_result(*self.votes)
        return result if is_lower else WON - result

    def share_for(self, is_lower: bool) -> float:
        share = vote_share(self.votes)
        return share if is_lower else WON - share


def list_pairs(size: int, kind: str) -> list[Pair]:
    """The pairs to judge. `all`: n (n - 1) / 2. `ring`: each sibling meets the next one, n pairs (one for n = 2)."""
    if kind == "ring":
        return sorted({(min(a, b), max(a, b)) for a in range(size) if (b := (a + 1) % size) != a})
    return [(a, b) for a in range(size) for b in range(a + 1, size)]


def read_vote(judgement: Judgement, lower: int, scale: Scale | None = None) -> float:
    """The vote for the lower sibling of a pair, in either place. scale: its margin counts; None: only who is better."""
    mine = judgement.scores[judgement.siblings.index(lower)]
    (other,) = (score for sibling, score in zip(judgement.siblings, judgement.scores, strict=True) if sibling != lower)
    if scale is not None:
        return TIED + (scale.to_reward(mine) - scale.to_reward(other)) / 2
    return WON if mine > other else TIED if mine == other else LOST


def read_votes(judgements: Sequence[Judgement], lower: int, scale: Scale | None = None) -> Votes:
    """The votes for the lower sibling, by the order of showing; see read_vote."""
    first = tuple(read_vote(judgement, lower, scale) for judgement in judgements if judgement.siblings[0] == lower)
    last = tuple(read_vote(judgement, lower, scale) for judgement in judgements if judgement.siblings[0] != lower)
    return first, last


def vote_share(votes: Votes) -> float:
    """The lower sibling's share of a pair's votes: the mean within each order, then over both."""
    return statistics.fmean(map(statistics.fmean, votes))


class PairwiseSession(GroupSession):
    """Judges a pair as soon as both have ended. A sibling's report is final when its last pair is judged."""

    def __init__(self, context: JudgeContext, prompt: Prompt, group_id: str, size: int) -> None:
        super().__init__(context, prompt, group_id, size)
        self._pairs = list_pairs(size, context.config.split.pairs)
        self._matches: dict[Pair, Match] = {}

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        self._rollouts[rollout.sibling] = rollout
        return [
            JudgeTask(members=pair)
            for pair in self._pairs
            if rollout.sibling in pair and all(sibling in self._rollouts for sibling in pair)
        ]

    async def _judge(
        self, judge_task: JudgeTask, principles: str | Failed | None, priority: int
    ) -> Mapping[int, JudgeReport]:
        lower, higher = judge_task.members
        sampled = await self._sample((lower, higher), principles, priority)
        scale = self._context.config.scale_of_margins
        votes = read_votes(sampled.judgements, lower, scale)
        self._matches[lower, higher] = Match(votes=votes, sampled=sampled, by_margin=scale is not None)
        # A report is given once, so a sibling's waits for all of its pairs.
        final = [
            sibling for sibling in (lower, higher) if all(pair in self._matches for pair in self._pairs_with(sibling))
        ]
        return {sibling: self._report(sibling) for sibling in final}

    def _pairs_with(self, sibling: int) -> Iterator[Pair]:
        return (pair for pair in self._pairs if sibling in pair)

    async def _sample(self, pair: Pair, principles: str | Failed | None, priority: int) -> SampledJudgements:
        """Sample a pair's judgements. Those of even index show the lower sibling first, the others the higher one."""
        lower, higher = pair
        questions: list[GrmQuestion] = []
        for order in (pair, (higher, lower)):
            prompt = await self._prompt_for(order, principles)
            if isinstance(prompt, Failed):
                return SampledJudgements(failures=(prompt,))
            name = f"{self._group_id}/{lower}-{higher}"
            questions.append(
                GrmQuestion(group_id=self._group_id, name=name, siblings=order, num_scores=2, prompt=prompt)
            )

        async def ask(index: int) -> Results:
            return await self._context.client.judgement(questions[index % 2], index, priority)

        return await sample_judgements(ask, self._context.config.num_judgements, self._stop(lower))

    def _stop(self, lower: int) -> Stop:
        """The exact early stop: the remaining judgements can't change who wins the pair."""
        num_judgements = self._context.config.num_judgements
        if self._context.config.early_stop.kind != "exact":
            return IN_FULL

        def enough(judgements: Sequence[Judgement], num_left: int) -> bool:
            indices_left = range(num_judgements - num_left, num_judgements)
            left = [sum(index % 2 == place for index in indices_left) for place in (0, 1)]
            counts = [
                OrderCounts(points=sum(votes), num_votes=len(votes), num_left=num_left_of_order)
                for votes, num_left_of_order in zip(read_votes(judgements, lower), left, strict=True)
            ]
            return winner_is_fixed(*counts)

        return Stop(first=fewest_for_a_winner(num_judgements), enough=enough)

    def _report(self, sibling: int) -> JudgeReport:
        """The report over the sibling's judged pairs. The judgements of a pair are in its lower sibling's report."""
        pairs = list(self._pairs_with(sibling))
        own = [self._matches[pair].sampled for pair in pairs if pair[0] == sibling]
        report = JudgeReport(
            verdict=self._verdict(sibling, pairs),
            judgements=tuple(judgement for sampled in own for judgement in sampled.judgements),
            failures=tuple(failure for sampled in own for failure in sampled.failures),
            saved_tokens=sum(sampled.saved_tokens for sampled in own),
        )
        return self._principles.add_to(report)

    def _verdict(self, sibling: int, pairs: Sequence[Pair]) -> Verdict | Failed:
        judged = {pair: match for pair in pairs if (match := self._matches[pair]).counts}
        if not judged:
            return all_failed([failure for pair in pairs for failure in self._matches[pair].sampled.failures])
        scale = self._context.scale
        reward = statistics.fmean(match.result_for(pair[0] == sibling) for pair, match in judged.items())
        spread = (scale.high - scale.low) * statistics.fmean(
            statistics.pstdev(match.all_votes()) for match in judged.values()
        )
        if (abstained := self._context.vote.abstention(spread)) is not None:
            return abstained
        given, breakdown = reward, {COMPONENT: reward}
        if (calibration := self._context.calibration) is not None:
            shares = [match.share_for(pair[0] == sibling) for pair, match in judged.items()]
            given = statistics.fmean(calibration.to_reward(share, calibration.length_mean) for share in shares)
            breakdown[CALIBRATED] = given
        return Verdict(
            rewards=outcome(self._rollouts[sibling], given),
            score=scale.to_score(reward),
            breakdown=breakdown,
            score_std=spread,
            num_judgements=sum(len(match.all_votes()) for match in judged.values()),
        )
