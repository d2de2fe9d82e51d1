"""Starts the cluster of a run, and before it the process that its workers are forked from. The table of clusters."""

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from grmpipe.config.io.key_errors import section
from grmpipe.config.run_config import RunConfig
from grmpipe.models.repeatable_kernels import choose_repeatable_kernels
from grmpipe.roles.roles import resolve_engine
from grmpipe.scheduler.placement import Placement
from grmpipe.scheduler.processes.actors import Cluster, InProcessCluster
from grmpipe.scheduler.processes.fork_server import fork_workers

PRELOADED = (
    "grmpipe.scheduler.processes.engine_host",
    "grmpipe.models.engines.embedded.embedded_engine",
    "grmpipe.train.learner.learner",
)


@contextmanager
def preload(config: RunConfig) -> Iterator[None]:
    """Context in which the libraries of a run on this machine's cores are imported once, from now on."""
    if not (config.cluster.kind == "ray" and not config.cluster.is_joined and runs_on_cores(config)):
        yield
        return
    choose_kernels(config)
    with fork_workers(PRELOADED):
        yield


def runs_on_cores(config: RunConfig) -> bool:
    """Whether all models are in processes of ours, each with one core at most."""
    placement = config.placement
    return (
        all(pool.resource == "cpu" for pool in placement.pools.values())
        and all(where.slots_per_replica == 1 for where in placement.roles.values())
        and all(config.find_engine_kind(role).in_process for role in config.served)
        and not config.places_envs
    )


def choose_kernels(config: RunConfig) -> None:
    """Before any process multiplies, in the environment of all."""
    if config.train.deterministic:
        choose_repeatable_kernels()


async def start_cluster(config: RunConfig, placement: Placement, wait_s: float = 0.0) -> Cluster:
    """The cluster, with the slots of a placement reserved. Before, kernels are chosen for all its processes.

    wait_s: how long it may take until the machines have the slots.
    """
    choose_kernels(config)
    return await CLUSTERS[config.cluster.kind](config, placement, wait_s)


async def ray_cluster(config: RunConfig, placement: Placement, wait_s: float) -> Cluster:
    from grmpipe.scheduler.processes.ray_cluster import RayCluster

    with section(""):  # what only the machines of a joined cluster know is refused in the same form
        return await RayCluster.start(config.cluster, placement, wait_s, list_nccl_variables(config))


def list_nccl_variables(config: RunConfig) -> dict[str, str]:
    """Variables of NCCL that learners and the engines that they send to must have alike. Raises ValueError for kinds of
    engines that want different ones.
    """
    found: dict[str, str] = {}
    for role in config.learners:
        wanted = resolve_engine(role, config).nccl_variables
        clash = [name for name in wanted if name not in os.environ and found.get(name, wanted[name]) != wanted[name]]
        if clash:
            raise ValueError(
                f"engine: {clash[0]} must be the same in all processes that share NCCL, and the engines of {role} want "
                f"{wanted[clash[0]]}; export {clash[0]} to set it for all"
            )
        found |= dict(wanted)
    return found


async def inprocess_cluster(config: RunConfig, placement: Placement, wait_s: float) -> Cluster:
    return InProcessCluster(placement)


CLUSTERS: dict[str, Callable[[RunConfig, Placement, float], Awaitable[Cluster]]] = {
    "ray": ray_cluster,
    "inprocess": inprocess_cluster,
}
