"""Metrics of steps and batches: failures enter no mean, unknown values are left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scored_rollouts import LOST, completion, prompt, rollout, verdict

from grmpipe.config.train import AlgorithmConfig
from grmpipe.judge.kinds.rule import is_right
from grmpipe.pipeline.counters import Counters, FlowCounters
from grmpipe.pipeline.step_metrics import batch_metrics, check_truth, flow_metrics, truth_metrics
from grmpipe.types import (
    Failed,
    FailedJudgement,
    JudgedGroup,
    Judgement,
    JudgeReport,
    Verdict,
)


def group(*verdicts: Verdict | Failed, version: int = 0, reference: str | None = None, text: str = "") -> JudgedGroup:
    rollouts = tuple(rollout(sibling, 4 + sibling, version, text) for sibling in range(len(verdicts)))
    return JudgedGroup(group_id="g", prompt=prompt(reference), rollouts=rollouts, verdicts=verdicts)


def test_a_step_is_closed_into_the_totals_and_totals_survive_a_checkpoint() -> None:
    counters = FlowCounters()
    judgement = Judgement(
        group_id="g", siblings=(0,), scores=(5,), prompt_ids=(1,), completion=completion(7), grm="grm", version=0
    )
    unparseable = FailedJudgement(
        stage="judge", cause="unparseable", attempts=1, prompt_ids=(1,), completion=completion(3)
    )
    counters.step.rollout(rollout(0, 4))
    counters.step.rollout(rollout(1, 6, status="truncated"))
    counters.step.report(JudgeReport(verdict=verdict(5), judgements=(judgement,), failures=(unparseable, LOST)))
    step = counters.close_step()
    assert (step.rollouts, step.truncated, step.policy_tokens) == (2, 1, 10)
    assert (step.judging.asked, step.judging.counted, step.judging.judge_tokens) == (3, 1, 10)
    assert step.judging.failed == {"unparseable": 1, "timeout": 1}
    restored = FlowCounters()
    restored.restore(counters.total.to_dict(), {})
    restored.step.rollout(rollout(2, 5))
    assert restored.total_so_far().policy_tokens == 15
    assert flow_metrics(step, 2.0)["rollout/tokens_per_s"] == 5
    assert flow_metrics(Counters(), 1.0)["rollout/truncated_share"] == 0


def test_failed_siblings_are_in_no_mean() -> None:
    metrics = batch_metrics(
        [group(verdict(10, rule=1.0), LOST, verdict(4, rule=0.0), version=3)], version=4, algorithm=AlgorithmConfig()
    )
    assert metrics["train/grm_score"] == 7
    assert metrics["train/siblings_without_verdict"] == 1
    assert metrics["reward/rule_mean"] == 0.5
    assert metrics["staleness/max"] == 1
    assert metrics["judge/score_length_correlation"] == pytest.approx(-1)
    lengths = [metrics[f"response_length/{name}"] for name in ("min", "mean", "max")]
    assert lengths == sorted(lengths) and lengths[0] < lengths[2]
    assert metrics["prompt_length/min"] >= 1


def test_a_group_of_equal_rewards_has_no_signal_and_no_correlation_is_made_up() -> None:
    metrics = batch_metrics([group(verdict(5), verdict(5), LOST)], version=0, algorithm=AlgorithmConfig())
    assert metrics["train/zero_advantage_share"] == 1
    assert "judge/score_length_correlation" not in metrics


@pytest.mark.parametrize("estimator", ["grpo", "dpo", "raft"])
def test_a_group_whose_trained_siblings_have_nothing_to_learn_has_no_signal(estimator: str) -> None:
    """Of three siblings two were truncated: best and worst. GRPO still compares the third one with them."""
    algorithm, judged = (
        AlgorithmConfig(estimator=estimator, kl_coefficient=0.1),
        group(verdict(9), verdict(6), verdict(1)),
    )
    cut = tuple(rollout(sibling, status="finished" if sibling == 1 else "truncated") for sibling in range(3))
    shares = [
        batch_metrics([replace(judged, rollouts=cut)], 0, algorithm, mask_truncated=masked)[
            "train/zero_advantage_share"
        ]
        for masked in (False, True)
    ]
    assert shares == [0.0, 0.0 if estimator == "grpo" else 1.0]


def test_truth_needs_references() -> None:
    assert truth_metrics(check_truth([group(verdict(5), verdict(5))], is_right)) == {}
    known = group(verdict(5), verdict(5), reference="12", text="Answer: 12")
    assert truth_metrics(check_truth([known], is_right)) == {"train/true_accuracy": 1.0}


def test_judging_tasks_enter_no_metric_of_the_answers_but_their_age() -> None:
    answers = group(verdict(1), verdict(10), version=3, reference="1", text="1")
    judged = group(verdict(10), verdict(10), version=1, reference="at least 1", text="1")
    judged = replace(judged, prompt=replace(judged.prompt, self_judging=True))
    metrics = batch_metrics([answers, judged], 4, AlgorithmConfig())
    alone = batch_metrics([answers], 4, AlgorithmConfig())
    own = {name: value for name, value in metrics.items() if name.startswith("self_judging/")}
    assert own == {
        "self_judging/share": 0.5,
        "self_judging/reward": 1.0,
        "self_judging/zero_advantage_share": 1.0,
        "self_judging/response_length_mean": 4.5,
    }
    assert metrics == alone | own | {"staleness/mean": 2.0, "staleness/max": 3.0}
    assert list(check_truth([answers, judged], lambda text, reference: 1.0)) == [("g", 0), ("g", 1)]
    assert check_truth([judged], lambda text, reference: 1.0) == {}
    assert "train/reward" not in batch_metrics([judged], 4, AlgorithmConfig())
