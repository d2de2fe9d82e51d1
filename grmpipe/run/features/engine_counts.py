"""Counts of replaced engines, and of moves of elastic slots."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from grmpipe.run.features.run_feature import RunFeature, StepEnd
from grmpipe.scheduler.slots.elastic import ElasticPool
from grmpipe.types import Metrics


class Replaces(Protocol):
    """What keeps the processes of a role alive: engines, scorers, hosts of environments."""

    @property
    def role(self) -> str: ...

    @property
    def num_replaced(self) -> int: ...


class EngineCounts(RunFeature):
    name = "engines"

    def __init__(self, replacing: Sequence[Replaces], elastic: Sequence[ElasticPool]) -> None:
        self._replacing, self._elastic = replacing, elastic
        self._before: Mapping[str, Mapping[str, int]] = {}

    async def after_step(self, end: StepEnd) -> Metrics:
        """Replaced engines by role; the roles of elastic slots and the number of their moves, if there are some."""
        state = self.state()
        metrics = {f"engines/replaced_{role}": float(count) for role, count in state["replaced"].items()}
        if not self._elastic:
            return metrics
        slots = Counter[str]()
        for pool in self._elastic:
            slots.update(pool.slots_by_role)
        metrics |= {f"slots/{role}": float(count) for role, count in slots.items()}
        return metrics | {"moves/total": float(sum(state["moves"].values()))}

    def state(self) -> Mapping[str, Any]:
        """replaced: role -> number of engines. moves: direction ("policy->grm") -> number of elastic slots."""
        replaced, moves = Counter(self._before.get("replaced", {})), Counter(self._before.get("moves", {}))
        for one in self._replacing:
            replaced[one.role] += one.num_replaced
        for pool in self._elastic:
            moves.update(pool.moves)
        return {"replaced": dict(replaced), "moves": dict(moves)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._before = state
