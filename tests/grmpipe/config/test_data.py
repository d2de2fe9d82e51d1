"""Bad settings of data and rollouts end before anything starts, and name the key."""

from __future__ import annotations

from typing import Any

import pytest

from grmpipe.config.data import DataConfig, RolloutConfig
from grmpipe.config.judge import LabelConfig


def test_defaults_are_valid_and_the_held_out_set_may_be_left_out() -> None:
    assert DataConfig().path == "tiny://train"
    assert DataConfig(eval_path=None).eval_path is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eval_path", ""), ("num_prompts", 0), ("num_eval_prompts", 0), ("max_epochs", 0), ("columns", {}),
        ("columns", ["prompt"]), ("columns", {"prompt": 3}), ("columns", {"prompt": ""}),
    ],
)  # fmt: skip
def test_a_bad_value_is_an_error_that_names_its_key(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{key}"):
        DataConfig(**{key: value})


@pytest.mark.parametrize("ends", [3, [5, 0], [0], ["a", "b"], [0, True]])
def test_a_scale_of_labels_has_two_ends(ends: Any) -> None:
    with pytest.raises(ValueError, match=r"^score_range: must be two numbers.*data\.labels\.score_range=\[0, 5\]"):
        LabelConfig(score_range=ends)
    assert LabelConfig(score_range=[0, 5.5]).score_range == [0, 5.5]


def test_a_deadline_below_the_declared_speed_is_refused_with_the_key_to_type() -> None:
    with pytest.raises(ValueError, match=r"type rollout\.group_deadline_s=102\.4"):
        RolloutConfig(max_new_tokens=1024, min_tokens_per_s=10, group_deadline_s=60)
