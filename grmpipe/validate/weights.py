"""What can be known, and refused, of pushes of weights before anything starts. Loads no weights."""

from __future__ import annotations

from grmpipe.config.roles import Model, knows_checkpoint_names
from grmpipe.config.run_config import ConfigError, RunConfig
from models.lm.causal_lm import outline_causal_lm
from models.lm.checkpoint_names import CheckpointNames


def check_weight_names(model: Model, config: RunConfig) -> None:
    """Can a model that learns be sent to its engines, under names that they know?"""
    learns = model.name == "policy" or config.cotrain.enabled
    if not learns or not knows_checkpoint_names(model.name, config):
        return
    try:
        CheckpointNames(outline_causal_lm(model.path))
    except ValueError as error:
        raise ConfigError(f"{model.name}.{error}") from error
