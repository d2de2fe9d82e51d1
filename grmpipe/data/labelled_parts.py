"""Reads labels of the parts of a response from files: of its steps, or of single criteria. Never guesses a label."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from grmpipe.data.labelled import WHOLE, refuse_duplicates
from grmpipe.data.labelled_schemas import NO, YES, LabelledRow, is_number
from grmpipe.data.prompts import list_texts, parse_text, refuse_half_characters, restore
from grmpipe.data.raters import drop_undone
from grmpipe.data.rows import Findings, read_rows
from grmpipe.data.rubrics import parse_criterion
from grmpipe.types import Criterion, Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledParts:
    """A response to a prompt, and the true rewards of its steps, or of criteria.

    texts:     of the steps, or of the whole response alone.
    criteria:  what the shares are about; empty: they are about the steps.
    shares:    from 0 (wrong, not met) to 1 (right, met); None: not known.
    is_yes_no: whether only right or wrong, met or not met is known.
    """

    item_id: str
    prompt: Prompt
    texts: tuple[str, ...]
    shares: tuple[float | None, ...]
    criteria: tuple[Criterion, ...] = ()
    subset: str = ""
    is_yes_no: bool = True


Read = Callable[[LabelledRow], LabelledParts]
STEPS, CRITERIA = "steps", "criteria"  # as protocols name what they score
MIDDLE = 0.5  # of raters who say met or not met, half each


def load_labelled_parts(
    path: str,
    *,
    about: str,
    scale: tuple[int, int] = (1, 10),
    columns: Mapping[str, str] | None = None,
    score_range: tuple[float, float] | None = None,
) -> tuple[LabelledParts, ...]:
    """All labels of the steps, or of the criteria, of responses in a file of the kinds that files of labels may be.

    about:       STEPS or CRITERIA: rows about anything else are left out, and counted.
    scale:       the ends of the judge's scale; a score outside is an error.
    columns:     field -> the column of the file that holds it; `a.b` is b within a.
    score_range: the ends of the scale of the file's scores; None: the judge's.

    docs/labels.md has the table of kinds. Labels of criteria on the same response are one item; of several raters the
    mean counts, of one rater the last label. ValueError names file, line, field and what was expected.
    """
    file = Path(path)
    wanted = {name: (fields, read) for name, of, fields, read in SCHEMAS if of == about}
    example = EXAMPLES[about]
    if "://" in path:
        raise ValueError(f"{path} labels whole responses, and this judge scores {about}; give a file: {example}")
    findings, items, left_out = Findings(file), list[tuple[str, LabelledParts]](), 0
    rows = list(read_rows(file, FIELDS, findings, arrays=True, columns=columns, values=VALUES))
    for number, where, row in drop_undone(rows, findings):
        given = restore({field: value for field, value in row.items() if value is not None}, WHOLE, where, findings)
        read = next((read for fields, read in wanted.values() if fields <= given.keys()), None)
        if read is None:
            left_out += 1
            continue
        name = parse_text(given, "item_id", where, f"{file.name}:{number}")
        labelled = LabelledRow(fields=given, where=where, name=name, scale=scale, score_range=score_range)
        item = read(labelled)
        refuse_half_characters([*list_texts(item.prompt), *(("text", text) for text in item.texts)], where)
        items.append((parse_text(given, "rater", where, ""), item))
    joined = tuple(join_criteria(items, findings) if about == CRITERIA else (item for _, item in items))
    known = tuple(item for item in joined if any(share is not None for share in item.shares))
    if not known:
        kinds = "; ".join(f"{name}: {', '.join(sorted(fields))}" for name, (fields, _) in wanted.items())
        raise ValueError(
            f"{file}: holds no labels of {about}, which this judge learns from; give rows such as {example} (kinds: "
            f"{kinds}), or type judge=generative for labels of whole responses"
        )
    refuse_duplicates(file, [item.item_id for item in known])
    others = f"{left_out} rows without such labels are left out" if left_out else ""
    count = sum(share is not None for item in known for share in item.shares)
    words = (f"{count} labels of {about} on {len(known)} responses", others, str(findings))
    log.warning("%s: read as %s", file, "; ".join(filter(None, words)))  # a warning is what the console shows
    return known


def join_criteria(items: Sequence[tuple[str, LabelledParts]], findings: Findings) -> Iterator[LabelledParts]:
    """One item for all labels of the same response: a share for each criterion, the mean of its raters. As many yes as
    no say nothing.
    """
    on_response: dict[tuple[object, ...], tuple[LabelledParts, dict[Criterion, dict[str, float]]]] = {}
    for number, (rater, item) in enumerate(items):
        for criterion, share in zip(item.criteria, item.shares, strict=True):
            about = (item.prompt.messages, item.texts, item.is_yes_no)
            by_rater = on_response.setdefault(about, (item, {}))[1].setdefault(criterion, {})
            if share is not None:
                by_rater[rater or f"row {number}"] = share
    for item, by_criterion in on_response.values():
        shares = {criterion: fmean(given.values()) for criterion, given in by_criterion.items() if given}
        if undecided := [one for one, share in shares.items() if item.is_yes_no and share == MIDDLE]:
            findings.add("criteria have as many yes as no, and are left out", item.item_id)
        decided = {one: share for one, share in shares.items() if one not in undecided}
        yield replace(item, criteria=tuple(decided), shares=tuple(decided.values()))


# -- the kinds of rows -----------------------------------------------------------------------------------------------


def read_criterion(row: LabelledRow) -> LabelledParts:
    """One criterion, a text or an object as in rubrics, and whether the response meets it."""
    if (word := row.read_word("right")) not in (*YES, *NO):
        raise row.wrong("right", "true or false, 1 or 0, yes or no", row.fields["right"])
    return LabelledParts(
        item_id=row.name,
        prompt=row.own_prompt(),
        texts=(row.text("response"),),
        shares=(float(word in YES),),
        criteria=(parse_criterion(row.fields["criterion"], f"{row.where}: criterion"),),
        subset=row.subset(),
    )


def read_step_labels(steps: str) -> Read:
    """A reader of steps that are right or wrong. steps: the field of their texts."""

    def read(row: LabelledRow) -> LabelledParts:
        texts = require_steps(row, steps)
        return make_steps(row, texts, [read_yes_no(row, one) for one in require_labels(row, "labels", texts)])

    return read


def read_yes_no(row: LabelledRow, value: object) -> float | None:
    word = str(value).strip().casefold()
    if value is not None and word not in (*YES, *NO):
        raise row.wrong("labels", "true, false or null for each step", value)
    return None if value is None else float(word in YES)


def read_step_scores(row: LabelledRow) -> LabelledParts:
    """A number for each step, on the judge's scale or the file's own."""
    low, high = row.score_range or row.scale
    texts, shares = require_steps(row, "steps"), list[float | None]()
    for value in require_labels(row, "scores", texts):
        if value is not None and not (is_number(value) and isinstance(value, int | float) and low <= value <= high):
            raise row.wrong(
                "scores",
                f"a number from {low:g} to {high:g} or null for each step (a scale of your own is "
                "data.labels.score_range=[lowest, highest])",
                value,
            )
        shares.append((value - low) / (high - low) if isinstance(value, int | float) else None)
    return make_steps(row, texts, shares, is_yes_no=False)


def read_first_error(row: LabelledRow) -> LabelledParts:
    """ProcessBench (arXiv 2412.06559): the index of the first wrong step, -1 if all are right. What comes after it has
    no label.
    """
    texts, first = require_steps(row, "steps"), row.fields["label"]
    if not isinstance(first, int) or isinstance(first, bool) or not -1 <= first < len(texts):
        raise row.wrong("label", f"the index of the first wrong step (0 to {len(texts) - 1}), or -1", first)
    if first < 0:
        return make_steps(row, texts, [1.0] * len(texts))
    return make_steps(row, texts, [*[1.0] * first, 0.0, *[None] * (len(texts) - first - 1)])


def require_steps(row: LabelledRow, field: str) -> tuple[str, ...]:
    texts = row.texts(field)
    if not isinstance(row.fields[field], list):
        raise row.wrong(field, "a list of texts, one per step", row.fields[field])
    return texts


def require_labels(row: LabelledRow, field: str, texts: Sequence[str]) -> list[object]:
    value = row.fields[field]
    if not isinstance(value, list) or len(value) != len(texts):
        raise row.wrong(field, f"{len(texts)} labels, one per step", value)
    return value


def make_steps(
    row: LabelledRow, texts: tuple[str, ...], shares: Sequence[float | None], *, is_yes_no: bool = True
) -> LabelledParts:
    prompt = row.prompt("problem") if "problem" in row.fields else row.own_prompt()
    return LabelledParts(
        item_id=row.name, prompt=prompt, texts=texts, shares=tuple(shares), subset=row.subset(), is_yes_no=is_yes_no
    )


SCHEMAS: tuple[tuple[str, str, frozenset[str], Read], ...] = (
    ("criteria", CRITERIA, frozenset({"response", "criterion", "right"}), read_criterion),
    ("step labels", STEPS, frozenset({"steps", "labels"}), read_step_labels("steps")),
    ("step scores", STEPS, frozenset({"steps", "scores"}), read_step_scores),
    ("TRL stepwise supervision", STEPS, frozenset({"completions", "labels"}), read_step_labels("completions")),
    ("ProcessBench", STEPS, frozenset({"steps", "label"}), read_first_error),
)
FIELDS = frozenset().union(
    *(fields for _, _, fields, _ in SCHEMAS),
    {"prompt", "messages", "problem", "reference", "item_id", "subset", "source", "rater"},
)
VALUES = frozenset({"messages", "steps", "completions", "labels", "scores", "label", "right"})  # no texts in a CSV file
EXAMPLES = {
    STEPS: '{"prompt": "2 x 3 + 1?", "steps": ["2 x 3 = 6", "6 + 1 = 8"], "labels": [true, false]}',
    CRITERIA: '{"prompt": "2 x 3?", "response": "It is 6.", "criterion": "Names the product.", "right": true}',
}
