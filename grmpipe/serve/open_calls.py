"""Questions that are being judged: an equal one joins, and one whose asker has gone is ended after a while."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


def digest_question(question: object) -> str:
    """The same for equal questions."""
    return hashlib.sha256(json.dumps(question, sort_keys=True, default=repr).encode()).hexdigest()


@dataclass(slots=True, eq=False)
class _Call(Generic[Answer]):
    task: asyncio.Task[Answer]
    name: str
    num_waiting: int = 0
    end: asyncio.TimerHandle | None = None  # once nobody waits


class OpenCalls(Generic[Answer]):
    """Asks each question once, however often it comes while it is being judged.

    orphan_s: how long a question goes on, and its answer is kept, after all who asked it have gone: a client whose
              connection broke, or who gave up too early, comes back to the judgement that it has paid for.
    """

    def __init__(self, orphan_s: float) -> None:
        self._orphan_s = orphan_s
        self._calls: dict[str, _Call[Answer]] = {}  # by question
        self._named: dict[str, _Call[Answer]] = {}

    async def ask(self, question: object, name: str, judge: Callable[[], Coroutine[object, object, Answer]]) -> Answer:
        """The answer of `judge`, or of an equal question that is open.

        name: its requests to engines are named after it, so that of two questions with one name the later one waits;
              empty: a name that no other has.
        """
        digest = digest_question(question)
        while (call := self._calls.get(digest)) is None:
            if name not in self._named:
                call = self._begin(digest, name, judge)
                break
            await asyncio.wait([self._named[name].task])
        call.num_waiting += 1
        if call.end is not None:
            call.end.cancel()
        try:
            answer = await asyncio.shield(call.task)
        except asyncio.CancelledError:  # the asker has gone, not all of them perhaps
            call.num_waiting -= 1
            if not call.num_waiting and self._calls.get(digest) is call:
                call.end = asyncio.get_running_loop().call_later(self._orphan_s, self._forget, digest)
            raise
        except BaseException:
            self._calls.pop(digest, None)  # what raised once may be asked again
            raise
        self._calls.pop(digest, None)
        return answer

    async def close(self) -> None:
        """End what nobody waits for any more."""
        calls = list(self._calls.values())
        for digest in list(self._calls):
            self._forget(digest)
        await asyncio.gather(*(call.task for call in calls), return_exceptions=True)

    def _begin(self, digest: str, name: str, judge: Callable[[], Coroutine[object, object, Answer]]) -> _Call[Answer]:
        self._calls[digest] = call = _Call(asyncio.create_task(judge()), name)
        if name:
            self._named[name] = call
            call.task.add_done_callback(lambda _: self._named.pop(name))
        return call

    def _forget(self, digest: str) -> None:
        call = self._calls.pop(digest)
        if call.end is not None:
            call.end.cancel()
        call.task.cancel()
