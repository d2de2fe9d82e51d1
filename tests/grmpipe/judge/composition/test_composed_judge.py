"""Every kind of composition: its reward by its formula's own numbers, and what a failure does to it."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest

from grmpipe.algorithm.advantages import standardize
from grmpipe.algorithm.rewards import place_rewards
from grmpipe.algorithm.settings import MIN_GROUP_STD
from grmpipe.config.judge import JudgeConfig, Scale
from grmpipe.config.reward import RewardConfig, RewardTree
from grmpipe.judge.composition.combine_verdicts import MeasuredSkill
from grmpipe.judge.composition.composed_judge import compose_judge
from grmpipe.judge.kinds.rule import RuleJudge
from grmpipe.judge.pointwise_adapter import PointwiseAdapter, rollout_of_text
from grmpipe.types import Failed, RewardSpan, Verdict

LADDER = (0.1, 0.4, 0.6, 0.9)


def ladder(group: str, sibling: int) -> float:
    return LADDER[sibling]


def always(reward: float) -> Any:
    return lambda group, sibling: reward


def failing(group_bench: Any, *siblings: int, otherwise: float = 0.5) -> Any:
    return lambda group, sibling: group_bench.refused if sibling in siblings else otherwise


def verdict_of(report: Any) -> Verdict:
    assert isinstance(report.verdict, Verdict)
    return report.verdict


def test_a_single_judge_is_the_judge_itself() -> None:
    judges = {"judge": PointwiseAdapter(RuleJudge("exact_answer")), "other": PointwiseAdapter(RuleJudge("math_verify"))}
    configs = dict.fromkeys(judges, JudgeConfig(kind="rule"))
    assert compose_judge(RewardTree.of(RewardConfig()), judges, configs, 0) is judges["judge"]
    assert compose_judge(RewardTree.of(RewardConfig(judge="other")), judges, configs, 0) is judges["other"]
    named = {"alias": RewardConfig(judge="other")}
    assert compose_judge(RewardTree.of(RewardConfig(judge="alias"), named), judges, configs, 0) is judges["other"]


# -- mix -------------------------------------------------------------------------------------------------------------


def test_a_mix_is_the_mean_by_normalised_weights_on_the_first_judges_scale(group_bench: Any) -> None:
    table = group_bench.composed(
        {"kind": "mix", "mix": {"judge": 3, "safety": 1}},
        {"judge": ladder, "safety": lambda group, sibling: (0.0, 1.0)},
        scales={"judge": Scale(low=0, high=5), "safety": Scale(low=1, high=100)},
    )
    reports = table.reports()
    for sibling, report in reports.items():
        verdict = verdict_of(report)
        assert verdict.outcome == pytest.approx(0.75 * LADDER[sibling] + 0.25 * 0.5)
        assert verdict.score == pytest.approx(5 * verdict.outcome)
        assert verdict.score_std == pytest.approx(5 * 0.25 * 0.5)
        assert verdict.breakdown == {"judge": pytest.approx(LADDER[sibling]), "safety": pytest.approx(0.5)}
        assert verdict.num_judgements == 1 + 2


def test_a_component_of_weight_0_is_shown_and_does_not_count(group_bench: Any) -> None:
    mix = {"kind": "mix", "mix": {"judge": 1, "safety": 0}}
    table = group_bench.composed(mix, {"judge": ladder, "safety": always(0.5)})
    assert table.outcomes() == list(LADDER)
    assert verdict_of(table.reports(group_id="g000001")[0]).breakdown["safety"] == 0.5


@pytest.mark.parametrize("weight", [0.0, 1e-6, 1e6])
def test_a_failed_component_is_never_weighted_away(group_bench: Any, weight: float) -> None:
    judges = {"judge": ladder, "safety": failing(group_bench, 2)}
    table = group_bench.composed({"kind": "mix", "mix": {"judge": 1, "safety": weight}}, judges)
    reports = table.reports()
    assert reports[2].verdict == Failed(stage="judge", cause="refused", attempts=0, detail="safety: won't")
    assert len(reports[2].judgements) == 1 and len(reports[2].failures) == 1, "the evidence of both is kept"
    assert all(isinstance(reports[sibling].verdict, Verdict) for sibling in (0, 1, 3))


def test_group_std_weighs_each_component_by_its_own_group(group_bench: Any) -> None:
    """GDPO: sum of w (r - mean) / std for training; the judge that never varies gives 0. The reward and the score stay
    the plain mean.
    """
    table = group_bench.composed(
        {"kind": "mix", "mix": {"judge": 3, "flat": 1}, "normalise": "group_std"},
        {"judge": ladder, "flat": always(0.8)},
        delays=1,
    )
    mean, std = statistics.fmean(LADDER), statistics.stdev(LADDER) + MIN_GROUP_STD
    for sibling, report in table.reports().items():
        verdict = verdict_of(report)
        plain = 0.75 * LADDER[sibling] + 0.25 * 0.8
        assert (verdict.outcome, verdict.score) == (pytest.approx(plain), pytest.approx(1 + 9 * plain))
        rollout = rollout_of_text("g000000", sibling, "")
        assert place_rewards(rollout, verdict).outcome == pytest.approx(0.75 * (LADDER[sibling] - mean) / std)


def test_equal_rewards_of_turns_stay_equal_by_group_std(group_bench: Any) -> None:
    """Siblings with 2, 4 and 3 turns that each earned 1: each turn's reward is 1 / std, and mt_grpo credits none."""

    def by_turn(group: str, sibling: int) -> Verdict:
        spans = tuple(RewardSpan(turn=turn, start=0, end=1, value=1.0) for turn in range((2, 4, 3)[sibling]))
        return Verdict(rewards=spans, score=1.0, breakdown={}, score_std=0.0, num_judgements=0)

    mix = {"kind": "mix", "mix": {"task": 1}, "normalise": "group_std"}
    reports = group_bench.composed(mix, {"task": by_turn}).reports(3)
    spans = [
        span.value
        for report in reports.values()
        for span in verdict_of(report).normalised or verdict_of(report).rewards
    ]
    assert spans == pytest.approx([1 / (1 + MIN_GROUP_STD)] * 9)


def test_group_std_keeps_the_estimators_floor_of_the_divisor(group_bench: Any) -> None:
    """Rewards that differ by less than the floor give next to no advantage, as by the estimator."""

    def close(group: str, sibling: int) -> float:
        return 0.5 + 1e-7 * LADDER[sibling]

    mix = {"kind": "mix", "mix": {"judge": 1}, "normalise": "group_std"}
    found = group_bench.composed(mix, {"judge": close}).outcomes()
    expected = standardize(0.5 + 1e-7 * np.array(LADDER), "sample")
    assert found == pytest.approx(expected.tolist(), abs=1e-6) and np.abs(expected).max() < 0.1


def test_group_std_leaves_failed_siblings_out_of_every_mean(group_bench: Any) -> None:
    """The others' rewards are those of a group without the failed sibling, whatever its other components gave."""
    mix = {"kind": "mix", "mix": {"judge": 1, "other": 2}, "normalise": "group_std"}

    def rewards(of_failed: float) -> list[float | str]:
        judge = lambda group, sibling: of_failed if sibling == 3 else LADDER[sibling]  # noqa: E731
        other = lambda group, sibling: group_bench.refused if sibling == 3 else LADDER[sibling] ** 2  # noqa: E731
        return group_bench.composed(mix, {"judge": judge, "other": other}).outcomes()

    three = group_bench.composed(mix, {"judge": ladder, "other": lambda group, sibling: LADDER[sibling] ** 2}).outcomes(
        3
    )
    assert rewards(0.0) == rewards(1.0) == [*three, "refused"]


def test_a_response_without_siblings_has_its_plain_reward_and_trains_nothing_by_group_std(group_bench: Any) -> None:
    """An evaluation, a labelled response and an adversarial reply are judged alone."""
    table = group_bench.composed({"kind": "mix", "mix": {"judge": 1}, "normalise": "group_std"}, {"judge": ladder})
    (report,) = table.reports(1).values()
    verdict = verdict_of(report)
    assert (verdict.outcome, verdict.score) == (pytest.approx(0.1), pytest.approx(1 + 9 * 0.1))
    assert place_rewards(rollout_of_text("g000000", 0, ""), verdict).outcome == 0.0


def test_a_normalised_part_of_a_route_is_shown_by_its_plain_reward(group_bench: Any) -> None:
    table = group_bench.composed(
        {"kind": "route", "route": {"math": "a"}, "default": "both"},
        {"a": always(0.0), "judge": ladder},
        rewards={"both": {"kind": "mix", "mix": {"judge": 1}, "normalise": "group_std"}},
    )
    assert [verdict_of(report).breakdown["both"] for report in table.reports().values()] == pytest.approx(LADDER)


# -- route -----------------------------------------------------------------------------------------------------------


def test_a_route_asks_only_the_judge_of_the_prompts_source(group_bench: Any) -> None:
    route = {"kind": "route", "route": {"math": "steps"}, "default": "judge"}
    table = group_bench.composed(route, {"judge": always(0.2), "steps": always(0.7)})
    assert table.outcomes(source="math") == [0.7] * 4
    assert not table.judges["judge"].asked
    assert table.outcomes(source="chat") == [0.2] * 4
    assert len(table.judges["steps"].asked) == 4


def test_source_without_a_judge_fails_at_once(group_bench: Any) -> None:
    table = group_bench.composed({"kind": "route", "route": {"math": "judge"}}, {"judge": ladder})
    reports = table.reports(source="chat")
    assert [group_bench.outcome_of(report) for report in reports.values()] == ["refused"] * 4
    assert "chat" in reports[0].verdict.detail
    assert not table.judges["judge"].asked


# -- jury ------------------------------------------------------------------------------------------------------------

MEMBERS = {"a": always(0.1), "b": always(0.6), "c": always(0.9)}


@pytest.mark.parametrize(
    ("vote", "reward"), [("mean", 1.6 / 3), ("median", 0.6), ("min", 0.1), ("majority", 1.0), ("accuracy", 1.6 / 3)]
)
def test_a_jury_votes(group_bench: Any, vote: str, reward: float) -> None:
    table = group_bench.composed({"kind": "jury", "members": list(MEMBERS), "vote": vote}, MEMBERS)
    (report, *_) = table.reports().values()
    assert verdict_of(report).outcome == pytest.approx(reward)
    assert verdict_of(report).score_std == pytest.approx(9 * statistics.pstdev([0.1, 0.6, 0.9]))


@pytest.mark.parametrize(("pass_at", "reward"), [(0.05, 1.0), (0.5, 1.0), (0.7, 0.0), (0.9, 0.0)])
def test_a_majority_counts_passes_from_the_bound_on(group_bench: Any, pass_at: float, reward: float) -> None:
    table = group_bench.composed(
        {"kind": "jury", "members": list(MEMBERS), "vote": "majority", "pass_at": pass_at}, MEMBERS
    )
    assert table.outcomes(1) == [reward]


def test_a_tied_majority_is_one_half(group_bench: Any) -> None:
    assert group_bench.composed({"kind": "jury", "members": ["a", "c"], "vote": "majority"}, MEMBERS).outcomes(1) == [
        0.5
    ]


def test_members_are_weighted_by_how_often_they_were_right(group_bench: Any) -> None:
    skill = MeasuredSkill()
    table = group_bench.composed({"kind": "jury", "members": list(MEMBERS), "vote": "accuracy"}, MEMBERS, skill=skill)
    skill.take_accuracies({"a": 0.5, "b": 0.75})
    assert table.outcomes(1) == [round(1.6 / 3, 9)], "one member isn't measured: all weigh the same"
    skill.take_accuracies({"c": 1.0})
    assert table.outcomes(1) == [round((0.5 * 0.6 + 1.0 * 0.9) / 1.5, 9)]
    skill.take_accuracies({"b": 0.2, "c": 0.3})
    assert table.outcomes(1) == [round(1.6 / 3, 9)], "nobody is better than a coin: all weigh the same"


@pytest.mark.parametrize("missing", range(4))
def test_a_jury_does_without_members_down_to_its_quorum_and_says_so(group_bench: Any, missing: int) -> None:
    names = list(MEMBERS)
    members = {name: failing(group_bench, 0) if index < missing else MEMBERS[name] for index, name in enumerate(names)}
    reports = group_bench.composed({"kind": "jury", "members": names, "quorum": 2}, members).reports(1)
    if missing > 1:
        assert reports[0].verdict.cause == "refused"
        assert f"{3 - missing} of 3 members gave a verdict, the quorum is 2; a: won't" in reports[0].verdict.detail
    else:
        answered = [0.1, 0.6, 0.9][missing:]
        assert verdict_of(reports[0]).outcome == pytest.approx(statistics.fmean(answered))
        assert verdict_of(reports[0]).absent == tuple(names[:missing])


@pytest.mark.parametrize("vote", ["mean", "median", "min"])
def test_a_member_that_fails_on_one_sibling_votes_on_none_of_the_group(group_bench: Any, vote: str) -> None:
    """Equal responses get equal rewards: the one that its harshest judge can't read isn't the best."""
    jury = {"kind": "jury", "members": ["harsh", "a", "b"], "quorum": 2, "vote": vote}
    members = {"harsh": failing(group_bench, 2, otherwise=0.0), "a": always(0.8), "b": always(0.8)}
    table = group_bench.composed(jury, members, delays=1)
    assert table.outcomes() == [0.8] * 4
    assert {verdict_of(report).absent for report in table.reports(group_id="g000001").values()} == {("harsh",)}


def test_members_that_fail_on_different_siblings_leave_most_of_them_with_a_verdict(group_bench: Any) -> None:
    jury = {"kind": "jury", "members": ["a", "b"], "quorum": 1}
    members = {"a": failing(group_bench, 1, otherwise=0.2), "b": failing(group_bench, 2, 3, otherwise=0.6)}
    assert group_bench.composed(jury, members).outcomes() == [0.2, "refused", 0.2, 0.2]


def test_members_without_skill_do_not_decide_alone(group_bench: Any) -> None:
    jury = {"kind": "jury", "members": ["good", "bad"], "quorum": 1, "vote": "accuracy"}
    skill = MeasuredSkill()
    skill.take_accuracies({"good": 0.9, "bad": 0.5})
    members = {"good": failing(group_bench, 1, 2, otherwise=0.9), "bad": always(0.1)}
    assert group_bench.composed(jury, members, skill=skill).outcomes() == [0.9, "refused", "refused", 0.9]


def test_without_a_quorum_all_members_must_answer(group_bench: Any) -> None:
    table = group_bench.composed(
        {"kind": "jury", "members": ["a", "b"]}, {"a": failing(group_bench, 1), "b": always(0.5)}
    )
    assert table.outcomes() == [0.5, "refused", 0.5, 0.5]


# -- gate ------------------------------------------------------------------------------------------------------------


def test_a_veto_gives_the_floor_and_saves_the_inner_judge(group_bench: Any) -> None:
    gate = {"kind": "gate", "gate": "safety", "inner": "judge", "min_reward": 0.4, "floor": 0.05}
    table = group_bench.composed(gate, {"safety": ladder, "judge": always(0.7)}, delays=3)
    assert table.outcomes() == [0.05, 0.7, 0.7, 0.7]
    assert table.asked("judge") == [1, 2, 3]


def test_a_failed_gate_is_a_failure_and_not_a_veto(group_bench: Any) -> None:
    gate = {"kind": "gate", "gate": "safety", "inner": "judge"}
    table = group_bench.composed(
        gate, {"safety": failing(group_bench, 1, otherwise=0.9), "judge": failing(group_bench, 2)}
    )
    assert table.outcomes() == [0.5, "refused", "refused", 0.5]
    assert table.asked("judge") == [0, 2, 3]


# -- nested ----------------------------------------------------------------------------------------------------------


def test_compositions_nest_and_every_part_is_shown(group_bench: Any) -> None:
    table = group_bench.composed(
        {"kind": "gate", "gate": "safety", "inner": "both"},
        {"safety": always(0.8), "judge": always(0.2), **MEMBERS},
        rewards={
            "both": {"kind": "mix", "mix": {"style": 1, "judge": 1}},
            "style": {"kind": "jury", "members": list(MEMBERS), "vote": "median"},
        },
    )
    (report, *_) = table.reports().values()
    assert verdict_of(report).outcome == pytest.approx((0.6 + 0.2) / 2)
    assert verdict_of(report).breakdown == {
        "safety": pytest.approx(0.8), "both": pytest.approx(0.4), "style": pytest.approx(0.6),
        "a": pytest.approx(0.1), "b": pytest.approx(0.6), "c": pytest.approx(0.9), "judge": pytest.approx(0.2),
    }  # fmt: skip
    assert set(report.by_judge) == {"safety", "judge", *MEMBERS}


def test_a_judge_that_is_named_twice_is_asked_once(group_bench: Any) -> None:
    table = group_bench.composed(
        {"kind": "mix", "mix": {"judge": 1, "style": 1}},
        {"judge": ladder, "a": always(0.5)},
        rewards={"style": {"kind": "jury", "members": ["a", "judge"]}},
    )
    assert table.outcomes() == [round((reward + (reward + 0.5) / 2) / 2, 9) for reward in LADDER]
    assert table.asked("judge") == [0, 1, 2, 3]
