"""The hearing of rollouts one by one, each as a whole. Compares no siblings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from grmpipe.judge.grm import GrmPrompt
from grmpipe.judge.grm_client import Question
from grmpipe.judge.meta_rm import JudgedResponses
from grmpipe.judge.protocols.base import Court
from grmpipe.judge.protocols.early_stop import Stop, is_sure
from grmpipe.judge.protocols.sampling import IN_FULL, Panel, Results, convene
from grmpipe.judge.verdict import COMPONENT, agreement, all_failed, mean, outcome_place
from grmpipe.types import Failed, Judgement, JudgeReport, Prompt, RewardSpan, Rollout, Sitting, StopAudit, Verdict
from models.seeds import derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Matter:
    """What of a rollout gets scores: one weight for each, their sum 1; and the tokens that are paid for.

    places: one for all scores together, or one for each. Their values are not looked at.
    """

    texts: tuple[str, ...]
    weights: tuple[float, ...]
    places: tuple[RewardSpan, ...]

    def score_of(self, scores: Sequence[float]) -> float:
        return math.fsum(weight * score for weight, score in zip(self.weights, scores, strict=True))


class PointwiseHearing:
    """A rollout is judged as soon as it has ended. Of its siblings only the spread of their scores is looked at."""

    def __init__(self, court: Court, prompt: Prompt, group_id: str, size: int) -> None:
        self._court = court
        self._prompt = prompt
        self._principles = court.principles_of(prompt, group_id)
        self._rollouts: dict[int, Rollout] = {}
        self._means: dict[int, float] = {}  # by sibling, so far

    def matter_of(self, rollout: Rollout) -> Matter | Failed:
        """What gets scores, or why there is nothing."""
        return Matter(texts=(rollout.text,), weights=(1.0,), places=(outcome_place(rollout),))

    def begin(self) -> Sequence[Sitting]:
        return self._principles.sittings()

    def add(self, rollout: Rollout) -> Sequence[Sitting]:
        self._rollouts[rollout.sibling] = rollout
        return (Sitting(members=(rollout.sibling,)),)

    async def judge(self, sitting: Sitting, priority: int = 0) -> Mapping[int, JudgeReport]:
        principles = await self._principles.text(priority)
        if not sitting.members:
            return {}
        (sibling,) = sitting.members
        if isinstance(principles, Failed):
            return {sibling: JudgeReport(verdict=all_failed([principles]), failures=(principles,))}
        report = await self._judged(self._rollouts[sibling], principles, priority)
        return {sibling: self._principles.told_in(report)}

    async def _judged(self, rollout: Rollout, principles: str | None, priority: int) -> JudgeReport:
        matter = self.matter_of(rollout)
        if isinstance(matter, Failed):
            return JudgeReport(verdict=matter, failures=(matter,))
        asked_for = self._court.prompt(self._prompt, matter.texts, principles)
        if isinstance(asked_for, Failed):
            return JudgeReport(verdict=asked_for, failures=(asked_for,))
        panel = await self._panel(rollout, matter, asked_for, priority)
        if not panel.judgements:
            return JudgeReport(verdict=all_failed(panel.failures), failures=panel.failures)
        verdict = await self._verdict(rollout, matter, panel.judgements, priority)
        return JudgeReport(
            verdict=verdict,
            judgements=panel.judgements,
            failures=panel.failures,
            saved_tokens=panel.saved_tokens,
            audit=self._audit(rollout, matter, panel),
        )

    async def _panel(self, rollout: Rollout, matter: Matter, asked_for: GrmPrompt, priority: int) -> Panel:
        question = Question(
            group_id=rollout.group_id,
            name=f"{rollout.group_id}/{rollout.sibling}",
            siblings=(rollout.sibling,),
            num_scores=len(matter.weights),
            prompt=asked_for,
        )

        async def ask(index: int) -> Results:
            return await self._court.asker.judgement(question, index, priority)

        panel = await convene(ask, self._court.config.num_judgements, self._stop(rollout, matter))
        self._court.noise.add([matter.score_of(judgement.scores) for judgement in panel.judgements])
        return panel

    def _stop(self, rollout: Rollout, matter: Matter) -> Stop:
        """Relaxed: on the standard error of this rollout's score, against the spread of its group so far."""
        rules = self._court.config.early_stop
        if rules.kind != "relaxed":
            return IN_FULL

        def enough(judgements: Sequence[Judgement], num_left: int) -> bool:
            scores = [matter.score_of(judgement.scores) for judgement in judgements]
            if not scores:
                return False
            self._means[rollout.sibling] = mean(scores)
            return is_sure(scores, list(self._means.values()), self._court.noise, rules.max_error)

        return Stop(first=rules.first, wave=rules.wave, enough=enough, auditing=self._is_audited(rollout))

    def _is_audited(self, rollout: Rollout) -> bool:
        drawn = derive_seed(self._court.seed, f"audit {rollout.group_id}/{rollout.sibling}")
        return drawn < self._court.config.early_stop.audit_share * 2**63

    def _audit(self, rollout: Rollout, matter: Matter, panel: Panel) -> StopAudit | None:
        if self._court.config.early_stop.kind != "relaxed" or not self._is_audited(rollout):
            return None
        return StopAudit(
            stopped_after=panel.stopped_after or self._court.config.num_judgements,
            stopped_score=mean([matter.score_of(judgement.scores) for judgement in panel.enough]),
            full_score=mean([matter.score_of(judgement.scores) for judgement in panel.judgements]),
        )

    async def _verdict(
        self, rollout: Rollout, matter: Matter, judgements: Sequence[Judgement], priority: int
    ) -> Verdict | Failed:
        judged = [
            JudgedResponses(prompt=self._prompt, responses=(rollout.text,), judgement=judgement)
            for judgement in judgements
        ]
        counted = await self._court.counted(judged, priority)
        if isinstance(counted, Failed):
            return counted
        chosen, vote = counted
        spread = agreement([matter.score_of(judgement.scores) for judgement in chosen])
        if (abstained := self._court.abstention(spread)) is not None:
            return abstained
        votes = [vote(given) for given in zip(*(judgement.scores for judgement in chosen), strict=True)]
        rewards = [self._court.scale.reward_of(score) for score in votes]
        reward = matter.score_of(rewards)
        shares = [weight * value for weight, value in zip(matter.weights, rewards, strict=True)]
        values = shares if len(matter.places) == len(shares) else [reward]
        return Verdict(
            rewards=tuple(replace(place, value=value) for place, value in zip(matter.places, values, strict=True)),
            score=self._court.config.shown_score(matter.score_of(votes)),
            breakdown={COMPONENT: reward},
            agreement=spread,
            num_judgements=len(chosen),
        )
