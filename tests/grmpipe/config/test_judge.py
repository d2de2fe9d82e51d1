"""Bad judge settings end before anything starts, and name the key."""

from __future__ import annotations

from typing import Any

import pytest
from configs import BLOCKS, judge_config

from grmpipe.config.judge import EarlyStopConfig, FormatConfig, JudgeConfig, Scale
from grmpipe.config.judge_protocols import SHIPPED_TEMPLATES
from grmpipe.judge.parse import Form
from grmpipe.judge.prompt import TEMPLATES


def test_defaults_are_valid() -> None:
    assert JudgeConfig().kind == "generative"


def test_every_shipped_template_says_its_parser_and_protocol() -> None:
    shipped = {path.stem for path in TEMPLATES.glob("*.jinja")} - {
        "principles", "ce_rm_criteria", "rubric_writer", "tiny_rubric_writer"
    }  # fmt: skip  # they ask for no verdict
    assert set(SHIPPED_TEMPLATES) == shipped


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kind", "llm"),
        ("parser", "regex"),
        ("vote", "max"),
        ("rule", "similar"),
        ("template", ""),
        ("num_judgements", 0),
        ("max_new_tokens", 0),
        ("max_concurrency", 0),
        ("max_retries", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("score_max", 1),
        ("max_failure_rate", 0.0),
        ("max_failure_rate", 1.5),
        ("min_tokens_per_s", 0.0),
        ("timeout_s", float("inf")),
        ("protocol", "tournament"),
        ("pairs", "some"),
        ("principles", "later"),
        ("truncation", "left"),
        ("k_meta", -1),
        ("k_meta", 2),
        ("abstain_above_std", -1.0),
    ],
)
def test_a_bad_value_is_an_error_that_names_its_key(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=BLOCKS.get(key, key).rpartition(".")[2]):
        judge_config(**{key: value})


def test_a_timeout_below_the_declared_speed_is_an_error_that_says_what_to_type() -> None:
    with pytest.raises(ValueError, match=r"judge\.limits\.timeout_s=409\.6 or more"):
        judge_config(max_new_tokens=16384, min_tokens_per_s=40.0, timeout_s=300.0)
    judge_config(max_new_tokens=16384, min_tokens_per_s=40.0, timeout_s=409.6)


ARROW = Form(line=lambda number, scale, num_scores: f"=> {number}")


def test_a_parser_that_cannot_read_its_shipped_template_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"judge\.parser=boxed"):
        JudgeConfig(template="boxed")
    JudgeConfig(template="boxed", parser="boxed")
    JudgeConfig(template="mine/own.jinja", parser="boxed")
    JudgeConfig(template="boxed", parser=f"{__name__}.ARROW")
    JudgeConfig(template="boxed", pattern="Verdict: ([0-9]+)")


PAIRS = {"protocol": "pairwise", "template": "pairwise", "parser": "boxed", "vote": "majority"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"template": "listwise", "parser": "boxed"},
            r"^template: .* for the listwise .*judge\.protocol=listwise",
        ),
        (
            {"protocol": "listwise", "template": "own.jinja"},
            r"^parser: score_line reads one score, .*judge\.parser=boxed",
        ),
        ({**PAIRS, "num_judgements": 3}, r"^num_judgements: each pair is judged .*judge\.num_judgements=4"),
        (
            {**PAIRS, "num_judgements": 2, "vote": "median"},
            r"^vote: pairwise judgements are decided by majority or mean, not by median",
        ),
        (
            {"protocol": "listwise", "template": "pointwise", "parser": "boxed"},
            r"^template: .* for the pointwise .*judge=listwise",
        ),
        ({"pattern": "Verdict: ("}, r"^pattern: 'Verdict: \(' is no regular expression: .*judge\.pattern='Verdict: "),
        ({"pattern": "Verdict: [0-9]+"}, r"^pattern: .* has 0 groups, and one must hold the score"),
        ({"pattern": "(a|b)+ ([0-9]+)"}, r"^pattern: .* has 2 groups"),
        ({"pattern": "(?:a+b)+ ([0-9]+)"}, r"^pattern: .* repeats a group .*judge\.parser"),
        ({"pattern": "(?:(?:a|a))* ([0-9]+)"}, r"^pattern: .* repeats a group"),
        ({"pattern": "([0-9]+)", "structured": True}, r"^format\.structured: .*judge\.format\.structured=false"),
        ({**PAIRS, "num_judgements": 2, "pattern": "([0-9]+)"}, r"^pattern: reads one score, .* pairwise"),
        ({"kind": "custom"}, r"^custom\.target: is empty"),
        (
            {"score_from": "expectation", "vote": "majority", "num_judgements": 2},
            r"^vote: majority counts equal scores, .* type judge\.vote=mean",
        ),
        ({"score_from": "tokens"}, r"^score_from: .*text.*expectation"),
        (
            {"abstain_above_std": 1.0, "num_judgements": 1},
            r"^votes\.abstain_above_std: one judgement has no standard deviation; type judge\.num_judgements=4",
        ),
    ],
)
def test_judge_settings_that_contradict_each_other_say_what_to_type(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        judge_config(**settings)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("exact", {"num_judgements": 8}, r"^early_stop\.kind: exact is for judge\.protocol=pairwise, not pointwise"),
        ("relaxed", {**PAIRS, "num_judgements": 8}, r"^early_stop\.kind: relaxed is for judge\.protocol=pointwise or"),
        ("relaxed", {"num_judgements": 8, "vote": "median"}, r"^early_stop\.kind: relaxed uses .* of a mean"),
        (
            "exact",
            {**PAIRS, "num_judgements": 8, "vote": "mean"},
            r"^early_stop\.kind: exact .*type judge\.vote=majority,",
        ),
        ("relaxed", {"num_judgements": 2}, r"^early_stop\.kind: of 2 judgements none can be saved"),
    ],
)
def test_an_early_stop_where_it_would_change_what_counts_is_refused(
    kind: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        judge_config(early_stop=EarlyStopConfig(kind=kind), **settings)


@pytest.mark.parametrize("keys", [{"protocol": "steps", "template": "steps", "parser": "boxed"}, {"kind": "rule"}])
def test_only_a_judge_that_reads_whole_responses_is_told_of_a_truncation(keys: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"^format\.show_truncation: "):
        JudgeConfig(format=FormatConfig(show_truncation=True), **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize(("key", "value"), [("kind", "soon"), ("first", 0), ("max_error", 0.0), ("audit_share", 0.0)])
def test_a_bad_early_stop_names_its_key(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{key}"):
        EarlyStopConfig(**{key: value})


def test_many_greedy_judgements_are_an_error() -> None:
    with pytest.raises(ValueError, match="num_judgements"):
        JudgeConfig(temperature=0.0, num_judgements=4)


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({"num_judgements": 2}, 16),
        ({"protocol": "listwise", "template": "listwise", "parser": "boxed", "num_judgements": 2}, 2),
        ({**PAIRS, "num_judgements": 2}, 56),
        ({**PAIRS, "num_judgements": 2, "pairs": "ring"}, 16),
    ],
)
def test_how_often_a_group_of_8_is_asked_about_depends_on_the_protocol(settings: dict[str, Any], asked: int) -> None:
    assert judge_config(**settings).judgements_of_group(8) == asked


def test_a_score_is_shown_as_its_vote_gives_it() -> None:
    assert JudgeConfig(num_judgements=4, vote="sum").to_shown_score(8) == 32
    assert JudgeConfig(num_judgements=4, vote="median").to_shown_score(8) == 8


@pytest.mark.parametrize("step", [0, 0.25, 2])
def test_scores_have_steps_of_one_or_a_half(step: float) -> None:
    with pytest.raises(ValueError, match=r"^step: must be 1 or 0\.5, got .*judge\.scale\.step=1"):
        Scale(step=step)
