"""A driver that seats a process on a GPU of a joined cluster and prints its number of threads. Run by
test_joined_cluster.py.
"""

from __future__ import annotations

import asyncio
import sys

from grmpipe.scheduler.placement import ClusterConfig, PlacementConfig, PoolConfig, RoleConfig, place
from grmpipe.scheduler.processes.ray_cluster import RayCluster


def main(address: str) -> None:
    class Member:  # defined here, so that it is sent by value
        def __init__(self, rank: int, world_size: int, init_method: str | None) -> None:
            pass

        def threads(self) -> str | None:
            import os

            return os.environ.get("OMP_NUM_THREADS")

    pools, roles = {"gpus": PoolConfig(slots=2, resource="gpu")}, {"learner": RoleConfig(pool="gpus")}

    async def scenario() -> list[object]:
        cluster = await RayCluster.start(
            ClusterConfig(address=address), place(PlacementConfig(pools=pools, roles=roles), ("learner",))
        )
        try:
            return await (await cluster.start_members("learner", Member)).call_all("threads")
        finally:
            await cluster.shutdown()

    print(*asyncio.run(scenario()))


if __name__ == "__main__":
    main(sys.argv[1])
