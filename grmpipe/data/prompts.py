"""Reads prompts from files, or generated problems. Puts right what has one meaning only, and says so; says what is
wrong with the rest.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grmpipe.config.keys.user_code import format_value
from grmpipe.data.catalogs import find_catalog, is_made
from grmpipe.data.rows import Findings, Row, parse_json, read_rows
from grmpipe.data.rubrics import parse_rubric, require_text
from grmpipe.models.types import Message
from grmpipe.types import Prompt

ROLES = ("system", "user", "assistant")
FIELDS = ("messages", "prompt", "reference", "rubric", "rubrics", "info", "prompt_id", "source")
VALUES = ("messages", "rubric", "rubrics", "reward_model", "extra_info")  # fields that are no texts
VERLS = ("data_source", "reward_model", "ground_truth", "extra_info")  # fields that verl's functions are given
WHOLE = ("reference", "ground_truth", "prompt_id", "source")  # whole numbers among them are never floats
EXACT = 2**53  # from here on a float has lost the last digits of a whole number


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Prompts for training and for evaluation. They have none in common."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]


def load_prompts(
    path: str, *, num_tiny_prompts: int = 4096, seed: int = 0, columns: Mapping[str, str] | None = None
) -> tuple[Prompt, ...]:
    """All prompts of a .jsonl, .jsonl.gz, .parquet or .csv file, or `num_tiny_prompts` of a problem set such as
    tiny://train.

    A row has `prompt`, a text or messages (a list of {role, content}, which `messages` may hold instead), and may have
    `reference` (a text or a number), `rubric` (criteria: see data/rubrics.py), `info` (an object for the
    environment), `prompt_id` and `source`; further columns are kept for reward functions. In verl's files the reference
    is `reward_model.ground_truth`, the source `data_source`. A whole number that a file has as a float, as pandas makes
    it in a column with gaps, is the integer, and an empty reference is none; one line of the log counts them.

    columns: field -> the column of the file that holds it; `a.b` is b within a.

    ValueError names file, line (Parquet: row), field and what was expected.
    """
    catalog = find_catalog(path)
    if catalog is not None:
        return catalog.make_prompts(path, num_tiny_prompts, seed)
    file = Path(path)
    findings = Findings(file)
    prompts = tuple(prompt for _, prompt in read_prompts(file, findings, columns))
    if not prompts:
        raise ValueError(
            f"{file}: holds no prompts; a line looks like " + '{"prompt": "What is 6 x 7?", "reference": 42}'
        )
    refuse_duplicates(file, prompts)
    note_doubled(prompts, findings)
    findings.report()
    return prompts


def find_place(path: str, prompt: Prompt) -> str:
    """The place of a prompt of `load_prompts(path)`, in words. Reads the file again."""
    file, unknown = Path(path), f"{path}, {prompt.prompt_id}"
    if is_made(path):
        return unknown
    try:
        known = (where for where, found in read_prompts(file, Findings(file)) if found.prompt_id == prompt.prompt_id)
        return next(known, unknown)
    except ValueError:  # its columns have other names: without an id of its own, a prompt's id ends with its row
        return unknown.replace(f", {file.name}:", ", row ")


def read_prompts(
    file: Path, findings: Findings, columns: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Prompt]]:
    """The prompts of a file, each with its place in words."""
    for number, where, row in read_rows(file, (*FIELDS, *VERLS), findings, columns=columns, values=VALUES):
        yield where, parse_prompt(row, where, f"{file.name}:{number}", findings)


def disjoint(train: Sequence[Prompt], held_out: Iterable[Prompt]) -> tuple[tuple[Prompt, ...], int]:
    """`train` without the prompts of `held_out` (the same messages, ignoring case and white space), and how many were
    removed.
    """
    known = {identify_prompt(prompt) for prompt in held_out}
    kept = tuple(prompt for prompt in train if identify_prompt(prompt) not in known)
    return kept, len(train) - len(kept)


def identify_prompt(prompt: Prompt) -> tuple[tuple[str, str], ...]:
    """The identity of a prompt: its roles and words."""
    return tuple((message.role, " ".join(message.content.casefold().split())) for message in prompt.messages)


def parse_prompt(row: Row, where: str, name: str, findings: Findings) -> Prompt:
    """The prompt of a row. name: its id, if the row gives none."""
    row = restore(row, WHOLE, where, findings)
    data_source = row.get("data_source")  # verl's name
    prompt = Prompt(
        prompt_id=parse_text(row, "prompt_id", where, name),
        messages=parse_messages(row, where),
        source=parse_text(row, "source", where, data_source if isinstance(data_source, str) else ""),
        reference=parse_reference(row, where),
        rubric=parse_rubric(row, where),
        info=parse_info(row, where, findings),
        columns={name: value for name, value in row.items() if name not in FIELDS},
        is_chat=not isinstance(row.get("prompt"), str),
    )
    refuse_half_characters(list_texts(prompt), where)
    return prompt


def list_texts(prompt: Prompt) -> Iterator[tuple[str, str]]:
    """The texts of a prompt, as (field, text)."""
    yield "prompt_id", prompt.prompt_id
    yield "source", prompt.source
    yield "reference", prompt.reference or ""
    yield from ((f"messages[{index}]", message.content) for index, message in enumerate(prompt.messages))
    for index, criterion in enumerate(prompt.rubric):
        yield f"rubric[{index}]", f"{criterion.whole_text}{criterion.name}"


def refuse_half_characters(texts: Iterable[tuple[str, str]], where: str) -> None:
    """Raise ValueError for half of a character, which JSON can spell (a text cut within an emoji); no tokenizer or file
    takes it.

    It isn't repaired: only the user knows what it should be.
    """
    for field, text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: {field}: half of a surrogate pair ({text[error.start]!r}) at character {error.start}: the "
                "text was cut within a character; remove the row, or write \\ufffd instead"
            ) from None


def parse_messages(row: Row, where: str) -> tuple[Message, ...]:
    if ("messages" in row) == ("prompt" in row):
        columns = ", ".join(row) or "none"
        raise ValueError(f"{where}: expected exactly one of the fields messages and prompt; its fields: {columns}")
    field = "messages" if "messages" in row else "prompt"
    messages = row[field]
    if isinstance(messages, str) and field == "prompt":
        return (Message(role="user", content=require_text(messages, f"{where}: prompt")),)
    if not isinstance(messages, list) or not messages:
        expected = "a list of {role, content}" if field == "messages" else "a text, or a list of {role, content}"
        raise ValueError(f"{where}: {field}: expected {expected}, got {format_value(messages)}")
    made = tuple(parse_message(message, f"{where}: {field}[{index}]") for index, message in enumerate(messages))
    if made[-1].role != "user":
        raise ValueError(f"{where}: {field}: the last one must have role user, got role {made[-1].role!r}")
    return made


def parse_message(message: object, where: str) -> Message:
    if not isinstance(message, dict) or not {"role", "content"} <= set(message):
        raise ValueError(f"{where}: expected an object with role and content, got {format_value(message)}")
    if message["role"] not in ROLES:
        raise ValueError(f"{where}.role: expected one of {', '.join(ROLES)}, got {format_value(message['role'])}")
    return Message(role=message["role"], content=require_text(message["content"], f"{where}.content"))


def find_ground_truth(columns: Mapping[str, object]) -> object:
    """What a row of verl's files calls the ground truth, of any type; None if it has none."""
    reward_model = columns.get("reward_model")
    return reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None


def restore(row: Row, fields: Collection[str], where: str, findings: Findings) -> Row:
    """The row without nulls, and with these fields and verl's ground truth as they were meant: integers that the file
    has as floats, as pandas makes them in a column with gaps; an empty reference is none.

    A null is a missing field: Parquet has the columns of all rows in each.
    """
    made = {field: value for field, value in row.items() if value is not None}
    for field in fields:
        if field in made:
            made[field] = restore_integers(made[field], field, where, findings)
    if isinstance(reward_model := made.get("reward_model"), dict) and "ground_truth" in reward_model:
        truth = restore_integers(reward_model["ground_truth"], "reward_model.ground_truth", where, findings)
        made["reward_model"] = {**reward_model, "ground_truth": truth}
    if is_blank(made.get("reference")):
        findings.add("references are empty, and count as none", where)
        del made["reference"]
    return made


def restore_integers(value: object, field: str, where: str, findings: Findings) -> object:
    """The value, or a list of them, with whole numbers as integers. Raises ValueError from 2^53 on, where a float may
    differ from what was saved.
    """
    if isinstance(value, list):
        return [restore_integers(one, field, where, findings) for one in value]
    if not isinstance(value, float) or not value.is_integer():
        return value
    if abs(value) >= EXACT:
        raise ValueError(
            f"{where}: {field}: {value!r} is a float, which has lost the last digits of so large a whole number; save "
            f"{field} as integers or text"
        )
    findings.add(f"values of {field} are whole numbers saved as floats (42.0), and are read as integers (42)", where)
    return int(value)


def is_blank(value: object) -> bool:
    return isinstance(value, str) and not value.strip()


def parse_reference(row: Row, where: str) -> str | None:
    truth = find_ground_truth(row)
    is_usable = (isinstance(truth, str) and not is_blank(truth)) or type(truth) in (int, float)
    reference = row.get("reference", truth if is_usable else None)
    if reference is None or isinstance(reference, str):
        return reference
    if isinstance(reference, bool) or not isinstance(reference, int | float) or reference - reference != 0:
        raise ValueError(f"{where}: reference: expected a text or a finite number, got {format_value(reference)}")
    return str(reference)


def parse_info(row: Row, where: str, findings: Findings) -> Mapping[str, object]:
    """A JSON object, or its text: Parquet gives the objects of a column all keys of any of them."""
    info = row.get("info", {})
    if isinstance(info, str):
        info = parse_json(info, f"{where}: info", findings)
    if not isinstance(info, dict):
        raise ValueError(
            f"{where}: info: expected a JSON object, which the environment reads, got {format_value(info)}"
        )
    return info


def parse_text(row: Row, field: str, where: str, default: str) -> str:
    value = row.get(field)
    if value is None:
        return default
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return require_text(value, f"{where}: {field}")


def refuse_duplicates(file: Path, prompts: Sequence[Prompt]) -> None:
    first_place: dict[str, int] = {}
    for place, prompt in enumerate(prompts, start=1):
        if prompt.prompt_id in first_place:
            raise ValueError(
                f"{file}: prompt_id {prompt.prompt_id!r} is used by prompts {first_place[prompt.prompt_id]} "
                f"and {place}; give each a different one, or leave the field out"
            )
        first_place[prompt.prompt_id] = place


def note_doubled(prompts: Sequence[Prompt], findings: Findings) -> None:
    """Count prompts that ask what an earlier one asks. They stay: a file may repeat rows to give them weight."""
    asked: dict[tuple[Message, ...], Prompt] = {}
    for prompt in prompts:
        first = asked.setdefault(prompt.messages, prompt)
        if first is not prompt and first.info == prompt.info:
            words = "and its reference" if first.reference == prompt.reference else "but another reference"
            findings.add(f"prompts have the messages of an earlier one {words}", prompt.prompt_id)
