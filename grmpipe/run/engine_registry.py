"""The table of engines: how each is made, in the process where it will live. Its library is imported there."""

from __future__ import annotations

import functools
from collections.abc import Callable

from grmpipe.config.roles import (
    Model,
    device_of,
    engine_config_of,
    notes_experts,
    options_of,
    shared_options,
    tensor_parallel_of,
)
from grmpipe.config.run_config import RunConfig
from models.settings import EmbeddedConfig, SglangConfig, VllmConfig
from models.types import Engine
from scheduler.placement import Placement

MakeEngine = Callable[[int], Engine]  # by the rank of its seat; it travels to where the engine will live


# -- factories -----------------------------------------------------------------------------------------------------


def embedded_engine(model: Model, config: RunConfig, placement: Placement) -> MakeEngine:
    return functools.partial(make_embedded, model.path, model.name, config, device_of(model.name, placement))


def make_embedded(path: str, role: str, config: RunConfig, device: str, rank: int = 0) -> Engine:
    from models.engines.embedded.embedded_engine import EmbeddedEngine

    options, engine = options_of(role, config), engine_config_of(role, config)
    assert isinstance(engine, EmbeddedConfig)
    return EmbeddedEngine(
        path,
        role,
        engine,
        options.dtype,
        device,
        config.seed,
        options.chat_template,
        lora=options.lora,
        note_experts=notes_experts(role, config),
    )


def vllm_engine(model: Model, config: RunConfig, placement: Placement) -> MakeEngine:
    device, num_gpus = device_of(model.name, placement), tensor_parallel_of(model.name, placement)
    return functools.partial(make_vllm, model.path, model.name, config, device, num_gpus)


def shared_engine(model: Model, config: RunConfig, placement: Placement) -> MakeEngine:
    """Of either role, started with this one's model."""
    device, num_gpus = device_of(model.name, placement), tensor_parallel_of(model.name, placement)
    return functools.partial(make_vllm, model.path, model.name, config, device, num_gpus, shared=True)


def make_vllm(
    path: str, role: str, config: RunConfig, device: str, num_gpus: int, rank: int = 0, shared: bool = False
) -> Engine:
    from models.engines.vllm.vllm_engine import VllmEngine

    options, engine = options_of(role, config), shared_options(config) if shared else engine_config_of(role, config)
    assert isinstance(engine, VllmConfig)
    return VllmEngine(
        path,
        role,
        engine,
        dtype=options.dtype,
        device=device,
        seed=config.seed,
        chat_template=options.chat_template,
        tensor_parallel=num_gpus,
        takes_weights=shared or role == "policy" or config.cotrain.enabled,
        note_experts=notes_experts("policy" if shared else role, config),
    )


def sglang_engine(model: Model, config: RunConfig, placement: Placement) -> MakeEngine:
    device, num_gpus = device_of(model.name, placement), tensor_parallel_of(model.name, placement)
    return functools.partial(make_sglang, model.path, model.name, config, device, num_gpus)


def make_sglang(path: str, role: str, config: RunConfig, device: str, num_gpus: int, rank: int = 0) -> Engine:
    """A server of our own, or the one of this replica among those that run already."""
    from models.engines.sglang.sglang_engine import SglangEngine

    options, engine = options_of(role, config), engine_config_of(role, config)
    assert isinstance(engine, SglangConfig)
    if engine.urls:
        return SglangEngine.join(
            engine.urls[rank], path, role, engine, seed=config.seed, chat_template=options.chat_template
        )
    return SglangEngine.start(
        path,
        role,
        engine,
        dtype=options.dtype,
        device=device,
        seed=config.seed,
        chat_template=options.chat_template,
        tensor_parallel=num_gpus,
    )


ENGINES: dict[str, Callable[[Model, RunConfig, Placement], MakeEngine]] = {
    "embedded": embedded_engine,
    "vllm": vllm_engine,
    "sglang": sglang_engine,
}
