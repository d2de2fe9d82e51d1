"""Compositions of the judges that runs have: a GRM under its protocols, beside a rule or another judge of the GRM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from configs import judge_config

from grmpipe.algorithm.rewards import place_rewards
from grmpipe.algorithm.settings import MIN_GROUP_STD
from grmpipe.config.judge import EarlyStopConfig, JudgeConfig, JudgeEntry
from grmpipe.config.reward import RewardConfig, RewardTree
from grmpipe.judge.composition.combine_verdicts import by_group
from grmpipe.judge.composition.composed_judge import compares, compose_judge
from grmpipe.judge.kinds.function_judge import load_custom_judge
from grmpipe.judge.kinds.rule import RuleJudge
from grmpipe.judge.pointwise_adapter import PointwiseAdapter, judge_alone, judge_together
from grmpipe.judge.protocols.generative import GenerativeJudge
from grmpipe.models.types import EngineDied
from grmpipe.types import Judge, RewardSpan, Verdict

RULE = PointwiseAdapter(RuleJudge("exact_answer"))
MIX = {"judge": 3, "exact": 1}


def mixed_with_rule(grm: Judge, config: JudgeConfig | None = None) -> Judge:
    configs = {"judge": config or JudgeConfig(), "exact": JudgeConfig(kind="rule")}
    return compose_judge(RewardTree.of(RewardConfig(kind="mix", mix=MIX)), {"judge": grm, "exact": RULE}, configs, 0)


def test_mix_combines_a_grm_and_a_rule(bench: Any) -> None:
    grm, _ = bench.generative(lambda prompt, context: bench.answer("Score: 4"))
    report = bench.run(judge_alone(mixed_with_rule(grm), bench.prompt(), bench.rollout("Answer: 12")))
    (span,) = report.verdict.rewards
    assert (span.turn, span.start, span.end) == (0, 0, 10)
    assert span.value == pytest.approx(0.75 * 3 / 9 + 0.25)
    assert report.verdict.breakdown == {"judge": pytest.approx(3 / 9), "exact": 1.0}
    assert report.verdict.score == pytest.approx(0.75 * 4 + 0.25 * 10)
    assert len(report.judgements) == 1


def test_dead_engine_in_a_mix_with_a_rule_gives_no_number(bench: Any) -> None:
    grm, _ = bench.generative(lambda prompt, context: EngineDied("killed"))
    report = bench.run(judge_alone(mixed_with_rule(grm), bench.prompt(), bench.rollout("Answer: 12")))
    assert (report.verdict.cause, report.verdict.detail) == ("died", "judge: killed")
    assert report.by_judge["exact"].verdict.outcome == 1.0


def test_principles_written_ahead_and_judgements_saved_by_early_stop_are_reported(bench: Any) -> None:
    def write(prompt: str, context: Any) -> Any:
        return bench.answer("Be strict." if "/principles/" in context.request_id else "\\boxed{4}")

    stop = EarlyStopConfig(kind="relaxed", audit_share=1.0)
    ahead = {"template": "shared_principles", "parser": "boxed", "principles": "shared"}
    grm, _ = bench.generative(write, num_judgements=4, early_stop=stop, **ahead)
    alone = bench.run(judge_alone(grm, bench.prompt(), bench.rollout("12")))
    report = bench.run(judge_alone(mixed_with_rule(grm), bench.prompt(), bench.rollout("12")))
    assert report.principles is not None and report.principles.text == "Be strict."
    assert report.audit is not None and report.audit == alone.audit
    assert report.saved_tokens == alone.saved_tokens


@pytest.mark.parametrize("protocol", ["listwise", "pairwise"])
def test_a_comparing_judge_behind_a_gate_judges_the_whole_group_once(bench: Any, protocol: str) -> None:
    """The rule lets only right answers pass; the GRM puts the longer one of those it sees first."""
    asks: dict[str, Any] = {"protocol": protocol, "template": protocol, "parser": "boxed"}
    if protocol == "pairwise":
        asks |= {"num_judgements": 2, "vote": "majority"}
    scores = "1, 5, 9" if protocol == "listwise" else "5, 5"
    grm, engine = bench.generative(lambda prompt, context: bench.answer(f"\\boxed{{{scores}}}"), **asks)
    gate = RewardConfig(kind="gate", gate="exact", inner="judge")
    configs = {"judge": judge_config(**asks), "exact": JudgeConfig(kind="rule")}
    judge = compose_judge(RewardTree.of(gate), {"judge": grm, "exact": RULE}, configs, 0)
    reports = bench.run(judge_together(judge, bench.prompt(), "g1", ["12", "13", "Answer: 12"]))
    assert reports[1].verdict.outcome == 0.0
    assert all("judge" in reports[sibling].by_judge for sibling in (0, 2))
    assert (
        len(engine.asked) == sum(len(report.judgements) for report in reports) == (1 if protocol == "listwise" else 6)
    )


def test_judges_that_share_a_model_draw_differently_and_never_share_a_request(bench: Any) -> None:
    grm, engine = bench.generative(lambda prompt, context: bench.answer("Score: 4"))
    second = GenerativeJudge(grm._context.client.grm, JudgeEntry.of(JudgeConfig(), "second"), 11)
    configs = {"judge": JudgeConfig(), "second": JudgeConfig()}
    jury = RewardConfig(kind="jury", members=["judge", "second"])
    judge = compose_judge(RewardTree.of(jury), {"judge": grm, "second": second}, configs, 0)
    bench.run(judge_alone(judge, bench.prompt(), bench.rollout("12")))
    (first, one), (other, two) = engine.asked
    assert sorted([first.request_id, other.request_id]) == ["g7/0/j0.0", "g7/0/j0.0@second"]
    assert one.seed != two.seed


class OwnSession:
    """A judge of the user's own that opens sessions."""

    def open(self, prompt: Any, group_id: str, size: int) -> Any:
        raise NotImplementedError


class OwnRollouts:
    """A judge of the user's own that takes single rollouts."""

    async def judge(self, prompt: Any, rollout: Any, priority: int = 0) -> Any:
        raise NotImplementedError


def test_custom_judge_gets_the_whole_group_unless_it_takes_single_rollouts() -> None:
    for name, expected in (("OwnSession", True), ("OwnRollouts", False)):
        config = judge_config(kind="custom", target=f"{__name__}.{name}")
        assert compares(load_custom_judge(config), config) is expected


def test_a_step_bears_its_share_of_the_groups_mean(bench: Any) -> None:
    steps = tuple(
        RewardSpan(turn=0, start=4 * k, end=4 * k + 4, value=value, share=share)
        for k, (value, share) in enumerate(((0.5, 0.75), (0.0, 0.25)))
    )
    verdict = Verdict(rewards=steps, score=0.5, breakdown={}, score_std=0.0, num_judgements=1)
    low = replace(verdict, rewards=(replace(steps[0], value=0.1), steps[1]))
    moved = by_group(verdict, [verdict, low])
    mean, std = 0.3, 0.4 / 2**0.5 + MIN_GROUP_STD
    assert moved.outcome == pytest.approx((0.5 - mean) / std)
    earned = place_rewards(bench.rollout("x" * 8), moved).earned_K.tolist()
    assert earned == pytest.approx([(0.5 / 0.75 - mean) / std, (0.0 - mean) / std])
