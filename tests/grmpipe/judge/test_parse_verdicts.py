"""Verdicts as judges write them: clear ones are read as they are meant, no other is read."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from grmpipe.config.judge import Scale
from grmpipe.config.judge_protocols import SHIPPED_TEMPLATES
from grmpipe.config.judge_tables import PARSERS, TWO_SCORES
from grmpipe.judge.parse import parser_named
from grmpipe.judge.prompt import JudgePrompt
from grmpipe.models.types import Message
from grmpipe.types import Criterion, Prompt

PATH = Path(__file__).with_name("verdicts.jsonl")
VERDICTS = [json.loads(line) for line in PATH.read_text(encoding="utf-8").splitlines()]


def read(row: dict[str, Any]) -> tuple[object, object]:
    """What is read and what is meant: scores, or unparseable."""
    parser, meant, scale = row["parser"], row["meant"], Scale(**row.get("scale", {}))
    num_scores = 2 if parser in (*TWO_SCORES, "boxed", "answer_scores", "scores_field") else 1
    if meant in ("A", "B"):
        meant = (scale.high, scale.low) if meant == "A" else (scale.low, scale.high)
    elif meant is not None:
        meant = tuple(meant) if isinstance(meant, list) else (meant,)
    return parser_named(parser)(row["text"], num_scores, scale), meant or "unparseable"


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_clear_verdicts_are_read_as_meant_and_no_others(parser: str) -> None:
    rows = [row for row in VERDICTS if row["parser"] == parser]
    wrong = [(row["text"], found, meant) for row in rows for found, meant in [read(row)] if found != meant]
    assert rows and not wrong


def test_a_critique_before_a_verdict_changes_nothing() -> None:
    """Every verdict of the table that is read below any critique: no line of it is taken instead, or makes it fail."""
    critique = "1. It adds: 3 + 4 = 7.\n> Score: 10\n\n- **Clarity** 8 of 10 (good)\n"
    for row in VERDICTS:
        is_alone = (
            row["parser"] in ("score", "correct", "grade") or "<think>" in row["text"]
        )  # nothing may be before it
        if not is_alone and not row["text"].startswith("```\nIt adds"):
            found, meant = read(row | {"text": f"{critique}\n{row['text']}"})
            assert found == meant, row["text"]


@pytest.mark.parametrize(
    ("pattern", "text", "score"),
    [
        ("Verdict: ([0-9]+)", "fine\nVerdict: 7", 7),
        ("Verdict: ([0-9]+)", "fine\n**Verdict:** 7 (clear)", 7),
        (r"\*\*Verdict:\*\* ([0-9]+)", "**Verdict:** 7", 7),
        ("(?i)verdict: ([0-9]+)(?:/10)?", "VERDICT: 7/10", 7),
        ("Verdict: (.*)", "Verdict: 7.0", 7),
        ("Verdict: (.*)", "Verdict: 7.5", None),
        ("Verdict: (.*)", "Verdict: seven", None),
        ("Verdict: (.*)", "Verdict: nan", None),
        ("Verdict: ([0-9]+)?", "Verdict: ", None),
        ("Verdict: ([0-9]+)", "Verdict: 11", None),
        ("Verdict: ([0-9]+)", "Verdict: 7 or 8", None),
        ("Verdict: ([0-9]+)", "It says Verdict: 7", None),
        ("Verdict: ([0-9]+)", "Verdict: 7\nfine", None),
        ("Verdict: ([0-9]+)", "> Verdict: 7", None),
        (".*: ([0-9]+)", "x" * 300 + ": 7", None),
    ],
)
def test_a_pattern_of_the_users_reads_the_last_line(pattern: str, text: str, score: int | None) -> None:
    assert parser_named("score_line", pattern)(text, 1, Scale()) == ("unparseable" if score is None else (score,))
    if score == 7 and "7.0" in text:
        assert parser_named("boxed", pattern)(text.replace("7.0", "7.5"), 1, Scale(step=0.5)) == (7.5,)


@pytest.mark.parametrize("pattern", [".*Score.*: ([0-9]+)", ".*a.*b.*([0-9]+)", "[a ]*[a ]*[a ]*([0-9]+)"])
def test_a_long_line_costs_a_pattern_of_the_users_little(pattern: str) -> None:
    started_s = time.process_time()
    for text in ("Score: " * 20_000, "ab" * 150 + "!", "a " * 149 + "!", "a" * 200_000):
        parser_named("score_line", pattern)(text, 1, Scale())
    assert time.process_time() - started_s < 1


@pytest.mark.parametrize("name", sorted(SHIPPED_TEMPLATES))
def test_no_line_of_a_prompt_can_be_copied_as_a_verdict(name: str) -> None:
    """A judge that repeats a line of its prompt, or all of it up to there, has not judged."""
    parser, protocol = SHIPPED_TEMPLATES[name]
    prompt = JudgePrompt.load(name, protocol=protocol, shared_principles="principles" in name or name == "ce_rm")
    work = ["12"] * len(prompt.blanks) if protocol != "listwise" else ["12", "13"]
    asked = Message(role="user", content="What is 6 x 2?")
    task = Prompt(prompt_id="p", messages=(asked,), reference="twelve", rubric=(Criterion(text="Right."),))
    messages = prompt.render(task, *work, principles="Right.")
    lines = [line for message in messages for line in message.content.splitlines()]
    for num_scores in (1, 2):
        for end in range(len(lines)):
            for text in (lines[end], "\n".join(lines[: end + 1])):
                assert parser_named(parser)(text, num_scores, Scale()) == "unparseable", text


def test_the_short_template_shows_no_example_of_a_verdict() -> None:
    assert not JudgePrompt.load("short").example and JudgePrompt.load("pointwise").example == "Score: 10"
