"""The learning rate by the share of the run that is done. Pure, so a resumed run needs no state of it."""

from __future__ import annotations

import math
from collections.abc import Callable

from grmpipe.config.train import TrainConfig

DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def learning_rate(step: float, config: TrainConfig) -> float:
    """The rate after `step` of num_steps steps: linear warm-up, then the decay over what is left of the run.

    With several optimizer steps on a batch each is its share of a step: the second of four on the first batch is made
    at 0.25. Neither end is 0: a step that learns nothing would still be paid for.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    progress = (step - config.warmup_steps) / max(1, config.num_steps - config.warmup_steps)
    return config.lr * DECAYS[config.schedule](min(progress, 1.0))
