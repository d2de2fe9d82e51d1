"""Settings of an algorithm: those of single estimators, losses, corrections and rejections, in the block of each, and
those of the whole.
"""

from dataclasses import dataclass, field
from typing import Any

from grmpipe.algorithm.distill import DistillConfig
from grmpipe.models.bounds import Bounded, above, at_least, between, between_0_and_1, not_empty, one_of

MIN_GROUP_STD = 1e-6  # [reward] added to the standard deviation of a group, or of a batch (GRPO's epsilon)
STD_KINDS = ("population", "sample", "none")
ROUTER_REPLAYS = ("none", "rollout", "old_logprobs")


@dataclass(frozen=True)
class GaeTurns(Bounded):
    """Settings of `algorithm.estimator=gae_turns` (VAGEN, arXiv 2510.16907)."""

    high_level_gamma: float = between_0_and_1(0.95)  # Discount per turn.


@dataclass(frozen=True)
class Gigpo(Bounded):
    """Settings of `algorithm.estimator=gigpo` (arXiv 2505.10978)."""

    step_advantage_w: float = at_least(0, 1.0)  # Weight of the advantage among turns of equal state.


@dataclass(frozen=True)
class MtGrpo(Bounded):
    """Settings of `algorithm.estimator=mt_grpo` (arXiv 2505.11821)."""

    turn_advantage_coef: float = at_least(0, 1.0)  # Weight of a turn's own advantage next to the outcome's.
    # What the outcome is: the reward of the last turn, or of the whole episode, as where a judge's verdict was split.
    outcome: str = one_of(("last_turn", "episode"), "last_turn")


@dataclass(frozen=True)
class PassAtK(Bounded):
    """Settings of `algorithm.estimator=pass_at_k` (arXiv 2508.10751)."""

    k: int = at_least(1, 4)  # [siblings] Siblings that share one success; below train.group_size.


@dataclass(frozen=True)
class DualClip(Bounded):
    """Settings of `algorithm.loss=dual_clip` (arXiv 1912.09729)."""

    ratio: float = above(1, 3.0)  # Largest ratio with which a token of negative advantage counts.


@dataclass(frozen=True)
class Sapo(Bounded):
    """Settings of `algorithm.loss=sapo` (arXiv 2511.20347): how fast the weight of a token falls off as r leaves 1."""

    temperature_pos: float = above(0, 1.0)  # For tokens of positive advantage.
    temperature_neg: float = above(0, 1.05)  # For all others: higher, since their gradients spread over the vocabulary.


@dataclass(frozen=True)
class Truncation(Bounded):
    """Settings of `algorithm.correction=tis`, on w of a token."""

    cap: float = above(0, 2.0)  # Largest weight.
    floor: float = at_least(0, 0.0)  # Smallest weight; 0: no bound.

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.floor < self.cap:
            raise ValueError(f"floor: must be below cap = {self.cap}, got {self.floor}")


@dataclass(frozen=True)
class Cap(Bounded):
    """A cap on the weight w of a token, or on its product over a rollout."""

    cap: float = above(0, 2.0)  # Largest weight; above it the weight is the cap for sequence_tis, else 0.


@dataclass(frozen=True)
class Band(Bounded):
    """The band of a ratio."""

    low: float = above(0, 0.5)  # Smallest ratio that is trained.
    high: float = 5.0  # Largest ratio that is trained.

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high:
            raise ValueError(f"high: must be above low = {self.low}, got {self.high}")


@dataclass(frozen=True)
class Veto(Bounded):
    """Settings of the rejection `veto`."""

    below: float = above(0, 1e-4)  # A rollout with a token whose w is below is not trained.


@dataclass(frozen=True)
class OffPolicy:
    """Settings of the rejection `off_policy` (DeepSeek-V3.2, arXiv 2512.02556)."""

    # [nats] A rollout of negative advantage is not trained if mean(log mu - log pi_theta) is above.
    delta: float = 0.1


@dataclass(frozen=True)
class KindSettings:
    """The settings of single estimators, losses, corrections and rejections, in the block of each."""

    gae_turns: GaeTurns = field(default_factory=GaeTurns)
    gigpo: Gigpo = field(default_factory=Gigpo)
    mt_grpo: MtGrpo = field(default_factory=MtGrpo)
    pass_at_k: PassAtK = field(default_factory=PassAtK)
    dual_clip: DualClip = field(default_factory=DualClip)
    sapo: Sapo = field(default_factory=Sapo)
    tis: Truncation = field(default_factory=Truncation)
    # Settings of `algorithm.correction=sequence_tis` and `sequence_mis`, on the product of w over a rollout; 2 to 10
    # are in use.
    sequence: Cap = field(default_factory=lambda: Cap(3.0))
    # Settings of `algorithm.correction=icepop`: a token whose w is outside has weight 0.
    icepop: Band = field(default_factory=Band)
    decoupled: Cap = field(default_factory=lambda: Cap(5.0))  # Settings of `algorithm.correction=decoupled`, on w.
    # Settings of the rejection `geometric`, on exp(mean log w) of a rollout.
    geometric: Band = field(default_factory=lambda: Band(0.99, 1.01))
    veto: Veto = field(default_factory=Veto)
    off_policy: OffPolicy = field(default_factory=OffPolicy)
    # Options of your own loss or estimator. Nothing else reads them.
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OverlongConfig(Bounded):
    """The cost of answers near the limit of rollout.max_new_tokens (DAPO, arXiv 2503.14476, section 3.4)."""

    # Last part of rollout.max_new_tokens in which an answer costs more and more; 0: off (DAPO: 4096 of 20480).
    share: float = between_0_and_1(0.0)
    penalty: float = at_least(0, 1.0)  # [reward] Cost of an answer that fills that part.


@dataclass(frozen=True)
class ReplayBufferConfig(Bounded):
    """The groups of earlier batches that are trained again."""

    # [groups] Those that each batch trains again, each once, none older than train.max_staleness; 0: none.
    groups: int = at_least(0, 0)


@dataclass(frozen=True)
class SftConfig(Bounded):
    """Demonstrations that the policy imitates beside its own rollouts: supervised fine-tuning as a term of the loss."""

    # Demonstrations: a .jsonl or .parquet file with TRL's columns, `messages` or `prompt` and `completion`. Null: none.
    path: str | None = not_empty(None, "give a file, or type algorithm.sft.path=null")
    # Weight of their mean negative log-likelihood per token, beside the loss of the rollouts.
    coefficient: float = above(0, 1.0)
    rows_per_step: int = at_least(1, 16)  # [demonstrations] Those of an optimizer step.


@dataclass(frozen=True)
class SelfJudgingConfig(Bounded):
    """Judging tasks among the prompts of a policy that judges itself: it learns to judge in the same batches."""

    # Share of the groups that are judging tasks: judgements of one answer, rewarded if they agree with its label; null:
    # none.
    share: float | None = between(0, 1, None, "above 0 and below 1, or null: no judging tasks")
    # Labelled judgements on other prompts than the run's: a file, or tiny://judgements_on_others (URPO, arXiv
    # 2507.17515); null: the run's own rollouts, which judge.rule labels, right and wrong ones alternately (SPARK, arXiv
    # 2509.22624).
    data_path: str | None = not_empty(None, "give a file, or type algorithm.self_judging.data_path=null")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_path is not None and self.share is None:
            raise ValueError(
                "share: is null, so that nothing of algorithm.self_judging.data_path would be trained; type "
                "algorithm.self_judging.share=0.25, or leave data_path out"
            )


@dataclass(frozen=True)
class AlgorithmSettings(KindSettings, Bounded):
    """The settings of an algorithm, as its functions get them."""

    # Rewards, before advantages are estimated.

    overlong_buffer: OverlongConfig = field(default_factory=OverlongConfig)

    # Advantages.

    # How advantages are estimated: a row of docs/algorithms.md, which has the formulas, or the dotted path of your own
    # function. GAE needs a critic.
    estimator: str = "grpo"
    # Standard deviation that advantages are divided by; none: by nothing.
    std: str = one_of(STD_KINDS, "population")
    # Discount per step of a process reward; per turn for gigpo; per token for gae, gae_raw, gae_turns and for
    # reinforce_pp with a KL in the reward.
    gamma: float = between_0_and_1(1.0)
    # For gae, gae_raw and gae_turns: weight of later steps; 1 uses the full return, 0 only the critic's next value.
    gae_lambda: float = between_0_and_1(1.0)
    # [score] Standard deviation of a verdict's judgements at which its advantage counts half; null: always in full.
    weight_half_std: float | None = above(0, None)
    # [batches] Zero-advantage groups that a step may drop and replace, in multiples of
    # train.groups_per_batch; 0: none (DAPO).
    dynamic_sampling_batches: float = at_least(0, 0.0)

    # The policy loss.

    # Loss of the policy, by r = pi_theta / pi_prox: a row of docs/algorithms.md, which has the formulas, or the dotted
    # path of your own function.
    loss: str = "ppo_clip"
    clip_low: float = above(0, 0.2)  # Lower clip of r, at 1 - clip_low (PPO, arXiv 1707.06347).
    clip_high: float = above(0, 0.2)  # Upper clip of r, at 1 + clip_high (DAPO: 0.28).
    # What token losses are divided by: trained tokens; rollouts, after a mean over each; rollouts times
    # rollout.max_new_tokens; or the dotted path of an Aggregation of your own.
    aggregation: str = "token_mean"
    # Policy pi_prox of the ratio: the learner's before the first update, one between the sampler and the current policy
    # by a token's age, or the sampler; or the dotted path of a function of your own.
    proximal: str = "recomputed"

    # The correction for the sampling policy.

    # How the policy loss is weighted by w = pi_prox / mu, where mu sampled the token; or the dotted path of a function
    # of your own.
    correction: str = "tis"
    # Tests that a rollout must pass to be trained, or dotted paths of functions of your own; one that fails still
    # counts in the batch's denominator.
    rejections: list[str] = field(default_factory=list)
    # Mixtures of experts: whose choice of experts the updates repeat: none, the sampler's (R3, arXiv 2510.11370), or
    # that of the pass for pi_old (R2, arXiv 2507.18071). Gates are computed again.
    router_replay: str = one_of(ROUTER_REPLAYS, "none")

    # Regularisation.

    kl_coefficient: float = at_least(0, 0.0)  # Weight of the KL to the frozen reference; 0: no reference is loaded.
    # Estimator of the KL per token, or the dotted path of a function of your own; k1 is for the reward alone,
    # k3_unbiased weighs k3 by pi / mu (DeepSeek-V3.2, arXiv 2512.02556).
    kl_estimator: str = "k3"
    # Subtract the KL (of the sampler's log-probs) from the rewards; false: add it to the loss.
    kl_in_reward: bool = False
    entropy_coefficient: float = at_least(0, 0.0)  # Weight of an entropy bonus in the loss; 0: none.

    # Reuse.

    # [updates] Optimizer steps on each batch; above 1 training starts only when the batch is complete.
    updates_per_batch: int = at_least(1, 1)
    replay_buffer: ReplayBufferConfig = field(default_factory=ReplayBufferConfig)

    # Distillation, imitation, judging.

    distill: DistillConfig = field(default_factory=DistillConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    self_judging: SelfJudgingConfig = field(default_factory=SelfJudgingConfig)
