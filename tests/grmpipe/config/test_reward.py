"""Compositions that contradict themselves or name nobody are refused, with the key and the way out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from configs import judge_config

from grmpipe.algorithm.settings import OverlongConfig
from grmpipe.config.judge import FunctionCallConfig, JudgeConfig, JudgeEntry
from grmpipe.config.reward import (
    REWARD_KINDS,
    RewardConfig,
    RewardTree,
    arrival_orders,
)
from grmpipe.config.reward_checks import (
    check_doubts,
    check_normalised_units,
    check_rewards,
    check_rewards_used,
    check_scales,
    check_sources,
)
from grmpipe.config.train import AlgorithmConfig

JUDGES = ("judge", "safety", "short")
MIX = {"kind": "mix", "mix": {"judge": 0.7, "safety": 0.3}}
CASCADE: dict[str, Any] = {"kind": "cascade", "first": "short", "then": "judge", "unsure_band": [0.3, 0.7]}


def check(reward: dict[str, Any], group_baseline: bool = True, **rewards: dict[str, Any]) -> None:
    made = {name: RewardConfig(**values) for name, values in rewards.items()}
    check_rewards(RewardTree.of(RewardConfig(**reward), made), JUDGES, group_baseline=group_baseline)


@pytest.mark.parametrize(
    "reward",
    [
        {},
        {"kind": "single", "judge": "safety"},
        MIX,
        {"kind": "mix", "mix": {"judge": 1}, "normalise": "group_std"},
        {"kind": "route", "route": {"math": "short"}},
        {"kind": "jury", "members": ["judge", "safety"], "quorum": 1, "vote": "accuracy"},
        CASCADE,
        {"kind": "gate", "gate": "safety", "inner": "judge"},
    ],
)
def test_every_kind_has_a_complete_form(reward: dict[str, Any]) -> None:
    check(reward)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"kind": "mix"}, r"^reward\.mix: names no judge, got null; type 'reward\.mix="),
        ({"kind": "mix", "mix": {}}, r"^reward\.mix: names no judge"),
        (
            {"kind": "mix", "mix": {"judge": 0.0, "safety": 0}},
            r"^reward\.mix: all weights are 0; type reward\.mix\.judge=1",
        ),
        ({"kind": "mix", "mix": {"judge": -1}}, r"^reward\.mix\.judge: a weight"),
        ({"kind": "mix", "mix": {"judge": float("inf")}}, r"^reward\.mix\.judge: a weight"),
        ({"kind": "mix", "mix": {"judge": "much"}}, r"^reward\.mix\.judge: a weight .*'much'"),
        ({"kind": "mix", "mix": {"jugde": 1}}, r"^reward: there is no judge or composition 'jugde'; known: judge, saf"),
        ({"kind": "single", "judge": "nobody"}, r"^reward: there is no judge .*\+judge@judges\.nobody=pointwise"),
        ({"kind": "route", "route": []}, r"^reward\.route: names no judge"),
        ({"kind": "route", "route": {"math": 3}}, r"^reward\.route\.math: must be a name, got 3"),
        ({"kind": "jury", "members": []}, r"^reward\.members: must be a list of names"),
        ({"kind": "jury", "members": "judge"}, r"^reward\.members: must be a list of names"),
        ({"kind": "jury", "members": ["judge", "judge"]}, r"^reward\.members: judge is a member twice"),
        ({"kind": "jury", "members": ["judge"], "quorum": 2}, r"^reward\.quorum: .*the 1 members.*reward\.quorum=1"),
        ({"kind": "jury", "members": ["judge"], "quorum": 0}, r"^reward\.quorum: must be at least 1"),
        ({**CASCADE, "unsure_band": [0.7, 0.3]}, r"^reward\.unsure_band: must be two rewards .*\[0\.3, 0\.7\]'$"),
        ({**CASCADE, "unsure_band": 0.5}, r"^reward\.unsure_band: must be two rewards"),
        ({**CASCADE, "unsure_band": [False, True]}, r"^reward\.unsure_band: must be two rewards"),
        ({**CASCADE, "unsure_band": None}, r"^reward\.unsure_band: nothing says where short is unsure"),
        ({**CASCADE, "then": "short"}, r"^reward\.then: is short like first"),
        ({**CASCADE, "first": None}, r"^reward\.first: names no judge"),
        ({**CASCADE, "escalate": "rollout"}, r"^reward\.escalate: .* type reward\.escalate=group$"),
        ({"kind": "gate", "inner": "judge"}, r"^reward\.gate: names no judge; type reward\.gate=judge$"),
        ({**MIX, "quorum": 1}, r"^reward\.quorum: is for kind=jury, not mix; type reward=jury, or leave out 1$"),
        ({"mix": {"judge": 1}}, r"^reward\.mix: is for kind=mix, not single; type reward=mix"),
    ],
)
def test_a_composition_that_can_not_work_is_refused(reward: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(reward)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "mixed"}, r"^kind: unknown value 'mixed'; known: single, mix, route, jury, cascade, gate, none$"),
        ({"share": 0.0}, r"^share: .*type reward\.share="),
        ({"audit_share": 1.1}, r"^audit_share: .*type reward\.audit_share="),
        ({"floor": -1.0}, r"^floor: rewards are on \[0, 1\]"),
        ({"floor": 1.0}, r"^floor: 1 is as much as the best response that passes .*type reward\.floor=0$"),
        ({"min_reward": 2.0}, r"^min_reward: rewards are on .*type reward\.min_reward="),
        ({"pass_at": float("nan")}, r"^pass_at: rewards are on"),
        ({"max_error": 0.0}, r"^max_error: must be above 0"),
        ({"unsure_above_std": -0.1}, r"^unsure_above_std: must be 0 or more"),
        ({"unsure_above_std": 0.5}, r"^unsure_above_std: .*below 0\.5.*type reward\.unsure_above_std="),
        ({"vote": "most"}, r"^vote: unknown value 'most'; known: mean, median, min, majority, accuracy$"),
    ],
)
def test_a_single_bad_value_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardConfig(**values)


def test_compositions_nest_by_name_and_each_judge_is_named_once() -> None:
    style = RewardConfig(kind="jury", members=["safety", "short"])
    outer = RewardConfig(kind="mix", mix={"style": 1.0, "judge": 1.0, "safety": 1.0})
    check_rewards(RewardTree.of(outer, {"style": style}), JUDGES, group_baseline=True)
    assert RewardTree.of(outer, {"style": style}).judges() == ("safety", "short", "judge")
    assert RewardTree.of(RewardConfig(), {"style": style}).judges() == ("judge",)


def test_a_route_sends_a_prompt_to_the_judges_of_its_source_only() -> None:
    route = RewardConfig(kind="route", route={"math": "both", "code": "short"})
    both = RewardConfig(kind="mix", mix={"judge": 1.0, "safety": 1.0})
    assert RewardTree.of(route, {"both": both}).judges("math") == ("judge", "safety")
    assert RewardTree.of(route, {"both": both}).judges("code") == ("short",)
    assert RewardTree.of(route, {"both": both}).judges("chat") == ()
    by_name = RewardTree.of(RewardConfig(judge="route"), {"route": route, "both": both})
    assert by_name.judges() == (
        "judge",
        "safety",
        "short",
    )


def test_rewards_that_depend_on_the_order_of_arrival_are_listed() -> None:
    (said,) = arrival_orders(RewardTree.of(RewardConfig(**CASCADE)))
    assert said.startswith("reward.share=0.25 ") and said.endswith("; type reward.share=1")
    jury = RewardConfig(kind="jury", members=["judge"], vote="accuracy")
    (said,) = arrival_orders(RewardTree.of(RewardConfig(judge="jury"), {"jury": jury}))
    assert said.endswith("; type rewards.jury.vote=mean")
    assert list(arrival_orders(RewardTree.of(RewardConfig(**{**CASCADE, "share": 1.0}), {"jury": jury}))) == []


def test_an_error_of_a_nested_composition_names_its_key() -> None:
    with pytest.raises(ValueError, match=r"^rewards\.style\.members: .*'rewards\.style\.members="):
        check({}, style={"kind": "jury"})
    with pytest.raises(ValueError, match=r"^rewards\.style\.mix: .*type \+reward@rewards\.style=mix"):
        check({}, style={"mix": {"judge": 1}})


@pytest.mark.parametrize(
    ("cascade", "first", "message"),
    [
        (
            {},
            {"abstain_above_std": 2.0},
            r"^judges\.short\.votes\.abstain_above_std: beyond reward\.share=0\.25 .*or reward\.share=1$",
        ),
        (
            {"unsure_band": None, "unsure_above_std": 0.1},
            {"num_judgements": 1},
            r"^reward\.unsure_above_std: short gives one score.*unsure_band=.*or judges\.short\.num_judgements=4$",
        ),
        (
            {"unsure_above_std": 0.1},
            {"kind": "rule", "rule": "exact_answer"},
            r"^reward\.unsure_above_std: short gives one score, .*unsure_band=\[0\.3, 0\.7\]' instead$",
        ),
    ],
)
def test_a_cascade_whose_first_judge_can_not_be_unsure_is_refused(
    cascade: dict[str, Any], first: dict[str, Any], message: str
) -> None:
    judges = {"judge": JudgeConfig(), "short": JudgeEntry.of(judge_config(**{"num_judgements": 4, **first}), "short")}
    with pytest.raises(ValueError, match=message):
        check_doubts(RewardTree.of(RewardConfig(**{**CASCADE, **cascade})), judges)


@pytest.mark.parametrize(
    ("reward", "key"),
    [
        (MIX, "mix"),
        ({"kind": "jury", "members": ["judge", "safety"]}, "pass_at"),
        (CASCADE | {"first": "safety"}, "unsure_band"),
        ({"kind": "gate", "gate": "judge", "inner": "safety"}, "min_reward"),
    ],
)
def test_a_reward_that_needs_a_scale_refuses_a_function_without_one(reward: dict[str, Any], key: str) -> None:
    function = JudgeEntry.of(JudgeConfig(kind="function", function="mine.reward"), "safety")
    judges = {"judge": JudgeConfig(), "safety": function}
    with pytest.raises(
        ValueError, match=rf"^reward\.{key}: .*safety .*'judges\.safety\.function_call\.score_range=\[0, 1\]'"
    ):
        check_scales(RewardTree.of(RewardConfig(**reward)), judges)
    on_scale = replace(function, function_call=FunctionCallConfig(score_range=[0, 5]))
    check_scales(RewardTree.of(RewardConfig(**reward)), judges | {"safety": on_scale})
    check_scales(RewardTree.of(RewardConfig(judge="safety")), judges)
    check_scales(RewardTree.of(RewardConfig(**MIX, normalise="group_std")), judges)


def test_a_cascade_that_may_escalate_everything_takes_abstentions() -> None:
    judges = {"judge": JudgeConfig(), "short": judge_config(num_judgements=4, abstain_above_std=2.0)}
    check_doubts(RewardTree.of(RewardConfig(**{**CASCADE, "share": 1.0, "unsure_above_std": 0.1})), judges)


def test_a_composition_that_waits_for_siblings_is_named_once() -> None:
    """In two places each could wait for siblings that the other one holds back."""
    twice = {"kind": "mix", "mix": {"first": 1, "second": 1}}
    inner = {"kind": "gate", "gate": "safety", "inner": "short_first"}
    with pytest.raises(ValueError, match=r"^rewards\.short_first: rewards\.\w+ and rewards\.\w+ both name it"):
        check(twice, first=inner, second={**inner, "gate": "short"}, short_first=CASCADE)
    check(twice, first=inner, second={**inner, "gate": "short"}, short_first=MIX)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"overlong_buffer": OverlongConfig(share=0.1)},
            r"^algorithm\.overlong_buffer\.share: .*type algorithm\.overlong_buffer\.share=0, or",
        ),
        ({"estimator": "gae"}, r"^rewards\.style\.normalise: .*type algorithm\.estimator=reinforce_pp_baseline, or"),
        ({"estimator": "reinforce_pp"}, r"^rewards\.style\.normalise: .* reinforce_pp does not"),
        ({"kl_in_reward": True}, r"^algorithm\.kl_in_reward: .*or rewards\.style\.normalise=none$"),
    ],
)
def test_penalties_in_units_of_rewards_are_refused_with_normalised_rewards(
    algorithm: dict[str, Any], message: str
) -> None:
    style = {"style": RewardConfig(**MIX, normalise="group_std")}
    settings = AlgorithmConfig(kl_coefficient=0.1, **algorithm)
    with pytest.raises(ValueError, match=message):
        check_normalised_units(RewardTree.of(RewardConfig(judge="style"), style), settings)
    check_normalised_units(RewardTree.of(RewardConfig(), style), settings)


@pytest.mark.parametrize("inner", ["a", "b"])
def test_a_circle_of_names_is_refused(inner: str) -> None:
    circle = {"a": {"judge": inner}, "b": {"judge": "a"}}
    with pytest.raises(ValueError, match=r"^rewards\.a: names itself \(a -> "):
        check({}, **circle)


def test_a_name_is_a_judge_or_a_composition_but_not_both() -> None:
    with pytest.raises(ValueError, match=r"^rewards\.safety: there is a judge of this name"):
        check({}, safety=MIX)


def test_rewards_normalised_by_their_group_enter_no_other_composition() -> None:
    normalised = {**MIX, "normalise": "group_std"}
    check({"kind": "route", "route": {"math": "inner"}, "default": "judge"}, inner=normalised)
    check({"judge": "inner"}, inner=normalised)
    gate = {"kind": "gate", "gate": "safety", "inner": "inner"}
    with pytest.raises(ValueError, match=r"^rewards\.inner\.normalise: .* which gate needs; .*=none$"):
        check(gate, inner=normalised)
    with pytest.raises(ValueError, match=r"which gate needs"):
        check({**gate, "inner": "between"}, between={"judge": "inner"}, inner=normalised)


def test_accuracy_is_known_of_judges_only() -> None:
    jury = {"kind": "jury", "members": ["judge", "style"], "vote": "accuracy"}
    with pytest.raises(ValueError, match=r"^reward\.vote: accuracy is measured judge by judge, and style is a comp"):
        check(jury, style=MIX)


def test_single_rollouts_are_escalated_where_no_baseline_compares_them() -> None:
    check({**CASCADE, "escalate": "rollout"}, group_baseline=False)


def test_source_without_a_judge_is_refused() -> None:
    route = RewardConfig(kind="route", route={"math": "judge"})
    check_sources(RewardTree.of(route), {"math"})
    check_sources(RewardTree.of(RewardConfig(kind="route", route={"math": "judge"}, default="short")), {"math", "chat"})
    with pytest.raises(ValueError, match=r"^reward\.route: .* the source 'chat'; add it, or type reward\.default="):
        check_sources(RewardTree.of(route), {"math", "chat"})
    with pytest.raises(ValueError, match=r"^rewards\.by_source\.route: "):
        check_sources(RewardTree.of(RewardConfig(judge="by_source"), {"by_source": route}), {"chat"})
    check_sources(RewardTree.of(RewardConfig(), {"by_source": route}), {"chat"})


def test_a_routed_source_that_no_prompt_has_is_found() -> None:
    route = RewardConfig(kind="route", route={"math": "judge", "chta": "short"}, default="judge")
    assert list(RewardTree.of(route).idle_routes({"math", "chat"})) == [("reward.route", "chta")]
    by_name = RewardTree.of(RewardConfig(judge="by"), {"by": route})
    assert list(by_name.idle_routes({"math"})) == [("rewards.by.route", "chta")]
    assert list(RewardTree.of(RewardConfig(), {"by": route}).idle_routes({"math"})) == []


def test_numeric_name_of_a_source_stays_a_text() -> None:
    route = RewardConfig(kind="route", route={1: "judge", 2: "short"})
    check_sources(RewardTree.of(route), {"1", "2"})
    assert RewardTree.of(route).judges("2") == ("short",)


def test_a_composition_that_the_reward_does_not_use_is_refused() -> None:
    style = RewardConfig(kind="jury", members=["judge", "short"])
    check_rewards_used(RewardTree.of(RewardConfig(judge="style"), {"style": style}))
    with pytest.raises(ValueError, match=r"^rewards\.style: the reward doesn't use it; type .*reward\.judge=style"):
        check_rewards_used(RewardTree.of(RewardConfig(), {"style": style}))


def shares(reward: dict[str, Any], sources: dict[str, float] | None = None, **rewards: dict[str, Any]) -> dict:
    made = {name: RewardConfig(**values) for name, values in rewards.items()}
    return RewardTree.of(RewardConfig(**reward), made).compute_asked_shares(sources or {"": 1.0})


@pytest.mark.parametrize(
    ("reward", "wanted"),
    [
        ({}, {"judge": 1}),
        (MIX, {"judge": 1, "safety": 1}),
        ({"kind": "jury", "members": ["judge", "safety"], "quorum": 1}, {"judge": 1, "safety": 1}),
        ({"kind": "gate", "gate": "safety", "inner": "judge"}, {"safety": 1, "judge": 1}),
        (CASCADE | {"share": 0.25, "audit_share": 0.05}, {"short": 1, "judge": 0.3}),
        (CASCADE | {"share": 1.0}, {"short": 1, "judge": 1}),
    ],
)
def test_each_kind_asks_its_judges_about_a_share_of_the_rollouts(
    reward: dict[str, Any], wanted: dict[str, float]
) -> None:
    assert shares(reward) == pytest.approx(wanted)


def test_a_route_asks_by_the_share_of_its_prompts() -> None:
    route = {"kind": "route", "route": {"math": "short", "chat": "judge"}}
    sources = {"math": 0.5, "chat": 0.3, "code": 0.2}
    assert shares(route, sources) == pytest.approx({"short": 0.5, "judge": 0.3})
    assert shares(route | {"default": "judge"}, sources) == pytest.approx({"short": 0.5, "judge": 0.5})


def test_a_judge_of_nested_compositions_is_asked_once_about_a_rollout() -> None:
    style = {"kind": "jury", "members": ["judge", "safety"]}
    assert shares({"kind": "mix", "mix": {"style": 1, "judge": 1}}, style=style) == {"judge": 1, "safety": 1}
    cheap = CASCADE | {"first": "short", "then": "style", "share": 0.2, "audit_share": 0.1}
    found = shares({"kind": "mix", "mix": {"cheap": 1, "judge": 1}}, style=style, cheap=cheap)
    assert found == pytest.approx({"short": 1, "judge": 1, "safety": 0.3})


def test_only_compositions_in_use_wait_for_siblings() -> None:
    cascade = RewardConfig(**CASCADE)
    assert RewardTree.of(cascade).waits_for_siblings()
    assert RewardTree.of(RewardConfig(judge="inner"), {"inner": cascade}).waits_for_siblings()
    assert not RewardTree.of(RewardConfig(), {"inner": cascade}).waits_for_siblings()
    assert not RewardTree.of(RewardConfig(**{**CASCADE, "escalate": "rollout"})).waits_for_siblings()
    assert RewardTree.of(cascade).varies_by_group()
    jury = {"kind": "jury", "members": ["judge", "safety"]}
    assert RewardTree.of(
        RewardConfig(judge="inner"), {"inner": RewardConfig(**jury, vote="accuracy")}
    ).varies_by_group()
    assert not RewardTree.of(RewardConfig(**jury)).varies_by_group()


def test_the_alarms_limits_are_those_of_the_cascades_in_use() -> None:
    cascade = RewardConfig(**CASCADE, max_error=0.2)
    assert RewardTree.of(cascade, {"unused": RewardConfig(**CASCADE)}).max_errors() == {"reward": 0.2}
    assert RewardTree.of(RewardConfig(judge="both"), {"both": cascade}).max_errors() == {"both": 0.2}
    assert RewardTree.of(RewardConfig(), {"unused": cascade}).max_errors() == {}


def test_every_key_belongs_to_a_kind() -> None:
    keys = {key for kind in REWARD_KINDS.values() for key in kind.keys}
    assert keys == set(RewardConfig.__dataclass_fields__) - {"kind"}
