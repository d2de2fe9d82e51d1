"""A remote judge over real HTTP: what is sent and returned, many errors, dropped connections, cancels; and the key
stays secret.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import logging
import re
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.models.engines.endpoint_use import EndpointUse
from grmpipe.models.engines.openai.endpoint_client import MOST_DENIALS, same_model
from grmpipe.models.engines.openai.openai_engine import OpenAIEngine
from grmpipe.models.settings import OpenAIConfig
from grmpipe.models.types import (
    Completion,
    EngineDenied,
    EngineDied,
    EngineRefused,
    Message,
    RequestContext,
    SamplingParams,
)

KEY = "sk-never-to-be-seen-0123456789"
MESSAGES = (Message(role="system", content="Judge."), Message(role="user", content="2 + 2 = 4"))


@dataclass
class Answer:
    """The endpoint's answer to one request."""

    body: dict[str, Any] | bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    drop: bool = False  # disconnect in the middle of the answer


def said(text: str = "Score: 7", model: str = "judge-1", finish: str = "stop", tokens: int | None = 5) -> Answer:
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 9, "completion_tokens": tokens}}
    message = {"role": "assistant", "content": text}
    return Answer({"model": model, "choices": [{"index": 0, "message": message, "finish_reason": finish}], **usage})


def error(status: int, message: str = "no", **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer({"error": {"message": message, "type": "x"}}, status, named)


class Endpoint(ThreadingHTTPServer):
    """Answers by a script, and repeats its last line."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Answer] = [said()]
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.idempotency_keys: list[str] = []
        self.hung_up = threading.Event()
        self.lock = threading.Lock()
        self.num_open = self.most_open = self.num_connections = 0

    def process_request(self, *args: Any) -> None:
        self.num_connections += 1
        super().process_request(*args)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def next_answer(self, request: dict[str, Any], key: str | None) -> Answer:
        with self.lock:
            self.requests.append(request)
            self.keys.append(key)
            return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def count(self, change: int) -> None:
        with self.lock:
            self.num_open += change
            self.most_open = max(self.most_open, self.num_open)


class Handler(BaseHTTPRequestHandler):
    server: Endpoint
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        self.server.count(+1)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.idempotency_keys.append(self.headers["Idempotency-Key"])
        answer = self.server.next_answer(body, self.headers["Authorization"])
        time.sleep(answer.delay_s)
        self.server.count(-1)
        data = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if answer.drop:
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        try:
            self.wfile.write(data)
            self.wfile.flush()
            if answer.delay_s and not self.connection.recv(1):
                self.server.hung_up.set()
                self.close_connection = True
        except OSError:
            self.server.hung_up.set()
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)


def chat(engine: OpenAIEngine, request_id: object = "r", priority: int = 0, **params: Any) -> Coroutine:
    sampling = SamplingParams(**{"max_new_tokens": 64, "seed": 3, **params})
    context = RequestContext(request_id=str(request_id), group_id="g", role="grm", priority=priority)
    return engine.chat(MESSAGES, sampling, context)


def open_engine(endpoint: Endpoint, path: str = "judge-1", **options: Any) -> OpenAIEngine:
    return OpenAIEngine(path, "grm", OpenAIConfig(base_url=endpoint.url, api_key_env="JUDGE_KEY", **options))


def ask(endpoint: Endpoint, path: str = "judge-1", options: dict[str, Any] | None = None, **params: Any) -> Completion:
    return asyncio.run(chat(open_engine(endpoint, path, **options or {}), **params))


def test_a_completion_has_text_and_counted_tokens_but_no_ids(endpoint: Endpoint) -> None:
    completion = ask(endpoint)
    assert (completion.text, completion.finish_reason) == ("Score: 7", "stop")
    assert completion.token_ids == completion.logprobs == ()
    assert (completion.unseen_tokens, completion.num_tokens) == (5, 5)
    assert [(span.model, span.version, span.start, span.end) for span in completion.versions] == [("grm", 0, 0, 0)]


def test_a_request_holds_the_conversation_the_sampling_and_nothing_unset(endpoint: Endpoint) -> None:
    options = {"extra_body": {"top_k": 20, "seed": None}}  # a null removes a field
    ask(endpoint, options=options, temperature=0.5, top_p=0.9, stop=("\n\n",))
    assert endpoint.requests == [
        {
            "model": "judge-1",
            "messages": [{"role": "system", "content": "Judge."}, {"role": "user", "content": "2 + 2 = 4"}],
            "max_tokens": 64,
            "temperature": 0.5,
            "top_p": 0.9,
            "stop": ["\n\n"],
            "top_k": 20,
        }
    ]
    assert endpoint.keys == [f"Bearer {KEY}"]


@pytest.mark.parametrize("slash", ["", "/"])
def test_the_query_of_the_base_url_comes_with_each_request_behind_its_path(slash: str) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return respond(said())

    base = f"https://x.openai.azure.com/openai/deployments/judge-1{slash}?api-version=2024-06-01"
    config = OpenAIConfig(base_url=base, api_key_env="")
    asyncio.run(chat(OpenAIEngine("judge-1", "grm", config, httpx.MockTransport(answer))))
    path = "openai/deployments/judge-1/chat/completions?api-version=2024-06-01"
    assert asked == [f"https://x.openai.azure.com/{path}"]


def test_a_seed_of_63_bits_is_sent_in_31_always_the_same(endpoint: Endpoint) -> None:
    for _ in range(2):
        ask(endpoint, seed=2**62 + 12345)
    assert [request["seed"] for request in endpoint.requests] == [12345, 12345]


def test_a_question_keeps_its_idempotency_key_while_it_has_no_answer(endpoint: Endpoint) -> None:
    """A key that came with an answer, however useless, would bring the same one again."""
    endpoint.script = [error(503), error(429), Answer({"choices": []}), said()]
    ask(endpoint)
    unanswered, again, useless, answered = endpoint.idempotency_keys
    assert unanswered == again == useless != answered
    assert re.fullmatch("[0-9a-f]{32}", answered)


def test_questions_have_different_idempotency_keys_and_a_resumed_run_the_same_ones(endpoint: Endpoint) -> None:
    """The group of the last one is sampled again after a resume, and gave the same rollout."""
    config = OpenAIConfig(base_url=endpoint.url, api_key_env="JUDGE_KEY")

    async def ask_all() -> None:
        for run_id, request_id, seed in (
            ("a", "g000001/0.0", 3), ("a", "g000001/0.1", 3), ("a", "g000001/0.0", 4), ("b", "g000001/0.0", 3),
            ("a", "g000001/0.0", 3), ("a", "g000001~2/0.0", 3),
        ):  # fmt: skip
            await chat(OpenAIEngine("judge-1", "grm", config, use=EndpointUse(run_id=run_id)), request_id, seed=seed)

    asyncio.run(ask_all())
    *different, resumed, renamed = endpoint.idempotency_keys
    assert len(set(different)) == 4
    assert resumed == renamed == different[0]


def test_an_endpoint_without_key_is_sent_none(endpoint: Endpoint) -> None:
    config = OpenAIConfig(base_url=endpoint.url, api_key_env="")
    asyncio.run(chat(OpenAIEngine("judge-1", "grm", config)))
    assert endpoint.keys == [None]


def test_cut_answer_is_truncated_and_missing_usage_counts_nothing(endpoint: Endpoint) -> None:
    endpoint.script = [said(finish="length", tokens=None)]
    completion = ask(endpoint)
    assert (completion.finish_reason, completion.unseen_tokens) == ("length", 0)


def test_the_newer_name_of_the_limit_is_learned_from_its_400(endpoint: Endpoint) -> None:
    endpoint.script = [error(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."), said()]

    async def go() -> None:
        engine = open_engine(endpoint)
        for request_id in range(2):
            await chat(engine, request_id)

    asyncio.run(go())
    names = ["max_tokens", "max_completion_tokens", "max_completion_tokens"]
    assert [next(name for name in request if name.startswith("max_")) for request in endpoint.requests] == names


def test_calls_that_were_sent_before_the_newer_name_was_learned_are_sent_again_under_it() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        known = "max_completion_tokens" in json.loads(request.content)
        return respond(said() if known else error(400, "use max_completion_tokens"))

    async def go() -> list[Completion]:
        engine = OpenAIEngine("judge-1", "grm", OpenAIConfig(api_key_env=""), httpx.MockTransport(answer))
        return await asyncio.gather(*(chat(engine, name) for name in range(4)))

    assert [completion.text for completion in asyncio.run(go())] == ["Score: 7"] * 4


def test_a_limit_refused_under_both_names_is_refused_once_and_for_all(endpoint: Endpoint) -> None:
    endpoint.script = [error(400, "max_completion_tokens must be below 32")]
    with pytest.raises(EngineRefused, match="must be below 32"):
        ask(endpoint)
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refusal_is_not_retried_and_gives_the_endpoints_own_words(endpoint: Endpoint, status: int) -> None:
    endpoint.script = [error(status, "no such thing here")]
    with pytest.raises(EngineRefused, match=f"HTTP {status}: no such thing here"):
        ask(endpoint)
    assert len(endpoint.requests) == 1


DENIALS = [
    (error(401, "no such key"), r"^engine\.openai\.api_key_env: .*HTTP 401: no such key; export a key .* JUDGE_KEY"),
    (error(403, "not yours"), r"^engine\.openai\.api_key_env: .*HTTP 403: not yours; export a key"),
    (error(404, "no such"), r"^grm\.path: .*HTTP 404: no such; type grm\.path=.* engine\.openai\.base_url="),
    (error(402, "pay first"), r"^engine\.openai\.api_key_env: .*the account of the key in JUDGE_KEY is empty"),
    (Answer({"error": {"message": "m", "code": "insufficient_quota"}}, 429), "is empty: add credit"),
    (Answer({"error": {"message": "m", "type": "exceeded_current_quota_error"}}, 429), "is empty: add credit"),
    (Answer({"error": {"message": "m", "code": "billing_hard_limit_reached"}}, 400), "is empty: add credit"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "words"), DENIALS)
def test_a_first_answer_that_denies_is_the_last_request_and_names_the_key_and_the_way_out(
    endpoint: Endpoint, answer: Answer, words: str
) -> None:
    endpoint.script = [answer]

    async def go() -> list[object]:
        engine = open_engine(endpoint)
        return [(await asyncio.gather(chat(engine, name), return_exceptions=True))[0] for name in range(3)]

    errors = asyncio.run(go())
    assert all(isinstance(found, EngineDenied) for found in errors), errors
    assert re.search(words, str(errors[0])) and KEY not in str(errors[0])
    assert len(endpoint.requests) == 1


def test_keys_of_a_model_by_name_are_those_that_its_user_sets(endpoint: Endpoint) -> None:
    endpoint.script = [error(401)]
    use = EndpointUse(model_key="models.other", option_key=lambda name: f"models.other.engine_options.{name}")
    config = OpenAIConfig(base_url=endpoint.url, api_key_env="JUDGE_KEY")
    with pytest.raises(EngineDenied, match=r"^models\.other\.engine_options\.api_key_env: "):
        asyncio.run(chat(OpenAIEngine("judge-1", "other", config, use=use)))


@pytest.mark.parametrize("answer", [DENIALS[0][0], DENIALS[4][0]])
def test_denials_after_an_answer_are_refusals_until_several_come_in_a_row(endpoint: Endpoint, answer: Answer) -> None:
    """A gateway may deny one request; a key that was revoked denies all."""
    endpoint.script = [said(), *[answer] * (MOST_DENIALS - 1), said(), answer]

    async def go() -> list[type]:
        engine = open_engine(endpoint)
        results = [await asyncio.gather(chat(engine, n), return_exceptions=True) for n in range(2 * MOST_DENIALS + 5)]
        return [type(one) for (one,) in results]

    row = [EngineRefused] * (MOST_DENIALS - 1)
    assert asyncio.run(go()) == [Completion, *row, Completion, *row, *[EngineDenied] * 5]
    assert len(endpoint.requests) == 2 * MOST_DENIALS + 1


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "a redirect without a Location"),
        ({"Location": "https://elsewhere/v1/chat"}, "a redirect to https://elsewhere/v1/chat"),
        ({"Location": "http://[::1/\x85"}, r"a redirect to http://\[::1/�"),
    ],
)
def test_a_redirect_is_not_followed_and_not_asked_again(
    endpoint: Endpoint, headers: dict[str, str], words: str
) -> None:
    endpoint.script = [Answer(b"", 307, headers)]
    said = rf"^engine\.openai\.base_url: 127\.0\.0\.1 answered HTTP 307: {words}; .* type engine\.openai\.base_url="
    with pytest.raises(EngineDenied, match=said):
        ask(endpoint)
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("words", ["Rate limit reached for your billing tier", "insufficient_quota"])
def test_busy_endpoint_is_not_taken_for_an_empty_account(endpoint: Endpoint, words: str) -> None:
    endpoint.script = [error(429, words, Retry_After="0.01"), said()]
    assert ask(endpoint).text == "Score: 7"


def test_a_filtered_answer_is_no_judgement(endpoint: Endpoint) -> None:
    endpoint.script = [said(finish="content_filter")]
    with pytest.raises(EngineRefused, match="filtered"):
        ask(endpoint)


def test_a_pattern_is_refused_with_the_way_out_before_anything_is_sent(endpoint: Endpoint) -> None:
    with pytest.raises(EngineRefused, match=r"engine\.openai\.extra_body"):
        ask(endpoint, pattern="Score: [0-9]")
    assert endpoint.requests == []


def test_another_model_that_answers_first_is_named_with_the_key_to_change(endpoint: Endpoint) -> None:
    endpoint.script = [said(model="judge-1-mini")]
    with pytest.raises(ValueError, match=r"grm\.path: .*'judge-1'.*'judge-1-mini'"):
        ask(endpoint)


def test_another_model_that_answers_later_is_refused_and_the_next_answer_counts(endpoint: Endpoint) -> None:
    endpoint.script = [said(), said(model="judge-1-mini"), said("Score: 8")]

    async def go() -> str:
        engine = open_engine(endpoint)
        await chat(engine, "first")
        with pytest.raises(EngineRefused, match="'judge-1-mini' answered"):
            await chat(engine, "fallen back")
        return (await chat(engine, "next")).text

    assert asyncio.run(go()) == "Score: 8"
    assert len(endpoint.requests) == 3


def test_an_unknown_end_of_an_answer_is_refused_once_by_its_name(endpoint: Endpoint) -> None:
    endpoint.script = [said(finish="error")]
    with pytest.raises(EngineRefused, match=r"finish_reason 'error'; known: stop, eos, "):
        ask(endpoint)
    assert len(endpoint.requests) == 1


# Unlimited answers.


@pytest.mark.parametrize("packed", [False, True])
def test_an_answer_above_its_bound_is_no_answer_and_takes_no_memory(endpoint: Endpoint, packed: bool) -> None:
    body = b'{"choices": [{"message": {"content": "' + b"x" * 60_000_000 + b'"}, "finish_reason": "stop"}]}'
    headers = {"Content-Encoding": "gzip"} if packed else {}
    endpoint.script = [Answer(gzip.compress(body, 1) if packed else body, headers=headers)]
    tracemalloc.start()
    with pytest.raises(EngineDied, match="an answer of more than 1048576 bytes"):
        ask(endpoint, options={"max_retries": 0})
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 30_000_000  # of both ends: the server's data existed before


def test_a_body_of_several_gzip_members_is_read_whole(endpoint: Endpoint) -> None:
    body = json.dumps(said("Score: 9").body).encode()
    members = b"".join(gzip.compress(body[start : start + 20]) for start in range(0, len(body), 20))
    endpoint.script = [Answer(members + b"\0" * 512, headers={"Content-Encoding": "gzip"})]
    assert ask(endpoint).text == "Score: 9"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (gzip.compress(b"{}") + b"garbage", "a compressed answer that can't be read"),
        (gzip.compress(b'{"choices": []}')[:-4], "a truncated compressed answer"),
        (b'{"choices": []}', "a compressed answer that can't be read"),
    ],
    ids=["garbage behind", "cut off", "not compressed"],  # gzip writes the time into the bytes: names would change
)
def test_a_gzip_body_that_is_none_is_no_answer(body: bytes, words: str) -> None:
    answer = httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(body))
    died, _ = virtually([answer], chat, max_retries=0)
    assert isinstance(died, EngineDied) and words in str(died)


@pytest.mark.parametrize("packed", [False, True])
def test_an_answer_without_end_is_given_up_at_its_bound(packed: bool) -> None:
    async def without_end() -> AsyncIterator[bytes]:
        while True:
            yield gzip.compress(b"") * 50 if packed else b" " * 65_536  # members without content

    headers = {"Content-Encoding": "gzip"} if packed else {}
    died, _ = virtually([httpx.Response(200, content=without_end(), headers=headers)], chat, max_retries=0)
    assert isinstance(died, EngineDied)
    assert "an answer of more than" in str(died)


def test_a_connection_is_used_again_after_an_answer(endpoint: Endpoint) -> None:
    async def go() -> None:
        engine = open_engine(endpoint)
        for request_id in range(3):
            await chat(engine, request_id)

    asyncio.run(go())
    assert endpoint.num_connections == 1


@pytest.mark.parametrize(
    ("asked", "answered", "same"),
    [
        ("gpt-4o", "gpt-4o-2024-08-06", True),
        ("gpt-4", "gpt-4-0613", True),
        ("sonnet-latest", "sonnet-20250219", True),
        ("openai/gpt-4o", "gpt-4o", True),
        ("Qwen/Qwen3-8B", "qwen3-8b", True),
        ("gemini-pro", "gemini-pro-001", True),
        ("smollm2", "smollm2:latest", True),
        ("SmolLM2-135M-Instruct", "/models/SmolLM2-135M-Instruct.Q4_1.gguf", True),
        ("qwen3-8b", r"C:\models\Qwen3-8B-Q4_K_M-00001-of-00002.gguf", True),
        ("/models/judge.gguf", "judge.gguf", True),
        ("qwen3-8b", "/models/qwen3-4b-q4_k_m.gguf", False),
        ("qwen3:8b", "qwen3:4b", False),
        ("local", "/models/judge.gguf", False),
        ("gpt-4o", "gpt-4o-mini", False),
        ("gpt-4", "gpt-4.1", False),
        ("llama-3", "llama-3-70b", False),
        ("llama-3", "llama-3-405b", False),
        ("judge-1", "other", False),
        ("judge-1", "other-1", False),
    ],
)
def test_a_version_suffix_is_the_same_model_and_a_size_is_not(asked: str, answered: str, same: bool) -> None:
    assert same_model(asked, answered) is same_model(answered, asked) is same


def test_a_storm_of_429s_changes_no_answer(endpoint: Endpoint) -> None:
    storm = [error(429, "slow down", Retry_After="0.02") for _ in range(60)]
    endpoint.script = [*storm, said()]

    async def go() -> list[Completion]:
        engine = open_engine(endpoint, max_connections=8, max_retries=40)
        return await asyncio.gather(*(chat(engine, request_id) for request_id in range(24)))

    assert [completion.text for completion in asyncio.run(go())] == ["Score: 7"] * 24
    assert len(endpoint.requests) == 24 + 60
    assert 1 < endpoint.most_open <= 8


def test_hang_ups_and_broken_answers_are_asked_again(endpoint: Endpoint) -> None:
    dropped = said()
    dropped.drop = True
    endpoint.script = [dropped, Answer(b"<html>bad gateway</html>", 502), Answer(b"not json"), said()]
    assert ask(endpoint).text == "Score: 7"
    assert len(endpoint.requests) == 4


def test_unreachable_endpoint_counts_as_died_with_the_last_cause() -> None:
    config = OpenAIConfig(base_url="http://127.0.0.1:9/v1", api_key_env="JUDGE_KEY", max_retries=1)
    with pytest.raises(EngineDied, match=r"127\.0\.0\.1 gave no answer in 2 attempts .*max_retries.*ConnectError"):
        asyncio.run(chat(OpenAIEngine("judge-1", "grm", config)))


def test_cancelling_a_call_hangs_up_and_frees_its_place(endpoint: Endpoint) -> None:
    slow = said("late")
    slow.delay_s = 1.5
    endpoint.script = [slow, said("next")]

    async def go() -> tuple[Completion, float]:
        engine, loop = open_engine(endpoint, max_connections=1), asyncio.get_running_loop()
        call = asyncio.create_task(chat(engine, "slow"))
        while not endpoint.requests:
            await asyncio.sleep(0.01)
        start = loop.time()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return await chat(engine, "next"), loop.time() - start

    completion, took_s = asyncio.run(go())
    assert completion.text == "next"
    assert took_s < 1.4
    assert endpoint.hung_up.wait(5)


def test_two_calls_of_one_request_share_its_answer_even_if_the_first_is_cancelled(endpoint: Endpoint) -> None:
    slow = said("once")
    slow.delay_s = 0.2
    endpoint.script = [slow]

    async def go() -> Completion:
        engine = open_engine(endpoint)
        first, second = asyncio.create_task(chat(engine)), asyncio.create_task(chat(engine))
        await asyncio.sleep(0.05)
        first.cancel()
        return await second

    assert asyncio.run(go()).text == "once"
    assert len(endpoint.requests) == 1


# On a virtual clock: waits are those of the loop, and exact.


def virtually(
    answers: list[httpx.Response], go: Callable[[OpenAIEngine], Coroutine], **options: Any
) -> tuple[Any, Any]:
    """The result or error of `go`, and the times of its requests; the last answer is repeated."""
    times: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        times.append(asyncio.get_running_loop().time())
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def run() -> Any:
        config = OpenAIConfig(api_key_env="JUDGE_KEY", **options)
        engine = OpenAIEngine("judge-1", "grm", config, httpx.MockTransport(answer))
        return (await asyncio.gather(go(engine), return_exceptions=True))[0]

    return run_virtually(run), times


def respond(answer: Answer) -> httpx.Response:
    return httpx.Response(answer.status, headers=answer.headers, json=answer.body)


def test_waits_double_with_jitter_and_end_in_died_after_max_retries() -> None:
    died, times = virtually([respond(error(503, "overloaded"))], chat, max_retries=4)
    assert isinstance(died, EngineDied)
    assert "in 5 attempts" in str(died) and "HTTP 503: overloaded" in str(died)
    waits = [after - before for before, after in itertools.pairwise(times)]
    for wait, longest in zip(waits, (0.5, 1, 2, 4), strict=True):
        assert longest / 2 - 1e-3 <= wait <= longest + 1e-3


def test_calls_that_failed_together_come_back_apart() -> None:
    def both(engine: OpenAIEngine) -> Coroutine:
        return asyncio.gather(*(chat(engine, name) for name in range(8)), return_exceptions=True)  # type: ignore

    async def go(engine: OpenAIEngine) -> Any:
        return await both(engine)

    _, times = virtually([respond(error(429))], go, max_retries=1)
    assert len({round(when, 4) for when in times[8:]}) == 8


@pytest.mark.parametrize("form", ["seconds", "date", "date of a wrong clock"])
def test_retry_after_is_waited_for_in_seconds_and_as_a_date(form: str) -> None:
    now = datetime.now(UTC) - timedelta(hours=form == "date of a wrong clock")
    date = format_datetime(now + timedelta(seconds=30), usegmt=True)
    headers = {"Retry_After": "30" if form == "seconds" else date}
    if form == "date of a wrong clock":
        headers["Date"] = format_datetime(now, usegmt=True)
    completion, times = virtually([respond(error(429, **headers)), respond(said())], chat)
    assert isinstance(completion, Completion)
    assert 28 <= times[1] - times[0] <= 30 * 1.25 + 0.1


def test_the_longest_wait_that_is_allowed_is_waited_for_with_its_jitter() -> None:
    completion, times = virtually([respond(error(429, Retry_After="299")), respond(said())], chat)
    assert isinstance(completion, Completion)
    assert 299 <= times[1] - times[0] <= 299 * 1.25 + 0.1


def test_an_endpoint_that_asks_for_hours_is_given_up_at_once() -> None:
    died, times = virtually([respond(error(429, "quota", Retry_After="7200"))], chat)
    assert isinstance(died, EngineDied)
    assert "asks to wait 7200 s" in str(died)
    assert len(times) == 1


def test_waiting_calls_go_in_by_priority() -> None:
    order: list[object] = []

    async def go(engine: OpenAIEngine) -> None:
        async def one(name: str, priority: int) -> None:
            await chat(engine, name, priority)
            order.append(name)

        async with asyncio.TaskGroup() as tasks:
            for name, priority in (("first", 5), ("late", 9), ("urgent", 0), ("middle", 5)):
                tasks.create_task(one(name, priority))
                await asyncio.sleep(0.01)

    virtually([respond(error(429, Retry_After="1")), respond(said())], go, max_connections=1)
    assert order == ["first", "urgent", "middle", "late"]


# The key.


def test_a_missing_key_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ValueError, match=r"engine\.openai\.api_key_env: .* JUDGE_KEY isn't set"):
        OpenAIEngine("judge-1", "grm", OpenAIConfig(api_key_env="JUDGE_KEY"))


def test_fields_that_the_run_sets_are_refused_in_extra_body() -> None:
    with pytest.raises(ValueError, match=r"extra_body: 'messages'"):
        OpenAIEngine("judge-1", "grm", OpenAIConfig(api_key_env="JUDGE_KEY", extra_body={"messages": []}))


@pytest.mark.parametrize("answer", [error(401, f"unknown key {KEY}"), error(500, f"crashed on {KEY}"), said(model="x")])
def test_the_key_is_in_no_error_and_no_log(
    endpoint: Endpoint, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.script = [answer]
    caplog.set_level(logging.DEBUG)
    with pytest.raises((EngineRefused, EngineDied, ValueError)) as caught:
        ask(endpoint, options={"max_retries": 0})
    chain: list[BaseException] = [caught.value]
    while (under := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(under)
    assert len(chain) == 1  # no chained error that contains the request with its headers
    assert KEY not in repr(caught.value) + str(caught.value)
    assert caplog.records
    assert KEY not in caplog.text
