"""What a user can set about the critic of PPO: CriticConfig. Frozen, checked, free of torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from grmpipe.config.train import AlgorithmConfig, TrainConfig


@dataclass(frozen=True)
class CriticConfig:
    """A model with a scalar head that says what reward is to be expected, with a learner of its own.

    What isn't said here (Adam's betas, weight_decay, schedule, activation_checkpointing) is as in `train`.
    """

    enabled: bool = False
    path: str | None = (
        None  # a causal language model, or one with a scalar head; null: the policy's own. A new head is 0
    )
    lr: float = 1e-3
    lr_warmup_steps: int = 5  # steps of the run in which lr rises
    warmup_steps: int = 0  # steps of the run in which the critic learns and the policy doesn't
    value_clip: float | None = 0.5  # in reward units, around the values that the batch began with; null: off
    updates_per_batch: int | None = None  # optimizer steps on one batch; null: as algorithm.updates_per_batch
    micro_batch_tokens: int | None = None  # packed tokens per rank and pass; null: as train.micro_batch_tokens
    max_grad_norm: float = 1.0
    dtype: str | None = None  # of the forward and backward pass; null: as train.dtype

    def __post_init__(self) -> None:
        for key in ("lr", "max_grad_norm"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key}: must be above 0, got {getattr(self, key)}")
        if self.value_clip is not None and not self.value_clip > 0:
            raise ValueError(f"value_clip: must be above 0, got {self.value_clip}; null clips nothing")
        for key in ("lr_warmup_steps", "warmup_steps"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key}: must be 0 or more, got {getattr(self, key)}")
        for key in ("updates_per_batch", "micro_batch_tokens"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ValueError(f"{key}: must be at least 1, or null, got {getattr(self, key)}")
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype: unknown value {self.dtype!r}; known: float32, bfloat16, null")
        if self.path == "":
            raise ValueError("path: is empty; give a model, or null for the policy's own")

    def updates(self, algorithm: AlgorithmConfig, train: TrainConfig) -> int:
        """Optimizer steps on a batch: each has a group at least."""
        return min(self.updates_per_batch or algorithm.updates_per_batch, train.groups_per_batch)


def check_critic(critic: CriticConfig, algorithm: AlgorithmConfig, train: TrainConfig) -> None:
    """Raises ValueError where advantages need a critic and there is none, or the other way round."""
    needed = algorithm.estimator_kind.needs_critic
    if needed and not critic.enabled:
        raise ValueError(
            f"critic.enabled: algorithm.estimator={algorithm.estimator} is estimated from a critic's values, and there "
            "is no critic; type critic=policy, or algorithm.estimator=grpo"
        )
    if critic.enabled and not needed:
        raise ValueError(
            f"critic.enabled: algorithm.estimator={algorithm.estimator} asks no critic; type algorithm=ppo, "
            "or critic.enabled=false"
        )
    if critic.enabled and critic.warmup_steps >= train.num_steps:
        raise ValueError(
            f"critic.warmup_steps: {critic.warmup_steps} steps without the policy leave none of train.num_steps="
            f"{train.num_steps} to it; type critic.warmup_steps={train.num_steps - 1} or less"
        )


def critic_train(critic: CriticConfig, train: TrainConfig) -> TrainConfig:
    """`train`, with what the critic says instead."""
    return dataclasses.replace(
        train,
        lr=critic.lr,
        warmup_steps=critic.lr_warmup_steps,
        max_grad_norm=critic.max_grad_norm,
        micro_batch_tokens=critic.micro_batch_tokens or train.micro_batch_tokens,
        dtype=critic.dtype or train.dtype,
    )


def policy_train(critic: CriticConfig, train: TrainConfig) -> TrainConfig:
    """`train`, as far as the policy steps in it: the decay of its lr knows nothing of steps without it."""
    skipped = critic.warmup_steps if critic.enabled else 0
    return dataclasses.replace(train, num_steps=train.num_steps - skipped)
