"""The surroundings of a judge: prompts, rollouts, a scripted engine, a loop on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from configs import judge_config

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.envs.thinking_budget import ReasoningEngine
from grmpipe.judge.grm import LocalGrm
from grmpipe.judge.protocols.generative import GenerativeJudge
from grmpipe.models.types import (
    Completion,
    FinishReason,
    Message,
    RequestContext,
    SamplingParams,
    VersionSpan,
    ignore_first_token,
)
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.types import Prompt, Rollout, Turn


@dataclass(frozen=True)
class Answer:
    text: str
    finish_reason: FinishReason = "stop"
    delay_s: float = 0.0


Author = Callable[[str, RequestContext], Answer | Exception]


@dataclass
class ScriptedEngine:
    """Answers, waits or raises as its author says. Its tokens are code points, so the author can read the prompt."""

    author: Author
    asked: list[tuple[RequestContext, SamplingParams]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    cancelled: list[str] = field(default_factory=list)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        self.asked.append((context, params))
        answer = self.author("".join(map(chr, prompt_ids)), context)
        if isinstance(answer, Exception):
            raise answer
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(answer.delay_s)
        except asyncio.CancelledError:
            self.cancelled.append(context.request_id)
            raise
        finally:
            self.in_flight -= 1
        return completion(answer.text, answer.finish_reason, model="grm")


class CodePoints:
    """A renderer for tests: all messages, one token per character."""

    thinking = None
    stop_token_ids = (0,)

    def encode_inserted(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def extend(self, replies: Sequence[Message], *, ended: bool = True) -> tuple[int, ...]:
        assert not ended, "a scripted answer has no end of turn"
        return self.encode_inserted("".join(f"\n{message.content}\n" for message in replies))

    def decode(self, token_ids: Sequence[int]) -> str:
        return characters(token_ids)

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(map(ord, "\n".join(message.content for message in messages)))


def completion(text: str, finish_reason: FinishReason = "stop", model: str = "policy") -> Completion:
    num_tokens = len(text)
    return Completion(
        token_ids=tuple(map(ord, text)),
        logprobs=(-1.0,) * num_tokens,
        text=text,
        finish_reason=finish_reason,
        versions=(VersionSpan(model=model, version=3, start=0, end=num_tokens),),
    )


def rollout(text: str, sibling: int = 0, group_id: str = "g7") -> Rollout:
    turn = Turn(new_ids=(1, 2), completion=completion(text))
    return Rollout(group_id=group_id, sibling=sibling, turns=(turn,), status="finished")


def prompt(question: str = "What is 6 x 2?", reference: str | None = "12") -> Prompt:
    return Prompt(prompt_id="p1", messages=(Message(role="user", content=question),), reference=reference)


def generative(
    author: Author,
    context_tokens: int = 10**6,
    clock: ActiveClock | None = None,
    continues: bool = False,
    **config: Any,
) -> tuple[GenerativeJudge, ScriptedEngine]:
    """continues: the GRM may be asked for the rest of an answer."""
    engine, renderer = ScriptedEngine(author), CodePoints()
    asked: Any = ReasoningEngine(engine, cast(Any, renderer)) if continues else engine
    grm = LocalGrm("tiny-grm", asked, renderer, context_tokens, clock)
    return GenerativeJudge(grm, judge_config(**config), 11, decode=characters), engine


def characters(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run in virtual time: a timeout of minutes takes no time."""
    return run_virtually(lambda: coroutine)


@dataclass(frozen=True)
class Bench:
    """Helpers for the tests of judges."""

    answer = Answer
    generative = staticmethod(generative)
    rollout = staticmethod(rollout)
    prompt = staticmethod(prompt)
    run = staticmethod(run)


@pytest.fixture(scope="session")
def bench() -> Bench:
    return Bench()
