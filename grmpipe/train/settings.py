"""What a user can set about training: TrainConfig, AlgorithmConfig. Frozen, checked, free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field

ESTIMATORS = ("grpo", "dr_grpo")
LOSSES = ("ppo_clip",)
CORRECTIONS = ("none", "tis")
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
STD_KINDS = ("population", "sample")
SCHEDULES = ("constant", "cosine", "linear")


@dataclass(frozen=True)
class AlgorithmConfig:
    """How rewards become gradients. Defaults are GRPO (arXiv 2402.03300) with one on-policy update a batch."""

    estimator: str = "grpo"
    std: str = "population"  # which standard deviation GRPO divides by
    min_group_std: float = 1e-6  # added to the std (GRPO's epsilon), in reward units
    loss: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    correction: str = "tis"
    tis_cap: float = 2.0
    aggregation: str = "token_mean"
    kl_coefficient: float = 0.0  # k3 against the frozen reference, in the loss; 0 loads no reference
    entropy_coefficient: float = 0.0
    updates_per_batch: int = 1  # optimizer steps on one batch; above 1 the early start is off

    def __post_init__(self) -> None:
        for key, known in (
            ("estimator", ESTIMATORS), ("loss", LOSSES), ("correction", CORRECTIONS),
            ("aggregation", AGGREGATIONS), ("std", STD_KINDS),
        ):  # fmt: skip
            if getattr(self, key) not in known:
                raise ValueError(f"{key}: unknown value {getattr(self, key)!r}; known: {', '.join(known)}")
        for key in ("clip_low", "clip_high", "tis_cap", "min_group_std"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key}: must be above 0, got {getattr(self, key)}")
        for key in ("kl_coefficient", "entropy_coefficient"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"{key}: must be 0 or more, got {getattr(self, key)}")
        if self.updates_per_batch < 1:
            raise ValueError(f"updates_per_batch: must be at least 1, got {self.updates_per_batch}")


@dataclass(frozen=True)
class TrainConfig:
    """The learner and its batches. A batch is `groups_per_batch` groups of `group_size` siblings."""

    num_steps: int = 80
    groups_per_batch: int = 16
    group_size: int = 8
    min_valid_siblings: int = 2  # a group with fewer verdicts is dropped
    max_staleness: int = 1  # in optimizer steps; 0 is synchronous
    micro_batch_tokens: int = 4096  # packed tokens per rank and forward pass
    lr: float = 3e-4
    warmup_steps: int = 5
    schedule: str = "constant"
    weight_decay: float = 0.0
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    max_grad_norm: float = 1.0
    dtype: str = "float32"  # of the forward and backward pass; master weights are float32
    activation_checkpointing: bool = False
    checkpoint_every: int = 20  # steps; 0: only at the end and on Ctrl-C
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        for key in ("num_steps", "groups_per_batch", "micro_batch_tokens"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: must be at least 1, got {getattr(self, key)}")
        for key in ("max_staleness", "warmup_steps", "weight_decay", "checkpoint_every"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key}: must be 0 or more, got {getattr(self, key)}")
        if self.group_size < 2:
            raise ValueError(f"group_size: must be at least 2 (a baseline needs siblings), got {self.group_size}")
        if not 2 <= self.min_valid_siblings <= self.group_size:
            raise ValueError(
                f"min_valid_siblings: must be between 2 and group_size = {self.group_size}, "
                f"got {self.min_valid_siblings}"
            )
        if not self.lr > 0 or not self.max_grad_norm > 0:
            raise ValueError(f"lr, max_grad_norm: must be above 0, got {self.lr}, {self.max_grad_norm}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule: unknown value {self.schedule!r}; known: {', '.join(SCHEDULES)}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype: unknown value {self.dtype!r}; known: float32, bfloat16")
        if self.keep_checkpoints < 1:
            raise ValueError(f"keep_checkpoints: must be at least 1, got {self.keep_checkpoints}")
        if len(self.adam_betas) != 2 or not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"adam_betas: must be two numbers in [0, 1), got {self.adam_betas}")
