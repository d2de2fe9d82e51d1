"""How engines divide a GPU's memory: by the plan if nothing is set, refused if they ask for more than all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.capacity.plan.memory import list_memory, sum_held_memory
from grmpipe.capacity.plan.memory_check import (
    USABLE,
    EngineNeeds,
    compute_shares,
    divide_gpus,
    divide_memory,
    with_shares,
)
from grmpipe.capacity.plan.run_facts import RunFacts, collect_facts
from grmpipe.config.io.yaml_io import build
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.models.engines.vllm.options import VllmStart, make_arguments
from grmpipe.models.settings import VllmConfig
from grmpipe.roles.role_placement import seat_roles
from grmpipe.run.prepare import prepare
from grmpipe.tasks import evaluation

ROOT = Path(__file__).parents[4]
EACH = ("policy.engine_options", "grm.engine_options")


@pytest.fixture(autouse=True)
def offline(no_hub: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1 + 1?"}) + "\n")
    monkeypatch.chdir(tmp_path)


PROMPTS = "data.path=prompts.jsonl"


def composed(*overrides: str) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(compose("config", list(overrides)))


def facts_with(*overrides: str) -> RunFacts:
    return collect_facts(composed("+experiment=qwen3_one_gpu", PROMPTS, *overrides))


def test_engines_on_one_gpu_get_the_same_number_of_cached_tokens() -> None:
    wishes = {"policy": EngineNeeds(weights=10, token=1), "grm": EngineNeeds(weights=20, token=3)}
    assert divide_memory(70, wishes) == {"policy": 20, "grm": 50}
    fixed = {**wishes, "grm": EngineNeeds(weights=20, token=3, kv=8)}
    assert divide_memory(70, fixed) == {"policy": 42, "grm": 28}
    assert divide_memory(29, wishes) == divide_memory(30, wishes) == {}


def test_learner_policy_and_judge_fit_one_gpu_by_the_plan() -> None:
    facts = facts_with()
    shares = compute_shares(facts)
    learner = sum(use.num_bytes for use in list_memory(facts, "learner")) / 80e9
    assert shares.keys() == {"policy", "grm"} and shares["grm"] > shares["policy"] > 0.02
    assert learner + sum(shares.values()) == pytest.approx(USABLE)
    served = facts.under(with_shares(facts, shares)).roles.served
    taken = [served[role].engine.options for role in shares]
    assert sum(engine.memory_share for engine in taken if isinstance(engine, VllmConfig)) + learner < USABLE


@pytest.mark.parametrize(("device", "memory_gb"), [("h100", 80), ("l40s", 48), ("a100_40", 40)])
def test_shares_are_of_the_memory_of_the_device_that_is_named(device: str, memory_gb: int) -> None:
    facts = facts_with(f"placement.pools.all.device={device}")
    learner = sum(use.num_bytes for use in list_memory(facts, "learner"))
    assert learner / (memory_gb * 1e9) + sum(compute_shares(facts).values()) == pytest.approx(USABLE)


def test_an_engine_that_sleeps_leaves_the_other_role_its_memory() -> None:
    """On an elastic slot only one of them is awake; with the learner gone too, both have more."""
    elastic = compute_shares(facts_with("placement.pools.all.elastic=true"))
    beside = compute_shares(facts_with())
    assert all(elastic[role] > beside[role] for role in beside)
    assert elastic["policy"] == pytest.approx(elastic["grm"])
    by_turns = facts_with("placement=one_gpu_time_shared")
    assert sum(compute_shares(by_turns).values()) == pytest.approx(USABLE)


def test_policy_engine_leaves_room_for_the_weights_of_a_time_shared_learner() -> None:
    """Alone with a learner with large weights: 8 B in float32."""
    facts = collect_facts(
        composed("+experiment=qwen3_8b", PROMPTS, "placement=one_gpu_time_shared",
                 "+placement.pools={judging: {resource: gpu}}", "placement.roles.grm.pool=judging")
    )  # fmt: skip
    assert compute_shares(facts)["policy"] == pytest.approx(USABLE - 4 * 8.19e9 / 80e9, abs=0.01)


def test_roles_with_gpus_of_their_own_have_the_default() -> None:
    facts = collect_facts(composed("+experiment=qwen3_8b", PROMPTS))
    assert compute_shares(facts) == {}
    engine = facts.roles.served["policy"].engine.options
    assert isinstance(engine, VllmConfig) and engine.memory_share == 0.85


def test_a_share_that_is_set_is_kept_and_the_other_engine_gets_the_rest() -> None:
    facts = facts_with("+grm.engine_options.gpu_memory_utilization=0.5")
    shares = compute_shares(facts)
    assert shares.keys() == {"policy"}
    uses = {role: list_memory(facts, role) for role in facts.placement.seats}
    beside = sum_held_memory(facts, "all", [facts.placement.seats[role][0] for role in ("learner", "grm")], uses)
    assert shares["policy"] == pytest.approx(USABLE - beside / 80e9)


def test_models_that_leave_no_room_get_no_share() -> None:
    facts = collect_facts(composed("+experiment=qwen3_8b", PROMPTS, "placement=one_gpu"))
    assert compute_shares(facts) == {}


@pytest.mark.vllm
def test_a_run_gets_the_plans_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """As passed to vLLM; here with local models, on a described GPU."""
    monkeypatch.setattr("grmpipe.run.prepare.check_machine", lambda *_: None)
    config = composed("+experiment=quickstart", "placement=one_gpu", "engine=vllm")
    prepared = divide_gpus(prepare(config))
    engine = prepared.roles.served["policy"].engine.options
    assert isinstance(engine, VllmConfig) and engine.gpu_memory_utilization is not None
    spec = prepared.roles.served["policy"].engine_spec(prepared.policy.path, seed=0)
    start = VllmStart(spec=spec, config=engine, context_tokens=64)
    assert make_arguments(start)["gpu_memory_utilization"] == engine.gpu_memory_utilization < 0.6


def test_an_evaluated_policy_and_its_judge_divide_a_gpu_without_a_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    for check in ("run.tasks.prepare_evaluation.check_machine", "roles.roles.Roles.check_installed"):
        monkeypatch.setattr(f"grmpipe.{check}", lambda *_, **__: None)
    config = composed(
        "+experiment=quickstart", "placement=one_gpu_time_shared", "engine=vllm", "task=evaluate",
        "evaluate.what=policy", "data.num_eval_prompts=2",
    )  # fmt: skip
    prepared = evaluation().prepare(config).prepared
    assert set(prepared.placement.seats) == {"policy", "grm"}
    served = prepared.roles.served
    options = [served[role].engine.options for role in ("policy", "grm")]
    shares = [one.gpu_memory_utilization for one in options if isinstance(one, VllmConfig)]
    assert None not in shares and USABLE - 0.03 < sum(filter(None, shares)) <= USABLE
    assert not any(role.takes_weights for role in served.values())


# -- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (("engine.vllm.gpu_memory_utilization=0.85",), r"engine\.vllm\.gpu_memory_utilization"),
        ([f"+{each}.gpu_memory_utilization=0.6" for each in EACH], r"grm\.engine_options\.gpu_memory_utilization"),
        (("grm.engine=sglang", "+policy.engine_options.gpu_memory_utilization=0.5"), r"engine\.sglang\.mem_fraction"),
    ],
)
def test_shares_of_one_gpu_above_1_are_refused_by_key(options: tuple[str, ...], key: str) -> None:
    config = composed("+experiment=qwen3_one_gpu", PROMPTS, *options)
    with pytest.raises(ConfigError, match=rf"^{key}: the engines on the GPUs of pool all ask for 1\.[237] of each"):
        seat_roles(config)


def test_engines_that_take_turns_or_sit_apart_may_each_have_most_of_a_gpu() -> None:
    most = "engine.vllm.gpu_memory_utilization=0.85"
    seat_roles(composed("+experiment=qwen3_8b", PROMPTS, most))
    seat_roles(composed("+experiment=qwen3_one_gpu", PROMPTS, most, "placement.pools.all.elastic=true"))
