"""Settings of PPO's critic: CriticConfig. Frozen, checked, free of torch."""

import dataclasses
from dataclasses import dataclass, field

from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.bounds import Bounded, above, at_least, not_empty
from grmpipe.models.settings import ParallelConfig


@dataclass(frozen=True)
class CriticConfig(Bounded):
    """A model with a scalar head that predicts the remaining reward, with its own learner.

    Other settings (optimizer, max_grad_norm, dtype, schedule, activation_checkpointing) are those of `train`.
    """

    enabled: bool = False  # Train a critic, as algorithm.estimator=gae and gae_raw need.
    # Causal language model, or model with a scalar head, to start from; null: the policy's. A new head predicts 0.
    path: str | None = not_empty(None, "give a model, or null for the policy's own")
    lr: float = above(0, 1e-3)  # Peak learning rate of the critic.
    lr_warmup_steps: int = at_least(0, 5)  # Steps of the run in which the critic's learning rate rises.
    warmup_steps: int = at_least(0, 0)  # First steps of the run, in which only the critic is trained.
    # [reward] Clip of a value around the one at the start of the batch; null: no clip.
    value_clip: float | None = 0.5
    # [updates] Optimizer steps of the critic on each batch; null: as algorithm.updates_per_batch.
    updates_per_batch: int | None = at_least(1, None)
    # How the critic's ranks share it; train.parallel is only for the policy.
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_clip is not None and not self.value_clip > 0:
            raise ValueError(f"value_clip: must be above 0, got {self.value_clip}; null clips nothing")

    def updates(self, algorithm: AlgorithmConfig, train: TrainConfig) -> int:
        """Optimizer steps per batch: at most one per group."""
        return min(self.updates_per_batch or algorithm.updates_per_batch, train.groups_per_batch)


def check_critic(critic: CriticConfig, algorithm: AlgorithmConfig, train: TrainConfig) -> None:
    """Raises ValueError if advantages need a critic and there is none, or the other way round."""
    needed = algorithm.estimator_kind.needs_critic
    if needed and not critic.enabled:
        raise ValueError(
            f"critic.enabled: algorithm.estimator={algorithm.estimator} needs a critic's values, and there "
            "is no critic; type critic=policy, or algorithm.estimator=grpo"
        )
    if critic.enabled and not needed:
        raise ValueError(
            f"critic.enabled: algorithm.estimator={algorithm.estimator} uses no critic; type algorithm=ppo, "
            "or critic.enabled=false"
        )
    if critic.enabled and critic.warmup_steps >= train.num_steps:
        raise ValueError(
            f"critic.warmup_steps: {critic.warmup_steps} warm-up steps leave the policy none of train.num_steps="
            f"{train.num_steps}; type critic.warmup_steps={train.num_steps - 1} or less"
        )


def critic_train(critic: CriticConfig, train: TrainConfig) -> TrainConfig:
    """`train` with the critic's settings instead."""
    return dataclasses.replace(
        train,
        lr=critic.lr,
        warmup_steps=critic.lr_warmup_steps,
        parallel=critic.parallel,
    )


def policy_train(critic: CriticConfig, train: TrainConfig) -> TrainConfig:
    """`train` for the policy: the decay of its learning rate leaves out the steps that train only the critic."""
    skipped = critic.warmup_steps if critic.enabled else 0
    return dataclasses.replace(train, num_steps=train.num_steps - skipped)
