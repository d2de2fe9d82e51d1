"""The tasks of launch.py that need torch: train, evaluate, plan and others. Each runs to its end and reports it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBars

from grmpipe.capacity.plan.memory_check import check_memory, divide_gpus, sized
from grmpipe.config.run_config import RunConfig
from grmpipe.observe.logs import setup_logging
from grmpipe.observe.summary import Summary
from grmpipe.run.errors import RunFailed, RunInterrupted
from grmpipe.run.rft import train_judge_rft
from grmpipe.run.train import train
from grmpipe.run_dir.claim import Claim
from grmpipe.run_dir.directory import RunLocation
from grmpipe.validate.devices import device_notes
from grmpipe.validate.models import Progress
from grmpipe.validate.prepare import Prepared, prepare


def run_task(config: RunConfig) -> float | None:
    """Run a task. Returns the objective, for a sweeper. Raises ConfigError, RunFailed or RunInterrupted.

    Each task imports its own parts, so that training doesn't wait for the imports of others.
    """
    return run_retrain(config) if config.data.retrain_from is not None else TASKS[config.task](config)


def run_train(config: RunConfig) -> float | None:
    with Claim(config) as claim:
        if claim.place.complete:
            return say_complete(claim.place)
        with model_progress() as progress:
            prepared = divide_gpus(prepare(config, progress))
        check_memory(prepared)
        tell([*claim.place.notes, *notes(prepared)])
        run_dir = claim.open()
        return outcome(asyncio.run(RUNS[config.task](prepared, *anywhere(run_dir, claim.place))), run_dir)


def run_retrain(config: RunConfig) -> float | None:
    from grmpipe.run.retrain import retrain
    from grmpipe.validate.retraining import prepare_retraining

    with Claim(config) as claim:
        if claim.place.complete:
            return say_complete(claim.place)
        with model_progress() as progress:
            prepared = prepare_retraining(config, progress)
        tell(claim.place.notes)
        run_dir = claim.open()
        return outcome(asyncio.run(retrain(prepared, *anywhere(run_dir, claim.place))), run_dir)


def anywhere(run_dir: Path, place: RunLocation) -> tuple[Path, Path | None]:
    """The absolute paths of the run's directory and its checkpoint, for processes in other working directories."""
    return run_dir.absolute(), place.checkpoint.absolute() if place.checkpoint is not None else None


def tell(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"grmpipe: note: {line}", file=sys.stderr)


def say_complete(place: RunLocation) -> float | None:
    print(f"{place.run_dir} is complete; see {place.run_dir}/summary.json")
    return objective_of(place.run_dir)


def outcome(summary: Summary, run_dir: Path) -> float | None:
    if summary.status == "failed":
        raise RunFailed(f"{summary.failure}\nSee {run_dir}/run.log")
    if summary.status == "interrupted":
        raise RunInterrupted(f"interrupted at step {summary.steps}; continue with resume=auto run_dir={run_dir}")
    return summary.objective


def run_train_meta_rm(config: RunConfig) -> float | None:
    from grmpipe.run.train_meta_rm import train_meta_rm
    from grmpipe.validate.meta_rm_training import prepare_meta_training

    with Claim(config) as claim:
        with model_progress() as progress:
            ready = prepare_meta_training(config, progress)
        run_dir = claim.open()
        summary = asyncio.run(train_meta_rm(ready, run_dir.absolute()))
    if summary.status == "failed":
        raise RunFailed(f"{summary.failure}\nSee {run_dir}/run.log")
    if summary.status == "interrupted":
        raise RunInterrupted(
            f"interrupted at step {summary.steps}; once {run_dir}/judgements.jsonl exists, a new run can read "
            "it with meta_rm.judgements=..."
        )
    return summary.objective


def run_evaluate(config: RunConfig) -> float | None:
    from grmpipe.run.evaluate_judge import prepare_evaluation, run_evaluation

    with Claim(replace(config, resume="never")) as claim:
        with model_progress() as progress:
            ready = prepare_evaluation(config, progress)
        run_dir = claim.open()
        setup_logging(run_dir, None)
        summary = asyncio.run(run_evaluation(ready, run_dir))
    if summary.status == "failed":
        raise RunFailed(f"{summary.failure}\nSee {run_dir}/run.log")
    return summary.objective


def show_plan(config: RunConfig) -> None:
    from grmpipe.capacity.plan.plan_report import plan
    from grmpipe.capacity.simulate.simulation import simulator

    with model_progress() as progress:
        text = plan(config, progress, simulator)
    print(text)


def show_simulation(config: RunConfig) -> None:
    from grmpipe.capacity.simulate.simulation import run_simulation

    with model_progress() as progress:
        text = run_simulation(config, progress)
    print(text)


RUNS = {"train": train, "train_judge_rft": train_judge_rft}
TASKS = {
    "train": run_train,
    "train_judge_rft": run_train,
    "train_meta_rm": run_train_meta_rm,
    "evaluate": run_evaluate,
    "plan": show_plan,
    "simulate": show_simulation,
}


def objective_of(run_dir: Path) -> float | None:
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["objective"]


def notes(prepared: Prepared) -> list[str]:
    """Notes on settings that are allowed but may not be meant."""
    config, objective, said = prepared.config, prepared.config.objective, []
    if objective.startswith("eval.") and not prepared.held_out:
        said.append(f"objective: {objective} is null without held-out prompts; give data.eval_path=...")
    if any(pool.resource == "gpu" for pool in prepared.placement.pools.values()):
        footprints = {role: model.footprint for role, model in sized(prepared).items()}
        said += device_notes(config, prepared.roles, footprints)
    return said


@contextmanager
def model_progress() -> Iterator[Progress]:
    """Context: a progress bar for each model that has to be made; none if all exist."""
    bars = ProgressBars(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), transient=True, console=Console(stderr=True)
    )
    tasks: dict[str, TaskID] = {}

    def advance(what: str, share: float) -> None:
        if what not in tasks:
            bars.start()
            tasks[what] = bars.add_task(what, total=1.0)
        bars.update(tasks[what], completed=share)

    try:
        yield advance
    finally:
        if tasks:  # stopping without a start prints an empty line
            bars.stop()
