"""Which engine serves which role, with which options, on which device. Makes no engine.

A new engine is a file in models/engines/, a section in models/settings.py, a row in ENGINES.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from grmpipe.config.run_config import RunConfig
from grmpipe.config.yaml_io import overlaid
from models.engines.vllm.shared_engine import wider_options
from models.renderer import Renderer
from models.settings import EmbeddedConfig, ModelConfig, OpenAIConfig, SglangConfig, VllmConfig
from scheduler.placement import SERVED_ROLES, Placement
from scheduler.weights.weight_sync import SyncConfig

WIDE_CACHES = ("auto", "bfloat16", "float16", "half", "float32")
EngineOptions = EmbeddedConfig | VllmConfig | SglangConfig | OpenAIConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A role's model, found and checked.

    path:           what its processes load.
    context_tokens: prompt and new tokens together: the model's window, or the engine's where that is smaller.
    """

    name: str  # the role's: policy, grm
    path: str
    renderer: Renderer
    context_tokens: int


def options_of(role: str, config: RunConfig) -> ModelConfig:
    return config.policy if role == "policy" else config.grm


def engine_config_of(role: str, config: RunConfig) -> EngineOptions:
    """`engine.<kind>` with the role's own `engine_options` over it. ConfigError names an option that doesn't exist."""
    model = options_of(role, config)
    shared: dict[str, EngineOptions] = {
        "embedded": config.engine.embedded,
        "vllm": config.engine.vllm,
        "sglang": config.engine.sglang,
        "openai": config.engine.openai,
    }
    return overlaid(shared[model.engine], model.engine_options, f"{role}.engine_options.")


def option_key(role: str, config: RunConfig, name: str) -> str:
    """Where a user sets an option of the engine that serves a role, so that it counts."""
    model = options_of(role, config)
    return f"{role}.engine_options.{name}" if name in model.engine_options else f"engine.{model.engine}.{name}"


def device_of(role: str, placement: Placement) -> str:
    pool = placement.seats[role][0].pool
    return "cuda" if placement.pools[pool].resource == "gpu" else "cpu"


def tensor_parallel_of(role: str, placement: Placement) -> int:
    """GPUs that share one model. On a CPU an engine of several cores has threads instead."""
    return len(placement.seats[role][0].slots) if device_of(role, placement) == "cuda" else 1


def max_rows_of(role: str, config: RunConfig) -> int:
    """Requests that one engine of a role decodes at once."""
    engine = engine_config_of(role, config)
    assert not isinstance(engine, OpenAIConfig), "an endpoint has no seat"
    return engine.max_batch_rows


def engines_sleep(role: str, config: RunConfig, placement: Placement) -> bool:
    """Can they give a GPU's memory back? The embedded engine keeps what it has, and needs little."""
    return device_of(role, placement) == "cuda" and isinstance(
        engine_config_of(role, config), VllmConfig | SglangConfig
    )


def can_sleep(role: str, config: RunConfig, placement: Placement) -> bool:
    """Can its engines give memory back while others need it? The embedded one can anywhere, but for its weights on a
    CPU."""
    return isinstance(engine_config_of(role, config), EmbeddedConfig) or engines_sleep(role, config, placement)


def shares_engine(config: RunConfig, placement: Placement) -> bool:
    """Does each elastic slot have one engine, which swaps the weights of its roles? By itself where the roles are on
    vLLM and share a GPU, and its engines were not made to sleep: to wake one is faster than to load it."""
    if "grm" not in placement.seats or not placement.elastic_slots(placement.seats["grm"][0].pool):
        return False
    if config.balance.swap != "auto":
        return config.balance.swap == "weights"
    engines = [engine_config_of(role, config) for role in SERVED_ROLES]
    awake = any(isinstance(engine, VllmConfig) and not engine.sleep_mode for engine in engines)
    return awake and all(isinstance(e, VllmConfig) for e in engines) and device_of("grm", placement) == "cuda"


def shared_options(config: RunConfig) -> VllmConfig:
    """Of an engine that serves both roles."""
    policy, grm = (engine_config_of(role, config) for role in SERVED_ROLES)
    assert isinstance(policy, VllmConfig) and isinstance(grm, VllmConfig)
    return wider_options(policy, grm)


def sync_config_of(role: str, config: RunConfig) -> SyncConfig:
    """How close a role's engines must come to their learner: less close where their options say that they quantise."""
    engine, sync = engine_config_of(role, config), config.sync
    if not quantizes(engine):
        return sync
    told = sync.probe_tolerance_quantized
    return dataclasses.replace(sync, probe_tolerance=told, probe_tolerance_16bit=told)


def quantizes(engine: EngineOptions) -> bool:
    """Do an engine's options make its weights or its cache coarser than what it is sent?"""
    if isinstance(engine, EmbeddedConfig):
        return engine.quantize != "none"
    if not isinstance(engine, VllmConfig | SglangConfig):
        return False
    options = {name.replace("-", "_"): value for name, value in engine.options.items()}
    return bool(options.get("quantization")) or options.get("kv_cache_dtype", "auto") not in WIDE_CACHES


def knows_checkpoint_names(role: str, config: RunConfig) -> bool:
    """Do a role's engines take weights under the names of checkpoints? The embedded one has transformers' own model."""
    return options_of(role, config).engine != "embedded"


def notes_experts(role: str, config: RunConfig) -> bool:
    """Does the learner replay the experts that a role's engines chose?"""
    return role == "policy" and config.algorithm.routing_replay == "rollout"
