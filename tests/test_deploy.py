"""The files in deploy/: the Slurm script under a fake Slurm, manifests against the configuration, linters."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from fake_slurm import ROOT, SlurmJob, end, free_port, write_script
from hydra import compose, initialize_config_dir

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.config.io.yaml_io import build
from grmpipe.config.run_config import RunConfig
from grmpipe.scheduler.processes.await_nodes import await_nodes

DEPLOY = ROOT / "deploy"
# `ray start`: has its sockets in FAKE_TMP. The head listens.
LISTEN = 'import socket, sys, time; server = socket.create_server(("", int(sys.argv[1]))); time.sleep(600)'
RAY = f"""\
#!/usr/bin/env bash
if [[ "$FAKE_NODE" != "$FAKE_LOST" ]]; then
  echo "$$ $(env -u OMP_NUM_THREADS nproc) $RAY_TMPDIR" >"$FAKE_TMP/raylet"
fi
echo "ray on $FAKE_NODE: $*" >>"$FAKE_FOLDER/calls" # last: the job may end once all nodes have come this far
if [[ "$FAKE_NODE" == "$FAKE_LOST" ]]; then exit 1; fi
if [[ "$*" == *--head* ]]; then
  exec {sys.executable} -ISc '{LISTEN}' "$(sed 's/.*--port=\\([0-9]*\\).*/\\1/' <<<"$*")"
fi
exec sleep 600
"""
# launch.py: fails as FAKE_EXIT says. If FAKE_WAIT names its task, it goes on until a USR1, which a run answers by 130.
PYTHON = """\
#!/usr/bin/env bash
echo "python on $FAKE_NODE: $*" >>"$FAKE_FOLDER/calls"
if [[ "$2" == *await_nodes ]]; then
  for _ in {1..1200}; do
    if [[ -e "$FAKE_TMP/raylet" ]] && (($(grep -c "^ray on" "$FAKE_FOLDER/calls") >= $4)); then exit 0; fi
    sleep 0.1
  done
  echo "too few nodes, or no Ray on this machine" >&2
  exit 1
fi
if [[ ! -e "$FAKE_TMP/raylet" ]]; then echo "no Ray on this machine" >&2; exit 1; fi
task=run
if [[ "$*" == *task=doctor* ]]; then task=doctor; fi
if [[ "$FAKE_WAIT" == "$task" ]]; then
  if [[ "$task" == run ]]; then trap 'touch "$FAKE_FOLDER/ends"; sleep "${FAKE_ENDS_S:-0}"; exit 130' USR1; fi
  touch "$FAKE_FOLDER/waits"
  while true; do sleep 0.05; done
fi
if [[ "$task" == doctor ]]; then exit "${FAKE_DOCTOR:-0}"; fi
exit "${FAKE_EXIT:-0}"
"""


def job_of(folder: Path, nodes: str = "n1 n2 n3", **more: str) -> SlurmJob:
    for name, text in (("ray", RAY), ("python", PYTHON)):
        write_script(folder / "venv/bin" / name, text)
    return SlurmJob(folder, nodes.split(), folder / "venv", more)


def built(words: list[str]) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(compose("config", words))


def overrides_in(command: str) -> list[str]:
    return shlex.split(command.split("launch.py ", 1)[1])


# -- Slurm -----------------------------------------------------------------------------------------------------------


def test_a_job_starts_ray_on_every_node_examines_them_and_runs(tmp_path: Path) -> None:
    job = job_of(tmp_path, ENV_VARS="HF_HOME,NCCL_*", HF_HOME="/shared/hf")
    code, output = end(job.begin("+experiment=quickstart", "tracking=none"))
    assert code == 0, output
    calls = job.calls
    head = next(call for call in calls if call.startswith("ray on n1"))
    assert f"start --head --block --node-ip-address=127.0.0.1 --port={job.port} --num-cpus=3 --num-gpus=0" in head
    for node in ("n2", "n3"):
        assert any(call.startswith(f"ray on {node}: start --block --address=127.0.0.1:{job.port} ") for call in calls)
    awaited, examined, ran = (call for call in calls if call.startswith("python on n1"))
    assert awaited.endswith(f"-m grmpipe.scheduler.processes.await_nodes 127.0.0.1:{job.port} 3 600")
    assert calls.index(head) < calls.index(next(call for call in calls if call.startswith("ray on n2")))
    assert examined.endswith(" task=doctor")
    config = built(overrides_in(ran.split(": ", 1)[1]))
    assert (config.cluster.address, config.resume) == (f"127.0.0.1:{job.port}", "auto")
    assert (config.run_dir, config.cluster.env_vars) == (str(job.run_dir), ["HF_HOME", "NCCL_*"])
    token = job.run_dir / ".ray_token"
    assert len(token.read_text()) == 64 and token.stat().st_mode & 0o777 == 0o600
    assert not any("requeue" in call for call in calls)


def test_ray_has_all_cores_and_the_variables_of_the_job(tmp_path: Path) -> None:
    job = job_of(tmp_path, "n1 n2", SLURM_EXPORT_ENV="NONE", TMPDIR="/only/here")
    code, output = end(job.begin())
    assert code == 0, output
    for node in ("n1", "n2"):
        _, cores, folder = (tmp_path / node / "raylet").read_text().split()
        assert (int(cores), folder) == (len(os.sched_getaffinity(0)), "/tmp/grmpipe_4711")


@pytest.mark.parametrize(
    ("by_name", "by_interface", "chosen"),
    [("127.0.1.1", "192.0.2.7 172.17.0.1", "192.0.2.7"), ("fe80::1 192.0.2.8", "192.0.2.7", "192.0.2.8")],
)
def test_ray_listens_where_other_nodes_reach_it(tmp_path: Path, by_name: str, by_interface: str, chosen: str) -> None:
    job = job_of(tmp_path, FAKE_ADDRESS=by_name, FAKE_ADDRESSES=by_interface, FAKE_LOST="n1")
    _, output = end(job.begin())
    assert f"Ray does not listen at {chosen}:{job.port}" in output


def test_a_relative_run_dir_is_that_of_the_folder_of_sbatch(tmp_path: Path) -> None:
    job = job_of(tmp_path, "n1", RUN_DIR="runs/first", DOCTOR="0")
    code, output = end(job.begin())
    assert code == 0, output
    assert f"run_dir={tmp_path}/runs/first" in job.calls[-1]


def test_a_node_that_is_lost_does_not_end_the_ray_of_the_others(tmp_path: Path) -> None:
    job = job_of(tmp_path, FAKE_LOST="n3", FAKE_WAIT="run", DOCTOR="0")
    began = job.begin()
    await_file(tmp_path / "waits")
    alive = Path("/proc", (tmp_path / "n2/raylet").read_text().split()[0]).exists()
    began.send_signal(signal.SIGUSR1)
    end(began)
    assert alive


def test_a_cluster_with_problems_is_not_trained_on(tmp_path: Path) -> None:
    job = job_of(tmp_path, FAKE_DOCTOR="1")
    code, _ = end(job.begin())
    assert code == 1
    assert len([call for call in job.calls if "launch.py" in call and call.startswith("python")]) == 1
    assert not any("requeue" in call for call in job.calls)


def requeues(job: SlurmJob, restarts: int = 0) -> int:
    """How often the job was queued again until the end of this attempt."""
    end(job.begin(restarts=restarts))
    return job.calls.count("scontrol requeue 4711")


@pytest.mark.parametrize(("exit_code", "again"), [(1, 1), (2, 0), (0, 0)])
def test_a_failed_run_is_queued_again(tmp_path: Path, exit_code: int, again: int) -> None:
    """A wrong configuration stays wrong. Restarts at the end of the job's time are not failures."""
    job = job_of(tmp_path, "n1", FAKE_EXIT=str(exit_code), DOCTOR="0")
    assert requeues(job, restarts=30) == again


def test_a_run_that_fails_a_few_times_without_a_new_checkpoint_stays_ended(tmp_path: Path) -> None:
    job = job_of(tmp_path, "n1", FAKE_EXIT="1", DOCTOR="0", MAX_RESTARTS="2")
    assert [requeues(job), requeues(job)] == [1, 2]
    latest = job.run_dir / "checkpoints/latest"
    latest.parent.mkdir()
    latest.write_text("step_10")
    assert requeues(job) == 3
    latest.write_text("step_10.1")  # the same step, kept again
    assert [requeues(job), requeues(job)] == [4, 4]


def test_a_new_job_of_a_run_that_failed_before_has_all_its_restarts(tmp_path: Path) -> None:
    job = job_of(tmp_path, "n1", FAKE_EXIT="1", DOCTOR="0", MAX_RESTARTS="1")
    job.run_dir.mkdir(parents=True)
    (job.run_dir / ".slurm_failures").write_text("4710 none 2\n")
    assert [requeues(job), requeues(job)] == [1, 1]


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


def signalled(
    job: SlurmJob, folder: Path, number: signal.Signals, then: signal.Signals | None = None
) -> tuple[int, str]:
    """(exit code, output) of a job that gets a signal while its launch.py waits, and perhaps one while it ends."""
    began = job.begin()
    await_file(folder / "waits")
    began.send_signal(number)
    if then is not None:
        await_file(folder / "ends")
        began.send_signal(then)
    return end(began)


@pytest.mark.parametrize(("sent", "again"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_at_the_end_of_its_time_a_job_keeps_a_checkpoint_and_is_queued_again(
    tmp_path: Path, sent: signal.Signals, again: bool
) -> None:
    """SIGTERM comes from a person who ends the job: it stays ended."""
    job = job_of(tmp_path, FAKE_WAIT="run", DOCTOR="0")
    code, output = signalled(job, tmp_path, sent)
    assert code == 130, output
    assert ("scontrol requeue 4711" in job.calls) is again


@pytest.mark.parametrize(("sent", "again"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_signal_before_the_run_is_not_lost(tmp_path: Path, sent: signal.Signals, again: bool) -> None:
    job = job_of(tmp_path, FAKE_WAIT="doctor")
    code, output = signalled(job, tmp_path, sent)
    assert code == 128 + signal.SIGUSR1, output
    assert ("scontrol requeue 4711" in job.calls) is again
    assert not any("launch.py" in call and "task=doctor" not in call for call in job.calls), "the run begins"


def test_a_job_that_a_person_ends_as_its_time_ends_is_not_queued_again(tmp_path: Path) -> None:
    job = job_of(tmp_path, FAKE_WAIT="run", FAKE_ENDS_S="1", DOCTOR="0")
    code, output = signalled(job, tmp_path, signal.SIGUSR1, then=signal.SIGTERM)
    assert code == 130, output
    assert not any("requeue" in call for call in job.calls)


def test_in_containers_the_run_shares_tmp_with_the_ray_of_its_node(tmp_path: Path) -> None:
    job = job_of(tmp_path, CONTAINER="registry#grmpipe:latest", MOUNTS="/shared:/shared")
    code, output = end(job.begin("+experiment=quickstart"))
    assert code == 0, output
    steps = [call for call in job.calls if call.startswith("srun")]
    inside, outside = "in registry#grmpipe:latest: ", "in the host: "
    assert all(inside in step for step in steps if "ray " in step or "python " in step)
    removed = f"srun [n1 n2 n3] {outside}enroot remove --force pyxis_grmpipe_4711"
    assert steps[-1] == removed, "its containers stay on the nodes"
    assert outside in steps[0], "the address needs no container, whose import takes minutes"


def test_a_job_whose_ray_does_not_start_ends_at_once(tmp_path: Path) -> None:
    job = job_of(tmp_path, FAKE_LOST="n1")
    code, output = end(job.begin())
    assert code == 1 and f"Ray does not listen at 127.0.0.1:{job.port}" in output
    assert not any("requeue" in call for call in job.calls)


def test_nodes_are_waited_for_up_to_a_limit() -> None:
    joined = iter([1, 1, 3])
    assert await_nodes(3, 10.0, lambda: next(joined), pause_s=0.0) == 3
    with pytest.raises(TimeoutError, match=r"^1 of 2 nodes joined within 0 s"):
        await_nodes(2, 0.0, lambda: 1, pause_s=0.01)


# -- containers, KubeRay, SkyPilot -----------------------------------------------------------------------------------


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pinned(package: str) -> str:
    lists = [project()["dependencies"], *project()["optional-dependencies"].values()]
    return next(one.partition("==")[2] for names in lists for one in names if one.startswith(f"{package}=="))


def test_the_image_has_the_versions_of_the_project() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    for package in ("torch", "vllm"):
        assert f"{package}=={pinned(package)}" in text
    assert f"ray[default]=={pinned('ray')}" in text
    extras = re.findall(r'"\.\[([\w,]+)\]"', text)[0].split(",")
    assert set(extras) <= project()["optional-dependencies"].keys()


def test_the_image_has_the_packages_and_nothing_that_a_build_needs_is_ignored() -> None:
    text, ignored = (DEPLOY / "Containerfile").read_text(), (DEPLOY / "Containerfile.dockerignore").read_text()
    for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists() and f"!{source}\n" in ignored, source
    copied = set(re.findall(r"^COPY (\w+) \w+$", text, re.MULTILINE))
    assert copied >= {"conf", "models", "scheduler", "grmpipe", "examples"}


def test_the_manifest_is_a_ray_job_whose_nodes_hold_the_recipe() -> None:
    job = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]["rayClusterSpec"]
    assert spec["rayVersion"] == pinned("ray")
    config = built(overrides_in(job["spec"]["entrypoint"]))
    assert (config.cluster.address, config.resume) == ("auto", "auto")
    (workers,) = spec["workerGroupSpecs"]
    gpus = workers["replicas"] * int(workers["rayStartParams"]["num-gpus"])
    assert gpus == sum(pool.slots for pool in config.placement.pools.values()) == 64
    for group in (spec["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"shared": "/shared", "shm": "/dev/shm"}
        assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()
        assert config.run_dir is not None and config.run_dir.startswith(mounts["shared"] + "/")
        assert {one["name"] for one in container["env"]} >= {"HF_HOME"}
    limits = container["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == limits["rdma/ib"] == workers["rayStartParams"]["num-gpus"]
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"], "or NCCL can't register memory"


def test_the_sky_task_starts_the_recipe_on_as_many_gpus_as_it_needs() -> None:
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    config = built(shlex.split(task["envs"]["OVERRIDES"]))
    gpus = task["num_nodes"] * int(task["resources"]["accelerators"].split(":")[1])
    assert gpus == sum(pool.slots for pool in config.placement.pools.values())
    assert task["envs"]["RUN_DIR"].startswith(next(iter(task["volumes"])))
    assert "ray stop" not in re.sub(r"#.*", "", task["run"]), "SkyPilot has a Ray of its own"
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True, check=False).returncode == 0


def test_the_machines_of_a_sky_task_join_the_first_one_and_it_runs(tmp_path: Path) -> None:
    port = free_port()
    script = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())["run"]
    script = script.replace("/opt/grmpipe", str(tmp_path)).replace("6390", str(port))
    for name, text in (("ray", RAY), ("python", PYTHON)):
        write_script(tmp_path / "bin" / name, text)

    def begin(rank: int) -> subprocess.Popen[str]:
        (tmp_path / f"tmp{rank}").mkdir()
        environment = {
            **os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "FAKE_FOLDER": str(tmp_path),
            "FAKE_TMP": str(tmp_path / f"tmp{rank}"), "FAKE_NODE": f"rank {rank}", "OVERRIDES": "train.lr=1e-4",
            "RUN_DIR": str(tmp_path / "run"), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        }  # fmt: skip
        return subprocess.Popen(
            ["bash", "-c", script], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    worker, head = begin(1), begin(0)
    code, output = end(head)
    os.killpg(worker.pid, signal.SIGKILL)
    assert code == 0, output + worker.communicate()[0]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert any(call.startswith(f"ray on rank 1: start --block --address=127.0.0.1:{port} ") for call in calls)
    assert calls[-1].endswith(f"run_dir={tmp_path}/run cluster.env_vars=[HF_HOME] resume=auto")


@pytest.mark.parametrize(
    ("linter", "files"), [("hadolint", ["Containerfile"]), ("shellcheck", ["slurm.sh"])], ids=["hadolint", "shellcheck"]
)
def test_linters_find_nothing(linter: str, files: list[str]) -> None:
    beside = Path(sys.executable).with_name(linter)
    found = str(beside) if beside.is_file() else shutil.which(linter)
    if found is None:
        pytest.skip(f"{linter} isn't installed")
    done = subprocess.run([found, *files], cwd=DEPLOY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
