"""The parts of a run with elastic slots, and what is refused of it before anything starts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from grmpipe.config.io.yaml_io import build_config
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.roles.role_placement import seat_roles
from grmpipe.roles.roles import Model
from grmpipe.run.build.start_models import describe_starts, other_seed, same_seed, start_routers
from grmpipe.scheduler.events import NoEvents


def elastic(resource: str = "cpu", **sections: object) -> RunConfig:
    pools = {"engines": {"slots": 2, "resource": resource, "elastic": True}}
    roles = {role: {"pool": "engines"} for role in ("policy", "learner", "grm")}
    return build_config({"placement": {"pools": pools, "roles": roles}, **sections})


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_engines_that_time_share_a_gpu_are_started_to_sleep(kind: str) -> None:
    engine = {"engine": kind, "path": "tiny://grm"}
    placement, roles = seat_roles(elastic("gpu", policy=engine, grm=engine))
    assert set(placement.elastic_slots("engines")) == {"0", "1"}
    assert roles.served["grm"].frees_device and roles.served["grm"].is_time_shared
    assert roles.served["grm"].engine_spec("m", 0).sleeps
    _, on_cores = seat_roles(elastic("cpu", policy=engine, grm=engine))
    assert not on_cores.served["grm"].engine_spec("m", 0).sleeps


def test_a_judge_that_learns_has_no_elastic_slot() -> None:
    roles = {role: {"pool": "engines"} for role in ("policy", "learner", "grm", "grm_learner")}
    placement = {"pools": {"engines": {"slots": 2, "elastic": True}}, "roles": roles}
    engines = {"policy": {"engine": "vllm"}, "grm": {"engine": "vllm", "train": {"enabled": True}}}
    with pytest.raises(ConfigError, match=r"grm\.train\.enabled: the pool engines is elastic"):
        seat_roles(build_config({"placement": placement, **engines}))


def test_embedded_engines_stay_where_they_are() -> None:
    for resource in ("cpu", "gpu"):
        _, roles = seat_roles(elastic(resource))
        assert not roles.served["policy"].frees_device


def test_servers_that_run_already_have_no_elastic_slot() -> None:
    engine = {"sglang": {"urls": ["http://a:1", "http://b:1"]}}
    config = elastic("gpu", engine=engine, policy={"engine": "sglang"})
    with pytest.raises(ConfigError, match=r"urls: .*elastic=false"):
        seat_roles(config)


def by_turns(resource: str = "gpu", learner: str = "all", **sections: object) -> RunConfig:
    pools = {"all": {"slots": 2, "resource": resource, "time_shared": True}, "train": {"slots": 1}}
    roles = {"policy": {"pool": "all"}, "grm": {"pool": "all"}, "learner": {"pool": learner}}
    return build_config({"placement": {"pools": pools, "roles": roles}, **sections})


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_engines_that_time_share_a_gpu_with_the_learner_are_started_to_sleep(kind: str) -> None:
    placement, roles = seat_roles(by_turns(policy={"engine": kind}))
    assert placement.time_sharing_roles == ("policy", "grm")
    assert roles.served["policy"].engine_spec("m", 0).sleeps
    assert not roles.served["grm"].engine_spec("m", 0).sleeps, "the embedded engine keeps its weights"
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


def test_judge_with_its_own_devices_does_not_wait_for_the_engines_that_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The policy and the first judge are on an elastic pool, the second judge on its own."""
    pools = {"engines": {"slots": 2, "resource": "gpu", "elastic": True}, "apart": {"slots": 1, "resource": "gpu"}}
    seats = {"policy": "engines", "learner": "apart", "grm": "engines", "second": "apart"}
    config = build_config(
        {
            "engine": {"kind": "vllm"},
            "models": {"second": {"path": "tiny://grm"}},
            "judges": {"other": {"model": "second"}},
            "reward": {"kind": "jury", "members": ["judge", "other"]},
            "placement": {"pools": pools, "roles": {role: {"pool": pool} for role, pool in seats.items()}},
        },
    )
    models = {name: Model(name=name, path="", renderer=None, context_tokens=1) for name in config.served}  # type: ignore[arg-type]
    _, roles = seat_roles(config)
    together: list[list[str]] = []

    async def start(cluster: object, some: Sequence[Model], *_: object) -> dict[str, str]:
        together.append([model.name for model in some])
        return {model.name: model.name for model in some}

    monkeypatch.setattr("grmpipe.run.build.start_models.start_in_turn", start)
    prepared = SimpleNamespace(roles=roles, models=models)
    started = asyncio.run(start_routers(None, prepared, NoEvents()))  # type: ignore[arg-type]
    assert together == [["policy", "grm"], ["second"]]
    assert list(started) == ["policy", "grm", "second"]


class Telling:
    def __init__(self, found: str) -> None:
        self.found = found

    def describe_start(self) -> str:
        return self.found


def test_the_start_of_each_models_first_engine_is_described_if_it_says_something() -> None:
    def of(**engines: object) -> SimpleNamespace:
        return SimpleNamespace(engines=SimpleNamespace(members=SimpleNamespace(alive=engines)))

    models = {
        "policy": of(**{"policy-0": Telling("12 tokens"), "policy-1": Telling("13 tokens")}),
        "grm": of(**{"grm-0": Telling("14 tokens")}),
        "silent": of(**{"silent-0": Telling("")}),
        "embedded": of(**{"embedded-0": object()}),
        "outside": SimpleNamespace(engines=None),
    }
    assert list(describe_starts(models)) == ["policy-0 (of 2): 12 tokens", "grm-0: 14 tokens"]
