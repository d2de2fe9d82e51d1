"""Secrets are found by the name of their key or by their value, and nothing else is lost."""

from __future__ import annotations

import traceback

import pytest

from grmpipe.config.keys.secrets import (
    REDACTED,
    environment_secrets,
    looks_secret,
    mask,
    mask_arguments,
    mask_errors,
    redact,
)


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


def test_value_of_a_secret_variable_is_found_under_any_key() -> None:
    environ = {"JUDGE_TOKEN": "hunter2-hunter2", "HOME": "/home/ida", "SHORT_KEY": "1"}
    config = {"url": "https://hunter2-hunter2@judge/v1", "home": "/home/ida", "one": "1", "list": ["hunter2-hunter2"]}
    clean = redact(config, environ)
    assert clean == {"url": f"https://{REDACTED}@judge/v1", "home": "/home/ida", "one": "1", "list": [REDACTED]}


def test_overlapping_secrets_are_removed_completely() -> None:
    secrets = environment_secrets({"A_KEY": "abcdef", "B_KEY": "abcdef-ghijkl"})
    assert mask("x abcdef-ghijkl y", secrets) == f"x {REDACTED} y"


def test_redacting_leaves_the_original_alone() -> None:
    config = {"grm": {"api_key": "sk-1"}}
    redact(config, environ={})
    assert config == {"grm": {"api_key": "sk-1"}}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET http://host/mcp?apiKey=hunter2&page=3", f"GET http://host/mcp?apiKey={REDACTED}&page=3"),
        ("server --port 8080 --api-token hunter2", f"server --port 8080 --api-token {REDACTED}"),
        ("server --token=hunter2: not found", f"server --token={REDACTED} not found"),
        ("refused 'Authorization: Bearer hunter2-hunter2'", f"refused 'Authorization: Bearer {REDACTED}'"),
        ("vllm --max-num-batched-tokens 2048", "vllm --max-num-batched-tokens 2048"),
        ("type --api-key-env MY_KEY, or judge.key=x", "type --api-key-env MY_KEY, or judge.key=x"),
        (f"server --token {REDACTED}", f"server --token {REDACTED}"),
    ],
)
def test_values_that_a_text_names_as_secrets_are_masked(text: str, shown: str) -> None:
    assert mask(text, ()) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sk-proj-a1B2c3D4e5F6g7H8 was refused", f"{REDACTED} was refused"),
        ("path=/data/hf_abcdefghijklmnopqrstuvwxyz", f"path=/data/{REDACTED}"),
        ("'ghp_0123456789abcdefghij'", f"'{REDACTED}'"),
        ("sk-learn-compatible-estimators", "sk-learn-compatible-estimators"),
        ("task-0123456789abcdefghij", "task-0123456789abcdefghij"),
        ("hf_transfer", "hf_transfer"),
    ],
)
def test_what_has_the_shape_of_a_key_is_masked_wherever_it_stands(text: str, shown: str) -> None:
    assert mask(text, ()) == shown


def test_a_command_line_is_shown_without_its_secrets() -> None:
    typed = ["npx", "mcp-remote", "--token", "hunter2", "--api-key=x y", "-e", "DB_PASSWORD=z", "X-Api-Key: a b", "-v"]
    shown = mask_arguments(typed)
    assert shown == [
        "npx", "mcp-remote", "--token", REDACTED, f"--api-key={REDACTED}", "-e", f"DB_PASSWORD={REDACTED}",
        f"X-Api-Key: {REDACTED}", "-v",
    ]  # fmt: skip
    assert mask_arguments(shown) == shown


PLANTED = "sk-planted-0123456789"


class Opaque(Exception):
    """An error whose text isn't in its arguments."""

    def __str__(self) -> str:
        return f"refused {PLANTED}"


def test_an_error_that_cannot_be_masked_is_replaced_or_behind_another_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", PLANTED)
    with pytest.raises(RuntimeError, match="^Opaque: refused <redacted>$"), mask_errors():
        raise Opaque
    with pytest.raises(OSError, match="^no answer: <redacted>$") as caught, mask_errors():
        raise OSError(f"no answer: {PLANTED}") from Opaque()
    assert PLANTED not in "".join(traceback.format_exception(caught.value))
