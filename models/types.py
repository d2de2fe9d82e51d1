"""What every floor may know about models: messages, sampling, completions, weights, engines. No behaviour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation. `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one completion is drawn. `temperature` 0 is greedy; a seed makes the draw repeatable in any batch."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) of a completion were sampled by `version` of `model`."""

    model: str
    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled.

    token_ids: the sampled ids, the end-of-turn token included where it was sampled.
    logprobs:  natural log, of the distribution really sampled from (after temperature and top-p); as long as token_ids.
    text:      the decoded ids without special tokens. For reading and judging; never tokenized again.
    versions:  spans that cover token_ids without gaps.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Who asks, and how urgently. `request_id` is idempotent: the first answer wins, a retry reuses its seed."""

    request_id: str
    group_id: str
    role: str
    priority: int = 0  # lower goes first
    deadline_s: float | None = None  # from submission; None: the caller holds the deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTensor:
    """One unsharded tensor under its Hugging Face name, as raw little-endian bytes (numpy has no bfloat16)."""

    name: str
    dtype: str  # "float32", "bfloat16", "float16"
    shape: tuple[int, ...]
    data: np.ndarray  # uint8, 1-D


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """Some of a model's tensors: the unit that travels."""

    tensors: tuple[WeightTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReceipt:
    """An engine's echo after a sync: what it was sent, hashed before loading. Name -> blake2b-64 hex."""

    version: int
    checksums: dict[str, str]


class EngineRefused(Exception):
    """The engine can't ever serve this request (a prompt longer than its window, say): don't retry elsewhere."""


class EngineDied(Exception):
    """The engine went away with requests in flight. Retrying elsewhere is right."""


def ignore_first_token() -> None:
    """The default for `on_first_token`: nobody listens."""


class Engine(Protocol):
    """Generates. Embedded, vLLM, SGLang, simulated, remote and a router of several all look like this."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        """Sample one completion. Raises EngineRefused or EngineDied. Cancelling the call aborts the request."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request now; its `generate` returns what it has, finish_reason "abort". Unknown ids are ignored."""
        ...

    async def pause(self) -> None:
        """Return once no token is being sampled. Requests are kept; new ones are accepted and wait."""
        ...

    async def resume(self) -> None:
        """Go on with all kept requests."""
        ...

    async def load_bucket(self, bucket: WeightBucket) -> None:
        """Take some of the next version's tensors. Paused engines only."""
        ...

    async def commit_weights(self, version: int) -> WeightReceipt:
        """All buckets were sent: adopt `version`, echo the checksums of what came since the last commit."""
        ...

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probs (temperature 1) of all tokens but the first under the loaded weights: len(token_ids) - 1 values."""
        ...
