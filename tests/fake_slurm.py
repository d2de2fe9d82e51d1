"""Slurm's commands on this machine: `srun` starts a command once per node of a job, each in a folder of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRUN = """\
#!/usr/bin/env bash
nodes=" $FAKE_NODES "
while [[ "$1" == --* ]]; do
  case "$1" in
    --nodelist=*) nodes="${1#*=}" ;;
    --exclude=*) nodes="${nodes/ ${1#*=} / }" ;;
  esac
  shift
done
echo "srun [$(echo $nodes)] $*" >>"$FAKE_FOLDER/calls"
pids=() ended=0
trap 'ended=1; kill -TERM $(jobs -p) 2>/dev/null' TERM # before the first task: without it, one would outlive srun
for node in $nodes; do
  mkdir -p "$FAKE_FOLDER/$node"
  (cd "$FAKE_FOLDER/$node" && FAKE_NODE="$node" exec "$@") &
  pids+=($!)
done
if ((ended)); then kill -TERM $(jobs -p) 2>/dev/null; fi # of tasks that began after the signal
status=0
for pid in "${pids[@]}"; do
  while kill -0 "$pid" 2>/dev/null; do wait "$pid"; status=$?; done
  wait "$pid" 2>/dev/null; code=$?
  if ((code != 127)); then status=$code; fi
done
exit "$status"
"""
SCONTROL = """\
#!/usr/bin/env bash
echo "scontrol $*" >>"$FAKE_FOLDER/calls"
if [[ "$1" == show ]]; then tr ' ' '\\n' <<<"$FAKE_NODES"; fi
"""
HOSTNAME = """\
#!/usr/bin/env bash
echo "127.0.0.1 fe80::1"
"""


class SlurmJob:
    """deploy/slurm.sh as the batch script of a job on these nodes."""

    def __init__(self, folder: Path, nodes: Sequence[str], venv: Path, more: Mapping[str, str] | None = None) -> None:
        self._folder, self._nodes, self._venv, self._more = folder, nodes, venv, more or {}
        self.run_dir = folder / "shared/run"
        (folder / "bin").mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("hostname", HOSTNAME)):
            write_script(folder / "bin" / name, text)

    def begin(self, *overrides: str, restarts: int = 0) -> subprocess.Popen[str]:
        """Begin the job, for the first time or again."""
        environment = {
            **os.environ, "PATH": f"{self._folder}/bin:{os.environ['PATH']}", "FAKE_FOLDER": str(self._folder),
            "FAKE_NODES": " ".join(self._nodes), "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-9]",
            "SLURM_SUBMIT_DIR": str(self._folder), "SLURM_CPUS_ON_NODE": "3", "SLURM_RESTART_COUNT": str(restarts),
            "PROJECT": str(ROOT), "VENV": str(self._venv), "RUN_DIR": str(self.run_dir), **self._more,
        }  # fmt: skip
        return subprocess.Popen(
            ["bash", str(ROOT / "deploy/slurm.sh"), *overrides], env=environment, cwd=self._folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    @property
    def calls(self) -> list[str]:
        """What was asked of Slurm, in order."""
        return (self._folder / "calls").read_text().splitlines()


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def end(job: subprocess.Popen[str], timeout_s: float) -> tuple[int, str]:
    """(exit code, output) of a job; all of its processes are ended if it takes longer."""
    try:
        output, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
        raise AssertionError(f"the job did not end within {timeout_s:.0f} s:\n{output[-3000:]}") from None
    return job.returncode, output
