"""Assigns every role its slots, engine and transport, and checks that they work together."""

import logging

from grmpipe.config.io.key_errors import section
from grmpipe.config.roles import Roles, ServedRole, resolve_roles
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.models.engines.engine_kind import AnyEngine
from grmpipe.models.engines.installed import nccl_version
from grmpipe.models.types import TransportKind
from grmpipe.models.weights.transports import TRANSPORTS, transport_kind
from grmpipe.scheduler.placement import Placement
from grmpipe.scheduler.weights.choose_transport import WeightPath, choose_transport
from grmpipe.validate.determinism import check_deterministic
from grmpipe.validate.engines import check_options, check_shares
from grmpipe.validate.learners import check_backend, check_parallel
from grmpipe.validate.machines import place_roles

log = logging.getLogger(__name__)


def seat_roles(config: RunConfig) -> tuple[Placement, Roles]:
    """Assign every role its slots, whatever this machine has, and resolve the roles."""
    placement = place_roles(config)
    with section(""):
        roles = resolve_roles(config, placement)
    check_options(roles, config, placement)
    check_deadlines(config)
    check_shares(roles, placement)
    check_deterministic(config, placement, roles)
    check_parallel(config, placement)
    check_backend(config, placement)
    with section(""):
        find_wanted_transport(config.sync.transport)
    for role in (role for role in roles.seated if role.learner is not None):
        if config.cluster.address is None:  # the machines of a joined cluster are known only after joining
            with section(""):
                resolve_transport(role, config, placement, same_machine=True)
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
    if role.is_elastic:
        raise ConfigError(
            f"{role.key}.train.enabled: the pool {role.pool} is elastic, and a sleeping engine takes no "
            f"weights of a GRM that learns; set placement.pools.{role.pool}.elastic=false, "
            f"or placement.roles.{role.name}.pool to another"
        )


def check_deadlines(config: RunConfig) -> None:
    """Check that a judgement can time out before its group's deadline, which would take all verdicts at once; and the
    last one of judges that are asked one after the other.
    """
    rollout, judging = config.rollout, config.judging
    group_s = rollout.group_deadline_s
    timed = judging.generative | judging.scalar
    timeouts_s = {name: timed[name].limits.timeout_s if name in timed else 0.0 for name in judging.judges}
    chain = [name for name in config.rewards.longest_chain(timeouts_s) if name in timed]
    judged_s = sum(timeouts_s[name] for name in chain)
    if judged_s < group_s:
        return
    keys = " + ".join(f"{timed[name].key}.limits.timeout_s" for name in chain)
    played_s = rollout.max_turns * rollout.max_new_tokens / rollout.min_tokens_per_s
    raise ConfigError(
        f"{keys}: {judged_s:g} s isn't below rollout.group_deadline_s = {group_s:g} s, the time to roll out and judge "
        "a group: the deadline would end judgements before their timeout; type rollout.group_deadline_s="
        f"{played_s + judged_s:g} or more, or a shorter {timed[chain[-1]].key}.limits.timeout_s"
    )


def resolve_transport(role: ServedRole, config: RunConfig, placement: Placement, *, same_machine: bool) -> str:
    """The transport for `sync.transport`, from the learner of a role to its engines: a name of the table, or the dotted
    path of a user's own. ValueError names it and what works.
    """
    name = config.sync.transport
    wanted = find_wanted_transport(name)
    taken = list_supported(role.engine, *([] if wanted is None else [wanted]))
    path = find_weight_path(role, config, placement, same_machine)
    chosen = choose_transport(wanted, role.model.engine, taken, path)
    if chosen.group == "nccl" and (differ := different_nccl(role.engine)):
        if wanted is not None:
            raise ValueError(f"sync.transport: nccl: {differ}, or set sync.transport to auto")
        others = [kind for kind in taken if kind.group != "nccl"]
        chosen = choose_transport(None, role.model.engine, others, path)
        log.warning("weights can't be sent by nccl but by %s: %s", chosen.name, differ)
    return chosen.name if wanted is None else name


def different_nccl(engine: AnyEngine) -> str:
    """Why NCCL can't connect a learner with an engine, and what to type; empty if it can, or that isn't known here."""
    ours, theirs = nccl_version(), engine.nccl_version()
    if not ours or not theirs or ours == theirs:
        return ""
    return (
        f"the learner has NCCL {ours} and the engine's environment {theirs}, and NCCL refuses to connect two "
        f"versions; type `pip install nvidia-nccl-cu13=={ours}` in the engine's environment"
    )


def find_wanted_transport(name: str) -> TransportKind | None:
    """The transport that `sync.transport` names; None: choose the best. Raises ValueError for an unknown name."""
    return None if name == "auto" else transport_kind(name)


def list_supported(engine: AnyEngine, *others: TransportKind) -> tuple[TransportKind, ...]:
    """The transports that an engine supports, the best first: those of the table, and `others`."""
    best = [transport_kind(name) for name in engine.transports]
    return tuple(dict.fromkeys([*best, *TRANSPORTS.values(), *others] if engine.any_transport else best))


def find_weight_path(role: ServedRole, config: RunConfig, placement: Placement, same_machine: bool) -> WeightPath:
    assert role.learner is not None, f"{role.name} doesn't learn"
    learner, engines = placement.seats[role.learner], placement.seats[role.name]
    ranks, served = ([(seat.pool, seat.slots) for seat in seats] for seats in (learner, engines))
    return WeightPath(
        learner=placement.pools[learner[0].pool].resource,
        engines=placement.pools[engines[0].pool].resource,
        same_machine=same_machine,
        with_engine=ranks[0] in served,
        all_shared=set(served) <= set(ranks),
        same_process=config.cluster.kind == "inprocess" and role.engine.in_process,
    )
