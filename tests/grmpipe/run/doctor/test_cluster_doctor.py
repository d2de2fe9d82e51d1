"""The doctor of a cluster without Ray: machines that this process plays, with planted faults."""

from __future__ import annotations

import asyncio
import operator
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from configs import run_config

from grmpipe.config.critic import CriticConfig
from grmpipe.config.env import EnvConfig
from grmpipe.config.grm import GrmConfig, GrmTrainConfig
from grmpipe.config.isolation import IsolationConfig
from grmpipe.config.run_config import RunConfig
from grmpipe.config.train import AlgorithmConfig
from grmpipe.models.lm.footprint import footprint_of_shape
from grmpipe.models.settings import LoraConfig, ModelConfig, ModelShape
from grmpipe.run.doctor import node_examiner
from grmpipe.run.doctor.cluster_doctor import (
    checkpoint_gb,
    examine_nodes,
    list_expectations,
    placement_on,
    report,
    sum_found,
)
from grmpipe.run.doctor.node_examiner import (
    SHARED_MEMORY,
    TEMPORARY,
    Expected,
    Finding,
    NodeExaminer,
    cuda_found,
    isolation_found,
    space_found,
    versions_found,
)
from grmpipe.scheduler.placement import NodeCapacity, PlacementConfig, PoolConfig, RoleConfig

ADDRESSES = ("127.0.0.1", "127.0.0.2")
OWN = {"python": "3.11.9", "grmpipe": "abc", "torch": "2.13.0"}


class PlayedNode(NodeExaminer):
    """A machine of its own address, with a fault or two."""

    def __init__(self, rank: int, folder: str | None = None, fails: str = "") -> None:
        super().__init__(0, 1, None)
        self._played_rank, self._folder, self._fails = rank, folder, fails

    def address(self) -> str:
        return ADDRESSES[self._played_rank]

    def write(self, folder: str, name: str) -> str:
        return super().write(self._folder or folder, name)

    def unread(self, folder: str, names: Sequence[str]) -> list[str]:
        return super().unread(self._folder or folder, names)

    def erase(self, folder: str, name: str) -> None:
        super().erase(self._folder or folder, name)

    def gpus(self) -> list[str]:
        return ["NVIDIA H100 80GB HBM3"]

    def all_reduce(self, num_megabytes: int) -> float:
        if self._fails:
            raise RuntimeError(self._fails)
        return 0.01


class Played:
    """An ActorGroup in this process."""

    def __init__(self, *nodes: PlayedNode) -> None:
        self._nodes = nodes
        self.size = len(nodes)

    async def call(self, rank: int, method: str, *args: object) -> object:
        return operator.methodcaller(method, *args)(self._nodes[rank])

    async def call_all(self, method: str, *args: object) -> list[object]:
        return await self.call_each(method, [args] * self.size)

    async def call_each(self, method: str, args_by_rank: Sequence[tuple]) -> list[object]:
        return [await self.call(rank, method, *args) for rank, args in enumerate(args_by_rank)]

    async def close(self) -> None:
        for node in self._nodes:
            node.close()


def capacities(gpus: int = 0) -> list[NodeCapacity]:
    names = ("one", "two")
    pairs = zip(names, ADDRESSES, strict=True)
    return [NodeCapacity(name=name, cpus=2, gpus=gpus, address=address) for name, address in pairs]


def findings_of(
    folder: Path, *nodes: PlayedNode, gpus: int = 0, config: RunConfig | None = None
) -> dict[tuple[str, str], Finding]:
    async def run() -> list[Finding]:
        group = Played(*nodes)
        try:
            on_gpus = group if gpus else None
            expected = replace(list_expectations(config or run_config()), folder=str(folder))
            return await examine_nodes(expected, capacities(gpus), group, on_gpus)
        finally:
            await group.close()

    return {(finding.node, finding.check): finding for finding in asyncio.run(run())}


def test_healthy_cluster_passes_every_check_on_every_machine(tmp_path: Path) -> None:
    found = findings_of(tmp_path / "run", PlayedNode(0), PlayedNode(1))
    checks = {check for _, check in found}
    assert checks >= {"versions", "CUDA", "/dev/shm", "/tmp", "run's disk", "ports", "run_dir", "gloo"}
    assert all((node, check) in found for node in ("one", "two") for check in checks)
    between = ("versions", "CUDA", "ports", "run_dir", "gloo", "policy's files", "grm's files")
    assert all(found[node, check].ok for node in ("one", "two") for check in between)
    assert not list(tmp_path.glob(".doctor-*"))


def test_where_environments_have_hosts_each_machine_says_what_isolation_they_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Isolates(PlayedNode):
        def examine(self, expected: Expected, has_gpus: bool) -> list[Finding]:
            assert expected.isolation is not None
            lacks = ValueError("isolation.require: this machine lacks: Landlock") if self._played_rank else None
            monkeypatch.setattr(node_examiner, "check_isolation", Mock(side_effect=lacks))
            return super().examine(expected, has_gpus)

    monkeypatch.setattr(node_examiner, "describe_isolation", lambda: "process")
    config = run_config(
        env=EnvConfig(kind="tools", functions="grmpipe.tiny.tools"),
        placement=PlacementConfig(pools={"tools": PoolConfig()}, roles={"env": RoleConfig(pool="tools")}),
    )
    found = findings_of(tmp_path, Isolates(0), Isolates(1), config=config)
    assert found["one", "isolation"].ok and found["one", "isolation"].text == "process"
    assert not found["two", "isolation"].ok and found["two", "isolation"].text.startswith("env.isolation.require: this")


def test_a_runtime_that_does_not_answer_is_named_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grmpipe.envs.sandbox.env_host.answers", lambda runtime: False)
    docker = IsolationConfig(kind="container", image="i", runtime="apptainer")
    found = isolation_found(docker)
    assert not found.ok and found.text.startswith("env.isolation.runtime: apptainer does not answer")
    assert isolation_found(IsolationConfig()).ok


def test_a_folder_of_its_own_is_noticed_on_both_sides(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "local").mkdir()
    found = findings_of(tmp_path / "shared", PlayedNode(0), PlayedNode(1, folder=str(tmp_path / "local")))
    one, two = found["one", "run_dir"], found["two", "run_dir"]
    assert not one.ok and "doesn't see what two wrote" in one.text and "the driver" not in one.text
    assert not two.ok and "doesn't see what one, the driver wrote" in two.text
    assert not list(tmp_path.rglob(".doctor-*"))


def test_a_folder_that_cant_be_written_is_named_with_the_reason(tmp_path: Path) -> None:
    found = findings_of(tmp_path, PlayedNode(0), PlayedNode(1, folder="/proc"))
    assert not found["two", "run_dir"].ok and "can't be written here" in found["two", "run_dir"].text


def test_a_port_that_nothing_answers_is_a_problem_of_the_machine_that_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect: Callable[..., socket.socket] = socket.create_connection

    def firewalled(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[0] == "127.0.0.2":
            raise TimeoutError("timed out")
        return connect(address, timeout=timeout)

    monkeypatch.setattr(node_examiner.socket, "create_connection", firewalled)
    found = findings_of(tmp_path, PlayedNode(0), PlayedNode(1))
    assert not found["one", "ports"].ok and "can't connect to 127.0.0.2 (timed out)" in found["one", "ports"].text
    assert found["two", "ports"].ok


def test_ranks_that_cant_sum_name_the_networks_variables(tmp_path: Path) -> None:
    failing = PlayedNode(1, fails="NCCL error: unhandled system error\nmore")
    found = findings_of(tmp_path, PlayedNode(0), failing, gpus=8)
    for node in ("one", "two"):
        assert not found[node, "NCCL"].ok and "NCCL_SOCKET_IFNAME" in found[node, "NCCL"].text
        assert "(NCCL error: unhandled system error)" in found[node, "NCCL"].text
    assert found["one", "GPU"].text == "NVIDIA H100 80GB HBM3"
    assert ("one", "gloo") not in found


@pytest.mark.parametrize(
    ("check", "num_machines", "took_s", "ok"),
    [("NCCL", 2, 0.0128, True), ("NCCL", 2, 0.256, False), ("gloo", 2, 0.256, True), ("NCCL", 1, 0.256, True)],
    ids=["20 GB/s", "1 GB/s", "gloo is for messages", "one machine"],
)
def test_nccl_at_the_speed_of_sockets_is_a_problem(check: str, num_machines: int, took_s: float, ok: bool) -> None:
    found = sum_found("one", check, 256, num_machines, took_s)
    assert found.ok == ok
    assert ("NCCL_IB_HCA" in found.text) != ok
    assert "256 MB over" in found.text


def test_a_sum_over_machines_is_checked() -> None:
    assert NodeExaminer(0, 1, None).all_reduce(1) > 0


def test_a_machine_without_cores_is_reported_and_not_examined(tmp_path: Path) -> None:
    nodes = [*capacities(), NodeCapacity(name="bare", cpus=0, gpus=0, address="127.0.0.3")]
    assert placement_on(nodes).pools["nodes"].slots == 2

    async def run() -> list[Finding]:
        expected = replace(list_expectations(run_config()), folder=str(tmp_path))
        return await examine_nodes(expected, nodes, Played(PlayedNode(0), PlayedNode(1)), None)

    last = asyncio.run(run())[-1]
    assert (last.node, last.check, last.ok) == ("bare", "cores", False)


def test_each_machine_with_gpus_has_a_process_on_one() -> None:
    nodes = [*capacities(gpus=8), NodeCapacity(name="head", cpus=4, gpus=0)]
    placement = placement_on(nodes)
    assert {role: len(seats) for role, seats in placement.seats.items()} == {"nodes": 3, "gpus": 2}
    assert {pool.strategy for pool in placement.pools.values()} == {"STRICT_SPREAD"}


def test_other_versions_are_named_with_the_drivers() -> None:
    assert versions_found(OWN, OWN).ok
    other = versions_found(OWN | {"torch": "2.11.0", "grmpipe": "abd"}, OWN)
    assert not other.ok
    assert other.text.startswith("grmpipe abd (driver: abc), torch 2.11.0 (driver: 2.13.0): install the same")


def test_a_driver_too_old_for_torch_or_missing_is_a_problem_of_a_machine_with_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    old = cuda_found("570.1", True)
    assert not old.ok and "needs driver 580 or newer" in old.text
    assert not cuda_found("", True).ok and "--gpus all" in cuda_found("", True).text
    assert cuda_found("", False).ok and cuda_found("580.95.05", True).ok


def test_a_full_disk_and_a_containers_small_shared_memory_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {SHARED_MEMORY: 0.064, TEMPORARY: 1.0, Path("/"): 200.0}
    monkeypatch.setattr(node_examiner, "free_gb", free.__getitem__)
    shm, temporary, disk = space_found(True, 294.0, Path("/runs"))
    assert not shm.ok and "docker run --shm-size" in shm.text
    assert not temporary.ok and "Ray's logs" in temporary.text
    assert not disk.ok and "294 are needed for checkpoints" in disk.text
    monkeypatch.setattr(node_examiner, "free_gb", lambda folder: 1000.0)
    assert all(finding.ok for finding in space_found(True, 294.0, Path("/runs")))


SHAPE_8B = ModelShape(
    num_layers=36, hidden_size=4096, intermediate_size=12288, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=151936, context_tokens=40960,
)  # fmt: skip


def test_room_for_checkpoints_follows_from_the_model_and_its_optimizer() -> None:
    config = run_config(policy=ModelConfig(shape=SHAPE_8B))
    assert checkpoint_gb(config) == pytest.approx(3 * 12 * 8.19, rel=0.01), "two are kept, one is written"
    assert checkpoint_gb(run_config()) == 0


def test_a_checkpoint_of_adapters_has_nothing_of_the_frozen_model() -> None:
    config = run_config(policy=ModelConfig(shape=SHAPE_8B, lora=LoraConfig(rank=32)))
    values = 32 * footprint_of_shape(SHAPE_8B).adapter_parameters(1, [])
    assert checkpoint_gb(config) == pytest.approx(3 * 12 * values / 1e9) and values < 8.19e9 / 50


def test_critics_and_judges_that_learn_are_in_the_checkpoints_too() -> None:
    model = ModelConfig(shape=SHAPE_8B)
    grm = GrmConfig(shape=SHAPE_8B, train=GrmTrainConfig(enabled=True))
    seats = {role: RoleConfig(pool="train") for role in ("policy", "learner", "grm", "grm_learner", "critic")}
    placement = PlacementConfig(pools={"train": PoolConfig(slots=5)}, roles=seats)
    config = run_config(policy=model, grm=grm, placement=placement)
    assert checkpoint_gb(config) == pytest.approx(2 * 3 * 12 * 8.19, rel=0.01)
    ppo = AlgorithmConfig(estimator="gae")
    config = run_config(policy=model, critic=CriticConfig(enabled=True), algorithm=ppo, placement=placement)
    assert checkpoint_gb(config) == pytest.approx(2 * 3 * 12 * 8.19, rel=0.01)


def test_the_report_has_a_line_for_each_machine_and_check() -> None:
    text = report("h:6379", [Finding(node="a", check="CUDA", ok=True, text="driver 580"),
                             Finding(node="bb", check="ports", ok=False, text="closed")])  # fmt: skip
    assert text.splitlines() == [
        "cluster h:6379: machines 2, problems 1",
        "  a   CUDA   ok       driver 580",
        "  bb  ports  PROBLEM  closed",
    ]
