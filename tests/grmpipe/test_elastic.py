"""What a run with elastic slots is put together from, and what is refused of it before anything starts."""

from __future__ import annotations

import pytest

from grmpipe.checks.places import seat_roles
from grmpipe.config import ConfigError, RunConfig
from grmpipe.config_files import from_values
from grmpipe.elastic import other_seed, same_seed
from grmpipe.engines import can_sleep, engines_sleep, max_rows_of


def elastic(resource: str = "cpu", **sections: object) -> RunConfig:
    pools = {"engines": {"slots": 2, "resource": resource, "elastic": True}}
    roles = {role: {"pool": "engines"} for role in ("policy", "learner", "grm")}
    return from_values(RunConfig, {"placement": {"pools": pools, "roles": roles}, **sections})


def on_gpus(kind: str, sleep_mode: bool) -> RunConfig:
    engine = {kind: {"sleep_mode": sleep_mode, "max_batch_rows": 17}}
    return elastic("gpu", engine=engine, policy={"engine": kind}, grm={"engine": kind, "path": "tiny://grm"})


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_engines_that_share_a_gpu_by_turns_must_be_able_to_sleep(kind: str) -> None:
    key = rf"engine\.{kind}\.sleep_mode"
    with pytest.raises(ConfigError, match=rf"{key}: .*elastic pool engines.*type {key}=true"):
        seat_roles(on_gpus(kind, sleep_mode=False))
    config = on_gpus(kind, sleep_mode=True)
    placement = seat_roles(config)
    assert set(placement.elastic_slots("engines")) == {"0", "1"}
    assert engines_sleep("grm", config, placement)
    assert max_rows_of("grm", config) == 17


def test_embedded_engines_stay_where_they_are() -> None:
    for resource in ("cpu", "gpu"):
        config = elastic(resource)
        assert not engines_sleep("policy", config, seat_roles(config))


def test_servers_that_run_already_have_no_elastic_slot() -> None:
    engine = {"sglang": {"urls": ["http://a:1", "http://b:1"], "sleep_mode": True}}
    config = elastic("gpu", engine=engine, policy={"engine": "sglang"})
    with pytest.raises(ConfigError, match=r"urls: .*elastic=false"):
        seat_roles(config)


def by_turns(resource: str = "gpu", learner: str = "all", **sections: object) -> RunConfig:
    pools = {"all": {"slots": 2, "resource": resource, "time_shared": True}, "train": {"slots": 1}}
    roles = {"policy": {"pool": "all"}, "grm": {"pool": "all"}, "learner": {"pool": learner}}
    return from_values(RunConfig, {"placement": {"pools": pools, "roles": roles}, **sections})


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_engines_that_leave_a_gpu_to_the_learner_by_turns_must_be_able_to_sleep(kind: str) -> None:
    key = rf"engine\.{kind}\.sleep_mode"
    awake = by_turns(engine={kind: {"sleep_mode": False}}, policy={"engine": kind})
    with pytest.raises(ConfigError, match=rf"{key}: .*time_shared pool all.*the learner.*type {key}=true"):
        seat_roles(awake)
    config = by_turns(engine={kind: {"sleep_mode": True}}, policy={"engine": kind})
    placement = seat_roles(config)
    assert placement.time_sharing_roles == ("policy", "grm")
    assert can_sleep("policy", config, placement)
    assert can_sleep("grm", config, placement), "the embedded engine"


def test_a_pool_that_nobody_shares_with_the_learner_has_no_turns() -> None:
    way_out = r"set placement\.roles\.learner\.pool=all"
    with pytest.raises(ConfigError, match=rf"placement\.pools\.all\.time_shared: .*{way_out}"):
        seat_roles(by_turns(learner="train"))


def test_a_pool_is_elastic_or_time_shared() -> None:
    with pytest.raises(ConfigError, match=r"placement\.pools\.engines\.time_shared: .*elastic"):
        from_values(RunConfig, {"placement": {"pools": {"engines": {"elastic": True, "time_shared": True}}}})


def test_only_engines_that_draw_by_position_keep_the_seed_of_a_moved_request() -> None:
    assert same_seed(5, 30) == 5
    assert len({other_seed(5, 30), other_seed(5, 31), other_seed(6, 30), 5}) == 4
