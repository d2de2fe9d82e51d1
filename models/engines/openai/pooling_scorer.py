"""A reward model behind a pooling endpoint of vLLM or SGLang: token ids in, one number out."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx
import msgspec

from grmpipe.models.engines.endpoint_use import EndpointUse
from grmpipe.models.engines.openai.chat_answer import Entry, pick_first
from grmpipe.models.engines.openai.endpoint_client import (
    BusyError,
    EndpointClient,
    Reply,
    RequestSize,
    refuse_fields_of_ours,
)
from grmpipe.models.engines.typed_json import NoAnswer, read_as
from grmpipe.models.settings import CLASSIFY, EMBEDDINGS, OpenAIConfig
from grmpipe.models.types import EngineDenied
from grmpipe.models.urls import join_path

MAX_ANSWER_BYTES = 2**20
FIELDS_OF_OURS = frozenset({"model", "input", "messages", "use_activation", "encoding_format"})


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
        refuse_fields_of_ours(config, FIELDS_OF_OURS)
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
