"""Writes docs/configuration.md from the dataclasses of the configuration. Starts nothing and imports no torch.

    python -m grmpipe.config.io.reference

The sentence of a key is the comment at the end of its line or, if that is too long, the comment right above it. A
comment with an empty line below is a heading. That of a section stands before its class's docstring.
"""

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from grmpipe.config.io.key_errors import ELSEWHERE, find_member_class, read_comments
from grmpipe.config.keys.entry_names import FIRST
from grmpipe.config.run_sections import RunSections

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "configuration.md"
CONF = ROOT / "conf"
SENTENCE = re.compile(r"(?:\[(?P<unit>[^\]]+)\] )?(?P<meaning>[A-Z].*\.)")
NO_CHOICE = "?"  # a value that no key with fixed choices accepts
# End of a name -> the unit of its value; a [unit] in the comment takes precedence.
UNITS = {
    "_gb_per_s": "GB/s", "_mb_per_s": "MB/s", "_tokens_per_s": "tokens/s", "_s": "s", "_gb": "GB", "_mb": "MiB",
    "_tokens": "tokens", "_steps": "steps", "_share": "share",
}  # fmt: skip
TYPES: Mapping[object, str] = {
    bool: "true or false", int: "whole number", float: "number", str: "text", typing.Any: "value", type(None): "null",
}  # fmt: skip
MOST_DEFAULT_CHARS = 40  # a longer default is left to the source
HEAD = """\
<!-- Written by `python -m grmpipe.config.io.reference` from the comments of the dataclasses. Don't edit it here. -->

# Configuration

All {count} keys, typed as `key=value`:

```bash
python launch.py +experiment=quickstart judge=pointwise train.lr=1e-4
```

Later values win: the defaults below, the files that `conf/config.yaml` chooses by group (`judge=pointwise` is
`conf/judge/pointwise.yaml`), the experiment, single keys. `<name>` stands for a name of your own; in `placement.roles`
for a role. A name that isn't there yet is added with its section: `'+placement.pools={{more: {{slots: 2}}}}'`. A share
is a number from 0 to 1.

The defaults train the tiny models. A policy of your own (`policy=path`) or of `conf/policy/` that isn't tiny brings
`conf/pretrained.yaml`: lower learning rates and longer answers, which recipes and single keys override.

What [other frameworks](#names-in-other-frameworks) call some of them stands at the end.

{contents}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """A key as a user types it, and its entry on the page."""

    key: str
    type: str
    default: str
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySection:
    """The keys of one dataclass. name: dotted; empty for the keys of the run itself."""

    name: str
    about: str
    entries: tuple[KeyEntry, ...]


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    sections = list(list_sections(RunSections))
    top = [section.name for section in sections if section.name and "." not in section.name]
    contents = " · ".join(["[run](#run)", *(f"[{name}](#{name})" for name in top)])
    head = HEAD.format(count=sum(len(section.entries) for section in sections), contents=contents)
    return "\n".join([head, *map(section_text, without_repeats(sections)), elsewhere_text()])


def elsewhere_text() -> str:
    """What other frameworks call some keys, as a list: rows of a table are keys."""
    lines = [
        f"- {', '.join(f'`{name}`' for name, ours in ELSEWHERE.items() if ours == key)}: `{key}`"
        for key in dict.fromkeys(ELSEWHERE.values())
    ]
    known = "In verl, TRL, slime, AReaL and prime-rl, with sections only where those tell them apart"
    head = f"## Names in other frameworks\n\n{known}:\n"
    return "\n".join([head, *lines, ""])


def without_repeats(sections: Iterable[KeySection]) -> Iterator[KeySection]:
    """The sections; one whose rows stand in an earlier section, under its name, names that one instead."""
    seen: dict[tuple[KeyEntry, ...], str] = {}
    for section in sections:
        rows = tuple(replace(entry, key=entry.key.removeprefix(section.name)) for entry in section.entries)
        first = seen.setdefault(rows, section.name)
        if not rows or first == section.name:
            yield section
        else:
            same = f"{section.about} The keys are those of [{first}](#{first.replace('.', '')})."
            yield replace(section, about=same, entries=())


# -- from dataclasses to entries --------------------------------------------------------------------------------------


def list_sections(
    cls: type, name: str = "", values: Mapping[str, object] | None = None, comment: str = ""
) -> Iterator[KeySection]:
    """The sections of a dataclass: its own keys, then those nested in it, in the order of their fields.

    values: defaults given by its owner; None: its own. comment: its owner's, if it has one. Raises ValueError for a key
    without a sentence.
    """
    values = read_defaults(cls) if values is None else values
    prefix, hints, comments = f"{name}." if name else "", typing.get_type_hints(cls), read_comments(cls)
    nested: list[tuple[type, str, Mapping[str, object] | None, str]] = []
    alike: list[KeySection] = []
    entries: list[KeyEntry] = []
    for spec in dataclasses.fields(cls):
        key, value = f"{prefix}{spec.name}", values.get(spec.name)
        if (member := find_member_class(hints[spec.name])) is not None and hints.get(
            first := FIRST.get(spec.name, "")
        ) is member:
            meaning = f"{comments.get(spec.name, '')} The keys are those of [{prefix}{first}](#{first})."
            alike.append(KeySection(name=f"{key}.<name>", about=meaning, entries=()))
        elif member is not None:
            nested.append((member, f"{key}.<name>", None, ""))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            nested.append((type(value), key, vars(value), comments.get(spec.name, "")))
        else:
            entries.append(make_entry(cls, spec.name, key, hints[spec.name], values, comments.get(spec.name, "")))
    yield KeySection(name=name, about=f"{comment}\n\n{about(cls)}".strip(), entries=tuple(entries))
    yield from alike
    for inner in nested:
        yield from list_sections(*inner)


def make_entry(cls: type, name: str, key: str, hint: object, values: Mapping[str, object], comment: str) -> KeyEntry:
    sentence = SENTENCE.fullmatch(comment)
    if sentence is None:
        raise ValueError(
            f"{cls.__name__}.{name}: has no sentence; write one behind it or right above it, as "
            f"`# [unit] Starts with a capital and ends with a full stop.`, got {comment!r}"
        )
    return KeyEntry(
        key=key,
        type=type_words(hint, list_choices(cls, name, hint)),
        default=format_default(values[name]) if name in values else "required",
        unit=sentence["unit"] or find_unit(name),
        meaning=sentence["meaning"],
    )


def read_defaults(cls: type) -> dict[str, object]:
    """Field -> default, without fields that have none."""
    found: dict[str, object] = {}
    for spec in dataclasses.fields(cls):
        if spec.default_factory is not dataclasses.MISSING:
            found[spec.name] = spec.default_factory()
        elif spec.default is not dataclasses.MISSING:
            found[spec.name] = spec.default
    return found


def list_choices(cls: type, name: str, hint: object) -> tuple[str, ...]:
    """The values that the dataclass's own check lists as known. Empty if it accepts any."""
    if str not in (hint, *typing.get_args(hint)) or typing.get_origin(hint) is dict:
        return ()
    try:
        cls(**{name: [NO_CHOICE] if typing.get_origin(hint) is list else NO_CHOICE})
    except ValueError as error:
        known = re.match(rf"{name}: unknown .*; known: (\w+(?:, \w+)*)", str(error))
        return tuple(known[1].split(", ")) if known else ()
    return ()


# -- from entries to text ----------------------------------------------------------------------------------------------


def about(cls: type) -> str:
    """The docstring, one line per paragraph."""
    return "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(cls) or "").split("\n\n"))


def find_unit(name: str) -> str:
    return next((unit for ending, unit in UNITS.items() if name.endswith(ending)), "")


def type_words(hint: object, choices: tuple[str, ...] = ()) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(type_words(one, choices) for one in typing.get_args(hint) if not_listed(one, choices))
    if typing.get_origin(hint) is list:
        return f"list of {type_words(typing.get_args(hint)[0], choices)}" + ("" if choices else "s")
    if typing.get_origin(hint) is dict:
        return f"mapping of names to {type_words(typing.get_args(hint)[1])}s"
    if hint is str and choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    return TYPES[hint]


def not_listed(hint: object, choices: tuple[str, ...]) -> bool:
    return hint is not type(None) or "null" not in choices


def format_default(value: object) -> str:
    """A default as a user types it."""
    text = value if isinstance(value, str) and value.isprintable() and value else json.dumps(value)
    if len(text) <= MOST_DEFAULT_CHARS or not isinstance(value, list):
        return f"`{text}`"
    return f"{len(value)} entries"


def section_text(section: KeySection) -> str:
    depth = "##" if "." not in section.name else "###"
    title = section.name if "<" not in section.name else f"`{section.name}`"
    lines = [f"{depth} {title or 'run'}", "", *filter(None, [escape_markdown(section.about), group_text(section.name)])]
    if section.entries:
        lines += ["", "| key | type | default | unit | meaning |", "|---|---|---|---|---|"]
    lines += [
        f"| `{entry.key}` | {entry.type} | {escape_markdown(entry.default)} | {entry.unit} | "
        f"{escape_markdown(entry.meaning)} |"
        for entry in section.entries
    ]
    return "\n".join([*lines, ""])


def group_text(name: str) -> str:
    """Which files of conf/ set a section. Empty if there is no group of that name."""
    files = sorted(path.stem for path in (CONF / name).glob("*.yaml")) if name else []
    if not files:
        return ""
    chosen = next(entry[name] for entry in config_defaults() if isinstance(entry, dict) and name in entry)
    return f"\nFiles in `conf/{name}/`: {', '.join(files)}; `{name}={chosen}` unless another is chosen."


def config_defaults() -> list[object]:
    """The file of each group that conf/config.yaml chooses."""
    found: list[object] = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    return found


def escape_markdown(text: str) -> str:
    """Text escaped for Markdown: a bar ends a table cell, and <name> outside code is read as HTML."""
    return "".join(
        part.replace("|", "\\|") if part.startswith("`") else part.replace("|", "\\|").replace("<", "&lt;")
        for part in re.split(r"(`[^`]*`)", text)
    )


if __name__ == "__main__":
    main()
