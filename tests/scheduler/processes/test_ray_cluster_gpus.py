"""Engines of several GPUs that share them with a learner's ranks, on a real Ray with GPUs that are only counted.

Code for workers is defined inside functions, so that it is sent by value: workers can't import a test.
"""

from __future__ import annotations

import asyncio

import pytest
import ray

from grmpipe.models.types import DescribesStart, Engine
from grmpipe.scheduler.placement import ClusterConfig, PlacementConfig, PoolConfig, RoleConfig, place
from grmpipe.scheduler.processes.actors import EngineFactory, MemberFactory
from grmpipe.scheduler.processes.ray_cluster import RayCluster

pytestmark = pytest.mark.long
ROLES = {
    "learner": RoleConfig(pool="all", replicas=4),
    "policy": RoleConfig(pool="all", replicas=2, slots_per_replica=2),
}
PLACEMENT = place(
    PlacementConfig(pools={"all": PoolConfig(slots=4, resource="gpu")}, roles=ROLES), tuple(ROLES), served=("policy",)
)


def ranks() -> MemberFactory:
    class Rank:
        def __init__(self, rank: int, world_size: int, init_method: str | None) -> None: ...

        def list_gpus(self) -> str:
            import os

            return os.environ["CUDA_VISIBLE_DEVICES"]

    return Rank


def engines() -> EngineFactory:
    def make(rank: int) -> Engine:
        from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine

        class Sharded(SimulatedEngine):
            """Says at its start which devices a worker sees that it spawns, as vLLM's executor does."""

            def describe_start(self) -> str:
                import subprocess
                import sys

                code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
                return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()

        return Sharded("policy", lambda ids, params, context: Script(token_ids=(1,)), tokens_per_s=1e6)

    return make


def test_workers_of_a_sharded_engine_get_the_gpus_of_the_ranks_beside_them() -> None:
    async def scene() -> tuple[list[object], list[str], str]:
        cluster = await RayCluster.start(ClusterConfig(), PLACEMENT)
        try:
            learner = await cluster.start_members("learner", ranks(), meet=False)
            started = await cluster.start_engines("policy", engines())
            again = await cluster.restart_engine("policy", "policy-1")
            found = [
                engine.describe_start() for engine in (*started.values(), again) if isinstance(engine, DescribesStart)
            ]
            return await learner.call_all("list_gpus"), found[:2], found[2]
        finally:
            await cluster.shutdown()

    ray.init("local", num_gpus=8, num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
    try:
        own, pairs, again = asyncio.run(scene())
    finally:
        ray.shutdown()
    assert len(set(own)) == 4, "a GPU for each rank"
    assert pairs == [f"{own[0]},{own[1]}", f"{own[2]},{own[3]}"]
    assert again == pairs[1]
