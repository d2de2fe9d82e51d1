"""The judge's numbers of a step: counts that add up, statistics where they are defined."""

from __future__ import annotations

from typing import Any

import pytest

from grmpipe.judge.panel import judging_metrics
from grmpipe.types import Failed, JudgedGroup, JudgeReport, RewardSpan, Verdict

FAILED = Failed(stage="judge", cause="timeout", attempts=1)


def verdict(score: float) -> Verdict:
    reward = (score - 1) / 9
    spans = (RewardSpan(turn=0, start=0, end=1, value=reward),)
    return Verdict(rewards=spans, score=score, breakdown={"generative": reward}, agreement=0.5, num_judgements=2)


def group(bench: Any, *members: tuple[str, Verdict | Failed]) -> JudgedGroup:
    rollouts = tuple(bench.rollout(text, sibling) for sibling, (text, _) in enumerate(members))
    return JudgedGroup(
        group_id="g7", prompt=bench.prompt(), rollouts=rollouts, verdicts=tuple(verdict for _, verdict in members)
    )


def test_what_was_asked_is_what_counted_and_what_failed(bench: Any) -> None:
    def author(prompt: str, context: Any) -> Any:
        return bench.answer({"j0.0": "hm", "j0.1": "Score: 4", "j1.0": "Score: 6"}[context.request_id.split("/")[2]])

    judge, _ = bench.generative(author, num_judgements=2)
    report = bench.run(judge.judge(bench.prompt(), bench.rollout("12")))
    metrics = judging_metrics([], [report, JudgeReport(verdict=FAILED, failures=(FAILED,))])
    assert metrics["judge/num_asked"] == 4
    assert metrics["judge/num_counted"] == 2
    assert metrics["judge/num_failed_unparseable"] == 1
    assert metrics["judge/num_failed_timeout"] == 1
    assert metrics["judge/num_failed_died"] == 0
    assert metrics["judge/num_failed_verdicts"] == 1
    assert metrics["judge/num_tokens"] == len("hm" + "Score: 4" + "Score: 6")


def test_scores_components_and_spread_are_those_of_valid_verdicts(bench: Any) -> None:
    metrics = judging_metrics([group(bench, ("a", verdict(4)), ("b", verdict(6)), ("c", FAILED))], [])
    assert (metrics["judge/score_mean"], metrics["judge/score_std"]) == (5, 1)
    assert (metrics["judge/score_min"], metrics["judge/score_max"]) == (4, 6)
    assert metrics["judge/agreement_mean"] == 0.5
    assert metrics["judge/generative_reward_mean"] == pytest.approx(4 / 9)


def test_ties_are_groups_whose_valid_rewards_are_all_equal(bench: Any) -> None:
    tie = group(bench, ("a", verdict(4)), ("b", verdict(4)), ("c", FAILED))
    no_tie = group(bench, ("a", verdict(4)), ("b", verdict(5)))
    alone = group(bench, ("a", verdict(4)), ("b", FAILED))
    assert judging_metrics([tie, no_tie, alone], [])["judge/tie_share"] == 0.5


def test_a_judge_that_pays_for_length_shows(bench: Any) -> None:
    members = [("x" * length, verdict(score)) for length, score in ((1, 2), (2, 4), (3, 6))]
    assert judging_metrics([group(bench, *members)], [])["judge/score_length_correlation"] == pytest.approx(1)


def test_what_is_not_defined_has_no_entry(bench: Any) -> None:
    metrics = judging_metrics([group(bench, ("a", FAILED), ("b", FAILED))], [])
    assert not any("score" in name or "tie" in name or "reward" in name for name in metrics)
    equal = judging_metrics([group(bench, ("a", verdict(4)), ("bb", verdict(4)))], [])
    assert "judge/score_length_correlation" not in equal
