"""What a chat between a workflow and the policy consists of: replies and refusals."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from grmpipe.models.types import FinishReason, Message
from grmpipe.types import TruncationReason

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
class ChatOptions:
    """What a call of the policy may ask for besides its messages.

    max_tokens: may only lower the run's.
    stop:       texts that end the reply, besides the run's.
    logprobs:   whether the reply lists its tokens with their log-probs.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A sampled token's text, and its log-prob (natural log) in the distribution it was sampled from."""

    token: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply(Message):
    """The policy's message.

    completion_id:     names the turn, in rewards by turn.
    logprobs:          one per token, those that end it too, if the call asked for them.
    finish_reason:     "length": it was cut, and calls in it aren't read.
    prompt_tokens, completion_tokens: their numbers.
    """

    completion_id: str
    finish_reason: FinishReason = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


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
