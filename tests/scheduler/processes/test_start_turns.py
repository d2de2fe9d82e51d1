"""Processes that share a GPU start one after another."""

from __future__ import annotations

import asyncio

from grmpipe.scheduler.placement import PlacementConfig, PoolConfig, RoleConfig, place
from grmpipe.scheduler.processes.start_turns import StartTurns


class Starts:
    """Starts nothing, slowly; records what ran at the same time, by slot."""

    def __init__(self, resource: str, pools: dict[str, str], slots: int = 2) -> None:
        config = PlacementConfig(
            pools={name: PoolConfig(slots=slots, resource=resource) for name in pools.values()},
            roles={role: RoleConfig(pool=pool, replicas=slots) for role, pool in pools.items()},
        )
        self._placement = place(config, list(pools))
        self._turns = StartTurns(self._placement)
        self._here: dict[tuple[str, int], list[str]] = {}
        self.together: set[tuple[str, ...]] = set()
        self.order: list[str] = []
        self.most = 0

    async def start(self, role: str, rank: int | None = None) -> None:
        seats = [seat for seat in self._placement.seats[role] if rank in (None, seat.rank)]
        async with self._turns.one_at_a_time(seats):
            self.order.append(role)
            assert {seat.name for seat in seats} <= {seat.name for seat in self._turns.starting}
            slots = [(seat.pool, slot) for seat in seats for slot in seat.slots]
            for slot in slots:
                self._here.setdefault(slot, []).append(role)
                self.together.add(tuple(self._here[slot]))
            self.most = max(self.most, len({name for names in self._here.values() for name in names}))
            await asyncio.sleep(0.01)
            for slot in slots:
                self._here[slot].remove(role)


def started(resource: str, pools: dict[str, str], slots: int = 2) -> Starts:
    """All roles started at once, and the policy's engine restarted meanwhile."""

    async def go() -> Starts:
        starts = Starts(resource, pools, slots)
        restart = starts.start("policy", slots - 1)
        await asyncio.gather(starts.start("learner"), starts.start("policy"), starts.start("grm"), restart)
        assert not starts._turns.starting
        return starts

    return asyncio.run(go())


def test_starts_on_a_gpu_never_overlap() -> None:
    noted = started("gpu", dict.fromkeys(("learner", "policy", "grm"), "all"))
    assert noted.together == {("learner",), ("policy",), ("grm",)}


def test_starts_follow_the_order_of_requests() -> None:
    noted = started("gpu", dict.fromkeys(("learner", "policy", "grm"), "all"), slots=1)
    assert noted.order == ["learner", "policy", "grm", "policy"]


def test_roles_on_gpus_of_their_own_start_at_the_same_time() -> None:
    noted = started("gpu", {"learner": "train", "policy": "rollout", "grm": "judging"})
    assert noted.most == 3


def test_cores_know_no_turns() -> None:
    assert started("cpu", dict.fromkeys(("learner", "policy", "grm"), "all")).most == 3
