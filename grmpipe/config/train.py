"""What a user can set about training: TrainConfig, AlgorithmConfig. Frozen, checked, free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grmpipe.config.algorithm_tables import EstimatorKind, LossKind, estimator_named, loss_named
from models.settings import AUTO, DTYPES

PROXIMALS = ("recomputed", "interpolated", "sampler")
CORRECTIONS = ("none", "tis", "sequence_tis", "sequence_mis", "icepop", "decoupled")
REJECTIONS = ("geometric", "veto", "off_policy")
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
STD_KINDS = ("population", "sample")
KL_ESTIMATORS = ("k1", "k2", "k3")
KL_PLACES = ("loss", "reward")
ROUTING_REPLAYS = ("none", "rollout", "old_logprobs")
SCHEDULES = ("constant", "cosine", "linear")


@dataclass(frozen=True)
class AlgorithmConfig:
    """How rewards become gradients. Defaults are GRPO (arXiv 2402.03300) with one on-policy update a batch.

    Where no paper is named, a default is ours.
    """

    # Rewards: what is taken off before anything is estimated. In reward units.
    overlong_share: float = 0.0  # the last of max_new_tokens cost more and more; 0: off (DAPO: 4096 of 20480)
    overlong_penalty: float = 1.0  # of a rollout that fills it all (DAPO, arXiv 2503.14476, section 3.4)

    # Advantages.
    estimator: str = "grpo"  # a row of ESTIMATORS, or the dotted path of a function of the user's
    std: str = "population"  # which standard deviation is divided by
    min_group_std: float = 1e-6  # added to that deviation (GRPO's epsilon), in reward units; of a batch's as well
    gamma: float = (
        1.0  # discount per step of a process reward; per token of gae, and of reinforce_pp with a KL in the reward
    )
    gae_lambda: float = 1.0  # of gae: 1 takes what came for what is to be learned, 0 the critic's next value
    pass_k: int = 4  # of pass_at_k: how many siblings share one success; below the group size
    negative_weight: float = 1.0  # advantages below 0 are multiplied by it
    half_weight_spread: float | None = None  # judgements that lie so far apart (std, score units) make A count half

    # Groups whose rewards are all equal teach nothing: they are dropped and replaced (DAPO), in each step at most so
    # many times groups_per_batch; what comes then is trained. 0: none is dropped.
    max_resampled_batches: float = 0.0

    # The policy loss. r = pi_theta / pi_prox.
    loss: str = "ppo_clip"  # a row of LOSSES, or the dotted path of a function of the user's
    clip_low: float = 0.2  # r below 1 - clip_low is clipped (PPO, arXiv 1707.06347)
    clip_high: float = 0.2  # r above 1 + clip_high is clipped (DAPO: 0.28)
    dual_clip_ratio: float = 3.0  # of dual_clip: the ratio that a token with A < 0 counts at most (arXiv 1912.09729)
    aggregation: str = "token_mean"

    # Whom r is measured against, pi_prox: the trainer's own pass, a policy between the sampler and now, the sampler.
    proximal: str = "recomputed"

    # What the sampler is corrected by: w = pi_prox / mu, which multiplies the policy loss.
    correction: str = "tis"
    tis_cap: float = 2.0  # of tis, per token
    sequence_cap: float = 3.0  # of sequence_tis (2 to 10 are in use) and sequence_mis: on the product over a sample
    icepop_low: float = 0.5  # of icepop: a token whose w is outside weighs 0
    icepop_high: float = 5.0
    decoupled_cap: float = 5.0  # of decoupled: a token whose w is above weighs 0

    # Which samples are not trained at all; they still count in the batch's denominator.
    rejections: list[str] = field(default_factory=list)
    geometric_low: float = 0.99  # of geometric: exp(mean log w) of a sample that is kept
    geometric_high: float = 1.01
    veto_below: float = 1e-4  # of veto: one token with a w below rejects its sample
    off_policy_delta: float = 0.1  # of off_policy: mean(log mu - log pi_theta) of a sample with A < 0, in nats

    # Of a mixture of experts: whose choice of experts the updates replay. The gates are computed anew.
    # rollout: the sampler's (R3, arXiv 2510.11370); old_logprobs: that of the pass for pi_old (R2, arXiv 2507.18071).
    routing_replay: str = "none"

    # Regularisation.
    kl_coefficient: float = 0.0  # of the KL to the frozen reference; 0 loads no reference
    kl_estimator: str = "k3"  # per token; k1 in the loss has a gradient whose mean is 0: it is for the reward
    kl_in: str = "loss"  # or in the reward, measured on the sampler's log-probs
    entropy_coefficient: float = 0.0

    # Reuse.
    updates_per_batch: int = 1  # optimizer steps on one batch; above 1 the early start is off
    replay_groups: int = 0  # of earlier batches, trained once more in each batch; none older than train.max_staleness
    replay_times: int = 1  # so often at most a group is trained again, in as many batches
    reset_every: int = 0  # batches between two steps back towards the initial weights; 0: none
    reset_share: float = 0.2  # of such a step: 1 goes all the way; the optimizer's moments are forgotten

    # What a loss or an estimator of the user's reads as algorithm.options. Nothing here does.
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_names()
        self._check_numbers()
        self._check_weighed_once()

    @property
    def loss_kind(self) -> LossKind:
        """What others must know of the loss."""
        return loss_named(self.loss)

    @property
    def estimator_kind(self) -> EstimatorKind:
        """What others must know of the estimator."""
        return estimator_named(self.estimator)

    def _check_names(self) -> None:
        estimator_named(self.estimator)
        loss_named(self.loss)
        for key, known in (
            ("std", STD_KINDS), ("aggregation", AGGREGATIONS), ("proximal", PROXIMALS), ("correction", CORRECTIONS),
            ("kl_estimator", KL_ESTIMATORS), ("kl_in", KL_PLACES), ("routing_replay", ROUTING_REPLAYS),
        ):  # fmt: skip
            if getattr(self, key) not in known:
                raise ValueError(f"{key}: unknown value {getattr(self, key)!r}; known: {', '.join(known)}")
        for name in self.rejections:
            if name not in REJECTIONS:
                raise ValueError(f"rejections: unknown value {name!r}; known: {', '.join(REJECTIONS)}")

    def _check_numbers(self) -> None:
        above_0 = (
            "clip_low", "clip_high", "tis_cap", "sequence_cap", "decoupled_cap", "icepop_low", "geometric_low",
            "veto_below", "min_group_std",
        )  # fmt: skip
        for key in above_0:
            if not getattr(self, key) > 0:
                raise ValueError(f"{key}: must be above 0, got {getattr(self, key)}")
        for key in (
            "kl_coefficient", "entropy_coefficient", "negative_weight", "overlong_penalty", "max_resampled_batches",
            "replay_groups", "reset_every",
        ):  # fmt: skip
            if not getattr(self, key) >= 0:
                raise ValueError(f"{key}: must be 0 or more, got {getattr(self, key)}")
        if not 0 < self.reset_share <= 1:
            raise ValueError(f"reset_share: must be above 0 and at most 1, got {self.reset_share}")
        for key in ("pass_k", "updates_per_batch", "replay_times"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: must be at least 1, got {getattr(self, key)}")
        for low, high in (("geometric_low", "geometric_high"), ("icepop_low", "icepop_high")):
            if not getattr(self, low) < getattr(self, high):
                raise ValueError(f"{high}: must be above {low} = {getattr(self, low)}, got {getattr(self, high)}")
        for key in ("gamma", "gae_lambda", "overlong_share"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"{key}: must be between 0 and 1, got {getattr(self, key)}")
        if self.half_weight_spread is not None and not self.half_weight_spread > 0:
            raise ValueError(
                f"half_weight_spread: must be above 0, got {self.half_weight_spread}; null weighs all alike"
            )
        if not self.dual_clip_ratio > 1:
            raise ValueError(f"dual_clip_ratio: must be above 1, got {self.dual_clip_ratio}")

    def _check_weighed_once(self) -> None:
        """pi_theta / mu enters the gradient once: as r, as w, or as r * w with pi_prox between them."""
        if self.proximal == "sampler" and self.correction != "none":
            raise ValueError(
                f"correction: {self.correction} on top of proximal=sampler would weigh pi / mu twice: the ratio of the "
                "loss is against the sampler already; type algorithm.correction=none, or algorithm.proximal=recomputed"
            )
        if self.loss_kind.has_ratio:
            return
        if self.proximal != "recomputed":
            raise ValueError(
                f"proximal: {self.proximal} leaves a part of pi / mu to the ratio of the loss, and {self.loss} has "
                "none; type algorithm.proximal=recomputed, or algorithm.loss=ppo_clip"
            )
        if self.updates_per_batch > 1:
            raise ValueError(
                f"updates_per_batch: {self.updates_per_batch} updates move the policy away from the one that the batch "
                f"is of, and {self.loss} has no ratio for that; type algorithm.updates_per_batch=1, or "
                "algorithm.loss=ppo_clip"
            )


def check_routing_replay(algorithm: AlgorithmConfig, groups_per_batch: int) -> None:
    """Raises ValueError where no pass comes before the updates, whose experts could be replayed."""
    num_updates = min(algorithm.updates_per_batch, groups_per_batch)
    if algorithm.routing_replay == "old_logprobs" and (num_updates == 1 or algorithm.proximal != "recomputed"):
        raise ValueError(
            "algorithm.routing_replay: old_logprobs replays the experts of the pass for pi_old, and with "
            f"{num_updates} updates per batch and proximal={algorithm.proximal} there is none; "
            "type algorithm.updates_per_batch=2 or more (train.groups_per_batch as well) with "
            "algorithm.proximal=recomputed, or algorithm.routing_replay=rollout"
        )


def check_interpolated(algorithm: AlgorithmConfig, max_staleness: int) -> None:
    """Raises ValueError where no token is old enough for a policy between its sampler's and the current one."""
    if algorithm.proximal == "interpolated" and max_staleness < 2:
        raise ValueError(
            "algorithm.proximal: interpolated lies between sampler and policy for tokens two versions old or more, and "
            f"train.max_staleness={max_staleness} admits none: it would be the sampler, whatever the correction; type "
            "train.max_staleness=2 or more, or algorithm.proximal=recomputed"
        )


def check_replay(algorithm: AlgorithmConfig, max_staleness: int) -> None:
    """Raises ValueError where nothing could be replayed, or nothing would correct for its age."""
    if algorithm.replay_groups == 0:
        return
    if max_staleness == 0:
        raise ValueError(
            "algorithm.replay_groups: what was trained once is a version old, and train.max_staleness=0 allows none; "
            "type train.max_staleness=1 or more, or algorithm.replay_groups=0"
        )
    if algorithm.correction == "none" and algorithm.proximal != "sampler":
        raise ValueError(
            "algorithm.replay_groups: nothing corrects for the age of what is replayed; type algorithm.correction=tis, "
            "or algorithm.proximal=sampler"
        )


def check_pass_k(algorithm: AlgorithmConfig, group_size: int) -> None:
    """Raises ValueError where the whole group is the only choice of k, and no sibling adds anything."""
    if algorithm.estimator_kind.uses_pass_k and algorithm.pass_k >= group_size:
        raise ValueError(
            f"algorithm.pass_k: must be below train.group_size = {group_size}, got {algorithm.pass_k}: with all "
            f"siblings in every choice none adds anything; type algorithm.pass_k={group_size // 2} or less"
        )


def check_spread(algorithm: AlgorithmConfig, num_judgements: int) -> None:
    """Raises ValueError where verdicts are to be weighed by a spread that one judgement doesn't have."""
    if algorithm.half_weight_spread is not None and num_judgements < 2:
        raise ValueError(
            "algorithm.half_weight_spread: one judgement has no spread to weigh a verdict by; "
            "type judge.num_judgements=4, or algorithm.half_weight_spread=null"
        )


@dataclass(frozen=True)
class TrainConfig:
    """The learner and its batches. A batch is `groups_per_batch` groups of `group_size` siblings."""

    num_steps: int = 80
    groups_per_batch: int = 16
    group_size: int = 8
    min_valid_siblings: int = 2  # a group with fewer verdicts is dropped
    max_staleness: int = 1  # in optimizer steps; 0 is synchronous
    micro_batch_tokens: int = 4096  # packed tokens per rank and forward pass
    shared_prompts: bool = True  # what siblings begin with goes through the learner once, not with each of them
    lr: float = 3e-4
    warmup_steps: int = 5  # of num_steps, in which lr rises; several updates of a batch are parts of a step
    schedule: str = "constant"  # of lr over num_steps, whatever algorithm.updates_per_batch
    weight_decay: float = 0.0
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    max_grad_norm: float = 1.0
    dtype: str = AUTO  # of the forward and backward pass: auto is bfloat16 on a GPU; master weights are float32
    activation_checkpointing: bool | None = None  # compute activations twice, hold fewer; null: on GPUs
    checkpoint_every: int = 20  # steps; 0: only at the end and on Ctrl-C
    keep_checkpoints: int = 2
    async_checkpoints: bool = True  # written beside training, from a copy in host memory; False: training waits
    export_dtype: str | None = None  # of the models that are left at the end; null: that of the engines

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
        for name, value in (("lr", self.lr), ("max_grad_norm", self.max_grad_norm)):
            if not value > 0:
                raise ValueError(f"{name}: must be above 0, got {value}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule: unknown value {self.schedule!r}; known: {', '.join(SCHEDULES)}")
        if self.dtype not in (AUTO, *DTYPES):
            raise ValueError(f"dtype: unknown value {self.dtype!r}; known: {', '.join((AUTO, *DTYPES))}")
        if self.export_dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(
                f"export_dtype: unknown value {self.export_dtype!r}; known: float32, bfloat16, float16, and null for "
                "that of the run's engines"
            )
        if self.keep_checkpoints < 1:
            raise ValueError(f"keep_checkpoints: must be at least 1, got {self.keep_checkpoints}")
        if len(self.adam_betas) != 2 or not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"adam_betas: must be two numbers in [0, 1), got {self.adam_betas}")

    @property
    def recomputes(self) -> bool:
        """Is activation checkpointing on?"""
        return bool(self.activation_checkpointing)
