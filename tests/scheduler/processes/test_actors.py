"""Groups and engines in this process."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine
from grmpipe.scheduler.placement import PlacementConfig, PoolConfig, RoleConfig, place
from grmpipe.scheduler.processes.actors import ActorDied, InProcessCluster


class Counter:
    def __init__(self, rank: int, world_size: int, init_method: str | None) -> None:
        self.identity = (rank, world_size, init_method)
        self.made_on = threading.get_ident()
        self.total = 0

    def add(self, amount: int) -> int:
        seen = self.total
        time.sleep(0.001)  # long enough for another thread to run in between
        self.total = seen + amount
        return self.total

    def who(self) -> tuple[int, int, str | None]:
        return self.identity

    def threads(self) -> tuple[int, int]:
        return self.made_on, threading.get_ident()

    def refuse(self) -> None:
        raise ValueError("train.lr: no")


def cluster(replicas: int = 1) -> InProcessCluster:
    config = PlacementConfig(
        pools={"all": PoolConfig(slots=4)},
        roles={"learner": RoleConfig(pool="all", replicas=replicas), "policy": RoleConfig(pool="all", replicas=2)},
    )
    return InProcessCluster(place(config, ("learner", "policy")))


def test_a_member_is_made_and_called_on_one_thread_of_its_own() -> None:
    async def main() -> None:
        group = await cluster().start_members("learner", Counter)
        made_on, called_on = await group.call(0, "threads")  # type: ignore[misc]
        assert made_on == called_on != threading.get_ident()
        assert await group.call(0, "who") == (0, 1, None)
        await group.close()

    asyncio.run(main())


def test_calls_of_a_member_never_overlap() -> None:
    async def main() -> None:
        group = await cluster().start_members("learner", Counter)
        totals = await asyncio.gather(*(group.call(0, "add", 1) for _ in range(50)))
        assert totals == list(range(1, 51))
        assert await group.call_all("add", 1) == [51]
        assert await group.call_each("add", [(9,)]) == [60]
        await group.close()

    asyncio.run(main())


def test_an_error_comes_back_as_itself() -> None:
    async def main() -> None:
        group = await cluster().start_members("learner", Counter)
        with pytest.raises(ValueError, match=r"^train\.lr: no$"):
            await group.call(0, "refuse")
        await group.close()
        with pytest.raises(ActorDied, match="learner-0 died: it was closed"):
            await group.call(0, "who")

    asyncio.run(main())


def test_several_ranks_in_one_process_are_refused() -> None:
    with pytest.raises(ValueError, match=r"placement\.roles\.learner\.replicas: 2 ranks .* set cluster=ray"):
        asyncio.run(cluster(replicas=2).start_members("learner", Counter))


def test_every_replica_of_a_role_is_an_engine_and_ends_with_the_cluster() -> None:
    class Held(SimulatedEngine):
        closed = False

        def close(self) -> None:
            self.closed = True

    def make(rank: int) -> Held:
        return Held("policy", lambda ids, params, context: Script(token_ids=(1,), text="x"))

    async def main() -> None:
        here = cluster()
        engines = await here.start_engines("policy", make)
        assert list(engines) == ["policy-0", "policy-1"]
        assert engines["policy-0"] is not engines["policy-1"]
        await here.shutdown()
        assert all(isinstance(engine, Held) and engine.closed for engine in engines.values())

    asyncio.run(main())


def test_engine_is_restarted_on_its_seat_and_its_leftovers_end() -> None:
    ranks: list[int] = []

    class Held(SimulatedEngine):
        closed = False

        def close(self) -> None:
            self.closed = True

    def make(rank: int) -> Held:
        ranks.append(rank)
        return Held("policy", lambda ids, params, context: Script(token_ids=(1,), text="x"))

    async def main() -> None:
        here = cluster()
        engines = await here.start_engines("policy", make)
        newcomer = await here.restart_engine("policy", "policy-1")
        assert ranks == [0, 1, 1]
        assert [engine.closed for engine in engines.values()] == [False, True]  # type: ignore[attr-defined]
        await here.shutdown()
        assert newcomer.closed  # type: ignore[attr-defined]
        assert engines["policy-0"].closed  # type: ignore[attr-defined]

    asyncio.run(main())


def test_a_member_that_holds_something_is_closed_on_its_own_thread() -> None:
    class Holder(Counter):
        def close(self) -> None:
            closed_on.append(threading.get_ident())

    closed_on: list[int] = []

    async def main() -> None:
        here = cluster()
        group = await here.start_members("learner", Holder)
        made_on, _ = await group.call(0, "threads")  # type: ignore[misc]
        await here.shutdown()
        assert closed_on == [made_on]

    asyncio.run(main())


class Waiting:
    """A member whose calls overlap."""

    def __init__(self, rank: int, world_size: int, init_method: str | None) -> None:
        self.identity = (rank, world_size, init_method)
        self.waiting = 0
        self.closed = False

    async def wait_for(self, others: int) -> tuple[int, int, str | None]:
        self.waiting += 1
        while self.waiting < others:
            await asyncio.sleep(0)
        return self.identity

    async def close(self) -> None:
        self.closed = True


def test_async_methods_of_a_member_overlap_and_members_that_do_not_meet_may_be_several() -> None:
    async def main() -> None:
        here = cluster(replicas=2)
        group = await here.start_members("learner", Waiting, meet=False)
        assert group.size == 2
        async with asyncio.timeout(5):
            answers = await asyncio.gather(*(group.call(rank, "wait_for", 3) for rank in (0, 1) for _ in range(3)))
        assert answers == [(0, 2, None)] * 3 + [(1, 2, None)] * 3
        old = group._members  # type: ignore[attr-defined]
        first = old[0]._member
        await here.restart_member("learner", 0)
        assert first.closed and await group.call(0, "wait_for", 1) == (0, 2, None)
        last = old[1]._member
        await here.shutdown()
        assert last.closed

    asyncio.run(main())
