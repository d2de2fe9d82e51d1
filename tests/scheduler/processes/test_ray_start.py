"""Joining a Ray that isn't there, and the environment of its processes. Starts no Ray."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from grmpipe.scheduler.placement import ClusterConfig, NodeCapacity
from grmpipe.scheduler.processes.ray_start import (
    count_threads,
    init_ray,
    nodes_of_ray,
    select_env_vars,
    without_allocator,
)
from grmpipe.scheduler.run_together import describe_failure

ROOT = Path(__file__).parents[3]


def test_dead_address_is_reported_at_once() -> None:
    """Ray itself would try for half a minute."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    began_s = time.monotonic()
    with pytest.raises(ValueError, match=rf"^cluster\.address: nothing listens at {address} .*cluster\.address=null"):
        init_ray(ClusterConfig(address=address))
    assert time.monotonic() - began_s < 20


def test_a_ray_that_does_not_start_here_says_what_to_type_beside_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", time_out)
    with pytest.raises(Exception, match="timed out") as raised:
        init_ray(ClusterConfig())
    assert describe_failure(raised.value).splitlines() == [
        "Ray didn't start on this machine; if it is slow or busy, try again, or type cluster=inprocess",
        "Exception: The current node timed out during startup.",
    ]


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "a..b:6379"])
def test_address_that_is_none_is_refused_by_its_key(address: str) -> None:
    with pytest.raises(ValueError, match=rf"^cluster\.address: nothing listens at {address} "):
        init_ray(ClusterConfig(address=address))


def test_named_variables_are_passed_on_and_no_others() -> None:
    here = {"HF_HOME": "/hf", "HF_TOKEN": "secret", "NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5", "HOME": "/root"}
    assert select_env_vars(["HF_TOKEN", "NCCL_*", "GLOO_*"], here) == {
        "HF_TOKEN": "secret", "NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5"
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"^cluster\.env_vars: HF_HOMES is not set; export it first"):
        select_env_vars(["HF_HOMES"], here)


def test_a_ray_that_is_joined_is_sent_our_packages_and_the_users_packages_and_modules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "joined_lab").mkdir()  # without an __init__.py
    (tmp_path / "joined_reward.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    asked: list[dict] = []
    monkeypatch.setattr("ray.init", lambda **options: asked.append(options["runtime_env"]))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = ClusterConfig(
            address=f"127.0.0.1:{listener.getsockname()[1]}", packages=["joined_reward", "joined_lab.tools", "grmpipe"]
        )
        init_ray(config)
        ours = str(ROOT / "grmpipe")
        assert asked[0]["py_modules"] == [ours, str(tmp_path / "joined_reward.py"), str(tmp_path / "joined_lab")]
        for name in ("my_rewards", "sys"):
            with pytest.raises(ValueError, match=rf"^cluster\.packages: '{name}' can't be imported; give importable"):
                init_ray(replace(config, packages=[name]))


def test_an_engine_gets_no_settings_of_the_learners_allocator() -> None:
    sent, here = (
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "HF_HOME": "/hf"},
        {"PYTORCH_CUDA_ALLOC_CONF": "x:1"},
    )
    assert without_allocator(sent, here) == {"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": ""}
    assert without_allocator({}, {"HOME": "/root"}) == {}


def test_a_value_among_the_names_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match=r"^env_vars: expected only names.* got 'HF_TOKEN'$"):
        ClusterConfig(env_vars=["HF_TOKEN=hf_secret"])


@pytest.mark.parametrize(
    ("gpus", "threads"), [(1, 12), (4, 12), (0.5, 6), (0.01, 1)], ids=["one", "tensor parallel", "half", "a sliver"]
)
def test_a_process_on_a_gpu_has_its_share_of_the_cores(gpus: float, threads: int) -> None:
    """A process with several GPUs starts one process for each."""
    nodes = [NodeCapacity(name=str(cores), cpus=cores, gpus=gpus) for cores, gpus in ((128, 8), (96, 8), (64, 0))]
    assert count_threads(nodes, gpus) == threads


def test_machines_of_one_host_name_are_told_apart_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would count as one machine."""
    found = [("vm", "10.0.0.1", True), ("vm", "10.0.0.2", True), ("other", "10.0.0.3", True), ("vm", "10.0.0.4", False)]
    nodes = [
        {"NodeManagerHostname": host, "NodeManagerAddress": address, "Alive": alive, "Resources": {"CPU": 2.0}}
        for host, address, alive in found
    ]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    assert [(node.name, node.address) for node in nodes_of_ray()] == [
        ("vm (10.0.0.1)", "10.0.0.1"), ("vm (10.0.0.2)", "10.0.0.2"), ("other", "10.0.0.3"),
    ]  # fmt: skip
