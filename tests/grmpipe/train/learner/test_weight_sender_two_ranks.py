"""Two sharded ranks push to two engines by broadcast, all in separate processes: the same weights, and what dies."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.settings import EmbeddedConfig
from grmpipe.models.types import Engine
from grmpipe.scheduler.placement import ClusterConfig, PlacementConfig, PoolConfig, RoleConfig, place
from grmpipe.scheduler.processes.actors import ActorDied
from grmpipe.scheduler.processes.ray_cluster import RayCluster
from grmpipe.scheduler.weights.weight_push import EngineLost, SyncConfig
from grmpipe.scheduler.weights.weight_sync import WeightSync
from grmpipe.tiny.resolve import resolve_model
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.train.learner.make_learner import make_learner

pytestmark = pytest.mark.long
PROBE = tuple(range(3, 30))


def engine_factory(path: str) -> Callable[[int], Engine]:
    return lambda rank: EmbeddedEngine(EngineSpec(path=path, role="policy"), EmbeddedConfig(max_batch_rows=2))


def on_cluster(scene: Callable[..., Coroutine[Any, Any, None]]) -> None:
    path = resolve_model("tiny://policy")
    roles = {role: RoleConfig(pool="all", replicas=2) for role in ("learner", "policy")}
    placement = place(PlacementConfig(pools={"all": PoolConfig(slots=2)}, roles=roles), ("learner", "policy"))
    spec = LearnerSpec(
        model_path=path, train=TrainConfig(), algorithm=AlgorithmConfig(), max_new_tokens=8, device="cpu",
        bucket_bytes=1 << 16, transport="gloo",
    )  # fmt: skip

    async def run() -> None:
        cluster = await RayCluster.start(ClusterConfig(), placement)
        try:
            ranks, engines = await asyncio.gather(
                cluster.start_members("learner", functools.partial(make_learner, spec)),
                cluster.start_engines("policy", engine_factory(path)),
            )
            address = functools.partial(cluster.free_address, "learner")
            config = SyncConfig(deadline_s=20.0)
            sync = WeightSync(LearnerRanks(ranks), PROBE, config, transport="gloo", group="gloo", new_address=address)
            await scene(cluster, sync, engines)
        finally:
            await cluster.shutdown()

    asyncio.run(run())


def test_both_engines_get_every_tensor_push_after_push() -> None:
    async def scene(cluster: RayCluster, sync: WeightSync, engines: dict[str, Engine]) -> None:
        for version in range(3):
            report = await sync.push(lambda: engines, version)  # which compares receipts and probe
            assert report.probe_error < 1e-4 and report.num_bytes > 20 * (1 << 16)

    on_cluster(scene)


def test_an_engine_that_dies_in_mid_push_ends_that_push_and_not_the_next() -> None:
    async def scene(cluster: RayCluster, sync: WeightSync, engines: dict[str, Engine]) -> None:
        await sync.push(lambda: engines, 0)
        victim = cluster.process_ids("policy")[0]
        asyncio.get_running_loop().call_later(0.05, os.kill, victim, signal.SIGKILL)
        with pytest.raises(EngineLost, match="policy-0 died"):
            for version in range(1, 100):
                await sync.push(lambda: engines, version)
        report = await sync.push(lambda: {"policy-1": engines["policy-1"]}, 100)
        assert report.probe_error < 1e-4

    on_cluster(scene)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_in_mid_push_ends_it_within_the_deadline(rank: int) -> None:
    async def scene(cluster: RayCluster, sync: WeightSync, engines: dict[str, Engine]) -> None:
        await sync.push(lambda: engines, 0)
        victim = cluster.process_ids("learner")[rank]
        asyncio.get_running_loop().call_later(0.05, os.kill, victim, signal.SIGKILL)
        with pytest.raises((ActorDied, ConnectionError)):
            async with asyncio.timeout(40):
                for version in range(1, 100):
                    await sync.push(lambda: engines, version)

    on_cluster(scene)
