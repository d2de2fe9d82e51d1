"""Models behind endpoints: a judge (any OpenAI-compatible one: messages in, text out), a teacher (vLLM: token ids in,
their log-probs out), a reward model (pooling, of vLLM or SGLang: token ids in, one number out).
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import httpx
import msgspec
import numpy as np

from grmpipe.models.chat.chat_template import off_loop_if_long
from grmpipe.models.engines.endpoint_use import EndpointUse
from grmpipe.models.engines.openai.chat_answer import ChatAnswer, Entry, completion_tokens, pick_first, read_answer
from grmpipe.models.engines.openai.endpoint_client import (
    BusyError,
    EndpointClient,
    Reply,
    RequestSize,
    refuse_fields_of_ours,
)
from grmpipe.models.engines.typed_json import LogProb, NoAnswer, read_as
from grmpipe.models.request_gates import SingleFlight
from grmpipe.models.settings import CLASSIFY, CONTINUES, EMBEDDINGS, OpenAIConfig
from grmpipe.models.types import (
    Completion,
    EngineDenied,
    EngineRefused,
    FinishReason,
    Message,
    PromptScoring,
    RequestContext,
    SamplingParams,
    TokenScores,
    VersionSpan,
    ignore_first_token,
)
from grmpipe.models.urls import join_path

BYTES_PER_TOKEN = 4  # rough value for English prose: expected size of a prompt until the endpoint counts it
MIN_ANSWER_BYTES, ANSWER_BYTES_PER_TOKEN = 2**20, 256  # limit of an answer, plus a part per allowed or likely token
BYTES_PER_SCORE = 512  # the same, for each score
FIELDS_OF_OURS = frozenset({"model", "messages", "n", "stream", "max_tokens", "max_completion_tokens"})
# Besides OpenAI's own: text-generation-inference, Together, Anthropic, Cohere, Gemini, Mistral. In any case of letters.
FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop", "eos": "stop", "eos_token": "stop", "stop_sequence": "stop", "end_turn": "stop", "complete": "stop",
    "length": "length", "max_tokens": "length", "model_length": "length",
}  # fmt: skip


class OpenAIEngine:
    """POSTs to `base_url`/chat/completions (see EndpointClient).

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
        self.model_name = model_name
        self._model_path = model_path
        self._config = config
        self._max_tokens_field = "max_tokens"
        self._in_flight: SingleFlight[Completion] = SingleFlight()
        self._client = EndpointClient(model_path, config, use or EndpointUse(), transport)
        self._url = join_path(config.base_url, "/chat/completions")

    async def chat(self, messages: Sequence[Message], params: SamplingParams, context: RequestContext) -> Completion:
        """Sample one completion. A request_id that is already in flight gets that request's answer.

        Raises EngineRefused for what the endpoint will never serve, EngineDied once the retries are used up,
        EngineDenied if it serves nothing (see EndpointClient).
        """
        self._refuse_what_cannot_run(params)
        return await self._in_flight.join(context.request_id, lambda: self._chat(messages, params, context))

    async def close(self) -> None:
        await self._client.close()

    def _refuse_what_cannot_run(self, params: SamplingParams) -> None:
        if params.pattern is not None:
            raise EngineRefused(
                "a pattern isn't part of the OpenAI protocol; remove it, and if the endpoint has a field for it, "
                "set that in engine.openai.extra_body (vLLM: structured_outputs: {regex: ..}, SGLang: regex: ..)"
            )
        if params.top_k or params.min_p:
            raise EngineRefused(
                "top_k and min_p aren't part of the OpenAI protocol; for an endpoint that knows them, set them in "
                "engine.openai.extra_body"
            )
        if params.max_new_tokens < 1:
            raise EngineRefused(f"max_new_tokens: must be at least 1, got {params.max_new_tokens}")

    async def _chat(self, messages: Sequence[Message], params: SamplingParams, context: RequestContext) -> Completion:
        num_useless = 0  # answers that came, which the endpoint would only repeat

        async def attempt(num_failed: int) -> Completion:
            nonlocal num_useless
            asking = replace(context, is_retry=context.is_retry or num_failed > 0)
            if num_useless:
                asking = replace(asking, request_id=f"{context.request_id}+{num_useless}")
            reply = await self._ask(messages, params, asking)
            num_useless += reply.status == 200
            return self.read(reply, params.max_new_tokens)

        return await self._client.retry(context.request_id, context.priority, attempt)

    async def _ask(self, messages: Sequence[Message], params: SamplingParams, context: RequestContext) -> Reply:
        """One try; a second if the endpoint knows the limit by its newer name."""
        field = self._max_tokens_field  # another call may find the newer name meanwhile
        reply = await self._post(messages, params, context, field)
        if field == "max_tokens" and _wants_newer_name(reply):
            self._max_tokens_field = "max_completion_tokens"
            reply = await self._post(messages, params, replace(context, is_retry=True), self._max_tokens_field)
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
            "logprobs": bool(params.top_logprobs) or None,
            "top_logprobs": params.top_logprobs or None,
        }
        further = self._config.extra_body
        if messages[-1].role != "assistant":
            further = {name: value for name, value in further.items() if name not in CONTINUES}
        return {name: value for name, value in {**body, **further}.items() if value is not None}

    async def _post(
        self, messages: Sequence[Message], params: SamplingParams, context: RequestContext, max_tokens_field: str
    ) -> Reply:
        size = RequestSize(
            expected_tokens=estimate_tokens(messages, params),
            most_tokens=most_tokens(messages, params),
            most_sampled=params.max_new_tokens,
            max_bytes=max(MIN_ANSWER_BYTES, ANSWER_BYTES_PER_TOKEN * params.max_new_tokens * (1 + params.top_logprobs)),
        )
        body = self._body(messages, params, max_tokens_field)
        return await self._client.post(
            self._url, body, size, context.priority, retry=context.is_retry, request_id=context.request_id
        )

    def read(self, reply: Reply, max_new_tokens: int) -> Completion:
        """The completion in a reply. Raises BusyError for a useless one, and what `chat` raises."""
        self._client.check_status(reply)
        try:
            answer = read_answer(reply.body)
        except NoAnswer as error:
            cause = f"an answer that is no chat completion: {error}; the answer: {reply.words}"
        else:
            self._client.check_model(answer.model)
            num_tokens = completion_tokens(reply.body, max_new_tokens)
            return Completion(
                token_ids=(),
                logprobs=(),
                text=answer.text,
                finish_reason=self._finish_reason(answer, num_tokens, max_new_tokens),
                versions=(VersionSpan(model=self.model_name, version=0, start=0, end=0),),
                unseen_tokens=num_tokens,
                top=answer.top,
            )
        raise BusyError(cause)

    def _finish_reason(self, answer: ChatAnswer, num_tokens: int, max_new_tokens: int) -> FinishReason:
        """How an answer ended. Some servers never say: their answers ended by themselves if they are shorter than the
        limit. Without a count of tokens that is known only of a text with fewer bytes: a token has at least one.
        """
        finish, server = answer.finish_reason, self._client.server
        if answer.refusal or finish == "content_filter":
            raise EngineRefused(self._client.clean(f"{server} filtered it: {answer.refusal[:500] or finish}"))
        if found := FINISH_REASONS.get(finish.casefold()):
            return found
        if finish:
            known = ", ".join(FINISH_REASONS)
            raise EngineRefused(
                self._client.clean(f"{server} ended an answer with finish_reason {finish[:100]!r}; known: {known}")
            )
        if answer.text and (num_tokens or len(answer.text.encode()) < max_new_tokens):
            return "length" if num_tokens >= max_new_tokens else "stop"
        missing = "counts no tokens" if answer.text else "has no content"
        raise EngineRefused(f"{server} ended an answer without a finish_reason, and it {missing}: it may be cut off")


def estimate_tokens(messages: Sequence[Message], params: SamplingParams) -> int:
    """The most tokens that a call is expected to use: its prompt by its bytes, and an answer of full length."""
    num_bytes = sum(len(message.content.encode("utf-8")) for message in messages)
    return -(-num_bytes // BYTES_PER_TOKEN) + params.max_new_tokens


def most_tokens(messages: Sequence[Message], params: SamplingParams) -> int:
    """The upper limit of a call's tokens, for endpoints that count wrongly: a prompt token is at least a byte."""
    return sum(len(message.content.encode("utf-8")) for message in messages) + params.max_new_tokens


def _wants_newer_name(reply: Reply) -> bool:
    return reply.status == 400 and "max_completion_tokens" in reply.words


# -- teachers ----------------------------------------------------------------------------------------------------------


PROMPT_FIELDS_OF_OURS = frozenset(
    {"model", "prompt", "prompt_logprobs", "max_tokens", "n", "stream", "add_special_tokens"}
)
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
        refuse_fields_of_ours(config, PROMPT_FIELDS_OF_OURS)
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


# -- reward models -----------------------------------------------------------------------------------------------------


MAX_ANSWER_BYTES = 2**20
POOLING_FIELDS_OF_OURS = frozenset({"model", "input", "messages", "use_activation", "encoding_format"})


class Scored(Entry, kw_only=True):
    """The numbers of one input, in the field of the route that was asked."""

    probs: list[float] | None = None
    embedding: list[float] | None = None


class Pooled(msgspec.Struct):
    data: list[Scored]
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingEndpoint:
    """A route that returns a model's raw scores.

    path:   after the server's address.
    fields: what each request says besides the model and the tokens.
    """

    path: str
    fields: Mapping[str, object]


# SGLang's own /v1/classify is no choice: its softmax makes 1.0 of any single score.
ROUTES = {
    CLASSIFY: PoolingEndpoint(path="/classify", fields={"use_activation": False}),
    EMBEDDINGS: PoolingEndpoint(path="/v1/embeddings", fields={"encoding_format": "float"}),
}


class PoolingScorer:
    """POSTs token ids to a pooling route (see EndpointClient), so that no text of a policy is read as markup.

    model_path: the model's name at the endpoint.
    """

    def __init__(
        self,
        model_path: str,
        config: OpenAIConfig,
        transport: httpx.AsyncBaseTransport | None = None,
        use: EndpointUse | None = None,
    ) -> None:
        refuse_fields_of_ours(config, POOLING_FIELDS_OF_OURS)
        use = use or EndpointUse()
        self._model_path = model_path
        self._model_key = use.model_key
        self._extra_body = config.extra_body
        self._route = ROUTES[config.scores]
        self._client = EndpointClient(model_path, config, use, transport)
        base, mark, query = config.base_url.partition("?")
        self._url = join_path(base.rstrip("/").removesuffix("/v1") + mark + query, self._route.path)
        self._request_ids = itertools.count()
        self._has_scored = False

    async def score(self, token_ids: Sequence[int], priority: int = 0) -> float:
        """The model's number for a sequence, before any activation function.

        Raises EngineRefused for what the endpoint will never serve, EngineDied once the retries are used up,
        EngineDenied if it serves nothing (see EndpointClient) or a model with several numbers.
        """

        async def attempt(num_failed: int) -> float:
            return self.read(await self._client.post(self._url, body, size, priority, retry=num_failed > 0))

        body = {"model": self._model_path, "input": list(token_ids), **self._route.fields, **self._extra_body}
        size = RequestSize(expected_tokens=len(token_ids), most_tokens=2 * len(token_ids), max_bytes=MAX_ANSWER_BYTES)
        return await self._client.retry(f"score{next(self._request_ids)}", priority, attempt)

    async def close(self) -> None:
        await self._client.close()

    def read(self, reply: Reply) -> float:
        """The score in a reply. Raises BusyError for a useless one, and what `score` raises."""
        self._client.check_status(reply)
        try:
            answer = read_as(Pooled, reply.body)
            entry = pick_first(answer.data)
            numbers = entry.probs or entry.embedding or []
            if not numbers or (len(numbers) > 1 and self._has_scored):
                raise NoAnswer(f"it has {len(numbers)} numbers for one conversation")
        except NoAnswer as error:
            cause = f"an answer without a score: {error}; the answer: {reply.words}"
        else:
            self._client.check_model(answer.model or "")
            if len(numbers) > 1:
                raise EngineDenied(
                    f"{self._model_key}.path: {self._client.server} gave {len(numbers)} numbers for one conversation, "
                    "and a reward model gives one; serve a sequence classifier with one label, and with "
                    f"scores={EMBEDDINGS} start SGLang with --is-embedding"
                )
            self._has_scored = True
            return numbers[0]
        raise BusyError(cause)
