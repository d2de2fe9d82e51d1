"""Checks of a run's engines: their options and slots, shares of a GPU, and one engine for several roles.

Every refusal is a ConfigError that names the key and what to type.
"""

import itertools
import math

from grmpipe.config.io.key_errors import section
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.keys.entry_names import POLICY
from grmpipe.config.roles import ResolvedRole, Roles, ServedRole
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.judge.kinds import math_rule
from grmpipe.models.engines.engine_kind import Endpoint
from grmpipe.models.lm.footprint import Heads
from grmpipe.scheduler.placement import Placement


def check_options(roles: Roles, config: RunConfig, placement: Placement) -> None:
    """Check that engines can use their places, and that limits leave time to answer. The same on every machine."""
    for role in roles.served.values():
        check_joined(role)
        check_speculation(role)
        if role.engine.endpoint is not None:
            for judge in config.asked.select_asking(role.name).values():
                check_limits(role, role.engine.endpoint, judge)
    for name in placement.seats:
        check_slots(roles[name])
    for role in roles.seated:
        check_sleep(role, placement)
    if (policy := roles.served.get(POLICY)) is not None and policy.learner is not None:
        check_correction(policy, config)


def check_speculation(role: ServedRole) -> None:
    """Check that its engines can draft tokens, if they shall. A remote endpoint is asked for none."""
    if role.speculation == "none" or role.engine.outside:
        return
    if why := role.engine.why_no_drafts(role.device):
        raise ConfigError(f"engine.speculation: {why}; type engine.speculation=none")


def check_correction(policy: ServedRole, config: RunConfig) -> None:
    """Check that a policy that learns from samples of quantized weights corrects for them. Imitation has no ratio."""
    algorithm = config.algorithm
    if not policy.engine.quantizes or config.task in ("train_judge_rft", "evaluate"):
        return
    if algorithm.correction == "none" and algorithm.proximal != "sampler":
        raise ConfigError(
            f"algorithm.correction: the engine of {policy.name} samples from quantized weights or cache, which is "
            "another policy than the learner's, and nothing corrects for it; type algorithm.correction=tis or "
            "algorithm.proximal=sampler (to measure what happens without a correction, type "
            "algorithm.correction=grmpipe.algorithm.corrections.apply_no_correction)"
        )


def check_limits(role: ServedRole, endpoint: Endpoint, judge: JudgeConfig) -> None:
    """Check that all judgements that may be in flight can be sent before they time out."""
    per_minute = endpoint.requests_per_minute
    if per_minute and judge.limits.max_concurrency * 60 / per_minute > judge.limits.timeout_s:
        fitting = int(judge.limits.timeout_s * per_minute / 60)
        key = role.option_key("requests_per_minute")
        raise ConfigError(
            f"{judge.key}.limits.max_concurrency: {judge.limits.max_concurrency} judgements in flight take "
            f"{judge.limits.max_concurrency * 60 / per_minute:.0f} s to send at "
            f"{key}={per_minute}, and time out after {judge.key}.limits.timeout_s={judge.limits.timeout_s:g}; "
            f"type {judge.key}.limits.max_concurrency={max(1, fitting // 2)}, or a longer {judge.key}.limits.timeout_s"
        )
    if tokens := endpoint.tokens_per_minute:
        one_s = judge.max_new_tokens * 60 / tokens  # without the prompt
        if one_s > judge.limits.timeout_s:
            key = role.option_key("tokens_per_minute")
            fitting = math.ceil(60 * judge.max_new_tokens / judge.limits.timeout_s)
            raise ConfigError(
                f"{key}: a judgement of {judge.key}.max_new_tokens={judge.max_new_tokens} uses {one_s:.0f} s of the "
                f"{tokens} tokens per minute, and waiting judgements time out after "
                f"{judge.key}.limits.timeout_s={judge.limits.timeout_s:g}; "
                f"type {key}={2 * fitting} or more, 0 for no limit, or a lower {judge.key}.max_new_tokens"
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


def check_sleep(role: ServedRole, placement: Placement) -> None:
    """Check that engines of an elastic or time-shared pool can free a GPU's memory while they don't serve."""
    if role.name in placement.time_sharing_roles:
        sharing, others = "time_shared", "the learner"
    elif role.is_elastic:
        sharing, others = "elastic", "another role"
    else:
        return
    way_out = f"placement.pools.{role.pool}.{sharing}=false"
    if role.frees_device and not role.engine.memory.sleep_mode:
        key = role.option_key("sleep_mode")
        raise ConfigError(
            f"{key}: slots of the {sharing} pool {role.pool} are used by {role.name} and {others} in alternation, "
            f"which share the GPU's memory; type {key}=true, or {way_out}"
        )
    if role.engine.joined:
        raise ConfigError(
            f"{role.option_key('urls')}: servers that already run have no slots in the placement; type {way_out}"
        )


def check_joined(role: ServedRole) -> None:
    """Check that each replica has one server."""
    joined, replicas = role.engine.joined, role.num_replicas
    if joined and joined != replicas:
        raise ConfigError(
            f"{role.option_key('urls')}: {joined} servers for {replicas} replicas of {role.name}; give one per "
            f"replica, or type placement.roles.{role.name}.replicas={joined}"
        )


def check_tensor_parallel(role: ServedRole, heads: Heads) -> None:
    """Check that each GPU gets the same number of attention heads, and whole key heads or copies of one."""
    num_gpus = role.num_gpus
    fits = heads.query % num_gpus == 0 and (heads.key % num_gpus == 0 or num_gpus % heads.key == 0)
    if not fits:
        fitting = [n for n in range(1, num_gpus) if heads.query % n == 0 and (heads.key % n == 0 or n % heads.key == 0)]
        raise ConfigError(
            f"placement.roles.{role.name}.slots_per_replica: {num_gpus} GPUs can't share {heads.query} attention heads "
            f"and {heads.key} key heads evenly; type placement.roles.{role.name}.slots_per_replica={fitting[-1]}"
        )


def resolve_context_limit(role: ServedRole, model_tokens: int) -> int:
    """The context window for a role's requests: its engine's, which may not exceed the model's (0: unknown)."""
    window = role.engine.options.max_context_tokens or model_tokens
    if window > model_tokens > 0:
        key = role.option_key("max_context_tokens")
        raise ConfigError(
            f"{key}: {window} exceeds the context window of {role.name} ({role.model.path}); "
            f"type {key}={model_tokens} or less, 0 for all of it"
        )
    return window


# -- engines that share a GPU, or are one ---------------------------------------------------------------------------


def check_shares(roles: Roles, placement: Placement) -> None:
    """Check that engines that hold a GPU's memory at the same time don't ask for more than all of it."""
    asked = {
        role.name: share
        for role in roles.seated
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


# -- depends on the machines of the run ----------------------------------------------------------------------------
def check_rule_installed(config: RunConfig) -> None:
    """Check that the library of the rule is installed, if it needs one."""
    for judge in config.judges.values():
        if judge.rule == "math_verify" and not math_rule.is_installed():
            raise ConfigError(f"{judge.key}.rule: math_verify needs math-verify; type {math_rule.INSTALL}")


def check_installed(roles: Roles, config: RunConfig) -> None:
    """Check that what the engines need is installed. Skipped for a joined cluster, whose machines have their own
    environments.
    """
    for role in roles.served.values():
        if role.engine.outside or config.cluster.address is None:
            with section(""):
                role.engine.check_installed(role.name, role.model, role.option_key)
