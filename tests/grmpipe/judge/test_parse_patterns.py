"""What a pattern matches, its parser reads."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grmpipe.config.judge import Scale
from grmpipe.config.judge_tables import PARSERS
from grmpipe.judge.parse import Form, form_named, judgement_pattern, parser_named, short_verdict_pattern
from grmpipe.models.engines.embedded.grammar import Grammar
from grmpipe.tiny.tokenizer import build_tokenizer

SCALES = (Scale(), Scale(low=0, high=100), Scale(low=-3, high=3), Scale(low=1, high=5, step=0.5))
NEAR_VERDICTS = st.text(alphabet="Score: 10-7\n\r\t >\\boxed{},*", max_size=30)
PIECES = (
    "Score: 7", "score:7", "Final score: 3", "/10", "Score: 11", "\\boxed{7}", "The score is \\boxed{3}", "$", "$$",
    "\\]", "**", ".", "# ", "2. ", "> ", "<think>", "<thi", "</think>", "<", "\n", "\n\n", "\r", " ", "fine",
)  # fmt: skip
PIECED = st.lists(st.sampled_from(PIECES), max_size=10).map("".join)
TOKENIZER = build_tokenizer()
GRAMMAR = Grammar(TOKENIZER, [TOKENIZER.eos_token_id], len(TOKENIZER))
FORMS = {
    "score_line": "Score: {}",
    "score": "Score: {}",
    "boxed": "\\boxed{{{}}}",
    "rating": "Rating: [[{}]]",
    "result": "Fine. [RESULT] {}",
    "bold_result": "**Result:** {}",
    "overall_boxed": "Overall: $\\boxed{{{}}}$",
    "answer_scores": "<answer>{}</answer>",
}
ONE = sorted(FORMS)  # what can hold one score
IN_WORDS = ("yes_no", "correct", "grade", "grade_box", "is_correct")  # of one response
PAIRS = sorted(set(PARSERS) - {*ONE, *IN_WORDS})
PAIR_PIECES = (
    "[[A]]", "[[B]]", "[[C]]", "[", "<answer>", "</answer>", "[RESULT] ", "A", "B.", "**Result:** ",
    '{"Choice": "Model A"}', '"Choice": "[Model B]"', '"ranking": 2', "{", "}", "```", "\\boxed{2}",
    "[The End of Ranking Score]", "</think>", "[[A>>B]]", "[[A=B]]", "Winner: ", "Response ",
    '{"scores": {"model-1": 2, "model-2": 4}}', ', "best-to-worst": ["model-2"]}',
    "<think>", "> ", "\n", " ", "fine ",
)  # fmt: skip


def matches(name: str, scale: Scale, text: str) -> bool:
    return re.fullmatch(judgement_pattern(form_named(name), scale, 1), text) is not None


@pytest.mark.parametrize(
    ("name", "scale"),
    [*itertools.product(("score_line", "boxed"), SCALES), *((name, Scale()) for name in (*ONE, *IN_WORDS))],
)
def test_what_the_pattern_lets_through_parses(name: str, scale: Scale) -> None:
    @settings(max_examples=50)
    @given(st.from_regex(judgement_pattern(form_named(name), scale, 1), fullmatch=True))
    def holds(text: str) -> None:
        assert parser_named(name)(text, 1, scale) != "unparseable"

    holds()


@given(noise=st.text() | NEAR_VERDICTS, score=st.integers(-200, 200), scale=st.sampled_from(SCALES))
@pytest.mark.parametrize("name", ONE)
def test_a_verdict_in_the_last_line_passes_exactly_within_the_scale(
    name: str, noise: str, score: int, scale: Scale
) -> None:
    text = f"{noise}\n{FORMS[name].format(score)}"
    assert not matches(name, scale, text) or parser_named(name)(text, 1, scale) == (score,)
    assert matches(name, scale, text) == (scale.low <= score <= scale.high)


@settings(max_examples=300)
@given(text=PIECED | NEAR_VERDICTS, name=st.sampled_from(ONE), scale=st.sampled_from(SCALES))
def test_a_text_that_the_pattern_matches_parses(text: str, name: str, scale: Scale) -> None:
    assert not matches(name, scale, text) or parser_named(name)(text, 1, scale) != "unparseable"


@pytest.mark.parametrize("name", [*PAIRS, "answer_scores"])
def test_what_the_pattern_of_two_responses_matches_parses(name: str) -> None:
    scale = Scale(low=1, high=6)
    pattern = judgement_pattern(form_named(name), scale, 2)

    @settings(max_examples=40)
    @given(st.lists(st.sampled_from(PAIR_PIECES), max_size=8).map("".join) | st.from_regex(pattern, fullmatch=True))
    def holds(text: str) -> None:
        assert re.fullmatch(pattern, text) is None or parser_named(name)(text, 2, scale) != "unparseable"

    holds()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("score_line", "Score: 7"),
        ("score_line", "fine\n\tScore: 10 \r\n\n"),
        ("score_line", "> Score: 2\nScore: 99\nScore: 3\n"),
        ("boxed", "\\boxed{7}"),
        ("boxed", "So the score is $\\boxed{ 10 }$.\n"),
        ("boxed", "> \\boxed{2}\nNo:\n$$\n\\boxed{3}\n$$"),
        ("score_line", "<think>\nhm\n</think>\n\nScore: 7"),
    ],
)
def test_pattern_matches_verdicts(name: str, text: str) -> None:
    assert matches(name, Scale(), text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("score_line", "Score: 11"),
        ("score_line", "Score: 0"),
        ("score_line", "> Score: 7"),
        ("score_line", "Score: 7 of 10"),
        ("score_line", "Score: 7\nThat is all."),
        ("score_line", ""),
        ("score_line", "<think>\nScore: 7"),
        ("score_line", "Score: 7\n> Score: 7"),
        ("boxed", "It says \\boxed{7}"),
        ("boxed", " > \\boxed{7}"),
        ("boxed", "\\boxed{7} or rather \\boxed{"),
        ("boxed", "\\boxed{7, 8}"),
        ("boxed", "\\boxed{7"),
    ],
)
def test_pattern_rejects_other_texts(name: str, text: str) -> None:
    assert not matches(name, Scale(), text)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("num_scores", [2, 4])
def test_a_box_of_several_scores_lets_through_what_parses_as_so_many(num_scores: int, scale: Scale) -> None:
    @settings(max_examples=50)
    @given(st.from_regex(judgement_pattern(form_named("boxed"), scale, num_scores), fullmatch=True))
    def holds(text: str) -> None:
        assert parser_named("boxed")(text, num_scores, scale) != "unparseable"

    holds()


@given(scores=st.lists(st.integers(-2, 12), min_size=1, max_size=4), num_scores=st.integers(1, 4))
def test_a_box_passes_exactly_with_so_many_scores_in_range(scores: list[int], num_scores: int) -> None:
    text = f"fine\n\\boxed{{{', '.join(map(str, scores))}}}"
    good = len(scores) == num_scores and all(1 <= score <= 10 for score in scores)
    assert (re.fullmatch(judgement_pattern(form_named("boxed"), Scale(), num_scores), text) is not None) == good


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_verdict_that_is_asked_for_parses_and_is_short(name: str) -> None:
    form, num_scores = form_named(name), 1 if name in (*ONE, *IN_WORDS) else 2
    GRAMMAR.check(pattern := short_verdict_pattern(form, Scale(), num_scores))

    @settings(max_examples=30)
    @given(st.from_regex(pattern, fullmatch=True))
    def holds(text: str) -> None:
        assert parser_named(name)(text, num_scores, Scale()) != "unparseable"
        assert len(text) < 200

    holds()


def test_a_form_of_the_users_may_be_asked_for_with_all_its_scores() -> None:
    form = Form(line=lambda number, scale, num_scores: r"=>\s*([0-9]+)( of \d+)?")
    pattern = short_verdict_pattern(form, Scale(), 1)
    assert all(re.fullmatch(pattern, text) for text in ("=>7", "=> 10", "=> 10 of 10"))
    assert not re.fullmatch(pattern, "=>  " + "1" * 99)


@pytest.mark.parametrize("name", ["score_line", "boxed"])
def test_a_verdict_that_is_asked_for_may_be_written_as_templates_show_it(name: str) -> None:
    pattern = short_verdict_pattern(form_named(name), Scale(), 1)
    assert all(re.fullmatch(pattern, FORMS[name].format(score)) for score in range(1, 11))
    assert not any(re.fullmatch(pattern, text) for text in ("", "fine\nScore: 7", "Score: 7\n\n", "Score: 11"))


@given(text=PIECED | NEAR_VERDICTS, name=st.sampled_from(ONE))
def test_the_embedded_engine_reads_every_pattern_as_re_does(text: str, name: str) -> None:
    for ending in ("", "\n" + FORMS[name].format(7)):
        matcher = GRAMMAR.start(judgement_pattern(form_named(name), Scale(), 1))
        accepted = matcher.consume_tokens(TOKENIZER.encode(text + ending, add_special_tokens=False))
        assert (accepted and matcher.is_accepting()) == matches(name, Scale(), text + ending)


def test_a_scale_too_long_to_list_is_refused_by_the_key() -> None:
    with pytest.raises(ValueError, match=r"^scale: 1002 different scores"):
        judgement_pattern(form_named("boxed"), Scale(low=0, high=1001), 1)
