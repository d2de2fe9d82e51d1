"""Compares grmpipe's losses with TRL's on the same log-probs, in float64: differences of value and gradient.

    python benchmarks/losses_of_trl.py runs/algorithms      # in an environment that also has trl

Calls TRL's own `GRPOTrainer._compute_loss` with log-probs instead of a model, and no trainer around it; and
`GKDTrainer.generalized_jsd_loss` on the logits of both models. Writes
runs/algorithms/trl.json, which `benchmarks/algorithms.py report` includes. Trains nothing.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from torch import Tensor
from trl.experimental.gkd import GKDTrainer

from grmpipe.algorithm.corrections import TokenLogprobs
from grmpipe.algorithm.distillation import divergence
from grmpipe.algorithm.objective import Objective
from grmpipe.algorithm.settings import DualClip, OffPolicy, Sapo
from grmpipe.config.train import AlgorithmConfig
from grmpipe.types import BatchTotals

MAX_NEW_TOKENS = 12
# grmpipe's keys -> TRL's arguments for the same. Clips are 0.2 and 0.28 unless stated.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ppo_clip, token_mean": ({}, {"loss_type": "dapo"}),
    "ppo_clip, sequence_mean": ({"aggregation": "sequence_mean"}, {"loss_type": "grpo"}),
    "ppo_clip, constant": ({"aggregation": "constant"}, {"loss_type": "dr_grpo"}),
    "dual_clip": ({"loss": "dual_clip", "dual_clip": DualClip(ratio=2.0)}, {"loss_type": "dapo", "delta": 2.0}),
    "gspo": (
        {"loss": "gspo", "aggregation": "sequence_mean"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "cispo": (
        {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.28},
        {"loss_type": "cispo", "epsilon_high": 1.28},
    ),
    "k3 in the loss": ({"kl_coefficient": 0.3}, {"loss_type": "dapo", "beta": 0.3}),
    "sapo": ({"loss": "sapo", "aggregation": "sequence_mean"}, {"loss_type": "sapo"}),
    "k3_unbiased in the loss, pi_old is mu": (
        {"kl_coefficient": 0.3, "kl_estimator": "k3_unbiased"},
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True},
    ),
    "off_policy rejection": (
        {"rejections": ["off_policy"], "off_policy": OffPolicy(delta=0.05)},
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.05},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B samples of up to L trained tokens, padded."""

    current_BL: Tensor
    old_BL: Tensor
    sampler_BL: Tensor
    reference_BL: Tensor
    mask_BL: Tensor
    advantages_B: Tensor


def make_batch(seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)

    def near(of_BL: Tensor, spread: float) -> Tensor:
        return of_BL + spread * torch.randn(of_BL.shape, generator=draw, dtype=torch.float64)

    current_BL = near(torch.full((8, MAX_NEW_TOKENS), -1.0, dtype=torch.float64), 0.3)
    lengths_B = torch.randint(1, MAX_NEW_TOKENS + 1, (8,), generator=draw)
    return Batch(
        current_BL=current_BL,
        old_BL=near(current_BL, 0.4),
        sampler_BL=near(current_BL, 0.4),
        reference_BL=near(current_BL, 0.4),
        mask_BL=(torch.arange(MAX_NEW_TOKENS) < lengths_B[:, None]).double(),
        advantages_B=torch.randn(8, generator=draw, dtype=torch.float64),
    )


def ours(batch: Batch, keys: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The loss and its gradient by the current log-probs."""
    algorithm = AlgorithmConfig(**{"clip_low": 0.2, "clip_high": 0.28, "correction": "none", **keys})
    trained_BL, lengths_B = batch.mask_BL > 0, batch.mask_BL.sum(1).long()
    current_BL = batch.current_BL.clone().requires_grad_()
    logprobs = TokenLogprobs(
        current_T=current_BL[trained_BL],
        entropy_T=torch.zeros(int(lengths_B.sum()), dtype=torch.float64),
        old_T=batch.old_BL[trained_BL],
        sampler_T=batch.sampler_BL[trained_BL],
        reference_T=batch.reference_BL[trained_BL] if algorithm.kl_coefficient > 0 else None,
        ages_T=torch.zeros(int(lengths_B.sum())),
    )
    advantages_T = batch.advantages_B.repeat_interleave(lengths_B)
    objective = Objective.of(algorithm)
    loss = objective.sum_loss(logprobs, advantages_T, torch.ones_like(advantages_T), lengths_B)
    totals = BatchTotals(
        num_loss_tokens=int(lengths_B.sum()), num_sequences=len(lengths_B), num_groups=1, oldest_version=0
    )
    aggregation = objective.aggregation
    value = loss.total / aggregation.denominator(totals, MAX_NEW_TOKENS)
    value.backward()
    assert current_BL.grad is not None
    return value.detach(), current_BL.grad


def trls(batch: Batch, keys: dict[str, Any]) -> tuple[Tensor, Tensor]:
    current_BL = batch.current_BL.clone().requires_grad_()
    settings = {
        "loss_type": "dapo", "delta": None, "importance_sampling_level": "token", "epsilon_low": 0.2,
        "epsilon_high": 0.28, "beta": 0.0, "off_policy_mask_threshold": None, "use_bias_correction_kl": False, **keys,
    }  # fmt: skip
    one_process = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    trainer = SimpleNamespace(
        **{key: value for key, value in settings.items() if key != "delta"},
        args=SimpleNamespace(
            delta=settings["delta"],
            use_bias_correction_kl=settings["use_bias_correction_kl"],
            sapo_temperature_pos=Sapo().temperature_pos,
            sapo_temperature_neg=Sapo().temperature_neg,
        ),
        accelerator=one_process,
        model=SimpleNamespace(training=False),
        max_completion_length=MAX_NEW_TOKENS,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask,
        _get_per_token_logps_and_entropies=lambda *_, **__: (current_BL, torch.zeros_like(current_BL), None),
    )
    ids_BL = torch.zeros_like(batch.mask_BL, dtype=torch.long)
    inputs = {
        "prompt_ids": ids_BL[:, :1],
        "prompt_mask": ids_BL[:, :1] + 1,
        "completion_ids": ids_BL,
        "completion_mask": batch.mask_BL,
        "advantages": batch.advantages_B,
        "old_per_token_logps": batch.old_BL,
        "sampling_per_token_logps": batch.sampler_BL,
        "ref_per_token_logps": batch.reference_BL,
        "num_items_in_batch": batch.mask_BL.sum(),
    }
    value = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    value.backward()
    assert current_BL.grad is not None
    return value.detach(), current_BL.grad


def compare() -> dict[str, float]:
    """Case -> the largest difference of value or gradient over 20 batches."""
    found: dict[str, float] = {}
    for name, (our_keys, their_keys) in CASES.items():
        gaps = []
        for seed in range(20):
            batch = make_batch(seed)
            if "pi_old is mu" in name:
                batch = replace(batch, sampler_BL=batch.old_BL)
            pairs = zip(ours(batch, our_keys), trls(batch, their_keys), strict=True)
            gaps += [float((mine - theirs).abs().max()) for mine, theirs in pairs]
        found[name] = max(gaps)
    return found | {f"distillation, beta={beta:g}": compare_distillation(beta) for beta in (0.0, 0.5, 1.0)}


def compare_distillation(beta: float) -> float:
    """The largest difference of the mean divergence over the whole vocabulary, or of its gradient by the logits."""
    gaps = []
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        own_BLV, teacher_BLV = (2 * torch.randn(4, 9, 30, generator=draw, dtype=torch.float64) for _ in range(2))
        labels_BL = torch.where(torch.rand(4, 9, generator=draw) < 0.7, 1, -100)
        trained_BL, found = labels_BL != -100, []
        for side in ("grmpipe", "trl"):
            logits_BLV = own_BLV.clone().requires_grad_()
            if side == "trl":
                value = GKDTrainer.generalized_jsd_loss(
                    logits_BLV, teacher_BLV, labels_BL, beta, num_items_in_batch=trained_BL.sum()
                )
            else:
                value = divergence(
                    logits_BLV.log_softmax(-1)[trained_BL], teacher_BLV.log_softmax(-1)[trained_BL], beta
                ).mean()
            value.backward()
            found.append((value.detach(), logits_BLV.grad))
        gaps += [float((mine - theirs).abs().max()) for mine, theirs in zip(*found, strict=True)]
    return max(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the results of benchmarks/algorithms.py")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    found = {"trl": trl.__version__, "largest_difference": compare()}
    (folder / "trl.json").write_text(json.dumps(found), encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
