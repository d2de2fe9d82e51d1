"""Checks of what learns: the ranks of a learner, packed samples, adapters, routers, and the names of sent weights."""

from collections.abc import Iterable

from grmpipe.config.grm import ModelEntry
from grmpipe.config.io.key_errors import section
from grmpipe.config.run_config import ConfigError
from grmpipe.models.engines.installed import peft_missing
from grmpipe.models.lm.footprint import read_heads
from grmpipe.models.lm.packable_configs import is_known_to_pack
from grmpipe.roles.roles import LearnerRole, Model, ServedRole


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


def check_divides(learner: LearnerRole, section_of_model: str, path: str) -> None:
    """Raises ConfigError if the ranks can't divide the query heads or the experts of the model at `path`."""
    if learner.parallel.cp > 1:
        learner.check_query_heads(section_of_model, read_heads(path))
    check_experts(learner, path)


def check_experts(learner: LearnerRole, path: str) -> None:
    """Raises ConfigError if the ranks can't divide the experts of the model at `path`, or if it has no routers for
    train.fp32_modules.
    """
    if learner.parallel.ep == 1 and not learner.needs_routers:
        return
    from grmpipe.models.lm.causal_lm import outline_causal_lm  # late: seconds, which few runs need
    from grmpipe.models.lm.moe.fp32_router import check_has_routers
    from grmpipe.models.lm.parallel.expert_parallel import check_divisible
    from grmpipe.models.lm.scalar_head import outline_scalar_head

    outline = outline_scalar_head(path) if learner.has_scalar_head else outline_causal_lm(path)
    if learner.parallel.ep > 1:
        with section(f"{learner.key}.parallel."):
            check_divisible(outline, learner.parallel.ep)
    if learner.needs_routers:
        with section("train."):
            check_has_routers(outline)


def check_peft(models: Iterable[ModelEntry]) -> None:
    """Check that peft is installed, if a model needs it."""
    for model in models:
        if model.lora.learns and (missing := peft_missing()):
            raise ConfigError(f"{model.key}.lora.rank: {missing}, or {model.key}.lora.rank=0")


def check_lora_targets(model: Model, entry: ModelEntry) -> None:
    """Check that the model has the layers that are to get adapters, and that given ones are of this base."""
    if entry.lora.learns:
        from grmpipe.models.lm.lora import check_adapter_files, check_targets  # late: seconds, which few runs need

        try:
            check_targets(model.path, entry.lora)
        except ValueError as error:
            raise ConfigError(f"{entry.key}.{error}") from error
        if entry.lora.path is not None:
            with section(f"{entry.key}.lora."):
                check_adapter_files(model.path, entry.lora, entry.path)


def check_routing(router_replay: str, policy: Model, role: ServedRole) -> None:
    """Check that the policy has experts to replay, and that its engines can record them. role: the policy's."""
    if router_replay == "none":
        return
    if router_replay == "rollout":
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
