"""Requests in flight at an engine, each with all who wait for it."""

from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from grmpipe.models.request_gates import SingleFlight
from grmpipe.models.types import Completion, SamplingParams


@dataclass(slots=True, eq=False)
class SharedRequest:
    """A request in flight, and all who wait for its first token."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    priority: int
    listeners: list[Callable[[], None]] = field(default_factory=list)
    begun: bool = False  # its first token was sampled
    aborted: bool = False

    def begin(self) -> None:
        if not self.begun:
            self.begun = True
            for notify in self.listeners:
                notify()


R = TypeVar("R", bound=SharedRequest)


class SharedRequests(Generic[R]):
    """The requests in flight by id. A request_id that is in flight gets that request's answer."""

    def __init__(self) -> None:
        self._by_id: dict[str, R] = {}
        self._flights: SingleFlight[Completion] = SingleFlight()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[R]:
        return iter(self._by_id.values())

    def get(self, request_id: str) -> R | None:
        return self._by_id.get(request_id)

    async def join(
        self,
        request_id: str,
        make: Callable[[], R],
        answer: Callable[[R], Coroutine[Any, Any, Completion]],
        on_first_token: Callable[[], None],
    ) -> Completion:
        """The answer to the request, which is made unless it is in flight. It is cancelled with its last waiter."""
        if request_id not in self._flights:
            self._by_id[request_id] = make()
        request = self._by_id[request_id]
        if request.begun:
            on_first_token()
        request.listeners.append(on_first_token)
        try:
            return await self._flights.join(request_id, lambda: answer(request))
        finally:
            request.listeners.remove(on_first_token)
            if not request.listeners and self._by_id.get(request_id) is request:
                del self._by_id[request_id]
