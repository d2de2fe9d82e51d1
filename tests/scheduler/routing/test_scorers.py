"""Scorers as one: waiting requests are sent together, the urgent first; deaths cost time but no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from grmpipe.models.types import EngineDied
from grmpipe.scheduler.processes.actors import ActorDied
from grmpipe.scheduler.routing.scorers import ScorerPool


class Members:
    """A group whose members score a sequence by its sum, and can be killed. Calls end when the test releases them."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.batches: list[tuple[int, list[tuple[int, ...]]]] = []
        self.dead: set[int] = set()
        self.restarts: list[int] = []
        self.refuses_restarts = 0
        self.go = asyncio.Event()
        self.go.set()

    async def call(self, rank: int, method: str, *args: object) -> object:
        assert method == "scores"
        (sequences,) = args
        assert isinstance(sequences, list)
        self.batches.append((rank, sequences))
        await self.go.wait()
        await asyncio.sleep(0)
        if rank in self.dead:
            raise ActorDied(f"meta_rm-{rank}", "killed")
        if any(-1 in sequence for sequence in sequences):
            raise RuntimeError("no such token")
        return [float(sum(sequence)) for sequence in sequences]

    async def restart(self, rank: int) -> None:
        self.restarts.append(rank)
        if self.refuses_restarts:
            self.refuses_restarts -= 1
            raise TimeoutError("did not start")
        self.dead.discard(rank)

    async def call_all(self, method: str, *args: object) -> list[object]:
        raise AssertionError

    async def call_each(self, method: str, args_by_rank: Sequence[tuple[object, ...]]) -> list[object]:
        raise AssertionError

    async def close(self) -> None:
        return None

    def pool(self, max_replacements: int = 0, max_batch_tokens: int = 100) -> ScorerPool:
        return ScorerPool("meta_rm", self, self.restart, max_replacements, max_batch_tokens)


def test_requests_made_at_once_travel_together_and_return_in_order() -> None:
    async def main() -> None:
        pool = (members := Members()).pool()
        assert await asyncio.gather(*(pool.score((n, 10)) for n in range(5))) == [10.0, 11.0, 12.0, 13.0, 14.0]
        assert len(members.batches) == 1

    asyncio.run(main())


def test_a_batch_keeps_to_its_tokens_and_a_longer_sequence_goes_by_itself() -> None:
    async def main() -> None:
        pool = (members := Members()).pool(max_batch_tokens=4)
        await asyncio.gather(*(pool.score((1,) * n) for n in (2, 2, 2, 9)))
        assert [[len(sequence) for sequence in batch] for _, batch in members.batches] == [[2, 2], [2], [9]]

    asyncio.run(main())


def test_members_work_side_by_side() -> None:
    async def main() -> None:
        pool = (members := Members(2)).pool(max_batch_tokens=2)
        await asyncio.gather(*(pool.score((1, 1)) for _ in range(4)))
        assert {rank for rank, _ in members.batches[:2]} == {0, 1}

    asyncio.run(main())


def test_the_urgent_overtake_what_waits() -> None:
    async def main() -> None:
        pool = (members := Members()).pool(max_batch_tokens=1)
        members.go.clear()
        asks = [asyncio.create_task(pool.score((n,), priority)) for n, priority in ((0, 5), (1, 5), (2, 0))]
        await asyncio.sleep(0)
        members.go.set()
        assert await asyncio.gather(*asks) == [0.0, 1.0, 2.0]
        assert [batch for _, batch in members.batches] == [[(2,)], [(0,)], [(1,)]]

    asyncio.run(main())


def test_a_dead_members_batch_goes_to_another_and_it_is_asked_no_more() -> None:
    async def main() -> None:
        pool = (members := Members(2)).pool()
        members.dead = {1}
        assert await pool.score((1, 2)) == 3.0
        assert await pool.score((4,)) == 4.0
        assert [rank for rank, _ in members.batches] == [1, 0, 0]

    asyncio.run(main())


def test_scorers_that_all_died_report_the_first_cause() -> None:
    async def main() -> None:
        pool = (members := Members()).pool()
        members.dead = {0}
        for _ in range(2):
            with pytest.raises(EngineDied, match="all scorers of role meta_rm died; the first: meta_rm-0 died: killed"):
                await pool.score((1,))
        assert len(members.batches) == 1

    asyncio.run(main())


def test_a_dead_scorer_is_replaced_and_what_it_held_waits_for_that() -> None:
    async def main() -> None:
        pool = (members := Members()).pool(max_replacements=3)
        members.dead, members.refuses_restarts = {0}, 1
        assert await pool.score((5,)) == 5.0
        assert members.restarts == [0, 0] and pool.num_replaced == 1

    asyncio.run(main())


def test_replacements_come_to_an_end() -> None:
    async def main() -> None:
        pool = (members := Members()).pool(max_replacements=2)
        members.dead, members.refuses_restarts = {0}, 9
        with pytest.raises(EngineDied):
            await pool.score((5,))
        assert members.restarts == [0, 0] and pool.num_replaced == 0

    asyncio.run(main())


def test_an_error_of_the_model_reaches_who_asked_and_leaves_the_member_alive() -> None:
    async def main() -> None:
        pool = Members().pool()
        with pytest.raises(RuntimeError, match="no such token"):
            await pool.score((-1,))
        assert await pool.score((2,)) == 2.0

    asyncio.run(main())


def test_an_ask_that_is_cancelled_while_it_waits_is_not_sent() -> None:
    async def main() -> None:
        pool = (members := Members()).pool(max_batch_tokens=1)
        members.go.clear()
        first, second = (asyncio.create_task(pool.score((n,))) for n in (1, 2))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.sleep(0)
        members.go.set()
        assert await first == 1.0
        assert [batch for _, batch in members.batches] == [[(1,)]]

    asyncio.run(main())
