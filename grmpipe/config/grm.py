"""Settings of models that judge, and of their learners next to the policy's. Frozen, checked."""

from __future__ import annotations

from dataclasses import dataclass, field

from grmpipe.config.keys.entry_names import GRM, LEARNER, POLICY
from models.settings import ModelConfig, ParallelConfig


@dataclass(frozen=True)
class GrmTrainConfig:
    """Settings of the GRM's learner, which runs next to the policy's.

    A judging task is one labelled response (or list) that the GRM judges several times; each judgement gets a reward of
    +1 or -1 from the label. Other settings (micro_batch_tokens, dtype, Adam's betas, clipping, warm-up) are those of
    `train`.
    """

    enabled: bool = False  # Train the GRM in a run that trains the policy.
    warmup_steps: int = 20  # Steps of the GRM before it judges for the policy.
    grm_steps_per_policy_step: float = 1.0  # [steps] Steps of the GRM per step of the policy.
    # File of labelled judgements, or tiny://judgements; null: judging tasks come only from the run's own rollouts.
    data_path: str | None = None
    num_items: int = 4096  # [items] Labelled items made for tiny://judgements; a file is read whole.
    # Share of judging tasks on the run's own rollouts, which judge.rule labels; right and wrong ones alternate.
    rollout_share: float = 0.5
    prompts_per_batch: int = 16  # [tasks] Judging tasks in a batch.
    group_size: int = 8  # [judgements] Judgements of a task, which are compared as a group.
    # [batches] Tasks with equal rewards that a step may drop and replace, in multiples of prompts_per_batch; 0: none.
    dynamic_sampling_batches: float = 0.0
    lr: float = 2e-4  # Peak learning rate of the GRM.
    # Weight of the KL to the GRM as it was loaded; 0: none (SPCT, arXiv 2504.02495: 0.08 at 27B).
    kl_coefficient: float = 0.0
    # How the ranks of the GRM's learner share it; train.parallel is only for the policy.
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        for key in ("num_items", "prompts_per_batch"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: must be at least 1, got {getattr(self, key)}")
        if self.group_size < 2:
            raise ValueError(f"group_size: must be at least 2 (they are compared), got {self.group_size}")
        for key in ("warmup_steps", "kl_coefficient", "dynamic_sampling_batches"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"{key}: must be 0 or more, got {getattr(self, key)}")
        for key in ("lr", "grm_steps_per_policy_step"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key}: must be above 0, got {getattr(self, key)}")
        if not 0 <= self.rollout_share <= 1:
            raise ValueError(f"rollout_share: must be between 0 and 1, got {self.rollout_share}")
        if self.rollout_share == 0 and self.data_path is None:
            raise ValueError(
                "rollout_share: 0 without data_path gives no training data; type grm.train.rollout_share=1"
            )


@dataclass(frozen=True)
class GrmConfig(ModelConfig):
    """A model that judges."""

    train: GrmTrainConfig = field(default_factory=GrmTrainConfig)


@dataclass(frozen=True)
class ModelEntry(GrmConfig):
    """A model of a run that engines may serve, with its name, which is its role, and the section that a user types. The
    policy is one too, and has no `train` of its own.
    """

    name: str = GRM
    key: str = GRM

    @property
    def learner(self) -> str:
        """The role that trains it, if one does."""
        return "learner" if self.name == POLICY else self.name + LEARNER
