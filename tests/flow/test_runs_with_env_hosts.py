"""Runs whose environments live in hosts: in one process, and on a Ray of two nodes where hosts and nodes are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from grmpipe.config.run_config import ConfigError
from grmpipe.envs.sandbox.crash_cleanup import find_processes, sweep

ROOT = Path(__file__).parents[2]
SOURCE = """
import asyncio
from grmpipe.envs.env import Observation, Opening
from grmpipe.models.types import Message


class Waits:
    async def open(self, episode):
        return Opening(messages=episode.prompt.messages)

    async def step(self, action):
        await asyncio.sleep(0.05)
        if action.turn:
            return Observation(done=True)
        return Observation(messages=[Message(role="user", content="Again?")])

    async def close(self):
        pass
"""
WAITS = ("env=custom", "env.target=waiting_env.Waits", "rollout.max_turns=2", "judge=rule")
HERE = ("+placement.roles={env: {pool: judging, replicas: 1}}",)
PROCESS = "env.isolation.kind=process"


@pytest.fixture(scope="module", autouse=True)
def users_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("users")
    (folder / "waiting_env.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


def test_two_hosts_in_one_process_share_the_episodes(small_run: Callable) -> None:
    files = small_run(
        *WAITS, "train.num_steps=1", "train.groups_per_batch=2", "train.group_size=2", "data.num_eval_prompts=4",
        "judge_monitor.anchors=2", "+placement.pools={tools: {slots: 2}}",
        "+placement.roles={env: {pool: tools, replicas: 2}}",
    )  # fmt: skip
    summary = files.summary
    assert summary["status"] == "completed" and summary["engines_replaced"]["env"] == 0
    assert summary["envs"]["opened"] == summary["envs"]["closed"] > 0
    timeline = json.loads((files.run_dir / "timeline.json").read_text())
    lanes = {event["args"]["name"].split(" ")[0] for event in timeline if event["name"] == "thread_name"}
    assert {"env-0", "env-1"} <= lanes


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((*HERE,), r"^placement\.roles\.env: env\.kind=single_turn has no environments to place; type env=tools"),
        (("env=workflow", "env.target=a.b", *HERE), r"^placement\.roles\.env: workflows run where the server"),
        (
            (*WAITS, "+placement.roles={env: {pool: nowhere}}"),
            r"^placement\.roles\.env\.pool: unknown pool 'nowhere'; set placement\.roles\.env\.pool=",
        ),
        (
            (*WAITS, "+placement.pools={gpus: {resource: gpu}}", "+placement.roles={env: {pool: gpus}}"),
            r"^placement\.roles\.env\.pool: environments need cores, .*type placement\.roles\.env\.pool=train or jud",
        ),
        ((*WAITS, *HERE, "env.capacity=2000"), r"^placement\.roles\.env\.replicas: 1 hosts are too few .*replicas=3"),
        (
            (*WAITS, *HERE, "env.step_s=3000", "env.episode_s=4000", "rollout.group_deadline_s=9000"),
            r"^cluster\.call_timeout_s: a host that boots or steps for 3000 s .*type cluster\.call_timeout_s=625",
        ),
    ],
)
def test_hosts_that_cant_be_placed_are_refused_with_the_way_out(
    small_run: Callable, overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        small_run(*overrides)


# -- on Ray ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Launched:
    """A run in a process of its own."""

    process: subprocess.Popen[str]
    run_dir: Path

    def until(self, holds: Callable[[], bool], what: str, within_s: float = 300.0) -> None:
        end_s = time.monotonic() + within_s
        while not holds():
            assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()[-3000:]
            assert time.monotonic() < end_s, what
            time.sleep(0.1)

    @property
    def log(self) -> str:
        file = self.run_dir / "run.log"
        return file.read_text() if file.exists() else ""

    def has_rollouts(self) -> bool:
        file = self.run_dir / "rollouts.jsonl"
        return file.exists() and file.stat().st_size > 0

    @property
    def hosts(self) -> dict[str, int]:
        """Host -> its last process."""
        return {name: int(number) for name, number in re.findall(r"(env-\d) runs in process (\d+)", self.log)}

    def ended(self) -> dict:
        _, errors = self.process.communicate(timeout=500)
        assert self.process.returncode == 0, errors[-3000:]
        return json.loads((self.run_dir / "summary.json").read_text())


@pytest.fixture
def launched(users_folder: Path, tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start a small run whose hosts are on two nodes of a Ray, which ends with the test."""
    runs: list[Launched] = []

    def start(address: str, *overrides: str) -> Launched:
        command = [
            sys.executable, str(ROOT / "launch.py"), "+experiment=quickstart", f"cluster.address={address}", *WAITS,
            "tracking=none", "train.num_steps=4", "train.groups_per_batch=4", "train.group_size=4",
            "data.num_eval_prompts=4", "data.num_prompts=64", "judge_monitor.anchors=2", "judge_monitor.every=0",
            "+placement.pools={tools: {slots: 2, strategy: STRICT_SPREAD}}", "run_dir=run",
            "+placement.roles={env: {pool: tools, replicas: 2}}", PROCESS, "env.attempts=4", *overrides,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{users_folder}"}
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        runs.append(Launched(process=process, run_dir=tmp_path / "run"))
        return runs[0]

    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()
        sweep(run.run_dir)


@pytest.fixture
def two_nodes() -> Iterator[object]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()


def no_seats_left(run: Launched) -> None:
    """Neither folders nor processes of any host."""
    assert not list((run.run_dir / "env_hosts").glob("*.json"))


@pytest.mark.long
def test_a_host_that_is_killed_is_replaced_and_its_episodes_are_played_elsewhere(
    two_nodes: object, launched: Callable[..., Launched]
) -> None:
    run = launched(two_nodes.address)  # type: ignore[attr-defined]
    run.until(run.has_rollouts, "there are no rollouts")
    first = run.hosts
    assert set(first) == {"env-0", "env-1"}
    os.kill(first["env-0"], signal.SIGKILL)
    summary = run.ended()
    assert summary["status"] == "completed"
    assert summary["engines_replaced"]["env"] == 1 and run.hosts["env-0"] != first["env-0"]
    envs = summary["envs"]
    assert envs["opened"] == envs["closed"] + envs["killed"] and envs["killed"] > 0
    assert envs["faults"]["died"] > 0 and envs["failed_episodes"] == 0
    no_seats_left(run)


@pytest.mark.long
def test_when_a_node_is_lost_the_other_host_plays_on(two_nodes: object, launched: Callable[..., Launched]) -> None:
    run = launched(two_nodes.address, "cluster.start_timeout_s=20", "slots.health.max_replacements=1")  # type: ignore[attr-defined]
    run.until(run.has_rollouts, "there are no rollouts")
    (worker,) = two_nodes.worker_nodes  # type: ignore[attr-defined]
    two_nodes.remove_node(worker, allow_graceful=False)  # type: ignore[attr-defined]
    summary = run.ended()
    assert summary["status"] == "completed"
    assert re.search(r"env-\d died", run.log)
    envs = summary["envs"]
    assert envs["opened"] == envs["closed"] + envs["killed"] and envs["failed_episodes"] == 0


@pytest.mark.long
def test_a_run_that_is_killed_leaves_no_process_of_its_hosts(
    two_nodes: object, launched: Callable[..., Launched]
) -> None:
    run = launched(two_nodes.address, "train.num_steps=50")  # type: ignore[attr-defined]
    run.until(run.has_rollouts, "there are no rollouts")
    tokens = [file.stem for file in (run.run_dir / "env_hosts").glob("*.json")]
    assert len(tokens) == 2 and all(list(find_processes(token)) for token in tokens)
    run.process.kill()
    end_s = time.monotonic() + 90
    while any(list(find_processes(token)) for token in tokens):
        assert time.monotonic() < end_s, "processes are left"
        time.sleep(0.2)
    assert sweep(run.run_dir) == 2
    no_seats_left(run)
