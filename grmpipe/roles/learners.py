"""Checks of what learns: the ranks of a learner, packed samples, adapters, routers, and the names of sent weights."""

from grmpipe.config.io.key_errors import section
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.train import FSDP2
from grmpipe.models.engines.installed import peft_missing
from grmpipe.models.lm.footprint import Heads, read_heads
from grmpipe.models.lm.packable_configs import is_known_to_pack
from grmpipe.models.settings import ROUTER
from grmpipe.roles.roles import Model, ServedRole
from grmpipe.scheduler.placement import Placement


def check_learns(model: Model, key: str) -> None:
    """Check that the model can be trained on packed samples, by its config and outline; the learner also checks its
    weights.
    """
    if is_known_to_pack(model.path):
        return
    from grmpipe.models.lm.packed_check import (
        check_trainable,  # late: an outline takes torch and transformers' models, seconds
    )

    with section(f"{key}."):
        check_trainable(model.path)


def check_parallel(config: RunConfig, placement: Placement) -> None:
    """Raises ConfigError if copies, shared samples or divided experts don't fit the number of a learner's ranks."""
    for learner, parallel in config.parallel.items():
        if seats := placement.seats.get(learner):
            with section(f"{config.key_of_learner(learner)}.parallel."):
                parallel.check_ranks(len(seats))


def check_divides(config: RunConfig, learner: str, section_of_model: str, path: str) -> None:
    """Raises ConfigError if the ranks of a learner can't divide the query heads or the experts of the model at
    `path`.
    """
    if config.parallel[learner].cp > 1:
        check_query_heads(config, learner, section_of_model, read_heads(path))
    check_experts(config, path, learner)


def check_query_heads(config: RunConfig, learner: str, section_of_model: str, heads: Heads) -> None:
    """Raises ConfigError if ranks that share samples can't have equal numbers of the query heads of their model."""
    cp, key = config.parallel[learner].cp, f"{config.key_of_learner(learner)}.parallel.cp"
    if heads.query % cp:
        fitting = max(n for n in range(1, cp) if heads.query % n == 0)
        raise ConfigError(
            f"{key}: {cp} ranks can't divide the {heads.query} query heads of {section_of_model}.path evenly; type "
            f"{key}={fitting}"
        )


def check_shares_no_samples(config: RunConfig) -> None:
    """Raises ConfigError if ranks of a model with a scalar head would share samples."""
    if config.train.parallel.cp > 1:
        raise ConfigError(
            f"train.parallel.cp: ranks of a model with a scalar head (task={config.task}) can't share samples; type "
            "train.parallel.cp=1"
        )


def check_experts(config: RunConfig, path: str, learner: str = "learner") -> None:
    """Raises ConfigError if the ranks of a learner can't divide the experts of the model at `path`, or if the policy
    has no routers for train.fp32_modules (a judge or a critic next to a mixture may be dense).
    """
    ep, fp32_router = config.parallel[learner].ep, ROUTER in config.train.fp32_modules and learner == "learner"
    if ep == 1 and not fp32_router:
        return
    from grmpipe.models.lm.causal_lm import outline_causal_lm  # late: seconds, which few runs need
    from grmpipe.models.lm.moe.fp32_router import check_has_routers
    from grmpipe.models.lm.parallel.expert_parallel import check_divisible
    from grmpipe.models.lm.scalar_head import outline_scalar_head

    outline = outline_scalar_head(path) if learner == "critic" else outline_causal_lm(path)
    if ep > 1:
        with section(f"{config.key_of_learner(learner)}.parallel."):
            check_divisible(outline, ep)
    if fp32_router:
        with section("train."):
            check_has_routers(outline)


def check_backend(config: RunConfig, placement: Placement) -> None:
    """Raises ConfigError if the learner must give its memory to engines: `LearnerRank` has no call for that."""
    if config.train.backend != FSDP2 and placement.time_sharing_roles:
        pool = placement.seats["learner"][0].pool
        raise ConfigError(
            f"train.backend: {config.train.backend} can't give its memory to the engines of the time-shared pool "
            f"{pool}; type train.backend={FSDP2}, or placement.pools.{pool}.time_shared=false"
        )


def check_peft(config: RunConfig) -> None:
    """Check that peft is installed. Skipped for a joined cluster, whose machines have their own environments."""
    for model in reversed([*config.models.values()]) if config.cluster.address is None else ():
        if model.lora.learns and (missing := peft_missing()):
            raise ConfigError(f"{model.key}.lora.rank: {missing}, or {model.key}.lora.rank=0")


def check_lora_targets(model: Model, config: RunConfig) -> None:
    """Check that the model has the layers that are to get adapters."""
    lora = config.models[model.name].lora
    if lora.learns:
        from grmpipe.models.lm.lora import check_targets  # late: seconds, which few runs need

        try:
            check_targets(model.path, lora)
        except ValueError as error:
            raise ConfigError(f"{config.models[model.name].key}.{error}") from error


def check_routing(config: RunConfig, policy: Model, role: ServedRole) -> None:
    """Check that the policy has experts to replay, and that its engines can record them. role: the policy's."""
    if config.algorithm.router_replay == "none":
        return
    if config.algorithm.router_replay == "rollout":
        check_records_experts(role)
    from grmpipe.models.lm.causal_lm import outline_causal_lm  # late: seconds, which few runs need
    from grmpipe.models.lm.moe.expert_routing import Routers

    try:
        Routers.of(outline_causal_lm(policy.path))
    except ValueError as error:
        raise ConfigError(f"algorithm.{error}") from error


def check_records_experts(role: ServedRole) -> None:
    if why := role.engine.why_no_experts(role.device):
        raise ConfigError(
            f"algorithm.router_replay: rollout replays the experts that the sampler chose, but {why}; "
            "type policy.engine=embedded, or algorithm.router_replay=old_logprobs"
        )
    with section(""):
        role.engine.check_experts(role.option_key)


def check_weight_names(model: Model, role: ServedRole) -> None:
    """Check that a trained model can be sent to its engines under names that they know."""
    if role.learner is None or not role.engine.checkpoint_names:
        return
    from grmpipe.models.lm.causal_lm import outline_causal_lm  # late: seconds, which few runs need
    from grmpipe.models.lm.checkpoint_names import CheckpointNames

    try:
        CheckpointNames(outline_causal_lm(model.path))
    except ValueError as error:
        raise ConfigError(f"{role.key}.{error}") from error
