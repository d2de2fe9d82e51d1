"""Checks of LoRA adapters before anything starts. Starts nothing."""

from __future__ import annotations

from grmpipe.config.roles import Model
from grmpipe.config.run_config import ConfigError, RunConfig
from models.lm.installed_peft import peft_missing


def check_peft(config: RunConfig) -> None:
    """Check that peft is installed. Skipped for a joined cluster, whose machines have their own environments."""
    for model in reversed([*config.models.values()]) if config.cluster.address is None else ():
        if model.lora.learns and (missing := peft_missing()):
            raise ConfigError(f"{model.key}.lora.rank: {missing}, or {model.key}.lora.rank=0")


def check_lora_targets(model: Model, config: RunConfig) -> None:
    """Check that the model has the layers that are to get adapters."""
    lora = config.models[model.name].lora
    if lora.learns:
        from models.lm.lora import check_targets  # late: seconds, which few runs need

        try:
            check_targets(model.path, lora)
        except ValueError as error:
            raise ConfigError(f"{config.models[model.name].key}.{error}") from error
