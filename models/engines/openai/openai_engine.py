"""A judge behind any OpenAI-compatible endpoint: messages in, text out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx

from grmpipe.models.engines.endpoint_use import EndpointUse
from grmpipe.models.engines.openai.chat_answer import ChatAnswer, completion_tokens, read_answer
from grmpipe.models.engines.openai.endpoint_client import (
    BusyError,
    EndpointClient,
    Reply,
    RequestSize,
    refuse_fields_of_ours,
)
from grmpipe.models.engines.typed_json import NoAnswer
from grmpipe.models.request_gates import SingleFlight
from grmpipe.models.settings import CONTINUES, OpenAIConfig
from grmpipe.models.types import (
    Completion,
    EngineRefused,
    FinishReason,
    Message,
    RequestContext,
    SamplingParams,
    VersionSpan,
)
from grmpipe.models.urls import join_path

BYTES_PER_TOKEN = 4  # rough value for English prose: expected size of a prompt until the endpoint counts it
MIN_ANSWER_BYTES, ANSWER_BYTES_PER_TOKEN = 2**20, 256  # limit of an answer, plus a part per allowed or likely token
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
