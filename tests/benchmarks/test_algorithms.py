"""The benchmark of algorithms: its rows are real, its report has the runs. Measures nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.algorithm import losses
from grmpipe.algorithm.parts import CORRECTIONS, ESTIMATORS, LOSSES, REJECTIONS, estimate
from grmpipe.algorithm.rewards import Rewards
from grmpipe.config.io.yaml_io import build
from grmpipe.config.train import AlgorithmConfig

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import algorithms  # noqa: E402


def result(row: str, seed: int, after: float) -> algorithms.Result:
    return algorithms.Result(
        row=row, seed=seed, before=0.25, after=after, after_greedy=0.5, grm_score=7.0, step_s=1.0 + seed, learner_s=0.5,
        clip_share=0.125, steps=24, dropped={"zero_advantage": 3} if seed else {}, load=2.0,
    )  # fmt: skip


@pytest.mark.long
def test_every_row_composes_and_all_names_are_among_them() -> None:
    """All except those that equal others with one reward per rollout, or with whitening."""
    used: dict[str, set[str]] = {"estimator": set(), "loss": set(), "correction": set(), "rejections": set()}
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for row in algorithms.ROWS:
            algorithm = build(compose("config", [*algorithms.BUDGET, *row.overrides])).algorithm
            for key, names in used.items():
                value = getattr(algorithm, key)
                names |= {value} if isinstance(value, str) else set(value)
    assert used["estimator"] == set(ESTIMATORS) - {
        "process",
        "process_grpo",
        "gae_raw",
        "gigpo",
        "mt_grpo",
        "gae_turns",
    }
    assert used["loss"] == set(LOSSES) - {"gspo_token"}
    assert used["correction"] == set(CORRECTIONS)
    assert used["rejections"] == set(REJECTIONS)


def test_estimators_that_the_table_leaves_out_equal_grpo_where_a_rollout_has_one_reward() -> None:
    group = [Rewards(num_tokens=n, ends_K=(n,), values_K=(value,)) for n, value in ((3, 0.1), (5, 0.9), (2, 0.4))]
    grpo = estimate([group], AlgorithmConfig(estimator="grpo"))
    for name in ("process", "process_grpo", "gigpo", "mt_grpo"):
        for one, other in zip(estimate([group], AlgorithmConfig(estimator=name))[0], grpo[0], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)
    torch.testing.assert_close(gradient("gspo", grpo[0]), gradient("gspo_token", grpo[0]), rtol=0, atol=1e-15)


def gradient(loss: str, advantages_G: list[np.ndarray]) -> torch.Tensor:
    lengths_S = torch.tensor([len(advantages_N) for advantages_N in advantages_G])
    logprobs_T = torch.linspace(-2, -0.5, int(lengths_S.sum()), dtype=torch.float64, requires_grad=True)
    scored = losses.Scored(
        logprobs_T=logprobs_T,
        proximal_T=logprobs_T.detach() - 0.0002,
        advantages_T=torch.tensor(np.concatenate(advantages_G)),
        loss_mask_T=torch.ones_like(logprobs_T),
        sequence_lengths_S=lengths_S,
    )
    loss_T = LOSSES[loss].function(scored, AlgorithmConfig(loss=loss, clip_low=3e-4, clip_high=4e-4)).loss_T
    weights_T = losses.by_sequence(scored.loss_mask_T, lengths_S)
    return torch.autograd.grad((weights_T * loss_T).sum(), logprobs_T)[0]


def test_no_two_rows_have_a_name_in_common() -> None:
    assert len({row.name for row in algorithms.ROWS}) == len(algorithms.ROWS)


def test_the_report_tells_each_seed_and_nothing_of_what_was_not_run() -> None:
    ran = [result("grpo x gspo", 1, 0.75), result("grpo x gspo", 0, 0.5), result("stale: icepop", 0, 0.5)]
    lines = algorithms.report(ran, ["## TRL", ""])
    assert "| grpo |  |  | 0.500, 0.750 |  |  |  | 0.625 |" in lines
    assert "| icepop | 0.500 | 0.500 | 7.00 | 1.00 |" in lines
    assert any("grpo x gspo (seed 1): {'zero_advantage': 3}" in line for line in lines)
    assert not any("veto" in line or line.startswith("## Algorithms as") for line in lines)
    assert lines[-1] == "## TRL"


def test_the_noise_is_that_of_one_run_over_pairs_of_seeds() -> None:
    pairs = {"grpo x gspo": (0.5, 0.7), "rloo x gspo": (0.6, 0.6)}
    ran = [result(row, seed, after) for row, afters in pairs.items() for seed, after in enumerate(afters)]
    assert algorithms.spread_of_seeds(ran, lambda one: one.after) == pytest.approx(0.1)  # sqrt((0.04 / 2 + 0) / 2)


def test_a_row_that_was_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def run(row: algorithms.Row, seed: int, folder: Path) -> algorithms.Result:
        asked.append((row.name, seed))
        return result(row.name, seed, 0.5)

    monkeypatch.setattr(algorithms, "run", run)
    one, other = "grpo x ppo_clip", "rloo x ppo_clip"
    algorithms.run_missing(tmp_path, [one], [0])
    algorithms.run_missing(tmp_path, [one, other], [0, 1])
    assert asked == [(one, 0), (other, 0), (one, 1), (other, 1)]
    assert len(algorithms.results_in(tmp_path)) == 4
    algorithms.run_missing(tmp_path, [one], [2], minutes=-1)
    assert len(asked) == 4
    with pytest.raises(SystemExit, match="no such rows: sarsa"):
        algorithms.run_missing(tmp_path, ["sarsa"], [0])
