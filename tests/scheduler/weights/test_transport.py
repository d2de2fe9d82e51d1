"""Which way weights take, by place and by engine."""

from __future__ import annotations

import pytest

from grmpipe.config.engine_kinds import ENGINE_KINDS
from scheduler.weights.transport import TRANSPORTS, Route, choose_transport, possible

TAKES = {name: kind.transports for name, kind in ENGINE_KINDS.items() if kind.transports}
CPU = Route(learner="cpu", engines="cpu", same_machine=True)
CPU_FAR = Route(learner="cpu", engines="cpu", same_machine=False)
GPU = Route(learner="gpu", engines="gpu", same_machine=True)
GPU_FAR = Route(learner="gpu", engines="gpu", same_machine=False)
ONE_GPU = Route(learner="gpu", engines="gpu", same_machine=True, with_engine=True, all_shared=True)
BESIDE_ONE = Route(learner="gpu", engines="gpu", same_machine=True, with_engine=True)
BESIDE_ONE_FAR = Route(learner="gpu", engines="gpu", same_machine=False, with_engine=True)
MIXED = Route(learner="gpu", engines="cpu", same_machine=True)
IN_PROCESS = Route(learner="cpu", engines="cpu", same_machine=True, same_process=True)
ROUTES = (CPU, CPU_FAR, GPU, GPU_FAR, ONE_GPU, BESIDE_ONE, BESIDE_ONE_FAR, MIXED, IN_PROCESS)


@pytest.mark.parametrize(
    ("engine", "route", "transport"),
    [
        ("embedded", CPU, "shared_memory"),
        ("embedded", CPU_FAR, "object_store"),
        ("embedded", GPU, "nccl"),
        ("embedded", GPU_FAR, "nccl"),
        ("embedded", ONE_GPU, "cuda_ipc"),
        ("embedded", MIXED, "shared_memory"),
        ("embedded", IN_PROCESS, "object_store"),
        ("vllm", CPU, "shared_memory"),
        ("vllm", CPU_FAR, "gloo"),
        ("vllm", GPU, "nccl"),
        ("vllm", ONE_GPU, "cuda_ipc"),
        ("vllm", BESIDE_ONE, "shared_memory"),
        ("vllm", BESIDE_ONE_FAR, "gloo"),
        ("embedded", BESIDE_ONE_FAR, "object_store"),
        ("sglang", CPU, "gloo"),
        ("sglang", CPU_FAR, "gloo"),
        ("sglang", GPU_FAR, "nccl"),
        ("sglang", ONE_GPU, "gloo"),
        ("sglang", BESIDE_ONE, "gloo"),
        ("sglang", MIXED, "gloo"),
    ],
)
def test_auto_follows_the_places(engine: str, route: Route, transport: str) -> None:
    assert choose_transport("auto", engine, TAKES[engine], route) == transport


@pytest.mark.parametrize("engine", TAKES)
@pytest.mark.parametrize("route", ROUTES)
def test_what_auto_chooses_could_have_been_asked_for(engine: str, route: Route) -> None:
    if engine == "sglang" and route.same_process:
        return  # a server is never in the learner's process
    chosen = choose_transport("auto", engine, TAKES[engine], route)
    assert choose_transport(chosen, engine, TAKES[engine], route) == chosen


@pytest.mark.parametrize(
    ("wanted", "engine", "route", "words"),
    [
        (
            "shared_memory",
            "sglang",
            CPU,
            r"^sync\.transport: engine=sglang can't take shared_memory; .* auto or gloo or disk",
        ),
        (
            "shared_memory",
            "vllm",
            CPU_FAR,
            "shared_memory needs learner and engines on one machine; .* gloo or object_",
        ),
        ("nccl", "vllm", CPU, "nccl needs a GPU for the learner's first rank that has no engine, and engines on GPUs"),
        ("nccl", "vllm", ONE_GPU, "nccl needs a GPU for the learner's first rank that has no engine"),
        ("cuda_ipc", "embedded", GPU, "cuda_ipc needs every engine on the GPU of a rank of the learner's"),
        ("gloo", "embedded", IN_PROCESS, r"gloo needs the engines in processes of their own \(cluster=ray\)"),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_can(wanted: str, engine: str, route: Route, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose_transport(wanted, engine, TAKES[engine], route)


def test_bytes_through_the_object_store_or_a_file_go_anywhere() -> None:
    assert all(possible(transport, route) for transport in ("object_store", "disk") for route in ROUTES)
    assert {transport for takes in TAKES.values() for transport in takes} == set(TRANSPORTS) - {"auto"}


def test_an_engine_that_no_way_leads_to_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^sync\.transport: engine=mine takes nccl alone"):
        choose_transport("auto", "mine", ("nccl",), CPU)
