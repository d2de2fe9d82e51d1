"""The transport of a learner's weights, by placement, resource and engine. Starts nothing."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grmpipe.config.io import yaml_io
from grmpipe.config.run_config import RunConfig
from grmpipe.models.engines import installed
from grmpipe.models.settings import LoraConfig
from grmpipe.roles.role_placement import resolve_transport
from grmpipe.roles.roles import resolve_roles
from grmpipe.scheduler.placement import Placement, place

ONE_POOL = {role: {"pool": "all"} for role in ("learner", "policy")}
# Pools with their slots and roles: from all roles on one slot to each on its own.
PLACES = {
    "one slot": ({"all": 1}, ONE_POOL),
    "two slots, one rank": ({"all": 2}, {**ONE_POOL, "policy": {"pool": "all", "replicas": 2}}),
    "two slots, one engine": ({"all": 2}, {**ONE_POOL, "learner": {"pool": "all", "replicas": 2}}),
    "all on two slots": ({"all": 2}, {role: {"pool": "all", "replicas": 2} for role in ONE_POOL}),
    "all on eight slots": ({"all": 8}, {role: {"pool": "all", "replicas": 8} for role in ONE_POOL}),
    "pools apart": ({"train": 2, "rollout": 2}, {"learner": {"pool": "train", "replicas": 2},
                                                 "policy": {"pool": "rollout", "replicas": 2}}),
    "pools apart, an engine of two": ({"train": 1, "rollout": 2}, {"learner": {"pool": "train"},
                                      "policy": {"pool": "rollout", "slots_per_replica": 2}}),
}  # fmt: skip


def config_of(name: str, resource: str, engine: str, wanted: str = "auto", **pool: bool) -> RunConfig:
    slots, roles = PLACES[name]
    pools = {each: {"slots": number, "resource": resource, **pool} for each, number in slots.items()}
    judge = {"pools": {**pools, "judging": {}}, "roles": {**roles, "grm": {"pool": "judging"}}}
    sections = {"placement": judge, "policy": {"engine": engine}, "sync": {"transport": wanted}}
    return yaml_io.build_config(sections)


def chosen(config: RunConfig, same_machine: bool = True) -> str:
    placement = seats(config)
    policy = resolve_roles(config, placement).served["policy"]
    return resolve_transport(policy, config, placement, same_machine=same_machine)


def seats(config: RunConfig) -> Placement:
    return place(config.placement, config.roles, config.served, config.learners)


def gpus_of(placement: Placement, role: str) -> list[tuple[str, int]]:
    """By rank; empty if the role is on cores."""
    seats = [seat for seat in placement.seats[role] if placement.pools[seat.pool].resource == "gpu"]
    return [(seat.pool, slot) for seat in seats for slot in seat.slots]


@pytest.mark.parametrize(
    ("name", "resource", "engine", "elastic"),
    [
        case
        for case in itertools.product(PLACES, ("cpu", "gpu"), ("embedded", "vllm", "sglang"), (False, True))
        if not (case[3] and "an engine of two" in case[0])
    ],
)
def test_no_gpu_that_has_an_engine_sends_by_nccl(name: str, resource: str, engine: str, elastic: bool) -> None:
    config = config_of(name, resource, engine, elastic=elastic)
    placement = seats(config)
    sender, *_ = gpus_of(placement, "learner") or [None]
    engines = gpus_of(placement, "policy")
    for same_machine in (True, False):
        transport = chosen(config, same_machine)
        if transport == "nccl":
            assert sender is not None and engines and sender not in engines
        if transport == "cuda_ipc":
            assert engines and set(engines) <= set(gpus_of(placement, "learner"))


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        ("one slot", "cuda_ipc"),
        ("all on two slots", "cuda_ipc"),
        ("all on eight slots", "cuda_ipc"),
        ("two slots, one engine", "cuda_ipc"),
        ("two slots, one rank", "shared_memory"),
        ("pools apart", "nccl"),
        ("pools apart, an engine of two", "nccl"),
    ],
)
def test_on_gpus_each_rank_serves_the_engines_of_its_own(name: str, transport: str) -> None:
    assert chosen(config_of(name, "gpu", "vllm")) == transport


def test_rank_that_shares_a_gpu_with_an_engine_can_not_send_by_nccl() -> None:
    words = r"^sync\.transport: nccl needs the learner's first rank on a GPU without an engine.*cuda_ipc or shared"
    with pytest.raises(ValueError, match=words):
        chosen(config_of("all on two slots", "gpu", "vllm", "nccl"))


@pytest.fixture
def other_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The interpreter of an environment with NCCL 2.30.7, beside this one with 2.29.7."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 2.30.7\n", encoding="utf-8")
    python.chmod(0o755)
    known = installed._version
    monkeypatch.setattr(installed, "_version", lambda name: "2.29.7" if name == "nvidia-nccl-cu13" else known(name))
    return str(python)


@pytest.mark.parametrize(("same", "transport"), [(False, "gloo"), (True, "nccl")])
def test_an_environment_with_another_nccl_gets_its_weights_otherwise(
    same: bool, transport: str, other_nccl: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of("pools apart", "gpu", "sglang")
    assert chosen(config) == "nccl", "SGLang in this environment"
    python = sys.executable if same else other_nccl
    elsewhere = replace(config, engine=replace(config.engine, sglang=replace(config.engine.sglang, python=python)))
    assert chosen(elsewhere) == transport
    warned = "NCCL 2.29.7 and the engine's environment 2.30.7" in caplog.text
    assert warned == (not same)


def test_nccl_between_two_versions_is_refused_with_what_to_type(other_nccl: str) -> None:
    config = config_of("pools apart", "gpu", "sglang", "nccl")
    elsewhere = replace(config, engine=replace(config.engine, sglang=replace(config.engine.sglang, python=other_nccl)))
    with pytest.raises(
        ValueError, match=r"^sync\.transport: nccl: .*2\.29\.7.*2\.30\.7.*`pip install .*==2\.29\.7`.*auto"
    ):
        chosen(elsewhere)


def test_adapters_alone_go_to_sglang_by_files() -> None:
    for resource, wanted in itertools.product(("cpu", "gpu"), ("auto", "gloo")):
        config = config_of("pools apart", resource, "sglang", wanted)
        policy = replace(config.models["policy"], lora=LoraConfig(rank=4, sync="adapters"))
        run = replace(config, models={**config.models, "policy": policy})
        assert chosen(config) == ("nccl" if (resource, wanted) == ("gpu", "auto") else "gloo")
        if wanted == "auto":
            assert chosen(run) == "disk"
        else:
            with pytest.raises(
                ValueError, match="engine=sglang doesn't support gloo; set sync.transport to auto or disk"
            ):
                chosen(run)


def test_engine_that_shares_no_gpu_with_the_learner_can_not_use_cuda_ipc() -> None:
    with pytest.raises(ValueError, match=r"^sync\.transport: cuda_ipc needs every engine on the GPU of a learner rank"):
        chosen(config_of("two slots, one rank", "gpu", "vllm", "cuda_ipc"))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (
            "pigeon",
            r"^sync\.transport: unknown transport 'pigeon'; known: shared_memory, disk, .*; your own by its dotted",
        ),
        ("no_such_loft.PIGEON", r"^sync\.transport: no_such_loft can't be imported \(ModuleNotFoundError"),
        ("grmpipe.models.types.PIGEON", r"^sync\.transport: the module grmpipe\.models\.types has no PIGEON"),
        ("grmpipe.models.types.Payload", r"^sync\.transport: grmpipe\.models\.types\.Payload is no TransportKind"),
    ],
)
def test_a_name_of_no_transport_is_refused(wanted: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chosen(config_of("pools apart", "cpu", "embedded", wanted))


def test_a_users_own_transport_is_taken_by_its_dotted_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_loft.py").write_text(
        "from grmpipe.models.types import TransportKind\n"
        "PIGEON = TransportKind(name='pigeon', sender='users_loft.Pigeon', same_machine=True, needs='needs one roof')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = config_of("pools apart", "cpu", "embedded", "users_loft.PIGEON")
    assert chosen(config) == "users_loft.PIGEON"
    with pytest.raises(ValueError, match=r"^sync\.transport: pigeon needs one roof; set sync\.transport to auto or "):
        chosen(config, same_machine=False)


@pytest.mark.parametrize(("ranks", "transport"), [(2, "cuda_ipc"), (1, "shared_memory")])
def test_an_engine_over_several_gpus_gets_weights_from_the_ranks_on_all_of_them(ranks: int, transport: str) -> None:
    pools = {"all": {"slots": 2, "resource": "gpu"}, "judging": {}}
    roles = {"learner": {"pool": "all", "replicas": ranks}, "policy": {"pool": "all", "slots_per_replica": 2},
             "grm": {"pool": "judging"}}  # fmt: skip
    config = yaml_io.build_config({"placement": {"pools": pools, "roles": roles}, "policy": {"engine": "vllm"}})
    assert chosen(config) == transport


def with_delta(config: RunConfig, dtype: str = "bfloat16", rank: int = 0, **engine: object) -> RunConfig:
    policy = replace(config.models["policy"], dtype=dtype, lora=LoraConfig(rank=rank), **engine)
    return replace(config, models={**config.models, "policy": policy}, sync=replace(config.sync, delta=True))


def test_changes_go_by_a_transport_whose_bytes_cost_something() -> None:
    for engine, transport in (("embedded", "object_store"), ("vllm", "disk"), ("sglang", "disk")):
        assert chosen(with_delta(config_of("pools apart", "gpu", engine))) == transport
    assert chosen(with_delta(config_of("pools apart", "cpu", "vllm", "object_store"))) == "object_store"


@pytest.mark.parametrize(
    ("changes", "transport", "words"),
    [
        ({}, "nccl", "nccl is as fast with all bytes; type sync.transport=auto or one of disk, object_store, or"),
        ({"dtype": "float32"}, "auto", "in float32 nearly every weight changes .*; type policy.dtype=bfloat16, or"),
        ({"rank": 4}, "auto", "adapters of policy are small, and sent whole; type"),
        (
            {"engine": "sglang", "engine_options": {"urls": ["http://10.0.0.2:30000"]}}, "auto",
            "policy.engine_options.urls are servers of their own, .* no copy of the last push is kept; type",
        ),
    ],
    ids=["transport", "dtype", "adapters", "joined"],
)  # fmt: skip
def test_where_changes_save_nothing_they_are_refused_by_key(
    changes: dict[str, Any], transport: str, words: str
) -> None:
    config = config_of("pools apart", "gpu", "vllm", transport)
    with pytest.raises(ValueError, match=rf"^sync\.delta: {words} sync\.delta=false$"):
        chosen(with_delta(config, **changes))
