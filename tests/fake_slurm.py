"""Slurm's commands on this machine: `srun` starts a command once per node of a job, each in a folder of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Signals as in SchedMD/slurm, src/srun/srun_job.c (_srun_signal_mgr): TERM, HUP, QUIT kill all processes of the step,
# USR1 and USR2 go to its tasks, INT prints their state unless a second one comes within a second.
SRUN = f"""\
#!{sys.executable} -IS
import os, signal, sys, time, uuid
from pathlib import Path

folder, nodes = Path(os.environ["FAKE_FOLDER"]), os.environ["FAKE_NODES"].split()
words, options = sys.argv[1:], {{}}
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    options[name] = value
if "--nodelist" in options:
    nodes = [options["--nodelist"]]
if "--exclude" in options:
    nodes.remove(options["--exclude"])
image = options.get("--container-image", "the host")
with open(folder / "calls", "a") as calls:
    calls.write(f"srun [{{' '.join(nodes)}}] in {{image}}: {{' '.join(words)}}\\n")

PASSED_ON = {{signal.SIGUSR1, signal.SIGUSR2}}
WATCHED = PASSED_ON | {{signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}}
signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
for number in WATCHED:
    signal.signal(number, signal.SIG_DFL)
step, tasks = f"FAKE_STEP={{uuid.uuid4().hex}}", {{}}


def container_tmp(node):
    # NVIDIA/pyxis, pyxis_slurmstepd.c: a step joins the container of its name. Enroot mounts a new /tmp in each one.
    name = options.get("--container-name", uuid.uuid4().hex)
    tmp = folder / node / f"tmp of {{name}}"
    if not tmp.exists() and "--container-image" not in options:
        sys.exit(f"pyxis: error: a container with name {{name}} does not exist, and --container-image is not set")
    tmp.mkdir(exist_ok=True)
    return tmp


def start(node):
    (folder / node).mkdir(exist_ok=True)
    if pid := os.fork():
        tasks[pid] = node
        return
    os.chdir(folder / node)
    tmp = container_tmp(node) if options.keys() & {{"--container-image", "--container-name"}} else folder / node
    if options.get("--export") != "ALL" and "SLURM_EXPORT_ENV" in os.environ:
        kept = {{name: value for name, value in os.environ.items() if name.startswith(("SLURM_", "FAKE_"))}}
        os.environ.clear()
        os.environ |= {{**kept, "PATH": "/usr/bin:/bin"}}
    if options.get("--cpu-bind") != "none":  # a task without --cpus-per-task may get one core, since 22.05
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    os.environ |= {{"FAKE_NODE": node, "FAKE_STEP": step.partition("=")[2], "FAKE_TMP": str(tmp)}}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"srun: {{words[0]}}: {{error}}", file=sys.stderr, flush=True)
        os._exit(127)


def kill_step():
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if step.encode() in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue
    for pid in tasks:
        os.kill(pid, signal.SIGKILL)


for node in nodes:
    start(node)
worst, interrupted = 0, 0.0
while tasks:
    number = signal.sigwait(WATCHED)
    if number == signal.SIGCHLD:
        while tasks and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            worst = max(worst, code if code >= 0 else 128 - code)
            del tasks[ended[0]]
            if code and options.get("--kill-on-bad-exit") == "1":
                kill_step()
    elif number in PASSED_ON:
        for pid in tasks:
            os.kill(pid, number)
    elif number != signal.SIGINT or time.monotonic() - interrupted < 1:
        print("srun: forcing job termination", file=sys.stderr, flush=True)
        kill_step()
    else:
        print("srun: interrupt (one more within 1 sec to abort)", file=sys.stderr, flush=True)
        interrupted = time.monotonic()
sys.exit(worst)
"""
SCONTROL = """\
#!/usr/bin/env bash
echo "scontrol $*" >>"$FAKE_FOLDER/calls"
if [[ "$1" == show ]]; then tr ' ' '\\n' <<<"$FAKE_NODES"; fi
"""
HOSTNAME = """\
#!/usr/bin/env bash
case "$1" in
  --ip-address) echo "${FAKE_ADDRESS:-127.0.0.1 fe80::1}" ;;
  --all-ip-addresses) echo "${FAKE_ADDRESSES:-}" ;;
esac
"""


class SlurmJob:
    """deploy/slurm.sh as the batch script of a job on these nodes."""

    def __init__(self, folder: Path, nodes: Sequence[str], venv: Path, more: Mapping[str, str] | None = None) -> None:
        self._folder, self._nodes, self._venv, self._more = folder, nodes, venv, more or {}
        self.run_dir, self.port = folder / "shared/run", free_port()
        (folder / "bin").mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("hostname", HOSTNAME)):
            write_script(folder / "bin" / name, text)

    def begin(self, *overrides: str, restarts: int = 0) -> subprocess.Popen[str]:
        """Begin the job, for the first time or again."""
        environment = {
            **os.environ, "PATH": f"{self._folder}/bin:{os.environ['PATH']}", "FAKE_FOLDER": str(self._folder),
            "FAKE_NODES": " ".join(self._nodes), "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-9]",
            "PORT": str(self.port), "SLURM_SUBMIT_DIR": str(self._folder), "SLURM_CPUS_ON_NODE": "3",
            "SLURM_RESTART_COUNT": str(restarts), "PROJECT": str(ROOT), "VENV": str(self._venv),
            "RUN_DIR": str(self.run_dir), **self._more,
        }  # fmt: skip
        return subprocess.Popen(
            ["bash", str(ROOT / "deploy/slurm.sh"), *overrides], env=environment, cwd=self._folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    @property
    def calls(self) -> list[str]:
        """What was asked of Slurm, in order."""
        return (self._folder / "calls").read_text().splitlines()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def end(job: subprocess.Popen[str], timeout_s: float = 240.0) -> tuple[int, str]:
    """(exit code, output) of a job; all of its processes are ended if it takes longer."""
    try:
        output, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
        raise AssertionError(f"the job did not end within {timeout_s:.0f} s:\n{output[-3000:]}") from None
    return job.returncode, output
