"""Labels of several raters become one, and what is read is said with the raters' agreement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grmpipe.data.labelled import load_labelled
from grmpipe.data.raters import compute_alpha
from grmpipe.types import Labelled, RankedResponses, ScoredResponse

ANSWER = {"prompt": "6 x 7?", "response": "42"}
PAIR = {"prompt": "6 x 7?", "chosen": "42", "rejected": "43"}


def load(folder: Path, *rows: dict[str, Any]) -> tuple[Labelled, ...]:
    path = folder / "some.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_labelled(str(path))


def rate(row: dict[str, Any], **labels: Any) -> list[dict[str, Any]]:
    """A row per rater. labels: field_rater=label."""
    return [{**row, "rater": name.split("_")[1], name.split("_")[0]: label} for name, label in labels.items()]


@pytest.mark.parametrize(
    "rows",
    [
        rate(ANSWER, score_anna=4, score_ben=7, score_cy=10),
        [{**ANSWER, "ratings": {"anna": 4, "ben": 7, "cy": 10}}],
        [{**ANSWER, "ratings": [{"rater": name, "score": s} for name, s in (("anna", 4), ("ben", 7), ("cy", 10))]}],
    ],
)
def test_the_score_of_several_raters_is_their_mean(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    (item,) = load(tmp_path, *rows)
    assert isinstance(item, ScoredResponse)
    assert (item.score, item.ratings) == (7, {"anna": 4, "ben": 7, "cy": 10})


def test_of_yes_and_no_the_majority_counts_and_a_draw_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = {**ANSWER, "response": "41"}
    (item,) = load(
        tmp_path,
        *rate(ANSWER, right_anna=True, right_ben=False, right_cy=True),
        *rate(other, right_anna=True, right_ben=False),
    )
    assert isinstance(item, ScoredResponse)
    assert (item.response, item.score, item.ratings) == ("42", 10, {"anna": 10, "ben": 1, "cy": 10})
    assert "1 items have as many yes as no, and are left out" in caplog.text


def test_pairs_of_several_raters_are_one_whichever_way_round_they_stand(tmp_path: Path) -> None:
    swapped = {**PAIR, "chosen": "43", "rejected": "42"}
    tied = {**PAIR, "prompt": "A?"}
    two_to_one, draw = load(
        tmp_path, {**PAIR, "rater": "anna"}, {**swapped, "rater": "ben"}, {**PAIR, "rater": "cy"},
        {**tied, "rater": "anna"}, {**swapped, "prompt": "A?", "rater": "ben"},
    )  # fmt: skip
    assert isinstance(two_to_one, RankedResponses) and isinstance(draw, RankedResponses)
    assert two_to_one.best == two_to_one.responses.index("42") and draw.best is None
    assert {rater: grades[two_to_one.best] for rater, grades in two_to_one.ratings.items()} == {
        "anna": 1, "ben": 0, "cy": 1,
    }  # fmt: skip


def test_grades_of_several_raters_are_their_mean_by_response(tmp_path: Path) -> None:
    rows = {"prompt": "?", "responses": ["a", "b", "c"], "ratings": {"anna": [3, 1, 2], "ben": [2, 3, 1]}}
    (item,) = load(tmp_path, rows)
    assert item.labels == (2.5, 2, 1.5) and dict(item.ratings) == {"anna": (3, 1, 2), "ben": (2, 3, 1)}


def test_a_later_label_of_a_rater_replaces_the_earlier_and_an_undone_one_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def annotate(line: str, **fields: Any) -> dict[str, Any]:
        return {"time": "2026-11-29T18:00:00Z", "id": line, "rater": "anna", "run": "mine", "sibling": 0, **fields}

    score, right = load(
        tmp_path,
        annotate("1", **ANSWER, score=3),
        annotate("2", **ANSWER, right=True),
        annotate("3", **ANSWER, score=8),
        annotate("4", prompt="?", response="a", right=True),
        annotate("5", undoes="4"),
        annotate("6", prompt="?", response="a", note="unsure"),
        annotate("7", prompt="?", response="a", criterion="short", right=True),
        annotate("8", undoes="3"),
        annotate("9", undoes="8"),
    )
    assert (score.labels, right.labels) == ((8,), (10,))
    for words in (
        "1 labels are replaced by a later one of the same rater", "1 annotations are undone by a later one",
        "1 rows are notes without a label, and are left out", "1 rows label one criterion",
    ):  # fmt: skip
        assert words in caplog.text


def test_labels_by_criterion_are_read_as_subsets_where_they_are_named_so(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text("prompt,response,criterion,right,rater\n?,a,short,yes,anna\n?,a,polite,no,anna\n", encoding="utf-8")
    short, polite = load_labelled(str(path), columns={"subset": "criterion"})
    assert [(one.subset, one.labels) for one in (short, polite)] == [("short", (10,)), ("polite", (1,))]
    with pytest.raises(ValueError, match="holds no labelled items; 2 rows label one criterion"):
        load_labelled(str(path))


def test_ratings_beside_a_label_or_of_nothing_known_make_no_raters(tmp_path: Path) -> None:
    pair, scored = load(tmp_path, {**PAIR, "ratings": [5, 1]}, {**ANSWER, "score": 3, "ratings": [5, 1]})
    assert not pair.ratings and not scored.ratings and scored.labels == (3,)


def test_rows_without_a_label_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(load(tmp_path, {**ANSWER, "score": 3}, {**ANSWER, "score": None}, {**ANSWER, "score": " "})) == 1
    assert "2 rows have no score, and are left out (first: line 2)" in caplog.text


def test_what_is_read_is_said_with_counts_and_agreement(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        *rate(ANSWER, right_anna=True, right_ben=True), *rate({**ANSWER, "response": "41"}, right_anna=False),
        *rate({**ANSWER, "response": "40"}, right_anna=False, right_ben=False),
        {**PAIR, "rater": "cy", "winner": "tie"}, {"prompt": "?", "response": "a", "score": 3},
    ]  # fmt: skip
    load(tmp_path, *rows)
    assert caplog.messages[0].partition(": ")[2] == (
        "read as 3 yes or no, 1 pairs (1 without a single best), 1 scores; 3 raters (anna 3, ben 2, cy 1); their "
        "agreement on 2 yes or no by Krippendorff's alpha: 1.00 (1: always, 0: as by chance); anna and cy share no "
        "item, so that nothing says how far they agree, and 1 more pairs of raters"
    )


def test_alpha_is_krippendorffs() -> None:
    """His own example of four observers and twelve units ("Computing Krippendorff's alpha-reliability", 2011)."""
    observers = (
        (1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None),
        (1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3),
        (None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None),
        (1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None),
    )
    units = [[float(value) for value in unit if value is not None] for unit in zip(*observers, strict=True)]
    assert compute_alpha(units) == pytest.approx(0.849, abs=5e-4)
    binary = ((0, 1, 0, 0, 0, 0, 0, 0, 1, 0), (1, 1, 1, 0, 0, 1, 0, 0, 0, 0))
    assert compute_alpha([[float(value) for value in unit] for unit in zip(*binary, strict=True)]) == pytest.approx(
        0.095, abs=5e-4
    )
    assert compute_alpha([[1.0, 1.0], [1.0]]) is None
