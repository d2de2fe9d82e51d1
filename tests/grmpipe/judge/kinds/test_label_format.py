"""Labels as texts, and how far scores agree with them; labels of parts: test_labels.py has those of whole responses."""

from __future__ import annotations

import pytest

from grmpipe.config.judge import Scale
from grmpipe.judge.kinds.label_format import (
    PartLabel,
    describe_label,
    join_parts,
    judged_right,
    measure_agreement,
    num_scores,
    read_parts,
)

RIGHT_STEP, WRONG_STEP = PartLabel("at least", 8), PartLabel("below", 8)
LEVEL = PartLabel("exactly", 2, (0, 3))


def test_labels_of_parts_read_back_as_written() -> None:
    labels = (PartLabel("exactly", 10), None, WRONG_STEP, PartLabel("graded", 7.5), LEVEL)
    text = join_parts(labels)
    assert text == "exactly 10; any; below 8; graded 7.5; exactly 2 from 0 to 3"
    assert read_parts(text) == labels and num_scores(text) == 5


@pytest.mark.parametrize("label", ["exactly", "exactly 1; ", "best 1 of 2; any", "about 7", "exactly 2 from 0"])
def test_other_texts_are_no_labels(label: str) -> None:
    with pytest.raises(ValueError, match="is not a label of a judgement"):
        read_parts(label)


def test_a_judgement_of_parts_is_right_if_each_label_is_met() -> None:
    label = join_parts([RIGHT_STEP, None, WRONG_STEP])
    assert judged_right((9, 1, 7), label) and judged_right((8, 10, 1), label)
    assert not judged_right((7, 1, 7), label) and not judged_right((9, 1, 8), label)


@pytest.mark.parametrize("label", [LEVEL, PartLabel("at least", 2, (0, 3)), PartLabel("graded", 3, (0, 3))])
def test_a_score_that_is_no_level_is_wrong_whatever_its_side(label: PartLabel) -> None:
    assert not label.is_met_by(4) and label.measure(4, Scale()) == -1


def test_graded_levels_earn_by_their_distance_within_the_levels() -> None:
    assert PartLabel("graded", 3, (0, 3)).measure(0, Scale()) == -1
    assert PartLabel("graded", 3, (0, 3)).measure(2, Scale()) == pytest.approx(1 / 3)


def test_a_judge_that_calls_every_step_right_gains_nothing_over_one_that_calls_every_step_wrong() -> None:
    label = join_parts([*[RIGHT_STEP] * 9, WRONG_STEP])
    assert measure_agreement([10] * 10, label, Scale()) == measure_agreement([1] * 10, label, Scale()) == 0
    assert measure_agreement([*[10] * 9, 1], label, Scale()) == 1
    one_missed = measure_agreement([1, *[10] * 8, 1], label, Scale())
    assert one_missed == pytest.approx((7 / 9 + 1) / 2)


def test_what_cant_be_used_is_wrong_and_what_has_no_label_counts_nothing() -> None:
    label = join_parts([RIGHT_STEP, None])
    assert measure_agreement([None, 10], label, Scale()) == -1
    assert measure_agreement([10, None], label, Scale()) == 1


def test_a_hint_names_each_part() -> None:
    assert describe_label("exactly 10; any; below 8") == "The true scores are: 10, unknown, below 8"
    assert describe_label("exactly 2 from 0 to 3") == "The true score is: 2"
