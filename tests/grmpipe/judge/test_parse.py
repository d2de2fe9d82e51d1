"""What counts as a verdict, and that nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.judge.parse import PARSERS, Parser, parse_boxed, parse_score_line, scores_of
from grmpipe.judge.scale import Scale
from models.types import Completion, FinishReason, VersionSpan


def completion(text: str, finish_reason: FinishReason = "stop") -> Completion:
    spans = (VersionSpan(model="grm", version=0, start=0, end=1),)
    return Completion(token_ids=(1,), logprobs=(-1.0,), text=text, finish_reason=finish_reason, versions=spans)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 7", 7),
        ("Principles: ...\nCritique: fine\nScore: 10\n", 10),
        ("Score: 2\nOn reflection:\nScore: 8", 8),
        ("  Score: 8 \r\n\n", 8),
        ("Score: 4\nThat is all.", 4),
        ("Score: 4\n> Score: 10", 4),
    ],
)
def test_the_last_score_line_counts(text: str, score: int) -> None:
    assert parse_score_line(text, 1, Scale()) == (score,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no verdict",
        "Score: 0",
        "Score: 11",
        "Score: -3",
        "Score: 7.5",
        "Score: 7/10",
        "Score: 7 of 10",
        "Score:7",
        "score: 7",
        "**Score: 7**",
        "Final Score: 7",
        "Score: seven",
        "Score: ٧",
        "Score: " + "9" * 5000,
        "> Score: 7",
        "the work says\u2028Score: 10",
        "the work says\x0bScore: 10",
        "NO. The answer yesterday was wrong. I would say 7",
    ],
)
def test_anything_else_is_unparseable(text: str) -> None:
    assert parse_score_line(text, 1, Scale()) == "unparseable"


@pytest.mark.parametrize("last", ["Score: 99", "Score: 8 or so", "**Score: 9**", "score: 9", "Score:"])
def test_a_malformed_last_verdict_does_not_fall_back_to_an_earlier_one(last: str) -> None:
    assert parse_score_line(f"Score: 3\nOn reflection:\n{last}", 1, Scale()) == "unparseable"


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        (r"\boxed{7}", (7,)),
        (r"First \boxed{2}, no: \boxed{ 9 }.", (9,)),
        (r"\boxed{1,5}", (1, 5)),
        (r"so \boxed{4, 8}", (4, 8)),
        ("\\boxed{4}\n> \\boxed{10}", (4,)),
    ],
)
def test_the_last_box_counts(text: str, scores: tuple[int, ...]) -> None:
    assert parse_boxed(text, len(scores), Scale()) == scores


@pytest.mark.parametrize(
    ("text", "num_scores"),
    [
        ("", 1),
        ("7", 1),
        (r"\boxed{}", 1),
        (r"\boxed{7", 1),
        (r"\boxed{7.5}", 1),
        (r"\boxed{11}", 1),
        (r"\boxed{0}", 1),
        (r"\boxed{7}", 2),
        (r"\boxed{7, 8}", 1),
        (r"\boxed{7, 8,}", 2),
        (r"\boxed{seven}", 1),
        (r"\boxed{" + "9" * 5000 + "}", 1),
        (r"\boxed{3} or rather \boxed{12}", 1),
        (r"\boxed{3} or rather \boxed{", 1),
        ("> \\boxed{10}", 1),
    ],
)
def test_a_box_without_exactly_n_integers_in_range_is_unparseable(text: str, num_scores: int) -> None:
    assert parse_boxed(text, num_scores, Scale()) == "unparseable"


@pytest.mark.parametrize("parser", PARSERS.values())
@pytest.mark.parametrize("text", ["Score: 9", r"\boxed{9}", "cut in the midd"])
def test_a_cut_judgement_is_truncated_even_with_a_verdict_in_it(parser: Parser, text: str) -> None:
    assert scores_of(completion(text, "length"), parser, 1, Scale()) == "truncated"


@given(text=st.text() | st.text(alphabet="Score: 10\n>\\boxed{},*"), name=st.sampled_from(sorted(PARSERS)))
def test_every_text_gives_scores_in_range_or_a_cause(text: str, name: str) -> None:
    scores = scores_of(completion(text), PARSERS[name], 1, Scale())
    assert scores == "unparseable" or (len(scores) == 1 and 1 <= int(scores[0]) <= 10)


@given(noise=st.text(), score=st.integers(1, 10))
def test_what_stands_before_the_verdict_does_not_change_it(noise: str, score: int) -> None:
    assert parse_score_line(f"{noise}\nScore: {score}", 1, Scale()) == (score,)
    assert parse_boxed(f"{noise}\n\\boxed{{{score}}}", 1, Scale()) == (score,)


def test_a_scale_spans_rewards_from_0_to_1() -> None:
    assert [Scale().reward_of(score) for score in (1, 5.5, 10)] == [0.0, 0.5, 1.0]
    assert Scale(low=0, high=4).reward_of(1) == 0.25
