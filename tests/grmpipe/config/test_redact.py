"""Secrets are found by the name of their key or by their value, and nothing else is lost."""

from __future__ import annotations

import pytest

from grmpipe.config.redact import REDACTED, environment_secrets, looks_secret, mask, redact


@pytest.mark.parametrize(
    "name",
    ["key", "api_key", "apiKey", "APIKey", "HF_TOKEN", "auth-tokens", "db.password", "clientSecret", "OPENAI_API_KEYS"],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize("name", ["tokenizer", "keyboard", "monkey_patch", "secretary", "max_context", "path"])
def test_names_that_only_contain_such_a_word_are_no_secrets(name: str) -> None:
    assert not looks_secret(name)


def test_numbers_under_such_a_name_are_counts_and_stay() -> None:
    config = {"max_new_tokens": 128, "min_tokens_per_s": 2.5, "keep_tokens": True, "token": None}
    assert redact(config, environ={}) == config


def test_secrets_are_found_however_deep_they_lie() -> None:
    config = {"grm": {"api_key": "sk-1", "path": "x"}, "tokens": ["a", "b"], "secrets": {"any": "thing"}}
    expected = {"grm": {"api_key": REDACTED, "path": "x"}, "tokens": [REDACTED] * 2, "secrets": {"any": REDACTED}}
    assert redact(config, environ={}) == expected


def test_a_value_that_stands_in_the_environment_is_found_under_an_innocent_key() -> None:
    environ = {"JUDGE_TOKEN": "hunter2-hunter2", "HOME": "/home/ida", "SHORT_KEY": "1"}
    config = {"url": "https://hunter2-hunter2@judge/v1", "home": "/home/ida", "one": "1", "list": ["hunter2-hunter2"]}
    clean = redact(config, environ)
    assert clean == {"url": f"https://{REDACTED}@judge/v1", "home": "/home/ida", "one": "1", "list": [REDACTED]}


def test_of_two_secrets_that_overlap_nothing_is_left_over() -> None:
    secrets = environment_secrets({"A_KEY": "abcdef", "B_KEY": "abcdef-ghijkl"})
    assert mask("x abcdef-ghijkl y", secrets) == f"x {REDACTED} y"


def test_redacting_leaves_the_original_alone() -> None:
    config = {"grm": {"api_key": "sk-1"}}
    redact(config, environ={})
    assert config == {"grm": {"api_key": "sk-1"}}
