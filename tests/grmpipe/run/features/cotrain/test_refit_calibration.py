"""The map of a judge that learns: fitted to what was labelled, for all groups, by whole versions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from grmpipe.config.reward import RewardConfig
from grmpipe.judge.calibration import Calibration, CalibrationInUse
from grmpipe.judge.pointwise_adapter import rollout_of_text
from grmpipe.judge.verdict import make_failure, outcome
from grmpipe.models.types import Message
from grmpipe.run.features.cotrain.refit_calibration import CalibrationRefit
from grmpipe.types import Failed, JudgedGroup, Prompt, Verdict

PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="?"),))
BEFORE = Calibration(judge={}, target="score", said=(0.0, 1.0), rewards=(0.0, 1.0))
CASCADE = RewardConfig(kind="cascade", first="cheap", then="good", unsure_band=[0.3, 0.7])


def refit(target: str = "score") -> tuple[CalibrationRefit, CalibrationInUse]:
    in_use = CalibrationInUse(Calibration(judge={}, target=target, said=(0.0, 1.0), rewards=(0.0, 1.0)))
    return CalibrationRefit(CASCADE, in_use, 0.6, thoughts=False), in_use


def judged(said: float, label: float | None, size: int = 4, failed: bool = False) -> JudgedGroup:
    rollouts = tuple(rollout_of_text("g", sibling, "42") for sibling in range(size))
    breakdown = {"cheap": said, "cheap/uncalibrated": said} | ({} if label is None else {"good": label})
    verdicts: Sequence[Verdict | Failed] = [
        Verdict(rewards=outcome(one, said), score=said, breakdown=breakdown, score_std=0, num_judgements=1)
        for one in rollouts
    ]
    verdicts = [make_failure("died", "it did"), *verdicts[1:]] if failed else verdicts
    return JudgedGroup(group_id="g", prompt=PROMPT, rollouts=rollouts, verdicts=tuple(verdicts))


def test_groups_with_labels_stand_for_those_of_their_kind_without() -> None:
    refitting, in_use = refit()
    for label in (1.0, 1.0, 1.0, 1.0, 0.0, None, None, None, None, None):  # sure of 0.9: half are audited
        refitting.take(judged(0.9, label))
    for _ in range(10):  # unsure: all are escalated
        refitting.take(judged(0.5, 0.2))
    refitting.take(judged(0.95, 0.0, failed=True))
    refitting.fit()
    assert in_use.now.to_reward(0.9, 0.0) == pytest.approx(0.8)
    assert in_use.now.to_reward(0.5, 0.0) == pytest.approx(0.2)
    assert in_use.now.to_reward(0.95, 0.0) == pytest.approx(0.8), "a group with a failed verdict says nothing"
    refitting, in_use = refit()
    for said, label in ((0.8, 1.0), (0.8, None), (0.8, None), (0.7, 0.5)) * 5:
        refitting.take(judged(said, label))
    refitting.take(judged(0.7, 0.9))
    refitting.fit()
    assert in_use.now.to_reward(0.7, 0.0) == pytest.approx((5 * 0.5 + 0.9) / 6)


def test_two_kinds_at_one_score_are_weighted_by_how_many_groups_there_were() -> None:
    refitting, in_use = refit()
    mixed = judged(0.5, 1.0)  # one sibling is unsure, so all are escalated
    sure = dict(mixed.verdicts[1].breakdown) | {"cheap": 0.9, "cheap/uncalibrated": 0.9}  # type: ignore[union-attr]
    verdicts = [judged(0.5, 0.0).verdicts[0]]
    verdicts += [Verdict(rewards=(), score=1, breakdown=sure, score_std=0, num_judgements=1)] * 3
    for _ in range(5):
        refitting.take(JudgedGroup(group_id="g", prompt=PROMPT, rollouts=mixed.rollouts, verdicts=tuple(verdicts)))
    for label in (0.0,) * 5 + (None,) * 5:
        refitting.take(judged(0.9, label))
    refitting.fit()
    assert in_use.now.to_reward(0.9, 0.0) == pytest.approx(5 * 3 / (5 * 3 + 10 * 4))


def test_without_enough_audits_the_map_stays() -> None:
    refitting, in_use = refit()
    for _ in range(20):
        refitting.take(judged(0.5, 0.2))
        refitting.take(judged(0.9, None))
    for _ in range(4):
        refitting.take(judged(0.9, 1.0))
    refitting.fit()
    assert in_use.now == BEFORE


def test_a_map_to_right_and_wrong_is_refitted_to_sides() -> None:
    refitting, in_use = refit("right")
    for _ in range(5):
        refitting.take(judged(0.9, 0.65))
    refitting.fit()
    assert in_use.now.to_reward(0.9, 0.0) == 1.0
