"""A learner of some model, on some ranks, with some options: what task=plan says it holds, and what it does hold.

Used by test_memory.py and benchmarks/learner_memory.py. Starts one process per case; needs no weights, no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from grmpipe.capacity.plan.memory import learner_memory
from grmpipe.config.io.yaml_io import build_config
from grmpipe.models.lm.footprint import read_footprint

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "grmpipe" / "capacity" / "plan" / "fake_learner_process.py"
QWEN3 = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 1 << 18}
SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {**QWEN3, **dict(zip(SIZES, (28, 1024, 3072, 16, 8), strict=True)), "tie_word_embeddings": True},
    "Qwen3-1.7B": {**QWEN3, **dict(zip(SIZES, (28, 2048, 6144, 16, 8), strict=True)), "tie_word_embeddings": True},
    "Qwen3-8B": {**QWEN3, **dict(zip(SIZES, (36, 4096, 12288, 32, 8), strict=True))},
    "Qwen3-32B": {**QWEN3, **dict(zip(SIZES, (64, 5120, 25600, 64, 8), strict=True))},
    "Qwen3-30B-A3B": {
        **QWEN3, **dict(zip(SIZES, (48, 2048, 6144, 32, 4), strict=True)), "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    },
    "Llama-3-70B": {
        **dict(zip(SIZES, (80, 8192, 28672, 64, 8), strict=True)), "model_type": "llama", "vocab_size": 128256,
        "max_position_embeddings": 1 << 18,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LearnerCase:
    """`num_tokens`: of a micro-batch, on each rank. `train`: other settings of train. `layers`: fewer than it has.
    `kl`: with a KL to a reference in the loss.
    """

    model: str
    ranks: int
    num_tokens: int
    train: dict[str, Any] = field(default_factory=dict)
    layers: int = 0
    kl: bool = False

    @property
    def algorithm(self) -> dict[str, Any]:
        return {"kl_coefficient": 0.1 if self.kl else 0.0}

    @property
    def config(self) -> dict[str, Any]:
        """As in config.json."""
        whole = {"tie_word_embeddings": False, **MODELS[self.model]}
        return whole | ({"num_hidden_layers": self.layers} if self.layers else {})


def planned_gb(case: LearnerCase) -> float:
    """The most memory of a rank, by task=plan."""
    train = {"dtype": "bfloat16", "micro_batch_tokens": case.num_tokens, **case.train}
    with tempfile.TemporaryDirectory() as path:
        AutoConfig.for_model(**case.config).save_pretrained(path)
        footprint = read_footprint(path)
    parts = learner_memory(build_config({"train": train, "algorithm": case.algorithm}), footprint, case.ranks)
    return sum(part.num_bytes for part in parts) / 1e9


def measured(case: LearnerCase) -> dict[str, float]:
    """What `measure` of fake_learner_process.py returns."""
    cp = case.train.get("parallel", {}).get("cp", 1)
    asked = {
        "model": case.config, "ranks": case.ranks, "num_tokens": case.num_tokens * cp, "train": case.train,
        "algorithm": case.algorithm,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps([asked])],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    held: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return held
