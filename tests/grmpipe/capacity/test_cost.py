"""Costs by roofline, against numbers computed by hand from a data sheet and a model's sizes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.capacity.cost import (
    Costs,
    EngineRates,
    LearnerModel,
    LearnerRates,
    LearnerSpeed,
    ModelSizes,
    PushSize,
    engine_speed,
    learner_speed,
    parallel_gain,
    slower_costs,
    switch_time_s,
    sync_time_s,
    token_flops,
)
from grmpipe.capacity.lower_bound import RoleWork, StepWork, busiest_slot_s, busy_s, chain_s, engine_busy_s
from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine
from grmpipe.models.lm.flops import ModelFlops, PackedSizes
from grmpipe.models.types import EngineSpeed, RequestContext, SamplingParams
from grmpipe.scheduler.devices import DEVICES, DeviceSpec, device_called, find_device
from grmpipe.scheduler.placement import PlacementConfig, PoolConfig, RoleConfig, place

# Round: 1000 GB/s of which 800 are reached, 100 TFLOPS of which 50 are, 40 in a learner; links of 100 and 10 GB/s.
ROUND = DeviceSpec(
    100, 1000, {"bfloat16": 100, "float32": 10}, link_gb_per_s=100, host_gb_per_s=10, step_s=0.001
)  # fmt: skip
ENGINE_RATES = EngineRates(bandwidth=0.8, flops=0.5, prefill_flops=0.5, row_s=0.0)
LEARNER_RATES = LearnerRates(flops=0.4, expert_flops=0.2, attention=0.5, traffic=5.0, bandwidth=0.8)
# 8 billion parameters in bfloat16, 100 kB of keys and values a token.
MODEL = ModelSizes(
    num_parameters=8_000_000_000, weight_bytes=16_000_000_000, kv_bytes_per_token=100_000, dtype="bfloat16"
)


def model_of(billions: float) -> ModelSizes:
    return ModelSizes(
        num_parameters=int(billions * 1e9),
        weight_bytes=int(billions * 2e9),
        kv_bytes_per_token=int(billions * 1e4),
        dtype="bfloat16",
    )


def test_decoding_takes_the_time_of_the_weights_once_a_step_and_of_the_cache_a_token() -> None:
    speed = engine_speed(MODEL, ROUND, max_rows=256, kv_bytes=40e9, rates=ENGINE_RATES)
    assert speed.step_s == pytest.approx(0.001 + 16 / 800)  # 21 ms: 16 GB at 800 GB/s
    assert speed.cached_token_s == pytest.approx(1e5 / 800e9)
    assert speed.row_s == pytest.approx(16e9 / 50e12)  # 2 x 8e9 operations at 50 TFLOPS: 0.32 ms
    assert speed.prefill_token_s == pytest.approx(16e9 / 50e12)
    assert (speed.max_rows, speed.kv_tokens) == (256, 400_000)


def test_two_devices_are_1_8_times_as_fast_in_all_but_the_hosts_part() -> None:
    one, two = (engine_speed(MODEL, ROUND, num_slots=n, max_rows=256, rates=ENGINE_RATES) for n in (1, 2))
    assert two.step_s - ROUND.step_s == pytest.approx((one.step_s - ROUND.step_s) / 1.8)
    assert two.prefill_token_s == pytest.approx(one.prefill_token_s / 1.8)
    assert [round(parallel_gain(n), 4) for n in (1, 2, 4, 8)] == [1, 1.8, 3.24, 5.832]


def learns(
    num_adapters: int = 0,
    *,
    ranks: int = 4,
    values: int = 0,
    attention_flops: float = 0.0,
    mixture: bool = False,
    **more: object,
) -> LearnerSpeed:
    model = LearnerModel(
        num_parameters=8_000_000_000,
        num_adapters=num_adapters,
        values_per_token=values,
        attention_flops=attention_flops,
        is_mixture=mixture,
    )
    given = {"dtype": "bfloat16", "checkpointing": False, "rates": LEARNER_RATES, **more}
    return learner_speed(model, ROUND, ranks=ranks, **given)  # type: ignore[arg-type]


def test_a_learner_takes_six_operations_a_parameter_and_token_and_eight_with_checkpointing() -> None:
    plain, checkpointed = learns(), learns(checkpointing=True)
    assert plain.token_s == pytest.approx(48e9 / 160e12)  # 0.3 ms over four ranks of 40 TFLOPS
    assert checkpointed.token_s == pytest.approx(64e9 / 160e12)
    assert plain.step_s == pytest.approx(48 * 8 / (4 * 800))  # 120 ms: 48 bytes a parameter
    assert (plain.forward_s, checkpointed.forward_s) == (pytest.approx(plain.token_s / 3),) * 2
    assert learns(mixture=True).token_s == pytest.approx(2 * plain.token_s), "20 TFLOPS for products of experts"


def test_a_learner_reads_each_activation_in_every_pass() -> None:
    """1 M values of 2 bytes, 5 times in each of forward, backward (twice as much) and the second forward pass."""
    pass_s = 1e6 * 2 * 5 / (4 * 800e9)
    assert learns(values=1_000_000).token_s - learns().token_s == pytest.approx(3 * pass_s)
    again = learns(values=1_000_000, checkpointing=True).token_s - learns(checkpointing=True).token_s
    assert again == pytest.approx(4 * pass_s)


def test_attention_is_computed_again_unless_its_outputs_are_kept() -> None:
    def added_s(**more: object) -> float:
        return learns(attention_flops=1e9, **more).token_s - learns(**more).token_s

    assert added_s() == pytest.approx(3 * 1e9 / 200e12)  # over four ranks of 50 TFLOPS
    assert added_s(checkpointing=True) == pytest.approx(4 * 1e9 / 200e12)
    assert added_s(checkpointing=True, keeps_attention=True) == pytest.approx(3 * 1e9 / 200e12)


def test_frozen_weights_need_no_gradients_and_the_optimizer_steps_adapters_only() -> None:
    plain, checkpointed = (learns(80_000_000, checkpointing=c) for c in (False, True))
    # 4 operations for each frozen weight, 6 for each of an adapter; 2 more for all if they are computed again.
    assert plain.token_s == pytest.approx((4 * 8e9 + 6 * 8e7) / 160e12)
    assert checkpointed.token_s == pytest.approx((6 * 8e9 + 8 * 8e7) / 160e12)
    assert plain.step_s == pytest.approx(48 * 0.08 / (4 * 800))


@pytest.mark.parametrize("num_adapters", [0, 30])
def test_a_learners_operations_are_those_of_its_mfu(num_adapters: int) -> None:
    flops = token_flops(1000, num_adapters=num_adapters)
    model = ModelFlops(layer_weights=1000, head_weights=0, attention={}, adapter_weights=num_adapters)
    token = PackedSizes(lengths_S=[1], prefixes_S=[0], head_rows=0)
    assert (flops.training, flops.forward) == (model.count_training(token), model.forward(token))


def test_each_copy_of_a_model_steps_all_of_its_values() -> None:
    one, two = (learns(copies=n) for n in (1, 2))
    assert two.step_s == pytest.approx(2 * one.step_s) and two.token_s == one.token_s


def test_offloaded_state_crosses_the_bus_twice() -> None:
    here, away = (
        learns(checkpointing=True, copies=2, token_bytes_to_host=token_bytes, step_bytes_to_host=step_bytes)
        for token_bytes, step_bytes in ((0, 0), (280_000, 64e9))
    )
    assert away.token_s - here.token_s == pytest.approx(2 * 280_000 / (4 * 7e9))
    assert away.step_s - here.step_s == pytest.approx(2 * 64e9 / (2 * 7e9)), "the moments of a copy, on its two ranks"
    assert away.forward_s == pytest.approx(here.forward_s), "a pass without gradients keeps nothing"


def test_weights_travel_at_the_links_speed() -> None:
    push = PushSize(num_bytes=14e9)
    assert sync_time_s(push, ROUND) == pytest.approx(0.05 + 0.2)  # 14 GB at 70 GB/s
    assert sync_time_s(push, ROUND, over_nodes=True) == pytest.approx(0.05 + 1.6)  # at 12.5 x 0.7 GB/s
    whole = replace(push, tensors=400, joined=18_432, buckets=14, calls=3 * 256)
    assert sync_time_s(whole, ROUND) == pytest.approx(0.05 + 0.2 + 0.4 + 1.8432 + 0.07 + 0.8448)
    changed = replace(push, delta=True)
    assert sync_time_s(changed, ROUND) == pytest.approx(0.05 + 21 + 0.002), "found at 1.5 s a GB, a hundredth sent"
    assert switch_time_s(14e9, ROUND) == pytest.approx(2.0)  # at 7 GB/s from the memory of the machine


def test_an_8b_model_decodes_on_an_h100_as_fast_as_its_memory_is() -> None:
    speed = engine_speed(MODEL, DEVICES["h100"], max_rows=256)
    assert speed.step_s == pytest.approx(0.004 + 16 / 3015, rel=1e-6)  # 9.3 ms
    assert speed.row_s == pytest.approx(16e9 / 692.3e12 + 5.6e-5, rel=1e-6)  # 79 us


def test_error_of_an_unknown_device_names_similar_ones_and_how_to_describe_it() -> None:
    with pytest.raises(ValueError, match=r"unknown device 'h10'; did you mean h100\?.*\+plan\.devices=\{h10: "):
        find_device("h10", {})
    assert find_device("mine", {"mine": ROUND}) is ROUND
    assert find_device("h100", {"h100": ROUND}) is ROUND


def test_drivers_names_lead_to_the_table() -> None:
    for said, key in (
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100_40"),
        ("NVIDIA A100 80GB PCIe", "a100_80"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 4090", None),
    ):
        assert device_called(said) == key


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: DeviceSpec(0, 1, {"float32": 1}), "memory_gb"),
        (lambda: DeviceSpec(1, 0, {"float32": 1}), "memory_gb_per_s"),
        (lambda: DeviceSpec(1, 1), "tflops"),
        (lambda: DeviceSpec(1, 1, {"float32": 1}, step_s=-1), "step_s"),
        (lambda: DeviceSpec(1, 1, {"float32": 1}, network_gb_per_s=0), "network_gb_per_s"),
        (lambda: DeviceSpec(1, 1, {"float32": 1}, slots_per_node=0), "slots_per_node"),
        (lambda: DEVICES["h100"].flops("int4"), "tflops"),
    ],
)
def test_a_bad_device_names_its_key(make, key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        make()


# -- the bound -----------------------------------------------------------------------------------------------------

COSTS = Costs(
    engines={
        role: engine_speed(MODEL, ROUND, max_rows=64, kv_bytes=40e9, rates=ENGINE_RATES) for role in ("policy", "grm")
    },
    learner=LearnerSpeed(token_s=1e-4, step_s=0.1),
    sync_s=0.5,
)  # fmt: skip


def step_work(rollouts: int = 64, judgements: int = 128, max_staleness: int = 1) -> StepWork:
    return StepWork(
        engines={
            "policy": RoleWork(requests=rollouts, prompt_tokens=100, new_tokens=1000),
            "grm": RoleWork(requests=judgements, prompt_tokens=1200, new_tokens=400),
        },
        learner_tokens=rollouts * 1100,
        groups=8,
        max_staleness=max_staleness,
    )


def test_an_engines_work_is_prefill_and_its_rows_share_of_every_step() -> None:
    work, speed = RoleWork(requests=64, prompt_tokens=100, new_tokens=1000), COSTS.engines["policy"]
    # 64 rows fill the engine: a token takes 21 ms / 64, 0.32 ms of arithmetic and 600 cached tokens of 0.125 us.
    token_s = 0.021 / 64 + 0.00032 + 600 * 1.25e-7
    assert engine_busy_s(work, speed, 1) == pytest.approx(64 * (100 * 0.00032 + 1000 * token_s))
    # Each has half of the requests, with rows half as full: the number of steps is the same.
    assert engine_busy_s(work, speed, 2) == pytest.approx(32 * (100 * 0.00032 + 1000 * (token_s + 0.021 / 64)))


def test_a_push_counts_for_policy_and_learner() -> None:
    work = step_work()
    assert busy_s("learner", work, COSTS, 1) == pytest.approx(64 * 1100 * 1e-4 + 0.1 + 0.5)
    alone = engine_busy_s(work.engines["policy"], COSTS.engines["policy"], 1, 2)
    assert busy_s("policy", work, COSTS, 1) == pytest.approx(alone + 0.5)


def engine_s(work: RoleWork, speed: EngineSpeed) -> float:
    """Seconds that a simulated engine works on these requests, all sent at once."""
    new_tokens, shared_by = int(work.new_tokens), int(work.prompt_shared_by)
    script = Script(token_ids=(1,) * new_tokens, text="")

    async def run() -> float:
        engine = SimulatedEngine("m", lambda ids, params, context: script, speed=speed)
        await asyncio.gather(*(
            engine.generate(
                (n // shared_by,) * int(work.prompt_tokens),
                SamplingParams(max_new_tokens=new_tokens),
                RequestContext(request_id=f"r{n}", group_id="g", role="policy"),
            )
            for n in range(work.requests)
        ))  # fmt: skip
        return engine.busy_s

    return run_virtually(run)


@pytest.mark.parametrize("shared_by", [1, 8])
@pytest.mark.parametrize("kv_tokens", [0, 4000, 12_000])
def test_an_engine_is_never_faster_than_its_estimated_work(shared_by: int, kv_tokens: int) -> None:
    """Requests with the same prompt prefill and hold it once."""
    work = RoleWork(requests=64, prompt_tokens=400, new_tokens=200, prompt_shared_by=shared_by)
    speed = replace(COSTS.engines["policy"], kv_tokens=kv_tokens, max_rows=32)
    estimated, simulated = engine_busy_s(work, speed, 1), engine_s(work, speed)
    assert estimated <= simulated * 1.001  # it counts half a cached token more
    assert simulated < 1.35 * estimated


def test_costs_that_are_twice_as_slow_double_the_work_but_not_the_push() -> None:
    work, slow = step_work(), slower_costs(COSTS, 2.0, 3.0)
    assert busy_s("learner", work, slow, 1) - 0.5 == pytest.approx(2 * (busy_s("learner", work, COSTS, 1) - 0.5))
    assert busy_s("grm", work, slow, 1) == pytest.approx(3 * busy_s("grm", work, COSTS, 1))


def test_passes_without_gradients_and_every_update_are_work_of_the_learner() -> None:
    work = replace(step_work(), learner_forward_tokens=2 * 64 * 1100, learner_updates=3)
    passes_s = 64 * 1100 * 1e-4 * (1 + 2 / 3)
    assert busy_s("learner", work, COSTS, 1) == pytest.approx(passes_s + 3 * 0.1 + 0.5)
    added_s = 64 * 1100 * 1e-4 * 2 / 3 / 8 + 2 * 0.1
    assert chain_s(work, COSTS) - chain_s(step_work(), COSTS) == pytest.approx(added_s), "of the last of 8 groups"


def test_work_goes_where_slots_are_free_but_the_learners_stays() -> None:
    pools = {"both": PoolConfig(slots=2), "own": PoolConfig()}
    roles = {
        "policy": RoleConfig(pool="both", replicas=2),
        "grm": RoleConfig(pool="own"),
        "learner": RoleConfig(pool="both"),
    }
    placement = place(PlacementConfig(pools=pools, roles=roles), ("policy", "grm", "learner"))
    # 4 s of rollouts on two slots, one of which also learns for 3 s: 3.5 s each, however the rollouts are divided.
    assert busiest_slot_s(placement, {"policy": 2.0, "grm": 1.0, "learner": 3.0}) == pytest.approx(3.5)
    assert busiest_slot_s(placement, {"policy": 0.5, "grm": 1.0, "learner": 3.0}) == 3.0
    assert busiest_slot_s(placement, {"policy": 0.5, "grm": 9.0, "learner": 3.0}) == 9.0
    # On shared cores the slot doesn't matter: 4 + 1 + 3 s and 2 s of the driver, but none is faster than alone.
    on_cores = {"policy": 2.0, "grm": 1.0, "learner": 3.0, "driver": 2.0}
    assert busiest_slot_s(placement, on_cores, cores=2) == pytest.approx(5.0)
    assert busiest_slot_s(placement, on_cores, cores=4) == 3.0
    assert busiest_slot_s(placement, {**on_cores, "driver": 6.0}, cores=4) == 6.0


def test_a_critic_reads_each_token_once_for_its_value_and_once_to_learn() -> None:
    critic = LearnerSpeed(token_s=3e-4, step_s=2.0, forward_share=1 / 3)
    work = replace(step_work(), critic_tokens=1000, critic_updates=2)
    assert busy_s("critic", work, replace(COSTS, critic=critic), 1) == pytest.approx(1000 * 4e-4 + 2 * 2.0)


def test_the_chain_is_one_rollout_its_judgement_its_group_and_the_step() -> None:
    played = 100 * 0.00032 + 1000 * (0.021 + 0.00032 + 600 * 1.25e-7)
    judged = 1200 * 0.00032 + 400 * (0.021 + 0.00032 + 1400 * 1.25e-7)
    assert chain_s(step_work(), COSTS) == pytest.approx(played + judged + 64 * 1100 / 8 * 1e-4 + 0.1 + 0.5)


def test_without_an_early_start_the_whole_batch_is_trained_after_its_last_group() -> None:
    work = step_work(max_staleness=0)
    later = chain_s(replace(work, starts_early=False), COSTS) - chain_s(work, COSTS)
    assert later == pytest.approx(64 * 1100 * 7 / 8 * 1e-4)


@given(st.integers(1, 64), st.integers(1, 64), st.floats(1, 4000), st.integers(1, 2000), st.integers(1, 3))
def test_more_engines_are_never_busier(few: int, more: int, new_tokens: float, requests: int, batches: int) -> None:
    work = RoleWork(requests=requests, prompt_tokens=50, new_tokens=new_tokens)
    busy = [engine_busy_s(work, COSTS.engines["policy"], n, batches) for n in sorted((few, more))]
    assert busy[1] <= busy[0] * (1 + 1e-9)


@given(st.floats(0.5, 100), st.floats(0.5, 100), st.sampled_from(sorted(DEVICES)), st.sampled_from([1, 2, 4, 8]))
def test_larger_models_are_never_faster(one: float, other: float, device: str, num_slots: int) -> None:
    small, large = (model_of(size) for size in sorted((one, other)))
    fast, slow = (engine_speed(m, DEVICES[device], num_slots=num_slots, max_rows=64) for m in (small, large))
    for name in ("step_s", "row_s", "cached_token_s", "prefill_token_s"):
        assert getattr(fast, name) <= getattr(slow, name)
    ranks = [
        learner_speed(
            LearnerModel(num_parameters=m.num_parameters),
            DEVICES[device],
            ranks=num_slots,
            dtype="bfloat16",
            checkpointing=False,
        )
        for m in (small, large)
    ]
    assert ranks[0].token_s <= ranks[1].token_s
    assert ranks[0].step_s <= ranks[1].step_s
