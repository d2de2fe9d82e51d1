"""Checks of the machines: whether they have the slots of the placement, and share the run's directory."""

import os
from pathlib import Path

from grmpipe.config.io.key_errors import section
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.scheduler.placement import ClusterConfig, NodeCapacity, Placement, check_capacity, place
from grmpipe.scheduler.processes.actors import Cluster

SEATING_TASKS = ("train", "train_judge_rft", "plan", "simulate")  # tasks that seat all roles of the run
RUNNING_TASKS = ("train", "train_judge_rft")  # tasks that also start them on this machine
SHARED_CORES = 1 << 20  # for one process: any number of threads


def check_seats(config: RunConfig) -> None:
    """Check the placement without looking at a model. Raises ConfigError."""
    if config.task not in SEATING_TASKS or config.data.retrain_from is not None:
        return
    placement = place_roles(config)
    if config.task in RUNNING_TASKS:
        check_machine(config.cluster, placement)


def place_roles(config: RunConfig) -> Placement:
    with section(""):
        return place(config.placement, config.roles, config.served, config.learners)


def check_machine(cluster: ClusterConfig, placement: Placement) -> None:
    """Check that this machine has the slots. A joined cluster is checked when it is joined."""
    if cluster.is_joined:
        return
    cores = SHARED_CORES if cluster.kind == "inprocess" else os.cpu_count() or 1
    wants_gpus = any(pool.resource == "gpu" for pool in placement.pools.values())
    with section(""):
        here = NodeCapacity(name="this machine", cpus=cores, gpus=gpus_here() if wants_gpus else 0)
        check_capacity(placement, [here])


def gpus_here() -> int:
    import torch  # takes seconds: only if a GPU is wanted

    return torch.cuda.device_count()


async def check_shared(cluster: Cluster, run_dir: Path) -> None:
    """Raises ConfigError if they don't: checkpoints and exports would go to a different folder on each machine."""
    if problems := await cluster.strangers_to(run_dir):
        raise ConfigError(
            f"run_dir: the machines of cluster.address don't share {run_dir} ({'; '.join(problems)}), and ranks write "
            "checkpoints and exports there; type run_dir=<a folder that all of them share>"
        )
