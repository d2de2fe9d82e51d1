"""Assigns every role its slots, engine and transport, and checks that they work together."""

import itertools
import logging

from grmpipe.config.io.key_errors import section
from grmpipe.config.keys.entry_names import POLICY
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.run_judges import Judging
from grmpipe.config.train import FSDP2, AlgorithmConfig
from grmpipe.models.engines.engine_kind import AnyEngine
from grmpipe.models.engines.installed import nccl_version
from grmpipe.models.types import TransportKind
from grmpipe.models.weights.transports import TRANSPORTS, transport_kind
from grmpipe.roles.determinism import check_deterministic
from grmpipe.roles.machines import place_roles
from grmpipe.roles.roles import ResolvedRole, Roles, ServedRole, resolve_roles
from grmpipe.scheduler.placement import Placement
from grmpipe.scheduler.weights.choose_transport import WeightPath, choose_transport

log = logging.getLogger(__name__)


def seat_roles(config: RunConfig) -> tuple[Placement, Roles]:
    """Assign every role its slots, whatever this machine has, and resolve the roles."""
    placement = place_roles(config)
    with section(""):
        roles = resolve_roles(config, placement)
    check_options(roles, config.asked, placement)
    if config.task != "train_judge_rft":
        check_correction(roles.served[POLICY], config.algorithm)
    check_deadlines(config)
    check_shares(roles, placement)
    check_deterministic(config, placement, roles)
    for learner in roles.learners.values():
        learner.check_ranks()
    if placement.time_sharing_roles and (backend := config.train.backend) != FSDP2:  # `LearnerRank` has no call for it
        pool = placement.seats["learner"][0].pool
        raise ConfigError(
            f"train.backend: {backend} can't give its memory to the engines of the time-shared pool {pool}; type "
            f"train.backend={FSDP2}, or placement.pools.{pool}.time_shared=false"
        )
    with section(""):
        find_wanted_transport(config.sync.transport)
    for role in (role for role in roles.seated if role.learner is not None):
        if not config.cluster.is_joined:  # the machines of a joined cluster are known only after joining
            with section(""):
                resolve_transport(role, config, placement, same_machine=True)
        if role.learner == "learner":
            continue
        # The weights of a judge that learns are pushed between any two moments: its engines must be awake.
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
    for role in (role for role in roles.seated if role.model.policy_updates):
        # It takes over the policy's weights when a step ends: both must be awake then.
        if role.is_elastic or placement.time_sharing_roles:
            pool = role.pool if role.is_elastic else placement.seats["learner"][0].pool
            kind = "elastic" if role.is_elastic else "time_shared"
            raise ConfigError(
                f"{role.key}.policy_updates: the pool {pool} is {kind}, so that {role.name} or the learner may be "
                f"asleep when a step ends; set placement.pools.{pool}.{kind}=false"
            )
    if config.task == "train_judge_rft" and placement.time_sharing_roles:
        pool = placement.seats["learner"][0].pool
        raise ConfigError(
            f"placement.pools.{pool}.time_shared: fine-tuning samples first and then learns, without alternation; "
            f"set placement.pools.{pool}.time_shared=false"
        )
    return placement, roles


def check_options(roles: Roles, asked: Judging, placement: Placement) -> None:
    """Check that engines can use their places, and that limits leave time to answer. The same on every machine."""
    for role in roles.served.values():
        role.check_joined()
        role.check_adapters()
        role.check_speculation()
        if role.model.adapter_of and role.takes_turns:
            kind = "elastic" if role.is_elastic else "time_shared"
            raise ConfigError(
                f"{role.key}.adapter_of: the pool {role.pool} is {kind}, so that the engines of "
                f"{role.model.adapter_of} may be asleep when others need them; type "
                f"placement.pools.{role.pool}.{kind}=false, or leave {role.key}.adapter_of out"
            )
        if role.engine.endpoint is not None:
            for judge in asked.select_asking(role.name).values():
                role.check_limits(role.engine.endpoint, judge)
    for name in placement.seats:
        check_slots(roles[name])


def check_correction(policy: ServedRole, algorithm: AlgorithmConfig) -> None:
    """Check that a policy that learns from samples of quantized weights corrects for them. Imitation has no ratio."""
    if policy.learner is None or not policy.engine.quantizes:
        return
    if algorithm.correction == "none" and algorithm.proximal != "sampler":
        raise ConfigError(
            f"algorithm.correction: the engine of {policy.name} samples from quantized weights or cache, which is "
            "another policy than the learner's, and nothing corrects for it; type algorithm.correction=tis or "
            "algorithm.proximal=sampler (to measure what happens without a correction, type "
            "algorithm.correction=grmpipe.algorithm.corrections.apply_no_correction)"
        )


def check_slots(role: ResolvedRole) -> None:
    """Check that a process uses all GPUs of its seat."""
    by_engine = isinstance(role, ServedRole)  # a rank of a learner, or a scorer, uses one GPU
    if role.num_gpus == 1 or (isinstance(role, ServedRole) and role.engine.tensor_parallel):
        return
    other_engine = f" or {role.name}.engine=vllm, which splits one model over several" if by_engine else ""
    raise ConfigError(
        f"placement.roles.{role.name}.slots_per_replica: a process of {role.name} uses one GPU, "
        f"{role.num_gpus - 1} of {role.num_gpus} would be idle; "
        f"type placement.roles.{role.name}.slots_per_replica=1, and replicas for more{other_engine}"
    )


def check_shares(roles: Roles, placement: Placement) -> None:
    """Check that engines that hold a GPU's memory at the same time don't ask for more than all of it."""
    asked = {
        role.name: share
        for role in roles.hosts
        if role.device == "cuda" and (share := role.engine.memory.share) is not None
    }
    if len(asked) < 2 or not sum(asked.values()) > 1:
        return
    blocks = [{(seat.pool, slot) for seat in placement.seats[role] for slot in seat.slots} for role in asked]
    served = [roles.served[name] for name in asked]
    pool = served[0].pool
    by_turns = all(role.frees_device for role in served)
    meet = any(one & other for one, other in itertools.combinations(blocks, 2))
    if not meet or (placement.elastic_slots(pool) and by_turns):
        return
    keys = {role.name: role.option_key(role.engine.memory.share_option) for role in served}
    settings = " and ".join(f"{keys[role]}={share:g} ({role})" for role, share in asked.items())
    half = " ".join(f"{role.key}.engine_options.{role.engine.memory.share_option}=0.4" for role in served)
    raise ConfigError(
        f"{keys[served[-1].name]}: the engines on the GPUs of pool {pool} ask for {sum(asked.values()):g} of each: "
        f"{settings}; type {half}, or for vLLM null: the memory that the models leave is then divided"
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
    others = [] if wanted is None else [wanted]
    taken = list_supported(role.engine, *others, adapters=role.model.lora.in_engines)
    if config.sync.delta:
        check_delta(role, wanted)
        taken = tuple(kind for kind in taken if kind.delta)
    assert role.learner is not None, f"{role.name} doesn't learn"
    learner, engines = placement.seats[role.learner], placement.seats[role.model.host]
    ranks, served = ([(seat.pool, slot) for seat in seats for slot in seat.slots] for seats in (learner, engines))
    path = WeightPath(
        learner=placement.pools[learner[0].pool].resource,
        engines=placement.pools[engines[0].pool].resource,
        same_machine=same_machine,
        with_engine=ranks[0] in served,
        all_shared=set(served) <= set(ranks),
        same_process=config.cluster.kind == "inprocess" and role.engine.in_process,
    )
    chosen = choose_transport(wanted, role.model.engine, taken, path)
    if chosen.group == "nccl" and (differ := different_nccl(role.engine)):
        if wanted is not None:
            raise ValueError(f"sync.transport: nccl: {differ}, or set sync.transport to auto")
        chosen = choose_transport(None, role.model.engine, [kind for kind in taken if kind.group != "nccl"], path)
        log.warning("weights can't be sent by nccl but by %s: %s", chosen.name, differ)
    return chosen.name if wanted is None else name


def check_delta(role: ServedRole, wanted: TransportKind | None) -> None:
    """Check that pushes of only what changed can be had, and save something. Raises ValueError."""
    able = ", ".join(kind.name for kind in list_supported(role.engine) if kind.delta)
    if role.model.lora.learns:
        raise ValueError(f"sync.delta: adapters of {role.key} are small, and sent whole; type sync.delta=false")
    if role.dtype == "float32":
        raise ValueError(
            f"sync.delta: in float32 nearly every weight changes in each step; type {role.dtype_key}=bfloat16, or "
            "sync.delta=false"
        )
    if role.engine.joined:
        raise ValueError(
            f"sync.delta: {role.option_key('urls')} are servers of their own, beside which no copy of the last push is "
            "kept; type sync.delta=false"
        )
    if wanted is not None and not wanted.delta:
        raise ValueError(
            f"sync.delta: {wanted.name} is as fast with all bytes; type sync.transport=auto or one of {able}, or "
            "sync.delta=false"
        )


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


def list_supported(engine: AnyEngine, *others: TransportKind, adapters: bool = False) -> tuple[TransportKind, ...]:
    """The transports that an engine supports, the best first: those of the table, and `others`. adapters: for pushes of
    adapters alone.
    """
    best = [transport_kind(name) for name in (adapters and engine.adapter_transports) or engine.transports]
    return tuple(dict.fromkeys([*best, *TRANSPORTS.values(), *others] if engine.any_transport else best))
