"""The runs in a folder, and what their small files say: status, metrics, configuration."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from grmpipe.config.judge import JudgeKind
from grmpipe.config.keys.secrets import environment_secrets, mask
from grmpipe.config.run_config import ConfigError
from grmpipe.observe.changes import read_changes
from grmpipe.observe.charts import Point, short
from grmpipe.observe.journal import read_what_can_be
from grmpipe.observe.run_files import (
    NEVER_ENDED,
    config_text,
    find_judge,
    find_numbers,
    get_list,
    mask_text,
    number,
    part,
    read_bytes,
    read_object,
    read_values,
)
from grmpipe.run_dir.directory import holds_run
from grmpipe.types import Metrics
from grmpipe.viewer.index import JOURNALS, RunIndex

SHOWN_KEYS = 6  # that tell runs apart
MAX_DEPTH = 4  # how deep runs lie below the folder: runs/<experiment>/<date>, runs/sweeps/<date>/<number>
NOT_RUNS = {"checkpoints", "policy", "grm", "policy_versions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewedRun:
    """A run by its name: the path below the folder that is viewed."""

    name: str
    run_dir: Path
    index: RunIndex = field(repr=False)

    @property
    def config(self) -> str:
        """config.yaml without secrets."""
        return config_text(read_bytes(self.run_dir / "config.yaml"), environment_secrets())

    @property
    def judge(self) -> JudgeKind:
        return find_judge(flat_config(self))

    @property
    def metrics(self) -> Sequence[Metrics]:
        """The lines of metrics.jsonl, in their order."""
        return read_metrics(*self._metrics_file())

    def _metrics_file(self) -> tuple[Path, int, int]:
        """Its path, size and time of change, as `read_metrics` wants them."""
        path = self.run_dir / "metrics.jsonl"
        return path, *read_stamp(path)

    def series(self, name: str) -> list[Point]:
        return [(line["step"], line[name]) for line in self.metrics if name in line]

    def state(self) -> ViewedState:
        secrets, summary = environment_secrets(), read_object(self.run_dir / "summary.json")
        last = read_last(*self._metrics_file())
        experiment = flat_config(self).get("experiment_name", "")
        return ViewedState(
            experiment="" if experiment in self.name.split("/") else experiment,
            status=str(summary.get("status", NEVER_ENDED)),
            failure=mask_text(summary.get("failure"), secrets),
            alarms=[mask(str(alarm), secrets) for alarm in get_list(summary, "alarms")],
            changes=[mask(change, secrets) for change in read_changes(self.run_dir)],
            steps=int(number(summary, "steps") or last.get("step", 0)),
            reward=last.get("eval/reward"),
            true_accuracy=last.get("eval/true_accuracy"),
            figures=describe_evaluations(part(summary, "eval")) if not summary.get("steps") else "",
            changed=self._changed(),
        )

    def _changed(self) -> datetime:
        """When its metrics, or the summary at its end, were last written."""
        changed_ns = max(read_stamp(self.run_dir / name)[1] for name in ("metrics.jsonl", "summary.json"))
        return datetime.fromtimestamp((changed_ns or read_stamp(self.run_dir)[1]) / 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewedState:
    """How a run stands. reward, true_accuracy: of its last evaluation on held-out prompts. changed: local time.

    experiment: its name, if the run's own doesn't hold it.
    figures:    of a run that only evaluates, in words.
    """

    experiment: str
    status: str
    failure: str | None
    alarms: Sequence[str]
    changes: Sequence[str]
    steps: int
    reward: float | None
    true_accuracy: float | None
    figures: str
    changed: datetime

    @property
    def is_open(self) -> bool:
        return self.status == NEVER_ENDED


def describe_evaluations(evaluations: Mapping[str, object]) -> str:
    """The first figure of each evaluation, with its interval, as in `accuracy 0.65 [0.51, 0.77]`."""
    shown = []
    for name in evaluations:
        found = find_numbers(part(dict(evaluations), name))
        if found:
            first, value = next(iter(found.items()))
            ends = [found[f"{first}_{end}"] for end in ("low", "high") if f"{first}_{end}" in found]
            interval = " [{}]".format(", ".join(map(short, ends))) if len(ends) == 2 else ""
            shown.append(f"{'' if name == 'final' else name + ' '}{first} {short(value)}{interval}")
    return "; ".join(shown)


def read_stamp(path: Path) -> tuple[int, int]:
    """Its size and the time of its last change [ns]; 0 and 0 if it isn't there."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


@functools.lru_cache(maxsize=8)
def read_metrics(path: Path, size: int, changed_ns: int) -> tuple[Metrics, ...]:
    """size, changed_ns: of the file, to read it again once it grew."""
    return tuple(line for line in map(find_numbers, read_what_can_be(path)) if "step" in line) if size else ()


@functools.lru_cache(maxsize=1024)  # so that a list of long runs reads each of them once
def read_last(path: Path, size: int, changed_ns: int) -> Metrics:
    """The last number of each name."""
    last: Metrics = {}
    for line in read_metrics(path, size, changed_ns):
        last.update(line)
    return last


def find_runs(folder: Path) -> dict[str, ViewedRun]:
    """The runs by name: the folder itself, or those below it. Raises ConfigError if there is none."""
    if not folder.is_dir():
        raise ConfigError(
            f"run_dir: {folder} is no folder; type run_dir=runs/<experiment_name>/latest, or run_dir=runs"
        )
    found = [folder.resolve()] if is_run(folder) else find_runs_below(folder.resolve())
    if not found:
        raise ConfigError(
            f"run_dir: {folder} holds no run; type run_dir=runs/<experiment_name>/latest, or run_dir=runs"
        )
    base = found[0].parent if is_run(folder) else folder.resolve()
    names = {path: path.relative_to(base).as_posix() for path in found}
    return {name: ViewedRun(name=name, run_dir=path, index=RunIndex(path)) for path, name in names.items()}


def find_runs_below(folder: Path) -> list[Path]:
    """The runs in folders, then those that only a link leads to, to them or to a folder of them. Each run, and each
    folder, is found once.
    """
    found, links, known = list[Path](), list[tuple[Path, int]](), {folder.resolve()}

    def look(folder: Path, depth: int) -> None:
        try:
            inside = sorted(Path(entry) for entry in os.scandir(folder) if entry.is_dir())
        except OSError:
            return
        for path in inside:
            if path.is_symlink():
                links.append((path, depth))
            else:
                enter(path, depth)

    def enter(path: Path, depth: int) -> None:
        if (real := path.resolve()) in known:
            return
        known.add(real)
        if is_run(path):
            found.append(path)
        elif depth > 1 and path.name not in NOT_RUNS:
            look(path, depth - 1)

    look(folder, MAX_DEPTH)
    while links:
        enter(*links.pop(0))
    return found


def is_run(path: Path) -> bool:
    return holds_run(path) or any((path / name).exists() for name in (*JOURNALS, "metrics.jsonl"))


def check_readable(runs: Mapping[str, ViewedRun]) -> None:
    """Raises ConfigError, with words, for a journal that can't be opened."""
    for run in runs.values():
        for name in (*JOURNALS, "metrics.jsonl"):
            path = run.run_dir / name
            try:
                if path.exists():
                    path.open("rb").close()
            except OSError as error:
                reason = error.strerror or error
                raise ConfigError(f"run_dir: {path} can't be read ({reason}); give the right to read it") from error


# -- comparison --------------------------------------------------------------------------------------------------------


def flat_config(run: ViewedRun) -> Mapping[str, str]:
    """Dotted key -> value as text, without secrets. Empty if config.yaml isn't there or no YAML."""
    path = run.run_dir / "config.yaml"
    return read_flat_config(path, *read_stamp(path))


@functools.lru_cache(maxsize=1024)
def read_flat_config(path: Path, size: int, changed_ns: int) -> Mapping[str, str]:
    """size, changed_ns: of the file, to read it again once it changed."""
    return read_values(config_text(read_bytes(path), environment_secrets()))


def tell_apart(runs: Mapping[str, ViewedRun]) -> dict[str, str]:
    """Run -> the keys and values that not all runs of the same experiment and task in its folder have: what a sweep
    varied.
    """
    alike: dict[tuple[object, ...], dict[str, Mapping[str, str]]] = {}
    for name, run in runs.items():
        config = flat_config(run)
        who = run.run_dir.parent, config.get("experiment_name"), config.get("task")
        alike.setdefault(who, {})[name] = config
    found = {}
    for configs in alike.values():
        keys = sorted({key for config in configs.values() for key in config} - {"run_dir", "resume"})
        varied = [key for key in keys if len({config.get(key) for config in configs.values()}) > 1]
        for name, config in configs.items():
            shown = [f"{key}={config.get(key)}" for key in varied[:SHOWN_KEYS]]
            found[name] = " ".join([*shown, *["…"] * (len(varied) > SHOWN_KEYS)])
    return found


def config_differences(a: ViewedRun, b: ViewedRun) -> list[tuple[str, str | None, str | None]]:
    """Key, value in a, value in b; None: the key isn't there."""
    of_a, of_b = flat_config(a), flat_config(b)
    keys = sorted(of_a.keys() | of_b.keys())
    return [(key, of_a.get(key), of_b.get(key)) for key in keys if of_a.get(key) != of_b.get(key)]
