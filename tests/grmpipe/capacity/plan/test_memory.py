"""A learner rank's memory by task=plan, compared with its real memory, counted in fake tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from learner_cases import ROOT, LearnerCase, measured, planned_gb

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.capacity.plan.memory import engine_memory, experts_on_their_way, list_memory, remedy
from grmpipe.capacity.plan.run_facts import RunFacts, collect_facts
from grmpipe.config.io.yaml_io import build
from grmpipe.models.lm.footprint import footprint_of_shape
from grmpipe.models.settings import ModelShape

FULL: dict[str, Any] = {"activation_checkpointing": "full"}
OFFLOADED = {**FULL, "activation_offload": True}
ALL = {**OFFLOADED, "optimizer": {"offload": True}}


def check(case: LearnerCase, most_gb: float) -> None:
    held = measured(case)
    assert planned_gb(case) == pytest.approx(held["peak_gb"], rel=0.08)
    assert held["peak_gb"] <= most_gb


def test_a_plan_is_within_8_percent_of_what_a_learner_of_two_layers_holds() -> None:
    check(LearnerCase(model="Qwen3-8B", ranks=4, num_tokens=8192, train=ALL, layers=2), 10)


@pytest.mark.long
def test_the_plan_knows_that_a_reference_is_held_in_the_dtype_it_computes_in() -> None:
    check(LearnerCase(model="Qwen3-8B", ranks=4, num_tokens=8192, train=ALL, layers=2, kl=True), 10)


@pytest.mark.long
@pytest.mark.parametrize(
    "train",
    [
        {"activation_checkpointing": "none"},
        {"activation_checkpointing": "selective"},
        FULL,
        OFFLOADED,
    ],
)
@pytest.mark.parametrize("model", ["Qwen3-1.7B", "Qwen3-8B", "Qwen3-30B-A3B"])
def test_the_plan_knows_every_option(model: str, train: dict[str, Any]) -> None:
    check(LearnerCase(model=model, ranks=4, num_tokens=16384, train=train, layers=4), 40)


@pytest.mark.long
@pytest.mark.parametrize("ep", [2, 4, 8])
def test_the_plan_knows_that_ranks_divide_the_experts_of_a_layer(ep: int) -> None:
    train = {"activation_checkpointing": "none", "parallel": {"ep": ep}}
    check(LearnerCase(model="Qwen3-30B-A3B", ranks=8, num_tokens=8192, train=train, layers=4), 20)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "ranks", "num_tokens", "most_gb"),
    [
        ("Qwen3-8B", 4, 32768, 45),
        ("Qwen3-32B", 8, 16384, 75),
        ("Qwen3-30B-A3B", 8, 8192, 75),
        ("Llama-3-70B", 32, 16384, 75),
    ],
)
def test_the_plan_is_right_for_models_that_fit_80_gb(model: str, ranks: int, num_tokens: int, most_gb: float) -> None:
    check(LearnerCase(model=model, ranks=ranks, num_tokens=num_tokens, train=ALL), most_gb)


@pytest.fixture
def facts_with(tmp_path: Path, no_hub: None) -> Any:
    """The facts of a recipe with overrides."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "1 + 1?"}) + "\n")

    def facts_with(recipe: str, *overrides: str) -> RunFacts:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            config = build(compose("config", [f"+experiment={recipe}", f"data.path={prompts}", *overrides]))
        return collect_facts(config)

    return facts_with


def learner_gb(facts: RunFacts) -> float:
    return sum(use.num_bytes for use in list_memory(facts, "learner")) / 1e9


def test_the_recipe_of_8_b_fits_twice_its_tokens_into_45_gb(facts_with: Any) -> None:
    assert learner_gb(facts_with("qwen3_8b", "train.micro_batch_tokens=32768")) < 45


def test_large_weights_of_an_engine_on_cores_are_held_twice_up_to_a_gibibyte(facts_with: Any) -> None:
    """The embedded engine packs them, see fused_decoder.py; smaller matrices than 1 MiB it doesn't."""
    what, of_8_b = "weights once more, arranged for products", ["policy=qwen3_8b", "policy.dtype=float32"]
    large = {use.what: use.num_bytes for use in list_memory(facts_with("quickstart", *of_8_b), "policy")}
    small = [use.what for use in list_memory(facts_with("quickstart"), "policy")]
    assert large[what] == 1 << 30 and what not in small


@pytest.mark.parametrize(("dtype", "num_bytes"), [("bfloat16", 2), ("float32", 4)])
def test_a_reference_takes_the_bytes_of_its_dtype(facts_with: Any, dtype: str, num_bytes: int) -> None:
    facts = facts_with("qwen3_8b", "algorithm.kl_coefficient=0.1", f"train.dtype={dtype}")
    footprint = facts.models["policy"].footprint
    held = {use.what: use.num_bytes for use in list_memory(facts, "learner")}
    assert held["weights of the reference, over 4 ranks"] == num_bytes * footprint.num_parameters // 4


def test_each_memory_option_lowers_the_plan_and_is_advised_until_it_is_on(facts_with: Any) -> None:
    found, advised = [], []
    off = ["train.activation_checkpointing=none", "train.activation_offload=false", "train.optimizer.offload=false"]
    on = ["train.activation_checkpointing=full", "train.activation_offload=true", "train.optimizer.offload=true"]
    for number in range(len(on) + 1):
        facts = facts_with("qwen3_8b", "train.micro_batch_tokens=32768", *on[:number], *off[number:])
        found.append(learner_gb(facts))
        advised.append(remedy({"learner"}, facts))
    assert sorted(found, reverse=True) == found and len(set(found)) == len(found)
    for number, text in enumerate(advised):
        assert all((option in text) == (place >= number) for place, option in enumerate(on)), text


QWEN3_30B_A3B = ModelShape(
    num_layers=48, hidden_size=2048, intermediate_size=6144, num_heads=32, num_kv_heads=4, head_dim=128,
    vocab_size=151936, context_tokens=40960, num_experts=128, experts_per_token=8, moe_intermediate_size=768,
)  # fmt: skip
QWEN3_235B_A22B = ModelShape(
    num_layers=94, hidden_size=4096, intermediate_size=12288, num_heads=64, num_kv_heads=4, head_dim=128,
    vocab_size=151936, context_tokens=40960, num_experts=128, experts_per_token=8, moe_intermediate_size=1536,
)  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "options", "waiting_gb"),
    [
        (QWEN3_30B_A3B, [], 0.0),  # 0.8 GB of up and gate come in one bucket of 1 GiB
        (QWEN3_30B_A3B, ["sync.bucket_mb=256"], 128 * 3 * 2048 * 768 * 2 / 1e9),
        (QWEN3_235B_A22B, [], 128 * 3 * 4096 * 1536 * 2 / 1e9),
        (QWEN3_235B_A22B, ["policy.engine=sglang"], 0.0),
        (QWEN3_235B_A22B, ["+engine.vllm.options.enable_expert_parallel=true"], 0.0),
        (QWEN3_235B_A22B, ["engine.vllm.quantization=fp8"], 0.0),
    ],
)
def test_experts_of_a_layer_that_come_in_several_buckets_wait_on_the_engines_gpus(
    facts_with: Any, shape: ModelShape, options: list[str], waiting_gb: float
) -> None:
    facts = facts_with("qwen3_8b", *options)
    served = replace(facts.roles.served["policy"], num_gpus=8)
    pool, footprint = facts.pool("policy"), footprint_of_shape(shape)
    waiting = experts_on_their_way(served, footprint, 8, pool)
    assert sum(use.num_bytes for use in waiting) / 1e9 == pytest.approx(waiting_gb)
    uses = engine_memory(served, facts.models["policy"], footprint, 8, pool)
    assert [use for use in uses if use in waiting] == waiting
    assert not experts_on_their_way(replace(served, learner=None), footprint, 8, pool), "nothing is pushed to it"
