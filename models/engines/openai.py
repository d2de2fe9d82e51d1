"""A judge behind any OpenAI-compatible endpoint: messages in, text out. It has no weights and no token ids of ours."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

import httpx

from models.engines.in_flight import Gate, InFlight
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
    VersionSpan,
)

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
LONGEST_RETRY_AFTER_S = 300.0  # an endpoint that asks for more is out of quota, not busy
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 10.0, 600.0  # a judgement may think for minutes; who waits holds the deadline
RETRIED_STATUSES = frozenset({408, 409, 425, 429})  # and all of 500 to 599
BYTES_PER_TOKEN = 4  # of English prose, roughly: what a prompt is expected to weigh until the endpoint says it
FIELDS_OF_OURS = frozenset({"model", "messages", "n", "stream", "max_tokens", "max_completion_tokens"})
FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}

# What may follow a model's name in the answer: a date or build ("-2024-08-06", "-0613"), "@v2", "-latest".
VERSION_SUFFIX = re.compile(r"[-@:](\d{3,}(?![a-z])[\w.-]*|v\d[\w.]*|latest|preview)", re.IGNORECASE)


class SendLimits(Protocol):
    """Holds requests back before they are sent."""

    async def admit(self, num_tokens: int, priority: int) -> None: ...

    def settle(self, num_expected: int, num_used: int) -> None:
        """What an admitted request really used."""
        ...


class NoLimits:
    """Whatever comes may go."""

    async def admit(self, num_tokens: int, priority: int) -> None:
        return None

    def settle(self, num_expected: int, num_used: int) -> None:
        return None


class _BusyError(Exception):
    """Not now: worth another try, after the wait that the endpoint asked for (None: it named none)."""

    def __init__(self, cause: str, retry_after_s: float | None = None) -> None:
        super().__init__(cause)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    headers: Mapping[str, str]
    body: dict[str, Any]  # empty where it isn't a JSON object
    text: str


class OpenAIEngine:
    """POSTs to `base_url`/chat/completions. Serves one event loop; raises ValueError for a missing key.

    A busy endpoint (429, 5xx, no connection, no answer) is asked again with a growing, jittered wait, or the one it
    asks for in Retry-After. Meanwhile the call keeps its place among `max_connections`: a storm of 429s slows all.

    model_path: the model's name at the endpoint.  model_name: ours, in version spans.
    limits: asked before each try; waiting for them counts towards whatever deadline the caller holds, and no other.
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
        self._in_flight: InFlight[Completion] = InFlight()
        self._limits = limits or NoLimits()
        self._gate = Gate(config.max_connections)
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=config.max_connections),
            transport=transport,
        )
        self._url = config.base_url.rstrip("/") + "/chat/completions"
        self._host = httpx.URL(self._url).host

    async def chat(self, messages: Sequence[Message], params: SamplingParams, context: RequestContext) -> Completion:
        """Sample one completion. A request_id that is in flight already gets that request's answer.

        Raises EngineRefused for what the endpoint will never serve, EngineDied once the retries are used up, and
        ValueError where another model answers than the one that was asked for.
        """
        self._refuse_what_cannot_run(params)
        return await self._in_flight.join(context.request_id, lambda: self._chat(messages, params, context))

    async def close(self) -> None:
        await self._client.aclose()

    def _refuse_what_cannot_run(self, params: SamplingParams) -> None:
        if params.pattern is not None:
            raise EngineRefused(
                "a pattern isn't part of the OpenAI protocol; drop it, and where the endpoint has a field for it, "
                "set that in engine.openai.extra_body (vLLM: structured_outputs: {regex: ..}, SGLang: regex: ..)"
            )
        if params.max_new_tokens < 1:
            raise EngineRefused(f"max_new_tokens: must be at least 1, got {params.max_new_tokens}")

    async def _chat(self, messages: Sequence[Message], params: SamplingParams, context: RequestContext) -> Completion:
        async with self._gate.enter(context.priority):
            attempt = 0
            while True:
                try:
                    return self._completion(await self._ask(messages, params, context.priority))
                except _BusyError as error:
                    busy = error
                wait_s = _wait_s(busy, attempt, context.request_id)
                if attempt == self._config.max_retries or wait_s > LONGEST_RETRY_AFTER_S:
                    raise EngineDied(self._clean(_given_up(self._host, attempt + 1, busy)))
                attempt += 1
                await asyncio.sleep(wait_s)

    async def _ask(self, messages: Sequence[Message], params: SamplingParams, priority: int) -> _Reply:
        """One try; a second where the endpoint knows the limit by its newer name."""
        body = self._body(messages, params)
        num_tokens = expected_tokens(messages, params)
        reply = await self._post(body, num_tokens, priority)
        if self._max_tokens_field in body and _wants_newer_name(reply):
            self._max_tokens_field = "max_completion_tokens"
            reply = await self._post(self._body(messages, params), num_tokens, priority)
        return reply

    def _body(self, messages: Sequence[Message], params: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model_path,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            self._max_tokens_field: params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed % 2**31,  # some endpoints take no more
            "stop": list(params.stop) or None,
        }
        return {name: value for name, value in {**body, **self._config.extra_body}.items() if value is not None}

    async def _post(self, body: dict[str, Any], num_tokens: int, priority: int) -> _Reply:
        await self._limits.admit(num_tokens, priority)
        try:
            response = await self._client.post(self._url, json=body)
        except httpx.RequestError as error:  # refused, reset, cut off in mid-answer, timed out
            cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        else:
            reply = _read(response)
            self._limits.settle(num_tokens, used_tokens(reply, num_tokens))
            return reply
        raise _BusyError(cause)  # outside of `except`: a chained httpx error would carry the request, key and all

    def _completion(self, reply: _Reply) -> Completion:
        self._check_status(reply)
        self._check_model(reply)
        choices = reply.body.get("choices") or [{}]
        message = choices[0].get("message") or {}
        finish = choices[0].get("finish_reason")
        if finish == "content_filter" or message.get("refusal"):
            raise EngineRefused(self._clean(f"{self._host} filtered it: {message.get('refusal') or finish}"))
        if finish not in FINISH_REASONS:
            raise _BusyError(f"an answer that ended with {finish!r}")
        usage = reply.body.get("usage") or {}
        return Completion(
            token_ids=(),
            logprobs=(),
            text=message.get("content") or "",
            finish_reason=FINISH_REASONS[finish],
            versions=(VersionSpan(model=self.model_name, version=0, start=0, end=0),),
            unseen_tokens=usage.get("completion_tokens") or 0,
        )

    def _check_status(self, reply: _Reply) -> None:
        if reply.status in RETRIED_STATUSES or reply.status >= 500:
            raise _BusyError(f"HTTP {reply.status}: {_message(reply)}", _retry_after_s(reply.headers))
        if reply.status != 200:
            raise EngineRefused(self._clean(f"{self._host} refused with HTTP {reply.status}: {_message(reply)}"))
        if "choices" not in reply.body:
            raise _BusyError(f"an answer that is no chat completion: {_message(reply)}")

    def _check_model(self, reply: _Reply) -> None:
        answered = reply.body.get("model")
        if answered and not same_model(self._model_path, answered):
            raise ValueError(
                f"grm.path: {self._host} was asked for {self._model_path!r}, and {answered!r} answered; "
                "give the name of a model that it serves"
            )

    def _clean(self, text: str) -> str:
        """Some endpoints echo the key that they don't know."""
        return text.replace(self._key, "***") if self._key else text


def expected_tokens(messages: Sequence[Message], params: SamplingParams) -> int:
    """The most that a call may use: its prompt by its bytes, and an answer of full length."""
    num_bytes = sum(len(message.content.encode("utf-8")) for message in messages)
    return -(-num_bytes // BYTES_PER_TOKEN) + params.max_new_tokens


def used_tokens(reply: _Reply, num_expected: int) -> int:
    """By the endpoint's own count; what is refused uses none, and where it doesn't count the expected ones stay."""
    if reply.status != 200:
        return 0
    usage = reply.body.get("usage") or {}
    counted = (usage.get("prompt_tokens") or 0) + (usage.get("completion_tokens") or 0)
    return usage.get("total_tokens") or counted or num_expected


def same_model(asked: str, answered: str) -> bool:
    """Whether two names differ in a version, a vendor's prefix or capitals at most."""
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
            "or set api_key_env='' for an endpoint that wants no key"
        )
    return key


def _refuse_fields_of_ours(config: OpenAIConfig) -> None:
    for field in sorted(FIELDS_OF_OURS & config.extra_body.keys()):
        raise ValueError(f"engine.openai.extra_body: {field!r} is set by the run itself; drop it")


def _read(response: httpx.Response) -> _Reply:
    try:
        body = response.json()
    except ValueError:
        body = {}
    body = body if isinstance(body, dict) else {}
    return _Reply(response.status_code, response.headers, body, response.text)


def _error(reply: _Reply) -> dict[str, Any]:
    error = reply.body.get("error") or reply.body
    return error if isinstance(error, dict) else {"message": str(error)}


def _message(reply: _Reply) -> str:
    """The endpoint's own words, on one line."""
    error = _error(reply)
    text = error.get("message") or error.get("detail") or reply.text
    return " ".join(str(text).split())[:500] or "(no words)"


def _wants_newer_name(reply: _Reply) -> bool:
    return reply.status == 400 and "max_completion_tokens" in _message(reply)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds, or the time until a date (RFC 9110, 10.2.3)."""
    value = headers.get("retry-after", "").strip()
    if not value:
        return None
    if re.fullmatch(r"\d+(\.\d*)?", value):
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (date.astimezone(UTC) - datetime.now(UTC)).total_seconds())


def _wait_s(busy: _BusyError, attempt: int, request_id: str) -> float:
    """What the endpoint asked for and up to a quarter more, or 0.5, 1, 2, .. s less up to a half: calls part ways."""
    chance = derive_seed(attempt, request_id) / 2**63  # of its own, and the same whenever the run is repeated
    if busy.retry_after_s:
        return busy.retry_after_s * (1 + chance / 4)
    return min(FIRST_BACKOFF_S * 2**attempt, LONGEST_BACKOFF_S) * (1 - chance / 2)


def _given_up(host: str, num_tries: int, busy: _BusyError) -> str:
    asked = f"; it asks to wait {busy.retry_after_s:.0f} s" if busy.retry_after_s else ""
    return f"{host} gave no answer in {num_tries} tries (engine.openai.max_retries); the last one: {busy}{asked}"
