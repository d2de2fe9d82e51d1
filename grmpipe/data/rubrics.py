"""The rubric of a row, as people and published sets write it: criteria with their weights, faults and conditions.

ours         ["It rhymes.", {"text": "It is short.", "name": "short", "weight": 3, "essential": true, "tags": ["form"]}]
HealthBench  rubrics: [{"criterion": .., "points": -5, "tags": [..]}]  (simple-evals, healthbench_eval.py of 9e2fafd)
RaR          rubric: [{"title": .., "description": .., "weight": 5}]  (arXiv 2507.17746, card of RaR-Science)
Prometheus   rubric: {"criteria": .., "score1_description": .., "score2_description": ..}  (prometheus-eval)
OpenRubrics  rubric: "1. The response .. [Hard Rule]\\n2. The response .. [Principle]"  (arXiv 2510.07743), as the
             rubric models of RubricRM write it too (the prompt in the card of RubricRM-4B-Rubric)
"""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from grmpipe.config.keys.user_code import format_value, to_number
from grmpipe.data.rows import Findings, Row, parse_json
from grmpipe.types import CRITERION_KINDS, Criterion, Prompt

RUBRICS = ("rubric", "rubrics")  # fields of a row, of which it has one
TEXTS = ("text", "criterion", "description", "criteria")  # fields of a criterion, of which it has one
WEIGHTS = ("weight", "points")
NAMES = ("name", "title")
LEVEL = "score{}_description"
MOST_LEVELS = 10
DEFAULT = "default"  # of a shared rubric: for the sources that aren't named
LISTED = re.compile(r"^[ \t]*\d+[.)][ \t]+", re.MULTILINE)  # where an item of a list begins
MARKED = re.compile(r"[ \t\n]*\[(Hard Rule|Principle)\][\s.*]*$", re.IGNORECASE)  # how an item of OpenRubrics ends
# Published sets have further fields, which say nothing to a judge: only what looks like one of these is refused.
KNOWN = frozenset(
    {*TEXTS, *WEIGHTS, "name", "title", "kind", "levels", "essential", "evidence", "tags", "from_step"}
    | {LEVEL.format(level) for level in range(MOST_LEVELS + 1)}
)
NEAR = 0.8
WORDS_OF_NAME = 6  # of a text, for a criterion without a name


def parse_rubric(row: Row, where: str) -> tuple[Criterion, ...]:
    """The criteria of a row; none if it has none. Raises ValueError that begins with `where`."""
    given = [field for field in RUBRICS if row.get(field) is not None]
    if len(given) > 1:
        raise ValueError(f"{where}: {' and '.join(given)}: give one of them")
    if not given:
        return ()
    field, found = given[0], row[given[0]]
    if isinstance(found, str):
        found = split_list(found) or found
    if isinstance(found, Mapping):  # one criterion with levels
        found = [found]
    if not isinstance(found, list):
        raise ValueError(
            f"{where}: {field}: expected a list of texts or of {{text, weight}}, or a text with a numbered list whose "
            f"items end with [Hard Rule] or [Principle], got {format_value(found)}"
        )
    rubric = tuple(parse_criterion(one, f"{where}: {field}[{index}]") for index, one in enumerate(found))
    if rubric and not any(criterion.weight > 0 for criterion in rubric):
        raise ValueError(
            f"{where}: {field}: no criterion has a weight above 0, so that no response could earn anything"
        )
    return tuple(check_name(rubric, index, found[index], f"{where}: {field}") for index in range(len(rubric)))


def check_name(rubric: Sequence[Criterion], index: int, found: object, where: str) -> Criterion:
    """The criterion, whose name no earlier one has. Titles of published sets repeat: a repeated one is no name."""
    criterion, before = rubric[index], [one.name for one in rubric[:index]]
    if not criterion.name or criterion.name not in before:
        return criterion
    if isinstance(found, Mapping) and found.get("name") is not None:
        raise ValueError(
            f"{where}[{index}].name: {criterion.name!r} is also the name of [{before.index(criterion.name)}]; give "
            "each criterion a name of its own, or none"
        )
    return replace(criterion, name="")


def split_list(text: str) -> list[dict[str, object]]:
    """The criteria of a text of OpenRubrics, tagged as rules or principles; none for any other text."""
    items = LISTED.split(text)[1:]
    marks = [MARKED.search(item) for item in items]
    found = [(item, mark) for item, mark in zip(items, marks, strict=True) if mark is not None]
    if len(found) < len(items):
        return []
    return [{"text": item[: mark.start()].strip(), "tags": [mark[1].lower()]} for item, mark in found]


def parse_criterion(found: object, where: str) -> Criterion:
    """A text, or an object. Parquet gives it the fields of all criteria, with null for those that it hasn't."""
    if not isinstance(found, Mapping):
        return Criterion(text=require_text(found, where))
    fields = {name: value for name, value in found.items() if value is not None}
    for name in fields.keys() - KNOWN:
        if near := difflib.get_close_matches(str(name), KNOWN, n=1, cutoff=NEAR):
            raise ValueError(f"{where}.{name}: unknown field; did you mean {near[0]}?")
    text, weight = pick(fields, TEXTS, where), pick(fields, WEIGHTS, where, default=1.0)
    number = None if isinstance(weight, bool) else to_number(weight)
    if number is None or number == 0 or not math.isfinite(number):
        raise ValueError(
            f"{where}.weight: expected a number above 0, or below 0 for a fault, got {format_value(weight)}"
        )
    essential, evidence, tags = fields.get("essential", False), fields.get("evidence", False), fields.get("tags", [])
    for name, value in {"essential": essential, "evidence": evidence}.items():
        if not isinstance(value, bool):
            raise ValueError(f"{where}.{name}: expected true or false, got {format_value(value)}")
    if essential and number < 0:
        raise ValueError(
            f"{where}.essential: a fault (weight {number:g}) can't be essential; word it the other way round"
        )
    from_step = fields.get("from_step", 0)
    begins = None if isinstance(from_step, bool) else to_number(from_step)
    if begins is None or not 0 <= begins < math.inf or begins % 1:
        raise ValueError(
            f"{where}.from_step: expected a step of training, 0 or more, got {format_value(from_step)}; leave it out "
            "for a criterion that holds from the start"
        )
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ValueError(f"{where}.tags: expected a list of texts, got {format_value(tags)}")
    kind, levels = fields.get("kind", "graded"), parse_levels(fields, where)
    if kind not in CRITERION_KINDS:
        raise ValueError(
            f"{where}.kind: expected {' or '.join(CRITERION_KINDS)}, got {format_value(kind)}; a count is graded, by "
            'levels such as {"0": "None.", "1": "One.", "2": "Two or more."}'
        )
    if kind == "yes_no" and levels:
        raise ValueError(f"{where}.kind: yes_no has no levels, and this has {len(levels)}; leave out one of them")
    return Criterion(
        text=require_text(text, f"{where}.text"),
        weight=number,
        essential=bool(essential),
        tags=tuple(tags),
        name=next((require_text(fields[one], f"{where}.{one}").strip() for one in NAMES if one in fields), ""),
        kind=kind,
        levels=levels,
        evidence=bool(evidence),
        from_step=int(begins),
    )


def encode_criterion(criterion: Criterion) -> str | dict[str, object]:
    """The criterion as `parse_criterion` reads it, with all that a judge sees: its text alone, if that is all."""
    if criterion.kind == "graded" and not criterion.levels and not criterion.evidence:
        return criterion.text
    known = {"kind": criterion.kind, "evidence": criterion.evidence}
    levels = {"levels": {str(score): meaning for score, meaning in criterion.levels}} if criterion.levels else {}
    return {"text": criterion.text, **known, **levels}


def parse_levels(fields: Mapping[str, object], where: str) -> tuple[tuple[int, str], ...]:
    """The levels of a criterion, ours or those of Prometheus; none: it has none."""
    own = fields.get("levels", {})
    if not isinstance(own, Mapping) or not all(isinstance(key, str) and key.isdecimal() for key in own):
        raise ValueError(
            f'{where}.levels: expected texts by score, as {{"1": "No.", "5": "Yes."}}, got {format_value(own)}'
        )
    given = {int(key): (f"levels.{key}", text) for key, text in own.items() if text is not None}
    for score in range(MOST_LEVELS + 1):
        if (name := LEVEL.format(score)) in fields:
            given[score] = (name, fields[name])
    if len(given) == 1:
        raise ValueError(f"{where}.levels: a single level tells nothing apart; give at least two, or none")
    return tuple((score, require_text(text, f"{where}.{name}")) for score, (name, text) in sorted(given.items()))


def name_criteria(rubric: Sequence[Criterion]) -> tuple[str, ...]:
    """A name for each criterion, all different: its own, or the first words of its text."""
    taken, names = {criterion.name for criterion in rubric}, list[str]()
    for criterion in rubric:
        words = " ".join(criterion.text.split()[:WORDS_OF_NAME]).strip(" .,:;*") or "criterion"
        name = criterion.name or next(
            one
            for number in range(1, len(rubric) + 2)
            if (one := words if number == 1 else f"{words} ({number})") not in taken
        )
        taken.add(name)
        names.append(name)
    return tuple(names)


def pick(fields: Mapping[str, object], names: tuple[str, ...], where: str, default: object = None) -> object:
    """The value of the one of these fields that there is."""
    given = [name for name in names if name in fields]
    if len(given) > 1:
        raise ValueError(f"{where}: has {' and '.join(given)}; give one of them")
    return fields[given[0]] if given else default


def require_text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: expected a text that isn't empty, got {format_value(value)}")
    return value


@dataclass(frozen=True, slots=True)
class SharedRubric:
    """Criteria for all prompts of a source, or of the sources that aren't named, after a prompt's own."""

    by_source: Mapping[str, tuple[Criterion, ...]] = field(default_factory=dict)
    default: tuple[Criterion, ...] = ()

    @property
    def rubrics(self) -> tuple[tuple[Criterion, ...], ...]:
        return (*self.by_source.values(), self.default)

    def join(self, prompt: Prompt) -> tuple[Criterion, ...]:
        """All criteria for a prompt; one that it has itself, by text or name, counts as it has it."""
        own = {known for criterion in prompt.rubric for known in (criterion.text, criterion.name) if known}
        shared = self.by_source.get(prompt.source, self.default)
        return (*prompt.rubric, *(one for one in shared if own.isdisjoint((one.text, one.name))))


def load_shared_rubric(path: str | None) -> SharedRubric:
    """A .json file: a list of criteria, or an object with such a list for each source, and `default` for the others.
    Raises ValueError that begins with `path`.
    """
    if path is None:
        return SharedRubric()
    file = Path(path)
    try:
        found = parse_json(file.read_bytes(), f"path: {file}", Findings(file))
    except OSError as error:
        raise ValueError(f"path: {file} can't be read: {error.strerror or error}") from None
    by_source = found if isinstance(found, dict) and "criteria" not in found else {DEFAULT: found}
    rubrics = {source: parse_rubric({"rubric": one}, f"path: {file}, {source}") for source, one in by_source.items()}
    if not any(rubrics.values()):
        raise ValueError(f'path: {file} has no criteria; it holds a list such as ["It is short."]')
    return SharedRubric(rubrics, rubrics.pop(DEFAULT, ()))
