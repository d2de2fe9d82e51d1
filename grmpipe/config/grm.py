"""Settings of models that judge, and of their learners next to the policy's. Frozen, checked."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grmpipe.config.keys.entry_names import GRM, LEARNER, POLICY
from grmpipe.models.bounds import Bounded, above, above_0_to_1, at_least, between_0_and_1, not_empty
from grmpipe.models.settings import ModelConfig, ParallelConfig, PolicyConfig


@dataclass(frozen=True)
class GrmTrainConfig(Bounded):
    """Settings of the GRM's learner, which runs next to the policy's.

    A judging task is one labelled response (or list) that the GRM judges several times; each judgement gets a reward of
    +1 or -1 from the label. Other settings (micro_batch_tokens, dtype, Adam's betas, clipping, warm-up) are those of
    `train`.
    """

    enabled: bool = False  # Train the GRM in a run that trains the policy.
    warmup_steps: int = at_least(0, 20)  # Steps of the GRM before it judges for the policy.
    grm_steps_per_policy_step: float = above(0, 1.0)  # [steps] Steps of the GRM per step of the policy.
    # File of labelled judgements, or tiny://judgements; null: judging tasks come only from the run's own rollouts.
    data_path: str | None = None
    num_items: int = at_least(1, 4096)  # [items] Labelled items made for tiny://judgements; a file is read whole.
    # Share of judging tasks on the run's own rollouts; right and wrong ones, by their labels, alternate.
    rollout_share: float = between_0_and_1(0.5)
    # Who labels them: judge.rule, by references (null); a judge or composition of the reward, by the verdicts that it
    # gives anyway; or people, in a .jsonl file of labels that may grow while the run goes on.
    labels_from: str | None = not_empty(None, "give a judge, a composition, a .jsonl file, or null")
    prompts_per_batch: int = at_least(1, 16)  # [tasks] Judging tasks in a batch.
    # [judgements] Judgements of a task, which are compared as a group.
    group_size: int = at_least(2, 8, "at least 2 (they are compared)")
    # [batches] Tasks with equal rewards that a step may drop and replace, in multiples of prompts_per_batch; 0: none.
    dynamic_sampling_batches: float = at_least(0, 0.0)
    lr: float = above(0, 2e-4)  # Peak learning rate of the GRM.
    # Weight of the KL to the GRM as it was loaded; 0: none (SPCT, arXiv 2504.02495: 0.08 at 27B).
    kl_coefficient: float = at_least(0, 0.0)
    # How the ranks of the GRM's learner share it; train.parallel is only for the policy.
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rollout_share == 0 and self.data_path is None:
            raise ValueError(
                "rollout_share: 0 without data_path gives no training data; type grm.train.rollout_share=1"
            )
        if self.labels_from is None:
            return
        if self.rollout_share == 0:
            raise ValueError("rollout_share: 0 uses no label of labels_from; type grm.train.rollout_share=1")
        if self.warmup_steps and self.data_path is None:
            raise ValueError(
                "warmup_steps: labels_from labels nothing before the GRM judges; type grm.train.warmup_steps=0, or "
                "give labelled judgements as grm.train.data_path"
            )

    @property
    def labels_file(self) -> Path | None:
        """The file of `labels_from`, if it is one. It may not exist so far."""
        return Path(self.labels_from) if self.labels_from and self.labels_from.endswith(".jsonl") else None

    @property
    def labeller(self) -> str | None:
        """The judge or composition of `labels_from`, if it is one."""
        return None if self.labels_file else self.labels_from


@dataclass(frozen=True)
class GrmConfig(ModelConfig):
    """A model that judges or teaches."""

    # Name of the model whose engines serve this one, as an adapter (`lora`) of the same base; empty: it has its own.
    adapter_of: str = ""
    # [steps] For a model with the policy's path: it takes over the policy's weights after these steps, as in [20, 40],
    # or after every n-th step, as in 5 (iterative self-rewarding, arXiv 2401.10020); []: never.
    policy_updates: Any = field(default_factory=list)
    # The policy's share of the weights after such an update, the rest is what they were: below 1 a moving average.
    policy_update_rate: float = above_0_to_1(1.0)
    train: GrmTrainConfig = field(default_factory=GrmTrainConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = self.policy_updates
        rise = isinstance(steps, Sequence) and sorted(set(filter(is_step, steps))) == list(steps)
        if not is_step(steps) and not rise:
            raise ValueError(
                "policy_updates: expected rising steps of 1 or more, as in [20, 40], or a number, as in 5 for every "
                f"fifth step, got {steps}"
            )
        if self.policy_update_rate < 1 and not steps:
            raise ValueError(
                f"policy_update_rate: {self.policy_update_rate:g} of the policy at no step; type policy_updates=5 in "
                "the same section, or leave it out"
            )

    def list_updates(self, num_steps: int) -> tuple[int, ...]:
        """The steps after which it takes over the policy's weights, in a run of `num_steps`."""
        if isinstance(self.policy_updates, int):
            return tuple(range(self.policy_updates, num_steps, self.policy_updates))
        return tuple(self.policy_updates)


def is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True)
class ModelEntry(GrmConfig, PolicyConfig):
    """A model of a run that engines may serve, with its name, which is its role, and the section that a user types. The
    policy is one too, and has no `train` of its own.
    """

    name: str = GRM
    key: str = GRM

    @property
    def plays(self) -> bool:
        """Whether it plays the episodes."""
        return self.name == POLICY

    @property
    def host(self) -> str:
        """The model whose engines serve it: itself, or the one that it is an adapter of."""
        return self.adapter_of or self.name

    @property
    def learner(self) -> str:
        """The role that trains it, if one does."""
        return "learner" if self.plays else self.name + LEARNER
