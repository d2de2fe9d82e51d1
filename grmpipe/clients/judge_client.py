"""Asks a judge of `task=serve` from another program. Imports httpx or httpx2, whichever the trainer's environment has,
and no other library: grmpipe is installed beside a trainer by `pip install --no-deps`.
"""

import asyncio
import json
import logging
import os
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

try:
    import httpx
except ModuleNotFoundError:
    import httpx2 as httpx  # type: ignore[no-redef]  # huggingface_hub 2.4, and TRL with it, brings this one alone

log = logging.getLogger(__name__)

PATH = "/v1/judge"
RESERVED = ("prompt", "messages", "response", "responses", "prompt_id")  # fields of a request that the client fills
FIRST_PAUSE_S, LONGEST_PAUSE_S, CONNECT_S = 0.5, 5.0, 10.0
SHOWN = 300  # characters of an answer that isn't the service's, in errors

# As docs/serving.md describes it: reward, score, critiques; failed and detail where there is no reward.
RemoteVerdict = dict[str, Any]


class NotJudgedError(Exception):
    """There is no verdict: the judgement failed, or the service didn't answer in time."""


class JudgeClient:
    """The client of one judge. It holds no connection, so it may be asked from several threads and event loops.

    url: of the service (http://127.0.0.1:8710), or with the path of one of its judges; a name in it (http://me@host:8710)
    is the client's, for its fair share. key_env: the environment variable that holds the service's key; timeout_s: how
    long a question may take, with all its retries.
    """

    def __init__(self, url: str, *, key_env: str | None = None, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: expected the address of a service, as http://127.0.0.1:8710, got {url!r}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s: must be above 0, got {timeout_s}")
        if key_env is not None and not os.environ.get(key_env):
            raise ValueError(f"key_env: the environment variable {key_env} is empty or isn't set")
        key = os.environ[key_env] if key_env else unquote(parts.password or "")
        self._auth = (unquote(parts.username or ""), key) if parts.username or key else None
        path = parts.path if parts.path.strip("/") else PATH
        self.url = parts._replace(netloc=parts.netloc.rpartition("@")[2], path=path).geturl()  # errors show it: no key
        self.timeout_s = timeout_s
        self._is_away = False
        self._tls = httpx.create_ssl_context() if parts.scheme == "https" else False

    async def ask(self, prompt: object, responses: Sequence[object], /, **columns: object) -> list[RemoteVerdict]:
        """The verdicts on the responses of a group, in their order. Raises NotJudgedError if the service doesn't answer
        in time, ValueError with its words if it refuses the request.

        prompt, responses: texts, or lists of messages; columns: reference, rubric and others that the judge reads.
        """
        row = {name: value for name, value in columns.items() if value is not None and name not in RESERVED}
        row |= {"prompt": write_plain(prompt), "responses": [write_plain(one) for one in responses]}
        # A retry finds what it asked for under this name still in work, and pays nothing twice.
        given = columns.get("prompt_id")
        row["prompt_id"] = uuid.uuid4().hex if given is None else f"{given}/{uuid.uuid4().hex}"
        answer = await self._post(encode_row(row))
        verdicts = answer.get("verdicts") if isinstance(answer, dict) else None
        if not isinstance(verdicts, list) or len(verdicts) != len(responses):
            raise ValueError(f"{self.url}: expected {len(responses)} verdicts, got {str(answer)[:SHOWN]}")
        return verdicts

    async def ask_one(self, prompt: object, response: object, /, **columns: object) -> RemoteVerdict:
        """The verdict on one response. Raises NotJudgedError if there is none."""
        (verdict,) = await self.ask(prompt, [response], **columns)
        if verdict["reward"] is None:
            raise NotJudgedError(f"{verdict['failed']}: {verdict['detail']}")
        return verdict

    async def _post(self, body: bytes) -> object:
        """The service's answer. What passes with time is tried again until the deadline."""
        ends_s, pause_s = time.monotonic() + self.timeout_s, FIRST_PAUSE_S
        while True:
            left_s = ends_s - time.monotonic()
            timeout = httpx.Timeout(left_s, connect=min(CONNECT_S, left_s))
            try:
                # A pool would be shared with loops that have ended, and searched in each request.
                async with httpx.AsyncClient(
                    auth=self._auth, verify=self._tls, trust_env=False, timeout=timeout
                ) as client:
                    answer = await asyncio.wait_for(client.post(self.url, content=body), left_s)
            except (httpx.TransportError, TimeoutError) as error:
                wrong = f"{type(error).__name__}: {error}".rstrip(": ")
            else:
                if answer.is_success:
                    self._is_away = False
                    return read_json(answer.text)
                wrong = f"status {answer.status_code}: {read_error(answer.text)}"
                if answer.status_code < 500 and answer.status_code != 429:
                    raise ValueError(f"{self.url}: {wrong}")
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            wait_s = random.uniform(pause_s / 2, pause_s)
            if time.monotonic() + wait_s >= ends_s:
                raise NotJudgedError(f"no answer from {self.url} within {self.timeout_s:g} s; the last try: {wrong}")
            if not self._is_away:  # once for all questions that wait
                self._is_away = True
                log.warning("no verdict from %s: %s; it is asked again, for %g s", self.url, wrong, self.timeout_s)
            await asyncio.sleep(wait_s)


def write_plain(text: object) -> object:
    """A text, or messages whose content is one text each, as the service takes them: blocks of text are joined, calls
    of tools are written out, as the judge reads them in runs.
    """
    if isinstance(text, str) or not isinstance(text, Sequence):
        return text
    return [
        {"role": message["role"], "content": write_content(message)} if isinstance(message, Mapping) else message
        for message in text
    ]


def write_content(message: Mapping[str, Any]) -> object:
    content = message.get("content") or ""
    if not isinstance(content, str):
        others = [block for block in content if block.get("type") != "text"]
        if others:
            raise ValueError(
                f"messages: the judge reads texts alone; there is content of type {others[0].get('type')!r}"
            )
        content = "".join(block["text"] for block in content)
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    shown = [{"name": call["name"], "arguments": read_arguments(call["arguments"])} for call in calls]
    blocks = [f"<tool_call>\n{json.dumps(one, ensure_ascii=False)}\n</tool_call>" for one in shown]
    return "\n".join([*([content] if content else []), *blocks])


def read_arguments(arguments: object) -> object:
    """Of a call: OpenAI's form has them as JSON in a text, TRL's as an object."""
    return read_json(arguments) if isinstance(arguments, str) else arguments


def read_json(text: str) -> object:
    """What a text says as JSON, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_error(text: str) -> str:
    """The service's words; of another answer, as a proxy's, its beginning."""
    found = read_json(text)
    return str(found["error"] if isinstance(found, dict) and "error" in found else text[:SHOWN])


def encode_row(row: Mapping[str, object]) -> bytes:
    """As JSON; arrays and numbers of numpy, which Parquet files come as, are lists and numbers."""
    for name, value in row.items():
        try:
            json.dumps(value, default=to_plain)
        except TypeError as error:
            raise ValueError(
                f"{name}: can't be sent as JSON ({error}); name the columns that the judge reads: columns=['reference']"
            ) from None
    return json.dumps(row, default=to_plain).encode()


def to_plain(value: Any) -> object:
    if not hasattr(value, "tolist"):
        raise TypeError(f"it holds a value of type {type(value).__name__}")
    return value.tolist()
