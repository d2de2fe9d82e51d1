"""A teacher behind an OpenAI-compatible endpoint of vLLM: token ids in, their log-probs out."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import httpx
import msgspec
import numpy as np

from grmpipe.models.chat.chat_template import off_loop_if_long
from grmpipe.models.engines.endpoint_use import EndpointUse
from grmpipe.models.engines.openai.chat_answer import Entry, pick_first
from grmpipe.models.engines.openai.endpoint_client import (
    BusyError,
    EndpointClient,
    Reply,
    RequestSize,
    refuse_fields_of_ours,
)
from grmpipe.models.engines.typed_json import LogProb, NoAnswer, read_as
from grmpipe.models.request_gates import SingleFlight
from grmpipe.models.settings import OpenAIConfig
from grmpipe.models.types import (
    Completion,
    EngineRefused,
    PromptScoring,
    RequestContext,
    SamplingParams,
    TokenScores,
    VersionSpan,
    ignore_first_token,
)
from grmpipe.models.urls import join_path

BYTES_PER_SCORE, MIN_ANSWER_BYTES = 512, 2**20
FIELDS_OF_OURS = frozenset({"model", "prompt", "prompt_logprobs", "max_tokens", "n", "stream", "add_special_tokens"})
NOT_GIVEN = "no prompt_logprobs, which a teacher's endpoint must give: vLLM's own server does"
TOKEN_ID = re.compile(r"\d{1,9}", re.ASCII)


class Likely(msgspec.Struct):
    logprob: LogProb
    rank: int | None = None


class ScoredPrompt(Entry, kw_only=True):
    prompt_logprobs: list[dict[str, Likely] | None] | None = None


class ScoredPrompts(msgspec.Struct):
    choices: list[ScoredPrompt]
    model: str | None = None


class PromptScorer:
    """POSTs token ids to `base_url`/completions with `prompt_logprobs`, a field of vLLM (see EndpointClient).

    model_path: the model's name at the endpoint.  model_name: its name in version spans.
    """

    def __init__(
        self,
        model_path: str,
        model_name: str,
        config: OpenAIConfig,
        transport: httpx.AsyncBaseTransport | None = None,
        use: EndpointUse | None = None,
    ) -> None:
        refuse_fields_of_ours(config, FIELDS_OF_OURS)
        self._model_path, self._extra_body = model_path, config.extra_body
        self._version = VersionSpan(model=model_name, version=0, start=0, end=0)
        self._in_flight: SingleFlight[Completion] = SingleFlight()
        self._client = EndpointClient(model_path, config, use or EndpointUse(), transport)
        self._url = join_path(config.base_url, "/completions")

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        """Score a prompt, as an engine does (`make_scoring_params`).

        Raises EngineRefused for what the endpoint will never serve, EngineDied once the retries are used up,
        EngineDenied if it serves nothing (see EndpointClient).
        """
        assert params.scoring is not None, "it samples nothing"
        scoring = params.scoring
        return await self._in_flight.join(context.request_id, lambda: self._score(prompt_ids, scoring, context))

    async def close(self) -> None:
        await self._client.close()

    async def _score(self, prompt_ids: Sequence[int], scoring: PromptScoring, context: RequestContext) -> Completion:
        body = {
            "model": self._model_path,
            "prompt": list(prompt_ids),
            "prompt_logprobs": scoring.top_k,
            "max_tokens": 1,
            "temperature": 1.0,
            "add_special_tokens": False,
            **self._extra_body,
        }
        tokens = len(prompt_ids) + 1
        size = RequestSize(
            expected_tokens=tokens,
            most_tokens=2 * tokens,
            most_sampled=1,
            max_bytes=MIN_ANSWER_BYTES + BYTES_PER_SCORE * (1 + scoring.top_k) * tokens,
        )

        async def attempt(num_failed: int) -> Completion:
            retry = context.is_retry or num_failed > 0
            reply = await self._client.post(self._url, body, size, context.priority, retry=retry)
            return await self.read(reply, prompt_ids, scoring)

        return await self._client.retry(context.request_id, context.priority, attempt)

    async def read(self, reply: Reply, prompt_ids: Sequence[int], scoring: PromptScoring) -> Completion:
        """The scores in a reply. Raises BusyError for a useless one, and what `generate` raises."""
        self._client.check_status(reply)
        try:
            model, scores = await off_loop_if_long(
                len(reply.raw), partial(read_scores, reply.body, prompt_ids, scoring)
            )
        except NoAnswer as error:
            cause = f"prompt_logprobs that aren't those of the prompt: {error}; the answer: {reply.words}"
        else:
            if scores is None:
                raise EngineRefused(f"{self._client.server} gave {NOT_GIVEN}")
            self._client.check_model(model)
            return Completion(
                token_ids=(), logprobs=(), text="", finish_reason="stop", versions=(self._version,), scores=scores
            )
        raise BusyError(cause)


def read_scores(
    body: Mapping[str, Any], prompt_ids: Sequence[int], scoring: PromptScoring
) -> tuple[str, TokenScores | None]:
    """The model's name, and the scores of the tokens from `start` on; None if the endpoint gives none. Raises NoAnswer.

    An entry maps token ids, as texts, to a log-prob and a rank: those of the likeliest, and of the token itself,
    whatever its rank.
    """
    answer = read_as(ScoredPrompts, body)
    given = pick_first(answer.choices).prompt_logprobs
    if given is None:
        return answer.model or "", None
    if len(given) != len(prompt_ids):
        raise NoAnswer(f"{len(given)} entries for {len(prompt_ids)} tokens")
    logprobs, top_ids, top_logprobs = [], [], []
    for token_id, entry in zip(prompt_ids[scoring.start :], given[scoring.start :], strict=True):
        if entry is None or str(token_id) not in entry:
            raise NoAnswer(f"no log-prob of token {token_id} in its place")
        logprobs.append(entry[str(token_id)].logprob)
        if not scoring.top_k:
            continue
        ranked = sorted(
            (one.rank, int(name), one.logprob)
            for name, one in entry.items()
            if one.rank is not None and TOKEN_ID.fullmatch(name)
        )
        if len(ranked) < scoring.top_k:
            raise NoAnswer(f"{len(ranked)} likely tokens in place of {scoring.top_k}")
        top_ids.append([likely_id for _, likely_id, _ in ranked[: scoring.top_k]])
        top_logprobs.append([logprob for *_, logprob in ranked[: scoring.top_k]])
    shape = (len(logprobs), scoring.top_k)
    scores = TokenScores(
        logprobs_N=np.array(logprobs, np.float32),
        top_ids_NK=np.array(top_ids, np.int32).reshape(shape) if scoring.top_k else None,
        top_logprobs_NK=np.array(top_logprobs, np.float32).reshape(shape) if scoring.top_k else None,
    )
    return answer.model or "", scores
