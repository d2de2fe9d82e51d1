"""Each kind of label has its figures, and people have the same against each other."""

from __future__ import annotations

import pytest

from grmpipe.evaluation.judged_items import decide_outcome, is_tie
from grmpipe.evaluation.label_figures import guess_script, measure_figures, measure_people, split_by_trait
from grmpipe.models.types import Message
from grmpipe.types import Labelled, Prompt, RankedResponses, ScoredResponse

PASS = 8


def ask(text: str, source: str = "") -> Prompt:
    return Prompt(prompt_id=text, messages=(Message(role="user", content=text),), source=source)


def yes_no(number: int, yes: bool, **ratings: float) -> ScoredResponse:
    score = 10.0 if yes else 1.0
    return ScoredResponse(
        item_id=f"{number}",
        prompt=ask(f"{number}?"),
        response="x" * number,
        score=score,
        is_yes_no=True,
        ratings=ratings,
    )


def ranked(number: int, *grades: float, **ratings: tuple[float, ...]) -> RankedResponses:
    texts = tuple(f"{number} {place}" for place in range(len(grades)))
    return RankedResponses(
        item_id=f"{number}", prompt=ask(f"{number}?"), responses=texts, grades=grades, ratings=ratings
    )


def test_yes_and_no_have_precision_recall_false_positives_and_auc() -> None:
    """Of three yes two pass; of four no one passes. AUC: of 12 pairs of a yes and a no, 10 and a tie are in order."""
    scores = [(True, 9), (True, 8), (True, 4), (False, 8), (False, 3), (False, 2), (False, 1)]
    rows = [(yes_no(number, yes), {0: float(score)}) for number, (yes, score) in enumerate(scores)]
    found = measure_figures([*rows, (yes_no(99, True), {})], PASS)
    assert {name: one.mean for name, one in found.items()} == {
        "precision": pytest.approx(2 / 3), "recall": pytest.approx(2 / 3), "false_positive_rate": 0.25,
        "auc": pytest.approx(10.5 / 12),
    }  # fmt: skip
    assert found["false_positive_rate"].low < 0.25 < found["false_positive_rate"].high < 1
    only_yes = measure_figures(rows[:3], PASS)
    assert set(only_yes) == {"precision", "recall"}


def test_a_yes_is_right_on_its_side_of_the_pass_score() -> None:
    item = yes_no(1, True)
    assert [decide_outcome(item, {0: score}, PASS) for score in (8.0, 7.9)] == ["right", "wrong"]
    assert [decide_outcome(yes_no(2, False), {0: score}, PASS) for score in (8.0, 7.9)] == ["wrong", "right"]


def test_scores_have_ranks_kappa_and_the_distance_after_a_map() -> None:
    labels = [1, 3, 4, 6, 7, 9, 10, 2, 5, 8]
    rows = [
        (ScoredResponse(item_id=f"{n}", prompt=ask(f"{n}?"), response="", score=label), {0: 11.0 - label})
        for n, label in enumerate(labels)
    ]
    found = measure_figures(rows, PASS)
    assert (found["spearman"].mean, found["kendall_tau"].mean) == (pytest.approx(-1), pytest.approx(-1))
    assert found["quadratic_kappa"].mean == pytest.approx(-1)
    assert found["score_error"].mean == pytest.approx(5.0)
    assert 2 <= found["mapped_error"].mean < 5, "no rising map makes a falling score good, but it can be ignored"
    far = [(item, {0: 1 + item.labels[0] / 10}) for item, _ in rows]
    assert measure_figures(far, PASS)["mapped_error"].mean < 0.8 < measure_figures(far, PASS)["score_error"].mean


def test_lists_have_their_pairs_and_ties_their_equal_scores() -> None:
    rows: list[tuple[Labelled, dict[int, float]]] = [
        (ranked(1, 3, 2, 1), {0: 9, 1: 4, 2: 5}), (ranked(2, 1, 1, 0), {0: 9, 1: 8, 2: 5}),
        (ranked(3, 1, 1), {0: 4, 1: 4}), (ranked(4, 0, 0), {0: 4, 1: 5}),
    ]  # fmt: skip
    found = measure_figures(rows, PASS)
    assert found["pair_accuracy"].mean == pytest.approx(4 / 5)
    assert found["tied_alike"].mean == 0.5
    assert [is_tie(item) for item, _ in rows] == [False, False, True, True]
    assert measure_figures([(ranked(1, 1, 0), {0: 9, 1: 4})], PASS) == {}, "pairs of a best one have the accuracy"


def test_people_are_measured_by_the_labels_of_the_others() -> None:
    items = [yes_no(n, True, a=10, b=10, c=10) for n in range(4)] + [yes_no(9, False, a=1, b=1, c=10)]
    found = measure_people([*items, yes_no(7, True, a=10), yes_no(8, True)], PASS)
    # Four items: 12 of 12 rows right. The fifth: c against a and b is wrong; a against b and c has no majority.
    assert found["rated_accuracy"].mean == pytest.approx(12 / 13)
    assert found["false_positive_rate"].mean == 1
    pairs = [ranked(1, 2, 1, a=(2, 1), b=(2, 1)), ranked(2, 1, 1, a=(2, 1), b=(1, 2))]
    assert measure_people(pairs, PASS)["rated_accuracy"].mean == 0.5
    scored = [
        ScoredResponse(item_id=f"{n}", prompt=ask(f"{n}?"), response="", score=n, ratings={"a": n, "b": n + 1.0})
        for n in range(1, 9)
    ]
    assert measure_people(scored, PASS)["score_error"].mean == pytest.approx(1)
    assert measure_people([yes_no(1, True)], PASS) == {}


def test_items_are_split_by_source_length_and_script() -> None:
    items = [yes_no(number, True) for number in range(9)]
    assert split_by_trait(items) == {"length": {"short": [0, 1, 2], "middle": [3, 4, 5], "long": [6, 7, 8]}}
    mixed = [
        ScoredResponse(item_id=text, prompt=ask(text, source), response="", score=1)
        for text, source in (("What is it?", "chat"), ("Что это? ok", "chat"), ("这是什么", ""))
    ]
    assert split_by_trait(mixed) == {
        "source": {"chat": [0, 1], "none": [2]}, "script": {"cjk": [2], "cyrillic": [1], "latin": [0]},
    }  # fmt: skip
    assert guess_script("6 x 7 = ?") == "latin" and guess_script("6 + 7?") == "none"
