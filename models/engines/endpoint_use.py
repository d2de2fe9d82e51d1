"""How a run uses an endpoint: its limits, its log of requests, and the keys that a user would change."""

from collections.abc import Callable
from dataclasses import dataclass, field

from grmpipe.models.types import AnswerStore, RequestLog, SendLimits, Usage


class NoLimits:
    """Limits that let every request go."""

    async def admit(self, num_tokens: int, priority: int) -> None:
        return None

    def settle(self, num_expected: int, num_used: int) -> None:
        return None


class NoRequestLog:
    """A log that counts nothing."""

    async def until_affordable(self, most: Usage) -> None:
        return None

    def begin_request(self, *, retry: bool, most: Usage | None = None) -> int:
        return 0

    def end_request(self, number: int, usage: Usage) -> None:
        return None

    def unsent(self, number: int) -> None:
        return None

    def close_request(self, number: int) -> None:
        return None


class NoAnswers:
    """A store that keeps nothing."""

    def take(self, key: str) -> bytes | None:
        return None

    def keep(self, key: str, answer: str) -> None:
        return None


def name_shared_key(option: str) -> str:
    """The key of an option that all models behind endpoints share."""
    return f"engine.openai.{option}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointUse:
    """What a run gives to the client of an endpoint.

    model_key:  the configuration's section of the model, for errors.
    option_key: an option -> its key, for errors.
    limits:     asked before each try; waiting for them counts only towards the caller's deadline.
    requests:   told of each try; holds it back while it may exceed the budget.
    answers:    keeps what was paid.
    run_id:     the same after a resume.
    """

    model_key: str = "grm"
    option_key: Callable[[str], str] = name_shared_key
    limits: SendLimits = field(default_factory=NoLimits)
    requests: RequestLog = field(default_factory=NoRequestLog)
    answers: AnswerStore = field(default_factory=NoAnswers)
    run_id: str = ""
