"""A prompt's rubric is read from its row, or the row is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grmpipe.data.prompts import load_prompts
from grmpipe.types import Criterion


def write(path: Path, rubric: object) -> str:
    file = path / "own.jsonl"
    file.write_text(json.dumps({"prompt": "Write a poem.", "rubric": rubric}) + "\n")
    return str(file)


def test_criteria_are_texts_or_texts_with_weights(tmp_path: Path) -> None:
    (prompt,) = load_prompts(write(tmp_path, ["It rhymes.", {"text": "It is short.", "weight": 3}]))
    assert prompt.rubric == (Criterion(text="It rhymes."), Criterion(text="It is short.", weight=3.0))
    (prompt,) = load_prompts(write(tmp_path, [{"text": "It rhymes.", "weight": None}]))  # as Parquet has it
    assert prompt.rubric == (Criterion(text="It rhymes.", weight=1.0),)


def test_a_prompt_without_a_rubric_has_no_criteria(tmp_path: Path) -> None:
    (prompt,) = load_prompts(write(tmp_path, None))
    assert prompt.rubric == ()


@pytest.mark.parametrize(
    ("rubric", "said"),
    [
        ("It rhymes.", r"line 1: rubric: expected a list"),
        ([""], r"line 1: rubric\[0\]: expected a text"),
        (["It rhymes.", {"weight": 1}], r"rubric\[1\].text: expected a text"),
        ([{"text": "It rhymes.", "weight": 0}], r"rubric\[0\].weight: expected a number above 0"),
        ([{"text": "It rhymes.", "weight": "much"}], r"rubric\[0\].weight"),
        ([{"text": "It rhymes.", "weight": 10**400}], r"rubric\[0\].weight"),
    ],
)
def test_a_bad_rubric_names_its_place(tmp_path: Path, rubric: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_prompts(write(tmp_path, rubric))
