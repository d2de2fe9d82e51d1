"""The isolation that this machine really gives, found by trying it in a worker."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grmpipe.config.env import EnvConfig
from grmpipe.config.isolation import INPROCESS, PROCESS, RUNTIMES, IsolationConfig
from grmpipe.envs.env import EnvFault, Episode
from grmpipe.envs.limited_env import StageLimits
from grmpipe.envs.sandbox.bubblewrap import bubblewrap_missing
from grmpipe.envs.sandbox.confinement import Missing
from grmpipe.envs.sandbox.crash_cleanup import clear, record_host
from grmpipe.envs.sandbox.process_host import ProcessHost
from grmpipe.envs.sandbox.supervisor import MEMORY_S
from grmpipe.types import Prompt

# Parts whose work another part does too: the supervisor finds and kills all descendants, Landlock forbids writing,
# and leaves /dev/zero out.
SPARE = (
    "process namespace",
    "IPC namespace",
    "mount namespace",
    "read-only mounts",
    "own /proc",
    "no new capabilities",
    "zeros that take no memory",
)
COMMAND_S = 10.0
LIMITS = StageLimits(boot_s=30, step_s=5, close_s=5, max_observation_chars=1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationReport:
    """The level of isolation that is had, and what it lacks: parts, and things that a worker could do all the same."""

    level: str
    missing: tuple[Missing, ...] = ()

    def __str__(self) -> str:
        return f"{self.level}, without: {describe_missing(self.missing)}" if self.missing else self.level


def weaknesses(missing: Sequence[Missing]) -> tuple[Missing, ...]:
    """What is missing with nothing in its place."""
    return tuple(each for each in missing if each.part not in SPARE)


def describe_missing(missing: Sequence[Missing]) -> str:
    return "; ".join(f"{each.part} ({each.reason})" for each in missing)


def isolation_report(config: IsolationConfig | None = None) -> IsolationReport:
    """What kind=process gives here, with the limits of a configuration. Takes about half a second."""
    if sys.platform != "linux":
        return IsolationReport(level=INPROCESS, missing=(Missing(part=PROCESS, reason="it needs Linux"),))
    config = replace(config or IsolationConfig(), kind=PROCESS, image="", network=False)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return asyncio.run(try_isolation(config, Path(folder)))
        except (EnvFault, ValueError, OSError) as error:
            return IsolationReport(level=INPROCESS, missing=(Missing(part=PROCESS, reason=str(error)),))


async def try_isolation(isolation: IsolationConfig, folder: Path) -> IsolationReport:
    outside = folder / "outside"
    outside.mkdir()
    config = EnvConfig(
        kind="custom",
        target="grmpipe.envs.sandbox.isolation_probe.IsolationProbe",
        options={"outside": str(outside), "processes": isolation.max_processes},
        isolation=isolation,
    )
    left = record_host(folder)
    host = ProcessHost(config, left, LIMITS)
    try:
        await host.start()
        env = host.env()
        try:
            opening = await env.open(Episode(prompt=Prompt(prompt_id="trial", messages=())))
        finally:
            await env.close()
    finally:
        await host.stop()
        await asyncio.to_thread(clear, folder, left)
    could = tuple(Missing(part=message.content, reason="tried") for message in opening.messages)
    return IsolationReport(level=PROCESS, missing=(*env.missing, *could))


def describe_isolation() -> str:
    """One line for the doctor: what kind=process gives, whether in bubblewrap, how processes and memory are counted,
    and which containers there are.
    """
    report, outer = isolation_report(), bubblewrap_missing()
    memory = f"the memory of an episode is added up every {MEMORY_S:g} s"
    memory = memory if report.level == PROCESS else "memory is not bounded"
    return f"{report}; {outer or 'in bubblewrap'}; {describe_count_bound(report)}; {memory}; containers: {containers()}"


def describe_count_bound(report: IsolationReport) -> str:
    """Which means bounds the number of processes."""
    parts = {each.part for each in report.missing}
    if report.level != PROCESS or "process count" in parts:
        return "processes are not counted"
    user = ", as another user than root" if os.geteuid() == 0 else ""
    return f"processes are counted by RLIMIT_NPROC{'' if 'user namespace' in parts else ' in a user namespace'}{user}"


def containers() -> str:
    found = [
        f"{runtime}{'' if answers(runtime) else ' (does not answer)'}" for runtime in RUNTIMES if shutil.which(runtime)
    ]
    return ", ".join(found) or "no docker, podman or apptainer"


def answers(runtime: str) -> bool:
    """Whether a container could be started: docker's command alone can't, without its daemon."""
    asked = [runtime, "version"]
    try:
        return subprocess.run(asked, capture_output=True, timeout=COMMAND_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
