"""Labelled judgement data is read unchanged from our own files and from the benchmarks'; nothing is guessed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grmpipe.data.labelled import load_labelled
from grmpipe.tiny.problems import is_right, make_problems
from grmpipe.types import Labelled, RankedResponses, ScoredResponse

TALK = [{"role": "user", "content": "6 x 7?", "language": "English"}]


def load(folder: Path, *rows: Any, name: str = "some.jsonl") -> tuple[Labelled, ...]:
    path = folder / name
    if path.suffix == ".parquet":
        columns = dict.fromkeys(field for row in rows for field in row)
        pq.write_table(pa.table({field: [row.get(field) for row in rows] for field in columns}), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return load_labelled(str(path))


def best_and_rest(item: Labelled) -> tuple[str, tuple[str, ...]]:
    assert isinstance(item, RankedResponses)
    assert item.best is not None
    rest = item.responses[: item.best] + item.responses[item.best + 1 :]
    return item.responses[item.best], rest


@pytest.mark.parametrize("name", ["own.jsonl", "own.parquet", "own.json"])
def test_our_own_rows_keep_their_order_and_label(tmp_path: Path, name: str) -> None:
    ranked, scored = load(
        tmp_path,
        {"prompt": "6 x 7?", "responses": ["42", "43", ""], "best": 0, "subset": "sums", "reference": "42"},
        {"prompt": "6 x 7?", "response": "43", "score": 2, "item_id": "mine"},
        name=name,
    )
    assert isinstance(ranked, RankedResponses) and isinstance(scored, ScoredResponse)
    assert (ranked.responses, ranked.best, ranked.subset, ranked.prompt.reference) == (
        ("42", "43", ""),
        0,
        "sums",
        "42",
    )
    assert (scored.response, scored.score, scored.item_id) == ("43", 2, "mine")
    assert ranked.item_id == f"{name}:1"


@pytest.mark.parametrize(
    ("row", "best", "rest", "subset"),
    [
        ({"prompt": "6 x 7?", "chosen": "42", "rejected": "43", "subset": "math", "id": 3}, "42", ("43",), "math"),
        (
            {"prompt": "6 x 7?", "chosen": ["42"], "rejected": ["1", "2", "3"], "subset": "Math"},
            "42", ("1", "2", "3"), "Math",
        ),
        (
            {"conversation_input": TALK, "chosen": {"answer": "42"}, "reject": {"answer": "43"}, "pair_uid": "1",
             "category_path": "Pairwise_set/Helpfulness/Code/Documentation"},
            "42", ("43",), "Pairwise_set/Helpfulness/Code",
        ),
        (
            {"conversation_input": TALK, "bon_best": {"answer": "42"}, "loser_list": [{"answer": "1"}, {"answer": "2"}],
             "category_path": "BoN_set/Harmlessness/S1"},
            "42", ("1", "2"), "BoN_set/Harmlessness/S1",
        ),
        (
            {"question": "6 x 7?", "response_A": "43", "response_B": "42", "label": "B>A", "source": "sums"},
            "42", ("43",), "sums",
        ),
        (
            {"context": TALK, "response1": "42", "response2": "43", "overall_preference": -2, "domain": "stem"},
            "42", ("43",), "stem",
        ),
        ({"prompt": "6 x 7?", "response_1": "43", "response_2": "42", "preference_strength": 3}, "42", ("43",), ""),
        (
            {"prompt": "6 x 7?", "response_1": "43", "response_2": "42", "winner": "model_b", "language": "English"},
            "42", ("43",), "English",
        ),
    ],
)  # fmt: skip
def test_the_benchmarks_rows_are_recognised_by_their_fields(
    tmp_path: Path, row: dict[str, Any], best: str, rest: tuple[str, ...], subset: str
) -> None:
    (item,) = load(tmp_path, row)
    assert best_and_rest(item) == (best, rest)
    assert item.subset == subset
    assert item.prompt.messages[-1].content == "6 x 7?"


def test_pairs_of_ppe_are_of_a_right_and_a_wrong_response(tmp_path: Path) -> None:
    row = {
        "prompt": "6 x 7?", "question_id": "7", "response_1": "41", "response_2": "42", "response_3": "43",
        "scores": [0.0, [1.0], False], "sampled_conflict_pairs": [[0, 1], [1, 2], [0, 2]],
    }  # fmt: skip
    items = load(tmp_path, row)
    assert [best_and_rest(item) for item in items] == [("42", ("41",)), ("42", ("43",))]
    assert len({item.item_id for item in items}) == 2


def test_several_right_answers_share_the_highest_grade_of_one_item(tmp_path: Path) -> None:
    row = {"prompt": "A colour?", "chosen": ["red", "blue"], "rejected": ["dog", "cat"], "subset": "Ties"}
    tied, reference = load(tmp_path, {**row, "id": "tied:3"}, {**row, "chosen": ["red"], "id": "ref:3"})
    assert dict(zip(tied.responses, tied.labels, strict=True)) == {"red": 1, "blue": 1, "dog": 0, "cat": 0}
    assert (tied.item_id, reference.item_id) == ("tied:3", "ref:3")
    assert best_and_rest(reference)[0] == "red"


STYLES = ["plain", "detailed", "markdown"]


def test_a_row_of_rm_bench_is_nine_pairs_by_domain_and_difficulty(tmp_path: Path) -> None:
    row = {
        "id": 7, "prompt": "6 x 7?", "domain": "safety-refuse", "chosen": [f"right, {style}" for style in STYLES],
        "rejected": [f"wrong, {style}" for style in STYLES],
    }  # fmt: skip
    items = load(tmp_path, row)
    assert Counter(item.subset for item in items) == {"safety/easy": 3, "safety/normal": 3, "safety/hard": 3}
    pairs = {best_and_rest(item)[0] + " > " + best_and_rest(item)[1][0]: item.subset for item in items}
    assert pairs["right, plain > wrong, markdown"] == "safety/hard"
    assert pairs["right, markdown > wrong, plain"] == "safety/easy"
    assert pairs["right, detailed > wrong, detailed"] == "safety/normal"
    assert all(isinstance(item, RankedResponses) and len(item.responses) == 2 for item in items)
    (other,) = load(tmp_path, {"prompt": "?", "chosen": "a", "rejected": "b", "domain": "mine"})
    assert best_and_rest(other) == ("a", ("b",))


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


@pytest.mark.parametrize("name", ["some.jsonl", "some.parquet"])
@pytest.mark.parametrize(
    ("row", "history"),
    [
        ({"chosen": said("6 x 7?", "42"), "rejected": said("6 x 7?", "43")}, ["6 x 7?"]),
        ({"prompt": "6 x 7?", "chosen": said("6 x 7?", "42"), "rejected": said("6 x 7?", "43")}, ["6 x 7?"]),
        (
            {"chosen": said("Hi", "Hello", "6 x 7?", "42"), "rejected": said("Hi", "Hello", "6 x 7?", "43")},
            ["Hi", "Hello", "6 x 7?"],
        ),
        (
            {
                "prompt": said("Hi", "Hello", "6 x 7?"), "chosen": [{"role": "assistant", "content": "42"}],
                "rejected": [{"role": "assistant", "content": "43"}],
            },
            ["Hi", "Hello", "6 x 7?"],
        ),
        (
            {
                "prompt": "6 x 7?", "chosen": [{"role": "assistant", "content": "42"}],
                "rejected": [{"role": "assistant", "content": "43"}],
            },
            ["6 x 7?"],
        ),
    ],
)  # fmt: skip
def test_preferences_between_chats_are_read_with_their_history(
    tmp_path: Path, row: dict[str, Any], history: list[str], name: str
) -> None:
    (item,) = load(tmp_path, row, name=name)
    assert best_and_rest(item) == ("42", ("43",))
    assert [message.content for message in item.prompt.messages] == history


def test_ratings_are_stretched_to_the_judges_scale(tmp_path: Path) -> None:
    rows = [{"prompt": "?", "response": "a", "helpfulness": rating} for rating in (0, 2, 4)]
    assert [item.score for item in load(tmp_path, *rows) if isinstance(item, ScoredResponse)] == [1, 5.5, 10]


@pytest.mark.parametrize(
    "tie",
    [
        {"prompt": "?", "response_1": "a", "response_2": "b", "winner": "tie (bothbad)"},
        {"prompt": "?", "response_a": "a", "response_b": "b", "preference": "Tie"},
        {"prompt": "?", "chosen": "a", "rejected": "b", "winner": "tie"},
        {"question": "?", "response_A": "a", "response_B": "b", "label": "A=B"},
        {"prompt": "?", "response_1": "a", "response_2": "b", "preference_strength": 0},
        {"prompt": "?", "responses": ["a", "b"], "grades": [3, 3.0]},
        {"prompt": "?", "responses": ["a", "b"], "ranking": [1, 1]},
    ],
)
def test_ties_are_equal_grades(tmp_path: Path, tie: dict[str, Any]) -> None:
    (item,) = load(tmp_path, tie)
    assert isinstance(item, RankedResponses)
    assert item.best is None and len(set(item.grades)) == 1 and sorted(item.responses) == ["a", "b"]


@pytest.mark.parametrize(
    ("row", "best"),
    [
        ({"response_a": "a", "response_b": "b", "preference": "B"}, "b"),
        ({"response_a": "a", "response_b": "b", "preference": 1}, "a"),
        ({"response_a": "a", "response_b": "b", "preference": "model_b"}, "b"),
        ({"response_a": "a", "response_b": "b", "preference": "left"}, "a"),
        ({"responses": ["a", "b", "c"], "grades": [0.5, 2, 1]}, "b"),
        ({"responses": ["a", "b", "c"], "ranking": [2, 3, 1]}, "c"),
    ],
)
def test_peoples_own_comparisons_are_read(tmp_path: Path, row: dict[str, Any], best: str) -> None:
    (item,) = load(tmp_path, {"messages": TALK, **row, "reference": 42, "source": "mine"})
    assert best_and_rest(item)[0] == best
    assert (item.prompt.reference, item.prompt.source) == ("42", "mine")


@pytest.mark.parametrize(
    ("row", "score"),
    [
        *(({"response": "a", "right": word}, 10) for word in (True, 1, 1.0, "yes", "TRUE", "good")),
        *(({"response": "a", "label": word}, 1) for word in (False, 0, "No", "wrong")),
        ({"completion": "a", "label": True}, 10),
        ({"completion": [{"role": "assistant", "content": "a"}], "label": False}, 1),
    ],
)
def test_yes_and_no_are_the_ends_of_the_scale(tmp_path: Path, row: dict[str, Any], score: int) -> None:
    (item,) = load(tmp_path, {"prompt": "?", **row})
    assert isinstance(item, ScoredResponse)
    assert (item.response, item.score, item.is_yes_no) == ("a", score, True)


def test_scores_of_another_scale_are_stretched_and_not_rounded(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"prompt": "?", "response": "a", "score": s}) + "\n" for s in (0, "2.5", 4, 5)))
    assert [item.labels for item in load_labelled(str(path), score_range=(0, 5))] == [(1,), (5.5,), (8.2,), (10,)]
    with pytest.raises(ValueError, match=r"line 1: score: expected a number from 1 to 10, got 0; .*score_range=\["):
        load_labelled(str(path))


def chat(answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize(
    ("equal", "kept"),
    [
        ({"prompt": "?", "chosen": "a", "rejected": "a "}, 0),
        ({"prompt": "?", "chosen": "", "rejected": ""}, 0),
        ({"prompt": "?", "chosen": ["a"], "rejected": ["b", "a", "c"]}, 0),
        ({"prompt": "?", "chosen": ["a", "b"], "rejected": ["c", "b"]}, 0),
        ({"prompt": "?", "chosen": ["a", "b", "c"], "rejected": ["a", "x", "y"], "domain": "chat"}, 8),
        ({"prompt": "?", "responses": ["a", "b", "a"], "best": 2}, 0),
        ({"prompt": "?", "responses": ["a", "b", "b"], "best": 0}, 1),
        ({"prompt": "?", "response_1": "a", "response_2": "a", "winner": "model_b"}, 0),
        ({"question": "?", "response_A": "a", "response_B": "a", "label": "A>B"}, 0),
        ({"chosen": chat("a"), "rejected": chat("a")}, 0),
    ],
)
def test_an_item_whose_best_text_equals_another_is_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, equal: dict[str, Any], kept: int
) -> None:
    other = {"prompt": "?", "response": "alone", "score": 3}
    assert len(load(tmp_path, equal, other)) == kept + 1
    left_out = "1 items are left out whose best text equals another one (first: line 1)"
    assert (left_out in caplog.text) is ("responses" not in equal or kept == 0)


def test_a_file_of_equal_pairs_alone_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no labelled items; 2 items are left out whose best text equals"):
        load(tmp_path, *[{"prompt": "?", "chosen": "a", "rejected": "a"}] * 2)


def test_doubled_items_stay_and_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = {"prompt": "?", "chosen": "a", "rejected": "b"}
    swapped = {"prompt": "?", "chosen": "b", "rejected": "a"}
    assert len(load(tmp_path, pair, pair, swapped, {**pair, "prompt": "!"})) == 4
    assert caplog.messages[0].partition(": ")[2] == (
        "read as 4 pairs; 1 items have the texts of an earlier one and its label (first: some.jsonl:2); "
        "1 items have the texts of an earlier one but another label (first: some.jsonl:3)"
    )


def test_labels_of_a_column_with_gaps_are_read_as_integers(tmp_path: Path) -> None:
    rows = [{"prompt": "?", "responses": ["a", "b"], "best": 1.0, "item_id": 7.0, "reference": 42.0},
            {"prompt": "?", "response": "a", "score": 3.0}]  # fmt: skip
    ranked, scored = load(tmp_path, *rows, name="some.parquet")
    assert isinstance(ranked, RankedResponses) and isinstance(scored, ScoredResponse)
    assert (ranked.best, ranked.item_id, ranked.prompt.reference, scored.score) == (1, "7", "42", 3)


def test_the_place_of_the_best_tells_nothing(tmp_path: Path) -> None:
    items = load(tmp_path, *({"prompt": "?", "chosen": "good", "rejected": "bad"} for _ in range(400)))
    assert 160 < sum(item.best or 0 for item in items if isinstance(item, RankedResponses)) < 240


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "?", "responses": ["a", "b"], "best": 2}, "some.jsonl, line 2: best: expected an index"),
        ({"prompt": "?", "responses": ["a"], "best": 0}, "responses: expected two or more, got 1"),
        ({"prompt": "?", "responses": ["a", 3], "best": 0}, "responses: expected a text or a list of texts"),
        ({"prompt": "?", "response": "a", "score": 11}, "score: expected a number from 1 to 10, got 11"),
        ({"prompt": "?", "response": "a", "score": "many"}, "score: expected a number from 1 to 10, got 'many'"),
        ({"prompt": "?", "response": "a", "score": float("inf")}, "score: expected a number"),
        ({"prompt": "?", "response": "a", "label": 2}, "yes or no, good or bad, pass or fail, got 2"),
        ({"prompt": "?", "responses": ["a", "b"], "grades": [1]}, "grades: expected 2 numbers, one per response, got"),
        ({"prompt": "?", "responses": ["a", "b"], "ranking": [1, 0]}, "ranking: expected the rank of each response, 1"),
        ({"prompt": "?", "response_a": "a", "response_b": "b", "preference": 0}, "preference: expected A, B or tie"),
        ({"prompt": "?", "response": "a", "ratings": 3}, "ratings: expected {rater: label} or a list of labels, got 3"),
        ({"prompt": "?", "response": "a", "helpfulness": True}, "helpfulness: expected a number from 0 to 4, got True"),
        (
            {"prompt": "?", "response_1": "a", "response_2": "b", "scores": [float("nan"), 1],
             "sampled_conflict_pairs": [[0, 1]]},
            "scores: expected numbers or booleans, got nan",
        ),
        ({"prompt": "?"}, "known kinds: RMB best of n, RMB pairs, Plan-RewardBench, HelpSteer3 preference, "),
        (
            {"prompt": "?", "chosen": "a"},
            "line 2: its fields (prompt, chosen) are no known kind of labels: to be read as chosen and "
            "rejected it lacks rejected; ",
        ),
        (
            {"instruction": "?", "good": "a", "bad": "b"},
            "(instruction, good, bad) are no known kind of labels: to be read as chosen and rejected it lacks chosen, "
            "prompt, rejected; to be read as preference between chats it lacks chosen, rejected; type "
            "'data.columns={chosen: good, prompt: instruction, rejected: bad}' with the names",
        ),
        (
            {"query": "?", "output": "a", "stars": 3},
            "to be read as scores it lacks response, score; to be read as yes or no it lacks response, right; type "
            "'data.columns={prompt: query, response: output, score: stars}' with the names",
        ),
        (
            {"prompt": "?", "response": "a", "verdict": "good"},
            "to be read as yes or no it lacks right; to be read as scores it lacks score; type "
            "'data.columns={right: verdict}'",
        ),
        (
            {"prompt": "?", "Response_A": "a", "response_b": "b"},
            "to be read as pairs it lacks preference, response_a; to be read as HelpSteer2 preference it lacks "
            "preference_strength, response_1, response_2; type "
            "'data.columns={preference: <column>, response_a: Response_A}'",
        ),
        ({"question": "?", "response_A": "a", "response_B": "b", "label": "C"}, "label: expected A, B or tie; "),
        ({"prompt": "?", "response_1": "a", "response_2": "b", "winner": "c"}, "winner: expected A, B or tie; "),
        ({"conversation_input": [], "chosen": {"answer": "a"}, "reject": {"answer": "b"}}, "field conversation_input"),
        ({"conversation_input": TALK, "chosen": "a", "reject": {"answer": "b"}}, "chosen: expected an object"),
        ({"prompt": "?", "response": "a", "score": 1, "item_id": "same"}, "item_id 'same' occurs twice"),
        (
            {"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "a"}]},
            "line 2: chosen: its last message must have role assistant, got role 'user'",
        ),
        (
            {
                "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
                "rejected": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "b"}],
            },
            "chosen, rejected: expected two conversations that differ only in their last message",
        ),
    ],
)  # fmt: skip
def test_an_error_in_a_labelled_row_is_named_with_file_and_line(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as raised:
        load(tmp_path, {"prompt": "?", "response": "a", "score": 1, "item_id": "same"}, row)
    assert told in str(raised.value)


def test_a_score_belongs_to_the_judges_scale(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(json.dumps({"prompt": "?", "response": "a", "score": 7}), encoding="utf-8")
    with pytest.raises(ValueError, match="from 1 to 5"):
        load_labelled(str(path), scale=(1, 5))


def test_an_unknown_tiny_set_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="tiny://judgements, tiny://judgements_held_out"):
        load_labelled("tiny://labels")


def test_the_tiny_judgements_are_true_and_balanced() -> None:
    items = load_labelled("tiny://judgements_held_out", num_tiny=240, seed=3)
    ranked = [item for item in items if isinstance(item, RankedResponses)]
    scored = [item for item in items if isinstance(item, ScoredResponse)]
    problems = {problem.question: problem for problem in make_problems("held_out", 240, seed=3)}

    def right(item: Labelled, text: str) -> bool:
        return is_right(problems[item.prompt.messages[0].content], text)

    assert len(ranked) == len(scored) == 120
    assert all(right(item, text) == (i == item.best) for item in ranked for i, text in enumerate(item.responses))
    assert all(right(item, item.response) == (item.score >= 8) for item in scored)
    assert sum(item.score >= 8 for item in scored) == 60
    assert set(Counter(item.subset for item in ranked).values()) == {24}
    assert 35 < sum(item.best == 0 for item in ranked) < 75


def test_the_tiny_judgements_are_the_same_for_a_seed_and_share_no_problem_with_those_held_out() -> None:
    train, again = (load_labelled("tiny://judgements", num_tiny=64, seed=1) for _ in range(2))
    held_out = load_labelled("tiny://judgements_held_out", num_tiny=64, seed=1)
    assert train == again != load_labelled("tiny://judgements", num_tiny=64, seed=2)
    assert not {item.prompt.messages for item in train} & {item.prompt.messages for item in held_out}


def test_half_of_a_character_in_a_response_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(json.dumps({"prompt": "?", "responses": ["fine", "\ud83d"], "best": 0}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"some\.jsonl, line 1: response 1: half of a surrogate pair"):
        load_labelled(str(path))


def test_an_empty_cell_of_a_response_is_an_answer_and_one_of_a_label_is_none(tmp_path: Path) -> None:
    file = tmp_path / "labels.csv"
    file.write_text("question,answer,ok\n1 + 1?,2,yes\n1 + 2?,,no\n1 + 3?,4,\n", encoding="utf-8")
    columns = {"prompt": "question", "response": "answer", "right": "ok"}
    found = load_labelled(str(file), columns=columns)
    assert [(item.responses, item.labels) for item in found] == [(("2",), (10,)), (("",), (1,))]
