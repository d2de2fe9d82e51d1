"""A judge with unparseable answers is found before the first step; one without answers is left to the run."""

from __future__ import annotations

from typing import Any

import pytest

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.key_errors import under_key
from grmpipe.judge.monitor.preflight import preflight_judgement
from models.types import EngineDied

PAIRS = {"protocol": "pairwise", "template": "pairwise", "parser": "boxed", "vote": "majority", "num_judgements": 2}
LIST = {"protocol": "listwise", "template": "listwise", "parser": "boxed"}


def told(bench: Any, answer: Any, **config: Any) -> str | None:
    judge, _ = bench.generative(lambda prompt, context: answer, **config)
    return bench.run(preflight_judgement(judge, JudgeConfig(**config), [bench.prompt()]))


@pytest.mark.parametrize("config", [{}, {"template": "boxed", "parser": "boxed"}, PAIRS, LIST])
def test_a_parser_that_never_matches_is_named_with_what_it_could_not_read(bench: Any, config: dict) -> None:
    said = told(bench, bench.answer("I like it."), **config)
    assert said is not None and said.startswith(f"parser: {JudgeConfig(**config).parser} could read none of")
    assert "it ends with 'I like it.'" in said and "judge.template" in said


def test_judgements_that_are_all_cut_name_their_length(bench: Any) -> None:
    said = told(bench, bench.answer("Score: 1", "length"), max_new_tokens=9)
    assert said is not None and said.startswith(
        "max_new_tokens: 4 of 4 preflight judgements were truncated at 9 tokens"
    )


@pytest.mark.parametrize(("answer", "config"), [("Score: 3", {}), ("\\boxed{3, 4}", PAIRS), ("\\boxed{3, 4}", LIST)])
def test_a_judge_that_can_be_read_passes(bench: Any, answer: str, config: dict) -> None:
    assert told(bench, bench.answer(answer), **config) is None


def test_one_readable_answer_is_enough_and_a_dead_engine_proves_nothing(bench: Any) -> None:
    def author(prompt: str, context: Any) -> Any:
        return bench.answer("Score: 3" if context.request_id.endswith("/1/j0.1") else "hm")

    judge, _ = bench.generative(author)
    assert bench.run(preflight_judgement(judge, JudgeConfig(), [bench.prompt()])) is None
    assert told(bench, EngineDied("killed")) is None


def test_what_is_said_of_a_further_judge_names_its_own_keys(bench: Any) -> None:
    said = told(bench, bench.answer("I like it."))
    assert said is not None
    error = under_key("judges.second.", said)
    assert error.startswith("judges.second.parser: score_line could read none of")
    assert "type a judges.second.template (and its judges.second.parser)" in error
    assert "or judges.second.structured=true" in error
