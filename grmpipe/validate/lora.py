"""Checks of LoRA adapters before anything starts. Starts nothing."""

from __future__ import annotations

from grmpipe.config.judging import key_of_model
from grmpipe.config.roles import Model
from grmpipe.config.run_config import ConfigError, RunConfig
from models.lm.installed_peft import peft_missing


def check_peft(config: RunConfig) -> None:
    """Check that peft is installed. Skipped for a joined cluster, whose machines have their own environments."""
    for role, model in reversed(config.models_by_role.items()) if config.cluster.address is None else ():
        if model.lora.learns and (missing := peft_missing()):
            raise ConfigError(f"{role}.lora.rank: {missing}, or {role}.lora.rank=0")


def check_lora_targets(model: Model, config: RunConfig) -> None:
    """Check that the model has the layers that are to get adapters."""
    lora = config.models_by_role[model.name].lora
    if lora.learns:
        from models.lm.lora import check_targets  # late: seconds, which few runs need

        try:
            check_targets(model.path, lora)
        except ValueError as error:
            raise ConfigError(f"{key_of_model(model.name)}.{error}") from error
