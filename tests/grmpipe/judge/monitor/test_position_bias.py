"""Position and length bias are measured on existing judgements."""

from __future__ import annotations

from grmpipe.judge.monitor.position_bias import (
    Flips,
    PositionBias,
    bias_metrics,
    correlation_within,
    order_flips,
)
from grmpipe.models.types import Completion
from grmpipe.types import Judgement


def judgement(siblings: tuple[int, ...], scores: tuple[float, ...], group_id: str = "g") -> Judgement:
    completion = Completion(token_ids=(), logprobs=(), text="", finish_reason="stop", versions=())
    return Judgement(
        group_id=group_id, siblings=siblings, scores=scores, prompt_ids=(), completion=completion, grm="g", version=0
    )


def test_a_judge_that_likes_the_first_place_flips_whenever_the_order_does() -> None:
    judged = [judgement(order, (9, 1)) for order in ((0, 1), (1, 0), (0, 1), (1, 0))]
    assert order_flips(judged) == Flips(swapped=4, swapped_flips=4, same=2, same_flips=0)
    assert PositionBias().with_judgements(judged).metrics()["first_place_share"] == 1.0


def test_a_judge_that_goes_by_the_response_never_flips() -> None:
    judged = [judgement((0, 1), (2, 8)), judgement((1, 0), (8, 2)), judgement((1, 0), (7, 3))]
    assert order_flips(judged).metrics() == {"order_flips_share": 0.0, "noise_flips_share": 0.0}
    assert PositionBias().with_judgements(judged).metrics()["first_place_share"] == 2 / 3


def test_disagreement_in_the_same_order_is_noise() -> None:
    judged = [judgement((0, 1), (2, 8)), judgement((0, 1), (8, 2))]
    assert order_flips(judged) == Flips(same=1, same_flips=1)


def test_groups_are_not_compared_with_each_other_and_ties_are_no_disagreement() -> None:
    judged = [judgement((0, 1), (2, 8)), judgement((1, 0), (2, 8), "other"), judgement((1, 0), (5, 5))]
    assert order_flips(judged) == Flips(swapped=1)
    assert PositionBias().with_judgements(judged).metrics()["ties_share"] == 1 / 3


def test_a_judge_of_single_responses_has_no_order_to_flip() -> None:
    judged = [judgement((0,), (2,)), judgement((1,), (8,))]
    assert order_flips(judged).metrics() == {}
    assert PositionBias().with_judgements(judged).metrics() == {}


def test_hard_question_adds_no_correlation() -> None:
    easy, hard = [(10.0, 9.0), (12.0, 9.0)], [(50.0, 2.0), (60.0, 2.0)]
    assert correlation_within([easy, hard]) is None
    assert correlation_within([[(10.0, 1.0), (12.0, 3.0)], hard]) is not None
    assert correlation_within([[(1.0, 1.0), (2.0, 2.0)], [(101.0, 7.0), (102.0, 8.0)]]) == 1.0


def test_habits_add_up_over_reports() -> None:
    total = PositionBias().with_judgements([judgement((0, 1), (9, 1)), judgement((1, 0), (9, 1))])
    total = total.with_judgements([judgement((0, 1), (5, 5), "other")])
    assert total == PositionBias(flips=Flips(swapped=1, swapped_flips=1), compared=3, tied=1, first_won=2)


def test_two_judges_that_disagree_flip_no_order() -> None:
    likes_first = PositionBias().with_judgements([judgement((0, 1), (9, 1)), judgement((0, 1), (9, 1))])
    likes_second = PositionBias().with_judgements([judgement((1, 0), (9, 1)), judgement((1, 0), (5, 5))])
    metrics = bias_metrics({"a": likes_first, "b": likes_second})
    assert (metrics["judge/a/noise_flips_share"], metrics["judge/noise_flips_share"]) == (0.0, 0.0)
    assert "judge/order_flips_share" not in metrics, "judgements of two judges are no views of one"
    assert (metrics["judge/b/ties_share"], metrics["judge/ties_share"]) == (0.5, 0.25)
    single = {"ties_share", "first_place_share", "noise_flips_share"}
    assert bias_metrics({"": likes_first}).keys() == {f"judge/{name}" for name in single}
