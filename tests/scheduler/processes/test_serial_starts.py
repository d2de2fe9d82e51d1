"""Processes that share a GPU start one after another."""

from __future__ import annotations

import asyncio

from models.types import Engine
from scheduler.placement import Placement, PlacementConfig, PoolConfig, RoleConfig, place
from scheduler.processes.actors import EngineFactory, InProcessCluster, InProcessGroup, MemberFactory
from scheduler.processes.serial_starts import SerialStarts


class Noted(InProcessCluster):
    """Starts nothing, slowly; records what ran at the same time, by slot."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self._seated = placement.seats
        self._here: dict[tuple[str, int], list[str]] = {}
        self.together: set[tuple[str, ...]] = set()
        self.order: list[str] = []
        self.most = 0

    async def _start(self, role: str) -> None:
        self.order.append(role)
        slots = [(seat.pool, slot) for seat in self._seated[role] for slot in seat.slots]
        for slot in slots:
            self._here.setdefault(slot, []).append(role)
            self.together.add(tuple(self._here[slot]))
        self.most = max(self.most, len({name for names in self._here.values() for name in names}))
        await asyncio.sleep(0.01)
        for slot in slots:
            self._here[slot].remove(role)

    async def start_group(self, role: str, make_member: MemberFactory, *, meet: bool = True) -> InProcessGroup:
        await self._start(role)
        return None  # type: ignore[return-value]

    async def start_engines(self, role: str, make_engine: EngineFactory) -> dict[str, Engine]:
        await self._start(role)
        return {}

    async def restart_engine(self, role: str, name: str) -> Engine:
        await self._start(role)
        return None  # type: ignore[return-value]


def started(resource: str, pools: dict[str, str], slots: int = 2) -> Noted:
    """All roles started at once, and the policy's engine restarted meanwhile."""
    config = PlacementConfig(
        pools={name: PoolConfig(slots=slots, resource=resource) for name in pools.values()},
        roles={role: RoleConfig(pool=pool, replicas=slots) for role, pool in pools.items()},
    )
    placement = place(config, list(pools))
    noted = Noted(placement)
    cluster = SerialStarts(noted, placement)

    async def go() -> None:
        await asyncio.gather(
            cluster.start_group("learner", lambda *_: None),
            *(cluster.start_engines(role, None) for role in pools if role != "learner"),  # type: ignore[arg-type]
            cluster.restart_engine("policy", "policy-0"),
        )

    asyncio.run(go())
    return noted


def test_starts_on_a_gpu_never_overlap() -> None:
    noted = started("gpu", dict.fromkeys(("learner", "policy", "grm"), "all"))
    assert noted.together == {("learner",), ("policy",), ("grm",)}


def test_who_asks_first_starts_first() -> None:
    noted = started("gpu", dict.fromkeys(("learner", "policy", "grm"), "all"), slots=1)
    assert noted.order == ["learner", "policy", "grm", "policy"]


def test_roles_on_gpus_of_their_own_start_at_the_same_time() -> None:
    noted = started("gpu", {"learner": "train", "policy": "rollout", "grm": "judging"})
    assert noted.most == 3


def test_cores_know_no_turns() -> None:
    assert started("cpu", dict.fromkeys(("learner", "policy", "grm"), "all")).most == 3
