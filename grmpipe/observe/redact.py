"""What must not leave the process: secrets, by the look of their key or by their value. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

REDACTED = "<redacted>"
SECRET_WORDS = frozenset({"key", "apikey", "token", "password", "passwd", "secret", "credential", "credentials"})
MIN_SECRET_CHARS = 6  # a shorter value would blank out half of a config


def redact(mapping: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> dict[str, object]:
    """A copy without secrets, nested mappings and lists included.

    Numbers stay under any name: max_new_tokens is a count, and no API key is a number.
    """
    secrets = environment_secrets(environ)
    return {key: _redact_value(key, value, secrets) for key, value in mapping.items()}


def mask(text: str, secrets: Sequence[str]) -> str:
    """The text with every secret blanked out, also within a longer word (a URL, say)."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return text


def environment_secrets(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Values of variables that look like secrets, longest first: one may be part of another."""
    values = {value for name, value in environ.items() if looks_secret(name) and len(value) >= MIN_SECRET_CHARS}
    return tuple(sorted(values, key=len, reverse=True))


def looks_secret(name: str) -> bool:
    """apiKey, HF_TOKEN, auth_tokens, db-password: by whole words, so that `tokenizer` and `keyboard` don't."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return any(word.lower() in SECRET_WORDS or word.lower().removesuffix("s") in SECRET_WORDS for word in words)


def _redact_value(key: str, value: object, secrets: Sequence[str]) -> object:
    if isinstance(value, Mapping):
        return {name: _redact_value(f"{key} {name}", entry, secrets) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_redact_value(key, entry, secrets) for entry in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return REDACTED if looks_secret(key) else mask(str(value), secrets)
