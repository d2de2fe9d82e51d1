"""A teacher behind an endpoint gives the scores of its model, or a failure with a cause; never a number of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from teacher_endpoint import TeacherServer, serve_teacher

from grmpipe.models.engines.openai.openai_engine import PromptScorer, read_scores
from grmpipe.models.engines.typed_json import NoAnswer
from grmpipe.models.lm.score import ScoredText, score_sequences
from grmpipe.models.settings import OpenAIConfig
from grmpipe.models.types import (
    EngineDied,
    EngineRefused,
    PromptScoring,
    RequestContext,
    TokenScores,
    make_scoring_params,
)

PROMPT = (5, 9, 33, 60, 61, 7, 12)
CONTEXT = RequestContext(request_id="g/0/0@teacher", group_id="g", role="teacher")


@pytest.fixture(scope="module")
def served() -> Iterator[TeacherServer]:
    with serve_teacher("tiny://policy") as server:
        yield server


@pytest.fixture
def endpoint(served: TeacherServer, monkeypatch: pytest.MonkeyPatch) -> TeacherServer:
    monkeypatch.setattr("grmpipe.models.engines.openai.endpoint_client.FIRST_BACKOFF_S", 0.01)
    served.script, served.without, served.asked = [], False, []
    return served


def score(endpoint: TeacherServer, start: int = 3, top_k: int = 0, **options: Any) -> TokenScores:
    config = OpenAIConfig(base_url=endpoint.url, api_key_env="", **{"max_retries": 2, **options})

    async def ask() -> TokenScores:
        scorer = PromptScorer("org/teacher", "teacher", config)
        try:
            completion = await scorer.generate(PROMPT, make_scoring_params(start, top_k), CONTEXT)
        finally:
            await scorer.close()
        assert completion.token_ids == () and completion.scores is not None
        return completion.scores

    return asyncio.run(ask())


@pytest.mark.parametrize("top_k", [0, 1, 5])
def test_the_scores_are_those_of_the_model_from_the_first_scored_token_on(endpoint: TeacherServer, top_k: int) -> None:
    found = score(endpoint, 3, top_k)
    (expected,) = score_sequences(endpoint.model, [ScoredText(PROMPT, PromptScoring(start=3, top_k=top_k))])
    np.testing.assert_allclose(found.logprobs_N, expected.logprobs_N, atol=1e-6)
    if top_k == 0:
        assert found.top_ids_NK is None and found.top_logprobs_NK is None
        return
    assert found.top_ids_NK is not None and found.top_logprobs_NK is not None
    np.testing.assert_array_equal(found.top_ids_NK, expected.top_ids_NK)
    np.testing.assert_allclose(found.top_logprobs_NK, expected.top_logprobs_NK, atol=1e-6)


def test_the_endpoint_gets_token_ids_and_may_not_add_any(endpoint: TeacherServer) -> None:
    score(endpoint, extra_body={"priority": 3})
    (asked,) = endpoint.asked
    assert (asked["prompt"], asked["model"], asked["add_special_tokens"]) == (list(PROMPT), "org/teacher", False)
    assert (asked["temperature"], asked["max_tokens"], asked["priority"]) == (1.0, 1, 3)
    with pytest.raises(ValueError, match=r"^engine\.openai\.extra_body: 'prompt' is set by the run itself"):
        score(endpoint, extra_body={"prompt": "x"})


def test_a_busy_endpoint_is_asked_again_and_one_that_stays_busy_is_dead(endpoint: TeacherServer) -> None:
    endpoint.script = [503, 429]
    assert len(score(endpoint).logprobs_N) == len(PROMPT) - 3
    assert len(endpoint.asked) == 3
    endpoint.script = [503] * 3
    with pytest.raises(EngineDied, match="gave no answer in 3 attempts"):
        score(endpoint)


def test_an_endpoint_without_the_field_is_refused_in_words_that_name_it(endpoint: TeacherServer) -> None:
    endpoint.without = True
    with pytest.raises(EngineRefused, match=r"gave no prompt_logprobs, which a teacher's endpoint must give: vLLM's"):
        score(endpoint)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([None, {"7": {"logprob": -1.0, "rank": 1}}], "2 entries for 3 tokens"),
        ([None, {"8": {"logprob": -1.0, "rank": 1}}, None], "no log-prob of token 7 in its place"),
        ([None, None, {"9": {"logprob": -1.0, "rank": 1}}], "no log-prob of token 7 in its place"),
        ([None, {"7": {"logprob": -1.0, "rank": 1}}, None], "1 likely tokens in place of 2"),
        ([None, {"7": {"logprob": "-1", "rank": 1}}, None], "Expected `float`, got `str` - at .*logprob"),
        (
            [None, *[{str(i): {"logprob": float("nan"), "rank": 1} for i in (7, 9)}] * 2],
            "Expected `float` .* at .*logprob",
        ),
        ([None, *[{str(i): {"logprob": -1e300, "rank": 1} for i in (7, 9)}] * 2], "Expected `float` .* at .*logprob"),
        ([None, *[{"7": {"logprob": -1, "rank": 1}, "-9": {"logprob": -1, "rank": 2}}] * 2], "1 likely tokens"),
    ],
)
def test_entries_that_are_not_those_of_the_prompt_are_no_scores(given: list[Any], words: str) -> None:
    with pytest.raises(NoAnswer, match=words):
        read_scores({"choices": [{"prompt_logprobs": given}]}, (5, 7, 9), PromptScoring(start=1, top_k=2))
