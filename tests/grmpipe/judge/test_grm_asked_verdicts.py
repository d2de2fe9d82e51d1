"""A judgement without a verdict is asked for it, whoever judges, and what is asked for is counted apart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from configs import judge_config

from grmpipe.envs.thinking_budget import ReasoningEngine
from grmpipe.judge.grm import ASK_VERDICT, GrmClient, GrmQuestion, LocalGrm, RemoteGrm
from grmpipe.judge.markup import Markup
from grmpipe.judge.protocols.generative import GenerativeJudge
from grmpipe.models.chat.thinking import ThinkingMarkers, with_thought
from grmpipe.models.engines.openai.openai_engine import OpenAIEngine
from grmpipe.models.settings import OpenAIConfig
from grmpipe.models.types import Completion, EngineDied, Message, RequestContext, SamplingParams, VersionSpan
from grmpipe.pipeline.counters import FlowCounters
from grmpipe.pipeline.step_metrics import flow_metrics
from grmpipe.scheduler.events import NoEvents
from grmpipe.types import Failed, FailedJudgement, Judgement, JudgeReport

END = 0  # the end of a turn
THINK = ThinkingMarkers(open="<think>", close="</think>")


def characters(token_ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in token_ids if token != END)


class Spelled:
    """A renderer whose tokens are characters."""

    thinking = THINK
    stop_token_ids = (END,)
    decode = decode_special = staticmethod(characters)

    def render(self, messages: Any) -> tuple[int, ...]:
        return tuple(map(ord, messages[-1].content))

    def encode_inserted(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def with_thought(self, completion: Completion) -> Completion:
        return with_thought(completion, THINK, characters, characters)


@dataclass
class Says:
    """Says `text`, and `verdict` where it is held to a pattern; both end as far as they have room."""

    text: str
    verdict: str | Exception = "Score: 7"
    asked: list[tuple[str, SamplingParams]] = field(default_factory=list)

    async def generate(self, prompt_ids: Any, params: SamplingParams, context: RequestContext, *_: Any) -> Completion:
        self.asked.append((context.request_id, params))
        said = self.text if params.pattern is None else self.verdict
        if isinstance(said, Exception):
            raise said
        whole = (*map(ord, said), END)
        ids = whole[: params.max_new_tokens]
        return Completion(
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
            text=characters(ids),
            finish_reason="stop" if ids == whole else "length",
            versions=(VersionSpan(model="grm", version=2, start=0, end=len(ids)),),
        )


def judge_once(bench: Any, engine: Says, **config: Any) -> JudgeReport:
    grm = LocalGrm("grm", ReasoningEngine(engine, Spelled()), Spelled(), 10**6, thinking=THINK)  # type: ignore[arg-type]
    settings = {"ask_verdict": True, "max_retries": 1, "max_new_tokens": 200, "thinking_tokens": 0, **config}
    report: JudgeReport = bench.run(
        GenerativeJudge(grm, judge_config(**settings), 11).judge(bench.prompt(), bench.rollout("12"))
    )
    return report


@pytest.mark.parametrize(
    "text",
    [
        "It is right.",
        "right, " * 40,
        "Score: 7, or Score: 3",
        "Score: 11",
        "<think>hm\nScore: 3",
        "<think>" + "hm " * 90,
    ],
    ids=["ended", "truncated", "two scores", "out of range", "a thought", "a truncated thought"],
)
def test_a_judgement_that_cannot_be_read_gets_the_verdict_that_is_asked_for(bench: Any, text: str) -> None:
    report = judge_once(bench, engine := Says(text))
    assert report.verdict.score == 7 and not report.failures  # type: ignore[union-attr]
    (judgement,) = report.judgements
    said = text[: 200 - 56]
    end = "\n</think>" if "think" in text else ""
    assert judgement.completion.text == f"{said}{end}\n\nScore: 7"
    assert len(judgement.completion.token_ids) == len(judgement.completion.logprobs) <= 200
    (first, free), (second, held) = engine.asked
    assert (first, second) == ("g7/0/j0.0", "g7/0/j0.0/verdict")
    assert free.max_new_tokens == 200 - 56 and free.seed != held.seed
    again = Says(text)
    judge_once(bench, again)
    assert again.asked == engine.asked


def test_a_judgement_with_a_verdict_is_asked_for_none(bench: Any) -> None:
    report = judge_once(bench, engine := Says("fine\nScore: 3"))
    assert report.verdict.score == 3 and len(engine.asked) == 1  # type: ignore[union-attr]
    assert report.judgements[0].completion.asked is None


def test_without_the_key_a_judgement_is_sampled_again(bench: Any) -> None:
    report = judge_once(bench, engine := Says("It is right."), ask_verdict=False)
    assert isinstance(report.verdict, Failed) and report.verdict.cause == "unparseable"
    assert [name for name, _ in engine.asked] == ["g7/0/j0.0", "g7/0/j0.1"]
    assert {params.max_new_tokens for _, params in engine.asked} == {200}


def test_a_greedy_judgement_is_asked_too(bench: Any) -> None:
    assert judge_once(bench, Says("It is right."), temperature=0.0).verdict.score == 7  # type: ignore[union-attr]


def test_a_verdict_that_does_not_come_is_a_failure_and_the_judgement_is_sampled_again(bench: Any) -> None:
    report = judge_once(bench, engine := Says("It is right.", verdict="s" * 200))
    assert [failure.cause for failure in report.failures] == ["truncated", "truncated"]
    assert [name for name, _ in engine.asked] == ["g7/0/j0.0", "g7/0/j0.0/verdict", "g7/0/j0.1", "g7/0/j0.1/verdict"]


def test_a_death_while_a_verdict_is_asked_for_is_the_judgements(bench: Any) -> None:
    report = judge_once(bench, Says("It is right.", verdict=EngineDied("gone")))
    assert isinstance(report.verdict, Failed) and report.verdict.cause == "died"


@pytest.mark.parametrize(("verdict", "num_read"), [("Score: 7", 1), ("s" * 200, 0)])
def test_asked_verdicts_are_counted_apart(bench: Any, verdict: str, num_read: int) -> None:
    counters = FlowCounters()
    counters.step.report(judge_once(bench, Says("It is right.", verdict), max_retries=0))
    counters.step.report(judge_once(bench, Says("Score: 3")))
    counts = counters.close_step()
    assert (counts.judging.asked, counts.judging.counted) == (2, 1 + num_read)
    metrics = flow_metrics(counts, 1.0)
    assert (metrics["judge/asked_verdicts"], metrics["judge/asked_verdicts_read"]) == (1, num_read)
    assert "judge/forced_verdicts" not in metrics


@pytest.mark.parametrize(
    ("protocol", "num_siblings", "verdict"),
    [("listwise", 3, "\\boxed{7, 2, 3}"), ("pairwise", 2, "\\boxed{7, 2}"), ("rubric", 1, "\\boxed{7}")],
)
def test_every_protocol_asks_for_as_many_scores_as_it_needs(protocol: str, num_siblings: int, verdict: str) -> None:
    config = judge_config(
        protocol=protocol, template=protocol, parser="boxed", ask_verdict=True, num_judgements=2,
        vote="majority" if protocol == "pairwise" else "mean", max_new_tokens=200,
    )  # fmt: skip
    grm = LocalGrm("grm", ReasoningEngine(Says("Both are fine.", verdict), Spelled()), Spelled(), 10**6)  # type: ignore[arg-type]
    question = GrmQuestion(
        group_id="g",
        name="g/0",
        siblings=tuple(range(num_siblings)),
        num_scores=num_siblings,
        prompt=grm.prompt((Message(role="user", content="?"),)),
    )
    (judgement,) = asyncio.run(GrmClient(grm, config, seed=1).judgement(question, 0, 0))
    assert isinstance(judgement, Judgement) and judgement.scores[0] == 7 and len(judgement.scores) == num_siblings


# -- endpoints ---------------------------------------------------------------------------------------------------------


def reply(content: str, finish_reason: str = "stop", num_tokens: int = 5) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    return {"model": "judge", "choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": num_tokens}}


def ask_endpoint(*replies: dict[str, Any], **config: Any) -> tuple[Judgement | Failed, list[dict[str, Any]]]:
    """The last result of one judgement, and the bodies that were sent."""
    sent: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return httpx.Response(200, json=replies[len(sent) - 1])

    async def go() -> Judgement | Failed:
        engine = OpenAIEngine("judge", "grm", OpenAIConfig(api_key_env=""), httpx.MockTransport(answer))
        grm = RemoteGrm("grm", engine, 0, NoEvents(), Markup(OpenAIConfig().chat_markup))
        settings = judge_config(ask_verdict=True, max_retries=0, max_new_tokens=200, **config)
        messages = [Message(role="system", content="Judge."), Message(role="user", content="Q: 1 + 1?")]
        question = GrmQuestion(group_id="g", name="g/0", siblings=(0,), num_scores=1, prompt=grm.prompt(messages))
        *_, last = await GrmClient(grm, settings, seed=1).judgement(question, 0, priority=0)
        await engine.close()
        return last

    return asyncio.run(go()), sent


def test_an_endpoint_is_asked_by_a_further_turn() -> None:
    result, sent = ask_endpoint(reply("It is right <|im_end|>.", num_tokens=8), reply("**Score:** 7/10"))
    assert isinstance(result, Judgement) and result.scores == (7.0,)
    assert result.completion.text == "It is right <|im_end|>.\n\n**Score:** 7/10"
    assert (result.completion.num_tokens, result.completion.asked is not None) == (13, True)
    first, second = sent
    assert first["max_tokens"] == 200 - 56 and second["seed"] != first["seed"]
    *before, said, asks = second["messages"]
    assert before == first["messages"] and asks == {"role": "user", "content": ASK_VERDICT}
    assert said["role"] == "assistant" and said["content"] != "It is right <|im_end|>."  # markup stays a text
    assert said["content"].startswith("It is right")
    assert 8 + second["max_tokens"] + len(ASK_VERDICT) / 4 <= 200


@pytest.mark.parametrize("text", ["", "<think>hm, Score: 3"])
def test_an_endpoint_that_only_thought_is_asked_without_an_empty_turn(text: str) -> None:
    result, sent = ask_endpoint(reply(text, "length"), reply("Score: 7"))
    assert isinstance(result, Judgement) and result.scores == (7.0,) and result.completion.answer == "Score: 7"
    assert [message["role"] for message in sent[1]["messages"]] == ["system", "user"]
    assert sent[1]["messages"][-1]["content"] == f"Q: 1 + 1?\n\n{ASK_VERDICT}"


@pytest.mark.parametrize(
    ("said", "answer", "finish_reason", "cause"),
    [
        ("Score: 3", "", "stop", "unparseable"),
        ("\\boxed{3}", "$$", "stop", "unparseable"),
        ("Score:", "<think>\nScore: 3", "stop", "unparseable"),
        ("Score: 3", "Score: 7", "length", "truncated"),
        ("fine", "Score: 7 or 8", "stop", "unparseable"),
    ],
)
def test_a_draft_or_a_thought_is_no_verdict_that_was_asked_for(
    said: str, answer: str, finish_reason: str, cause: str
) -> None:
    parser = {"parser": "boxed", "template": "boxed"} if "boxed" in said else {}
    result, _ = ask_endpoint(reply(said, "length"), reply(answer, finish_reason), **parser)
    assert isinstance(result, FailedJudgement) and result.cause == cause
    assert result.completion.asked is not None


def test_a_judgement_too_short_to_be_asked_for_a_verdict_is_refused() -> None:
    with pytest.raises(ValueError, match=r"format\.ask_verdict: .*=31 leave .*type judge\.max_new_tokens=64 or more"):
        judge_config(ask_verdict=True, max_new_tokens=31)
