"""What a chat between a workflow and the policy consists of: replies and refusals. No behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from grmpipe.types import TruncationReason
from models.types import FinishReason, Message

RefusalCode = Literal[
    "invalid_request",
    "context_length_exceeded",
    "turn_limit_exceeded",
    "time_limit_exceeded",
    "session_ended",
    "policy_unavailable",
]
# A refusal of these, with no completion after it, truncated the episode.
TRUNCATES: Mapping[str, TruncationReason] = {
    "context_length_exceeded": "context",
    "turn_limit_exceeded": "turns",
    "time_limit_exceeded": "time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Message):
    """The policy's message.

    completion_id:     names the turn, in rewards by turn.
    finish_reason:     "length": it was cut, and calls in it aren't read.
    prompt_tokens, completion_tokens: their numbers.
    """

    completion_id: str
    finish_reason: FinishReason = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ChatRefused(Exception):
    """The policy doesn't answer this request. A workflow may catch it: after `context_length_exceeded` it may go on
    with a shorter history.
    """

    def __init__(self, code: RefusalCode, text: str) -> None:
        super().__init__(text)
        self.code: RefusalCode = code

    @property
    def reason(self) -> TruncationReason:
        """What truncated the episode, if it ends with this; empty: nothing."""
        return TRUNCATES.get(self.code, "")
