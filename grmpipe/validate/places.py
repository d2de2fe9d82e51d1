"""Every role on its slots, with an engine and a way for weights that work there. Starts nothing."""

from __future__ import annotations

from grmpipe.config.roles import shares_engine
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.validate.deadlines import check_deadlines
from grmpipe.validate.devices import check_shares
from grmpipe.validate.engines import check_options
from grmpipe.validate.seats import seats_of
from grmpipe.validate.sections import section
from grmpipe.validate.swap import check_one_engine
from grmpipe.validate.weight_route import transport_of, wanted_transport
from scheduler.placement import Placement


def seat_roles(config: RunConfig) -> Placement:
    """Every role on its slots, whatever this machine has."""
    placement = seats_of(config)
    check_options(config, placement)
    check_deadlines(config)
    check_one_engine(config, placement)
    check_shares(config, placement)
    with section(""):
        wanted_transport(config.sync.transport)
        if config.cluster.address is None:  # the machines of a joined cluster are known when it is joined
            transport_of(config, placement, same_machine=True)
            if config.cotrain.enabled:
                transport_of(config, placement, same_machine=True, learner="grm_learner", engines="grm")
    if config.cotrain.enabled:
        check_grm_stays_awake(config, placement)
    if config.task == "finetune" and placement.time_sharing_roles:
        pool = placement.seats["learner"][0].pool
        raise ConfigError(
            f"placement.pools.{pool}.time_shared: fine-tuning samples first and then learns, without alternation; "
            f"set placement.pools.{pool}.time_shared=false"
        )
    return placement


def check_grm_stays_awake(config: RunConfig, placement: Placement) -> None:
    """Its weights are pushed between any two moments."""
    pool = placement.seats["grm"][0].pool
    if placement.elastic_slots(pool) and not shares_engine(config, placement):
        raise ConfigError(
            f"cotrain.enabled: the pool {pool} is elastic, and a sleeping engine takes no weights of a GRM that "
            f"learns; set placement.pools.{pool}.elastic=false, placement.roles.grm.pool to another, or (on "
            "vLLM) balance.swap=weights"
        )
