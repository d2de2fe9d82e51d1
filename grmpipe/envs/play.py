"""Plays one episode: one environment, one policy, until done. Tokens in, tokens out: sampled ids are never
re-tokenized.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from grmpipe.types import Env, Prompt, Rollout, Turn
from models.types import EngineDied, Generates, Message, RequestContext, SamplingParams, ignore_first_token


class RolloutAborted(EngineDied):
    """A request ended before the policy finished its turn: there is no rollout."""


class TurnRenderer(Protocol):
    """The parts of a tokenizer with a chat template that playing needs."""

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """A conversation from its start, up to the policy's turn."""
        ...

    def extend(self, replies: Sequence[Message]) -> tuple[int, ...]:
        """The text after the policy's turn: its end, the replies, up to the policy's next turn."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One rollout to play: a sibling of a group, and its seed."""

    group_id: str
    sibling: int
    seed: int
    priority: int = 0


# An episode whose other parts are fixed: request, prompt, and the callback at the first token.
Play = Callable[[RolloutRequest, Prompt, Callable[[], None]], Awaitable[Rollout]]


async def play(
    request: RolloutRequest,
    env: Env,
    policy: Generates,
    renderer: TurnRenderer,
    params: SamplingParams,
    max_turns: int,
    on_first_token: Callable[[], None] = ignore_first_token,
) -> Rollout:
    """Play one rollout. Raises EngineRefused, RolloutAborted or EngineDied, and what the environment raises."""
    prompt_ids = renderer.render(env.start())
    turns: list[Turn] = []
    while True:
        context = RequestContext(
            request_id=f"{request.group_id}/{request.sibling}/t{len(turns)}",
            group_id=request.group_id,
            role="policy",
            priority=request.priority,
        )
        completion = await policy.generate(
            prompt_ids, replace(params, seed=request.seed + len(turns)), context, on_first_token
        )
        if completion.finish_reason == "abort":
            raise RolloutAborted(f"the request {context.request_id} was aborted")
        replies = await env.step(completion.answer)
        turns.append(Turn(prompt_ids=prompt_ids, completion=completion, replies=replies))
        truncated = completion.finish_reason != "stop" or (bool(replies) and len(turns) == max_turns)
        if truncated or not replies:
            status: Literal["finished", "truncated"] = "truncated" if truncated else "finished"
            return Rollout(group_id=request.group_id, sibling=request.sibling, turns=tuple(turns), status=status)
        prompt_ids = (*prompt_ids, *completion.token_ids, *renderer.extend(replies))
