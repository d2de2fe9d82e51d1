"""Checks of router replay before anything starts. Loads no weights."""

from __future__ import annotations

from grmpipe.config.roles import Model, ServedRole
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.train import check_router_replay
from grmpipe.validate.sections import section


def check_routing(config: RunConfig, policy: Model, role: ServedRole) -> None:
    """Check that the policy has experts to replay, and that its engines can record them. role: the policy's."""
    if config.algorithm.router_replay == "none":
        return
    try:
        check_router_replay(config.algorithm, config.train.groups_per_batch)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.algorithm.router_replay == "rollout":
        check_engine(role)
    from models.lm.causal_lm import outline_causal_lm  # late: seconds, which few runs need
    from models.lm.expert_routing import Routers

    try:
        Routers.of(outline_causal_lm(policy.path))
    except ValueError as error:
        raise ConfigError(f"algorithm.{error}") from error


def check_engine(role: ServedRole) -> None:
    if why := role.engine.why_no_experts(role.device):
        raise ConfigError(
            f"algorithm.router_replay: rollout replays the experts that the sampler chose, but {why}; "
            "type policy.engine=embedded, or algorithm.router_replay=old_logprobs"
        )
    with section(""):
        role.engine.check_experts(role.option_key)
