"""Reads labelled judgement data from files: which response is best, or the score of one. Never guesses a label."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from grmpipe.data.catalogs import find_catalog
from grmpipe.data.labelled_schemas import EXAMPLES, FIELDS, LabelledRow, read_labels
from grmpipe.data.prompts import list_texts, refuse_half_characters, restore
from grmpipe.data.rows import Findings, read_rows
from grmpipe.models.types import Message
from grmpipe.types import Labelled, RankedResponses

WHOLE = ("reference", "item_id", "source", "subset", "best")  # whole numbers among them are never floats


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
    without a winner are left out, and so are items whose best text equals another one, which no judge can find; one
    line of the log counts them. If the best comes first by convention (chosen, rejected), its place is chosen by the
    item's id, so that a judge with a bias for the first place gains nothing.

    ValueError names file, line (Parquet: row, an array: item), field and what was expected.
    """
    catalog = find_catalog(path)
    if catalog is not None:
        return catalog.make_labelled(path, num_tiny, seed)
    file = Path(path)
    findings = Findings(file)
    items = list(read_items(file, scale, findings))
    if not items:
        raise ValueError(f"{file}: holds no labelled items; {str(findings) or EXAMPLES}")
    refuse_duplicates(file, items)
    note_doubled(items, findings)
    findings.report()
    return tuple(items)


def read_items(file: Path, scale: tuple[int, int], findings: Findings) -> Iterator[Labelled]:
    """The items of a file, without those that have no winner."""
    for number, where, row in read_rows(file, FIELDS, findings, arrays=True):
        row = restore(row, WHOLE, where, findings)
        found = read_labels(LabelledRow(fields=row, where=where, name=f"{file.name}:{number}", scale=scale))
        if not found:
            findings.add("rows have no winner and are left out", where)
        for item in found:
            refuse_half_characters(texts_of_item(item), where)
            if isinstance(item, RankedResponses) and has_twin(item):
                findings.add("items are left out whose best text equals another one", where)
            else:
                yield item


def has_twin(item: RankedResponses) -> bool:
    """Whether a text is there twice with different grades, but for white space around it."""
    graded = {(text.strip(), grade) for text, grade in zip(item.responses, item.grades, strict=True)}
    return len(graded) > len({text for text, _ in graded})


def texts_of_item(item: Labelled) -> Iterator[tuple[str, str]]:
    """The texts of an item, as (field, text)."""
    yield from list_texts(item.prompt)
    yield from (("item_id", item.item_id), ("subset", item.subset))
    yield from ((f"response {index}", response) for index, response in enumerate(item.responses))


def refuse_duplicates(file: Path, items: Sequence[Labelled]) -> None:
    seen: set[str] = set()
    for item in items:
        if item.item_id in seen:
            raise ValueError(f"{file}: item_id {item.item_id!r} occurs twice; give each item a different one, or none")
        seen.add(item.item_id)


def note_doubled(items: Sequence[Labelled], findings: Findings) -> None:
    """Count items on the texts of an earlier one. They stay: people who label a text twice may differ."""
    labels: dict[tuple[tuple[Message, ...], frozenset[str]], object] = {}
    for item in items:
        label = order_texts(item) if isinstance(item, RankedResponses) else item.score
        key = item.prompt.messages, frozenset(item.responses)
        if key in labels:
            words = "and its label" if labels[key] == label else "but another label"
            findings.add(f"items have the texts of an earlier one {words}", item.item_id)
        labels.setdefault(key, label)


def order_texts(item: RankedResponses) -> dict[str, int]:
    """Text -> its place among the grades, from the lowest: the order is all that a ranking says."""
    places = {grade: place for place, grade in enumerate(sorted(set(item.grades)))}
    return {text: places[grade] for text, grade in zip(item.responses, item.grades, strict=True)}
