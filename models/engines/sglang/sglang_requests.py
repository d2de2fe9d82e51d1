"""Requests to SGLang and what comes back, in our types. Knows one request at a time; talks to no server."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from models.seeds import derive_seed
from models.types import (
    Completion,
    EngineDied,
    EngineRefused,
    FinishReason,
    SamplingParams,
    VersionSpan,
    ignore_first_token,
)

# Tokens per event, after the first token: what an abort under a pause may lose, and the price of each event.
TOKENS_PER_EVENT = 32
ONE_EVENT = 1 << 20  # a server that repeats the whole answer in each event is asked for two of them
MASKED_TOP_K = 4096  # the most that SGLang gives back the real log-probs of, where top_p restricts them
FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
Json = dict[str, Any]


@dataclass(slots=True)
class SglangSample:
    """What has come of a request. `pieces`: how many tokens there were at each event, and the server's version then."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pieces: list[tuple[int, str]] = field(default_factory=list)
    finish: Json | None = None
    spans: Sequence[Json] = ()
    num_prefilled: int = 0

    def add(self, event: Json) -> None:
        """One event: all tokens so far, or the new ones, as the server is set."""
        meta = event["meta_info"]
        total = meta["completion_tokens"]
        logprobs = meta.get("output_token_sampling_logprobs")  # of what top_p left, where it was asked for
        if logprobs is None:
            logprobs = [logprob for logprob, *_ in meta["output_token_logprobs"]]
        self.token_ids = _joined(self.token_ids, event["output_ids"], total)
        self.logprobs = _joined(self.logprobs, logprobs, total)
        self.pieces.append((len(self.token_ids), str(meta["weight_version"])))
        self.finish = meta["finish_reason"]
        self.spans = meta.get("weight_versions") or ()
        self.num_prefilled = meta["prompt_tokens"] - (meta.get("cached_tokens") or 0)


@dataclass(slots=True, eq=False)
class SglangRequest:
    """A request in flight, and all who wait for its first token."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    priority: int
    listeners: list[Callable[[], None]] = field(default_factory=list)
    rid: str = ""  # at the server, of the latest try; empty: it isn't there
    sampled: SglangSample = field(default_factory=SglangSample)
    begun: bool = False  # its first token was sampled
    aborted: bool = False
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)  # don't wait for the server's answer
    on_begin: Callable[[], None] = ignore_first_token  # of the latest try

    def renew(self, on_begin: Callable[[], None]) -> None:
        """Before a try. SGLang aborts by the beginning of an id: ids of one length can't be each other's."""
        self.rid, self.sampled, self.on_begin = uuid.uuid4().hex, SglangSample(), on_begin
        self.interrupted.clear()

    def add(self, event: Json) -> None:
        self.sampled.add(event)
        self.on_begin()
        if not self.begun and self.sampled.token_ids:
            self.begun = True
            for tell in self.listeners:
                tell()


def body_of(
    ticket: SglangRequest, *, seed: int, stop_token_ids: Sequence[int], vocab_size: int, namespace: str, whole: bool
) -> Json:
    """For /generate. namespace: of the prefix cache. whole: each event will repeat the answer from its beginning."""
    params = ticket.params
    sampling: Json = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "sampling_seed": derive_seed(seed, str(params.seed)),
        "stop": list(params.stop),
        "stop_token_ids": list(stop_token_ids),
        "stream_interval": ONE_EVENT if whole else TOKENS_PER_EVENT,
    }
    if params.pattern is not None:
        sampling["regex"] = params.pattern
    body: Json = {
        "rid": ticket.rid,
        "input_ids": list(ticket.prompt_ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": True,
        "priority": ticket.priority,
        "extra_key": namespace,
    }
    if params.top_p < 1 and params.temperature > 0:
        sampling["top_k"] = min(vocab_size, MASKED_TOP_K)
        body["return_sampling_mask"] = True
    return body


def scoring_body(token_ids: Sequence[int]) -> Json:
    """For /generate: nothing new, the log-probs of what is there. Nothing of it is taken from the prefix cache."""
    return {
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def scores_of(answer: Json) -> tuple[float, ...]:
    return tuple(float(logprob) for logprob, *_ in answer["meta_info"]["input_token_logprobs"][1:])


def finish_reason_of(ticket: SglangRequest) -> FinishReason:
    """Raises EngineRefused or EngineDied where the server ended a request that nobody wanted ended."""
    finish = ticket.sampled.finish
    if finish is None or ticket.aborted:
        return "abort" if finish is None else FINISH_REASONS[finish["type"]]
    if finish["type"] == "abort":
        message = f"SGLang aborted a request: {finish.get('message') or 'no message'}"
        raise (EngineRefused if 400 <= int(finish.get("status_code") or 500) < 500 else EngineDied)(message)
    return FINISH_REASONS[finish["type"]]


def completion_of(ticket: SglangRequest, text: str, model: str, versions: Mapping[str, int]) -> Completion:
    """versions: the server's names of versions -> ours, the newest last. RuntimeError for one that isn't there."""
    sampled = ticket.sampled
    return Completion(
        token_ids=tuple(sampled.token_ids),
        logprobs=tuple(sampled.logprobs),
        text=text,
        finish_reason=finish_reason_of(ticket),
        versions=spans_of(sampled, model, versions),
    )


def spans_of(sampled: SglangSample, model: str, versions: Mapping[str, int]) -> tuple[VersionSpan, ...]:
    """As the server says at the end. For an answer that was cut off: of each event the older version it may be of."""
    stretches = [(span["start"], span["end"], str(span["version"])) for span in sampled.spans]
    if not stretches:
        start, name = 0, sampled.pieces[0][1] if sampled.pieces else ""
        for end, next_name in sampled.pieces:
            stretches.append((start, end, name))
            start, name = end, next_name
    spans: list[VersionSpan] = []
    for start, end, name in stretches:
        version = _version(name, versions)
        if spans and spans[-1].version == version:
            start = spans.pop().start
        if end > start:
            spans.append(VersionSpan(model=model, version=version, start=start, end=end))
    return tuple(spans) or (VersionSpan(model=model, version=list(versions.values())[-1], start=0, end=0),)


def _version(name: str, versions: Mapping[str, int]) -> int:
    if name not in versions:
        raise RuntimeError(
            f"the server sampled with weights of version {name!r}, which this run never sent: another process pushes "
            "weights to it; give each run its own servers (engine.sglang.urls)"
        )
    return versions[name]


def _joined(held: list[Any], came: Sequence[Any], total: int) -> list[Any]:
    return list(came) if len(came) == total else held + list(came)
