"""Settings of training: TrainConfig, AlgorithmConfig. Frozen, checked, free of torch."""

from dataclasses import dataclass, field

from grmpipe.algorithm.parts import (
    AGGREGATIONS_BY_TOKEN,
    CORRECTIONS_BY_TOKEN,
    KL_WITHOUT_GRADIENT,
    ONE_OF_EACH,
    REJECTIONS,
    EstimatorKind,
    LossKind,
    estimator_named,
    loss_named,
)
from grmpipe.algorithm.settings import AlgorithmSettings
from grmpipe.config.keys.path_table import PathTable
from grmpipe.models.bounds import Bounded, above, at_least, one_of
from grmpipe.models.settings import AUTO, CHECKPOINTING, DTYPES, LM_HEAD, ROUTER, Activations, ParallelConfig

FSDP2 = "fsdp2"
TRAIN_BACKENDS = PathTable(
    "train.backend", ("spec", "rank", "world_size", "init_method"), "grmpipe.train.learner.learner",
    {FSDP2: "Learner"},
)  # fmt: skip
SCHEDULES = ("constant", "cosine", "linear")
FP32_MODULES = (LM_HEAD, ROUTER)
LAYERS = "layers"
COMPILED = ("none", LAYERS)


@dataclass(frozen=True)
class AlgorithmConfig(AlgorithmSettings):
    """How rewards become gradients. Defaults are GRPO (arXiv 2402.03300) with one on-policy update per batch.

    Defaults without a paper are this project's.
    """

    def __post_init__(self) -> None:
        self._check_names()
        super().__post_init__()
        self._check_credit()
        self._check_without_effect()
        self._check_weighed_once()

    @property
    def loss_kind(self) -> LossKind:
        """What other modules must know of the loss."""
        return loss_named(self.loss)

    @property
    def estimator_kind(self) -> EstimatorKind:
        """What other modules must know of the estimator."""
        return estimator_named(self.estimator)

    @property
    def needs_whole_rollouts(self) -> bool:
        """Whether a token's loss depends on other tokens of its rollout, so that all must be in one micro-batch."""
        return not (
            self.loss_kind.by_token
            and self.correction in CORRECTIONS_BY_TOKEN
            and self.aggregation in AGGREGATIONS_BY_TOKEN
            and not self.rejections
        )

    def _check_names(self) -> None:
        estimator_named(self.estimator)
        loss_named(self.loss)
        for table in ONE_OF_EACH:
            table.check(getattr(self, table.name))
        for name in self.rejections:
            REJECTIONS.check(name)

    def _check_without_effect(self) -> None:
        """Check that a setting that costs something can change the training."""
        if self.dynamic_sampling_batches > 0 and not self.estimator_kind.has_zero_groups:
            raise ValueError(
                f"dynamic_sampling_batches: {self.estimator} compares no siblings, so groups of equal rewards have "
                "a gradient too, and none would be replaced; type algorithm.dynamic_sampling_batches=0, or an "
                "algorithm.estimator that compares them, such as grpo"
            )
        if self.kl_coefficient > 0 and not self.kl_in_reward and self.kl_estimator in KL_WITHOUT_GRADIENT:
            raise ValueError(
                f"kl_estimator: in the loss the gradient of {self.kl_estimator} is 0 on average, so it holds nothing "
                "near the reference; type algorithm.kl_estimator=k2 (its gradient is that of the KL) or k3, or "
                "algorithm.kl_in_reward=true"
            )

    def _check_credit(self) -> None:
        """Check that credit by step or turn isn't averaged away."""
        if self.estimator_kind.by_step and (instead := self.loss_kind.by_step):
            raise ValueError(
                f"loss: {self.loss} gives every token the mean of its rollout's advantages, and {self.estimator} "
                f"credits steps or turns; type algorithm.loss={instead}, or algorithm.estimator=grpo"
            )

    def _check_weighed_once(self) -> None:
        """Check that pi_theta / mu enters the gradient once: as r, as w, or as r * w with pi_prox between them."""
        if self.proximal == "sampler" and self.correction != "none":
            raise ValueError(
                f"correction: {self.correction} on top of proximal=sampler would count pi / mu twice: the ratio of the "
                "loss already refers to the sampler; type algorithm.correction=none, or algorithm.proximal=recomputed"
            )
        if self.loss_kind.has_ratio:
            return
        if self.proximal != "recomputed":
            raise ValueError(
                f"proximal: {self.proximal} leaves a part of pi / mu to the ratio of the loss, but {self.loss} has "
                "none; type algorithm.proximal=recomputed, or algorithm.loss=ppo_clip"
            )
        if self.updates_per_batch > 1:
            raise ValueError(
                f"updates_per_batch: {self.updates_per_batch} updates move the policy away from the one that the batch "
                f"is of, and {self.loss} has no ratio for that; type algorithm.updates_per_batch=1, or "
                "algorithm.loss=ppo_clip"
            )


def check_log_ratio(algorithm: AlgorithmConfig) -> None:
    """Raises ValueError if an estimator by log-ratios has no reference, or another loss than the one it weighs."""
    fits = (
        algorithm.kl_coefficient > 0
        and algorithm.kl_in_reward
        and algorithm.kl_estimator == "k1"
        and algorithm.loss == "policy_gradient"
        and algorithm.aggregation == "constant"
    )
    if algorithm.estimator_kind.by_log_ratio and not fits:
        raise ValueError(
            f"algorithm.estimator: {algorithm.estimator} weighs rollouts by log(pi / reference), summed over their "
            "tokens; type algorithm=dpo, and algorithm.kl_coefficient=0.1 for its beta"
        )


def check_router_replay(algorithm: AlgorithmConfig, groups_per_batch: int) -> None:
    """Raises ValueError if no pass comes before the updates whose experts could be replayed."""
    num_updates = min(algorithm.updates_per_batch, groups_per_batch)
    if algorithm.router_replay == "old_logprobs" and (num_updates == 1 or algorithm.proximal != "recomputed"):
        raise ValueError(
            "algorithm.router_replay: old_logprobs replays the experts of the pass for pi_old, but with "
            f"{num_updates} updates per batch and proximal={algorithm.proximal} there is none; "
            "type algorithm.updates_per_batch=2 or more (train.groups_per_batch as well) with "
            "algorithm.proximal=recomputed, or algorithm.router_replay=rollout"
        )


def check_interpolated(algorithm: AlgorithmConfig, max_staleness: int) -> None:
    """Raises ValueError if no token is old enough for a policy between its sampler's and the current one."""
    if algorithm.proximal == "interpolated" and max_staleness < 2:
        raise ValueError(
            "algorithm.proximal: interpolated differs from the sampler only for tokens two versions old or more, and "
            f"train.max_staleness={max_staleness} admits none; type "
            "train.max_staleness=2 or more, or algorithm.proximal=recomputed"
        )


def check_replay_buffer(algorithm: AlgorithmConfig, max_staleness: int) -> None:
    """Raises ValueError if nothing could be replayed, or nothing would correct for its age."""
    if algorithm.replay_buffer.groups == 0:
        return
    if max_staleness == 0:
        raise ValueError(
            "algorithm.replay_buffer.groups: a trained group is at least one version old, and train.max_staleness=0 "
            "allows "
            "none; type train.max_staleness=1 or more, or algorithm.replay_buffer.groups=0"
        )
    if algorithm.correction == "none" and algorithm.proximal != "sampler":
        raise ValueError(
            "algorithm.replay_buffer.groups: nothing corrects for the age of replayed groups; type "
            "algorithm.correction=tis, "
            "or algorithm.proximal=sampler"
        )


def check_pass_k(algorithm: AlgorithmConfig, group_size: int) -> None:
    """Raises ValueError if the whole group is the only subset of k, so that no sibling adds anything."""
    if algorithm.estimator_kind.uses_pass_k and algorithm.pass_at_k.k >= group_size:
        raise ValueError(
            f"algorithm.pass_at_k.k: must be below train.group_size = {group_size}, got {algorithm.pass_at_k.k}: if "
            "each choice includes all siblings, none adds anything; type "
            f"algorithm.pass_at_k.k={group_size // 2} or less"
        )


def check_spread(algorithm: AlgorithmConfig, num_judgements: int) -> None:
    """Raises ValueError if verdicts are weighted by a standard deviation that a single judgement doesn't have."""
    if algorithm.weight_half_std is not None and num_judgements < 2:
        raise ValueError(
            "algorithm.weight_half_std: a single judgement has no spread; "
            "type judge.num_judgements=4, or algorithm.weight_half_std=null"
        )


@dataclass(frozen=True)
class OptimizerConfig(Bounded):
    """AdamW of a learner."""

    weight_decay: float = at_least(0, 0.0)  # AdamW's weight decay.
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # AdamW's two betas.
    # Moments wait in host memory while gradients are computed: their memory and that of activations is needed by turns.
    offload: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: must be two numbers in [0, 1), got {self.betas}")


@dataclass(frozen=True)
class TrainConfig(Bounded):
    """The learner and its batches. A batch is `groups_per_batch` groups of `group_size` siblings."""

    num_steps: int = at_least(1, 80)  # Steps of the run; each trains one batch.
    groups_per_batch: int = at_least(1, 16)  # [groups] Groups of a batch, one per prompt.
    # [rollouts] Rollouts of each prompt.
    group_size: int = at_least(2, 8, "at least 2 (a baseline needs siblings)")
    min_valid_siblings: int = 2  # [verdicts] Fewest verdicts with which a group is trained; with fewer it is dropped.
    # [steps] Most steps between the weights that sampled a group's oldest token and those it trains; 0: synchronous.
    max_staleness: int = at_least(0, 1)
    # Two runs of one configuration are equal bit for bit, on CPUs with the embedded engine: groups are trained in the
    # order of their prompts, and weights are pushed when every open group is judged.
    deterministic: bool = False
    # Most packed tokens of a forward pass on one rank; ranks that share samples take micro-batches parallel.cp times as
    # long.
    micro_batch_tokens: int = at_least(1, 4096)
    prefix_sharing: bool = True  # Compute tokens that samples of a group have in common once in the learner.
    lr: float = above(0, 3e-4)  # Peak learning rate of AdamW.
    warmup_steps: int = at_least(0, 5)  # Steps in which the learning rate rises linearly.
    # Learning rate after the warm-up; linear and cosine fall towards 0 at num_steps.
    schedule: str = one_of(SCHEDULES, "constant")
    max_grad_norm: float = above(0, 1.0)  # Norm that gradients are clipped to.
    # [batches] Batches of a run that may be dropped because their gradients aren't finite, with the weights as they
    # were; one more fails the run.
    max_skipped_steps: int = at_least(0, 0)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    # Type of the forward and backward pass; auto: bfloat16 on a GPU, float32 elsewhere. Master weights are float32.
    dtype: str = one_of((AUTO, *DTYPES), AUTO)
    # Library that trains: fsdp2, or the dotted path of your own LearnerRank (grmpipe/train/learner/backend.py).
    backend: str = FSDP2
    # What computes in float32 whatever `dtype` is. lm_head: logits aren't rounded (MiniMax-M1, arXiv 2506.13585);
    # engines should do the same: vLLM by engine.vllm.options.hf_overrides={head_dtype: float32}. router: those of a
    # mixture of experts, with weights that aren't rounded (Megatron's moe_router_dtype=fp32).
    fp32_modules: list[str] = field(default_factory=list)
    # What torch.compile makes kernels for: none, or layers (norms, rotations, projections and MLPs of each layer;
    # attention and experts stay as they are). The first step waits for the compiler; what can't be compiled is said.
    compile: str = one_of(COMPILED, "none")
    # Activations that the backward pass computes again, to save memory: none; full: all but the inputs of layers;
    # selective: those, and not the outputs of attention, whose cost grows most with length; null: full on GPUs, else
    # none.
    activation_checkpointing: str | None = one_of(CHECKPOINTING, None, also="null (full on GPUs)")
    # Inputs of layers wait in pinned host memory for the backward pass; for long micro-batches of deep models.
    activation_offload: bool = False
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint_every: int = at_least(0, 20)  # [steps] Interval between checkpoints; 0: only at the end and on Ctrl-C.
    keep_checkpoints: int = at_least(1, 2)  # [checkpoints] Newest checkpoints to keep.
    # Write checkpoints during training, from a copy in host memory; false: training waits.
    async_checkpoints: bool = True
    # Type of the models that a run exports at its end; null: that of their engines.
    export_dtype: str | None = one_of((*DTYPES, "float16"), None, also="null (that of the run's engines)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.min_valid_siblings <= self.group_size:
            raise ValueError(
                f"min_valid_siblings: must be between 2 and group_size = {self.group_size}, "
                f"got {self.min_valid_siblings}"
            )
        TRAIN_BACKENDS.check(self.backend)
        for name in self.fp32_modules:
            if name not in FP32_MODULES:
                raise ValueError(f"fp32_modules: unknown module {name!r}; known: {', '.join(FP32_MODULES)}")
        if self.activation_offload and self.activation_checkpointing == "none":
            raise ValueError(
                "activation_offload: without checkpointing there are no inputs of layers to offload; type "
                "activation_checkpointing=full, or activation_offload=false"
            )

        if self.compile == LAYERS and self.deterministic:
            raise ValueError(
                "compile: a resumed run may compile its kernels for other lengths first, and they may round otherwise, "
                "so that two runs aren't equal bit for bit; type train.compile=none, or train.deterministic=false"
            )

    @property
    def activations(self) -> Activations:
        """What layers keep for the backward pass."""
        return Activations(checkpointing=self.activation_checkpointing or "none", offload=self.activation_offload)

    @property
    def max_packed_tokens(self) -> int:
        """Most packed tokens of a micro-batch, on all ranks that share it."""
        return self.micro_batch_tokens * self.parallel.cp


def check_skipped(algorithm: AlgorithmConfig, train: TrainConfig) -> None:
    """Raises ValueError if a batch that is dropped may have changed weights already."""
    if train.max_skipped_steps == 0:
        return
    if algorithm.updates_per_batch > 1 or algorithm.estimator_kind.needs_critic:
        what = "a critic" if algorithm.estimator_kind.needs_critic else "an earlier update of the batch"
        raise ValueError(
            f"train.max_skipped_steps: {what} may have learned from a batch that is then dropped; type "
            "train.max_skipped_steps=0"
        )
