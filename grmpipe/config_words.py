"""What is wrong with a key that a user typed, and what to type instead. Knows Hydra's words, not Hydra."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
import typing
from collections.abc import Iterator

from grmpipe.config import RunConfig


def known_keys() -> list[str]:
    """Every key with a fixed name, sections included."""
    return [key for key, _ in _keys(RunConfig)]


def unknown_key(key: str, known: list[str]) -> str:
    """The message for a key that doesn't exist, with the nearest ones that do."""
    # The right leaf in the wrong section is the commonest slip of all.
    same_leaf = [other for other in known if other.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    hints = same_leaf[:3] or difflib.get_close_matches(key, known, n=2, cutoff=0.5)
    return f"unknown key {key!r}" + (f"; did you mean {' or '.join(hints)}?" if hints else "")


def not_there_yet(key: str) -> str:
    """What to type for a key of a section whose keys are the user's own; empty for any other."""
    for section, hint in _keys(RunConfig):
        of_values = typing.get_origin(hint) is dict and not dataclasses.is_dataclass(typing.get_args(hint)[1])
        if of_values and (key == section or key.startswith(f"{section}.")):
            return f"{key}: {section} doesn't hold it yet; to add it type +{key}=..."
    return ""


def no_such_member(key: str) -> str:
    """The message for a member that a section of named sections doesn't have; empty for any other key."""
    section, _, name = key.rpartition(".")
    hint = dict(_keys(RunConfig)).get(section)
    if typing.get_origin(hint) is not dict or not dataclasses.is_dataclass(typing.get_args(hint)[1]):
        return ""
    return f"{key}: {section} has no {name} yet; to add one type '+{section}={{{name}: {{...}}}}'"


def explain(error: Exception) -> str:
    """One readable message for what Hydra or OmegaConf found wrong while composing."""
    text = f"{error}\n{error.__cause__ or ''}"
    found = re.search(r"Could not override '([^']+)'", text) or re.search(r"full_key: (\S+)", text)
    noise = (
        "Error merging override",
        "Could not override",
        "full_key:",
        "reference_type=",
        "object_type=",
        "provider=",
    )
    said = [line.strip() for line in text.splitlines() if line.strip()]
    useful = list(dict.fromkeys(line for line in said if not line.startswith(noise)))
    # OmegaConf fills a member of a typed dictionary only together with the dictionary.
    if (added := re.search(r"Error merging override \+([^=]+)=", text)) and "is not a subclass of" in text:
        parents = itertools.accumulate(added[1].split("."), lambda path, name: f"{path}.{name}")
        return next(filter(None, map(no_such_member, parents)), "") or f"{added[1]}: {useful[0]}"
    if found and ("not in" in text or "Key '" in text):
        missing = re.search(r"full_key: (\S+)", text)
        member = no_such_member(missing[1]) if missing else ""
        return member or not_there_yet(found[1]) or unknown_key(found[1], known_keys())
    return (f"{found[1]}: {useful[0]}" if found and useful else " ".join(useful or said)).removesuffix(
        " Config search path:"
    )


def _keys(cls: type, path: str = "") -> Iterator[tuple[str, object]]:
    hints = typing.get_type_hints(cls)
    for spec in dataclasses.fields(cls):
        hint, key = hints[spec.name], f"{path}{spec.name}"
        yield key, hint
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _keys(hint, f"{key}.")
