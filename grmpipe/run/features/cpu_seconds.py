"""What a step used: money and tokens at endpoints; CPU seconds, of the driver process, and of each role whose
processes are all on this machine, with those that they started, such as an engine's workers.
"""

import os
import time
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

from grmpipe.observe.spending import Spending
from grmpipe.run.features.run_feature import RunFeature, StepEnd
from grmpipe.scheduler.processes.actors import Cluster
from grmpipe.types import Metrics


class CpuSeconds(RunFeature):
    """The time between two steps (evaluations, checkpoints) counts in neither. The first step has the driver's only."""

    def __init__(self, cluster: Cluster, roles: Collection[str]) -> None:
        self._cluster, self._roles = cluster, roles
        self._families: dict[str, tuple[list[int], list[int]]] = {}  # role -> its processes, these and all below
        self._began = {"driver": time.process_time()}

    async def after_step(self, end: StepEnd) -> Metrics:
        now = self._used()
        return {f"{name}/cpu_s": max(0.0, now[name] - began_s) for name, began_s in self._began.items() if name in now}

    def next_step(self) -> None:
        self._began = self._used()

    def _used(self) -> dict[str, float]:
        """Role -> seconds so far."""
        ids = {role: self._cluster.process_ids(role) for role in self._roles}
        for role, found in ids.items():
            if found != self._families.get(role, ([], []))[0]:  # at the first step, and when one was replaced
                self._families[role] = found, list_family(found)
        used = {role: cpu_seconds(family) for role, (found, family) in self._families.items() if found}
        return {"driver": time.process_time()} | used


PARENT, USER, SYSTEM = 1, 11, 12  # of proc_pid_stat(5), counted after the name, which may contain anything


def cpu_seconds(process_ids: Collection[int]) -> float:
    """The CPU seconds of all their threads, without child processes. A process that is gone counts 0, and so does each
    on a system without counters.
    """
    return sum(map(_taken_s, process_ids))


def list_family(process_ids: Collection[int]) -> list[int]:
    """These processes and all their descendants that live now; none besides them on a system without counters."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*"):
        if counts := _counts(int(path.name)):
            children[int(counts[PARENT])].append(int(path.name))
    family = list(process_ids)
    for process_id in family:  # grows on the way
        family += (child for child in children[process_id] if child not in process_ids)
    return family


def _taken_s(process_id: int) -> float:
    counts = _counts(process_id)
    return (int(counts[USER]) + int(counts[SYSTEM])) / os.sysconf("SC_CLK_TCK") if counts else 0.0


def _counts(process_id: int) -> list[str]:
    try:
        line = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return line.rpartition(")")[2].split()


class BudgetMetrics(RunFeature):
    """Metrics of a run with a price or a budget; of the whole run, resumes included, evaluations too."""

    def __init__(self, spending: Spending) -> None:
        self._spending = spending

    async def after_step(self, end: StepEnd) -> Metrics:
        return {f"budget/{name}": value for name, value in self._spending.figures.items()}
