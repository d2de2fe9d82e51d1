"""CPU seconds of a step: of the driver process, and of each role whose processes are all on this machine, with those
that they started, such as an engine's workers.
"""

import time
from collections.abc import Collection

from grmpipe.run.features.run_feature import RunFeature, StepEnd
from grmpipe.scheduler.processes.actors import Cluster
from grmpipe.scheduler.processes.cpu_time import cpu_seconds, list_family
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
