"""Starts the cluster of a run. The table of clusters."""

from collections.abc import Awaitable, Callable

from grmpipe.config.run_config import RunConfig
from grmpipe.validate.sections import section
from models.repeatable_kernels import choose_repeatable_kernels
from scheduler.placement import Placement
from scheduler.processes.actors import Cluster, InProcessCluster


async def start_cluster(config: RunConfig, placement: Placement) -> Cluster:
    """The cluster, with the slots of a placement reserved. Before, kernels are chosen for all its processes."""
    if config.train.deterministic or config.engine.embedded.batch_invariant:
        choose_repeatable_kernels()
    return await CLUSTERS[config.cluster.kind](config, placement)


async def ray_cluster(config: RunConfig, placement: Placement) -> Cluster:
    from scheduler.processes.ray_cluster import RayCluster

    with section(""):  # what only the machines of a joined cluster know is refused in the same form
        return await RayCluster.start(config.cluster, placement)


async def inprocess_cluster(config: RunConfig, placement: Placement) -> Cluster:
    return InProcessCluster(placement)


CLUSTERS: dict[str, Callable[[RunConfig, Placement], Awaitable[Cluster]]] = {
    "ray": ray_cluster,
    "inprocess": inprocess_cluster,
}
