"""Checks that the machines of a joined cluster share the run's directory, which ranks write into. Starts nothing."""

from __future__ import annotations

from pathlib import Path

from grmpipe.config.run_config import ConfigError
from scheduler.processes.actors import Cluster


async def check_shared(cluster: Cluster, run_dir: Path) -> None:
    """Raises ConfigError if they don't: checkpoints and exports would go to a different folder on each machine."""
    if problems := await cluster.strangers_to(run_dir):
        raise ConfigError(
            f"run_dir: the machines of cluster.address don't share {run_dir} ({'; '.join(problems)}), and ranks write "
            "checkpoints and exports there; type run_dir=<a folder that all of them share>"
        )
