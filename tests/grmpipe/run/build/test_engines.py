"""The parts of a run with elastic slots, and what is refused of it before anything starts."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from grmpipe.config.io.yaml_io import build_config
from grmpipe.config.roles import Model
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.data.stream import PromptStream
from grmpipe.models.types import ModelFiles, WeightBucket
from grmpipe.run.build.engines import (
    StartTogether,
    find_started_together,
    other_seed,
    read_stored_weights,
    same_seed,
    start_alone,
    start_in_turn,
    start_shared,
)
from grmpipe.types import Prompt
from grmpipe.validate.engines import check_swap
from grmpipe.validate.models import find_model
from grmpipe.validate.role_placement import seat_roles


def elastic(resource: str = "cpu", **sections: object) -> RunConfig:
    pools = {"engines": {"slots": 2, "resource": resource, "elastic": True}}
    roles = {role: {"pool": "engines"} for role in ("policy", "learner", "grm")}
    return build_config({"placement": {"pools": pools, "roles": roles}, **sections})


class Words:
    """A renderer whose prompts are one token."""

    def render(self, messages: object) -> tuple[int, ...]:
        return (1,)


class FileReader:
    """An engine whose log-probs are the path of its weights."""

    def __init__(self, path: str) -> None:
        self.loaded = [path]

    async def begin_weights(self, link: object) -> None: ...

    async def load_bucket(self, bucket: WeightBucket) -> None:
        assert isinstance(bucket.payload, ModelFiles)
        self.loaded.append(bucket.payload.path)

    async def commit_weights(self, version: int) -> None: ...

    async def score(self, token_ids: object) -> tuple[str, ...]:
        return (self.loaded[-1],)


def on_gpus(kind: str, sleep_mode: bool, swap: str = "sleep", resource: str = "gpu", **grm: object) -> RunConfig:
    engine = {kind: {"sleep_mode": sleep_mode, "max_batch_rows": 17}}
    judge = {"engine": kind, "path": "tiny://grm", **grm}
    return elastic(resource, engine=engine, policy={"engine": kind}, grm=judge, slots={"balance": {"swap": swap}})


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_engines_that_time_share_a_gpu_must_be_able_to_sleep(kind: str) -> None:
    key = rf"engine\.{kind}\.sleep_mode"
    with pytest.raises(ConfigError, match=rf"{key}: .*elastic pool engines.*type {key}=true"):
        seat_roles(on_gpus(kind, sleep_mode=False))
    config = on_gpus(kind, sleep_mode=True)
    placement, roles = seat_roles(config)
    assert set(placement.elastic_slots("engines")) == {"0", "1"}
    assert roles.served["grm"].frees_device and roles.served["grm"].is_time_shared
    assert roles.engine_on_slot("grm").max_rows == 17


@pytest.mark.parametrize(
    ("kind", "sleep_mode", "swap", "resource", "shares"),
    [
        ("vllm", False, "auto", "gpu", True),
        ("vllm", True, "auto", "gpu", False),
        ("vllm", True, "weights", "gpu", True),
        ("vllm", False, "auto", "cpu", False),
        ("vllm", False, "weights", "cpu", True),
        ("sglang", True, "auto", "gpu", False),
        ("embedded", False, "auto", "gpu", False),
    ],
)
def test_elastic_slots_swap_weights_by_setting_or_where_vllm_can_not_sleep(
    kind: str, sleep_mode: bool, swap: str, resource: str, shares: bool
) -> None:
    options = {"engine": {kind: {"sleep_mode": sleep_mode}} if kind != "embedded" else {}}
    roles = {"policy": {"engine": kind}, "grm": {"engine": kind}, "slots": {"balance": {"swap": swap}}}
    config = elastic(resource, **options, **roles)
    _, roles = seat_roles(config)
    assert roles.served["grm"].shares_with == (("policy",) if shares else ())


ADAPTERS = {"rank": 4, "sync": "adapters"}


def test_adapters_alone_share_no_engine_with_a_role_of_other_weights() -> None:
    lora = {"engine": "vllm", "lora": ADAPTERS}
    auto = elastic("gpu", policy=lora, grm={"engine": "vllm"}, engine={"vllm": {"sleep_mode": True}})
    _, roles = seat_roles(auto)
    assert roles.served["policy"].shares_with == ()
    with pytest.raises(ConfigError, match=r"^policy\.lora\.sync: policy shares its engine with grm .*sync=merged"):
        seat_roles(elastic("cpu", policy=lora, grm={"engine": "vllm"}, slots={"balance": {"swap": "weights"}}))


def test_a_judge_that_learns_may_move_where_its_engine_takes_weights_at_any_time() -> None:
    roles = {role: {"pool": "engines"} for role in ("policy", "learner", "grm", "grm_learner")}
    placement = {"pools": {"engines": {"slots": 2, "elastic": True}}, "roles": roles}
    engines = {"policy": {"engine": "vllm"}, "grm": {"engine": "vllm", "train": {"enabled": True}}}
    with pytest.raises(ConfigError, match=r"grm\.train\.enabled: the pool engines is elastic"):
        seat_roles(build_config({"placement": placement, **engines}))
    seat_roles(build_config({"placement": placement, "slots": {"balance": {"swap": "weights"}}, **engines}))


def test_the_engine_of_both_roles_has_the_wider_options() -> None:
    config = on_gpus("vllm", False, "weights", engine_options={"max_batch_rows": 99, "max_context_tokens": 300})
    _, roles = seat_roles(config)
    for role in ("policy", "grm"):
        assert roles.engine_on_slot(role).max_rows == 99
        assert roles.engine_on_slot(role).options.max_context_tokens == 0


@pytest.mark.parametrize(
    ("kind", "grm", "told"),
    [
        ("vllm", {"engine_options": {"prefix_caching": False}}, r"differ in prefix_caching \(True, False\)"),
        ("vllm", {"engine": "embedded"}, r"slots\.balance\.swap: weights needs engine=vllm, but grm is on embedded"),
        ("sglang", {}, r"slots\.balance\.swap: weights needs engine=vllm, but policy is on sglang"),
    ],
)
def test_roles_that_want_different_engines_can_t_share_one(kind: str, grm: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"{told}.*type .*slots\.balance\.swap="):
        seat_roles(on_gpus(kind, True, "weights", **grm))


def test_models_that_differ_in_more_than_their_weights_can_t_share_an_engine(tmp_path: Path) -> None:
    config = on_gpus("vllm", False, "weights", "cpu", dtype="bfloat16")
    _, roles = seat_roles(config)
    policy, grm = (find_model(roles.served[role], config) for role in ("policy", "grm"))
    with pytest.raises(ConfigError, match=r"differ in dtype \(float32, bfloat16\); type slots\.balance\.swap=auto"):
        check_swap(roles, (policy, grm))
    wider = shutil.copytree(grm.path, tmp_path / "wider")
    shape = json.loads((wider / "config.json").read_text())
    (wider / "config.json").write_text(json.dumps(shape | {"intermediate_size": 300}))
    _, roles = seat_roles(on_gpus("vllm", False, "weights", "cpu"))
    check_swap(roles, (policy, grm))
    with pytest.raises(ConfigError, match=r"elastic pool engines, since they differ in intermediate_size \(288, 300\)"):
        check_swap(roles, (policy, replace(grm, path=str(wider))))


def test_embedded_engines_stay_where_they_are() -> None:
    for resource in ("cpu", "gpu"):
        _, roles = seat_roles(elastic(resource))
        assert not roles.served["policy"].frees_device


def test_servers_that_run_already_have_no_elastic_slot() -> None:
    engine = {"sglang": {"urls": ["http://a:1", "http://b:1"], "sleep_mode": True}}
    config = elastic("gpu", engine=engine, policy={"engine": "sglang"})
    with pytest.raises(ConfigError, match=r"urls: .*elastic=false"):
        seat_roles(config)


def by_turns(resource: str = "gpu", learner: str = "all", **sections: object) -> RunConfig:
    pools = {"all": {"slots": 2, "resource": resource, "time_shared": True}, "train": {"slots": 1}}
    roles = {"policy": {"pool": "all"}, "grm": {"pool": "all"}, "learner": {"pool": learner}}
    return build_config({"placement": {"pools": pools, "roles": roles}, **sections})


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_engines_that_time_share_a_gpu_with_the_learner_must_be_able_to_sleep(kind: str) -> None:
    key = rf"engine\.{kind}\.sleep_mode"
    awake = by_turns(engine={kind: {"sleep_mode": False}}, policy={"engine": kind})
    with pytest.raises(ConfigError, match=rf"{key}: .*time_shared pool all.*the learner.*type {key}=true"):
        seat_roles(awake)
    config = by_turns(engine={kind: {"sleep_mode": True}}, policy={"engine": kind})
    placement, roles = seat_roles(config)
    assert placement.time_sharing_roles == ("policy", "grm")
    assert roles.served["policy"].sleeps
    assert roles.served["grm"].sleeps, "the embedded engine"


def test_pool_without_the_learner_is_not_time_shared() -> None:
    way_out = r"set placement\.roles\.learner\.pool=all"
    with pytest.raises(ConfigError, match=rf"placement\.pools\.all\.time_shared: .*{way_out}"):
        seat_roles(by_turns(learner="train"))


def test_a_judge_that_learns_has_no_turns_with_its_learner() -> None:
    pools = {"train": {"slots": 2}, "judging": {"slots": 1, "time_shared": True}}
    seats = {"policy": "train", "learner": "train", "grm": "judging", "grm_learner": "judging"}
    placement = {"pools": pools, "roles": {role: {"pool": pool} for role, pool in seats.items()}}
    train = {"enabled": True, "data_path": "tiny://judgements"}
    with pytest.raises(ConfigError, match=r"^placement\.roles\.grm_learner\.pool: only the policy's learner"):
        seat_roles(build_config({"placement": placement, "grm": {"train": train}}))


def test_a_pool_is_elastic_or_time_shared() -> None:
    with pytest.raises(ConfigError, match=r"placement\.pools\.engines\.time_shared: .*elastic"):
        build_config({"placement": {"pools": {"engines": {"elastic": True, "time_shared": True}}}})


def test_only_engines_that_draw_by_position_keep_the_seed_of_a_moved_request() -> None:
    assert same_seed(5, 30) == 5
    assert len({other_seed(5, 30), other_seed(5, 31), other_seed(6, 30), 5}) == 4


def three_models(swap: str) -> tuple[RunConfig, Sequence[Model]]:
    """Policy and two judges: the policy and the first judge on an elastic pool, the second judge on its own."""
    pools = {"engines": {"slots": 2, "resource": "gpu", "elastic": True}, "apart": {"slots": 1, "resource": "gpu"}}
    seats = {"policy": "engines", "learner": "apart", "grm": "engines", "second": "apart"}
    config = build_config(
        {
            "engine": {"kind": "vllm", "vllm": {"sleep_mode": swap == "sleep"}},
            "models": {"second": {"path": "tiny://grm"}},
            "judges": {"other": {"model": "second"}},
            "reward": {"kind": "jury", "members": ["judge", "other"]},
            "slots": {"balance": {"swap": swap}},
            "placement": {"pools": pools, "roles": {role: {"pool": pool} for role, pool in seats.items()}},
        },
    )
    return config, [Model(name=name, path="", renderer=None, context_tokens=1) for name in config.served]  # type: ignore[arg-type]


@pytest.mark.parametrize(("swap", "together"), [("sleep", start_in_turn), ("weights", start_shared)])
def test_judge_with_its_own_devices_neither_sleeps_nor_swaps(swap: str, together: StartTogether) -> None:
    config, models = three_models(swap)
    _, roles = seat_roles(config)
    found = [(start, [model.name for model in some]) for start, some in find_started_together(models, roles)]
    assert found == [(together, ["policy", "grm"]), (start_alone, ["second"])]


def test_untrained_models_on_one_engine_are_each_read_once_and_the_owners_weights_stay() -> None:
    """The log-probs of each are those of its own files."""
    engine = FileReader("b")
    config, _ = three_models("weights")
    paths = {"grm": "a", "second": "b"}
    models = [
        Model(name=name, path=path, renderer=Words(), context_tokens=9)  # type: ignore[arg-type]
        for name, path in paths.items()
    ]
    _, roles = seat_roles(config)
    prepared = SimpleNamespace(roles=roles, prompts=PromptStream([Prompt(prompt_id="p", messages=())]))
    stored = asyncio.run(read_stored_weights(models, models[1], engine, prepared))  # type: ignore[arg-type]
    assert {role: one.logprobs for role, one in stored.items()} == {"grm": ("a",), "second": ("b",)}
    assert engine.loaded == ["b", "a", "b"]
