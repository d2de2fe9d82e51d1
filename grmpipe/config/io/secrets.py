"""The configuration as it may be written and shown: without secrets. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from grmpipe.config.keys.redact import environment_secrets, looks_secret, mask, mask_arguments, seal
from grmpipe.config.run_sections import RunSections

# What a server of tools is given may be a secret under any name. A header may change like one, too.
HEADERS = re.compile(r"env\.mcp\..+\.headers\..+")
GIVEN = re.compile(r"env\.mcp\..+\.(env|headers)\..+")
COMMAND = re.compile(r"env\.(mcp\..+\.)?command")


class FromEnvironment(str):
    """A value that came from the environment. typed: its text in the configuration, such as `${oc.env:NAME}`."""

    typed: str

    def __new__(cls, value: str, typed: str = "") -> FromEnvironment:
        text = super().__new__(cls, value)
        text.typed = typed
        return text


def mark_secrets(value: Any, typed: Any, known: frozenset[str] = frozenset()) -> Any:
    """The resolved values, with those from the environment as FromEnvironment.

    typed: the same before interpolations were resolved. known: values from the environment that other keys may refer
           to.
    """
    if isinstance(typed, str):
        if not came_from_environment(value, typed, known):
            return value
        return all_noted(value, typed)
    if isinstance(value, Mapping):
        return {name: mark_secrets(entry, typed[name], known) for name, entry in value.items()}
    if isinstance(value, list):
        return [mark_secrets(entry, one, known) for entry, one in zip(value, typed, strict=True)]
    return value


def came_from_environment(value: Any, typed: str, known: frozenset[str]) -> bool:
    if "${" not in typed:
        return False
    return "oc.env" in typed or (isinstance(value, str) and any(text in value for text in known))


def all_noted(value: Any, typed: str) -> Any:
    """The result of one interpolation, as FromEnvironment; parts of a mapping or list have no text of their own."""
    if isinstance(value, Mapping):
        return {name: all_noted(entry, "") for name, entry in value.items()}
    if isinstance(value, list):
        return [all_noted(entry, "") for entry in value]
    return FromEnvironment(value, typed) if isinstance(value, str) and value else value


def texts_from_environment(value: Any) -> frozenset[str]:
    if isinstance(value, Mapping):
        return frozenset().union(*(texts_from_environment(entry) for entry in value.values()))
    if isinstance(value, list):
        return frozenset().union(*(texts_from_environment(entry) for entry in value))
    return frozenset({str(value)}) if isinstance(value, FromEnvironment) else frozenset()


def plain(value: Any) -> Any:
    """The same values with plain strings, for code that takes no subclass of str."""
    if isinstance(value, Mapping):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, FromEnvironment) else value


def without_secrets(config: RunSections, stays_typed: Callable[[str], bool]) -> dict[str, Any]:
    """The configuration as nested values. Texts under secret-looking names, those from the environment in free-form
    sections (`extra_body`, `options`), and what a server of tools gets as variables or headers, are hashes.

    stays_typed: whether a key's interpolation is written instead of its value.
    """
    secrets = environment_secrets()

    def written(value: Any, key: str, free_form: bool) -> Any:
        if dataclasses.is_dataclass(value):
            names = (spec.name for spec in dataclasses.fields(value))
            return {name: written(getattr(value, name), f"{key}.{name}".lstrip("."), False) for name in names}
        if isinstance(value, Mapping):
            return {name: written(entry, f"{key}.{name}", True) for name, entry in value.items()}
        if isinstance(value, list | tuple):
            is_command = COMMAND.fullmatch(key) and all(isinstance(entry, str) for entry in value)
            return [written(entry, key, free_form) for entry in (mask_arguments(value) if is_command else value)]
        if not isinstance(value, str):
            return value
        from_environment = isinstance(value, FromEnvironment)
        if may_be_secret(key) or (from_environment and free_form):
            return seal(value)
        if isinstance(value, FromEnvironment) and value.typed and stays_typed(key):
            return value.typed
        return mask(str(value), secrets)

    values: dict[str, Any] = written(config, "", False)
    return values


def may_be_secret(key: str) -> bool:
    """Whether texts under a key are written as hashes only."""
    return is_secret_key(key) or GIVEN.fullmatch(key) is not None


def is_secret_key(key: str) -> bool:
    """Whether any name on the path to a value looks like a secret's, or the value is a header."""
    return any(looks_secret(name) for name in key.split(".")) or HEADERS.fullmatch(key) is not None
