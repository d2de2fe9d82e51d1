"""Rollouts of one turn and the verdicts on them, for tests of what is counted and evaluated."""

from __future__ import annotations

from grmpipe.models.types import Completion, Message, VersionSpan
from grmpipe.types import Failed, Prompt, RewardSpan, Rollout, Turn, Verdict

LOST = Failed(stage="judge", cause="timeout", attempts=1)


def completion(num_tokens: int, version: int = 0, text: str = "") -> Completion:
    span = VersionSpan(model="policy", version=version, start=0, end=num_tokens)
    return Completion(
        token_ids=(1,) * num_tokens, logprobs=(0.0,) * num_tokens, text=text, finish_reason="stop", versions=(span,)
    )


def rollout(sibling: int, num_tokens: int = 4, version: int = 0, text: str = "", status: str = "finished") -> Rollout:
    turn = Turn(new_ids=(1,), completion=completion(num_tokens, version, text))
    return Rollout(group_id="g", sibling=sibling, turns=(turn,), status=status)  # type: ignore[arg-type]


def verdict(score: float, **breakdown: float) -> Verdict:
    span = RewardSpan(turn=0, start=0, end=1, value=(score - 1) / 9)
    return Verdict(rewards=(span,), score=score, breakdown=breakdown, score_std=0.0, num_judgements=1)


def prompt(reference: str | None = None) -> Prompt:
    return Prompt(prompt_id="p", messages=(Message(role="user", content="?"),), reference=reference)
