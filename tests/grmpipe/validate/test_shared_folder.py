"""A run_dir that not all machines see is refused by its name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from grmpipe.config.run_config import ConfigError
from grmpipe.validate.shared_folder import check_shared
from scheduler.placement import PlacementConfig, place
from scheduler.processes.actors import InProcessCluster


class TwoMachines(InProcessCluster):
    async def strangers_to(self, folder: Path) -> list[str]:
        return ["on node-2 it doesn't exist"] if "local" in folder.parts else []


def test_a_folder_that_is_not_shared_is_refused_with_the_way_out() -> None:
    cluster = TwoMachines(place(PlacementConfig(), ()))
    asyncio.run(check_shared(cluster, Path("/shared/run")))
    with pytest.raises(
        ConfigError, match=r"^run_dir: .* don't share /local/run \(on node-2 it doesn't exist\).*type run_d"
    ):
        asyncio.run(check_shared(cluster, Path("/local/run")))
