"""A judge behind any OpenAI-compatible endpoint: messages in, text out. No weights, no token ids."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from models.engines.openai.bounded_body import ACCEPTED, BadBody, read_bounded
from models.engines.openai.chat_answer import (
    ChatAnswer,
    NoChatCompletion,
    completion_tokens,
    error_words,
    read_answer,
    read_object,
    total_tokens,
)
from models.engines.request_gates import PrioritySemaphore, SingleFlight
from models.seeds import derive_seed
from models.settings import OpenAIConfig
from models.types import (
    Completion,
    EngineDied,
    EngineRefused,
    FinishReason,
    Message,
    RequestContext,
    SamplingParams,
    SendLimits,
    VersionSpan,
)

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
LONGEST_RETRY_AFTER_S = 300.0  # an endpoint that asks for more is out of quota, not busy
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 10.0, 600.0  # a judgement may take minutes; the caller has the deadline
RETRIED_STATUSES = frozenset({408, 409, 425, 429})  # and all of 500 to 599
BYTES_PER_TOKEN = 4  # rough value for English prose: expected size of a prompt until the endpoint counts it
MIN_ANSWER_BYTES, ANSWER_BYTES_PER_TOKEN = 2**20, 256  # limit of an answer, plus a part per allowed token
FIELDS_OF_OURS = frozenset({"model", "messages", "n", "stream", "max_tokens", "max_completion_tokens"})
FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}

# Allowed after a model's name in the answer: a date or build ("-2024-08-06", "-0613"), "@v2", "-latest".
VERSION_SUFFIX = re.compile(r"[-@:](\d{3,}(?![a-z])[\w.-]*|v\d[\w.]*|latest|preview)", re.IGNORECASE)


class NoLimits:
    """Limits that let every request go."""

    async def admit(self, num_tokens: int, priority: int) -> None:
        return None

    def settle(self, num_expected: int, num_used: int) -> None:
        return None


class _BusyError(Exception):
    """The endpoint is busy: try again after the wait that it asked for (None: it named none)."""

    def __init__(self, cause: str, retry_after_s: float | None = None) -> None:
        super().__init__(cause)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    headers: Mapping[str, str]
    body: dict[str, Any]  # empty if it isn't a JSON object
    raw: bytes

    @property
    def words(self) -> str:
        return error_words(self.body, self.raw[:2000].decode("utf-8", "replace"))


class OpenAIEngine:
    """POSTs to `base_url`/chat/completions. Serves one event loop; raises ValueError for a missing key.

    A busy endpoint (429, 5xx, no connection, no answer) is tried again after a growing, jittered wait, or the one in
    its Retry-After. Meanwhile the call keeps its place among `max_connections`, so many 429s slow down all calls.

    model_path: the model's name at the endpoint.  model_name: its name in version spans.
    limits: asked before each try; waiting for them counts only towards the caller's deadline.
    transport: another way to the endpoint than TCP, for tests.
    """

    def __init__(
        self,
        model_path: str,
        model_name: str,
        config: OpenAIConfig,
        transport: httpx.AsyncBaseTransport | None = None,
        limits: SendLimits | None = None,
    ) -> None:
        _refuse_fields_of_ours(config)
        self.model_name = model_name
        self._model_path = model_path
        self._config = config
        self._key = _key_of(config)
        self._max_tokens_field = "max_tokens"
        self._in_flight: SingleFlight[Completion] = SingleFlight()
        self._limits = limits or NoLimits()
        self._gate = PrioritySemaphore(config.max_connections)
        self._client = httpx.AsyncClient(
            headers={"Accept-Encoding": ACCEPTED} | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=config.max_connections),
            transport=transport,
        )
        self._url = config.base_url.rstrip("/") + "/chat/completions"
        self._host = httpx.URL(self._url).host
        self._model_answered = False

    async def chat(self, messages: Sequence[Message], params: SamplingParams, context: RequestContext) -> Completion:
        """Sample one completion. A request_id that is already in flight gets that request's answer.

        Raises EngineRefused for what the endpoint will never serve, EngineDied once the retries are used up, ValueError
        if its first answer is from another model than requested. Later answers of another model are refused: a gateway
        may use a fallback for a while.
        """
        self._refuse_what_cannot_run(params)
        return await self._in_flight.join(context.request_id, lambda: self._chat(messages, params, context))

    async def close(self) -> None:
        await self._client.aclose()

    def _refuse_what_cannot_run(self, params: SamplingParams) -> None:
        if params.pattern is not None:
            raise EngineRefused(
                "a pattern isn't part of the OpenAI protocol; remove it, and if the endpoint has a field for it, "
                "set that in engine.openai.extra_body (vLLM: structured_outputs: {regex: ..}, SGLang: regex: ..)"
            )
        if params.max_new_tokens < 1:
            raise EngineRefused(f"max_new_tokens: must be at least 1, got {params.max_new_tokens}")

    async def _chat(self, messages: Sequence[Message], params: SamplingParams, context: RequestContext) -> Completion:
        async with self._gate.enter(context.priority):
            attempt = 0
            while True:
                try:
                    reply = await self._ask(messages, params, context.priority)
                    return self._completion(reply, params.max_new_tokens)
                except _BusyError as error:
                    busy = error
                wait_s = _wait_s(busy, attempt, context.request_id)
                if attempt == self._config.max_retries or wait_s > LONGEST_RETRY_AFTER_S:
                    raise EngineDied(self._clean(_given_up(self._host, attempt + 1, busy)))
                attempt += 1
                await asyncio.sleep(wait_s)

    async def _ask(self, messages: Sequence[Message], params: SamplingParams, priority: int) -> _Reply:
        """One try; a second if the endpoint knows the limit by its newer name."""
        field = self._max_tokens_field  # another call may find the newer name meanwhile
        reply = await self._post(messages, params, priority, field)
        if field == "max_tokens" and _wants_newer_name(reply):
            self._max_tokens_field = "max_completion_tokens"
            reply = await self._post(messages, params, priority, self._max_tokens_field)
        return reply

    def _body(self, messages: Sequence[Message], params: SamplingParams, max_tokens_field: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model_path,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            max_tokens_field: params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed % 2**31,  # some endpoints accept no more
            "stop": list(params.stop) or None,
        }
        return {name: value for name, value in {**body, **self._config.extra_body}.items() if value is not None}

    async def _post(
        self, messages: Sequence[Message], params: SamplingParams, priority: int, max_tokens_field: str
    ) -> _Reply:
        num_tokens = expected_tokens(messages, params)
        await self._limits.admit(num_tokens, priority)
        max_bytes = max(MIN_ANSWER_BYTES, ANSWER_BYTES_PER_TOKEN * params.max_new_tokens)
        try:
            reply = await self._send(self._body(messages, params, max_tokens_field), max_bytes)
        except BadBody as error:
            cause = str(error)
        except httpx.RequestError as error:  # refused, reset, cut off, timed out
            cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        else:
            used = used_tokens(reply.status, reply.body, num_tokens, most_tokens(messages, params))
            self._limits.settle(num_tokens, used)
            return reply
        raise _BusyError(cause)  # outside of `except`: a chained httpx error would contain the request with the key

    async def _send(self, body: dict[str, Any], max_bytes: int) -> _Reply:
        async with self._client.stream("POST", self._url, json=body) as response:
            raw = await read_bounded(response, max_bytes)
        return _Reply(response.status_code, response.headers, read_object(raw), raw)

    def _completion(self, reply: _Reply, max_new_tokens: int) -> Completion:
        self._check_status(reply)
        try:
            answer = read_answer(reply.body)
        except NoChatCompletion as error:
            cause = f"an answer that is no chat completion: {error}; the answer: {reply.words}"
        else:
            self._check_model(answer)
            return Completion(
                token_ids=(),
                logprobs=(),
                text=answer.text,
                finish_reason=self._finish_reason(answer),
                versions=(VersionSpan(model=self.model_name, version=0, start=0, end=0),),
                unseen_tokens=completion_tokens(reply.body, max_new_tokens),
            )
        raise _BusyError(cause)

    def _check_status(self, reply: _Reply) -> None:
        if reply.status in RETRIED_STATUSES or reply.status >= 500:
            raise _BusyError(f"HTTP {reply.status}: {reply.words}", _retry_after_s(reply.headers))
        if reply.status != 200:
            raise EngineRefused(self._clean(f"{self._host} refused with HTTP {reply.status}: {reply.words}"))

    def _check_model(self, answer: ChatAnswer) -> None:
        is_first, self._model_answered = not self._model_answered, True
        if not answer.model or same_model(self._model_path, answer.model):
            return
        said = f"{self._host} was asked for {self._model_path!r}, but {answer.model[:200]!r} answered"
        if is_first:
            raise ValueError(self._clean(f"grm.path: {said}; give the name of a model that it serves"))
        raise EngineRefused(self._clean(said))

    def _finish_reason(self, answer: ChatAnswer) -> FinishReason:
        finish = answer.finish_reason
        if answer.refusal or finish == "content_filter":
            raise EngineRefused(self._clean(f"{self._host} filtered it: {answer.refusal[:500] or finish}"))
        if finish not in FINISH_REASONS:
            known = ", ".join(FINISH_REASONS)
            said = f"finish_reason {finish[:100]!r}" if finish else "no finish_reason"
            raise EngineRefused(self._clean(f"{self._host} ended an answer with {said}; known: {known}"))
        return FINISH_REASONS[finish]

    def _clean(self, text: str) -> str:
        """A text without the key, which some endpoints echo."""
        return text.replace(self._key, "***") if self._key else text


def expected_tokens(messages: Sequence[Message], params: SamplingParams) -> int:
    """The most tokens that a call is expected to use: its prompt by its bytes, and an answer of full length."""
    num_bytes = sum(len(message.content.encode("utf-8")) for message in messages)
    return -(-num_bytes // BYTES_PER_TOKEN) + params.max_new_tokens


def most_tokens(messages: Sequence[Message], params: SamplingParams) -> int:
    """The upper limit of a call's tokens, for endpoints that count wrongly: a prompt token is at least a byte."""
    return sum(len(message.content.encode("utf-8")) for message in messages) + params.max_new_tokens


def used_tokens(status: int, body: Mapping[str, Any], num_expected: int, most: int) -> int:
    """The tokens by the endpoint's count; a refused call uses none; without a count the expected ones."""
    return 0 if status != 200 else total_tokens(body, most) or num_expected


def same_model(asked: str, answered: str) -> bool:
    """Whether two names differ only in a version, a vendor's prefix or capitals."""
    bare = [name.casefold().rsplit("/", 1)[-1].removesuffix("-latest") for name in (asked, answered)]
    longer, shorter = max(bare, key=len), min(bare, key=len)
    suffix = longer.removeprefix(shorter)
    return not suffix or (suffix != longer and VERSION_SUFFIX.fullmatch(suffix) is not None)


def _key_of(config: OpenAIConfig) -> str:
    if not config.api_key_env:
        return ""
    key = os.environ.get(config.api_key_env, "").strip()
    if not key:
        raise ValueError(
            f"engine.openai.api_key_env: the environment variable {config.api_key_env} isn't set; export it, "
            "or set api_key_env='' for an endpoint without a key"
        )
    return key


def _refuse_fields_of_ours(config: OpenAIConfig) -> None:
    for field in sorted(FIELDS_OF_OURS & config.extra_body.keys()):
        raise ValueError(f"engine.openai.extra_body: {field!r} is set by the run itself; remove it")


def _wants_newer_name(reply: _Reply) -> bool:
    return reply.status == 400 and "max_completion_tokens" in reply.words


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The seconds to wait, or until a date (RFC 9110, 10.2.3), by the endpoint's clock if it sends its time."""
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d+(\.\d*)?", value, re.ASCII):
        return float(value)
    date = _date(value)
    if date is None:
        return None
    now = _date(headers.get("date", "")) or datetime.now(UTC)
    return max(0.0, (date - now).total_seconds())


def _date(value: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(value)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _wait_s(busy: _BusyError, attempt: int, request_id: str) -> float:
    """The wait that the endpoint asked for plus up to a quarter, or 0.5, 1, 2, .. s minus up to a half, to spread
    calls.
    """
    chance = derive_seed(attempt, request_id) / 2**63  # random, but the same when the run is repeated
    if busy.retry_after_s:
        return busy.retry_after_s * (1 + chance / 4)
    return min(FIRST_BACKOFF_S * 2**attempt, LONGEST_BACKOFF_S) * (1 - chance / 2)


def _given_up(host: str, num_tries: int, busy: _BusyError) -> str:
    asked = f"; it asks to wait {busy.retry_after_s:.0f} s" if busy.retry_after_s else ""
    return f"{host} gave no answer in {num_tries} attempts (engine.openai.max_retries); the last one: {busy}{asked}"
