"""The parts of an algorithm by name: where the function of each is, what others must know of it. Imports none of them.

A new one is a function, a row here, a YAML in conf/algorithm/ and a test. One of the user's own is named by its dotted
path: that of a function; of a LossKind or an EstimatorKind where the defaults below don't fit it; of an Aggregation.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from grmpipe.config.dotted_path import check_takes, found_at, is_dotted, unknown_value
from grmpipe.config.path_table import PathTable


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
    uses_pass_k:  it compares subsets of `algorithm.pass_k` siblings, so a group must have several.
    """

    function: str
    need: Literal["group", "batch"] = "group"
    compares: Literal["outcomes", "advantages"] = "advantages"
    by_step: bool = False
    by_token: bool = False
    needs_critic: bool = False
    targets: str = "grmpipe.algorithm.advantages.gae_of"
    uses_pass_k: bool = False

    @property
    def has_zero_groups(self) -> bool:
        """Whether a group can be seen to have no gradient, whatever is in its batch."""
        return self.compares == "outcomes" or (self.need == "group" and not self.needs_critic)


LOSSES: dict[str, LossKind] = {
    "ppo_clip": LossKind(function="grmpipe.algorithm.losses.ppo_clip", by_token=True),
    "dual_clip": LossKind(function="grmpipe.algorithm.losses.dual_clip", by_token=True),
    "gspo": LossKind(function="grmpipe.algorithm.losses.gspo", by_step="gspo_token"),
    "gspo_token": LossKind(function="grmpipe.algorithm.losses.gspo_token"),
    "cispo": LossKind(function="grmpipe.algorithm.losses.cispo", by_token=True),
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
    {"recomputed": "recomputed", "interpolated": "interpolated_by_age", "sampler": "sampler"},
)  # fmt: skip
CORRECTIONS = PathTable(
    "algorithm.correction", ("drift", "algorithm"), "grmpipe.algorithm.corrections",
    {
        "none": "uncorrected", "tis": "truncated_importance", "sequence_tis": "truncated_sequence",
        "sequence_mis": "masked_sequence", "icepop": "icepop", "decoupled": "decoupled",
    },
)  # fmt: skip
REJECTIONS = PathTable(
    "algorithm.rejections", ("drift", "algorithm"), "grmpipe.algorithm.corrections",
    {"geometric": "geometric", "veto": "veto", "off_policy": "off_policy"},
)  # fmt: skip
KL_ESTIMATORS = PathTable(
    "algorithm.kl_estimator", ("logprobs_T", "reference_logprobs_T"), "grmpipe.algorithm.losses",
    {"k1": "k1_kl", "k2": "k2_kl", "k3": "k3_kl"},
)  # fmt: skip
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
    found = found_at(name, key)
    kind = found if isinstance(found, make) else make(function=name)
    check_takes(kind.function, key, arguments)
    return kind
