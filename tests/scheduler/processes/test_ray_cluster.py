"""What a start on Ray reserved is given back, whenever it ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from grmpipe.scheduler.placement import ClusterConfig, PlacementConfig, PoolConfig, RoleConfig, place
from grmpipe.scheduler.processes import ray_cluster
from grmpipe.scheduler.processes.ray_cluster import RayCluster


class Pool:
    """A placement group that never becomes free."""

    def __init__(self, bundles: list[dict[str, float]], strategy: str) -> None:
        time.sleep(0.02)
        self.never = threading.Event()
        ASKED.append(self)

    def wait(self, timeout_s: float) -> bool:
        return self.never.wait(timeout_s)


ASKED: list[Pool] = []


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pool]]:
    removed: list[Pool] = []
    ASKED.clear()
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_cluster, "nodes_of_ray", list)
    monkeypatch.setattr(ray_cluster, "check_capacity", lambda placement, nodes: None)
    monkeypatch.setattr(ray_cluster, "placement_group", Pool)
    monkeypatch.setattr(ray_cluster, "remove_placement_group", removed.append)
    yield removed
    for pool in ASKED:
        pool.never.set()


def test_a_start_that_a_signal_ends_gives_back_every_pool(removed: list[Pool]) -> None:
    pools = {name: PoolConfig(slots=1, resource="cpu") for name in ("one", "two", "three")}
    roles = {role: RoleConfig(pool=pool) for role, pool in zip(("learner", "policy", "grm"), pools, strict=True)}
    placement = place(PlacementConfig(pools=pools, roles=roles), list(roles))

    async def cancelled() -> None:
        start = asyncio.create_task(RayCluster.start(ClusterConfig(start_timeout_s=0.2), placement))
        await asyncio.sleep(0)
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await start

    asyncio.run(cancelled())
    assert len(ASKED) == 3
    assert removed == ASKED


def test_a_second_run_in_a_process_whose_ray_ends_with_the_first_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayCluster, "_owner", -1)  # another thread
    with pytest.raises(ValueError, match=r"^cluster\.kind: another run in this process has a Ray"):
        asyncio.run(RayCluster.start(ClusterConfig(), place(PlacementConfig(), ())))


def test_a_joined_ray_that_answers_nothing_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(ray_cluster, "remove_placement_group", lambda pool: answers.wait(20))
    monkeypatch.setattr(ray_cluster, "RELEASE_S", 0.05)
    cluster = RayCluster(ClusterConfig(), place(PlacementConfig(), ()), owns_ray=False)
    cluster._pools["all"] = Pool([], "")

    async def end() -> float:
        began_s = time.monotonic()
        await cluster.shutdown()
        answers.set()
        return time.monotonic() - began_s

    assert asyncio.run(end()) < 5
