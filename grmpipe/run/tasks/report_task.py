"""task=report: writes the report of an existing run, also of a crashed or running one."""

from pathlib import Path

from grmpipe.config.io.yaml_io import read_yaml
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.observe.report import REPORT, write_report
from grmpipe.observe.run_files import RunFiles, read_run
from grmpipe.pipeline.bottleneck import bottleneck
from grmpipe.pipeline.stall_times import StallTimes
from grmpipe.run.errors import RunFailed
from grmpipe.run.tasks.stats import read_setup
from grmpipe.run_dir.directory import HOME, holds_run


def make_report(config: RunConfig) -> str:
    """Return the path of the report. Raises ConfigError if there is no run, RunFailed if it can't be written."""
    run_dir = Path(config.run_dir) if config.run_dir else HOME / config.experiment_name / "latest"
    if not holds_run(run_dir):
        raise ConfigError(f"run_dir: {run_dir} holds no run; type run_dir=runs/<experiment_name>/latest")
    if not write_report(run_dir, bottleneck_so_far(run_dir)):
        raise RunFailed(f"{run_dir / REPORT} could not be written; the cause is reported above")
    return str(run_dir / REPORT)


def bottleneck_so_far(run_dir: Path) -> str | None:
    """The bottleneck of a run without a summary."""
    if (run_dir / "summary.json").exists():
        return None
    try:
        config = read_yaml(run_dir / "config.yaml")
    except ConfigError:  # of another version: unknown keys
        return None
    return bottleneck(total_stalls(read_run(run_dir)), read_setup(config))


def total_stalls(run: RunFiles) -> StallTimes:
    return StallTimes(
        rollouts_s=run.total("stall/rollouts_s"),
        envs_s=run.total("stall/envs_s"),
        verdicts_s=run.total("stall/verdicts_s"),
        training_s=run.total("stall/training_s"),
        weight_sync_s=run.total("stall/weight_sync_s"),
        steps_s=run.total("time/step_s"),
    )
