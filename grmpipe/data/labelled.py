"""Reads labels from files: which response is better, or the score of one. Never guesses a label."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from grmpipe.data.catalogs import find_catalog
from grmpipe.data.labelled_schemas import EXAMPLES, FIELDS, LABELS, SCHEMAS, VALUES, LabelledRow, read_labels
from grmpipe.data.prompts import is_blank, list_texts, parse_text, refuse_half_characters, restore
from grmpipe.data.raters import combine_raters, describe_items, drop_undone, name_kind, split_ratings
from grmpipe.data.rows import Findings, Row, read_rows
from grmpipe.models.types import Message
from grmpipe.types import Labelled, RankedResponses

log = logging.getLogger(__name__)

WHOLE = ("reference", "item_id", "source", "subset", "best", "rater")  # whole numbers among them are never floats


def load_labelled(
    path: str,
    *,
    scale: tuple[int, int] = (1, 10),
    num_tiny: int = 512,
    seed: int = 0,
    columns: Mapping[str, str] | None = None,
    score_range: tuple[float, float] | None = None,
) -> tuple[Labelled, ...]:
    """All labelled items of a .jsonl, .jsonl.gz, .csv, .parquet or .json (one array) file; or `num_tiny` made ones.

    scale:       the ends of the judge's scale; a score outside is an error.
    path:        a file, or tiny://judgements (for training) or tiny://judgements_held_out: they share no problem. The
                 problems of tiny://judgements are those of tiny://train, those of tiny://judgements_on_others aren't.
    columns:     field -> the column of the file that holds it; `a.b` is b within a.
    score_range: the ends of the scale of the file's scores, which are stretched to the judge's; None: the judge's.

    A row's kind is recognised by its fields: docs/labels.md has the table of kinds.

    Checked on stored rows: RMB, JudgeBench, Plan-RewardBench. On dataset cards: RewardBench 1 and 2, HelpSteer 1 to 3,
    RM-Bench. Only on other projects' readers: PPE, HelpSteer2 preference. Rows without a label are left out, and so are
    items with equal texts of different grades, which no judge can tell apart; one line of the console counts them, and
    what is read. If the best comes first by convention (chosen, rejected), its place is chosen by the item's id, so
    that a judge with a bias for the first place gains nothing.

    Rows of several raters on the same texts become one item: the mean of their scores or grades, the majority of yes
    and no. Annotations (grmpipe's own annotations.jsonl) are such rows; what a later line undoes isn't read.

    ValueError names file, line (Parquet: row, an array: item), field and what was expected.
    """
    catalog = find_catalog(path)
    if catalog is not None:
        return catalog.make_labelled(path, num_tiny, seed)
    file = Path(path)
    findings = Findings(file)
    read = read_items(file, scale, findings, columns or {}, score_range)
    items = tuple(combine_raters(read, scale[1], findings))
    if not items:
        raise ValueError(f"{file}: holds no labelled items; {str(findings) or EXAMPLES}")
    refuse_duplicates(file, [item.item_id for item in items])
    note_doubled(items, findings)
    # A warning is what the console shows.
    log.warning("%s: read as %s", file, "; ".join(filter(None, (describe_items(items), str(findings)))))
    return items


def read_items(
    file: Path,
    scale: tuple[int, int],
    findings: Findings,
    columns: Mapping[str, str],
    score_range: tuple[float, float] | None,
) -> Iterator[tuple[str, Labelled]]:
    """The items of a file, each with its rater, who may have no name. Without those that say nothing."""
    rows = list(read_rows(file, FIELDS, findings, arrays=True, columns=columns, values=VALUES))
    for number, where, whole in drop_undone(rows, findings):
        for given in split_ratings(whole, where):
            row = restore(
                {**given, **dict.fromkeys(field for field in LABELS if is_blank(given.get(field)))},
                WHOLE,
                where,
                findings,
            )
            name = parse_text(row, "item_id", where, f"{file.name}:{number}")
            rater = parse_text(row, "rater", where, "")
            if reason := find_reason(given, row):
                findings.add(f"{reason}, and are left out", where)
                continue
            labelled = LabelledRow(fields=row, where=where, name=name, scale=scale, score_range=score_range)
            for item in read_labels(labelled, columns):
                refuse_half_characters(texts_of_item(item), where)
                if isinstance(item, RankedResponses) and has_twin(item):
                    findings.add("items are left out whose best text equals another one", where)
                else:
                    yield rater, item


def find_reason(given: Row, row: Row) -> str:
    """Why a row says nothing that can be read; empty if it does. row: without what is null or an empty label."""
    if "criterion" in row:
        return "rows label one criterion, which isn't what a verdict on a whole response is about"
    known = row.keys()
    if "note" in row and "rater" in row and not known & LABELS:
        return "rows are notes without a label"
    if any(fields <= known for _, fields, _ in SCHEMAS):
        return ""
    empty = next((fields - known for _, fields, _ in SCHEMAS if fields <= given.keys() and known & fields), None)
    return "" if empty is None else f"rows have no {' and no '.join(sorted(empty))}"


def has_twin(item: RankedResponses) -> bool:
    """Whether a text is there twice with different grades, but for white space around it."""
    graded = {(text.strip(), grade) for text, grade in zip(item.responses, item.grades, strict=True)}
    return len(graded) > len({text for text, _ in graded})


def texts_of_item(item: Labelled) -> Iterator[tuple[str, str]]:
    """The texts of an item, as (field, text)."""
    yield from list_texts(item.prompt)
    yield from (("item_id", item.item_id), ("subset", item.subset))
    yield from ((f"response {index}", response) for index, response in enumerate(item.responses))


def refuse_duplicates(file: Path, item_ids: Iterable[str]) -> None:
    seen: set[str] = set()
    for item_id in item_ids:
        if item_id in seen:
            raise ValueError(f"{file}: item_id {item_id!r} occurs twice; give each item a different one, or none")
        seen.add(item_id)


def note_doubled(items: Sequence[Labelled], findings: Findings) -> None:
    """Count items on the texts of an earlier one. They stay: people who label a text twice may differ."""
    labels: dict[tuple[tuple[Message, ...], str, frozenset[str]], object] = {}
    for item in items:
        label = order_texts(item) if isinstance(item, RankedResponses) else item.score
        key = item.prompt.messages, name_kind(item), frozenset(item.responses)
        if key in labels:
            words = "and its label" if labels[key] == label else "but another label"
            findings.add(f"items have the texts of an earlier one {words}", item.item_id)
        labels.setdefault(key, label)


def order_texts(item: RankedResponses) -> dict[str, int]:
    """Text -> its place among the grades, from the lowest: the order is all that a ranking says."""
    places = {grade: place for place, grade in enumerate(sorted(set(item.grades)))}
    return {text: places[grade] for text, grade in zip(item.responses, item.grades, strict=True)}
