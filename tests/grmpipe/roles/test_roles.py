"""The engine of each role, and what is refused of engines before anything starts."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from grmpipe.config.engine_kinds import ENGINE_KINDS
from grmpipe.config.io.resume_rules import find_changed_keys
from grmpipe.config.io.yaml_io import build_config
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.models.engines.openai.openai_engine import OpenAIEngine
from grmpipe.models.engines.openai.openai_kind import OpenAIKind, request_options
from grmpipe.models.lm.footprint import Heads, read_heads
from grmpipe.models.settings import EmbeddedConfig, VllmConfig
from grmpipe.models.types import Message, RequestContext, SamplingParams
from grmpipe.roles.find_models import find_model
from grmpipe.roles.role_placement import check_options, seat_roles
from grmpipe.roles.roles import Model, Roles, ServedRole, resolve_roles
from grmpipe.run.build.start_models import engine_factory
from grmpipe.run.prepare import prepare
from grmpipe.scheduler.placement import Placement, place
from grmpipe.tiny.resolve import SHIPPED

OUTSIDE = {"engine": "openai", "path": "a-judge"}


def placement_of(resource: str = "cpu", slots: int = 1, **roles: dict) -> dict:
    pools = {role: {"slots": slots, "resource": resource} for role in ("policy", "learner", "grm")}
    return {"pools": pools, "roles": {role: {"pool": role, **roles.get(role, {})} for role in pools}}


def config(placement: dict | None = None, **sections: object) -> RunConfig:
    shared = {"cluster": {"kind": "inprocess"}, "placement": placement or placement_of()}
    return build_config({**shared, **sections})


def roles_of(run: RunConfig) -> Roles:
    return resolve_roles(run, seats(run))


def seats(run: RunConfig) -> Placement:
    return place(run.placement, run.roles, run.served, run.learners)


def served(role: str, run: RunConfig) -> ServedRole:
    return roles_of(run).served[role]


def find(role: str, run: RunConfig) -> Model:
    return find_model(served(role, run), run.cluster)


def check(run: RunConfig) -> None:
    check_options(roles_of(run), run.asked, seats(run))


def check_here(run: RunConfig) -> None:
    roles_of(run).check_installed(joined=run.cluster.address is not None)


# -- options -------------------------------------------------------------------------------------------------------


def test_more_judgements_in_flight_than_the_rate_can_send_in_time_are_refused() -> None:
    def limited(**judge: float) -> RunConfig:
        options = {"openai": {"api_key_env": "", "requests_per_minute": 60}}
        return config(grm=OUTSIDE, engine=options, judge={"limits": judge})

    with pytest.raises(
        ConfigError, match=r"^judge\.limits\.max_concurrency: 1024 .* type judge\.limits\.max_concurrency=60, or"
    ):
        check(limited())
    check(limited(max_concurrency=60))


def test_requests_to_a_remote_judge_carry_its_chat_template_arguments() -> None:
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        message = {"message": {"content": "Score: 7"}, "finish_reason": "stop"}
        return httpx.Response(200, json={"model": "judge", "choices": [message], "usage": {"completion_tokens": 1}})

    grm = {"path": "judge", "engine": "openai", "chat_template_kwargs": {"enable_thinking": False}}
    options = {"openai": {"api_key_env": "", "extra_body": {"top_k": 20}}}

    async def ask() -> None:
        role = served("grm", config(grm=grm, engine=options))
        assert isinstance(role.engine, OpenAIKind)
        told = request_options(role.engine.options, role.model)
        engine = OpenAIEngine("judge", "grm", told, httpx.MockTransport(answer))
        question = (Message(role="user", content="How good is it?"),)
        await engine.chat(
            question, SamplingParams(max_new_tokens=8), RequestContext(request_id="r", group_id="g", role="grm")
        )
        await engine.close()

    asyncio.run(ask())
    assert bodies[0]["chat_template_kwargs"] == {"enable_thinking": False} and bodies[0]["top_k"] == 20
    twice = {"openai": {"api_key_env": "", "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}}
    with pytest.raises(
        ConfigError, match=r"extra_body: chat_template_kwargs are also set in grm\.chat_template_kwargs"
    ):
        check_here(config(grm=grm, engine=twice))


def test_a_network_by_which_an_endpoint_cant_be_asked_is_refused_by_the_key_of_its_url(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outside = config(grm=OUTSIDE, engine={"openai": {"api_key_env": "", "base_url": "https://judge.example/v1"}})
    here = config(grm=OUTSIDE, engine={"openai": {"api_key_env": "", "base_url": "http://localhost:8000/v1"}})
    for variable, value in (("SSL_CERT_FILE", "/nonexistent"), ("ALL_PROXY", "ftp://proxy")):
        monkeypatch.setenv(variable, value)
        with pytest.raises(ConfigError, match=rf"^engine\.openai\.base_url: .*{variable}"):
            check_here(outside)
        check_here(here)
        monkeypatch.delenv(variable)


def test_tokens_a_minute_that_no_judgement_fits_into_are_refused() -> None:
    def limited(tokens: int) -> RunConfig:
        options = {"openai": {"api_key_env": "", "tokens_per_minute": tokens}}
        judge = {"max_new_tokens": 500, "limits": {"timeout_s": 60, "min_tokens_per_s": 10}}
        return config(grm=OUTSIDE, engine=options, judge=judge)

    with pytest.raises(ConfigError, match=r"^engine\.openai\.tokens_per_minute: .* 300 s .*type .*=1000 or more"):
        check(limited(100))
    check(limited(1000))


def test_a_roles_own_options_stand_over_those_of_its_engine() -> None:
    run = config(
        engine={"vllm": {"max_batch_rows": 8, "options": {"block_size": 16}}},
        policy={"engine": "vllm", "engine_options": {"kv_cache_mb": 32, "options": {"swap": 1}}},
        grm={"path": "tiny://grm", "engine": "vllm"},
    )
    own = VllmConfig(max_batch_rows=8, kv_cache_mb=32, options={"block_size": 16, "swap": 1})
    assert served("policy", run).engine.options == own
    assert served("grm", run).engine.options == VllmConfig(max_batch_rows=8, options={"block_size": 16})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cach_mb": 1}, r"^unknown key 'policy.engine_options.kv_cach_mb'; did you mean policy.engine_options.kv_"),
        ({"kv_cache_mb": "many"}, r"^policy\.engine_options\.kv_cache_mb: .*Integer"),
        ({"kv_cache_mb": -1}, r"^policy\.engine_options\.kv_cache_mb: must be 0 or more"),
        ({"quantize": "int4"}, r"^unknown key 'policy.engine_options.quantize'"),
    ],
)
def test_an_option_of_a_role_is_checked_like_any_other(options: dict, message: str) -> None:
    run = config(policy={"engine": "vllm", "engine_options": options})
    with pytest.raises(ConfigError, match=message):
        check(run)


def test_engines_of_judges_speculate_and_those_of_the_policy_do_not() -> None:
    with pytest.raises(ConfigError, match="engine.speculation: unknown value 'ngrams'; known: none, ngram"):
        config(engine={"speculation": "ngrams"})
    run = config(engine={"speculation": "ngram"}, grm={"path": "tiny://grm"})
    speculations = [served(role, run).engine_spec("m", seed=0).speculation for role in ("policy", "grm")]
    assert speculations == ["none", "ngram"]


@pytest.mark.parametrize(
    ("grm", "resource", "why"),
    [
        ({}, "cpu", ""),
        ({"engine": "vllm"}, "gpu", ""),
        ({"engine": "vllm"}, "cpu", "vLLM for CPUs samples wrong tokens where it drafts"),
        ({"engine": "sglang"}, "gpu", ""),
        ({"engine": "sglang"}, "cpu", "SGLang drafts on GPUs only"),
        ({"engine": "sglang", "engine_options": {"urls": ["http://h:1"]}}, "gpu", "--speculative-algorithm NGRAM"),
        (OUTSIDE | {"engine_options": {"base_url": "http://h:1/v1"}}, "cpu", ""),
    ],
)
def test_drafts_are_refused_where_an_engine_has_none(grm: dict, resource: str, why: str) -> None:
    run = config(placement_of(resource), engine={"speculation": "ngram"}, grm={"path": "tiny://grm", **grm})
    if not why:
        check(run)
        return
    with pytest.raises(ConfigError, match=rf"^engine\.speculation: .*{why}.*; type engine\.speculation=none$"):
        check(run)


@pytest.mark.parametrize(
    ("options", "resource", "why"),
    [
        ({}, "gpu", ""),
        ({}, "cpu", "SGLang applies adapters on GPUs only, and it has those of policy"),
        ({"urls": ["http://h:1"]}, "gpu", "a joined SGLang server may have no room for adapters, or drop them"),
    ],
)
def test_adapters_are_refused_where_sglang_can_not_keep_them(options: dict, resource: str, why: str) -> None:
    policy = {"engine": "sglang", "engine_options": options, "lora": {"rank": 4, "sync": "adapters"}}
    run = config(placement_of(resource), policy=policy)
    if not why:
        check(run)
        return
    with pytest.raises(ConfigError, match=rf"^policy\.engine: {why}.*; type policy\.engine=embedded or vllm"):
        check(run)


def test_a_mixed_run_has_two_kinds_of_options() -> None:
    run = config(policy={"engine": "vllm"}, grm={"path": "tiny://grm", "engine": "embedded"})
    assert [type(role.engine.options) for role in roles_of(run).served.values()] == [VllmConfig, EmbeddedConfig]


@pytest.mark.parametrize("kind", [name for name, kind in ENGINE_KINDS.items() if not kind.outside])
def test_the_factory_of_an_engine_travels(kind: str) -> None:
    run = config(policy={"engine": kind})
    pickle.loads(pickle.dumps(engine_factory(find("policy", run), roles_of(run), run.seed)))


def test_making_a_factory_imports_no_engine_of_another_maker() -> None:
    code = (
        "import sys, grmpipe.run.build.compose_pipeline, grmpipe.capacity.plan.plan_report\n"
        "assert not {'vllm', 'sglang'} & {name.split('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# -- places and windows --------------------------------------------------------------------------------------------


def test_an_engine_takes_the_gpus_of_its_seat_and_on_a_cpu_none() -> None:
    for resource, device, num_gpus in (("gpu", "cuda", 2), ("cpu", "cpu", 1)):
        run = config(placement_of(resource, 2, policy={"slots_per_replica": 2}), policy={"engine": "vllm"})
        assert (served("policy", run).device, served("policy", run).num_gpus) == (device, num_gpus)


@pytest.mark.parametrize(
    ("role", "kind", "refused"),
    [("policy", "embedded", True), ("policy", "vllm", False), ("policy", "sglang", False), ("learner", "vllm", True)],
)
def test_several_gpus_are_for_engines_that_can_share_a_model(role: str, kind: str, refused: bool) -> None:
    run = config(placement_of("gpu", 2, **{role: {"slots_per_replica": 2}}), policy={"engine": kind})
    if not refused:
        seat_roles(run)
        return
    with pytest.raises(ConfigError, match=rf"^placement\.roles\.{role}\.slots_per_replica: .* 1 of 2 would be idle"):
        seat_roles(run)


@pytest.mark.parametrize(
    ("gpus", "query", "key", "instead"),
    [(2, 16, 8, None), (8, 16, 4, None), (4, 3, 1, 3), (8, 12, 4, 4), (2, 15, 5, 1), (8, 40, 8, None)],
)
def test_heads_are_shared_evenly_or_not_at_all(gpus: int, query: int, key: int, instead: int | None) -> None:
    run = config(placement_of("gpu", 8, policy={"slots_per_replica": gpus}), policy={"engine": "vllm"})
    if instead is None:
        served("policy", run).check_tensor_parallel(Heads(query=query, key=key))
        return
    with pytest.raises(
        ConfigError, match=rf"^placement\.roles\.policy\.slots_per_replica: {gpus} GPUs can't share"
    ) as told:
        served("policy", run).check_tensor_parallel(Heads(query=query, key=key))
    assert str(told.value).endswith(f"slots_per_replica={instead}")


def test_number_of_heads_comes_from_the_models_config() -> None:
    assert read_heads(str(SHIPPED / "policy")) == Heads(query=3, key=1)


def test_the_window_is_the_engines_own_and_its_key_is_named() -> None:
    shared = config(engine={"vllm": {"max_context_tokens": 300}}, policy={"engine": "vllm"})
    assert (
        served("policy", shared).resolve_context_limit(512),
        served("grm", shared).resolve_context_limit(512),
    ) == (300, 512)
    with pytest.raises(ConfigError, match=r"^engine\.vllm\.max_context_tokens: 300 exceeds .*=200 or less"):
        served("policy", shared).resolve_context_limit(200)
    own = config(policy={"engine": "vllm", "engine_options": {"max_context_tokens": 300}})
    with pytest.raises(ConfigError, match=r"^policy\.engine_options\.max_context_tokens: 300 exceeds"):
        served("policy", own).resolve_context_limit(200)


def test_joined_servers_are_one_for_each_replica() -> None:
    run = config(policy={"engine": "sglang"}, engine={"sglang": {"urls": ["http://a", "http://b"]}})
    with pytest.raises(ConfigError, match=r"^engine\.sglang\.urls: 2 servers for 1 replicas of policy; .*replicas=2"):
        check(run)


# -- what is here --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_missing_engine_is_reported_with_what_to_type(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        f"grmpipe.models.engines.{kind}.{kind}_kind.{kind}_missing", lambda *asked: "not here; type this"
    )
    run = config(grm={"path": "tiny://grm", "engine": kind})
    with pytest.raises(ConfigError, match=r"^grm\.engine: not here; type this$"):
        check_here(run)
    check_here(config())  # no role is served by it
    check_here(config(grm={"path": "tiny://grm", "engine": kind}, judge={"kind": "rule"}))
    elsewhere = {"address": "10.0.0.1:6379"}
    check_here(config(grm={"path": "tiny://grm", "engine": kind}, cluster=elsewhere))


def test_servers_that_run_already_need_no_sglang_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grmpipe.models.engines.sglang.sglang_kind.sglang_missing", lambda python: "not here")
    check_here(config(policy={"engine": "sglang"}, engine={"sglang": {"urls": ["http://a"]}}))


def test_missing_api_key_is_reported_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    run = config(grm=OUTSIDE, engine={"openai": {"api_key_env": "JUDGE_KEY"}})
    with pytest.raises(ConfigError, match=r"^engine\.openai\.api_key_env: .* JUDGE_KEY is not set"):
        check_here(run)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    check_here(run)
    check_here(config(grm=OUTSIDE, engine={"openai": {"api_key_env": ""}}))


# -- a remote judge --------------------------------------------------------------------------------------------------


def test_a_judge_outside_takes_no_place_and_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    prepared = prepare(config(grm=OUTSIDE, data={"num_prompts": 20}))
    assert (prepared.config.judged_by_model, list(prepared.models)) == (True, ["policy"])
    assert set(prepared.placement.seats) == {"policy", "learner"}


def test_a_known_window_of_a_judge_outside_is_held_against_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    windows = {"openai": {"max_context_tokens": 200}}
    with pytest.raises(ConfigError, match=r"^judge\.max_new_tokens: 160 new tokens .* exceed the 200 tokens of grm"):
        prepare(config(grm=OUTSIDE, engine=windows, data={"num_prompts": 20}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"policy": {"engine": "openai"}}, r"^policy\.engine: openai can't receive .*embedded or vllm or sglang$"),
        ({"grm": {"path": "tiny://grm", "engine": "openai"}}, r"^grm\.path: tiny://grm is a shipped tiny model"),
        ({"judge": {"format": {"structured": True}}, "grm": OUTSIDE}, r"^judge\.format\.structured: openai can't"),
    ],
)  # fmt: skip
def test_an_engine_is_refused_what_it_cannot_do(sections: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**sections)


def test_a_rule_needs_no_grammar() -> None:
    assert config(judge={"kind": "rule", "format": {"structured": True}}).roles == ("policy", "learner")


def test_a_scale_without_a_pattern_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grmpipe.models.engines.sglang.sglang_kind.sglang_missing", lambda python: None)
    run = config(
        grm={"path": "tiny://grm", "engine": "sglang"},
        judge={"format": {"structured": True}, "scale": {"high": 5000}},
        data={"num_prompts": 20},
    )
    with pytest.raises(ConfigError, match=r"^judge\.scale: 5000 different scores .*judge\.format\.structured=false"):
        prepare(run)


# -- tokenizers, resumes -------------------------------------------------------------------------------------------


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED / "policy", tmp_path / "short")
    shape = json.loads((tmp_path / "short" / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(json.dumps({**shape, "vocab_size": 400}))
    weights = load_file(tmp_path / "short" / "model.safetensors")
    name = "model.embed_tokens.weight"
    save_file({**weights, name: weights[name][:400].clone()}, tmp_path / "short" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"^policy\.path: the tokenizer in .* has ids up to 488, .* has 400 rows"):
        find("policy", config(policy={"path": str(tmp_path / "short")}))


@pytest.mark.parametrize(
    ("sections", "free"),
    [
        ({"policy": {"engine": "vllm"}}, True),
        ({"grm": {"path": "tiny://grm", "engine": "vllm", "engine_options": {"kv_cache_mb": 9}}}, True),
        ({"engine": {"vllm": {"max_batch_rows": 8, "recompute_kv_on_sync": True}}}, True),
        ({"sync": {"deadline_s": 500.0}, "slots": {"health": {"max_replacements": 9}}}, True),
        ({"engine": {"embedded": {"max_context_tokens": 300}}}, False),
        ({"policy": {"engine_options": {"max_context_tokens": 300}}}, False),
        ({"engine": {"vllm": {"options": {"quantization": "fp8"}}}}, False),
        ({"engine": {"vllm": {"quantization": "fp8"}}}, False),
        ({"engine": {"openai": {"extra_body": {"reasoning_effort": "low"}}}}, False),
        ({"policy": {"dtype": "bfloat16"}}, False),
        ({"judge": {"num_judgements": 2}}, False),
    ],
)  # fmt: skip
def test_a_resume_may_change_who_samples_but_not_what_is_sampled(sections: dict, free: bool) -> None:
    assert (find_changed_keys(config(), config(**sections)) == []) is free


@pytest.mark.parametrize(
    ("engine", "options", "tolerance"),
    [
        ("vllm", {"options": {"quantization": "fp8"}}, 1.0),
        ("vllm", {"quantization": "fp8"}, 1.0),
        ("vllm", {"options": {"kv_cache_dtype": "fp8"}}, 1.0),
        ("sglang", {"options": {"kv-cache-dtype": "fp8_e4m3"}}, 1.0),
        ("embedded", {"quantize": "int8"}, 1.0),
        ("vllm", {"options": {"kv_cache_dtype": "auto"}}, 0.25),
        ("sglang", {}, 0.25),
    ],
)
def test_quantizing_engine_has_the_wider_tolerance(engine: str, options: dict, tolerance: float) -> None:
    given = config(policy={"engine": engine}, engine={engine: options})
    assert served("policy", given).sync.tolerance({"bfloat16"}) == tolerance


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("vllm", {"quantization": "fp8"}),
        ("vllm", {"options": {"kv_cache_dtype": "fp8"}}),
        ("embedded", {"quantize": "fp8"}),
    ],
)
def test_samples_of_quantized_weights_are_corrected_for_or_refused(engine: str, options: dict) -> None:
    def seated(task: str = "train", **algorithm: str) -> None:
        sections = {"policy": {"engine": engine}, "engine": {engine: options}, "algorithm": algorithm}
        seat_roles(build_config({"placement": placement_of(), "task": task, **sections}))

    with pytest.raises(ConfigError, match=r"^algorithm\.correction: .*quantized.*type algorithm\.correction=tis or"):
        seated(correction="none")
    seated(correction="tis")
    seated(correction="none", proximal="sampler")
    seated(correction="grmpipe.algorithm.corrections.apply_no_correction")
    seated("evaluate", correction="none")


def test_one_key_says_how_vllm_quantizes() -> None:
    with pytest.raises(ValueError, match="quantization: unknown value 'int3'; known: none, fp8, fp8_per_block"):
        VllmConfig(quantization="int3")
    with pytest.raises(ValueError, match=r"options\.quantization: 'awq' and quantization=fp8 exclude each other"):
        VllmConfig(quantization="fp8", options={"quantization": "awq"})
