"""CPU seconds of a step: of the driver process, and of each role whose processes are all on this machine."""

import time
from collections.abc import Collection

from grmpipe.run.features.run_feature import RunFeature, StepEnd
from grmpipe.types import Metrics
from scheduler.processes.actors import Cluster
from scheduler.processes.cpu_time import cpu_seconds


class CpuSeconds(RunFeature):
    """The time between two steps (evaluations, checkpoints) counts in neither. The first step has the driver's only."""

    def __init__(self, cluster: Cluster, roles: Collection[str]) -> None:
        self._cluster, self._roles = cluster, roles
        self._began = {"driver": time.process_time()}

    async def after_step(self, end: StepEnd) -> Metrics:
        now = self._used()
        return {f"{name}/cpu_s": max(0.0, now[name] - began_s) for name, began_s in self._began.items() if name in now}

    def next_step(self) -> None:
        self._began = self._used()

    def _used(self) -> dict[str, float]:
        """Role -> seconds so far."""
        ids = {role: self._cluster.process_ids(role) for role in self._roles}
        return {"driver": time.process_time()} | {role: cpu_seconds(found) for role, found in ids.items() if found}
