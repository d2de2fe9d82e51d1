"""Files with labels of steps and of criteria."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from grmpipe.data.labelled_parts import LabelledParts, load_labelled_parts
from grmpipe.types import Criterion

STEPS = ["2 x 3 = 6", "6 + 1 = 8", "8 - 8 = 0"]


def read(folder: Path, *rows: object, about: str = "steps", **settings: object) -> tuple[LabelledParts, ...]:
    file = folder / "labels.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_labelled_parts(str(file), about=about, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "shares"),
    [
        ({"prompt": "?", "completions": STEPS, "labels": [True, False, False]}, (1, 0, 0)),
        ({"prompt": "?", "steps": STEPS, "labels": ["good", 0, None]}, (1, 0, None)),
        ({"prompt": "?", "steps": STEPS, "scores": [10, 5.5, None]}, (1, 0.5, None)),
        ({"problem": "?", "steps": STEPS, "label": 1}, (1, 0, None)),
        ({"problem": "?", "steps": STEPS, "label": -1}, (1, 1, 1)),
    ],
)
def test_published_files_of_step_labels_are_read_as_they_are(
    tmp_path: Path, row: dict[str, object], shares: tuple[float | None, ...]
) -> None:
    (item,) = read(tmp_path, row)
    assert (item.texts, item.shares, item.criteria) == (tuple(STEPS), shares, ())
    assert item.prompt.messages[0].content == "?" and item.is_yes_no is ("scores" not in row)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "?", "steps": STEPS, "labels": [True, False]}, "labels: expected 3 labels, one per step"),
        ({"prompt": "?", "steps": STEPS, "labels": [True, False, "maybe"]}, "labels: expected true, false or null"),
        (
            {"prompt": "?", "steps": STEPS, "scores": [1, 2, 11]},
            r"scores: expected a number from 1 to 10 .*score_range",
        ),
        ({"prompt": "?", "steps": STEPS, "label": 3}, r"label: expected the index of the first wrong step \(0 to 2\)"),
        ({"prompt": "?", "steps": "all in one", "label": 0}, "steps: expected a list of texts"),
        ({"steps": STEPS, "label": 0}, "prompt"),
        ({"prompt": "?", "response": "6", "score": 7}, r"holds no labels of steps.*judge=generative"),
        ({"prompt": "?", "steps": STEPS, "labels": [None] * 3}, "holds no labels of steps"),
    ],
)
def test_what_cant_be_read_is_refused_by_its_field(tmp_path: Path, row: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read(tmp_path, row)


def criterion_row(criterion: object, right: object, rater: str = "", response: str = "It is 6.") -> dict[str, object]:
    named = {"rater": rater} if rater else {}
    return {"prompt": "2 x 3?", "response": response, "criterion": criterion, "right": right, **named}


def test_criteria_of_one_response_are_one_item_and_its_raters_are_averaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        first, second = read(
            tmp_path,
            criterion_row("Names the product.", True, "anna"),
            criterion_row("Names the product.", True, "ben"),
            criterion_row("Is short.", True, "anna"),
            criterion_row("Is short.", False, "ben"),
            criterion_row({"text": "Says why.", "kind": "yes_no", "evidence": True}, False),
            criterion_row("Is short.", True, "anna", response="Six."),
            {"prompt": "2 x 3?", "response": "Six.", "score": 7},
            about="criteria",
        )  # fmt: skip
    why = Criterion(text="Says why.", kind="yes_no", evidence=True)
    assert (first.criteria, first.shares) == ((Criterion(text="Names the product."), why), (1.0, 0.0))
    assert (second.texts, second.shares) == (("Six.",), (1.0,))
    told = caplog.messages[-1]
    assert "read as 3 labels of criteria on 2 responses; 1 rows without such labels are left out" in told
    assert "1 criteria have as many yes as no" in told


def test_a_later_label_of_the_same_rater_counts_and_an_undone_one_doesnt(tmp_path: Path) -> None:
    (item,) = read(
        tmp_path,
        {**criterion_row("Is short.", False, "anna"), "id": "1"},
        {**criterion_row("Is short.", True, "anna"), "id": "2"},
        {**criterion_row("Names the product.", True, "anna"), "id": "3"},
        {"rater": "anna", "id": "4", "undoes": "3"},
        about="criteria",
    )
    assert (item.criteria, item.shares) == ((Criterion(text="Is short."),), (1.0,))


def test_made_judgements_label_whole_responses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tiny://judgements labels whole responses, and this judge scores criteria"):
        load_labelled_parts("tiny://judgements", about="criteria")
