"""A mixture is a weighted mean, or a failure; nothing in between."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from grmpipe.algorithm.rewards import rewards_of
from grmpipe.config.judge import EarlyStopConfig
from grmpipe.config.run_config import RunConfig
from grmpipe.config.yaml_io import from_values
from grmpipe.judge.mixed import MixedJudge
from grmpipe.judge.pointwise_adapter import PointwiseAdapter, judge_alone
from grmpipe.judge.rule import RuleJudge
from grmpipe.judge.verdict import mixed
from grmpipe.run.registry import rule_judge
from grmpipe.types import Failed, RewardSpan, Verdict
from models.types import EngineDied


def test_rewards_are_mixed_by_normalised_weights_and_components_stay_visible(bench: Any) -> None:
    grm, _ = bench.generative(lambda prompt, context: bench.answer("Score: 4"))
    judge = MixedJudge(
        {"generative": (PointwiseAdapter(grm), 3.0), "rule": (PointwiseAdapter(RuleJudge("exact_answer")), 1.0)}
    )
    report = bench.run(judge_alone(judge, bench.prompt(), bench.rollout("Answer: 12")))
    (span,) = report.verdict.rewards
    assert span.value == pytest.approx(0.75 * 3 / 9 + 0.25)
    assert (span.turn, span.start, span.end) == (0, 0, 10)
    assert report.verdict.breakdown == {"generative": pytest.approx(3 / 9), "rule": 1.0}
    assert report.verdict.score == pytest.approx(0.75 * 4 + 0.25 * 10)
    assert report.verdict.num_judgements == 1 + 1
    assert len(report.judgements) == 1


def test_beside_a_mean_of_steps_every_span_has_its_share_in_the_mixture(bench: Any) -> None:
    """0.75 times the mean of steps with 1, 0 and 1/2, plus 0.25 times a rule's 1, which ends with the last step."""
    steps = tuple(
        RewardSpan(turn=0, start=4 * k, end=4 * k + 4, value=earned / 3, share=1 / 3)
        for k, earned in enumerate((1.0, 0.0, 0.5))
    )
    blank = Verdict(rewards=steps, score=5.0, breakdown={}, score_std=0.0, num_judgements=1)
    ruled = replace(blank, rewards=(RewardSpan(turn=0, start=0, end=12, value=1.0),))
    spans = mixed({"generative": blank, "rule": ruled}, {"generative": 3.0, "rule": 1.0}).rewards
    assert [(span.end, span.value, span.share) for span in spans] == [
        (4, 0.25, 0.25), (8, 0.0, 0.25), (12, pytest.approx(0.125), 0.25), (12, 0.25, 0.25),
    ]  # fmt: skip
    rewards = rewards_of(bench.rollout("x" * 12), replace(blank, rewards=spans))
    assert rewards.shares_K == pytest.approx((0.25, 0.25, 0.5))
    assert rewards.earned_K.tolist() == pytest.approx([1.0, 0.0, 0.75])
    assert rewards.outcome == pytest.approx(0.75 * 0.5 + 0.25)


def test_a_mixture_stays_on_the_scale_of_its_judge(bench: Any) -> None:
    scale = {"score_min": 0, "score_max": 5}
    config = from_values(RunConfig, {"judge": {"kind": "mixed", "mix": {"generative": 1.0, "rule": 1.0}, **scale}})
    rule = rule_judge(SimpleNamespace(config=config), None)  # type: ignore[arg-type]
    grm, _ = bench.generative(lambda prompt, context: bench.answer("Score: 5"), **scale)
    judge = MixedJudge({"generative": (grm, 1.0), "rule": (rule, 1.0)})
    for text, score, reward in (("Answer: 12", 5, 1.0), ("Answer: 13", 2.5, 0.5)):
        verdict = bench.run(judge_alone(judge, bench.prompt(), bench.rollout(text))).verdict
        assert (verdict.score, verdict.outcome) == (score, reward)


def test_a_failed_component_is_never_renormalised_away(bench: Any) -> None:
    for weight in (1e-6, 1e6):
        grm, _ = bench.generative(lambda prompt, context: EngineDied("killed"))
        judge = MixedJudge(
            {"rule": (PointwiseAdapter(RuleJudge("exact_answer")), 1.0), "generative": (PointwiseAdapter(grm), weight)}
        )
        report = bench.run(judge_alone(judge, bench.prompt(), bench.rollout("12")))
        assert report.verdict == Failed(stage="judge", cause="died", attempts=1, detail="killed")
        assert len(report.failures) == 1


def test_the_evidence_of_all_components_is_kept_when_one_fails(bench: Any) -> None:
    grm, _ = bench.generative(lambda prompt, context: bench.answer("Score: 4"))
    judge = MixedJudge(
        {"generative": (PointwiseAdapter(grm), 1.0), "rule": (PointwiseAdapter(RuleJudge("exact_answer")), 1.0)}
    )
    report = bench.run(judge_alone(judge, bench.prompt(reference=None), bench.rollout("12")))
    assert report.verdict.cause == "refused"
    assert len(report.judgements) == 1


def test_a_mixture_needs_components_with_positive_weights() -> None:
    with pytest.raises(ValueError, match="mix"):
        MixedJudge({})
    with pytest.raises(ValueError, match=r"mix\.rule"):
        MixedJudge({"rule": (PointwiseAdapter(RuleJudge("exact_answer")), 0.0)})


def test_a_sibling_is_reported_on_once_when_its_last_component_is_done(bench: Any) -> None:
    grm, _ = bench.generative(lambda prompt, context: bench.answer("Score: 4"))
    judge = MixedJudge(
        {"generative": (PointwiseAdapter(grm), 1.0), "rule": (PointwiseAdapter(RuleJudge("exact_answer")), 1.0)}
    )
    session = judge.open(bench.prompt(), "g0", 2)
    generative, rule = session.add(bench.rollout("12", sibling=1))
    assert (generative.members, generative.component, rule.component) == ((1,), "generative", "rule")
    assert bench.run(session.judge(rule)) == {}
    assert list(bench.run(session.judge(generative))) == [1]


def test_what_a_component_wrote_ahead_and_what_its_early_stop_saved_is_told_of_the_mixture(bench: Any) -> None:
    def write(prompt: str, context: Any) -> Any:
        return bench.answer("Be strict." if "/principles/" in context.request_id else "\\boxed{4}")

    stop = EarlyStopConfig(kind="relaxed", audit_share=1.0)
    ahead = {"template": "shared_principles", "parser": "boxed", "principles": "shared"}
    grm, _ = bench.generative(write, num_judgements=4, early_stop=stop, **ahead)
    alone = bench.run(judge_alone(grm, bench.prompt(), bench.rollout("12")))
    judge = MixedJudge({"rule": (PointwiseAdapter(RuleJudge("exact_answer")), 1.0), "generative": (grm, 1.0)})
    report = bench.run(judge_alone(judge, bench.prompt(), bench.rollout("12")))
    assert report.principles is not None and report.principles.text == "Be strict."
    assert report.audit is not None and report.audit == alone.audit
    assert report.saved_tokens == alone.saved_tokens
