"""The parts of an algorithm by name: the function of each, and what others must know of it. Imports no torch.

A new one is a function, a row here, its settings (if it has keys of its own) in `KindSettings`, a YAML in
conf/algorithm/ and a test. One of the user's own is named by its dotted path: that of a function; of a LossKind or an
EstimatorKind where the defaults below don't fit it; of an Aggregation.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import numpy as np

from grmpipe.algorithm.advantages import (
    Advantages,
    EstimateBatch,
    EstimateGroup,
    Group,
    Targets,
    compute_gae,
    dpo,
    dr_grpo,
    gae_of_turns,
    gae_raw,
    gae_turns,
    gae_whitened,
    gigpo,
    grpo,
    mt_grpo,
    outcomes,
    pass_at_k,
    process,
    process_grpo,
    raft,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from grmpipe.algorithm.corrections import (
    Correction,
    Proximal,
    Rejection,
    apply_no_correction,
    geometric,
    icepop,
    interpolate_by_age,
    mask_sequence,
    mask_tokens,
    off_policy,
    sampler,
    take_recomputed,
    truncate_importance,
    truncate_sequence,
    veto,
)
from grmpipe.algorithm.losses import (
    CONSTANT,
    SEQUENCE_MEAN,
    TOKEN_MEAN,
    Aggregation,
    Kl,
    Loss,
    cispo,
    dual_clip,
    gspo,
    gspo_token,
    k1_kl,
    k2_kl,
    k3_kl,
    policy_gradient,
    ppo_clip,
    sapo,
)
from grmpipe.algorithm.settings import AlgorithmSettings
from grmpipe.config.keys.dotted_path import check_callable, find_at, is_dotted, unknown_value
from grmpipe.config.keys.path_table import ObjectTable
from grmpipe.config.keys.user_code import describe_code, format_value, note_owner

KEY = "algorithm.estimator"
ROUNDING = 1e-9  # rounding error allowed between sums of equal rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind:
    """A loss of the policy.

    function:  (Scored, AlgorithmSettings) -> PolicyLoss, see grmpipe/algorithm/losses.py.
    has_ratio: it weights tokens by r = pi_theta / pi_prox. Without r it is right only while the policy is pi_prox.
    by_token:  no token's loss depends on other tokens. If one does, all samples of a rollout are in one micro-batch.
    by_step:   the loss to take where advantages differ within a rollout, since this one averages them; empty: itself.
    """

    function: Loss
    has_ratio: bool = True
    by_token: bool = False
    by_step: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorKind:
    """An estimator of advantages.

    function:     need=group: (Group, AlgorithmSettings) -> [N] for each sibling; need=batch: (list of
                  groups, AlgorithmSettings) -> the same for each group, see grmpipe/algorithm/advantages.py.
    need:         what it needs at once. If it needs a group, it is called group by group, and the samples are trained
                  while the rest of the batch is still rolling out.
    compares:     what says that a group has no gradient: "outcomes": all siblings have the same; "advantages": the
                  estimator itself gives only zeros. An estimator that needs a batch, or a critic's values, can't say so
                  of a group alone: with "advantages" each of its groups counts as having one.
    by_step:      it credits steps or turns, so that advantages differ within a rollout.
    by_token:     a KL in the reward is charged per token, so that no token pays for an earlier one; otherwise per step.
    needs_critic: it uses a critic's values.
    targets:      (Rewards, AlgorithmSettings) -> ([N] advantages, [N] returns): the returns are those that
                  the critic learns, if there is one.
    uses_pass_k:  it compares subsets of `algorithm.pass_at_k.k` siblings, so a group must have several.
    by_log_ratio: it weighs rollouts by their log-ratio to the reference itself (`Rewards.log_ratio`), so that no KL is
                  subtracted from the rewards; `algorithm.kl_coefficient` is its beta.
    """

    function: EstimateGroup | EstimateBatch
    need: Literal["group", "batch"] = "group"
    compares: Literal["outcomes", "advantages"] = "advantages"
    by_step: bool = False
    by_token: bool = False
    needs_critic: bool = False
    targets: Targets = compute_gae
    uses_pass_k: bool = False
    by_log_ratio: bool = False

    @property
    def has_zero_groups(self) -> bool:
        """Whether a group can be seen to have no gradient, whatever is in its batch."""
        return self.compares == "outcomes" or (self.need == "group" and not self.needs_critic)

    def estimate(self, groups: Sequence[Group], algorithm: AlgorithmSettings) -> Advantages:
        """The advantages of several groups."""
        if self.need == "batch":
            return cast(EstimateBatch, self.function)(groups, algorithm)
        of_group = cast(EstimateGroup, self.function)
        return [of_group(group, algorithm) for group in groups]


LOSSES: dict[str, LossKind] = {
    "ppo_clip": LossKind(function=ppo_clip, by_token=True),
    "dual_clip": LossKind(function=dual_clip, by_token=True),
    "gspo": LossKind(function=gspo, by_step="gspo_token"),
    "gspo_token": LossKind(function=gspo_token),
    "cispo": LossKind(function=cispo, by_token=True),
    "sapo": LossKind(function=sapo, by_token=True),
    "policy_gradient": LossKind(function=policy_gradient, has_ratio=False, by_token=True),
}

ESTIMATORS: dict[str, EstimatorKind] = {
    "grpo": EstimatorKind(function=grpo, compares="outcomes"),
    "dr_grpo": EstimatorKind(function=dr_grpo, compares="outcomes"),
    "rloo": EstimatorKind(function=rloo, compares="outcomes"),
    "reinforce_pp": EstimatorKind(function=reinforce_pp, need="batch", by_token=True),
    "reinforce_pp_baseline": EstimatorKind(function=reinforce_pp_baseline, need="batch", compares="outcomes"),
    "pass_at_k": EstimatorKind(function=pass_at_k, uses_pass_k=True),
    "raft": EstimatorKind(function=raft),
    "dpo": EstimatorKind(function=dpo, by_log_ratio=True),
    "process": EstimatorKind(function=process, by_step=True),
    "process_grpo": EstimatorKind(function=process_grpo, by_step=True),
    "gae": EstimatorKind(function=gae_whitened, need="batch", by_token=True, needs_critic=True),
    "gae_raw": EstimatorKind(function=gae_raw, by_token=True, needs_critic=True),
    "gigpo": EstimatorKind(function=gigpo, by_step=True),
    "mt_grpo": EstimatorKind(function=mt_grpo, by_step=True),
    "gae_turns": EstimatorKind(
        function=gae_turns,
        need="batch",
        by_step=True,
        by_token=True,
        needs_critic=True,
        targets=gae_of_turns,
    ),
}

# The policy that the ratio of the loss is taken against.
PROXIMALS: ObjectTable[Proximal] = ObjectTable(
    "algorithm.proximal",
    {"recomputed": take_recomputed, "interpolated": interpolate_by_age, "sampler": sampler},
    arguments=("logprobs",),
)
CORRECTIONS: ObjectTable[Correction] = ObjectTable(
    "algorithm.correction",
    {
        "none": apply_no_correction,
        "tis": truncate_importance,
        "sequence_tis": truncate_sequence,
        "sequence_mis": mask_sequence,
        "icepop": icepop,
        "decoupled": mask_tokens,
    },
    arguments=("drift", "algorithm"),
)
REJECTIONS: ObjectTable[Rejection] = ObjectTable(
    "algorithm.rejections",
    {"geometric": geometric, "veto": veto, "off_policy": off_policy},
    arguments=("drift", "algorithm"),
)
KL_ESTIMATORS: ObjectTable[Kl] = ObjectTable(
    "algorithm.kl_estimator",
    {"k1": k1_kl, "k2": k2_kl, "k3": k3_kl, "k3_unbiased": k3_kl},
    arguments=("logprobs_T", "reference_logprobs_T"),
)
KL_WEIGHTED = frozenset({"k3_unbiased"})  # in the loss by pi_theta / mu, through which its gradient passes too
KL_WITHOUT_GRADIENT = frozenset({"k1"})  # in the loss the mean of their gradients is 0
AGGREGATIONS: ObjectTable[Aggregation] = ObjectTable(
    "algorithm.aggregation",
    {"token_mean": TOKEN_MEAN, "sequence_mean": SEQUENCE_MEAN, "constant": CONSTANT},
    kind=Aggregation,
)
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
    kind = found if isinstance(found, make) else make(function=cast(Any, found))
    check_callable(kind.function, name, key, arguments)
    return kind


# -- estimates -------------------------------------------------------------------------------------------------------


def all_advantages_zero(group: Group, algorithm: AlgorithmSettings) -> bool:
    """Whether the group has no gradient, as far as it can be seen without the rest of its batch."""
    kind = estimator_named(algorithm.estimator, KEY)
    if len(group) < 2 or not any(rewards.is_trained for rewards in group):
        return True
    if not kind.has_zero_groups:
        return False
    if kind.compares == "outcomes":
        return float(np.ptp(outcomes(group))) <= ROUNDING
    (found,) = kind.estimate([group], algorithm)
    trained = [advantages_N for rewards, advantages_N in zip(group, found, strict=True) if rewards.is_trained]
    return all(float(np.abs(advantages_N).max(initial=0.0)) <= ROUNDING for advantages_N in trained)


def is_per_token(found: object, groups: Sequence[Group]) -> bool:
    """Whether an estimator gave a number for each sampled token, a finite one if the rewards are."""
    finite = all(math.isfinite(value) for group in groups for rewards in group for value in rewards.values_K)
    wanted = [[(rewards.num_tokens,) for rewards in group] for group in groups]
    try:
        arrays = [[np.asarray(advantages_N) for advantages_N in group] for group in found]  # type: ignore[attr-defined]
        return [[each.shape for each in group] for group in arrays] == wanted and (
            not finite or all(bool(np.isfinite(each).all()) for group in arrays for each in group)
        )
    except (TypeError, ValueError):
        return False


def estimate(groups: Sequence[Group], algorithm: AlgorithmSettings) -> Advantages:
    """Advantages by group, by sibling, per sampled token. A group needs at least two siblings to compare.

    Raises ValueError for a group of one, and if the estimator doesn't return a finite number per token.
    """
    for group in groups:
        if len(group) < 2:
            raise ValueError(
                f"min_valid_siblings: a baseline needs 2 rewards or more, got {len(group)}; drop the group"
            )
    kind = estimator_named(algorithm.estimator, KEY)
    owner = f"{KEY}: {describe_code(kind.function)}"
    with note_owner(owner):
        found = kind.estimate(groups, algorithm)
    if not is_per_token(found, groups):
        raise ValueError(
            f"{owner} returned {format_value(found)}; it must give for each group, and in it for each sibling, an "
            f"array with "
            "a finite number for each sampled token"
        )
    return [[np.asarray(advantages_N) for advantages_N in group] for group in found]
