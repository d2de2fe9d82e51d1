"""The choice of a transport, by placement and by what the engines support."""

from __future__ import annotations

import pytest

from grmpipe.config.engine_kinds import ENGINE_KINDS
from grmpipe.models.engines.engine_kind import AnyEngine
from grmpipe.models.settings import EngineConfig
from grmpipe.models.types import TransportKind
from grmpipe.models.weights.transports import TRANSPORTS
from grmpipe.roles.role_placement import list_supported
from grmpipe.scheduler.weights.choose_transport import WeightPath, choose_transport, possible

KINDS = {name: kind for name, kind in ENGINE_KINDS.items() if kind.transports}
CPU = WeightPath(learner="cpu", engines="cpu", same_machine=True)
CPU_FAR = WeightPath(learner="cpu", engines="cpu", same_machine=False)
GPU = WeightPath(learner="gpu", engines="gpu", same_machine=True)
GPU_FAR = WeightPath(learner="gpu", engines="gpu", same_machine=False)
ONE_GPU = WeightPath(learner="gpu", engines="gpu", same_machine=True, with_engine=True, all_shared=True)
BESIDE_ONE = WeightPath(learner="gpu", engines="gpu", same_machine=True, with_engine=True)
BESIDE_ONE_FAR = WeightPath(learner="gpu", engines="gpu", same_machine=False, with_engine=True)
MIXED = WeightPath(learner="gpu", engines="cpu", same_machine=True)
IN_PROCESS = WeightPath(learner="cpu", engines="cpu", same_machine=True, same_process=True)
ROUTES = (CPU, CPU_FAR, GPU, GPU_FAR, ONE_GPU, BESIDE_ONE, BESIDE_ONE_FAR, MIXED, IN_PROCESS)


def taken(engine: str, *others: TransportKind) -> tuple[TransportKind, ...]:
    kind: AnyEngine = KINDS[engine](options=KINDS[engine].read_options(EngineConfig()))
    return list_supported(kind, *others)


def choose(wanted: str, engine: str, path: WeightPath) -> str:
    kind = None if wanted == "auto" else TRANSPORTS[wanted]
    return choose_transport(kind, engine, taken(engine), path).name


@pytest.mark.parametrize(
    ("engine", "path", "transport"),
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
def test_auto_follows_the_places(engine: str, path: WeightPath, transport: str) -> None:
    assert choose("auto", engine, path) == transport


@pytest.mark.parametrize("engine", KINDS)
@pytest.mark.parametrize("path", ROUTES)
def test_transport_chosen_by_auto_is_a_valid_setting(engine: str, path: WeightPath) -> None:
    if engine == "sglang" and path.same_process:
        return  # a server is never in the learner's process
    chosen = choose("auto", engine, path)
    assert choose(chosen, engine, path) == chosen


@pytest.mark.parametrize(
    ("wanted", "engine", "path", "words"),
    [
        (
            "shared_memory",
            "sglang",
            CPU,
            r"^sync\.transport: engine=sglang doesn't support shared_memory; set .* auto or g",
        ),
        ("shared_memory", "vllm", CPU_FAR, "shared_memory needs learner and engines on one machine; .* gloo or disk"),
        ("nccl", "vllm", CPU, "nccl needs the learner's first rank on a GPU without an engine, and engines on GPUs"),
        ("nccl", "vllm", ONE_GPU, "nccl needs the learner's first rank on a GPU without an engine"),
        ("cuda_ipc", "embedded", GPU, "cuda_ipc needs every engine on the GPU of a learner rank"),
        ("gloo", "embedded", IN_PROCESS, r"gloo needs the engines in separate processes \(cluster=ray\)"),
    ],
)
def test_a_transport_that_cant_work_is_refused_with_those_that_can(
    wanted: str, engine: str, path: WeightPath, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        choose(wanted, engine, path)


def test_bytes_through_the_object_store_or_a_file_go_anywhere() -> None:
    assert all(possible(TRANSPORTS[name], path) for name in ("object_store", "disk") for path in ROUTES)


def test_one_of_the_users_own_is_chosen_by_its_needs_where_the_engine_takes_any() -> None:
    own = TransportKind(name="pigeon", sender="pigeons.Pigeon", same_machine=True, needs="needs one roof")
    for engine in ("embedded", "vllm"):
        some = taken(engine, own)
        assert choose_transport(own, engine, some, CPU) is own
        with pytest.raises(
            ValueError, match=r"^sync\.transport: pigeon needs one roof; set sync\.transport to auto or "
        ):
            choose_transport(own, engine, some, CPU_FAR)
    with pytest.raises(ValueError, match=r"engine=sglang doesn't support pigeon"):
        choose_transport(own, "sglang", taken("sglang", own), CPU)


def test_an_engine_that_no_transport_reaches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^sync\.transport: engine=mine supports only nccl"):
        choose_transport(None, "mine", [TRANSPORTS["nccl"]], CPU)
