"""The parts of an algorithm by name: where the function of each is, what others must know of it, its own settings.
Imports none of them.

A new one is a function, a row here (with its block in KindSettings, if it has keys of its own), a YAML in
conf/algorithm/ and a test. One of the user's own is named by its dotted
path: that of a function; of a LossKind or an EstimatorKind where the defaults below don't fit it; of an Aggregation.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from grmpipe.config.keys.dotted_path import check_takes, find_at, is_dotted, unknown_value
from grmpipe.config.keys.path_table import PathTable
from grmpipe.models.bounds import Bounded, above, at_least, between_0_and_1


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind:
    """A loss of the policy.

    function:  dotted path of (Scored, AlgorithmConfig) -> PolicyLoss, see grmpipe/algorithm/losses.py.
    has_ratio: it weights tokens by r = pi_theta / pi_prox. Without r it is right only while the policy is pi_prox.
    by_token:  no token's loss depends on other tokens. If one does, all samples of a rollout are in one micro-batch.
    by_step:   the loss to take where advantages differ within a rollout, since this one averages them; empty: itself.
    """

    function: str
    has_ratio: bool = True
    by_token: bool = False
    by_step: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorKind:
    """An estimator of advantages.

    function:     dotted path. need=group: (Group, AlgorithmConfig) -> [N] for each sibling; need=batch: (list of
                  groups, AlgorithmConfig) -> the same for each group, see grmpipe/algorithm/advantages.py.
    need:         what it needs at once. If it needs a group, it is called group by group, and the samples are trained
                  while the rest of the batch is still rolling out.
    compares:     what says that a group has no gradient: "outcomes": all siblings have the same; "advantages": the
                  estimator itself gives only zeros. An estimator that needs a batch, or a critic's values, can't say so
                  of a group alone: with "advantages" each of its groups counts as having one.
    by_step:      it credits steps or turns, so that advantages differ within a rollout.
    by_token:     a KL in the reward is charged per token, so that no token pays for an earlier one; otherwise per step.
    needs_critic: it uses a critic's values.
    targets:      dotted path of (Rewards, AlgorithmConfig) -> ([N] advantages, [N] returns): the returns are those that
                  the critic learns, if there is one.
    uses_pass_k:  it compares subsets of `algorithm.pass_at_k.k` siblings, so a group must have several.
    by_log_ratio: it weighs rollouts by their log-ratio to the reference itself (`Rewards.log_ratio`), so that no KL is
                  subtracted from the rewards; `algorithm.kl_coefficient` is its beta.
    """

    function: str
    need: Literal["group", "batch"] = "group"
    compares: Literal["outcomes", "advantages"] = "advantages"
    by_step: bool = False
    by_token: bool = False
    needs_critic: bool = False
    targets: str = "grmpipe.algorithm.advantages.compute_gae"
    uses_pass_k: bool = False
    by_log_ratio: bool = False

    @property
    def has_zero_groups(self) -> bool:
        """Whether a group can be seen to have no gradient, whatever is in its batch."""
        return self.compares == "outcomes" or (self.need == "group" and not self.needs_critic)


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

    temperature_pos: float = above(0, 1.0)  # Of tokens of positive advantage.
    temperature_neg: float = above(0, 1.05)  # Of all others: more, since their gradients spread over the vocabulary.


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


LOSSES: dict[str, LossKind] = {
    "ppo_clip": LossKind(function="grmpipe.algorithm.losses.ppo_clip", by_token=True),
    "dual_clip": LossKind(function="grmpipe.algorithm.losses.dual_clip", by_token=True),
    "gspo": LossKind(function="grmpipe.algorithm.losses.gspo", by_step="gspo_token"),
    "gspo_token": LossKind(function="grmpipe.algorithm.losses.gspo_token"),
    "cispo": LossKind(function="grmpipe.algorithm.losses.cispo", by_token=True),
    "sapo": LossKind(function="grmpipe.algorithm.losses.sapo", by_token=True),
    "policy_gradient": LossKind(function="grmpipe.algorithm.losses.policy_gradient", has_ratio=False, by_token=True),
}

ESTIMATORS: dict[str, EstimatorKind] = {
    "grpo": EstimatorKind(function="grmpipe.algorithm.advantages.grpo", compares="outcomes"),
    "dr_grpo": EstimatorKind(function="grmpipe.algorithm.advantages.dr_grpo", compares="outcomes"),
    "rloo": EstimatorKind(function="grmpipe.algorithm.advantages.rloo", compares="outcomes"),
    "reinforce_pp": EstimatorKind(function="grmpipe.algorithm.advantages.reinforce_pp", need="batch", by_token=True),
    "reinforce_pp_baseline": EstimatorKind(
        function="grmpipe.algorithm.advantages.reinforce_pp_baseline", need="batch", compares="outcomes"
    ),
    "pass_at_k": EstimatorKind(function="grmpipe.algorithm.advantages.pass_at_k", uses_pass_k=True),
    "raft": EstimatorKind(function="grmpipe.algorithm.advantages.raft"),
    "dpo": EstimatorKind(function="grmpipe.algorithm.advantages.dpo", by_log_ratio=True),
    "process": EstimatorKind(function="grmpipe.algorithm.advantages.process", by_step=True),
    "process_grpo": EstimatorKind(function="grmpipe.algorithm.advantages.process_grpo", by_step=True),
    "gae": EstimatorKind(
        function="grmpipe.algorithm.advantages.gae_whitened", need="batch", by_token=True, needs_critic=True
    ),
    "gae_raw": EstimatorKind(function="grmpipe.algorithm.advantages.gae_raw", by_token=True, needs_critic=True),
    "gigpo": EstimatorKind(function="grmpipe.algorithm.turn_advantages.gigpo", by_step=True),
    "mt_grpo": EstimatorKind(function="grmpipe.algorithm.turn_advantages.mt_grpo", by_step=True),
    "gae_turns": EstimatorKind(
        function="grmpipe.algorithm.turn_advantages.gae_turns",
        need="batch",
        by_step=True,
        by_token=True,
        needs_critic=True,
        targets="grmpipe.algorithm.turn_advantages.gae_of_turns",
    ),
}

# The policy that the ratio of the loss is taken against: TokenLogprobs -> log pi_prox.
PROXIMALS = PathTable(
    "algorithm.proximal", ("logprobs",), "grmpipe.algorithm.objective",
    {"recomputed": "take_recomputed", "interpolated": "interpolate_by_age", "sampler": "sampler"},
)  # fmt: skip
CORRECTIONS = PathTable(
    "algorithm.correction", ("drift", "algorithm"), "grmpipe.algorithm.corrections",
    {
        "none": "apply_no_correction", "tis": "truncate_importance", "sequence_tis": "truncate_sequence",
        "sequence_mis": "mask_sequence", "icepop": "icepop", "decoupled": "mask_tokens",
    },
)  # fmt: skip
REJECTIONS = PathTable(
    "algorithm.rejections", ("drift", "algorithm"), "grmpipe.algorithm.corrections",
    {"geometric": "geometric", "veto": "veto", "off_policy": "off_policy"},
)  # fmt: skip
KL_ESTIMATORS = PathTable(
    "algorithm.kl_estimator", ("logprobs_T", "reference_logprobs_T"), "grmpipe.algorithm.losses",
    {"k1": "k1_kl", "k2": "k2_kl", "k3": "k3_kl", "k3_unbiased": "k3_kl"},
)  # fmt: skip
KL_WEIGHTED = frozenset({"k3_unbiased"})  # in the loss by pi_theta / mu, through which its gradient passes too
KL_WITHOUT_GRADIENT = frozenset({"k1"})  # in the loss the mean of their gradients is 0
AGGREGATIONS = PathTable(
    "algorithm.aggregation", (), "grmpipe.algorithm.losses",
    {"token_mean": "TOKEN_MEAN", "sequence_mean": "SEQUENCE_MEAN", "constant": "CONSTANT"},
)  # fmt: skip
# These weigh a token by itself. All others, a user's own too, may use sums over the tokens of its rollout.
CORRECTIONS_BY_TOKEN = frozenset({"none", "tis", "icepop", "decoupled"})
AGGREGATIONS_BY_TOKEN = frozenset({"token_mean", "constant"})
ONE_OF_EACH = (AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, PROXIMALS)  # an algorithm names one

Kind = TypeVar("Kind", LossKind, EstimatorKind)


@functools.cache
def loss_named(name: str, key: str = "loss") -> LossKind:
    """A row of LOSSES, or the loss at a dotted path. Raises ValueError that begins with the key."""
    return _named(name, key, LOSSES, LossKind, ("scored", "algorithm"))


@functools.cache
def estimator_named(name: str, key: str = "estimator") -> EstimatorKind:
    """A row of ESTIMATORS, or the estimator at a dotted path. Raises ValueError that begins with the key."""
    return _named(name, key, ESTIMATORS, EstimatorKind, ("group", "algorithm"))


def _named(name: str, key: str, table: Mapping[str, Kind], make: type[Kind], arguments: tuple[str, ...]) -> Kind:
    """A row of a table, or the user's own at a dotted path, imported and checked before anything starts."""
    if name in table:
        return table[name]
    if not is_dotted(name):
        raise unknown_value(name, key, table)
    found = find_at(name, key)
    kind = found if isinstance(found, make) else make(function=name)
    check_takes(kind.function, key, arguments)
    return kind
