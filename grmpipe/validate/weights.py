"""Checks of weight pushes before anything starts. Loads no weights."""

from __future__ import annotations

from grmpipe.config.roles import Model, ServedRole
from grmpipe.config.run_config import ConfigError


def check_weight_names(model: Model, role: ServedRole) -> None:
    """Check that a trained model can be sent to its engines under names that they know."""
    if role.learner is None or not role.engine.checkpoint_names:
        return
    from models.lm.causal_lm import outline_causal_lm  # late: seconds, which few runs need
    from models.lm.checkpoint_names import CheckpointNames

    try:
        CheckpointNames(outline_causal_lm(model.path))
    except ValueError as error:
        raise ConfigError(f"{role.key}.{error}") from error
