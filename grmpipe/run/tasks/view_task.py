"""task=view: pages of a run, or of a folder of runs, on this machine. Starts no Ray and no engine."""

import importlib.util
from pathlib import Path

from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.run_dir.directory import HOME

INSTALL = "task: view needs aiohttp; type: pip install 'grmpipe[viewer]'"


def view_runs(config: RunConfig) -> None:
    """Serve until Ctrl-C. Raises ConfigError if there is no run."""
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError(INSTALL)
    from grmpipe.viewer.server import view

    view(Path(config.run_dir) if config.run_dir else HOME, settings=config.annotate, seed=config.seed)
