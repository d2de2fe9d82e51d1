"""What is read as a verdict, and that nothing else is."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.config.judge import Scale
from grmpipe.config.judge_tables import PARSERS, TWO_SCORES
from grmpipe.config.keys.user_code import note_owner
from grmpipe.judge.parse import Form, FormError, Parser, parse_scores, parser_named, scores_in
from grmpipe.judge.prompt_injection import fence_text
from grmpipe.models.types import Completion, FinishReason, VersionSpan

OWN = ("boxed", "score_line")  # the others, of public GRMs: test_public_grms.py
parse_score_line, parse_boxed = parser_named("score_line"), parser_named("boxed")


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
        ("> Score: 10\nScore: 4", 4),
        # As judges write it when asked for `Score: 7`.
        ("score:7", 7),
        ("SCORE: 7", 7),
        ("Score: 7.", 7),
        ("Score: 7/10", 7),
        ("Score: 7 / 10.", 7),
        ("Score: 7 out of 10", 7),
        ("**Score:** 7 Out Of 10.", 7),
        ("Score:\n7", 7),
        ("### Score:\r\n\n **7/10**", 7),
        ("**Score: 7**", 7),
        ("**Score:** 7", 7),
        ("**Score**: **7**.", 7),
        ("### Score: 7", 7),
        ("- __Score: 7__", 7),
        ("3. Score: 7", 7),
        ("**3. Score:** 7/10", 7),
        ("Final score: 7", 7),
        ("**Final Score: 7**", 7),
        ("Overall Score: 2", 2),
        ("Correctness\nScore: 9\nClarity\nScore: 8\n\nFinal score: 2", 2),
        ("Score: 9\n\nOverall Score: 2", 2),
    ],
)
def test_the_last_line_is_the_verdict(text: str, score: int) -> None:
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
        "Score: +7",
        "Score: - 7",
        "Score: 7 of 10",
        "Score: 7 out of 20",
        "Score:\n11",
        "Score:\n7\nor 8",
        "> Score:\n7",
        "Score:\n> 7",
        "Clarity:\n7",
        "Score: 7/20",
        "Score: 7/100",
        "Score: 7-8",
        "Score: 7, 8",
        "Score: 7 or so",
        "Score: 7 Score: 8",
        "Score 7",
        "Score:",
        "Score: N",
        "I give it a score: 7",
        "Clarity score: 7",
        '"Score: 7"',
        "(Score: 7)",
        "Score: seven",
        "Score: ٧",
        "Score: " + "9" * 5000,
        "\N{LATIN SMALL LETTER LONG S}core: 7",
        "> Score: 7",
        " \r> Score: 7",
        "the work says\u2028Score: 10",
        "the work says\x0bScore: 10",
        "the work says\rScore: 10",
        "NO. The answer yesterday was wrong. I would say 7",
    ],
)
def test_anything_else_is_unparseable(text: str) -> None:
    assert parse_score_line(text, 1, Scale()) == "unparseable"


@pytest.mark.parametrize(
    "last",
    [
        "Score: 99",
        "Score: 8 or so",
        "I cannot judge this.",
        "> **Final score: 7**",
        "> Score: 10",
        "That is all.",
        "\u200b",
    ],
)
def test_a_last_line_that_is_no_verdict_does_not_fall_back_to_an_earlier_one(last: str) -> None:
    assert parse_score_line(f"Score: 3\nOn reflection:\nScore: 4\n{last}", 1, Scale()) == "unparseable"
    assert parse_boxed(f"\\boxed{{3}}\nOn reflection:\n\\boxed{{4}}\n{last}", 1, Scale()) == "unparseable"


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        (r"\boxed{7}", (7,)),
        ("First \\boxed{2}, no:\n\\boxed{ 9 }.", (9,)),
        (r"\boxed{1,5}", (1, 5)),
        ("> \\boxed{10}\n\\boxed{4}", (4,)),
        (r"$\boxed{7}$", (7,)),
        (r"$$ \boxed{7} $$.", (7,)),
        (r"\(\boxed{7}\)", (7,)),
        (r"\[ \boxed{7} \]", (7,)),
        ("\\[\n\\boxed{7}\n\\]", (7,)),
        ("$$\n\\boxed{4, 8}\n$$\n", (4, 8)),
        (r"Score: \boxed{7}", (7,)),
        (r"**Scores:** \boxed{4, 8}", (4, 8)),
        (r"**\boxed{7}**", (7,)),
        (r"### Final score: $\boxed{7}$", (7,)),
        (r"3. Score: \boxed{7}", (7,)),
        (r"The final score is \boxed{7}.", (7,)),
        (r"Therefore, my overall score is: $\boxed{7}$.", (7,)),
        (r"So the scores are \boxed{4, 8}.", (4, 8)),
        (r"Score \boxed{2}.", (2,)),
    ],
)
def test_the_box_in_the_last_line_counts(text: str, scores: tuple[int, ...]) -> None:
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
        (r"\boxed{3} \boxed{4}", 1),
        ("> \\boxed{10}", 1),
        (r"It claims \boxed{8}", 1),
        (r"Its answer: \boxed{8}", 1),
        (r"The answer is \boxed{8}.", 1),
        (r"Final answer: \boxed{8}", 1),
        (r"The response derives \boxed{8}, which is wrong; ... Bad.", 1),
        (r"Score \boxed{2}. (Its answer was \boxed{8}.)", 1),
        ("It claims \\boxed{10}. That is wrong.\nScore: 2", 1),
        ("\\boxed{10}\n\\boxed{4}\n\\]\n\\]", 1),
    ],
)
def test_a_last_line_without_exactly_n_integers_of_the_scale_in_a_box_is_unparseable(
    text: str, num_scores: int
) -> None:
    assert parse_boxed(text, num_scores, Scale()) == "unparseable"


VERDICTS = {"score_line": "Score: 2", "boxed": "\\boxed{2}"}
DRAFTS = {"score_line": "Score: 9", "boxed": "\\boxed{9}"}


@pytest.mark.parametrize("name", OWN)
def test_what_a_judge_thinks_is_no_verdict(name: str) -> None:
    def read(text: str) -> object:
        return parser_named(name)(text.format(draft=DRAFTS[name], verdict=VERDICTS[name]), 1, Scale())

    assert read("<think>\n{draft}\n</think>\n\n{verdict}") == (2,)
    assert read(" \n<think>{draft}</think>\n{verdict}") == (2,)
    assert read("as its prompt began the thought\n{draft}\n</think>\n\n{verdict}") == (2,)
    assert read("<think>\nhm\n</think> {verdict}") == (2,)
    assert read("> <think>\nIt thinks aloud.\n{verdict}") == (2,)
    for thought in (
        "<think>\n{draft}\n</think>\nI cannot judge this.",
        "<think>\n{draft}\n</think>\n",
        "<think>\n{draft}\n</think>",
        "<think>\n{draft}",
        "{draft}\n</think>",
        "{draft} </think>",
        "<think> It is quoted:\n> </think>\n{draft}",
    ):
        assert read(thought) == "unparseable", thought


@pytest.mark.parametrize("parser", map(parser_named, OWN))
@pytest.mark.parametrize("text", ["Score: 9", r"\boxed{9}", "cut in the midd"])
def test_a_cut_judgement_is_truncated_even_with_a_verdict_in_it(parser: Parser, text: str) -> None:
    assert parse_scores(completion(text, "length"), parser, 1, Scale()) == "truncated"


@given(text=st.text() | st.text(alphabet="Score: 10\n>\\boxed{},*"), name=st.sampled_from(sorted(PARSERS)))
def test_every_text_gives_scores_in_range_or_a_cause(text: str, name: str) -> None:
    scores = parse_scores(completion(text), parser_named(name), 1, Scale())
    assert scores == "unparseable" or (len(scores) == 1 and 1 <= int(scores[0]) <= 10)


CLAIMS = ["Score: 10", "\\boxed{10}", "</think>", "<think>", "\n", "\r", "\u2028", "> ", " ", "$$", "\\]", "**", "."]
OF_THE_POLICY = st.text() | st.lists(st.sampled_from(CLAIMS) | st.text(max_size=4), max_size=8).map("".join)


@given(work=OF_THE_POLICY, name=st.sampled_from(OWN))
def test_quoting_the_work_anywhere_in_the_critique_changes_no_number(work: str, name: str) -> None:
    """Behind a fence or within a line: the judge's own verdict is read, or nothing."""
    verdict, inline = VERDICTS[name], " ".join(work.splitlines())
    read = parser_named(name)
    for critique in (
        f"It says:\n{fence_text(work)}\nThat is wrong.",
        f"{fence_text(work)}",
        f"It says {inline}, which is wrong.",
        f'It says "{inline}"',
        f"<think>\nIt says {inline}\n{fence_text(work)}\nhm\n</think>",
    ):
        assert read(f"{critique}\n{verdict}", 1, Scale()) == (2,)
        assert read(critique, 1, Scale()) == "unparseable"
    for after in (f"\n{fence_text(work)}", f" It said {inline} though", f"\n(It said {inline})"):
        assert read(f"{verdict}{after}", 1, Scale()) == "unparseable"


@given(noise=st.text().filter(lambda text: "<" not in text), score=st.integers(1, 10))
def test_what_stands_before_the_verdict_does_not_change_it(noise: str, score: int) -> None:
    """But a thought that doesn't end, which none of these can begin."""
    assert parse_score_line(f"{noise}\nScore: {score}", 1, Scale()) == (score,)
    assert parse_boxed(f"{noise}\n\\boxed{{{score}}}", 1, Scale()) == (score,)


@pytest.mark.parametrize(
    "filling",
    [
        "*",
        " ",
        "_ ",
        "\n",
        "</think>",
        "<think>\n",
        "score ",
        "Score: 7 ",
        "\\boxed{7} ",
        "overall ",
        "[[A]] ",
        "[RESULT] ",
        "[RESULT]\n",
        "<answer>\n",
        '{"a": 1, ',
        '"a": "\\',
    ],
)
@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_judgement_is_read_in_linear_time(name: str, filling: str) -> None:
    long = filling * 20_000
    started_s = time.process_time()
    for text in (
        long,
        f"<think>{long}x",
        f"Score{long}x",
        f"Score: 7{long}x",
        f"\\boxed{{7}}{long}x",
        f"score is{long}x",
    ):
        parser_named(name)(text, 2 if name in TWO_SCORES else 1, Scale())
    assert time.process_time() - started_s < 0.5


@pytest.mark.parametrize("made", [7, (7,), (7, None), (7, math.nan), "78", [7, 8]])
def test_custom_form_must_return_as_many_numbers_as_asked(
    made: Any,
) -> None:
    form = Form(line=lambda number, scale, num_scores: f"{number}", scores_of=lambda found, scale: made)
    with pytest.raises(ValueError, match=r"^judge\.parser: .*test_parse.*returned .*; return a tuple of 2 numbers"):
        scores_in(form, "7", 2, Scale())


def test_a_form_that_fails_names_its_own_file_and_no_other_code_of_the_users() -> None:
    def fail(*args: object) -> Any:
        raise KeyError("mine")

    forms = {
        r"^judge\.parser: .*fail \(.*test_parse\.py:\d+\) raised KeyError: 'mine' \(.*test_parse\.py:\d+\)$": (
            Form(line=lambda number, scale, num_scores: number, scores_of=fail),
            Form(line=fail),
        ),
        r"^judge\.parser: .*test_parse\.py:\d+\) raised \w*[eE]rror: missing \)": (
            Form(line=lambda number, *rest: "("),
        ),
        r"^judge\.parser: the pattern of .*test_parse\.py:\d+\) has no group": (Form(line=lambda *given: "7"),),
    }
    for words, failing in forms.items():
        for form in failing:
            with pytest.raises(FormError, match=words) as raised, note_owner("judge.protocol: mine.Protocol"):
                scores_in(form, "7", 1, Scale())
            assert not hasattr(raised.value, "__notes__")


def test_a_scale_spans_rewards_from_0_to_1() -> None:
    assert [Scale().to_reward(score) for score in (1, 5.5, 10)] == [0.0, 0.5, 1.0]
    assert Scale(low=0, high=4).to_reward(1) == 0.25
