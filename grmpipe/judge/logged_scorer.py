"""A scorer here whose requests are counted. Those of endpoints are counted by their clients."""

from collections.abc import Sequence

from grmpipe.models.types import RequestLog, Scorer, Usage


class LoggedScorer:
    """A Scorer."""

    def __init__(self, scorer: Scorer, requests: RequestLog) -> None:
        self._scorer = scorer
        self._requests = requests

    async def score(self, token_ids: Sequence[int], priority: int = 0) -> float:
        number = self._requests.begin_request(retry=False)
        score = await self._scorer.score(token_ids, priority)
        self._requests.end_request(number, Usage(prompt=len(token_ids)))
        return score
