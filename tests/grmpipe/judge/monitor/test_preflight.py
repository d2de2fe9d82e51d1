"""A judge with unparseable answers, or without any, is found before the first step."""

from __future__ import annotations

from typing import Any

import pytest
from configs import judge_config

from grmpipe.config.judge import JudgeConfig, JudgeEntry
from grmpipe.config.reward import RewardConfig, RewardTree
from grmpipe.judge.composition.composed_judge import compose_judge, get_members
from grmpipe.judge.monitor.preflight import preflight_judgement, preflight_judgements
from grmpipe.models.types import EngineDied, EngineRefused

PAIRS = {"protocol": "pairwise", "template": "pairwise", "parser": "boxed", "vote": "majority", "num_judgements": 2}
LIST = {"protocol": "listwise", "template": "listwise", "parser": "boxed"}


def told(bench: Any, answer: Any, **config: Any) -> str | None:
    judge, _ = bench.generative(lambda prompt, context: answer, **config)
    return bench.run(preflight_judgement(judge, judge_config(**config), [bench.prompt()]))


@pytest.mark.parametrize("config", [{}, {"template": "boxed", "parser": "boxed"}, PAIRS, LIST])
def test_a_parser_that_never_matches_is_named_with_what_it_could_not_read(bench: Any, config: dict) -> None:
    said = told(bench, bench.answer("I like it."), **config)
    assert said is not None and said.startswith(f"parser: {judge_config(**config).parser} could read none of")
    assert "no clear verdict in its last line, 'I like it.'" in said and "judge.template" in said


def test_judgements_that_are_all_cut_name_their_length(bench: Any) -> None:
    said = told(bench, bench.answer("Score: 1", "length"), max_new_tokens=9)
    assert said is not None and said.startswith(
        "max_new_tokens: 4 of 4 preflight judgements were truncated at 9 tokens"
    )


@pytest.mark.parametrize(("answer", "config"), [("Score: 3", {}), ("\\boxed{3, 4}", PAIRS), ("\\boxed{3, 4}", LIST)])
def test_a_judge_that_can_be_read_passes(bench: Any, answer: str, config: dict) -> None:
    assert told(bench, bench.answer(answer), **config) is None


def test_one_readable_answer_is_enough(bench: Any) -> None:
    def author(prompt: str, context: Any) -> Any:
        return bench.answer("Score: 3" if context.request_id.endswith("/1/j0.1") else "hm")

    judge, _ = bench.generative(author)
    assert bench.run(preflight_judgement(judge, JudgeConfig(), [bench.prompt()])) is None


def test_judgements_that_are_all_refused_name_the_model_and_the_reason(bench: Any) -> None:
    said = told(bench, EngineRefused("host ended an answer with finish_reason 'error'"))
    assert said is not None and said.startswith(
        "model: all 2 preflight judgements failed as refused; the last one: host"
    )
    assert "finish_reason 'error'; type judge.model=" in said


def test_judgements_that_all_come_too_late_name_their_limit(bench: Any) -> None:
    said = told(bench, bench.answer("Score: 3", delay_s=99), limits={"timeout_s": 20})
    assert said is not None and said.startswith(
        "limits.timeout_s: all 2 preflight judgements failed: no answer within 20"
    )


def test_an_engine_that_answers_nothing_is_no_fault_of_a_key(bench: Any) -> None:
    with pytest.raises(ValueError, match="^judge: all 2 preflight judgements failed, .*; the last one: nobody listens"):
        told(bench, EngineDied("nobody listens"))


def test_failures_of_several_causes_are_left_to_the_run(bench: Any) -> None:
    def author(prompt: str, context: Any) -> Any:
        return EngineRefused("no") if "/0/" in context.request_id else EngineDied("killed")

    judge, _ = bench.generative(author)
    assert bench.run(preflight_judgement(judge, JudgeConfig(), [bench.prompt()])) is None


def test_a_further_judge_that_a_gate_would_ask_late_is_tried_and_named_by_its_own_keys(bench: Any) -> None:
    gate, _ = bench.generative(lambda prompt, context: bench.answer("Score: 1"))
    late, _ = bench.generative(lambda prompt, context: bench.answer("I like it."))
    configs = {"judge": JudgeConfig(), "second": JudgeEntry.of(JudgeConfig(), "second")}
    composed = compose_judge(
        RewardTree.of(RewardConfig(kind="gate", gate="judge", inner="second")),
        {"judge": gate, "second": late},
        configs,
        seed=0,
    )
    said = bench.run(preflight_judgements(composed, get_members(composed), configs, [bench.prompt()]))
    assert said.startswith("judges.second.parser: score_line could read none of 4 preflight judgements")
    assert "type a judges.second.template (and its judges.second.parser)" in said
    assert said.endswith("or judges.second.format.structured=true if its engine has a grammar")


def test_a_single_judge_is_named_by_its_section(bench: Any) -> None:
    judge, _ = bench.generative(lambda prompt, context: bench.answer("I like it."))
    said = bench.run(preflight_judgements(judge, get_members(judge), {"judge": JudgeConfig()}, [bench.prompt()]))
    assert said.startswith("judge.parser: score_line could read none of")
