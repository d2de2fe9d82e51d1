"""Whatever an endpoint answers is a completion, or a failure with a cause: never an error of ours."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hostile_json import hostile_answers

from grmpipe.models.engines.openai.chat_answer import read_usage
from grmpipe.models.engines.openai.endpoint_client import BusyError, Reply, count_used_tokens
from grmpipe.models.engines.openai.openai_engine import OpenAIEngine, PoolingScorer, PromptScorer
from grmpipe.models.engines.typed_json import read_object
from grmpipe.models.settings import OpenAIConfig
from grmpipe.models.types import Completion, EngineDenied, EngineRefused, PromptScoring

LIMIT = 8  # tokens of an answer
PROMPT, SCORING = (5, 7, 9), PromptScoring(start=1, top_k=2)
FAILURES = (BusyError, EngineRefused, EngineDenied)
CONFIG = OpenAIConfig(api_key_env="")
STATUSES = (200,) * 30 + (201, 204, 301, 308, 400, 401, 404, 407, 418, 429, 500, 529, 999)
HEADERS: tuple[dict[str, str], ...] = (
    {}, {"retry-after": "3"}, {"retry-after": "-3"}, {"retry-after": "nan"}, {"retry-after": "9" * 400},
    {"retry-after": "Fri, 31 Dec 9999 23:59:59 -2359", "date": "Mon, 01 Jan 0001 00:00:00 +2359"},
    {"retry-after": "\ud800"}, {"date": "now", "retry-after": "Thu, 99 Foo 2026 25:61:61 GMT"},
    {"x-redirected-to": "\x1b]0;x\x07"},
)  # fmt: skip


def chat_answer(content: object = "Score: 7", finish: object = "stop", **more: object) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish}
    return {"model": "m", "choices": [choice]} | more


USAGE = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14, "prompt_tokens_details": {"cached_tokens": 2}}
CHATS = [
    chat_answer(usage=USAGE),
    chat_answer([{"type": "thinking", "thinking": []}, {"type": "text", "text": "Score: 7"}], usage=USAGE),
    chat_answer("x", None) | {"choices": [*chat_answer("late")["choices"], *chat_answer("x")["choices"]]},
    {"error": {"message": "busy", "code": "rate_limit", "type": "x"}},
]
POOLED = [
    {"model": "m", "data": [{"index": 0, "probs": [1.5], "num_classes": 1}], "usage": USAGE},
    {"model": "m", "data": [{"index": 0, "embedding": [-2.5]}]},
]
LIKELY = {"7": {"logprob": -1.0, "rank": 2}, "9": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}}
PROMPTS = [{"model": "m", "choices": [{"index": 0, "text": "", "prompt_logprobs": [None, LIKELY, LIKELY]}]}]


def reply_to(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(status, headers or {}, read_object(body), body)


def read_all(count: int, seed: int) -> Counter[str]:
    """Outcomes of hostile answers, each through the function that reads a real one."""
    chance, outcomes = random.Random(seed), Counter[str]()
    share = count // 4

    async def run() -> None:
        chat, pooling = OpenAIEngine("m", "grm", CONFIG), PoolingScorer("m", CONFIG)
        teacher = PromptScorer("m", "teacher", CONFIG)
        readers: list[tuple[int, list[Any], Callable[[Reply], Any]]] = [
            (2 * share, CHATS, lambda reply: check_completion(chat.read(reply, LIMIT))),
            (share, POOLED, lambda reply: check_score(pooling.read(reply))),
            (share, PROMPTS, lambda reply: teacher.read(reply, PROMPT, SCORING)),
        ]
        for number, valid, read in readers:
            for body in hostile_answers(valid, number, seed):
                reply = reply_to(body, chance.choice(STATUSES), chance.choice(HEADERS))
                used, usage = count_used_tokens(reply.status, reply.body, 10, 100), read_usage(reply.body)
                assert 0 <= used <= 100 and (usage is None or min(usage.prompt, usage.cached, usage.sampled) >= 0)
                try:
                    found = read(reply)
                    if asyncio.iscoroutine(found):
                        check_scores(await found)
                    outcomes["read"] += 1
                except FAILURES as error:
                    outcomes[type(error).__name__] += 1
                    assert str(error).isprintable()
                    if isinstance(error, BusyError) and error.retry_after_s is not None:
                        assert error.retry_after_s >= 0
        for client in (chat, pooling, teacher):
            await client.close()

    asyncio.run(run())
    return outcomes


def check_completion(completion: Completion) -> None:
    completion.text.encode()
    assert completion.finish_reason in ("stop", "length") and 0 <= completion.unseen_tokens <= LIMIT


def check_score(score: float) -> None:
    assert type(score) is float  # also NaN, which the judge refuses by name


def check_scores(completion: Completion) -> None:
    scores = completion.scores
    assert scores is not None and scores.top_ids_NK is not None and scores.top_logprobs_NK is not None
    assert scores.logprobs_N.shape == (2,) and scores.top_ids_NK.shape == scores.top_logprobs_NK.shape == (2, 2)
    assert np.isfinite(scores.logprobs_N).all() and np.isfinite(scores.top_logprobs_NK).all()
    assert (scores.top_ids_NK >= 0).all()


def test_twenty_thousand_hostile_answers_are_read_or_fail_by_name() -> None:
    outcomes = read_all(20_000, seed=1)
    assert outcomes.keys() == {"read", *(failure.__name__ for failure in FAILURES)}
    assert min(outcomes["read"], outcomes["BusyError"], outcomes["EngineRefused"]) > 1000


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 12))
def test_further_hostile_answers_are_read_or_fail_by_name(seed: int) -> None:
    read_all(20_000, seed)


def read_chat(answer: object, limit: int = LIMIT) -> Completion:
    engine = OpenAIEngine("m", "grm", CONFIG)
    try:
        return engine.read(reply_to(json.dumps(answer).encode()), limit)
    finally:
        asyncio.run(engine.close())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": ["text"], "text": "Score: 7"}], r"Expected `str \| null`, got `array` - at .*content\[0\].type"),
        ([{"type": "text", "text": ["Score: 7"]}], "Expected `str` as the text of a part, got `list`"),
        ({"text": "Score: 7"}, r"got `object` - at .*message.content"),
        ([["Score: 7"]], r"got `array` - at .*content\[0\]"),
        (7, "got `int` - at .*message.content"),
    ],
)
def test_a_content_of_another_shape_is_named_by_its_field(content: object, words: str) -> None:
    with pytest.raises(BusyError, match=f"^an answer that is no chat completion: .*{words}"):
        read_chat(chat_answer(content))


def test_the_choice_of_the_lowest_index_is_the_answer_and_no_other() -> None:
    def listed(*choices: tuple[object, str]) -> dict[str, Any]:
        return {"choices": [chat_answer(text)["choices"][0] | {"index": index} for index, text in choices]}

    assert read_chat(listed((1, "second"), (0, "first"))).text == "first"
    assert read_chat(listed((None, "first"), (None, "second"))).text == "first"
    with pytest.raises(BusyError, match="two results with one index"):
        read_chat(listed((0, "one"), (0, "other")))
    with pytest.raises(BusyError, match="it has no result"):
        read_chat(listed())


@pytest.mark.parametrize("finish", ["stop", "eos", "eos_token", "EOS_TOKEN", "stop_sequence", "end_turn", "COMPLETE"])
def test_known_names_of_an_answer_that_ended_are_a_stop(finish: str) -> None:
    assert read_chat(chat_answer(finish=finish)).finish_reason == "stop"


@pytest.mark.parametrize("finish", ["length", "MAX_TOKENS", "model_length"])
def test_known_names_of_a_cut_answer_are_its_length(finish: str) -> None:
    assert read_chat(chat_answer(finish=finish)).finish_reason == "length"


@pytest.mark.parametrize("finish", [None, ""])
def test_an_answer_that_says_no_reason_has_ended_if_it_is_shorter_than_its_limit(finish: object) -> None:
    def read(num_tokens: int, text: str = "Score: 7", limit: int = LIMIT) -> str:
        usage = {"usage": {"completion_tokens": num_tokens}} if num_tokens else {}
        return read_chat(chat_answer(text, finish, **usage), limit).finish_reason

    assert read(LIMIT - 1) == "stop"
    assert read(LIMIT) == read(LIMIT + 1) == "length"
    assert read(0, "7 of 10") == "stop"  # uncounted, and fewer bytes than tokens were allowed
    with pytest.raises(EngineRefused, match="without a finish_reason, and it counts no tokens: it may be cut off"):
        read(0, "8 of 10.")
    with pytest.raises(EngineRefused, match="without a finish_reason, and it has no content"):
        read(3, "")


SERVERS = {  # what a server on this machine answers to a request for judge
    "llama-server": chat_answer(usage=USAGE, model="/models/judge.Q4_K_M.gguf", timings={"predicted_ms": 12.5}),
    "llama_cpp.server": chat_answer(usage=USAGE, model="judge", logprobs=None),
    "Ollama": chat_answer(usage=USAGE, model="judge", system_fingerprint="fp_ollama"),
    "Ollama, without a reason": chat_answer(finish=None, usage=USAGE, model="judge"),
    "LM Studio": chat_answer(usage=USAGE, model="publisher/judge", stats={}, system_fingerprint="judge"),
    "without a count": chat_answer(model="judge"),
}


@pytest.mark.parametrize("server", SERVERS)
def test_answers_of_servers_on_this_machine_are_read_whole(server: str) -> None:
    answer = OpenAIEngine("judge", "grm", CONFIG).read(reply_to(json.dumps(SERVERS[server]).encode()), LIMIT)
    assert (answer.text, answer.finish_reason) == ("Score: 7", "stop")
    assert answer.num_tokens == (0 if server == "without a count" else 5)


def test_a_model_that_was_loaded_and_asked_nothing_has_given_no_answer() -> None:
    """Ollama's answer while it loads."""
    with pytest.raises(EngineRefused, match="finish_reason 'load'"):
        OpenAIEngine("judge", "grm", CONFIG).read(
            reply_to(json.dumps(chat_answer("", "load", model="judge")).encode()), LIMIT
        )


def test_a_number_that_no_float_holds_is_no_score() -> None:
    scorer = PoolingScorer("m", CONFIG)
    with pytest.raises(BusyError, match="an answer without a score: Number out of range"):
        scorer.read(reply_to(b'{"data": [{"probs": [1' + b"0" * 400 + b"]}]}"))
    assert scorer.read(reply_to(b'{"data": [{"probs": [2]}]}')) == 2.0
    with pytest.raises(BusyError, match="it has 2 numbers for one conversation"):  # it has given one before
        scorer.read(reply_to(b'{"data": [{"probs": [1, 2]}]}'))
    asyncio.run(scorer.close())


def test_words_of_an_endpoint_reach_no_terminal_as_commands() -> None:
    engine = OpenAIEngine("m", "grm", CONFIG)
    body = b'{"error": {"message": "bad\\u001b[2J\\u001b]0;owned\\u0007 model \\u202e"}}'
    with pytest.raises(EngineRefused) as refused:
        engine.read(reply_to(body, 400), LIMIT)
    assert "bad�[2J�]0;owned� model �" in str(refused.value)
    asyncio.run(engine.close())
