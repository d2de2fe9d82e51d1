"""Whether the roles of elastic slots can share one engine, which then swaps their weights. Starts none.

Every refusal is a ConfigError that names the key and what to type.
"""

from __future__ import annotations

from grmpipe.config.roles import Model, engine_config_of, options_of, shares_engine
from grmpipe.config.run_config import ConfigError, RunConfig
from models.engines.vllm.shared_engine import different_options, different_shapes, shape_of
from models.settings import VllmConfig
from scheduler.placement import SERVED_ROLES, Placement


def check_one_engine(config: RunConfig, placement: Placement) -> None:
    """Roles that are to share one are served by vLLM, and want no options that one engine can't have."""
    if not shares_engine(config, placement):
        return
    options = {role: engine_config_of(role, config) for role in SERVED_ROLES}
    for role, engine in options.items():
        if not isinstance(engine, VllmConfig):
            raise ConfigError(
                f"balance.swap: weights needs engine=vllm, but {role} is on {options_of(role, config).engine}, where "
                "each role needs a separate engine; type balance.swap=auto"
            )
    policy, grm = options["policy"], options["grm"]
    assert isinstance(policy, VllmConfig) and isinstance(grm, VllmConfig)
    refuse(different_options(policy, grm), config, placement)


def check_swap(config: RunConfig, placement: Placement, policy: Model, grm: Model | None) -> None:
    """Models that are to share one engine differ in their weights alone."""
    if grm is None or not shares_engine(config, placement):
        return
    different = different_shapes(shape_of(policy.path), shape_of(grm.path))
    if config.policy.dtype != config.grm.dtype:
        different.append(f"dtype ({config.policy.dtype}, {config.grm.dtype})")
    if not policy.renderer.means_the_same(grm.renderer):
        different.append("the tokens of their vocabularies")
    ends = policy.renderer.stop_token_ids, grm.renderer.stop_token_ids
    if set(ends[0]) != set(ends[1]):
        different.append(f"the tokens that end a turn ({ends[0]}, {ends[1]})")
    refuse(different, config, placement)


def refuse(different: list[str], config: RunConfig, placement: Placement) -> None:
    if not different:
        return
    pool = placement.seats["policy"][0].pool
    on_gpu = placement.pools[pool].resource == "gpu"
    way_out = "engine.vllm.sleep_mode=true balance.swap=sleep" if on_gpu else "balance.swap=auto"
    raise ConfigError(
        f"balance.swap: (policy, grm) can't share the engines of the elastic pool {pool}, since they differ in "
        f"{', '.join(different)}; type {way_out}: each role then has separate engines"
    )
