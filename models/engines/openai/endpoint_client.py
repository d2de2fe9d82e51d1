"""Sends JSON to an HTTP endpoint: its key, rate limits, retries, answers of limited size."""

import asyncio
import hashlib
import json
import os
import re
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

from grmpipe.models.engines.connections import Connections
from grmpipe.models.engines.endpoint_use import EndpointUse
from grmpipe.models.engines.network import find_network_path
from grmpipe.models.engines.openai.chat_answer import (
    error_words,
    is_out_of_quota,
    read_usage,
    total_tokens,
)
from grmpipe.models.engines.typed_json import read_object
from grmpipe.models.request_gates import PrioritySemaphore
from grmpipe.models.seeds import derive_seed, first_name
from grmpipe.models.settings import OpenAIConfig
from grmpipe.models.terminal_text import replace_controls
from grmpipe.models.types import EngineDenied, EngineDied, EngineRefused, Usage

Answer = TypeVar("Answer")

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
IDEMPOTENCY_KEY = "Idempotency-Key"  # draft-ietf-httpapi-idempotency-key-header
LONGEST_RETRY_AFTER_S = 300.0  # an endpoint that asks for more is out of quota, not busy
REDIRECTED_TO = "x-redirected-to"
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 10.0, 600.0  # a judgement may take minutes; the caller has the deadline
RETRIED_STATUSES = frozenset({408, 409, 425, 429})  # and all of 500 to 599
DENIED_STATUSES = frozenset({401, 402, 403, 404, 407})  # and redirects, and whatever says that the account is empty
MOST_DENIALS = 8  # in a row, once the endpoint has served something: a gateway may deny single requests

# Allowed after a model's name in the answer: a date or build ("-2024-08-06", "-0613"), "@v2", "-latest".
VERSION_SUFFIX = re.compile(r"[-@:](\d{3,}(?![a-z])[\w.-]*|v\d[\w.]*|latest|preview)", re.IGNORECASE)
GGUF_ENDING = re.compile(r"(?:[-.](?:i?q\d[\w]*|b?f16|f32|mxfp4))?(?:-\d{5}-of-\d{5})?\.gguf$")


class BusyError(Exception):
    """The endpoint is busy: try again after the wait that it asked for (None: it named none)."""

    def __init__(self, cause: str, retry_after_s: float | None = None) -> None:
        super().__init__(cause)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Reply:
    """What an endpoint answered, with any status."""

    status: int
    headers: Mapping[str, str]
    body: dict[str, Any]  # empty if it isn't a JSON object
    raw: bytes

    @property
    def words(self) -> str:
        words = error_words(self.body, self.raw[:2000].decode("utf-8", "replace"))
        if not 300 <= self.status < 400:
            return words
        location = replace_controls(self.headers.get(REDIRECTED_TO, ""))[:500]
        return f"a redirect to {location}" if location else "a redirect without a Location"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSize:
    """The tokens that a request is expected to use, the most that it can use, and the longest answer that is read.

    most_sampled: those of `most_tokens` that aren't the prompt's.
    """

    expected_tokens: int
    most_tokens: int
    max_bytes: int
    most_sampled: int = 0

    @property
    def most(self) -> Usage:
        return Usage(prompt=self.most_tokens - self.most_sampled, sampled=self.most_sampled)


class EndpointClient:
    """The connections to one endpoint. Serves one event loop; raises ValueError for a missing key.

    A busy endpoint (429, 5xx, no connection, no answer) is tried again after a growing, jittered wait, or the one in
    its Retry-After. Meanwhile the call keeps its place among `max_connections`, so many 429s slow down all calls.

    An endpoint that denies its first answer (a wrong key, no access, an unknown model or address, an empty account), or
    MOST_DENIALS in a row later, is asked nothing more: all calls raise EngineDenied. Before that a later denial is a
    refusal of one request. So is a later answer of another model: a gateway may use a fallback for a while.

    model: its name at the endpoint.  transport: another way to the endpoint than TCP, for tests.
    """

    def __init__(
        self, model: str, config: OpenAIConfig, use: EndpointUse, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        path = find_network_path(config.base_url)
        self.server = f"{httpx.URL(config.base_url).host}{path.by}"
        self._model = model
        self._key = read_api_key(config, use)
        self._config = config
        self._use = use
        self._gate = PrioritySemaphore(config.max_connections)
        self._has_served = False
        self._model_answered = False
        self._num_denials = 0  # in a row
        self._denied: EngineDenied | None = None
        self._http = httpx.AsyncClient(
            headers={"Accept-Encoding": ACCEPTED} | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            transport=transport or Connections(path),  # at most config.max_connections of them: see `retry`
            trust_env=False,
            event_hooks={"response": [hide_redirect]},
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def retry(self, request_id: str, priority: int, attempt: Callable[[int], Awaitable[Answer]]) -> Answer:
        """The answer of an attempt, which is repeated while it raises BusyError; it gets the number of tries before.
        Raises EngineDied once the retries are used up.
        """
        async with self._gate.enter(priority):
            num_failed = 0
            while True:
                try:
                    return await attempt(num_failed)
                except BusyError as error:
                    busy = error
                if num_failed == self._config.max_retries or (busy.retry_after_s or 0) > LONGEST_RETRY_AFTER_S:
                    raise EngineDied(self.clean(self._given_up(num_failed + 1, busy)))
                wait_s = _wait_s(busy, num_failed, request_id)
                num_failed += 1
                await asyncio.sleep(wait_s)

    async def post(
        self,
        url: str,
        body: Mapping[str, Any],
        size: RequestSize,
        priority: int,
        *,
        retry: bool = False,
        request_id: str = "",
    ) -> Reply:
        """One try. Raises BusyError if there is no answer, or none that can be read, and BudgetSpent. request_id: names
        a request that an endpoint should answer and bill once, however often it comes; empty: each try counts.
        """
        limits, requests, answers = self._use.limits, self._use.requests, self._use.answers
        key = make_idempotency_key(self._use.run_id, request_id, body) if request_id else ""
        if key and (paid := answers.take(key)) is not None:
            return Reply(200, {}, read_object(paid), paid)
        await limits.admit(size.expected_tokens, priority)
        await requests.until_affordable(size.most)
        if self._denied is not None:
            raise self._denied
        number = requests.begin_request(retry=retry, most=size.most)
        try:
            reply = await self._send(url, body, size.max_bytes, key)
        except BadBody as error:
            cause = str(error)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            requests.unsent(number)
            cause = _cause_of(error)
        except httpx.RequestError as error:  # refused, reset, cut off, timed out
            cause = _cause_of(error)
        else:
            if (usage := Usage() if reply.status != 200 else read_usage(reply.body)) is not None:
                requests.end_request(number, usage)
            if key and reply.status == 200:
                answers.keep(key, self.clean(reply.raw.decode("utf-8", "replace")))
            used = count_used_tokens(reply.status, reply.body, size.expected_tokens, size.most_tokens)
            limits.settle(size.expected_tokens, used)
            return reply
        finally:
            requests.close_request(number)
        raise BusyError(cause)  # outside of `except`: a chained httpx error would contain the request with the key

    async def _send(self, url: str, body: Mapping[str, Any], max_bytes: int, key: str) -> Reply:
        headers = {IDEMPOTENCY_KEY: key} if key else None
        async with self._http.stream("POST", url, json=body, headers=headers) as response:
            raw = await read_bounded(response, max_bytes)
        return Reply(response.status_code, response.headers, read_object(raw), raw)

    def check_status(self, reply: Reply) -> None:
        """Raises BusyError for a status that passes, EngineRefused for one that stays, EngineDenied for one that stays
        whatever is asked.
        """
        out_of_quota = reply.status != 200 and is_out_of_quota(reply.body)
        if reply.status in DENIED_STATUSES or 300 <= reply.status < 400 or out_of_quota:
            raise self._denial(reply, out_of_quota=out_of_quota or reply.status == 402)
        if reply.status in RETRIED_STATUSES or reply.status >= 500:
            raise BusyError(f"HTTP {reply.status}: {reply.words}", _retry_after_s(reply.headers))
        if reply.status != 200:
            raise EngineRefused(self.clean(f"{self.server} refused with HTTP {reply.status}: {reply.words}"))
        self._has_served, self._num_denials = True, 0

    def check_model(self, answered: str) -> None:
        """Raises EngineDenied if the first answer is from another model, EngineRefused if a later one is."""
        is_first, self._model_answered = not self._model_answered, True
        if not answered or same_model(self._model, answered):
            return
        said = f"{self.server} was asked for {self._model!r}, but {answered[:200]!r} answered"
        if is_first:
            key = f"{self._use.model_key}.path"
            raise self._deny(f"{key}: {said}; give the name of a model that it serves")
        raise EngineRefused(self.clean(said))

    def _denial(self, reply: Reply, *, out_of_quota: bool) -> EngineDenied | EngineRefused:
        """The error for a denial: EngineRefused for a few in a row once the endpoint has served something."""
        self._num_denials += 1
        said = f"{self.server} answered HTTP {reply.status}: {reply.words.rstrip('.')}"
        if self._has_served and self._num_denials < MOST_DENIALS:
            return EngineRefused(self.clean(said))
        if self._has_served:
            said = f"{said} ({self._num_denials} times in a row, after it had served requests)"
        return self._deny(self._way_out(reply.status, said, out_of_quota=out_of_quota))

    def _way_out(self, status: int, said: str, *, out_of_quota: bool) -> str:
        """A denial in words that begin with the key to change."""
        config, use = self._config, self._use
        key, url, path = use.option_key("api_key_env"), use.option_key("base_url"), f"{use.model_key}.path"
        if 300 <= status < 400:
            return f"{url}: {said}; no request follows it: type {url}=<the address that answers itself>"
        if status == 407:
            return f"{url}: {said}; that is the proxy's answer: give it the name and password that it asks for"
        if status == 404 and not out_of_quota:
            return (
                f"{path}: {said}; type {path}=<a model that it serves> instead of {self._model}, or "
                f"{url}=<its address, for most with /v1 at the end> instead of {config.base_url}"
            )
        if not config.api_key_env:
            return f"{key}: {said}; no key was sent: export one in an environment variable and type {key}=<its name>"
        if out_of_quota:
            return (
                f"{key}: {said}; the account of the key in {config.api_key_env} is empty: add credit or raise its "
                f"limit, or type {key}=<the variable of another account's key>"
            )
        return (
            f"{key}: {said}; export a key with access to {self._model} in {config.api_key_env}, or type "
            f"{key}=<another variable>"
        )

    def _deny(self, text: str) -> EngineDenied:
        self._denied = EngineDenied(self.clean(text), has_served=self._has_served)
        return self._denied

    def _given_up(self, num_tries: int, busy: BusyError) -> str:
        asked = f"; it asks to wait {busy.retry_after_s:.0f} s" if busy.retry_after_s else ""
        key = self._use.option_key("max_retries")
        return f"{self.server} gave no answer in {num_tries} attempts ({key}); the last one: {busy}{asked}"

    def clean(self, text: str) -> str:
        """A text without the key, which some endpoints echo."""
        return text.replace(self._key, "***") if self._key else text


async def hide_redirect(response: httpx.Response) -> None:
    """Rename a response's Location: httpx reads it even if no redirect is followed, and takes a wrong one for a broken
    connection.
    """
    if "location" in response.headers:
        response.headers[REDIRECTED_TO] = response.headers.pop("location")


def make_idempotency_key(run_id: str, request_id: str, body: Mapping[str, Any]) -> str:
    """The same for the same question of a run, also after a resume; another one for any other question."""
    asked = json.dumps([run_id, first_name(request_id), body])
    return hashlib.sha256(asked.encode()).hexdigest()[:32]


def count_used_tokens(status: int, body: Mapping[str, Any], num_expected: int, most: int) -> int:
    """The tokens by the endpoint's count; a refused call uses none; without a count the expected ones."""
    return 0 if status != 200 else total_tokens(body, most) or num_expected


def same_model(asked: str, answered: str) -> bool:
    """Whether two names differ only in a version, a vendor's prefix or capitals, or one is the path of the other's GGUF
    file, as local servers answer.
    """
    shorter, longer = sorted(map(_bare_name, (asked, answered)), key=len)
    suffix = longer.removeprefix(shorter)
    return not suffix or (suffix != longer and VERSION_SUFFIX.fullmatch(suffix) is not None)


def _bare_name(name: str) -> str:
    """Without folders, and of a file without its type, quantization and number of parts."""
    file = re.split(r"[/\\]", name.casefold())[-1]
    if file.endswith(".gguf"):
        file = GGUF_ENDING.sub("", file)
    return re.sub(r"[-:]latest$", "", file)


def read_api_key(config: OpenAIConfig, use: EndpointUse) -> str:
    if not config.api_key_env:
        return ""
    key = os.environ.get(config.api_key_env, "").strip()
    if not key:
        raise ValueError(
            f"{use.option_key('api_key_env')}: the environment variable {config.api_key_env} isn't set; export it, "
            "or set api_key_env='' for an endpoint without a key"
        )
    return key


def refuse_fields_of_ours(config: OpenAIConfig, fields: frozenset[str]) -> None:
    """Raises ValueError if `extra_body` sets a field that the run itself sets."""
    for field in sorted(fields & config.extra_body.keys()):
        raise ValueError(f"engine.openai.extra_body: {field!r} is set by the run itself; remove it")


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


def _wait_s(busy: BusyError, attempt: int, request_id: str) -> float:
    """The wait that the endpoint asked for plus up to a quarter, or 0.5, 1, 2, .. s minus up to a half, to spread
    calls.
    """
    chance = derive_seed(attempt, request_id) / 2**63  # random, but the same when the run is repeated
    if busy.retry_after_s:
        return busy.retry_after_s * (1 + chance / 4)
    backoff_s: float = min(FIRST_BACKOFF_S * 2**attempt, LONGEST_BACKOFF_S)
    return backoff_s * (1 - chance / 2)


def _cause_of(error: httpx.RequestError) -> str:
    text = replace_controls(str(error))  # it may repeat what a server sent
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


PLAIN = frozenset({"", "identity"})
GZIP = frozenset({"gzip", "x-gzip"})
ACCEPTED = "gzip"  # the only encoding that is read
GZIP_WBITS = 16 + zlib.MAX_WBITS


class BadBody(Exception):
    """Larger than the limit, cut off, or in an encoding that was not requested."""


async def read_bounded(response: httpx.Response, max_bytes: int) -> bytes:
    """The body of a streamed response. Raises BadBody, or the httpx.RequestError of a failed connection."""
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in PLAIN | GZIP:
        raise BadBody(f"an answer compressed as {encoding[:40]!r}, which wasn't requested")
    unpack = Gunzip() if encoding in GZIP else None
    body, num_received = bytearray(), 0
    assert isinstance(response.stream, httpx.AsyncByteStream)
    async for chunk in response.stream:  # raw: httpx would decompress a whole chunk, whatever its size
        num_received += len(chunk)
        room = max_bytes - len(body) + 1
        body += chunk[:room] if unpack is None else unpack(chunk, room)
        if max(len(body), num_received) > max_bytes:  # received: empty members could come without end
            raise BadBody(f"an answer of more than {max_bytes} bytes")
    if unpack is not None and body and not unpack.complete:
        raise BadBody("a truncated compressed answer")
    return bytes(body)


class Gunzip:
    """Decompresses gzip, up to a limit of bytes: what exceeds it is never decompressed. A body may be several members,
    one after the other (RFC 1952, 2.2), with zeros behind the last.
    """

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(GZIP_WBITS)

    @property
    def complete(self) -> bool:
        return self._decoder.eof

    def __call__(self, chunk: bytes, max_bytes: int) -> bytes:
        body = bytearray()
        try:
            while chunk and len(body) < max_bytes:
                if self._decoder.eof:
                    if not (chunk := chunk.lstrip(b"\0")):
                        break
                    self._decoder = zlib.decompressobj(GZIP_WBITS)
                body += self._decoder.decompress(chunk, max_bytes - len(body))
                chunk = self._decoder.unused_data
        except zlib.error as error:
            raise BadBody(f"a compressed answer that can't be read: {error}") from None
        return bytes(body)
