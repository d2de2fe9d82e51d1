"""Assigns every role its slots, engine and transport, and checks that they work together. Starts nothing."""

from __future__ import annotations

from grmpipe.config.roles import Roles, ServedRole, resolve_roles
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.validate.backend import check_backend
from grmpipe.validate.deadlines import check_deadlines
from grmpipe.validate.determinism import check_deterministic
from grmpipe.validate.devices import check_shares
from grmpipe.validate.engines import check_options
from grmpipe.validate.parallel import check_parallel
from grmpipe.validate.seats import seats_of
from grmpipe.validate.sections import section
from grmpipe.validate.swap import check_shared_engine
from grmpipe.validate.weight_route import transport_of, wanted_transport
from scheduler.placement import Placement


def seat_roles(config: RunConfig) -> tuple[Placement, Roles]:
    """Assign every role its slots, whatever this machine has, and resolve the roles."""
    placement = seats_of(config)
    with section(""):
        roles = resolve_roles(config, placement)
    check_options(roles, config, placement)
    check_deadlines(config)
    check_shared_engine(roles)
    check_shares(roles, placement)
    check_deterministic(config, placement, roles)
    check_parallel(config, placement)
    check_backend(config, placement)
    with section(""):
        wanted_transport(config.sync.transport)
    for role in (role for role in roles.seated if role.learner is not None):
        if config.cluster.address is None:  # the machines of a joined cluster are known only after joining
            with section(""):
                transport_of(role, config, placement, same_machine=True)
        if role.learner != "learner":
            check_stays_awake(role, placement)
    for role in (role for role in roles.seated if role.model.policy_updates):
        check_has_own_slots(role, placement)
    if config.task == "train_judge_rft" and placement.time_sharing_roles:
        pool = placement.seats["learner"][0].pool
        raise ConfigError(
            f"placement.pools.{pool}.time_shared: fine-tuning samples first and then learns, without alternation; "
            f"set placement.pools.{pool}.time_shared=false"
        )
    return placement, roles


def check_has_own_slots(role: ServedRole, placement: Placement) -> None:
    """A model that takes over the policy's weights must be awake when a step ends, and the learner too."""
    if role.is_elastic or placement.time_sharing_roles:
        pool = role.pool if role.is_elastic else placement.seats["learner"][0].pool
        kind = "elastic" if role.is_elastic else "time_shared"
        raise ConfigError(
            f"{role.key}.policy_updates: the pool {pool} is {kind}, so that {role.name} or the learner may be asleep "
            f"when a step ends; set placement.pools.{pool}.{kind}=false"
        )


def check_stays_awake(role: ServedRole, placement: Placement) -> None:
    """The weights of a judge that learns are pushed between any two moments."""
    if role.name in placement.time_sharing_roles:
        raise ConfigError(
            f"placement.roles.{role.learner}.pool: only the policy's learner can alternate with engines; set "
            f"placement.pools.{role.pool}.time_shared=false, or placement.roles.{role.name}.pool to another one"
        )
    if role.is_elastic and not role.shares_with:
        raise ConfigError(
            f"{role.key}.train.enabled: the pool {role.pool} is elastic, and a sleeping engine takes no "
            f"weights of a GRM that learns; set placement.pools.{role.pool}.elastic=false, "
            f"placement.roles.{role.name}.pool to another, or (on vLLM) slots.balance.swap=weights"
        )
