"""What a user can set about a GRM that learns beside the policy. Frozen, checked; opens no file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CotrainConfig:
    """The GRM's own learner: what it learns from, how fast, and how it keeps in step with the policy.

    A lesson is a response judged several times; each judgement's reward is +1 or -1, by the label. What isn't said here
    (micro_batch_tokens, dtype, Adam's betas, clipping, the rise of lr) is as in `train`.
    """

    enabled: bool = False
    warmup_steps: int = 20  # of the GRM, before anything is judged for the policy
    grm_steps_per_policy_step: float = 1.0
    data_path: str | None = None  # labelled judgements, as for train_grm; None: the run's own rollouts alone
    num_items: int = 4096  # made for tiny://judgements; a file is read whole
    own_share: float = 0.5  # of the lessons: the run's own rollouts, right and wrong by turns, by judge.rule
    own_window: int = 256  # rollouts of each kind, the latest, that are drawn from
    lessons_per_batch: int = 16
    judgements_per_lesson: int = 8  # a group: they are compared with each other
    max_resampled_batches: float = 0.0  # lessons judged alike every time teach nothing: so many are replaced in a step
    lr: float = 2e-4
    kl_coefficient: float = 0.0  # to the GRM as it was loaded (SPCT, arXiv 2504.02495: 0.08 at 27B)

    def __post_init__(self) -> None:
        for key in ("num_items", "own_window", "lessons_per_batch"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: must be at least 1, got {getattr(self, key)}")
        if self.judgements_per_lesson < 2:
            raise ValueError(
                f"judgements_per_lesson: must be at least 2 (they are compared), got {self.judgements_per_lesson}"
            )
        for key in ("warmup_steps", "kl_coefficient", "max_resampled_batches"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"{key}: must be 0 or more, got {getattr(self, key)}")
        for key in ("lr", "grm_steps_per_policy_step"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key}: must be above 0, got {getattr(self, key)}")
        if not 0 <= self.own_share <= 1:
            raise ValueError(f"own_share: must be between 0 and 1, got {self.own_share}")
        if self.own_share == 0 and self.data_path is None:
            raise ValueError("own_share: 0 without data_path gives no training data; type cotrain.own_share=1")
