"""The configuration of task=rejudge: that of a run, with the judge that is typed; for rollouts of another trainer, all
that is typed.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grmpipe.config.io.yaml_io import DictConfig, build, differs, explain_old_key, find_missing_keys, read_yaml_with
from grmpipe.config.run_config import ConfigError, RunConfig

# Sections and keys that judge: what is typed of them replaces what the run had.
READ = (
    "judge", "judges", "grm", "models", "reward", "rewards", "meta_rm", "engine", "placement", "cluster", "tracking",
    "slots", "seed", "objective", "rejudge", "budget",
)  # fmt: skip
START = ("task", "run_dir", "resume")
REJUDGED = "rejudged"  # folder of a run's directory


def compose_rejudging(composed: DictConfig, typed: Sequence[str]) -> RunConfig:
    """The configuration of judging a run again. Raises ConfigError, also for a typed key that would be ignored.

    typed: keys and groups of the command line. The budget of the run isn't that of judging it again.
    """
    if composed.run_dir is None:
        raise ConfigError(
            "run_dir: task=rejudge judges the rollouts of a run again; type run_dir=<its directory>; for rollouts "
            "of another trainer rejudge.path=<file or folder> run_dir=<a new directory>"
        )
    run_dir = Path(composed.run_dir)
    if composed.rejudge.path is not None:
        config = build(composed)
        return replace(config, run_dir=str(run_dir / REJUDGED / config.rejudge.name))
    written = config_of_run(run_dir)
    for key in typed:
        check_read(key, composed, written)
    changed = [key for key in typed if key.split(".")[0] in READ]
    config = read_yaml_with(written, composed, [*changed, "task", "resume", "rejudge", "budget"])
    return replace(config, run_dir=str(run_dir / REJUDGED / config.rejudge.name))


def config_of_run(run_dir: Path) -> Path:
    """The run's config.yaml. Raises ConfigError if there is none, or if it isn't of this version."""
    written = run_dir / "config.yaml"
    if not written.exists():
        raise ConfigError(f"run_dir: there is no {written}; give the directory of the run to judge again")
    if run_dir.parent.name == REJUDGED:
        raise ConfigError(f"run_dir: {run_dir} holds new verdicts; type the run's own, run_dir={run_dir.parent.parent}")
    if moved := explain_old_key(written):
        raise ConfigError(
            f"run_dir: {written} is from another version of grmpipe: {moved}; rename the key in a copy of the run's "
            "directory, and give that"
        )
    if lacking := find_missing_keys(written):
        raise ConfigError(f"run_dir: {written} is incomplete: it lacks {lacking[0]}; restore it")
    return written


def check_read(key: str, composed: DictConfig, written: Path) -> None:
    """Raises ConfigError for a typed key that judging again doesn't read, unless the run has the same value."""
    if key.split(".")[0] in (*READ, *START, "hydra"):
        return
    if key == "experiment":
        raise ConfigError(
            f"experiment: task=rejudge takes everything but the judge from {written}, and would ignore it; leave it "
            "out, and type only what judges, as in judge=pointwise grm=path grm.path=..."
        )
    if differs(written, composed, key):
        raise ConfigError(
            f"{key}: task=rejudge takes everything but the judge from {written}, and would ignore it; leave it out (it "
            f"reads {', '.join(READ)})"
        )
