"""Plays one episode: one env, one policy, until done. Token in, token out: sampled ids are never tokenized again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from grmpipe.types import Env, Prompt, Rollout, Turn
from models.types import Engine, EngineDied, Message, RequestContext, SamplingParams, ignore_first_token


class RolloutAborted(EngineDied):
    """A request was ended before the policy had ended its turn: there is no such rollout."""


class TurnRenderer(Protocol):
    """What playing needs of a tokenizer with a chat template."""

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """A conversation from its start, up to where the policy speaks."""
        ...

    def extend(self, replies: Sequence[Message]) -> tuple[int, ...]:
        """What follows the policy's turn: its end, the replies, up to where the policy speaks again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """Who plays: a sibling of a group, and its seed."""

    group_id: str
    sibling: int
    seed: int
    priority: int = 0


# An episode with all but the seat, the prompt and whom to tell of the first token filled in.
Play = Callable[[RolloutRequest, Prompt, Callable[[], None]], Awaitable[Rollout]]


async def play(
    request: RolloutRequest,
    env: Env,
    policy: Engine,
    renderer: TurnRenderer,
    params: SamplingParams,
    max_turns: int,
    on_first_token: Callable[[], None] = ignore_first_token,
) -> Rollout:
    """One rollout. Raises EngineRefused, RolloutAborted or EngineDied, and what the env raises."""
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
        replies = await env.step(completion.text)
        turns.append(Turn(prompt_ids=prompt_ids, completion=completion, replies=replies))
        truncated = completion.finish_reason != "stop" or (bool(replies) and len(turns) == max_turns)
        if truncated or not replies:
            status: Literal["finished", "truncated"] = "truncated" if truncated else "finished"
            return Rollout(group_id=request.group_id, sibling=request.sibling, turns=tuple(turns), status=status)
        prompt_ids = (*prompt_ids, *completion.token_ids, *renderer.extend(replies))
