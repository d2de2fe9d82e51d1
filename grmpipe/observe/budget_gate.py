"""Holds requests to endpoints back while they may exceed a budget, and keeps what was paid for a resume."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grmpipe.judge.grm import Purpose, current_purpose
from grmpipe.models.types import BudgetSpent, RequestLog, Usage
from grmpipe.observe.guard import Guard
from grmpipe.observe.journal import UNREADABLE, Journal, parsed, read_lines
from grmpipe.observe.judge_requests import RequestJournal
from grmpipe.observe.spending import WAY_OUT, Spending
from grmpipe.scheduler.clock import Standstill

PAID_ANSWERS = "paid_answers.jsonl"
# What is asked again on purpose under the same name, to see whether the endpoint still answers alike, isn't kept.
KEPT_PURPOSES: tuple[Purpose, ...] = ("training", "held_out", "evaluation")


class BudgetGate:
    """Lets a request to an endpoint go if the most that it can use fits under all bounds, beside what is spent and the
    most of all requests in flight. If it doesn't fit it waits for those in flight, which mostly use less. If it doesn't
    fit with none in flight, it raises BudgetSpent, and so do all that wait with it: else one of them would be sent, and
    cancelled with the others of its vote. In a run so do all that come later; a service may answer smaller questions.

    clocks: stand still while a request waits: a judgement that isn't asked for has no deadline.
    """

    def __init__(
        self, spending: Spending, requests: RequestJournal, answers: "PaidAnswers", *, is_service: bool = False
    ) -> None:
        self.spending = spending
        self.clocks = Standstill()
        self.answers = answers
        self._requests = requests
        self._is_service = is_service
        self._in_flight: set[int] = set()
        self._num_waiting = 0
        self._num_refusals = 0
        self._spent = ""  # why nothing is asked any more, or in a service why the last question was refused
        self._news = asyncio.Event()

    def of_model(self, model: str) -> RequestLog:
        """The log of the requests to a model: of one here as it is, of one behind an endpoint under the budget."""
        log = self._requests.of_model(model)
        return BudgetedRequests(log, self, model) if model in self.spending.prices else log

    async def until_affordable(self, model: str, most: Usage) -> None:
        """See RequestLog."""
        began = self._num_refusals if self._is_service else 0
        while (is_refused := self._num_refusals > began) or (words := self.spending.explain_excess(model, most)):
            if is_refused:
                raise BudgetSpent(self._spent)
            if not self._in_flight:
                self._refuse(words)
                continue
            self._news.clear()
            with self._wait():
                await self._news.wait()

    def begin(self, number: int) -> None:
        self._in_flight.add(number)

    def end(self, number: int) -> None:
        self._in_flight.discard(number)
        self._news.set()

    def end_complete(self) -> None:
        """The run did all its work: its resume lacks nothing. A service may be asked again what it refused."""
        if not self._is_service:
            self.answers.remove()

    def close(self) -> None:
        self.answers.close()

    def _refuse(self, words: str) -> None:
        way_out = "start the judge again with a higher bound, or null" if self._is_service else WAY_OUT
        if not self._is_service:
            key, _, _ = words.removeprefix("budget.").partition(":")
            self._requests.note({"stopped_at": {key: self.spending.bounds[key]}})
        self._spent = f"{words}; {way_out}"
        self._num_refusals += 1
        self._news.set()

    @contextmanager
    def _wait(self) -> Iterator[None]:
        self._num_waiting += 1
        self.clocks.set(True)
        try:
            yield
        finally:
            self._num_waiting -= 1
            self.clocks.set(self._num_waiting > 0)


class BudgetedRequests:
    """The RequestLog of a model behind an endpoint."""

    def __init__(self, log: RequestLog, gate: BudgetGate, model: str) -> None:
        self._log, self._gate, self._model = log, gate, model
        self.end_request, self.unsent = log.end_request, log.unsent

    async def until_affordable(self, most: Usage) -> None:
        await self._gate.until_affordable(self._model, most)

    def begin_request(self, *, retry: bool, most: Usage | None = None) -> int:
        number = self._log.begin_request(retry=retry, most=most)
        self._gate.begin(number)
        return number

    def close_request(self, number: int) -> None:
        self._gate.end(number)


class PaidAnswers:
    """The AnswerStore of a run with a budget. An answer whose verdict was never written, because others were missing to
    it when the run ended, is taken from here by the resume. is_kept: whether answers are written.
    """

    def __init__(self, run_dir: Path, run_id: str, guard: Guard, *, is_kept: bool) -> None:
        self._path, self._guard, self._is_kept = run_dir / PAID_ANSWERS, guard, is_kept
        self._journal = Journal(self._path, run_id=run_id)
        self._places: dict[str, int] = {}  # key -> offset of its line, of those that an earlier process wrote
        with guard.watch(PAID_ANSWERS):
            self._places = dict(find_answers(self._path))

    def take(self, key: str) -> bytes | None:
        if current_purpose() not in KEPT_PURPOSES or (place := self._places.pop(key, None)) is None:
            return None
        with self._path.open("rb") as file:
            file.seek(place)
            answer: str = parsed(file.readline())[0]["answer"]
        return answer.encode()

    def keep(self, key: str, answer: str) -> None:
        if self._is_kept and current_purpose() in KEPT_PURPOSES:
            with self._guard.watch(PAID_ANSWERS):
                self._journal.append({"key": key, "answer": answer})

    def remove(self) -> None:
        """Remove the file."""
        with self._guard.watch(PAID_ANSWERS):
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        with self._guard.watch(PAID_ANSWERS):
            self._journal.close()


def find_answers(path: Path) -> Iterator[tuple[str, int]]:
    """The key of each line that can be read, and where it begins."""
    for begin, line in read_lines(path):
        try:
            record = parsed(line)[0]
            if isinstance(record["answer"], str):
                yield record["key"], begin
        except UNREADABLE:
            continue
