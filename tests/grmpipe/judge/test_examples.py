"""Examples before a judge's question: which, in which words, and never on the prompt that is judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from grmpipe.config.judge import ExamplesConfig, JudgeConfig, Scale
from grmpipe.judge.examples import write_verdict
from grmpipe.judge.parse import parser_named
from grmpipe.judge.prompt import JudgePrompt
from grmpipe.models.types import Message
from grmpipe.types import Prompt

ROWS = (
    {"prompt": "How many legs has a spider?", "response": "eight", "score": 10},
    {"prompt": "How many legs has an ant?", "response": "eight", "score": 2},
    {"prompt": "What is the capital of France?", "response": "Paris, I think", "score": 7},
    {"prompt": "How many legs has a dog?", "responses": ["four", "five"], "best": 0},
)
ELEPHANT = "How many legs has an elephant?"


def under(folder: Path, count: int = 2, **judge: object) -> JudgeConfig:
    path = folder / "labels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    made = replace(JudgeConfig(), template="pointwise", examples=ExamplesConfig(path=str(path), count=count))
    return replace(made, **judge)  # type: ignore[arg-type]


def ask(judge: JudgeConfig, question: str) -> tuple[Message, ...]:
    prompt = Prompt(prompt_id="p", messages=(Message(role="user", content=question),))
    return JudgePrompt.of(judge).render(prompt, "what it wrote")


def test_the_nearest_examples_come_last_and_each_is_asked_as_the_judge_asks(tmp_path: Path) -> None:
    spider, ten, ant, two, question = ask(under(tmp_path), ELEPHANT)
    prompt = Prompt(prompt_id="p", messages=(Message(role="user", content=ELEPHANT),))
    assert (question,) == JudgePrompt.load("pointwise").render(prompt, "what it wrote")
    assert (ten.role, ten.content) == ("assistant", "Score: 10") and "a spider?" in spider.content
    assert (two.role, two.content) == ("assistant", "Score: 2") and "an ant?" in ant.content, "the nearest one is last"
    assert ask(under(tmp_path, count=1), ELEPHANT) == (ant, two, question)


def test_no_example_is_on_the_prompt_that_is_judged(tmp_path: Path) -> None:
    asked = ask(under(tmp_path, count=3), "how many LEGS has a spider?")
    assert sum(one.role == "assistant" for one in asked) == 2, "its own label is none, and rankings are none"
    assert not any("a spider?" in one.content for one in asked[:-1])


@pytest.mark.parametrize(
    ("template", "parser", "score", "verdict"),
    [
        ("pointwise", "score_line", 7.0, "Score: 7"), ("short", "score", 3.0, "3"),
        ("boxed", "boxed", 4.0, "\\boxed{4}"), ("yes_no", "yes_no", 9.0, "Yes"), ("yes_no", "yes_no", 2.0, "No"),
    ],
)  # fmt: skip
def test_the_answer_of_an_example_is_what_the_parser_reads(
    template: str, parser: str, score: float, verdict: str
) -> None:
    judge = JudgeConfig(template=template, parser=parser)
    written = write_verdict(judge, score, JudgePrompt.load(template).example)
    assert written == verdict
    read = parser_named(parser)(written, 1, Scale())
    assert read == ((score,) if parser != "yes_no" else (10,) if score > 5 else (1,))


def test_examples_that_cannot_be_shown_are_refused_by_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"examples\.path: examples are single responses, and a pairwise"):
        under(tmp_path, protocol="pairwise", template="pairwise", parser="boxed", num_judgements=2, vote="majority")
    judge = under(tmp_path)
    Path(str(judge.examples.path)).write_text(json.dumps(ROWS[-1]) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"examples\.path: .* holds rankings only"):
        JudgePrompt.of(replace(judge, examples=ExamplesConfig(path=str(judge.examples.path), count=1)))
