"""A Ray that stands in another folder than the driver: files lie where the run is, processes have what they need.

One Ray for all. Its two GPUs are a claim that nobody looks into.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from models.tiny.resolve import SHIPPED
from scheduler.placement import ClusterConfig, PlacementConfig, PoolConfig, RoleConfig, place
from scheduler.ray_cluster import RayCluster

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray whose raylet stands in a folder of its own."""
    folder = tmp_path_factory.mktemp("ray")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    head = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}",
            "--node-ip-address=127.0.0.1", "--num-cpus=4", "--num-gpus=2", "--include-dashboard=false",
            "--object-store-memory=100000000",
        ],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not answers(port):
            assert head.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(60)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def launch(cwd: Path, address: str, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, str(ROOT / "launch.py"), "+experiment=quickstart", f"cluster.address={address}",
        "tracking=none", "train.num_steps=1", "train.groups_per_batch=2", "train.group_size=2",
        "data.num_eval_prompts=4", "data.num_prompts=32", "judge.anchors=2", "watch.every=0", *overrides,
    ]  # fmt: skip
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


def test_files_of_a_run_are_where_the_run_is(joined: str, tmp_path: Path) -> None:
    """The policy is named by its name on the hub, whose cache the processes find by a variable that is passed on."""
    snapshot = tmp_path / "hf/hub/models--Some--Model/snapshots/abc"
    shutil.copytree(SHIPPED / "policy", snapshot)
    (tmp_path / "hf/hub/models--Some--Model/refs").mkdir()
    (tmp_path / "hf/hub/models--Some--Model/refs/main").write_text("abc")
    overrides = ("policy.path=Some/Model", "run_dir=run", "cluster.env_vars=[HF_HOME,HF_HUB_OFFLINE]")
    result = launch(tmp_path, joined, *overrides, HF_HOME=str(tmp_path / "hf"))
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "run/checkpoints/step_1/learner/.metadata").is_file()
    assert (tmp_path / "run/policy/tokenizer.json").is_file()
    assert list((tmp_path / "run/policy").glob("*.safetensors"))
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "completed"
    assert not list((tmp_path / "run").glob(".shared-*"))
    assert str(tmp_path / "hf") not in (tmp_path / "run/config.yaml").read_text(), "names alone, no values"


def test_a_run_dir_that_is_another_folder_elsewhere_is_refused_before_training(joined: str, tmp_path: Path) -> None:
    """/proc/self/cwd is: to each process the folder that it stands in, as a local disk of each machine would be."""
    result = launch(tmp_path, joined, "run_dir=/proc/self/cwd/run")
    assert result.returncode == 2, result.stderr[-3000:]
    assert "run_dir: the machines of cluster.address don't share /proc/self/cwd/run" in result.stderr
    assert not (tmp_path / "run/checkpoints").exists()


def test_processes_on_gpus_have_their_share_of_the_cores(joined: str) -> None:
    class Member:
        def __init__(self, rank: int, world_size: int, init_method: str | None) -> None:
            pass

        def threads(self) -> str | None:
            return os.environ.get("OMP_NUM_THREADS")

    pools, roles = {"gpus": PoolConfig(slots=2, resource="gpu")}, {"learner": RoleConfig(pool="gpus")}
    placement = place(PlacementConfig(pools=pools, roles=roles), ("learner",))

    async def scenario() -> list[object]:
        cluster = await RayCluster.start(ClusterConfig(address=joined), placement)
        try:
            return await (await cluster.start_group("learner", Member)).call_all("threads")
        finally:
            await cluster.shutdown()

    try:
        assert asyncio.run(scenario()) == ["2"], "4 cores for 2 GPUs; Ray itself would give 1"
    finally:
        ray.shutdown()
