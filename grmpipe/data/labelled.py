"""Reads labelled judgement data from files: which response is best, or the score of one. Never guesses a label."""

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from grmpipe.data.catalogs import find_catalog
from grmpipe.data.labelled_schemas import EXAMPLES, LabelledRow, read_labels
from grmpipe.data.prompts import Row, format_value, list_texts, read_rows, refuse_half_characters
from grmpipe.types import Labelled

log = logging.getLogger(__name__)


def load_labelled(
    path: str, *, scale: tuple[int, int] = (1, 10), num_tiny: int = 512, seed: int = 0
) -> tuple[Labelled, ...]:
    """All labelled items of a .jsonl, .json (one array) or .parquet file, or `num_tiny` generated ones.

    scale: the ends of the judge's scale; a score outside is an error.
    path:  a file, or tiny://judgements (for training) or tiny://judgements_held_out: they share no problem.

    A row's schema is recognised by its fields:

    | schema | fields read |
    |---|---|
    | grmpipe ranked | prompt or messages, responses (a list), best (index); reference, item_id, subset, source |
    | grmpipe scored | prompt or messages, response, score; reference, item_id, subset, source |
    | RewardBench, RewardBench 2 | prompt, chosen, rejected (a text, or a list of texts), subset |
    | RM-Bench | prompt, chosen and rejected (three texts each), domain; nine pairs, subset domain/difficulty |
    | preference between chats | chosen, rejected (lists of role, content); prompt, subset |
    | PPE correctness (best of k) | prompt, response_1 ..., scores, sampled_conflict_pairs |
    | PPE human preference | prompt, response_1, response_2, winner |
    | RMB pairs | conversation_input, chosen.answer, reject.answer, category_path |
    | RMB best of n | conversation_input, bon_best.answer, loser_list[].answer, category_path |
    | JudgeBench | question, response_A, response_B, label (A>B, B>A), source |
    | HelpSteer3 preference | context, response1, response2, overall_preference (below 0: the first), domain |
    | HelpSteer2 preference | prompt, response_1, response_2, preference_strength (below 0: the first) |
    | HelpSteer, HelpSteer2 | prompt, response, helpfulness (0..4, stretched to the scale and rounded) |

    Checked on stored rows: RMB. On dataset cards: RewardBench 1 and 2, HelpSteer 1 to 3, RM-Bench. Only on other
    projects' readers: PPE, JudgeBench, HelpSteer2 preference. A row of RewardBench 2 with several right answers (Ties)
    becomes one item per right answer against all wrong ones, which isn't the benchmark's own measure of ties. Rows
    without a winner are left out, and counted in the log. If the best comes first by convention (chosen, rejected), its
    place is chosen by the item's id, so that a judge with a bias for the first place gains nothing.

    ValueError names file, line (Parquet: row, an array: item), field and what was expected.
    """
    catalog = find_catalog(path)
    if catalog is not None:
        return catalog.make_labelled(path, num_tiny, seed)
    file = Path(path)
    items = read_items(file, scale)
    if not items:
        raise ValueError(f"{file}: holds no labelled items; {EXAMPLES}")
    refuse_duplicates(file, items)
    return tuple(items)


def read_items(file: Path, scale: tuple[int, int]) -> list[Labelled]:
    """The items of a file. Rows without a winner are counted in the log."""
    items: list[Labelled] = []
    num_undecided = 0
    for number, where, row in read_labelled_rows(file):
        row = {field: value for field, value in row.items() if value is not None}
        found = read_labels(LabelledRow(fields=row, where=where, name=f"{file.name}:{number}", scale=scale))
        for item in found:
            refuse_half_characters(texts_of_item(item), where)
        items += found
        num_undecided += not found
    if num_undecided:
        log.warning("%s: %d rows have no winner and are left out; %d items remain", file, num_undecided, len(items))
    return items


def texts_of_item(item: Labelled) -> Iterator[tuple[str, str]]:
    """The texts of an item, as (field, text)."""
    yield from list_texts(item.prompt)
    yield from (("item_id", item.item_id), ("subset", item.subset))
    yield from ((f"response {index}", response) for index, response in enumerate(item.responses))


def read_labelled_rows(file: Path) -> Iterator[tuple[int, str, Row]]:
    """Like the rows of prompts, and also rows of a .json file that is one array, as in RMB."""
    if file.suffix != ".json":
        yield from read_rows(file)
        return
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{file}: can't be read as JSON ({error})") from error
    if not isinstance(rows, list):
        raise ValueError(f"{file}: expected an array of objects, got {format_value(rows)}; JSON Lines are named .jsonl")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{file}, item {number}: expected an object, got {format_value(row)}")
        yield number, f"{file}, item {number}", row


def refuse_duplicates(file: Path, items: Sequence[Labelled]) -> None:
    seen: set[str] = set()
    for item in items:
        if item.item_id in seen:
            raise ValueError(f"{file}: item_id {item.item_id!r} occurs twice; give each item a different one, or none")
        seen.add(item.item_id)
