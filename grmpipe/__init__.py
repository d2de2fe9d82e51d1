"""The names that users import; neither torch nor Hydra is imported before one of them is used.

config = grmpipe.compose("quickstart", ["train.num_steps=8"])   # overrides as on the command line
run = grmpipe.launch(config)                                    # runs it to its end; grmpipe.start gives its steps
run = grmpipe.read_run("runs/quickstart/latest")                # the files of any run
run.metrics.to_arrow()                                          # ... as rows and as tables
with grmpipe.start_judge(config) as judge:                      # its judge alone
    verdicts = judge.ask("What is 6 x 7?", ["42", "It is 41."])
"""

import importlib
from typing import TYPE_CHECKING

from grmpipe.models.import_path import put_working_folder_last

if TYPE_CHECKING:
    from grmpipe.cli import compose
    from grmpipe.config.run_config import ConfigError, RunConfig
    from grmpipe.launching import StartedJudge, StartedRun, Step, launch, start, start_judge
    from grmpipe.run.errors import RunFailed, RunInterrupted
    from grmpipe.run_reader import RunReader, RunTable, read_run

__version__ = "0.1.0"
__all__ = [
    "ConfigError", "RunConfig", "RunFailed", "RunInterrupted", "RunReader", "RunTable", "StartedJudge",
    "StartedRun", "Step", "compose", "launch", "read_run", "start", "start_judge",
]  # fmt: skip
_MODULES = {
    "ConfigError": "config.run_config", "RunConfig": "config.run_config", "RunFailed": "run.errors",
    "RunInterrupted": "run.errors", "RunReader": "run_reader", "RunTable": "run_reader", "read_run": "run_reader",
    "StartedRun": "launching", "Step": "launching", "launch": "launching", "start": "launching", "compose": "cli",
    "StartedJudge": "launching", "start_judge": "launching",
}  # fmt: skip

put_working_folder_last()


def __dir__() -> list[str]:
    """The public names: what `help(grmpipe)` shows and an editor completes."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"grmpipe has no {name}")
    return vars(importlib.import_module(f"grmpipe.{_MODULES[name]}"))[name]
