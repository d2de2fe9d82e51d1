"""Prompts are read unchanged from files; a malformed row is named with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grmpipe.data.prompts import disjoint, find_place, load_prompts
from grmpipe.models.types import Message
from grmpipe.types import Prompt

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 x 2?"}]


def write_jsonl(folder: Path, *rows: Any) -> str:
    path = folder / "some.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "some.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def user(text: str) -> tuple[Message, ...]:
    return (Message(role="user", content=text),)


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_rows_become_prompts(tmp_path: Path, write: Any) -> None:
    path = write(
        tmp_path,
        {"prompt": "6 x 2?", "messages": None, "reference": "12", "prompt_id": "a", "source": "drill", "extra": 1},
        {"prompt": None, "messages": CHAT, "reference": None},
    )
    first, second = load_prompts(path)
    asked = Prompt(prompt_id="a", messages=user("6 x 2?"), source="drill", reference="12", columns={"extra": 1})
    assert first == asked
    assert second.messages == (Message(role="system", content="Be brief."), *user("6 x 2?"))
    assert second.reference is None
    assert second.prompt_id == f"{Path(path).name}:2"


def test_messages_may_stand_in_prompt_as_in_files_of_trl_and_verl(tmp_path: Path) -> None:
    text, chat, same = load_prompts(write_jsonl(tmp_path, {"prompt": "?"}, {"prompt": CHAT}, {"messages": CHAT}))
    assert (text.is_chat, chat.is_chat, same.is_chat) == (False, True, True)
    assert chat.messages == same.messages == (Message(role="system", content="Be brief."), *user("6 x 2?"))


@pytest.mark.parametrize(
    ("truth", "reference"), [("12", "12"), (12, "12"), (True, None), ({"tests": ["f(1)"]}, None), (None, None)]
)
def test_a_row_of_verl_is_taken_as_it_is(tmp_path: Path, truth: object, reference: str | None) -> None:
    reward_model = {"style": "rule", "ground_truth": truth}
    row = {"data_source": "gsm", "prompt": CHAT, "reward_model": reward_model, "extra_info": {"index": 3}}
    (prompt,) = load_prompts(write_parquet(tmp_path, row))
    assert (prompt.source, prompt.reference) == ("gsm", reference)
    assert dict(prompt.columns) == {name: value for name, value in row.items() if name != "prompt"}


def test_what_a_row_says_itself_comes_before_what_verl_calls_it(tmp_path: Path) -> None:
    row = {"source": "own", "reference": "13", "data_source": "gsm", "reward_model": {"ground_truth": "12"}}
    own, odd = load_prompts(write_jsonl(tmp_path, {"prompt": "?", **row}, {"prompt": "?", "data_source": ["x"]}))
    assert (own.source, own.reference, odd.source) == ("own", "13", "")


def test_a_number_is_an_id_too(tmp_path: Path) -> None:
    assert load_prompts(write_jsonl(tmp_path, {"prompt": "?", "prompt_id": 7}))[0].prompt_id == "7"


def test_numbers_are_references_too(tmp_path: Path) -> None:
    rows = [{"prompt": "?", "reference": reference} for reference in (12, 1.5, "Paris")]
    assert [p.reference for p in load_prompts(write_jsonl(tmp_path, *rows))] == ["12", "1.5", "Paris"]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_integers_that_a_column_with_gaps_made_floats_are_integers_again(
    tmp_path: Path, write: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def row(prompt: str, truth: float | None) -> dict[str, Any]:
        fields = {"reference": truth, "prompt_id": truth, "ground_truth": truth, "level": truth}
        return {"prompt": prompt, **fields, "reward_model": {"ground_truth": truth}}

    path = write(tmp_path, row("a", 42.0), row("b", None), row("c", 1.0))
    found = load_prompts(path)
    assert [prompt.reference for prompt in found] == ["42", None, "1"]
    assert [prompt.prompt_id for prompt in found] == ["42", f"{Path(path).name}:2", "1"]
    assert repr(dict(found[0].columns)) == repr(
        {"ground_truth": 42, "level": 42.0, "reward_model": {"ground_truth": 42}}
    ), "other columns are what the file holds"
    (said,) = caplog.messages
    assert (
        "2 values of reference are whole numbers saved as floats (42.0), and are read as integers (42) (first: " in said
    )


def test_truths_of_verls_files_are_integers_too_within_lists(tmp_path: Path) -> None:
    (prompt,) = load_prompts(write_jsonl(tmp_path, {"prompt": "?", "reward_model": {"ground_truth": [42.0, 1.5]}}))
    assert repr(prompt.columns["reward_model"]) == repr({"ground_truth": [42, 1.5]})


@pytest.mark.parametrize("value", [2.0**53, -1e300])
@pytest.mark.parametrize("row", [{"reference": 0}, {"prompt_id": 0}, {"reward_model": {"ground_truth": 0}}])
def test_a_float_that_has_lost_the_digits_of_a_whole_number_is_refused_by_its_column(
    tmp_path: Path, row: dict[str, Any], value: float
) -> None:
    text = json.dumps({"prompt": "?", **row}).replace("0", repr(value))
    with pytest.raises(ValueError, match=r"line 1: (reference|prompt_id|reward_model\.ground_truth): .* has lost the"):
        load_prompts(write_jsonl(tmp_path, text))
    (prompt,) = load_prompts(write_jsonl(tmp_path, {"prompt": "?", "reference": 2**53}))
    assert prompt.reference == str(2**53), "an integer keeps its digits"


def test_an_empty_reference_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    truth = {"reward_model": {"ground_truth": "42"}}
    rows = [{"prompt": "a", "reference": " "}, {"prompt": "b", "reference": "", **truth}, {"prompt": "c", **truth}]
    assert [prompt.reference for prompt in load_prompts(write_jsonl(tmp_path, *rows))] == [None, "42", "42"]
    assert "some.jsonl: 2 references are empty, and count as none (first: line 1)" in caplog.text
    rows = [{"prompt": "a", "reward_model": {"ground_truth": ""}}]
    assert load_prompts(write_jsonl(tmp_path, *rows))[0].reference is None


def test_doubled_prompts_stay_and_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "a", "reference": reference, "info": info} for reference, info in
            (("1", {}), ("1", {}), ("2", {}), ("2", {"seed": 1}))]  # fmt: skip
    assert len(load_prompts(write_jsonl(tmp_path, *rows))) == 4
    assert caplog.messages[0].partition(": ")[2] == (
        "1 prompts have the messages of an earlier one and its reference (first: some.jsonl:2); "
        "1 prompts have the messages of an earlier one but another reference (first: some.jsonl:3)"
    )


def test_a_file_without_anything_odd_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "a", "reference": 42, "level": 1.0}, {"prompt": "b", "reference": "42.0"}]
    assert [prompt.reference for prompt in load_prompts(write_jsonl(tmp_path, *rows))] == ["42", "42.0"]
    assert not caplog.messages


def test_blank_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, {"prompt": "one"}, "", {"prompt": "two"}, "")
    assert [p.prompt_id for p in load_prompts(path)] == ["some.jsonl:1", "some.jsonl:3"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ({}, "exactly one of the fields messages and prompt"),
        ({"question": "6 x 2?"}, "its fields: question"),
        ({"prompt": "a", "messages": CHAT}, "exactly one"),
        ({"prompt": ""}, "prompt: expected a text"),
        ({"prompt": 12}, "prompt: expected a text"),
        ({"prompt": []}, r"prompt: expected a text, or a list of \{role, content\}, got \[\]"),
        ({"prompt": [*CHAT, {"role": "user"}]}, r"prompt\[2\]: expected an object"),
        ({"messages": []}, "messages: expected a list"),
        ({"messages": "6 x 2?"}, "messages: expected a list"),
        ({"messages": ["6 x 2?"]}, r"messages\[0\]: expected an object with role and content"),
        ({"messages": [*CHAT, {"role": "user"}]}, r"messages\[2\]: expected an object"),
        ({"messages": [{"role": "human", "content": "a"}]}, r"messages\[0\]\.role: expected one of system, user"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, r"messages\[0\]\.content: expected a text"),
        ({"messages": [*CHAT, {"role": "assistant", "content": "12"}]}, "the last one must have role user"),
        ({"prompt": "a", "reference": True}, "reference: expected a text or a finite number"),
        ({"prompt": "a", "reference": [12]}, "reference: expected"),
        ('{"prompt": "a", "reference": NaN}', "reference: expected"),
        ({"prompt": "a", "prompt_id": ""}, "prompt_id: expected a text"),
        ({"prompt": "a", "source": {}}, "source: expected a text"),
    ],
)
def test_a_malformed_row_is_an_error_that_names_file_line_and_field(tmp_path: Path, row: Any, said: str) -> None:
    path = write_jsonl(tmp_path, {"prompt": "fine"}, row)
    with pytest.raises(ValueError, match=rf"some\.jsonl, line 2.*{said}"):
        load_prompts(path)


def test_text_that_is_not_utf8_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(ValueError, match="line 2: not JSON in UTF-8"):
        load_prompts(str(path))


def test_a_malformed_parquet_row_and_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"some\.parquet, row 2: prompt"):
        load_prompts(write_parquet(tmp_path, {"prompt": "a"}, {"prompt": " "}))
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"torn\.parquet: can't be read"):
        load_prompts(str(tmp_path / "torn.parquet"))


def test_two_prompts_with_one_id_are_an_error_that_names_both(tmp_path: Path) -> None:
    rows = [{"prompt": text, "prompt_id": name} for text, name in (("x", "a"), ("y", "b"), ("z", "a"))]
    with pytest.raises(ValueError, match="'a' is used by prompts 1 and 3"):
        load_prompts(write_jsonl(tmp_path, *rows))


def test_missing_empty_and_unknown_files_are_errors_that_say_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        load_prompts(str(tmp_path / "absent.jsonl"))
    with pytest.raises(ValueError, match="holds no prompts"):
        load_prompts(write_jsonl(tmp_path, "", ""))
    with pytest.raises(ValueError, match=r"unknown kind of file '\.txt'"):
        load_prompts(str(tmp_path / "some.txt"))
    with pytest.raises(ValueError, match="known: tiny://train, tiny://held_out"):
        load_prompts("tiny://test")


@pytest.mark.parametrize("problem_set", ["", "tools/", "walk/", "comparison/", "two_kinds/"])
def test_tiny_problems_are_made_on_the_spot_and_disjoint(problem_set: str) -> None:
    train = load_prompts(f"tiny://{problem_set}train", num_tiny_prompts=64, seed=1)
    held_out = load_prompts(f"tiny://{problem_set}held_out", num_tiny_prompts=32, seed=1)
    assert (len(train), len(held_out)) == (64, 32)
    assert train == load_prompts(f"tiny://{problem_set}train", num_tiny_prompts=64, seed=1)
    assert train != load_prompts(f"tiny://{problem_set}train", num_tiny_prompts=64, seed=2)
    assert len({prompt.prompt_id for prompt in (*train, *held_out)}) == 96
    assert all(prompt.reference is not None and prompt.reference.isdecimal() for prompt in train)
    assert disjoint(train, held_out) == (train, 0)


def test_two_kinds_of_tasks_come_in_turn_and_their_sources_say_which() -> None:
    mixed = load_prompts("tiny://two_kinds/train", num_tiny_prompts=5, seed=1)
    assert [prompt.source for prompt in mixed] == ["arithmetic", "comparison"] * 2 + ["arithmetic"]
    for kind, name in ((mixed[::2], "tiny://train"), (mixed[1::2], "tiny://comparison/train")):
        alone = load_prompts(name, num_tiny_prompts=len(kind), seed=1)
        assert [prompt.messages for prompt in kind] == [prompt.messages for prompt in alone]
        assert {prompt.source for prompt in alone} == {name}


def test_held_out_prompts_leave_the_training_set() -> None:
    train = tuple(Prompt(prompt_id=f"t{text}", messages=user(text)) for text in "abcb")
    held_out = tuple(Prompt(prompt_id=f"h{text}", messages=user(text), reference="1") for text in "bd")
    kept, num_removed = disjoint(train, held_out)
    assert ([p.prompt_id for p in kept], num_removed) == (["ta", "tc"], 2)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"prompt": "what is \ud83d?"}, r"messages\[0\]"),
        ({"messages": [{"role": "user", "content": "\udc4d"}]}, r"messages\[0\]"),
        ({"prompt": "?", "reference": "4\ud83d"}, "reference"),
        ({"prompt": "?", "rubric": ["fine", "\ud83d"]}, r"rubric\[1\]"),
        ({"prompt": "?", "prompt_id": "\ud83d"}, "prompt_id"),
    ],
)
def test_half_of_a_character_is_refused_with_its_place(tmp_path: Path, row: dict[str, Any], field: str) -> None:
    path = write_jsonl(tmp_path, {"prompt": "a whole one: \N{THUMBS UP SIGN}", "unread": "\ud83d"}, row)
    with pytest.raises(ValueError, match=rf"some\.jsonl, line 2: {field}: half of a surrogate pair \('\\ud"):
        load_prompts(path)


def test_the_place_of_a_prompt_in_columns_of_ones_own_is_its_row(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("question\n6 x 7?\n6 x 8?\n", encoding="utf-8")
    _, prompt = load_prompts(str(path), columns={"prompt": "question"})
    assert find_place(str(path), prompt) == f"{path}, row 2"
