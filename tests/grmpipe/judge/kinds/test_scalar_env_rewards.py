"""The environment's rewards are a verdict: their sum, or none at all."""

from __future__ import annotations

from typing import Any

import pytest

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.raw_scores import EnvRewardConfig
from grmpipe.config.reward import RewardConfig, RewardTree
from grmpipe.judge.composition.composed_judge import compose_judge
from grmpipe.judge.kinds.rule import RuleJudge
from grmpipe.judge.kinds.scalar import EnvRewardJudge
from grmpipe.judge.pointwise_adapter import PointwiseAdapter, judge_alone
from grmpipe.judge.verdict import only_finite
from grmpipe.models.types import Completion, VersionSpan
from grmpipe.types import Failed, RewardSpan, Rollout, Turn


def episode(*rewards: dict[str, float]) -> Rollout:
    """A rollout with these rewards for its turns, of which turn k has k + 1 tokens. Its answer is 12."""
    return Rollout(
        group_id="g",
        sibling=0,
        status="finished",
        turns=tuple(
            Turn(
                new_ids=(1,),
                rewards=given,
                completion=Completion(
                    token_ids=(7,) * (turn + 1),
                    logprobs=(-1.0,) * (turn + 1),
                    text="12",
                    finish_reason="stop",
                    versions=(VersionSpan(model="policy", version=0, start=0, end=turn + 1),),
                ),
            )
            for turn, given in enumerate(rewards)
        ),
    )


GIVEN = ({"hint": -0.5}, {}, {"solved": 2.0, "hint": -0.5})


def judged(bench: Any, rollout: Rollout, **settings: Any) -> Any:
    return bench.run(EnvRewardJudge(EnvRewardConfig(**settings)).judge(bench.prompt(), rollout)).verdict


def test_the_sum_is_one_reward_for_the_last_turn(bench: Any) -> None:
    verdict = judged(bench, episode(*GIVEN))
    assert verdict.rewards == (RewardSpan(turn=2, start=0, end=3, value=1.0),)
    assert (verdict.score, verdict.breakdown) == (1.0, {"env": 1.0})


def test_an_episode_without_rewards_has_no_verdict_unless_a_reward_is_set_for_it(bench: Any) -> None:
    assert judged(bench, episode({}, {})).cause == "undecided"
    verdict = judged(bench, episode({}, {}), missing=-1.0)
    assert verdict.rewards == (RewardSpan(turn=1, start=0, end=2, value=-1.0),)
    assert judged(bench, episode(*GIVEN), missing=-1.0).score == 1.0
    with pytest.raises(ValueError, match="^missing: must be a finite number"):
        EnvRewardConfig(missing=float("nan"))


def test_rewards_of_turns_go_to_their_tokens_and_add_up_to_the_same(bench: Any) -> None:
    verdict = judged(bench, episode(*GIVEN), by_turn=True)
    assert verdict.rewards == (
        RewardSpan(turn=0, start=0, end=1, value=-0.5),
        RewardSpan(turn=2, start=0, end=3, value=1.5),
    )
    assert verdict.outcome == verdict.score == 1.0


def test_rewards_without_a_weight_do_not_count(bench: Any) -> None:
    assert judged(bench, episode(*GIVEN), weights={"solved": 0.25}).outcome == 0.5
    assert judged(bench, episode(*GIVEN), weights={"solved": 0.25, "hint": 2}).outcome == -1.5


@pytest.mark.parametrize("settings", [{}, {"by_turn": True}, {"weights": {"solved": 1.0}}])
def test_an_episode_without_a_reward_has_no_verdict(bench: Any, settings: dict[str, Any]) -> None:
    verdict = judged(bench, episode({}, {"hint": -1.0} if "weights" in settings else {}), **settings)
    assert isinstance(verdict, Failed) and verdict.cause == "undecided"
    assert "the environment gave no reward" in verdict.detail


def test_a_reward_of_0_is_a_reward(bench: Any) -> None:
    assert judged(bench, episode({"solved": 0.0})).outcome == 0.0


@pytest.mark.parametrize("weights", [{"solved": "much"}, {"solved": float("nan")}, {"solved": True}, ["solved"]])
def test_a_weight_that_is_no_number_is_refused(weights: Any) -> None:
    with pytest.raises(ValueError, match=r"^weights"):
        EnvRewardConfig(weights=weights)


@pytest.mark.parametrize("by_turn", [False, True])
def test_env_reward_is_a_component_by_its_name(bench: Any, by_turn: bool) -> None:
    judges = {
        "judge": PointwiseAdapter(RuleJudge("exact_answer")),
        "task": PointwiseAdapter(EnvRewardJudge(EnvRewardConfig(by_turn=by_turn))),
    }
    configs = {"judge": JudgeConfig(kind="rule"), "task": JudgeConfig(kind="env")}
    mix = RewardConfig(kind="mix", mix={"judge": 1, "task": 3})
    judge = compose_judge(RewardTree.of(mix), judges, configs, 0)
    verdict = bench.run(judge_alone(judge, bench.prompt(), episode(*GIVEN))).verdict
    assert verdict.breakdown == {"judge": 1.0, "task": 1.0}
    by_place = {(span.turn, span.start, span.end): span.value for span in verdict.rewards}
    assert by_place == ({(2, 0, 3): 1.375, (0, 0, 1): -0.375} if by_turn else {(2, 0, 3): 1.0})
    failed = bench.run(judge_alone(judge, bench.prompt(), episode({}))).verdict
    assert (failed.cause, failed.detail[:5]) == ("undecided", "task:")


@pytest.mark.parametrize("rewards", [[{"a": 1e308}, {"a": 1e308}], [{"a": 1e308, "b": 1e308}]])
def test_rewards_beyond_the_largest_float_fail_the_verdict(bench: Any, rewards: list[dict[str, float]]) -> None:
    report = bench.run(EnvRewardJudge(EnvRewardConfig()).judge(bench.prompt(), episode(*rewards)))
    verdict = only_finite(report).verdict
    assert isinstance(verdict, Failed) and verdict.cause == "unparseable"


def test_a_huge_finite_reward_is_a_verdict(bench: Any) -> None:
    report = bench.run(EnvRewardJudge(EnvRewardConfig()).judge(bench.prompt(), episode({"a": 1e308})))
    assert only_finite(report) is report and report.verdict.score == 1e308
