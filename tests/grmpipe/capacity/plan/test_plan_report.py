"""task=plan: works without GPUs, without the models, and without starting anything."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.capacity.plan.memory import list_memory, overfull_slots, sum_held_memory
from grmpipe.capacity.plan.plan_report import KIND_IN_WORDS, plan, seconds
from grmpipe.capacity.plan.run_facts import RunFacts, collect_facts
from grmpipe.config.io.yaml_io import build
from grmpipe.config.judge import KINDS
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.models.lm.footprint import read_footprint
from grmpipe.tiny.resolve import SHIPPED

ROOT = Path(__file__).parents[4]


def composed(*overrides: str) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(compose("config", list(overrides)))


def planned(*overrides: str) -> str:
    return plan(composed(*overrides)).text


@pytest.fixture
def big_run(no_hub: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The eight-GPU recipe with a file of prompts."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n} + 1?"}) + "\n" for n in range(100)))
    monkeypatch.chdir(tmp_path)
    return ("+experiment=qwen3_8b", "data.path=prompts.jsonl")


def test_the_quickstarts_plan_says_places_memory_and_batches() -> None:
    text = planned("+experiment=quickstart")
    assert "train 0    cpu       policy-0 (50%), learner-0 (50%)" in text
    assert "16 groups x 8 siblings = 128 rollouts, at most 8192 tokens" in text
    assert "128 rollouts x 1 judgements = 128 judgements" in text
    assert "in flight: at most 32 groups, 256 rollouts" in text
    for use in ("weights", "gradients", "optimizer, two moments", "gathered layers", "activations of 4096 tokens"):
        assert re.search(rf"[KM]B  {use}\n", text)
    assert "train 0    973 MB  policy + learner\n  judging 0  495 MB  grm\nthis machine: 2.64 GB of " in text
    assert "not checked here" not in text


@pytest.mark.parametrize(
    ("key", "experiment"),
    [
        ("grm.train.data_path", "cotrain"),
        ("judge_monitor.canaries_path", "quickstart"),
        ("algorithm.sft.path", "quickstart"),
        ("judge.calibration", "quickstart"),
    ],
)
def test_a_plan_refuses_a_file_that_the_run_would_not_find(key: str, experiment: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: .*nothing\.jsonl"):
        planned(f"+experiment={experiment}", f"{key}=nothing.jsonl")


def test_a_plan_says_what_a_tracker_lacks_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRMPIPE_WEBHOOK_URL", raising=False)
    text = " ".join(planned("+experiment=quickstart", "tracking.trackers=[webhook]").split())
    assert "not checked here" in text
    assert "tracking.trackers: webhook can't be used here; set the variable GRMPIPE_WEBHOOK_URL" in text


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0121, "0.0121 s"), (120.0, "120 s"), (121.0, "2.0 min"), (3599.0, "60.0 min"), (29200.0, "8.1 h")],
)
def test_long_times_are_in_minutes_and_hours(value: float, words: str) -> None:
    assert seconds(value) == words


def test_adapters_have_gradients_and_moments_and_the_frozen_weights_are_the_reference() -> None:
    """Rank 8 on all linear layers of the tiny policy; see test_footprint.py."""

    def held(role: str, *overrides: str) -> dict[str, float]:
        facts = collect_facts(composed("+experiment=quickstart", "policy.lora.rank=8", *overrides))
        return {use.what: use.num_bytes for use in list_memory(facts, role)}

    footprint = read_footprint(str(SHIPPED / "policy"))
    adapters = 4 * footprint.adapter_parameters(8, ())
    learner = held("learner", "algorithm.kl_coefficient=0.1")
    assert learner["weights, frozen"] == footprint.weight_bytes("float32")
    assert learner["adapters"] == learner["gradients of the adapters"] == adapters
    assert learner["optimizer of the adapters, two moments"] == 2 * adapters
    assert not any("reference" in what for what in learner)
    assert "adapters" not in held("policy"), "merged before they travel"
    assert held("policy", "policy.lora.sync=adapters")["adapters"] == adapters


def test_the_recipe_for_one_gpu_fits_it(big_run: tuple[str, ...]) -> None:
    text = planned("+experiment=qwen3_one_gpu", *big_run[1:])
    assert "all 0  gpu       policy-0 (33%), learner-0 (33%), grm-0 (33%)" in text
    assert "1.19 GB  weights" in text  # 5.96e8 parameters in bfloat16, the head tied
    assert "warnings" not in text


def test_a_run_for_eight_gpus_is_planned_without_gpu_and_models(big_run: tuple[str, ...], tmp_path: Path) -> None:
    began_s = time.process_time()
    text = planned(*big_run)
    assert time.process_time() - began_s < 30
    for line in ("train 3    gpu       learner-3", "rollout 1  gpu       policy-1", "judging 1  gpu       grm-1"):
        assert line in text
    assert "16.4 GB  weights" in text  # 8.19e9 parameters in bfloat16
    assert "8.19 GB  gradients, over 4 ranks" in text  # 4 bytes each, in 4 shards
    assert "optimizer, two moments, over 4 ranks, beyond activations, with which they alternate" in text
    assert "train 0..3    34.8 GB of 80 GB  learner" in text
    unchecked = text.split("not checked here")[1]
    assert "hf download Qwen/Qwen3-8B" in unchecked
    assert "hf download Qwen/Qwen3-14B" in unchecked
    assert "placement.pools.train: needs 4 gpu slots" in unchecked
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_each_copy_of_the_learner_holds_all_state(big_run: tuple[str, ...]) -> None:
    meshes = ("train.parallel.dp_replicate=2", "train.parallel.cp=2")
    facts = collect_facts(composed(*big_run, *meshes))
    held = {use.what: use.num_bytes / 1e9 for use in list_memory(facts, "learner")}
    assert held["gradients, over 2 ranks"] == pytest.approx(16.4, rel=0.01)
    assert "activations of 16384 tokens" in held  # of a rank's slice of a micro-batch of 32768


@pytest.mark.parametrize(
    ("experiment", "role", "section"), [("cotrain", "grm_learner", "grm.train"), ("ppo", "critic", "critic")]
)
def test_the_ranks_of_a_grm_in_training_and_of_a_critic_are_planned_by_their_own_section(
    experiment: str, role: str, section: str
) -> None:
    two_ranks = (f"+experiment={experiment}", "placement=two_ranks", f"placement.roles.{role}.replicas=2")

    def facts_with(*overrides: str) -> RunFacts:
        return collect_facts(composed(*two_ranks, *overrides))

    def gradients(facts: RunFacts) -> str:
        (use,) = (use.what for use in list_memory(facts, role) if use.what.startswith("gradients"))
        return use

    copies = facts_with(f"{section}.parallel.dp_replicate=2")
    assert gradients(copies) == "gradients"
    assert gradients(facts_with("train.parallel.dp_replicate=2")) == "gradients, over 2 ranks"


def test_micro_batch_holds_the_longest_answer() -> None:
    """It isn't divided, but for the ranks that share it."""

    def activations(role: str, *overrides: str) -> str:
        facts = collect_facts(composed("+experiment=ppo", *overrides))
        (use,) = (use.what for use in list_memory(facts, role) if use.what.startswith("activations"))
        return use

    for role in ("learner", "critic"):
        assert (
            activations(role, "train.micro_batch_tokens=10", "rollout.max_new_tokens=60") == "activations of 60 tokens"
        )
    assert activations("learner", "train.micro_batch_tokens=100") == "activations of 100 tokens"


def test_an_answer_longer_than_the_window_is_refused_though_the_model_is_not_here(big_run: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.max_new_tokens: 8000 .* 7168 .*max_context_tokens=7168$"):
        planned(*big_run, "rollout.max_new_tokens=8000")


def test_the_recipe_for_eight_gpus_fits_them_and_a_larger_batch_does_not(big_run: tuple[str, ...]) -> None:
    assert "warnings" not in planned(*big_run)
    embedded = ("engine=embedded", "engine.embedded.max_context_tokens=7168", "engine.embedded.max_batch_rows=64")
    text = planned(*big_run, "train.micro_batch_tokens=524288", *embedded)
    assert "train 0: learner-0 may need" in text
    assert "lower train.micro_batch_tokens" in text
    assert "judging 1: grm-1 may need" in text
    assert "lower engine.embedded.max_batch_rows" in text


def test_weights_in_fp8_leave_more_memory_for_keys_and_values(big_run: tuple[str, ...]) -> None:
    fp8 = ("engine=vllm", "engine.vllm.quantization=fp8", "algorithm.correction=tis")
    wide, narrow = planned(*big_run), planned(*big_run, *fp8)
    # Qwen3-8B has 1.245e9 parameters in its embedding and head, and 6.946e9 in its layers.
    assert "16.4 GB  weights" in wide and "9.44 GB  weights" in narrow
    assert "2.14 GB  activations, CUDA graphs" in narrow
    assert "56.4 GB  KV, the rest" in narrow  # of 0.85 x 80 GB


def test_fp8_is_suggested_for_a_judge_that_does_not_learn_where_its_card_has_it(big_run: tuple[str, ...]) -> None:
    suggested = "it doesn't learn: in fp8 its weights take 16.3 GB instead of 29.5 GB"
    typed = "+grm.engine_options.quantization=fp8"
    text = planned(*big_run)
    assert text.count("in fp8 its weights") == 1 and f"\n           {suggested}" in text and typed in text
    for other in (("placement.pools.judging.device=a100_80",), (typed,), ("grm.engine=embedded",)):
        assert "in fp8 its weights" not in planned(*big_run, *other)


def test_plan_shows_options_of_engines_that_differ_from_their_defaults() -> None:
    text = planned("+experiment=quickstart_vllm", "grm.engine=embedded", "engine.embedded.max_batch_rows=64")
    assert "  policy   vllm; kv_cache_mb=64\n  grm      embedded; max_batch_rows=64" in text
    assert "67.1 MB  KV, engine.vllm.kv_cache_mb: 87381 tokens" in text  # 64 MiB of 768 bytes
    assert "engines\n  policy   embedded; default options" in planned("+experiment=quickstart")


def test_an_engine_over_two_gpus_holds_half_the_weights_on_each(big_run: tuple[str, ...]) -> None:
    text = planned(*big_run, "engine=vllm", "placement=four_gpus", "grm.engine=embedded")
    assert "policy   vllm, tensor parallel over 2 GPUs; max_batch_rows=128, max_context_tokens=7168" in text
    assert "rollout 1  gpu       policy-0" in text
    assert "8.19 GB  weights, over 2 GPUs" in text
    # 0.85 x 80 GB minus half of 16.38 GB of weights and what the engine computes with, on two such GPUs; 147456 bytes
    # per token.
    found = re.search(r"([\d.]+) GB  activations.*\n +([\d.]+) GB  KV, the rest of .*=0\.85: (\d+) tokens", text)
    assert found is not None
    own, room, tokens = map(float, found.groups())
    assert 1.5 < own < 2.0 and room == pytest.approx(59.8 - own, abs=0.06)
    assert tokens == pytest.approx(2 * room * 1e9 / 147456, rel=0.002)


def test_beyond_its_key_heads_an_engine_holds_copies_of_keys_and_values(big_run: tuple[str, ...]) -> None:
    """Qwen3-8B has eight key heads; with four, eight GPUs hold each of them twice."""
    wide = (
        "placement.pools.rollout.slots=8",
        "placement.roles.policy.slots_per_replica=8",
        "placement.roles.policy.replicas=1",
    )

    def tokens(*overrides: str) -> int:
        text = planned(*big_run, "engine=vllm", "placement=four_gpus", "grm.engine=embedded", *wide, *overrides)
        found = re.search(r"gpu_memory_utilization=0\.85: (\d+) tokens", text)
        assert found is not None
        return int(found[1])

    assert tokens("policy.shape.num_kv_heads=4") == pytest.approx(tokens(), rel=0.01), "1 head on each of 8 GPUs"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("grm.path=tiny://reward_model",), r"^grm\.path: .* a reward model that writes no text; .* type judge=scalar"),
        (("judge=scalar", "grm.path=tiny://grm"), r"^grm\.path: .* holds Qwen3ForCausalLM, which has no scalar head"),
    ],
    ids=["a judge that writes", "a judge that scores"],
)
def test_a_judges_model_must_have_the_head_that_the_judge_needs(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        planned("+experiment=quickstart", *overrides)


def test_judges_that_ask_no_language_model_are_named_in_words() -> None:
    assert KIND_IN_WORDS.keys() == set(KINDS) - {"generative"}
    assert not any(re.match(r"a [aeiou]", words) for words in KIND_IN_WORDS.values())


def test_heads_that_gpus_cannot_share_are_refused_by_their_declared_number(big_run: tuple[str, ...]) -> None:
    odd = ("placement.pools.rollout.slots=3", "placement.roles.policy.slots_per_replica=3")
    with pytest.raises(ConfigError, match=r"^placement\.roles\.policy\.slots_per_replica: 3 GPUs can't share 32"):
        planned(*big_run, "engine=vllm", "placement=four_gpus", *odd)


def test_a_judge_outside_is_planned_with_its_judgements_and_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    text = planned("+experiment=quickstart", "grm.engine=openai", "grm.path=a-judge")
    assert "grm      openai: a-judge at https://api.openai.com/v1; default options" in text
    assert "128 rollouts x 1 judgements = 128 judgements" in text
    assert "grm-0" not in text
    assert "OPENAI_API_KEY is not set" in text.split("not checked here")[1]


def test_roles_that_crowd_one_gpu_are_named(big_run: tuple[str, ...]) -> None:
    config = composed(*big_run, "placement.roles.policy.pool=train", "placement.roles.grm.pool=train")
    facts = collect_facts(config)
    uses = {role: list_memory(facts, role) for role in facts.placement.seats}
    warnings = overfull_slots(facts, uses)
    assert warnings
    assert all("give the roles separate pools" in warning for warning in warnings)


def held(*overrides: str) -> tuple[float, dict[str, float]]:
    """The most bytes on the only slot at any time, and of each of its processes."""
    facts = collect_facts(composed("+experiment=qwen3_one_gpu", "data.path=prompts.jsonl", *overrides))
    uses = {role: list_memory(facts, role) for role in facts.placement.seats}
    here = [seats[0] for seats in facts.placement.seats.values()]
    whole = {role: sum(use.num_bytes for use in some) for role, some in uses.items()}
    return sum_held_memory(facts, here[0].pool, here, uses), whole


def test_time_shared_gpu_is_counted_once(big_run: tuple[str, ...]) -> None:
    beside, whole = held()
    assert beside == sum(whole.values())
    by_turns, whole = held("placement=one_gpu_time_shared")
    assert max(whole["learner"], whole["policy"] + whole["grm"]) <= by_turns < sum(whole.values())
    sleeping = ("engine=vllm", "engine.vllm.gpu_memory_utilization=0.6")
    moving, whole = held("placement.pools.all.elastic=true", *sleeping)
    assert moving == whole["learner"] + max(whole["policy"], whole["grm"])


def test_plan_names_the_roles_of_a_time_shared_slot(big_run: tuple[str, ...]) -> None:
    text = planned("+experiment=qwen3_one_gpu", *big_run[1:], "placement=one_gpu_time_shared")
    assert ", the learner alternates with the engines" in text


def test_the_recipe_asks_for_its_prompts() -> None:
    with pytest.raises(ConfigError, match=r"^data\.path: missing; give a .jsonl or .parquet file"):
        composed("+experiment=qwen3_8b")


def test_a_model_of_unknown_shape_is_planned_but_for_its_memory(big_run: tuple[str, ...]) -> None:
    text = planned(*big_run, "policy=path", "policy.path=Nobody/Nothing", "train.lr=3e-4")
    assert "policy   unknown" in text
    assert "memory of policy: declare policy.shape" in text
    assert "train.lr: 0.0003 for all weights of Nobody/Nothing" in text.split("\nwarnings\n")[1]


@pytest.mark.parametrize("experiment", ["train_grm", "rft_grm"])
def test_a_judge_in_training_is_planned_as_the_policy_that_it_is(experiment: str) -> None:
    text = plan(composed(f"+experiment={experiment}")).text
    assert "judged by a rule" in text and "grm-0" not in text


def test_a_plan_refuses_settings_that_are_wrong_on_any_machine(big_run: tuple[str, ...]) -> None:
    for override, message in (
        ("policy.path=/nope", r"^policy\.path: no directory '/nope'"),
        ("data.path=nope.jsonl", r"^data\.path: nope.jsonl: no such file"),
        ("placement.roles.learner.replicas=5", r"^placement\.roles\.learner: 5 replicas"),
        ("policy.shape.hidden_size=0", r"^policy\.shape\.hidden_size: must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            planned(*big_run, override)


# -- times and other placements ------------------------------------------------------------------------------------

WIDE_ENGINES = ("engine.vllm.max_batch_rows=256", "engine.vllm.max_context_tokens=0", "judge.limits.max_concurrency=64")
H100 = tuple(f"placement.pools.{pool}.device=h100" for pool in ("train", "rollout", "judging"))


def test_times_come_from_the_devices_data_sheets(big_run: tuple[str, ...]) -> None:
    text = planned(*big_run, "engine=vllm", *H100)
    assert (
        "time of a step (estimated from the devices' data sheets; 1536 tokens per rollout, 512 tokens per judgement"
        in text
    )
    # 256 x (1536 + prompts of 2) tokens on four ranks: 8 operations for each of 7.57e9 weights at 0.7 x 989 TFLOPS,
    # 87 us; 4 passes over 36 layers of 111,616 activations, 2 bytes 9 times each, at 0.9 x 3350 GB/s, 96 us; attention
    # 3 us; 36 inputs of 8 kB, twice over the bus at 45 GB/s, 13 us: 19.7 s. 16.4 GB of moments over the bus, 0.7 s.
    # A push of 327 tensors in 16 buckets to two engines, 0.5 s.
    assert "learner  20.9 s of work for each of 4" in text
    assert "the busiest slot's work" in text
    assert re.search(r"learner  20\.9 s of work for each of 4; 19,\d\d\d packed tokens/s, MFU 0\.2\d\n", text)
    least, fast, slow = map(float, re.findall(r"at least ([\d.]+) s: .*\n  likely ([\d.]+) s to ([\d.]+) s: ", text)[0])
    assert fast == pytest.approx(least / 1.6, rel=0.01) and slow == pytest.approx(least * 1.6, rel=0.01)
    on_cores = planned("+experiment=quickstart")
    assert "packed tokens/s\n" in on_cores, "cores have no MFU"
    assert "likely" not in on_cores, "published rates are those of GPUs"


def test_a_driver_that_sets_the_pace_is_a_warning(big_run: tuple[str, ...]) -> None:
    assert "WARNING" not in planned(*big_run)
    short = ("rollout.max_new_tokens=16", "plan.judgement_tokens=1", "judge.num_judgements=8")
    many = ("train.groups_per_batch=2048", "placement.pools.judging.slots=16", "placement.roles.grm.replicas=16")
    (line,) = (line for line in planned(*big_run, *short, *many).splitlines() if line.startswith("  driver "))
    assert "WARNING: 100% of the shortest step, in which engines wait for it (docs/clusters.md)" in line


def test_without_a_prefix_cache_every_request_computes_its_prompt(big_run: tuple[str, ...]) -> None:
    def judging_s(*overrides: str) -> float:
        line = re.search(r"\n  grm +([\d.]+) s of work", planned(*big_run, "engine=vllm", *H100, *overrides))
        assert line is not None
        return float(line[1])

    assert judging_s("+engine.vllm.options.enable_prefix_caching=false") > 1.2 * judging_s()


def test_lengths_can_be_set(big_run: tuple[str, ...]) -> None:
    text = planned(*big_run, "engine=vllm", *H100, "plan.rollout_tokens=700", "plan.judgement_tokens=300")
    assert "700 tokens per rollout, 300 tokens per judgement on average" in text


def test_a_plan_says_that_it_counts_one_turn_of_each_episode() -> None:
    text = planned("+experiment=walk", "train.groups_per_batch=2", "train.group_size=4", "rollout.max_turns=11")
    assert "8 rollouts, at most 704 tokens" in text
    assert "one turn of each rollout" in text.split("not checked here")[1]
    assert "one turn of each rollout" not in planned("+experiment=quickstart")


def test_hosts_of_environments_are_listed_by_slot_and_have_no_known_work() -> None:
    hosts = ("+placement.pools={tools: {slots: 2}}", "+placement.roles={env: {pool: tools, replicas: 2}}")
    text = planned("+experiment=tools", *hosts)
    rows = [line.split() for line in text.splitlines()]
    assert ["tools", "0", "cpu", "env-0"] in rows and ["tools", "1", "cpu", "env-1"] in rows
    assert ["env", "unknown"] in rows and "at least" in text.split("time of a step")[1]


def test_plan_asks_for_a_missing_device(big_run: tuple[str, ...]) -> None:
    unknown = (f"placement.pools.{pool}.device=null" for pool in ("train", "rollout", "judging"))
    text = planned(*big_run, *unknown).split("not checked here")[1]
    assert "the time of a step: placement.pools.rollout.device: the GPU is unknown; type" in text
    with pytest.raises(ConfigError, match=r"^placement\.pools\.train\.device: unknown device 'h10'; did you mean h100"):
        planned(*big_run, "placement.pools.train.device=h10")


def test_a_gpu_that_the_table_lacks_can_be_described(big_run: tuple[str, ...]) -> None:
    mine = "+plan.devices={mine: {memory_gb: 96, memory_gb_per_s: 4000, tflops: {bfloat16: 700}}}"
    pools = [override.replace("h100", "mine") for override in H100]
    assert "time of a step" in planned(*big_run, "engine=vllm", *pools, mine)


def test_memory_of_a_slot_is_its_devices_where_the_pool_does_not_say(big_run: tuple[str, ...]) -> None:
    for device, gb, used in (("", 80, "68"), ("h200", 141, "120"), ("a100_80", 80, "68")):
        of_kind = (override.replace("h100", device) for override in H100) if device else ()
        assert f"judging 0..1  {used} GB of {gb} GB  grm" in planned(*big_run, "engine=vllm", *of_kind)
