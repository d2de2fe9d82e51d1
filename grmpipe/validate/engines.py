"""What can be known, and refused, of a run's engines before anything starts. Starts none.

Every refusal is a ConfigError that names the key and what to type.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from grmpipe.config.roles import (
    EngineOptions,
    device_of,
    engine_config_of,
    option_key,
    options_of,
    shares_engine,
    tensor_parallel_of,
)
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.judge import math_rule
from models.engines.installed import sglang_missing, vllm_missing
from models.engines.vllm.options import check_vllm_options
from models.lm.footprint import Heads
from models.settings import OpenAIConfig, SglangConfig, VllmConfig
from scheduler.placement import Placement

SEVERAL_GPUS = ("vllm", "sglang")  # engines that can lay one model over them


def served_roles(config: RunConfig) -> tuple[str, ...]:
    """Roles that an engine serves, here or outside."""
    return ("policy", "grm") if config.judged_by_model else ("policy",)


def check_options(config: RunConfig, placement: Placement) -> None:
    """Options that exist, and places that their engines can fill. The same on every machine."""
    for role in served_roles(config):
        engine = engine_config_of(role, config)
        if isinstance(engine, SglangConfig) and engine.urls:
            check_urls(role, engine, config, placement)
        if isinstance(engine, OpenAIConfig):
            check_limits(role, engine, config)
    for role in placement.seats:
        check_slots(role, config, placement)
        check_sleep(role, config, placement)


def check_limits(role: str, engine: OpenAIConfig, config: RunConfig) -> None:
    """Can all judgements that may be in flight be sent before they time out?"""
    judge, per_minute = config.judge, engine.requests_per_minute
    if per_minute and judge.width * 60 / per_minute > judge.timeout_s:
        fitting = int(judge.timeout_s * per_minute / 60)
        key = option_key(role, config, "requests_per_minute")
        raise ConfigError(
            f"judge.width: {judge.width} judgements in flight take {judge.width * 60 / per_minute:.0f} s to send at "
            f"{key}={per_minute}, and time out after judge.timeout_s={judge.timeout_s:g}; "
            f"type judge.width={max(1, fitting // 2)}, or a longer judge.timeout_s"
        )
    if tokens := engine.tokens_per_minute:
        one_s = judge.max_new_tokens * 60 / tokens  # the prompt aside
        if one_s > judge.timeout_s:
            key = option_key(role, config, "tokens_per_minute")
            fitting = math.ceil(60 * judge.max_new_tokens / judge.timeout_s)
            raise ConfigError(
                f"{key}: a judgement of judge.max_new_tokens={judge.max_new_tokens} uses {one_s:.0f} s of the {tokens} "
                f"tokens per minute, and waiting judgements time out after judge.timeout_s={judge.timeout_s:g}; "
                f"type {key}={2 * fitting} or more, 0 for no limit, or a lower judge.max_new_tokens"
            )


def check_slots(role: str, config: RunConfig, placement: Placement) -> None:
    """Does a process use all GPUs that its seat has?"""
    num_gpus = tensor_parallel_of(role, placement)
    by_engine = role in served_roles(config)  # a rank of a learner, or a scorer, knows one GPU
    if num_gpus == 1 or (by_engine and options_of(role, config).engine in SEVERAL_GPUS):
        return
    other_engine = f" or {role}.engine=vllm, which splits one model over several" if by_engine else ""
    raise ConfigError(
        f"placement.roles.{role}.slots_per_replica: a process of {role} uses one GPU, "
        f"{num_gpus - 1} of {num_gpus} would be idle; "
        f"type placement.roles.{role}.slots_per_replica=1, and replicas for more{other_engine}"
    )


def check_sleep(role: str, config: RunConfig, placement: Placement) -> None:
    """On a GPU that several use by turns, the engine that doesn't serve must give its memory back."""
    pool = placement.seats[role][0].pool
    if role in placement.time_sharing_roles:
        sharing, others = "time_shared", "the learner"
    elif role in served_roles(config) and placement.elastic_slots(pool) and not shares_engine(config, placement):
        sharing, others = "elastic", "another role"
    else:
        return
    engine, way_out = engine_config_of(role, config), f"placement.pools.{pool}.{sharing}=false"
    if isinstance(engine, VllmConfig | SglangConfig) and device_of(role, placement) == "cuda" and not engine.sleep_mode:
        key = option_key(role, config, "sleep_mode")
        raise ConfigError(
            f"{key}: slots of the {sharing} pool {pool} are used by {role} and {others} in alternation, which share "
            f"the GPU's memory; type {key}=true, or {way_out}"
        )
    if isinstance(engine, SglangConfig) and engine.urls:
        key = option_key(role, config, "urls")
        raise ConfigError(f"{key}: servers that already run have no slots in the placement; type {way_out}")


def check_urls(role: str, engine: SglangConfig, config: RunConfig, placement: Placement) -> None:
    """One server per replica."""
    replicas = len(placement.seats[role])
    if len(engine.urls) != replicas:
        key = option_key(role, config, "urls")
        raise ConfigError(
            f"{key}: {len(engine.urls)} servers for {replicas} replicas of {role}; give one per replica, "
            f"or type placement.roles.{role}.replicas={len(engine.urls)}"
        )


def check_tensor_parallel(role: str, heads: Heads, placement: Placement) -> None:
    """Each GPU gets the same number of attention heads, and whole key heads or copies of one."""
    num_gpus = tensor_parallel_of(role, placement)
    fits = heads.query % num_gpus == 0 and (heads.key % num_gpus == 0 or num_gpus % heads.key == 0)
    if not fits:
        fitting = [n for n in range(1, num_gpus) if heads.query % n == 0 and (heads.key % n == 0 or n % heads.key == 0)]
        raise ConfigError(
            f"placement.roles.{role}.slots_per_replica: {num_gpus} GPUs can't share {heads.query} attention heads "
            f"and {heads.key} key heads evenly; type placement.roles.{role}.slots_per_replica={fitting[-1]}"
        )


def window_of(role: str, config: RunConfig, model_tokens: int) -> int:
    """The window that a role's requests have: its engine's, which may not exceed the model's (0: not known)."""
    window = engine_config_of(role, config).max_context_tokens or model_tokens
    if window > model_tokens > 0:
        key = option_key(role, config, "max_context_tokens")
        raise ConfigError(
            f"{key}: {window} exceeds the context window of {role} ({options_of(role, config).path}); "
            f"type {key}={model_tokens} or less, 0 for all of it"
        )
    return window


# -- what only the machines of the run can tell --------------------------------------------------------------------


def check_rule_installed(config: RunConfig) -> None:
    """Of the rules one needs a library."""
    if config.judge.rule == "math_verify" and not math_rule.is_installed():
        raise ConfigError(f"judge.rule: math_verify needs math-verify; type {math_rule.INSTALL}")


def check_installed(config: RunConfig) -> None:
    """Is what the engines need here? The machines of a joined cluster have environments of their own."""
    for role in served_roles(config):
        engine = engine_config_of(role, config)
        if isinstance(engine, OpenAIConfig) or config.cluster.address is None:
            NEEDS[options_of(role, config).engine](role, engine, config)


def embedded_needs(role: str, engine: EngineOptions, config: RunConfig) -> None:
    """Nothing that isn't here anyway."""


def vllm_needs(role: str, engine: EngineOptions, config: RunConfig) -> None:
    assert isinstance(engine, VllmConfig)
    if missing := vllm_missing():
        raise ConfigError(f"{role}.engine: {missing}")
    try:
        check_vllm_options(engine)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def sglang_needs(role: str, engine: EngineOptions, config: RunConfig) -> None:
    assert isinstance(engine, SglangConfig)
    if not engine.urls and (missing := sglang_missing(engine.python)):
        raise ConfigError(missing if missing.startswith("engine.") else f"{role}.engine: {missing}")


def openai_needs(role: str, engine: EngineOptions, config: RunConfig) -> None:
    assert isinstance(engine, OpenAIConfig)
    if "chat_template_kwargs" in engine.extra_body and options_of(role, config).chat_template_kwargs:
        key = option_key(role, config, "extra_body")
        raise ConfigError(f"{key}: chat_template_kwargs are also set in {role}.chat_template_kwargs; keep only those")
    if engine.api_key_env and not os.environ.get(engine.api_key_env, "").strip():
        key = option_key(role, config, "api_key_env")
        raise ConfigError(
            f"{key}: the environment variable {engine.api_key_env} is not set; set it, type {key}=<another variable>, "
            f"or {key}='' for an endpoint without a key"
        )


NEEDS: dict[str, Callable[[str, EngineOptions, RunConfig], None]] = {
    "embedded": embedded_needs,
    "vllm": vllm_needs,
    "sglang": sglang_needs,
    "openai": openai_needs,
}
