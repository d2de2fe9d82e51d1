"""Requests to SGLang and its answers in our types. Knows one request at a time."""

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from grmpipe.models.engines.shared_requests import SharedRequest
from grmpipe.models.engines.typed_json import LogProb, NoAnswer, TokenId, read_as
from grmpipe.models.seeds import derive_seed
from grmpipe.models.terminal_text import replace_controls
from grmpipe.models.types import (
    Completion,
    EngineDied,
    EngineRefused,
    FinishReason,
    PromptScoring,
    TokenScores,
    TopLogprobs,
    VersionSpan,
    ignore_first_token,
    join_spans,
)

# Tokens per event after the first token: an abort during a pause may lose as many; each event costs time.
TOKENS_PER_EVENT = 32
ONE_EVENT = 1 << 20  # a server that repeats the whole answer in each event sends two of them
MASKED_TOP_K = 4096  # the most tokens of which SGLang returns the real log-probs with top_p and the like
Json = dict[str, Any]


class Finish(msgspec.Struct):
    type: FinishReason
    message: str | None = None
    status_code: int | None = None


class Stretch(msgspec.Struct):
    """Tokens that were sampled with one version of the weights."""

    version: str | int
    start: int
    end: int


class Sampled(msgspec.Struct, array_like=True):
    logprob: LogProb


class Likely(msgspec.Struct, array_like=True):
    logprob: float | None  # none for a token that the grammar excludes
    token_id: TokenId


class SampledMeta(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int
    weight_version: str | int
    finish_reason: Finish | None = None
    cached_tokens: int | None = None
    weight_versions: list[Stretch] | None = None
    output_token_logprobs: list[Sampled] | None = None
    output_top_logprobs: list[list[Likely]] | None = None
    output_token_sampling_logprobs: list[LogProb] | None = None  # after top_p, if it was set


class Event(msgspec.Struct):
    """A part of an answer of /generate: all tokens so far, or the new ones, as the server is configured."""

    output_ids: list[TokenId]
    meta_info: SampledMeta


class Scored(msgspec.Struct, array_like=True):
    logprob: LogProb | None  # the first token of a prompt has none
    token_id: TokenId


class ScoredMeta(msgspec.Struct):
    input_token_logprobs: list[Scored]
    input_top_logprobs: list[list[Scored] | None] | None = None


class ScoredPrompt(msgspec.Struct):
    """The answer of /generate to a body of `make_scoring_body`."""

    meta_info: ScoredMeta


@dataclass(slots=True)
class SglangSample:
    """The tokens of a request so far. `pieces`: the number of tokens at each event, and the server's version then."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[Likely]] = field(default_factory=list)
    pieces: list[tuple[int, str]] = field(default_factory=list)
    finish: Finish | None = None
    spans: Sequence[Stretch] = ()
    num_prefilled: int = 0
    num_cached: int = 0

    def add(self, event: Json) -> None:
        """Add one event: all tokens so far, or the new ones, as the server is configured. Raises NoAnswer."""
        part = read_as(Event, event)
        meta = part.meta_info
        logprobs = meta.output_token_sampling_logprobs
        if logprobs is None:
            logprobs = [sampled.logprob for sampled in meta.output_token_logprobs or ()]
        self.token_ids = _joined(self.token_ids, part.output_ids, meta.completion_tokens)
        self.logprobs = _joined(self.logprobs, logprobs, meta.completion_tokens)
        self.top = _joined(self.top, meta.output_top_logprobs or (), meta.completion_tokens)
        self.pieces.append((len(self.token_ids), str(meta.weight_version)))
        self.finish = meta.finish_reason
        self.spans = meta.weight_versions or ()
        self.num_cached = meta.cached_tokens or 0
        self.num_prefilled = meta.prompt_tokens - self.num_cached


@dataclass(slots=True, eq=False)
class SglangRequest(SharedRequest):
    """A request in flight, and its latest try.

    model: the one that answers. version: of its adapter.
    """

    model: str = ""
    version: int = 0
    rid: str = ""  # at the server, of the latest try; empty: not sent
    sampled: SglangSample = field(default_factory=SglangSample)
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)  # set: don't wait for the server's answer
    on_begin: Callable[[], None] = ignore_first_token  # the latest try's

    @property
    def prompt(self) -> tuple[str, tuple[int, ...]]:
        """What the server's prefix cache knows it by: each model has its own keys and values."""
        return self.model, self.prompt_ids

    def renew(self, on_begin: Callable[[], None]) -> None:
        """Prepare a try. SGLang aborts by the prefix of an id: with ids of one length none is a prefix of another."""
        self.rid, self.sampled, self.on_begin = uuid.uuid4().hex, SglangSample(), on_begin
        self.interrupted.clear()

    def add(self, event: Json) -> None:
        self.sampled.add(event)
        self.on_begin()
        if self.sampled.token_ids:
            self.begin()


def make_body(
    ticket: SglangRequest,
    *,
    seed: int,
    stop: Sequence[str],
    stop_token_ids: Sequence[int],
    vocab_size: int,
    namespace: str,
    whole: bool,
    adapter: str = "",
) -> Json:
    """The body for /generate. namespace: the prefix cache's. adapter: the server's name of one; empty: the base. whole:
    each event repeats the answer from its beginning.
    """
    params = ticket.params
    sampling: Json = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "sampling_seed": derive_seed(seed, str(params.seed)),
        "stop": list(stop),
        "stop_token_ids": list(stop_token_ids),
        "stream_interval": ONE_EVENT if whole else TOKENS_PER_EVENT,
    }
    if params.min_p:
        sampling["min_p"] = params.min_p
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
    if adapter:
        body["lora_path"] = adapter
    if params.top_logprobs:
        body["top_logprobs_num"] = params.top_logprobs
    if params.is_truncated and params.temperature > 0:
        sampling["top_k"] = min(params.top_k or vocab_size, MASKED_TOP_K)
        body["return_sampling_mask"] = True
    return body


def make_scoring_body(token_ids: Sequence[int], top_k: int = 0, adapter: str = "") -> Json:
    """The body for /generate that returns only the log-probs of its input, with those of the `top_k` most likely tokens
    in the place of each. Nothing is taken from the prefix cache.
    """
    body: Json = {
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    return body | ({"top_logprobs_num": top_k} if top_k else {}) | ({"lora_path": adapter} if adapter else {})


def read_scores(answer: Json, num_tokens: int) -> tuple[float, ...]:
    """The log-probs of a prompt's tokens but the first. Raises NoAnswer."""
    return _select_scores(read_as(ScoredPrompt, answer).meta_info, num_tokens)


def read_prompt_scores(answer: Json, num_tokens: int, scoring: PromptScoring) -> TokenScores:
    """The scores of a prompt's tokens from `start` on. Raises NoAnswer."""
    meta = read_as(ScoredPrompt, answer).meta_info
    logprobs_N = np.array(_select_scores(meta, num_tokens)[scoring.start - 1 :], np.float32)
    if not scoring.top_k:
        return TokenScores(logprobs_N=logprobs_N)
    top = (meta.input_top_logprobs or [])[scoring.start :]
    likely = [[(one.token_id, one.logprob) for one in row or () if one.logprob is not None] for row in top]
    if len(likely) != len(logprobs_N) or any(len(row) != scoring.top_k for row in likely):
        raise NoAnswer(f"not {scoring.top_k} likely tokens in the place of each")
    return TokenScores(
        logprobs_N=logprobs_N,
        top_ids_NK=np.array([[token_id for token_id, _ in row] for row in likely], np.int32),
        top_logprobs_NK=np.array([[logprob for _, logprob in row] for row in likely], np.float32),
    )


def read_finish_reason(ticket: SglangRequest) -> FinishReason:
    """Raises EngineRefused or EngineDied if the server ended a request without being asked."""
    finish = ticket.sampled.finish
    if finish is None or ticket.aborted:
        return "abort" if finish is None else finish.type
    if finish.type == "abort":
        message = f"SGLang aborted a request: {replace_controls(finish.message or '') or 'no message'}"
        raise (EngineRefused if 400 <= (finish.status_code or 500) < 500 else EngineDied)(message)
    return finish.type


def make_completion(ticket: SglangRequest, text: str, model: str, versions: Mapping[str, int]) -> Completion:
    """versions: server's name of a version -> ours, the newest last. Raises RuntimeError for an unknown one, NoAnswer
    for log-probs and versions that aren't those of the tokens.
    """
    sampled, finish_reason = ticket.sampled, read_finish_reason(ticket)
    if len(sampled.token_ids) != len(sampled.logprobs):
        raise NoAnswer(f"{len(sampled.logprobs)} log-probs of {len(sampled.token_ids)} tokens")
    return Completion(
        token_ids=tuple(sampled.token_ids),
        logprobs=tuple(sampled.logprobs),
        text=text,
        finish_reason=finish_reason,
        versions=make_spans(sampled, model, versions),
        cached_tokens=sampled.num_cached,
        top=read_top(sampled, ticket.params.top_logprobs),
    )


def read_top(sampled: SglangSample, top_k: int) -> TopLogprobs | None:
    """None if no likely tokens were asked for. Raises NoAnswer if there aren't `top_k` for each token."""
    if not top_k or not sampled.token_ids:
        return None
    likely = [[(one.token_id, -np.inf if one.logprob is None else one.logprob) for one in row] for row in sampled.top]
    if len(likely) != len(sampled.token_ids) or any(len(row) != top_k for row in likely):
        raise NoAnswer(f"not {top_k} likely tokens for each of {len(sampled.token_ids)}")
    rows = [[own, *row] for own, row in zip(zip(sampled.token_ids, sampled.logprobs, strict=True), likely, strict=True)]
    return TopLogprobs(
        ids_TK=np.array([[token_id for token_id, _ in row] for row in rows], np.int32),
        logprobs_TK=np.array([[logprob for _, logprob in row] for row in rows], np.float32),
    )


def make_spans(sampled: SglangSample, model: str, versions: Mapping[str, int]) -> tuple[VersionSpan, ...]:
    """The spans as the server reports them at the end. For an answer that was cut off, the older possible version of
    each event.
    """
    stretches = [(span.start, span.end, str(span.version)) for span in sampled.spans]
    if not stretches:
        start, name = 0, sampled.pieces[0][1] if sampled.pieces else ""
        for end, next_name in sampled.pieces:
            stretches.append((start, end, name))
            start, name = end, next_name
    numbered = ((_version(name, versions), start, end) for start, end, name in stretches)
    spans = join_spans(model, numbered, latest=list(versions.values())[-1])
    edges = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges[-1] != len(sampled.token_ids):
        raise NoAnswer(f"weight_versions don't cover the {len(sampled.token_ids)} tokens")
    return spans


def _version(name: str, versions: Mapping[str, int]) -> int:
    if name not in versions:
        raise RuntimeError(
            f"the server sampled with weights of version {name!r}, which this run never sent: another process pushes "
            "weights to it; give each run its own servers (engine.sglang.urls)"
        )
    return versions[name]


def _select_scores(meta: ScoredMeta, num_tokens: int) -> tuple[float, ...]:
    found = meta.input_token_logprobs[1:]
    scores = tuple(one.logprob for one in found if one.logprob is not None)
    if not len(scores) == len(found) == num_tokens - 1:
        raise NoAnswer(f"{len(scores)} log-probs of {num_tokens} tokens")
    return scores


def _joined(held: list[Any], came: Sequence[Any], total: int) -> list[Any]:
    return list(came) if len(came) == total else held + list(came)
