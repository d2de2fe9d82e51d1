"""Settings of an evaluation: what can't be counted is refused by its key."""

from __future__ import annotations

from typing import Any

import pytest

from grmpipe.config.task_settings import EvaluateConfig


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"what": "policies"}, r"^what: unknown value 'policies'; known: judge, policy, both"),
        ({"prompts": "file.jsonl"}, r"^prompts: expected files by name.*'evaluate\.prompts=\{mine: file\.jsonl\}'"),
        ({"prompts": {"final": "a.jsonl"}}, r"^prompts\.final: a name"),
        ({"prompts": {"x y": "a.jsonl"}}, r"^prompts\.x y: a name"),
        ({"prompts": {"x": 3}}, r"^prompts\.x: expected a \.jsonl"),
        ({"num_samples": 0}, r"^num_samples"),
        ({"pass_k": [4, 1]}, r"^pass_k: must be numbers from 1 on"),
        ({"num_samples": 2, "pass_k": [1, 4]}, r"^pass_k: pass@4 .* type evaluate\.num_samples=4"),
        ({"temperature": -1.0}, r"^temperature"),
        ({"temperature": 0.0}, r"^temperature: at 0 all samples .* type evaluate\.num_samples=1"),
    ],
)
def test_evaluations_with_impossible_numbers_of_samples_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        EvaluateConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "num_samples", "pass_k"),
    [
        ({}, 4, (1, 4)),
        ({"num_samples": 8}, 8, (1, 8)),
        ({"num_samples": 8, "pass_k": [2, 4]}, 8, (2, 4)),
        ({"pass_k": [1, 16]}, 16, (1, 16)),
        ({"num_samples": 1, "temperature": 0.0}, 1, (1,)),
    ],
)
def test_samples_and_ks_follow_from_each_other(
    settings: dict[str, Any], num_samples: int, pass_k: tuple[int, ...]
) -> None:
    config = EvaluateConfig(**settings)
    assert config.samples(4) == num_samples
    assert config.pass_ks(num_samples) == pass_k


def test_a_training_run_draws_one_sample_unless_more_are_asked_for() -> None:
    assert EvaluateConfig().samples(1) == 1
    assert EvaluateConfig(num_samples=3).samples(1) == EvaluateConfig(pass_k=[3]).samples(1) == 3
