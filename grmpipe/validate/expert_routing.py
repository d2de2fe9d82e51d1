"""What can be known, and refused, of a mixture's replayed experts before anything starts. Loads no weights."""

from __future__ import annotations

from grmpipe.config.roles import Model, device_of, engine_config_of, option_key
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.train import check_routing_replay
from models.lm.causal_lm import outline_causal_lm
from models.lm.expert_routing import Routers
from models.settings import ENGINES_THAT_NOTE_EXPERTS, VllmConfig
from scheduler.placement import Placement


def check_routing(config: RunConfig, policy: Model, placement: Placement) -> None:
    """Where experts are replayed the policy has some, and whoever chooses them notes them."""
    if config.algorithm.routing_replay == "none":
        return
    try:
        check_routing_replay(config.algorithm, config.train.groups_per_batch)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.algorithm.routing_replay == "rollout":
        check_engine(config, placement)
    try:
        Routers.of(outline_causal_lm(policy.path))
    except ValueError as error:
        raise ConfigError(f"algorithm.{error}") from error


def check_engine(config: RunConfig, placement: Placement) -> None:
    name, engine = config.policy.engine, engine_config_of("policy", config)
    why = ""
    if name not in ENGINES_THAT_NOTE_EXPERTS:
        why = f"engine={name} doesn't report them"
    elif isinstance(engine, VllmConfig) and device_of("policy", placement) == "cpu":
        why = "vLLM reports them only on a GPU"
    if why:
        raise ConfigError(
            f"algorithm.routing_replay: rollout replays the experts that the sampler chose, but {why}; "
            "type policy.engine=embedded, or algorithm.routing_replay=old_logprobs"
        )
    if isinstance(engine, VllmConfig) and not engine.prefix_caching:
        key = option_key("policy", config, "prefix_caching")
        raise ConfigError(f"{key}: vLLM keeps the chosen experts in its prefix cache; type {key}=true")
