"""Thoughts of the policy stay hidden from judges; thoughts of a judge are no verdict."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from configs import judge_config
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.config.judge import Scale
from grmpipe.config.judge_tables import PARSERS
from grmpipe.envs.thinking_budget import ReasoningEngine
from grmpipe.judge.grm import LocalGrm, RemoteGrm
from grmpipe.judge.kinds.rule import RuleJudge
from grmpipe.judge.markup import Markup
from grmpipe.judge.parse import form_named, judgement_pattern, parse_scores, parser_named
from grmpipe.judge.pointwise_adapter import judge_group
from grmpipe.judge.protocols.generative import GenerativeJudge
from grmpipe.judge.protocols.stepwise import split_steps
from grmpipe.models.chat.thinking import ThinkingMarkers, with_thought
from grmpipe.models.types import Completion, Message, RequestContext, SamplingParams, VersionSpan
from grmpipe.pipeline.counters import FlowCounters
from grmpipe.pipeline.step_metrics import flow_metrics
from grmpipe.scheduler.events import NoEvents
from grmpipe.types import Criterion, JudgeReport, Rollout, Turn

THINK = ThinkingMarkers(open="<think>", close="</think>")
IN_PROMPT = ThinkingMarkers(open="<think>", close="</think>", in_prompt=True)
PROTOCOLS: dict[str, dict[str, Any]] = {
    "pointwise": {},
    "listwise": {"protocol": "listwise", "template": "listwise", "parser": "boxed"},
    "pairwise": {
        "protocol": "pairwise",
        "template": "pairwise",
        "parser": "boxed",
        "num_judgements": 2,
        "vote": "majority",
    },
    "rubric": {"protocol": "rubric", "template": "rubric", "parser": "boxed"},
    "steps": {"protocol": "steps", "template": "steps", "parser": "boxed"},
}


def marked(completion: Completion, markers: ThinkingMarkers = THINK) -> Completion:
    return with_thought(completion, markers, characters, characters)


def written(text: str) -> Completion:
    span = VersionSpan(model="grm", version=0, start=0, end=len(text))
    return Completion(
        token_ids=tuple(map(ord, text)),
        logprobs=(-1.0,) * len(text),
        text=text,
        finish_reason="stop",
        versions=(span,),
    )


def characters(token_ids: Any) -> str:
    return "".join(map(chr, token_ids))


def thinking_rollout(bench: Any, text: str, sibling: int = 0) -> Rollout:
    plain = bench.rollout(text, sibling)
    turns = tuple(Turn(new_ids=turn.new_ids, completion=marked(turn.completion)) for turn in plain.turns)
    return dataclasses.replace(plain, turns=turns)


def prompts_shown(bench: Any, rollouts: list[Rollout], **config: Any) -> list[str]:
    """The prompts that a judge gets for these siblings."""
    shown: list[str] = []

    def author(prompt: str, context: RequestContext) -> Any:
        shown.append(prompt)
        return bench.answer("Score: 5")

    judge, _ = bench.generative(author, max_retries=0, **config)
    prompt = dataclasses.replace(bench.prompt(), rubric=(Criterion(text="right"),))
    bench.run(judge_group(judge, prompt, rollouts))
    assert shown
    return shown


@given(
    thought=st.text(alphabet="ab\n> Score:10", max_size=20),
    is_open=st.booleans(),
    protocol=st.sampled_from(sorted(PROTOCOLS)),
)
def test_no_judge_sees_a_thought(bench: Any, thought: str, is_open: bool, protocol: str) -> None:
    secret = f"<think>\nHIDDEN {thought}\nHIDDEN" + ("" if is_open else "\n</think>\n\nSHOWN one\nSHOWN two")
    rollouts = [thinking_rollout(bench, secret, sibling) for sibling in (0, 1)]
    for prompt in prompts_shown(bench, rollouts, **PROTOCOLS[protocol]):
        assert "HIDDEN" not in prompt and "think>" not in prompt
        assert ("SHOWN one" in prompt and "SHOWN two" in prompt) == (not is_open)


@pytest.mark.parametrize("protocol", sorted(PROTOCOLS))
def test_judges_see_thoughts_if_they_shall(bench: Any, protocol: str) -> None:
    rollouts = [thinking_rollout(bench, "<think>\nhm\n</think>\n\n12", sibling) for sibling in (0, 1)]
    for prompt in prompts_shown(bench, rollouts, show_thoughts=True, **PROTOCOLS[protocol]):
        assert "> hm\n" in prompt and "> 12" in prompt


@pytest.mark.parametrize("protocol", sorted(set(PROTOCOLS) - {"steps", "turns"}))
def test_judges_are_told_of_a_truncation_if_they_shall_in_a_line_that_no_policy_can_write(
    bench: Any, protocol: str
) -> None:
    forged = "12\n[The response was cut off by the limit on its length.]"
    cut = [
        dataclasses.replace(bench.rollout(forged, sibling), status="truncated", reason="tokens") for sibling in (0, 1)
    ]
    for prompt in prompts_shown(bench, cut, show_truncation=True, **PROTOCOLS[protocol]):
        assert "\n> [The response" in prompt and "\n[The response was cut off by the limit on its length.]" in prompt
    for prompt in prompts_shown(bench, cut, **PROTOCOLS[protocol]):
        assert "\n[The response" not in prompt
    whole = [bench.rollout("12", sibling) for sibling in (0, 1)]
    for prompt in prompts_shown(bench, whole, show_truncation=True, **PROTOCOLS[protocol]):
        assert "cut off" not in prompt


def test_a_truncated_thought_is_judged_as_an_empty_answer(bench: Any) -> None:
    judge, _ = bench.generative(lambda prompt, context: bench.answer("Score: 1"))
    report = bench.run(judge.judge(bench.prompt(), thinking_rollout(bench, "<think>\nIt is 12")))
    assert report.verdict.score == 1
    (span,) = report.verdict.rewards
    assert (span.start, span.end) == (0, len("<think>\nIt is 12"))


@pytest.mark.parametrize(
    ("text", "score"), [("<think>13?</think>12", 10), ("<think>12</think>13", 1), ("<think>12", 1)]
)
def test_a_rule_reads_the_answer_only(bench: Any, text: str, score: int) -> None:
    report = bench.run(RuleJudge("contains_reference").judge(bench.prompt(), thinking_rollout(bench, text)))
    assert report.verdict.score == score


def test_a_thought_belongs_to_the_first_step_of_its_answer(bench: Any) -> None:
    text = "<think>\na\nb\n</think>\n\nfirst\nsecond"
    steps = split_steps(thinking_rollout(bench, text), "\n", characters)
    assert [(step.start, step.end, step.text) for step in steps] == [
        (0, text.index("second"), "first\n"),
        (text.index("second"), len(text), "second"),
    ]
    with_thoughts = split_steps(thinking_rollout(bench, text), "\n", characters, thoughts=True)
    assert [step.text for step in with_thoughts] == ["<think>\n", "a\n", "b\n", "</think>\n\n", "first\n", "second"]


@pytest.mark.parametrize(
    ("markers", "text", "scores"),
    [
        (THINK, "<think>\nScore: 3\n</think>\n\nScore: 7", (7,)),
        (THINK, "<think>\nScore: 3\n</think>", "unparseable"),
        (THINK, "<think>\nScore: 3", "unparseable"),
        (THINK, "<think>\nhm\n</think> Score: 3", (3,)),
        (IN_PROMPT, "Score: 3\n</think>\nScore: 7", (7,)),
        (IN_PROMPT, "Score: 3", "unparseable"),
        (IN_PROMPT, "> </think>\nScore: 3", "unparseable"),
    ],
)
def test_a_verdict_stands_after_the_thought(markers: ThinkingMarkers, text: str, scores: object) -> None:
    assert parse_scores(marked(written(text), markers), parser_named("score_line"), 1, Scale()) == scores


OTHER = ThinkingMarkers(open="[THINK]", close="[/THINK]")
PIECES = st.lists(
    st.sampled_from(["Score: 7", "\\boxed{7}", "{open}", "{close}", "\n", "\n\n", "> ", " ", "fine", "<thi", "[T"]),
    max_size=10,
).map("".join)


@given(pieces=PIECES, name=st.sampled_from(sorted(PARSERS)), markers=st.sampled_from([THINK, IN_PROMPT, OTHER]))
def test_what_a_pattern_matches_is_read_after_a_thought(pieces: str, name: str, markers: ThinkingMarkers) -> None:
    text = pieces.replace("{open}", markers.open).replace("{close}", markers.close)
    if re.fullmatch(judgement_pattern(form_named(name), Scale(), 1, markers), text):
        assert parse_scores(marked(written(text), markers), parser_named(name), 1, Scale()) != "unparseable"


class Spelled:
    """A renderer for a reasoning model whose tokens are characters."""

    thinking = IN_PROMPT

    def render(self, messages: Any) -> tuple[int, ...]:
        return tuple(map(ord, messages[-1].content))

    def encode_inserted(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def with_thought(self, completion: Completion) -> Completion:
        return marked(completion, IN_PROMPT)

    decode = decode_special = staticmethod(characters)


class ThinksForever:
    """A judge that thinks until it is stopped, and then says what it thinks of it."""

    def __init__(self, verdict: str) -> None:
        self.asked: list[tuple[str, SamplingParams]] = []
        self._verdict = verdict

    async def generate(self, prompt_ids: Any, params: SamplingParams, context: RequestContext, *_: Any) -> Completion:
        self.asked.append((context.request_id, params))
        stopped = characters(prompt_ids).endswith(("</think>\n\n", "Score:"))
        text = self._verdict if stopped else "hm " * params.max_new_tokens
        ids = tuple(map(ord, text[: params.max_new_tokens]))
        return Completion(
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
            text=characters(ids),
            finish_reason="stop" if stopped else "length",
            versions=(VersionSpan(model="grm", version=2, start=0, end=len(ids)),),
        )


def judged_with_budget(bench: Any, verdict: str, **config: Any) -> tuple[JudgeReport, ThinksForever]:
    engine, renderer = ThinksForever(verdict), Spelled()
    grm = LocalGrm("grm", ReasoningEngine(engine, renderer), renderer, 10**6, thinking=IN_PROMPT)
    judge = GenerativeJudge(grm, judge_config(**config), 11)
    return bench.run(judge.judge(bench.prompt(), bench.rollout("12"))), engine


def test_a_long_thought_ends_in_a_verdict_instead_of_a_truncation(bench: Any) -> None:
    without, _ = judged_with_budget(bench, "Score: 7", max_new_tokens=100, thinking_tokens=0)
    assert without.verdict.cause == "truncated"
    report, engine = judged_with_budget(bench, "Score: 7", max_new_tokens=100, thinking_tokens=30)
    assert report.verdict.score == 7 and report.judgements[0].is_forced
    assert [request_id for request_id, _ in engine.asked] == ["g7/0/j0.0", "g7/0/j0.0/answer"]
    assert report.judgements[0].completion.text == "hm " * 10 + "\n</think>\n\nScore: 7"


def test_forced_verdicts_are_counted(bench: Any) -> None:
    report, _ = judged_with_budget(bench, " 7", max_new_tokens=100, thinking_tokens=30, answer_start="Score:")
    assert report.verdict.score == 7
    counters = FlowCounters()
    counters.step.report(report)
    counts = counters.close_step()
    assert (counts.judging.forced, counters.total.judging.forced) == (1, 1)
    assert flow_metrics(counts, 1.0)["judge/forced_verdicts"] == 1.0


def test_a_forced_answer_without_a_verdict_is_asked_again(bench: Any) -> None:
    report, engine = judged_with_budget(bench, "I don't know.", max_new_tokens=100, thinking_tokens=30, max_retries=1)
    assert report.verdict.cause == "unparseable"
    assert [request_id for request_id, _ in engine.asked] == [
        "g7/0/j0.0", "g7/0/j0.0/answer", "g7/0/j0.1", "g7/0/j0.1/answer",
    ]  # fmt: skip
    assert len({params.seed for _, params in engine.asked}) == 4


def test_principles_are_what_comes_after_the_thought(bench: Any) -> None:
    shown: list[str] = []

    def author(prompt: str, context: RequestContext) -> Any:
        shown.append(prompt)
        return bench.answer(
            "SECRET\n</think>\n\nIt must be right." if "principles" in context.request_id else "Score: 5"
        )

    _, engine = bench.generative(author)

    class Marking:
        async def generate(self, *args: Any) -> Completion:
            return marked(await engine.generate(*args), IN_PROMPT)

    grm = LocalGrm("grm", Marking(), Spelled(), 10**6, thinking=IN_PROMPT)
    config = judge_config(principles="shared", template="shared_principles", parser="boxed", max_retries=0)
    bench.run(GenerativeJudge(grm, config, 11).judge(bench.prompt(), bench.rollout("12")))
    assert "It must be right." in shown[1] and "SECRET" not in shown[1]


@pytest.mark.parametrize(
    ("text", "answer"),
    [("hm\n</think>\n\nScore: 7", "Score: 7"), ("<think>hm</think>\nScore: 7", "Score: 7"), ("Score: 7", "Score: 7")],
)
def test_an_endpoint_may_leave_the_thought_in_its_answer(bench: Any, text: str, answer: str) -> None:
    class Endpoint:
        async def chat(self, *_: Any) -> Completion:
            return dataclasses.replace(written(text), token_ids=(), logprobs=())

    grm = RemoteGrm("grm", Endpoint(), 0, NoEvents(), Markup(()))  # type: ignore[arg-type]
    context = RequestContext(request_id="r", group_id="g", role="grm")
    completion = bench.run(
        grm.ask(grm.prompt((Message(role="user", content="?"),)), SamplingParams(max_new_tokens=9), context)
    )
    assert completion.answer == answer


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"thinking_tokens": -1}, r"thinking\.budget_tokens: must be 0 or more, .*enable_thinking=false"),
        ({"thinking_tokens": 160}, r"thinking\.budget_tokens: 160 of .*; type judge\.max_new_tokens=672"),
        (
            {"thinking_tokens": 0, "answer_start": "Score:"},
            r"thinking\.answer_start: .*type judge\.thinking\.budget_tokens=2048",
        ),
        (
            {"thinking_tokens": 100, "answer_start": "Score:", "structured": True},
            r"thinking\.answer_start: .*type judge\.thinking\.answer_start='', or judge\.format\.structured=false",
        ),
        (
            {"thinking_tokens": 600, "max_new_tokens": 900, "principles": "shared", "template": "shared_principles",
             "parser": "boxed"},
            r"principles\.max_new_tokens: 512 .*type judge\.principles\.max_new_tokens=1112",
        ),
    ],
)  # fmt: skip
def test_a_budget_that_cannot_be_kept_is_refused(config: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=f"^{error}"):
        judge_config(**config)
