"""judge_requests.jsonl: every request to a model that judges, noted before it is sent, and its tokens once answered.

{"n":17,"model":"grm","purpose":"held_out","retry":true,"most":[3248,512]}    most: to an endpoint, [prompt, sampled]
{"n":17,"prompt":812,"cached":640,"sampled":233}                              or {"n":17,"unsent":true}
{"stopped_at":{"max_tokens":100000}}                                          the bound of a budget that ended the run
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grmpipe.counts import Counts
from grmpipe.judge.grm import PURPOSES, current_purpose
from grmpipe.models.types import RequestLog, Usage
from grmpipe.observe.guard import Guard
from grmpipe.observe.journal import Journal, read_what_can_be

JUDGE_REQUESTS = "judge_requests.jsonl"
TYPES = {
    "n": int,
    "model": str,
    "purpose": str,
    "prompt": int,
    "cached": int,
    "sampled": int,
    "most": list,
    "stopped_at": dict,
}  # the fields of a line


@dataclass(slots=True)
class RequestCounts(Counts):
    """Requests and their tokens. unknown: requests without a count of tokens: in flight at a kill, cancelled, cut off,
    or answered without one.
    """

    requests: int = 0
    retries: int = 0  # those of them that repeat an earlier one
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens from its cache, as far as the server says
    sampled_tokens: int = 0
    unknown: int = 0


ByPurpose = dict[str, RequestCounts]


@dataclass(slots=True)
class RequestTotals:
    """Totals of requests, from lines in their order.

    counts: model -> purpose -> its counts. last: the highest number of a request. stopped_at: the bounds of a budget
    that ended the run, by key. most: model behind an endpoint -> the most that its unknown requests can have used.
    """

    counts: dict[str, ByPurpose] = field(default_factory=dict)
    last: int = 0
    stopped_at: dict[str, float] = field(default_factory=dict)
    most: dict[str, Usage] = field(default_factory=dict)
    _open: dict[int, tuple[str, RequestCounts, bool, Usage]] = field(default_factory=dict)  # the unknown, by number

    def of(self, model: str, purpose: str) -> RequestCounts:
        own = self.counts.setdefault(model, {})
        return own[purpose] if purpose in own else own.setdefault(purpose, RequestCounts())

    def count(self, record: Mapping[str, Any]) -> None:
        if "stopped_at" in record:
            self.stopped_at |= record["stopped_at"]
            return
        number = record["n"]
        if "model" in record:
            model, retry = record["model"], "retry" in record
            prompt, sampled = record.get("most", (0, 0))
            counts, most = self.of(model, record["purpose"]), Usage(prompt=prompt, sampled=sampled)
            self._open[number], self.last = (model, counts, retry, most), number
            counts.requests += 1
            counts.retries += retry
            counts.unknown += 1
            self._reserve(model, most, 1)
            return
        model, counts, retry, most = self._open.pop(number)
        counts.unknown -= 1
        self._reserve(model, most, -1)
        if "unsent" in record:
            counts.requests -= 1
            counts.retries -= retry
            return
        counts.prompt_tokens += record["prompt"]
        counts.cached_tokens += record["cached"]
        counts.sampled_tokens += record["sampled"]

    def _reserve(self, model: str, most: Usage, sign: int) -> None:
        """Add what a request can use to that of the unknown ones, or with sign -1 take it away."""
        if most != Usage():
            old = self.most.get(model, Usage())
            self.most[model] = Usage(prompt=old.prompt + sign * most.prompt, sampled=old.sampled + sign * most.sampled)

    @property
    def by_model(self) -> dict[str, ByPurpose]:
        """The purposes in the order of PURPOSES."""
        return {model: {name: own[name] for name in PURPOSES if name in own} for model, own in self.counts.items()}

    @property
    def by_purpose(self) -> ByPurpose:
        """The counts of all models together."""
        totals: ByPurpose = {}
        for own in self.counts.values():
            for purpose, counts in own.items():
                totals[purpose] = totals.get(purpose, RequestCounts()) + counts
        return {name: totals[name] for name in PURPOSES if name in totals}

    @property
    def texts(self) -> list[str]:
        """A line for each model that was asked."""
        return [requests_text(model, own) for model, own in self.by_model.items()]


def requests_text(model: str, by_purpose: Mapping[str, RequestCounts]) -> str:
    """The requests to one model in words: all of them, then each purpose."""
    total = sum(by_purpose.values(), RequestCounts())
    purposes = ", ".join(
        f"{purpose.replace('_', '-')} {counts.requests:,}" for purpose, counts in by_purpose.items() if counts.requests
    )
    retries = f"{total.retries:,} of them retries" if total.retries else ""
    parts = f" ({', '.join(filter(None, [purposes, retries]))})" if purposes or retries else ""
    cached = f" ({total.cached_tokens:,} cached)" if total.cached_tokens else ""
    unknown = f"; tokens of {total.unknown:,} unknown" if total.unknown else ""
    return (
        f"{model}: {total.requests:,} requests{parts}, "
        f"{total.prompt_tokens:,} prompt tokens{cached}, {total.sampled_tokens:,} sampled{unknown}"
    )


class RequestJournal:
    """The requests of a run, those before a resume included. Append-only, without fsync: a line that is written
    outlives a kill of the process. An error of the disk surfaces nowhere; `failures` counts it, and the totals hold.
    """

    def __init__(self, run_dir: Path, run_id: str = "", guard: Guard | None = None) -> None:
        self._journal = Journal(run_dir / JUDGE_REQUESTS, run_id=run_id, checked=False)
        self._guard = guard or Guard()
        self.failures = self._guard.failures
        self.totals = RequestTotals()
        with self._guard.watch(JUDGE_REQUESTS):
            self.totals = read_totals(run_dir)

    def of_model(self, model: str) -> RequestLog:
        return ModelRequests(self, model)

    def note(self, record: Mapping[str, object]) -> None:
        self.totals.count(record)
        with self._guard.watch(JUDGE_REQUESTS):
            self._journal.append(record)

    def close(self) -> None:
        with self._guard.watch(JUDGE_REQUESTS):
            self._journal.close()


class ModelRequests:
    """A RequestLog of one model. The purpose is that of the task that asks."""

    def __init__(self, journal: RequestJournal, model: str) -> None:
        self._journal = journal
        self._model = model

    async def until_affordable(self, most: Usage) -> None:
        return None

    def begin_request(self, *, retry: bool, most: Usage | None = None) -> int:
        number = self._journal.totals.last + 1
        record: dict[str, object] = {"n": number, "model": self._model, "purpose": current_purpose()}
        record |= {"retry": True} if retry else {}
        record |= {"most": [most.prompt, most.sampled]} if most is not None else {}
        self._journal.note(record)
        return number

    def end_request(self, number: int, usage: Usage) -> None:
        tokens = {"prompt": usage.prompt, "cached": usage.cached, "sampled": usage.sampled}
        self._journal.note({"n": number} | tokens)

    def unsent(self, number: int) -> None:
        self._journal.note({"n": number, "unsent": True})

    def close_request(self, number: int) -> None:
        return None


def read_totals(run_dir: Path) -> RequestTotals:
    """The totals of a run's file. Of another writer's, or a damaged one, what can be read counts."""
    totals = RequestTotals()
    for record in read_what_can_be(run_dir / JUDGE_REQUESTS):
        if all(type(record[name]) is kind for name, kind in TYPES.items() if name in record):
            with suppress(KeyError, TypeError, ValueError):
                totals.count(record)
    return totals
