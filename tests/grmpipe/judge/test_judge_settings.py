"""Bad judge settings end before anything starts, and name the key."""

from __future__ import annotations

from typing import Any

import pytest

from grmpipe.judge.parse import PARSERS
from grmpipe.judge.rule import RULES
from grmpipe.judge.settings import PARSERS as PARSER_NAMES
from grmpipe.judge.settings import RULES as RULE_NAMES
from grmpipe.judge.settings import VOTES as VOTE_NAMES
from grmpipe.judge.settings import JudgeConfig
from grmpipe.judge.vote import VOTES


def test_defaults_are_valid() -> None:
    assert JudgeConfig().kind == "generative"


def test_settings_and_tables_know_the_same_names() -> None:
    assert (set(PARSER_NAMES), set(VOTE_NAMES), set(RULE_NAMES)) == (set(PARSERS), set(VOTES), set(RULES))


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
        ("width", 0),
        ("failure_window", 0),
        ("reasks", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("score_max", 1),
        ("max_failure_rate", 0.0),
        ("max_failure_rate", 1.5),
        ("min_tokens_per_s", 0.0),
        ("timeout_s", float("inf")),
        ("anchor_every", 0),
    ],
)
def test_a_bad_value_is_an_error_that_names_its_key(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        JudgeConfig(**{key: value})


def test_a_timeout_below_the_declared_speed_is_an_error_that_says_what_to_type() -> None:
    with pytest.raises(ValueError, match=r"judge\.timeout_s=409\.6 or more"):
        JudgeConfig(max_new_tokens=16384, min_tokens_per_s=40.0, timeout_s=300.0)
    JudgeConfig(max_new_tokens=16384, min_tokens_per_s=40.0, timeout_s=409.6)


def test_a_parser_that_cannot_read_its_shipped_template_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"judge\.parser=boxed"):
        JudgeConfig(template="boxed")
    JudgeConfig(template="boxed", parser="boxed")
    JudgeConfig(template="mine/own.jinja", parser="boxed")


def test_many_greedy_judgements_are_an_error() -> None:
    with pytest.raises(ValueError, match="num_judgements"):
        JudgeConfig(temperature=0.0, num_judgements=4)


@pytest.mark.parametrize("mix", [{}, {"oracle": 1.0}, {"rule": 0.0}, {"rule": -1.0}, {"rule": float("inf")}])
def test_a_mix_needs_known_components_with_positive_weights(mix: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="mix"):
        JudgeConfig(kind="mixed", mix=mix)
