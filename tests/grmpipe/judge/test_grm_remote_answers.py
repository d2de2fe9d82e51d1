"""Every answer of an endpoint becomes a judgement or a failure with a cause, and never an exception of the run."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest
from configs import judge_config
from hypothesis import given, settings
from hypothesis import strategies as st

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.judge.grm import GrmClient, GrmQuestion, RemoteGrm
from grmpipe.judge.markup import Markup
from grmpipe.models.engines.endpoint_use import EndpointUse
from grmpipe.models.engines.openai.openai_engine import OpenAIEngine
from grmpipe.models.settings import OpenAIConfig
from grmpipe.models.types import Message
from grmpipe.scheduler.events import NoEvents
from grmpipe.scheduler.routing.rate_limits import RateLimits
from grmpipe.types import Failed, Judgement

TEXT = "fine\nScore: 7"
MESSAGE = {"role": "assistant", "content": TEXT}
CHOICE = {"index": 0, "message": MESSAGE, "finish_reason": "stop"}
GOOD = {"model": "judge", "choices": [CHOICE], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}


def with_choice(**fields: Any) -> dict[str, Any]:
    return {**GOOD, "choices": [{**CHOICE, **fields}]}


def with_message(**fields: Any) -> dict[str, Any]:
    return with_choice(message={**MESSAGE, **fields})


def with_usage(**fields: Any) -> dict[str, Any]:
    return {**GOOD, "usage": {"prompt_tokens": 9, "completion_tokens": 5, **fields}}


def reply(body: Any = GOOD, status: int = 200, **headers: str) -> httpx.Response:
    """`body`: bytes are sent as they are, anything else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, headers=named, stream=httpx.ByteStream(content))


def answered_after_a_good_one(response: httpx.Response) -> Judgement | Failed:
    """The result of the second judgement, on a virtual clock, with rate limits."""
    answers = [reply()]

    async def go() -> Judgement | Failed:
        limits = RateLimits(requests_per_minute=100_000, tokens_per_minute=1_000_000)
        transport = httpx.MockTransport(lambda request: answers.pop() if answers else response)
        engine = OpenAIEngine("judge", "grm", OpenAIConfig(api_key_env=""), transport, EndpointUse(limits=limits))
        grm = RemoteGrm("grm", engine, 0, NoEvents(), Markup(()))
        client = GrmClient(grm, judge_config(max_retries=0, timeout_s=600), seed=1)
        question = GrmQuestion(
            group_id="g",
            name="g/0",
            siblings=(0,),
            num_scores=1,
            prompt=grm.prompt([Message(role="user", content="Q: 1 + 1?")]),
        )
        last: list[Judgement | Failed] = []
        for index in range(3):  # the third waits for the reported usage of the second
            last = await client.judgement(question, index, priority=0)
        await engine.close()
        return last[-1]

    return run_virtually(go)


DEEP = b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
ODD = {
    "choices an object": ({**GOOD, "choices": {"0": CHOICE}}, "died"),
    "choices a text": ({**GOOD, "choices": "one"}, "died"),
    "choices a number": ({**GOOD, "choices": 3}, "died"),
    "choices NaN": ({**GOOD, "choices": float("nan")}, "died"),
    "choices null": ({**GOOD, "choices": None}, "died"),
    "choices empty": ({**GOOD, "choices": []}, "died"),
    "choices of null": ({**GOOD, "choices": [None]}, "died"),
    "choices of text": ({**GOOD, "choices": ["text"]}, "died"),
    "choices of one index": ({**GOOD, "choices": [CHOICE, CHOICE]}, "died"),
    "choices out of order": ({**GOOD, "choices": [{**CHOICE, "index": 1, "message": {"content": "?"}}, CHOICE]}, None),
    "choice empty": ({**GOOD, "choices": [{}]}, "died"),
    "message a text": (with_choice(message="Score: 7"), "died"),
    "message a list": (with_choice(message=[MESSAGE]), "died"),
    "message null": (with_choice(message=None), "died"),
    "content parts": (with_message(content=[{"type": "text", "text": "fine\n"}, {"text": "Score: 7"}]), None),
    "content parts of text": (with_message(content=["fine\n", "Score: 7"]), None),
    "content thought first": (
        with_message(content=[{"type": "thinking", "thinking": "Score: 1"}, {"type": "text", "text": TEXT}]),
        None,
    ),
    "content parts of numbers": (with_message(content=[1, 2]), "died"),
    "content part without text": (with_message(content=[{"type": "text", "text": 7}]), "died"),
    "content part of a type that is a list": (with_message(content=[{"type": ["text"], "text": TEXT}]), "died"),
    "content a number": (with_message(content=7), "died"),
    "content an object": (with_message(content={"text": TEXT}), "died"),
    "content null": (with_message(content=None), "unparseable"),
    "content of half a pair": (with_message(content=f"\ud83d {TEXT}"), None),
    "refusal": (with_message(refusal="I won't"), "refused"),
    "refusal a list": (with_message(refusal=["I won't"]), "died"),
    "finish_reason a list": (with_choice(finish_reason=["stop"]), "died"),
    "finish_reason an object": (with_choice(finish_reason={"type": "stop"}), "died"),
    "finish_reason a number": (with_choice(finish_reason=1), "died"),
    "finish_reason null": (with_choice(finish_reason=None), None),
    "finish_reason null at the limit": (
        {**with_choice(finish_reason=None), "usage": {"completion_tokens": 160}},
        "truncated",
    ),
    "finish_reason null and no content": (
        {**GOOD, "choices": [{"message": {"content": ""}}]},
        "refused",
    ),
    "finish_reason eos_token": (with_choice(finish_reason="eos_token"), None),
    "finish_reason MAX_TOKENS": (with_choice(finish_reason="MAX_TOKENS"), "truncated"),
    "finish_reason error": (with_choice(finish_reason="error"), "refused"),
    "finish_reason content_filter": (with_choice(finish_reason="content_filter"), "refused"),
    "finish_reason length": (with_choice(finish_reason="length"), "truncated"),
    "model a number": ({**GOOD, "model": 7}, "died"),
    "model an object": ({**GOOD, "model": {"name": "judge"}}, "died"),
    "model null": ({**GOOD, "model": None}, None),
    "another model": ({**GOOD, "model": "judge-mini"}, "refused"),
    "usage a list": ({**GOOD, "usage": [1]}, None),
    "usage a text": ({**GOOD, "usage": "12"}, None),
    "usage null": ({**GOOD, "usage": None}, None),
    "completion_tokens a text": (with_usage(completion_tokens="5"), None),
    "completion_tokens negative": (with_usage(completion_tokens=-5), None),
    "completion_tokens NaN": (with_usage(completion_tokens=float("nan")), None),
    "completion_tokens infinite": (with_usage(completion_tokens=float("inf")), None),
    "completion_tokens a fraction": (with_usage(completion_tokens=5.0), None),
    "completion_tokens true": (with_usage(completion_tokens=True), None),
    "completion_tokens huge": (with_usage(completion_tokens=10**15), None),
    "total_tokens a text": (with_usage(total_tokens="12"), None),
    "total_tokens huge": (with_usage(total_tokens=10**15), None),
    "error in a 200": ({"error": {"message": "overloaded"}}, "died"),
    "error a list": ({"error": [1]}, "died"),
    "message of an error an object": ({"error": {"message": {"a": 1}}}, "died"),
    "a list": ([GOOD], "died"),
    "a text": ("fine", "died"),
    "a number": (7, "died"),
    "null": (None, "died"),
    "no JSON": (b"<html>oops</html>", "died"),
    "nothing": (b"", "died"),
    "no UTF-8": (b'{"choices": "\xff\xfe"}', "died"),
    "NUL bytes": (b"\0" * 64, "died"),
    "a number of 10 000 digits": (b'{"choices": ' + b"9" * 10_000 + b"}", "died"),
    "deep nesting": (DEEP, "died"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_answer_is_read_or_fails_with_a_cause(name: str) -> None:
    body, cause = ODD[name]
    result = answered_after_a_good_one(reply(body))
    assert (result.cause if isinstance(result, Failed) else None) == cause, result
    if isinstance(result, Judgement):
        assert result.scores == (7.0,)
        assert 0 <= result.completion.unseen_tokens <= 160
        json.dumps(result.completion.text, ensure_ascii=False).encode()  # as the journal writes it


SENT = {
    "gzip": (reply(gzip.compress(json.dumps(GOOD).encode()), Content_Encoding="gzip"), None),
    "a gzip cut off": (reply(gzip.compress(json.dumps(GOOD).encode())[:-12], Content_Encoding="gzip"), "died"),
    "a gzip that is none": (reply(GOOD, Content_Encoding="gzip"), "died"),
    "gzip in two members": (
        reply(
            gzip.compress(json.dumps(GOOD).encode()[:30]) + gzip.compress(json.dumps(GOOD).encode()[30:]),
            Content_Encoding="gzip",
        ),
        None,
    ),
    "gzip twice": (reply(gzip.compress(gzip.compress(b"{}")), Content_Encoding="gzip, gzip"), "died"),
    "an encoding that nobody asked for": (reply(GOOD, Content_Encoding="br"), "died"),
    "a charset that nobody knows": (reply(GOOD, Content_Type="application/json; charset=x-none"), None),
    "a redirect": (reply(b"", 302, Location="http://127.0.0.1:1/v1"), "refused"),
    "created": (reply(GOOD, 201), "refused"),
    "no content": (reply(b"", 204), "refused"),
    "refused": (reply({"error": {"message": "no such field"}}, 400), "refused"),
    "refused in a list": (reply({"detail": [{"loc": ["body"], "msg": "no such field"}]}, 422), "refused"),
    "refused in depth": (reply(DEEP, 400), "refused"),
    "broken": (reply(b"<html>bad gateway</html>", 502), "died"),
    "a status of its own": (reply(b"", 599), "died"),
    "a date without time": (reply({}, 429, Retry_After="Wed, 21 Oct 9999 07:28:00 -1200"), "died"),
    "a date before all time": (reply({}, 429, Retry_After="Mon, 01 Jan 0001 00:00:00 +1400"), "died"),
    "a date of no calendar": (reply({}, 429, Retry_After="Wed, 99 Foo 2026 99:99:99 GMT"), "died"),
    "endless seconds": (reply({}, 429, Retry_After="9" * 400), "died"),
    "seconds below zero": (reply({}, 429, Retry_After="-5"), "died"),
}


@pytest.mark.parametrize("name", SENT)
def test_an_answer_sent_oddly_is_read_or_fails_with_a_cause(name: str) -> None:
    response, cause = SENT[name]
    result = answered_after_a_good_one(response)
    assert (result.cause if isinstance(result, Failed) else None) == cause, result


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.fixed_dictionaries({}, optional={"content": JSON, "refusal": JSON})
CHOICES = st.fixed_dictionaries({}, optional={"message": MESSAGES | JSON, "finish_reason": st.just("stop") | JSON})
USAGES = st.fixed_dictionaries({}, optional={"completion_tokens": JSON, "total_tokens": JSON})
BODIES = st.fixed_dictionaries(
    {}, optional={"model": JSON, "choices": st.lists(CHOICES | JSON) | JSON, "usage": USAGES | JSON, "error": JSON}
)


@given(BODIES | JSON, st.sampled_from([200, 400, 429]))
@settings(max_examples=60)
def test_no_answer_of_an_endpoint_ends_the_run(body: Any, status: int) -> None:
    result = answered_after_a_good_one(reply(body, status))
    assert isinstance(result, Judgement | Failed)
