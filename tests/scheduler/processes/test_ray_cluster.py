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


ONE_POOL = PlacementConfig(
    pools={"all": PoolConfig(slots=2, resource="cpu")}, roles={"policy": RoleConfig(pool="all", replicas=2)}
)


def test_where_bundles_are_is_asked_once_until_a_process_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = place(ONE_POOL, ("policy",))
    cluster, asked = RayCluster(ClusterConfig(), placement, owns_ray=False), list[object]()
    pools = {seat.pool for seat in placement.seats["policy"]}
    for pool in pools:
        cluster._pools[pool] = Pool([], "")
        cluster._reserved[pool] = list(range(len(placement.bundles(pool))))

    def answer(group: object) -> dict[str, dict[int, str]]:
        asked.append(group)
        return {"bundles_to_node_id": dict.fromkeys(range(64), "a node")}

    monkeypatch.setattr(ray_cluster, "placement_group_table", answer)
    for _ in range(3):
        assert cluster.machines("policy") == {"a node"}
    assert len(asked) == len(pools)


def test_processes_on_gpus_get_the_same_variables_unless_they_are_set_here(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = place(ONE_POOL, ("policy",))
    wanted = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    cluster = RayCluster(ClusterConfig(), placement, owns_ray=False, variables=wanted)
    monkeypatch.setattr(ray_cluster, "nodes_of_ray", list)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    for role in ("policy", "learner"):
        variables = cluster._environment(role, 1.0)["env_vars"]
        assert (variables["NCCL_CUMEM_ENABLE"], variables["NCCL_NVLS_ENABLE"]) == ("0", "1")
