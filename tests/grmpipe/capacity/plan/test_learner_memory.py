"""A learner rank's memory by task=plan, compared with its real memory, counted in fake tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import launch  # noqa: F401  registers the schema
from grmpipe.capacity.plan.memory import memory_parts
from grmpipe.capacity.plan.survey import survey_run
from grmpipe.config.run_config import RunConfig
from grmpipe.config.yaml_io import build

ROOT = Path(__file__).parents[4]
SCRIPT = Path(__file__).with_name("fake_learner_process.py")
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SHORT = "policy.shape.num_layers=4"
QWEN3_1_7B = ("policy.shape.hidden_size=2048", "policy.shape.intermediate_size=6144")


@pytest.mark.long  # test_footprint.py compares the formula with the same numbers, written down
@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        pytest.param("qwen3_one_gpu", (SHORT,), id="four layers of 0.6 B"),
        pytest.param("qwen3_one_gpu", (), id="0.6 B"),
        pytest.param("qwen3_one_gpu", QWEN3_1_7B, id="1.7 B"),
        pytest.param("qwen3_8b", (), id="8 B on 4 ranks"),
        pytest.param("qwen3_8b", ("train.micro_batch_tokens=2048", SHORT), id="the root"),
    ],
)
def test_a_plan_is_within_15_percent_of_what_the_learner_holds(
    recipe: str, overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no_cache"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "1 + 1?"}) + "\n")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = build(compose("config", [f"+experiment={recipe}", f"data.path={prompts}", *overrides]))
    survey = survey_run(config, lambda *_: None)
    parts = memory_parts(survey, "learner")
    state = sum(part.num_bytes for part in parts if part.kind != "other") / 1e9
    held = measured(config, survey.seating("learner").replicas)
    assert held["resting_gb"] == pytest.approx(state, rel=0.01), "weights, gradients, moments"
    assert sum(part.num_bytes for part in parts) / 1e9 == pytest.approx(held["peak_gb"], rel=0.15)


def measured(config: RunConfig, ranks: int) -> dict[str, float]:
    shape = config.policy.shape
    case = {
        "shape": {
            "num_hidden_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "vocab_size": shape.vocab_size,
            "tie_word_embeddings": shape.tied,
        },
        "ranks": ranks,
        "num_tokens": config.train.micro_batch_tokens,
    }
    command = [sys.executable, str(SCRIPT), json.dumps([case])]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    held: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return held
