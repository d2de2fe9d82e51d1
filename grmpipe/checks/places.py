"""Every role on its slots, and the slots on this machine, before anything starts. Starts nothing."""

from __future__ import annotations

import os

from grmpipe.checks.engines import check_options
from grmpipe.checks.sections import section
from grmpipe.config import ConfigError, RunConfig
from grmpipe.weight_route import transport_of
from scheduler.placement import NodeCapacity, Placement, check_capacity, place

CORES_ARE_SHARED = 1 << 20  # threads of one process, as many as one likes


def seat_roles(config: RunConfig) -> Placement:
    """Every role on its slots, whatever this machine has."""
    with section(""):
        placement = place(config.placement, config.roles)
    check_options(config, placement)
    if config.cluster.address is None:  # the machines of a joined cluster are known when it is joined
        with section(""):
            transport_of(config, placement, same_machine=True)
            if config.cotrain.enabled:
                transport_of(config, placement, same_machine=True, learner="grm_learner", engines="grm")
    if config.cotrain.enabled:
        check_grm_stays_awake(placement)
    if config.task == "finetune" and placement.time_sharing_roles:
        pool = placement.seats["learner"][0].pool
        raise ConfigError(
            f"placement.pools.{pool}.time_shared: fine-tuning samples first and learns then, without turns; "
            f"set placement.pools.{pool}.time_shared=false"
        )
    return placement


def check_grm_stays_awake(placement: Placement) -> None:
    """Its weights are pushed between any two moments."""
    pool = placement.seats["grm"][0].pool
    if placement.elastic_slots(pool):
        raise ConfigError(
            f"cotrain.enabled: the pool {pool} is elastic, and an engine that sleeps takes no weights of a GRM that "
            f"learns; set placement.pools.{pool}.elastic=false, or placement.roles.grm.pool to another"
        )


def check_machine(config: RunConfig, placement: Placement) -> None:
    """Does this machine have the slots? A cluster that is joined is asked when it is joined."""
    if config.cluster.address is None:
        with section(""):
            check_capacity(placement, [this_machine(config.cluster.kind)])


def this_machine(cluster_kind: str) -> NodeCapacity:
    import torch

    cores = CORES_ARE_SHARED if cluster_kind == "inprocess" else os.cpu_count() or 1
    return NodeCapacity(name="this machine", cpus=cores, gpus=torch.cuda.device_count())
