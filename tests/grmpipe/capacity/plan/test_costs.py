"""Costs of a planned run: what adapters, pushes and memory options cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.capacity.cost import JOINED_S, TENSOR_S, LearnerSpeed, sync_time_s
from grmpipe.capacity.plan.costs import count_push_bytes, estimate_learner, measure_push, predict_pause_s, push_s
from grmpipe.capacity.plan.run_facts import RunFacts, collect_facts
from grmpipe.config.io.yaml_io import build
from grmpipe.config.run_config import RunConfig
from grmpipe.models.lm.footprint import footprint_of_shape
from grmpipe.models.settings import ModelShape
from grmpipe.scheduler.devices import DEVICES

ROOT = Path(__file__).parents[4]


def composed(*overrides: str) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(compose("config", ["+experiment=quickstart", *overrides]))


def facts_with(*overrides: str) -> RunFacts:
    return collect_facts(composed(*overrides))


def learner(facts: RunFacts) -> LearnerSpeed:
    return estimate_learner("policy", facts, facts.describe_seats("learner"))


def test_adapters_save_a_learner_the_gradients_of_frozen_weights() -> None:
    adapters, whole = (
        learner(facts_with("policy.lora.rank=1", "policy.lora.target_modules=[q_proj]")),
        learner(facts_with()),
    )
    assert 4 / 6 < adapters.token_s / whole.token_s < 1, "activations are read as before"
    assert adapters.step_s < 0.01 * whole.step_s


def test_a_push_of_adapters_takes_their_bytes_alone() -> None:
    merged, alone = (
        count_push_bytes("policy", facts_with("policy.lora.rank=8", f"policy.lora.sync={sync}"))
        for sync in ("merged", "adapters")
    )
    footprint = facts_with().models["policy"].footprint
    assert footprint is not None
    assert merged == 1_290_240, "as each push of docs/lora.md"
    assert alone == 4 * footprint.adapter_parameters(8, ()) < merged


def shape_of(name: str) -> ModelShape:
    return ModelShape(**yaml.safe_load((ROOT / f"conf/policy/{name}.yaml").read_text(encoding="utf-8"))["shape"])


QWEN3_8B = footprint_of_shape(shape_of("qwen3_8b"))


def test_a_push_takes_the_network_where_the_run_has_more_gpus_than_a_node() -> None:
    """Qwen3-8B of 16.4 GB: 450 GB/s within a node of H100s, 50 between nodes, at 0.7 of each."""

    def push(num_slots: int) -> float:
        facts = facts_with()
        device = DEVICES["h100"]
        pools = {name: replace(pool, slots=num_slots) for name, pool in facts.placement.pools.items()}
        wide = replace(
            facts,
            placement=replace(facts.placement, pools=pools),
            devices=dict.fromkeys(facts.devices, device),
            models={**facts.models, "policy": replace(facts.models["policy"], footprint=QWEN3_8B)},
        )
        return push_s("policy", wide, wide.describe_seats("learner"))

    num_bytes = QWEN3_8B.weight_bytes("float32")
    parts_s = 0.327 + 31 * 0.005 + (4 + 31) * 0.0011  # by its tensors and buckets, and for the calls to one engine
    assert push(2) == pytest.approx(0.05 + parts_s + num_bytes / (450e9 * 0.7))
    assert push(16) == pytest.approx(0.05 + parts_s + num_bytes / (50e9 * 0.7)), "nine times as long"


def test_only_a_broadcast_is_one_call_for_all_buckets() -> None:
    """Else an engine is asked to begin, to take each bucket, and to commit; all are paused and resumed."""
    sizes = {
        transport: measure_push("policy", facts_with(f"sync.transport={transport}", "sync.bucket_mb=1", "cluster=ray"))
        for transport in ("gloo", "disk", "auto")
    }
    assert (sizes["gloo"].calls, sizes["gloo"].buckets) == (3, 2)
    assert sizes["disk"].calls == sizes["auto"].calls == 4 + 2, "auto: shared memory"
    typed = facts_with("sync.transport=shared_memory", "sync.bucket_mb=1", "cluster=ray")
    assert measure_push("policy", typed, over_nodes=True).calls == 4 + 2, "its own ends may share one of the machines"


def test_a_push_of_changes_is_planned_as_one() -> None:
    push = measure_push("policy", facts_with("policy.dtype=bfloat16", "sync.delta=true", "sync.transport=disk"))
    assert push.delta


def test_the_predicted_pause_is_the_plans_and_absent_where_something_is_unknown() -> None:
    facts = facts_with()
    assert predict_pause_s(facts) == pytest.approx(push_s("policy", facts, facts.describe_seats("learner")), abs=1e-4)
    unsized = {**facts.models, "policy": replace(facts.models["policy"], footprint=None)}
    assert predict_pause_s(replace(facts, models=unsized)) is None
    assert predict_pause_s(replace(facts, devices=dict.fromkeys(facts.devices))) is None
    engines = {role: seats for role, seats in facts.placement.seats.items() if role != "learner"}
    assert predict_pause_s(replace(facts, placement=replace(facts.placement, seats=engines))) is None


def test_merged_adapters_of_a_mixture_send_no_experts() -> None:
    """After the first push only the layers that have adapters are sent: experts are none of them."""
    mixture = footprint_of_shape(shape_of("qwen3_30b_a3b"))
    attention = 48 * 2048 * (2 * 4096 + 2 * 512)
    assert mixture.count_adapted_weights(()) == attention < 0.03 * mixture.num_parameters
    assert mixture.count_adapted_weights(("q_proj",)) == 48 * 2048 * 4096


def test_vllm_joins_the_experts_of_a_push() -> None:
    facts = facts_with("engine=vllm")
    mixture = footprint_of_shape(shape_of("qwen3_30b_a3b"))
    sized = {**facts.models, "policy": replace(facts.models["policy"], footprint=mixture)}
    push = measure_push("policy", replace(facts, models=sized))
    assert (push.joined, push.tensors) == (48 * 128 * 3, mixture.num_tensors)


def test_with_expert_parallelism_vllm_loads_each_expert_by_itself() -> None:
    """As `list_whole_layers` of its worker: 18,432 tensors, 17 s; on one GPU it divides nothing."""
    facts = facts_with("engine=vllm", "+engine.vllm.options.enable_expert_parallel=true")
    mixture = footprint_of_shape(shape_of("qwen3_30b_a3b"))
    sized = replace(facts, models={**facts.models, "policy": replace(facts.models["policy"], footprint=mixture)})
    served = sized.roles.served
    wide = replace(sized.roles, served={**served, "policy": replace(served["policy"], num_gpus=2)})
    alone, divided = (measure_push("policy", one) for one in (sized, replace(sized, roles=wide)))
    assert (alone.joined, alone.tensors) == (18_432, mixture.num_tensors)
    assert (divided.joined, divided.tensors) == (0, mixture.num_tensors + 18_432)
    longer_s = sync_time_s(divided, DEVICES["h100"]) - sync_time_s(alone, DEVICES["h100"])
    assert longer_s == pytest.approx(18_432 * (TENSOR_S - JOINED_S))


def test_moments_and_activations_on_the_host_cost_a_learner_time() -> None:
    here = learner(facts_with("train.activation_checkpointing=full"))
    moments = learner(facts_with("train.activation_checkpointing=full", "train.optimizer.offload=true"))
    inputs = learner(facts_with("train.activation_checkpointing=full", "train.activation_offload=true"))
    assert moments.step_s > here.step_s and moments.token_s == here.token_s
    assert inputs.token_s > here.token_s and inputs.step_s == here.step_s
