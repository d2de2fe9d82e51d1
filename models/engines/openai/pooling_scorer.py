"""A reward model behind a pooling endpoint of vLLM or SGLang: token ids in, one number out."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from models.engines.endpoint_use import EndpointUse
from models.engines.openai.endpoint_client import BusyError, EndpointClient, Reply, RequestSize, refuse_fields_of_ours
from models.settings import CLASSIFY, EMBEDDINGS, OpenAIConfig

MAX_ANSWER_BYTES = 2**20
FIELDS_OF_OURS = frozenset({"model", "input", "messages", "use_activation", "encoding_format"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingEndpoint:
    """A route that returns a model's raw scores.

    path:    after the server's address.
    fields:  what each request says besides the model and the tokens.
    numbers: the field of an answer's entry with its numbers.
    """

    path: str
    fields: Mapping[str, object]
    numbers: str


# SGLang's own /v1/classify is no choice: its softmax makes 1.0 of any single score.
ROUTES = {
    CLASSIFY: PoolingEndpoint(path="/classify", fields={"use_activation": False}, numbers="probs"),
    EMBEDDINGS: PoolingEndpoint(path="/v1/embeddings", fields={"encoding_format": "float"}, numbers="embedding"),
}


class NoScore(Exception):
    """The answer has another shape; the message names the field."""


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
        self._url = config.base_url.rstrip("/").removesuffix("/v1") + self._route.path
        self._request_ids = itertools.count()

    async def score(self, token_ids: Sequence[int], priority: int = 0) -> float:
        """The model's number for a sequence, before any activation function.

        Raises EngineRefused for what the endpoint will never serve, EngineDied once the retries are used up,
        EngineDenied if it serves nothing (see EndpointClient), ValueError for a model with several numbers.
        """

        async def attempt(num_failed: int) -> float:
            return self._score(await self._client.post(self._url, body, size, priority, retry=num_failed > 0))

        body = {"model": self._model_path, "input": list(token_ids), **self._route.fields, **self._extra_body}
        size = RequestSize(expected_tokens=len(token_ids), most_tokens=2 * len(token_ids), max_bytes=MAX_ANSWER_BYTES)
        return await self._client.retry(f"score{next(self._request_ids)}", priority, attempt)

    async def close(self) -> None:
        await self._client.close()

    def _score(self, reply: Reply) -> float:
        self._client.check_status(reply)
        try:
            numbers = read_numbers(reply.body, self._route.numbers)
        except NoScore as error:
            cause = f"an answer without a score: {error}; the answer: {reply.words}"
        else:
            model = reply.body.get("model")
            self._client.check_model(model if isinstance(model, str) else "")
            if len(numbers) != 1:
                raise ValueError(
                    f"{self._model_key}.path: {self._client.host} gave {len(numbers)} numbers for one conversation, "
                    "and a reward model gives one; serve a sequence classifier with one label, and with "
                    f"scores={EMBEDDINGS} start SGLang with --is-embedding"
                )
            return numbers[0]
        raise BusyError(cause)


def read_numbers(body: Mapping[str, Any], field: str) -> list[float]:
    """The numbers of the first entry of an answer. Raises NoScore."""
    data = body.get("data")
    if not isinstance(data, list) or not data or not isinstance(data[0], dict):
        raise NoScore("data holds no object")
    numbers = data[0].get(field)
    if not isinstance(numbers, list) or not numbers:
        raise NoScore(f"{field} holds no list of numbers")
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        raise NoScore(f"{field} holds something else than numbers")
    return [float(number) for number in numbers]
