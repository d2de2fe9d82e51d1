"""What AlgorithmConfig refuses, each by its key and with a way out."""

from __future__ import annotations

import dataclasses
import re

import pytest

from grmpipe.algorithm.parts import CORRECTIONS
from grmpipe.algorithm.settings import PassAtK, ReplayBufferConfig
from grmpipe.config.io.yaml_io import from_values
from grmpipe.config.run_config import ConfigError
from grmpipe.config.train import (
    AlgorithmConfig,
    check_interpolated,
    check_log_ratio,
    check_pass_k,
    check_replay_buffer,
    check_spread,
)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("estimator", "a2c"),
        ("loss", "hinge"),
        ("proximal", "nobody"),
        ("correction", "twice"),
        ("aggregation", "median"),
        ("kl_estimator", "k4"),
        ("rejections", ["geometric", "veto", "unlucky"]),
        ("clip_low", 0.0),
        ("gamma", 1.5),
        ("weight_half_std", 0.0),
        ("dynamic_sampling_batches", -1.0),
        ("updates_per_batch", 0),
        ("tis.cap", -1.0),
        ("sequence.cap", float("nan")),
        ("icepop.low", 0.0),
        ("icepop.high", 0.5),
        ("geometric.high", 0.99),
        ("veto.below", 0.0),
        ("dual_clip.ratio", 1.0),
        ("gae_turns.high_level_gamma", 1.5),
        ("gigpo.step_advantage_w", -1.0),
        ("mt_grpo.turn_advantage_coef", -1.0),
        ("pass_at_k.k", 0),
        ("overlong_buffer.share", 1.1),
        ("overlong_buffer.penalty", -1.0),
        ("replay_buffer.groups", -1),
    ],
)
def test_a_bad_value_is_named_by_its_key(key: str, value: object) -> None:
    block, _, leaf = key.rpartition(".")
    usual = dataclasses.asdict(AlgorithmConfig())
    given = {**usual, block: {**usual[block], leaf: value}} if block else {**usual, leaf: value}
    with pytest.raises(ConfigError, match=rf"^algorithm\.{re.escape(key)}: "):
        from_values(AlgorithmConfig, given, "algorithm.")


@pytest.mark.parametrize("estimator", ["gae", "gae_raw", "gae_turns", "reinforce_pp"])
def test_groups_of_an_estimator_that_compares_no_siblings_are_not_replaced(estimator: str) -> None:
    with pytest.raises(ValueError, match=r"^dynamic_sampling_batches: .*algorithm\.dynamic_sampling_batches=0"):
        AlgorithmConfig(estimator=estimator, dynamic_sampling_batches=3)
    AlgorithmConfig(estimator="reinforce_pp_baseline", dynamic_sampling_batches=3)


def test_a_kl_without_gradient_is_refused_in_the_loss_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"^kl_estimator: .*kl_estimator=k2 .*algorithm\.kl_in_reward=true"):
        AlgorithmConfig(kl_coefficient=0.1, kl_estimator="k1")
    AlgorithmConfig(kl_coefficient=0.1, kl_estimator="k1", kl_in_reward=True)
    AlgorithmConfig(kl_estimator="k1")


@pytest.mark.parametrize("correction", [name for name in CORRECTIONS if name != "none"])
def test_a_weight_on_top_of_a_ratio_against_the_sampler_is_refused(correction: str) -> None:
    with pytest.raises(ValueError, match=r"twice.*algorithm\.correction=none"):
        AlgorithmConfig(proximal="sampler", correction=correction)
    AlgorithmConfig(proximal="sampler", correction="none", rejections=["geometric", "veto", "off_policy"])


@pytest.mark.parametrize("proximal", ["sampler", "interpolated"])
def test_a_loss_without_a_ratio_leaves_all_of_it_to_the_weight(proximal: str) -> None:
    with pytest.raises(ValueError, match=r"^proximal: .*algorithm\.proximal=recomputed"):
        AlgorithmConfig(loss="policy_gradient", proximal=proximal, correction="none")


def test_a_loss_without_a_ratio_takes_one_update_a_batch() -> None:
    with pytest.raises(ValueError, match=r"^updates_per_batch: .*algorithm\.updates_per_batch=1"):
        AlgorithmConfig(loss="policy_gradient", updates_per_batch=2)


def test_k_is_below_the_group_size() -> None:
    with pytest.raises(ValueError, match=r"^algorithm\.pass_at_k\.k: .*type algorithm\.pass_at_k\.k=2"):
        check_pass_k(AlgorithmConfig(estimator="pass_at_k", pass_at_k=PassAtK(k=4)), 4)
    check_pass_k(AlgorithmConfig(estimator="pass_at_k", pass_at_k=PassAtK(k=3)), 4)
    check_pass_k(AlgorithmConfig(estimator="grpo", pass_at_k=PassAtK(k=9)), 4)


def test_a_replay_needs_staleness_and_a_correction() -> None:
    with pytest.raises(ValueError, match=r"^algorithm\.replay_buffer\.groups: .*train\.max_staleness=1"):
        check_replay_buffer(AlgorithmConfig(replay_buffer=ReplayBufferConfig(groups=2)), 0)
    with pytest.raises(ValueError, match=r"^algorithm\.replay_buffer\.groups: .*algorithm\.correction=tis"):
        check_replay_buffer(AlgorithmConfig(replay_buffer=ReplayBufferConfig(groups=2), correction="none"), 1)
    check_replay_buffer(AlgorithmConfig(replay_buffer=ReplayBufferConfig(groups=2)), 1)
    check_replay_buffer(
        AlgorithmConfig(replay_buffer=ReplayBufferConfig(groups=2), correction="none", proximal="sampler"), 1
    )
    check_replay_buffer(AlgorithmConfig(), 0)


def test_a_policy_between_sampler_and_current_needs_tokens_of_two_versions_ago() -> None:
    for max_staleness in (0, 1):
        with pytest.raises(ValueError, match=r"algorithm\.proximal: .*train\.max_staleness=2"):
            check_interpolated(AlgorithmConfig(proximal="interpolated"), max_staleness)
    check_interpolated(AlgorithmConfig(proximal="interpolated"), 2)
    check_interpolated(AlgorithmConfig(), 0)


@pytest.mark.parametrize(
    "keys", [{"kl_coefficient": 0.0}, {"kl_in_reward": False, "kl_estimator": "k2"}, {"loss": "ppo_clip"}]
)
def test_dpo_needs_a_reference_and_the_loss_that_it_weighs(keys: dict[str, object]) -> None:
    fits: dict[str, object] = {"loss": "policy_gradient", "aggregation": "constant", "kl_coefficient": 0.1}
    fits |= {"estimator": "dpo", "kl_estimator": "k1", "kl_in_reward": True}
    check_log_ratio(AlgorithmConfig(**fits))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^algorithm\.estimator: dpo weighs .* type algorithm=dpo"):
        check_log_ratio(AlgorithmConfig(**(fits | keys)))  # type: ignore[arg-type]


def test_one_judgement_has_no_spread_to_weigh_it_by() -> None:
    with pytest.raises(ValueError, match=r"^algorithm\.weight_half_std: .*judge\.num_judgements=4"):
        check_spread(AlgorithmConfig(weight_half_std=2.0), 1)
    check_spread(AlgorithmConfig(weight_half_std=2.0), 2)
    check_spread(AlgorithmConfig(), 1)
