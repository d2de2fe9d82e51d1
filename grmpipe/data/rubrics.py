"""The rubric of a row, as people and published sets write it: criteria with their weights, faults and conditions.

ours         ["It rhymes.", {"text": "It is short.", "weight": 3, "essential": true, "tags": ["form"]}]
HealthBench  rubrics: [{"criterion": .., "points": -5, "tags": [..]}]  (simple-evals, healthbench_eval.py)
RaR          rubric: [{"title": .., "description": .., "weight": 5}]  (arXiv 2507.17746)
Prometheus   rubric: {"criteria": .., "score1_description": .., "score2_description": ..}  (prometheus-eval)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from grmpipe.config.keys.user_code import format_value, to_number
from grmpipe.data.rows import Findings, Row, parse_json
from grmpipe.types import Criterion, Prompt

RUBRICS = ("rubric", "rubrics")  # fields of a row, of which it has one
TEXTS = ("text", "criterion", "description", "criteria")  # fields of a criterion, of which it has one
WEIGHTS = ("weight", "points")
LEVEL = "score{}_description"
MOST_LEVELS = 10
DEFAULT = "default"  # of a shared rubric: for the sources that aren't named


def parse_rubric(row: Row, where: str) -> tuple[Criterion, ...]:
    """The criteria of a row; none if it has none. Raises ValueError that begins with `where`."""
    given = [field for field in RUBRICS if row.get(field) is not None]
    if len(given) > 1:
        raise ValueError(f"{where}: {' and '.join(given)}: give one of them")
    if not given:
        return ()
    field, found = given[0], row[given[0]]
    if isinstance(found, Mapping):  # one criterion with levels
        found = [found]
    if not isinstance(found, list):
        raise ValueError(
            f"{where}: {field}: expected a list of texts or of {{text, weight}}, got {format_value(found)}"
        )
    rubric = tuple(parse_criterion(one, f"{where}: {field}[{index}]") for index, one in enumerate(found))
    if rubric and not any(criterion.weight > 0 for criterion in rubric):
        raise ValueError(
            f"{where}: {field}: no criterion has a weight above 0, so that no response could earn anything"
        )
    return rubric


def parse_criterion(found: object, where: str) -> Criterion:
    """A text, or an object. Parquet gives it the fields of all criteria, with null for those that it hasn't."""
    if not isinstance(found, Mapping):
        return Criterion(text=require_text(found, where))
    fields = {name: value for name, value in found.items() if value is not None}
    text, weight = pick(fields, TEXTS, where), pick(fields, WEIGHTS, where, default=1.0)
    number = None if isinstance(weight, bool) else to_number(weight)
    if number is None or number == 0 or not math.isfinite(number):
        raise ValueError(
            f"{where}.weight: expected a number above 0, or below 0 for a fault, got {format_value(weight)}"
        )
    essential, tags = fields.get("essential", False), fields.get("tags", [])
    if not isinstance(essential, bool):
        raise ValueError(f"{where}.essential: expected true or false, got {format_value(essential)}")
    if essential and number < 0:
        raise ValueError(
            f"{where}.essential: a fault (weight {number:g}) can't be essential; word it the other way round"
        )
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ValueError(f"{where}.tags: expected a list of texts, got {format_value(tags)}")
    levels = [
        f"{level}: {require_text(fields[name], f'{where}.{name}')}"
        for level in range(MOST_LEVELS + 1)
        if (name := LEVEL.format(level)) in fields
    ]
    return Criterion(
        text="\n".join([require_text(text, f"{where}.text"), *levels]),
        weight=number,
        essential=essential,
        tags=tuple(tags),
    )


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

    def join(self, prompt: Prompt) -> tuple[Criterion, ...]:
        """All criteria for a prompt; one that it has itself counts as it has it."""
        own = {criterion.text for criterion in prompt.rubric}
        shared = self.by_source.get(prompt.source, self.default)
        return (*prompt.rubric, *(criterion for criterion in shared if criterion.text not in own))


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
