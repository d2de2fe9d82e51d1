"""The tasks of launch.py that need torch: train, evaluate, plan and others. Each runs to its end and reports it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from grmpipe.config.io.key_errors import section
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.task_settings import EVALUATIONS
from grmpipe.run.build.start_cluster import preload
from grmpipe.run.errors import RunFailed, RunInterrupted
from grmpipe.run.prepare import Prepared, check_trackers, prepare
from grmpipe.run.run_context import HasConfig, Run, run_in_directory
from grmpipe.run.run_watcher import RunWatcher
from grmpipe.run.signals import stoppable
from grmpipe.run_dir.directory import RunLocation, RunLock
from grmpipe.scheduler.event_loop import run_to_end

if TYPE_CHECKING:
    from grmpipe.run.tasks.play import PreparedPlay
    from grmpipe.run.tasks.prepare_evaluation import PreparedEvaluation
    from grmpipe.run.tasks.rejudge import PreparedRejudging
    from grmpipe.run.tasks.retrain import PreparedRetraining
    from grmpipe.run.tasks.score import PreparedScoring
    from grmpipe.run.tasks.train_meta_rm import MetaRmTraining


P = TypeVar("P", bound=HasConfig)
AS_BEFORE = "type the same command with resume=auto"  # how judging again, or a service, is continued


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTask(Generic[P]):
    """A task that starts processes.

    prepare:   refuses what can't run, with a ConfigError.
    make_run:  what runs in the session.
    notes:     notes on settings that are allowed but may not be meant.
    continued: how a run that was interrupted is continued; `{run_dir}` is replaced by its directory.
    is_service: whether a signal is its usual end.
    """

    prepare: Callable[[RunConfig], P]
    make_run: type[Run[P]]
    notes: Callable[[P], Iterable[str]] = lambda prepared: ()
    continued: str = "continue with resume=auto run_dir={run_dir}"
    is_service: bool = False


def run_task(config: RunConfig, watcher: RunWatcher | None = None) -> float | None:
    """The objective, for a sweeper. Raises ConfigError, RunFailed or RunInterrupted.

    watcher: acts between the steps of a training run, and learns the directory of any run.
    """
    watcher = watcher or RunWatcher()
    if config.data.retrain_from is not None:
        return run(config, make_retraining(), watcher)
    if config.task == "score" and config.score.path is None and not watcher.asks:
        raise ConfigError("score.path: is null, so that there is nothing to judge; type score.path=<file of responses>")
    if config.task in SHOWN:
        return SHOWN[config.task](config)
    # They leave nothing to resume but, within a budget, answers that are paid.
    if config.task in (*EVALUATIONS, "score", "play") and not config.budget.bounds:
        config = replace(config, resume="never")
    if config.task in (
        "score",
        "serve",
        "play",
    ):  # they have no steps; to import W&B takes longer than to start such a judge
        config = replace(config, tracking=replace(config.tracking, trackers=[]))
    return run(config, RUNS[config.task](), watcher)


def run(config: RunConfig, task: RunTask[P], watcher: RunWatcher) -> float | None:
    """Lock a directory, refuse what can't run, and run the rest to its end."""
    with stoppable() as request, RunLock(config) as lock:
        if lock.place.complete:
            watcher.note_opened(lock.place.run_dir)
            return objective_of_complete(lock.place.run_dir)
        check_trackers(config)
        with preload(config):
            prepared = task.prepare(config)
            for line in (*lock.place.notes, *task.notes(prepared)):
                print(f"grmpipe: note: {line}", file=sys.stderr)
            watcher.note_opened(run_dir := lock.open())
            try:
                summary = run_to_end(run_in_directory(task.make_run, prepared, *anywhere(run_dir, lock.place), watcher))
            except asyncio.CancelledError:  # by the first of two signals, after the second
                raise KeyboardInterrupt from None
    if summary.status == "failed":
        raise RunFailed(f"{summary.failure}\nSee {run_dir}/run.log")
    if summary.status == "interrupted":
        failure = f" ({summary.failure})" if summary.failure else ""
        where = f" at step {summary.steps}" if summary.steps or task.make_run.is_policy_run else ""
        raise RunInterrupted(f"interrupted{where}{failure}; {task.continued.format(run_dir=run_dir)}")
    if request.came and not task.is_service:  # a sweep must end too
        raise RunInterrupted(f"interrupted after the end of the run, which is complete: {run_dir}")
    return summary.objective


def anywhere(run_dir: Path, place: RunLocation) -> tuple[Path, Path | None]:
    """The run's directory and its checkpoint, for processes with other working directories."""
    return run_dir.absolute(), place.checkpoint.absolute() if place.checkpoint is not None else None


def objective_of_complete(run_dir: Path) -> float | None:
    """The objective of a run that is complete already, which is said."""
    summary = run_dir / "summary.json"
    print(f"{run_dir} is complete; see {summary}")
    objective: float | None = json.loads(summary.read_text(encoding="utf-8")).get("objective")
    return objective


# -- tasks that run: each imports its own parts -----------------------------------------------------------------------


def prepare_training(config: RunConfig) -> Prepared:
    from grmpipe.capacity.plan.memory_check import divide_gpus  # late: a judge alone starts without it

    return with_room(divide_gpus(prepare(config)))


def with_room(prepared: Prepared) -> Prepared:
    """The same, with the predicted pause of a push; what may not fit into this machine's memory is said. Raises
    ConfigError for what can't.
    """
    from grmpipe.capacity.plan.costs import predict_pause_s  # late, as above
    from grmpipe.capacity.plan.memory_check import check_memory, collect_known

    facts = collect_known(prepared)
    for warning in check_memory(facts):
        print(f"grmpipe: note: {warning}", file=sys.stderr)
    return replace(prepared, predicted_pause_s=predict_pause_s(facts))


def make_training() -> RunTask[Prepared]:
    from grmpipe.run.tasks.train import TrainingRun

    return RunTask(prepare=prepare_training, make_run=TrainingRun, notes=notes)


def rft() -> RunTask[Prepared]:
    from grmpipe.run.tasks.rft import RftRun

    return RunTask(prepare=prepare_training, make_run=RftRun, notes=notes)


def make_retraining() -> RunTask[PreparedRetraining]:
    from grmpipe.run.tasks.retrain import RecordedRunTraining, prepare_retraining

    return RunTask(prepare=prepare_retraining, make_run=RecordedRunTraining)


def meta_rm_training() -> RunTask[MetaRmTraining]:
    from grmpipe.run.tasks.train_meta_rm import MetaRmRun, prepare_meta_training

    continued = "once {run_dir}/judgements.jsonl exists, a new run can read it with meta_rm.judgements=..."
    return RunTask(prepare=prepare_meta_training, make_run=MetaRmRun, continued=continued)


def evaluation() -> RunTask[PreparedEvaluation]:
    from grmpipe.run.tasks.evaluate import EvaluationRun
    from grmpipe.run.tasks.prepare_evaluation import prepare_evaluation

    return make_evaluation(prepare_evaluation, EvaluationRun)


def make_calibration() -> RunTask[PreparedEvaluation]:
    from grmpipe.run.tasks.calibrate import CalibrationRun, prepare_calibration

    return make_evaluation(prepare_calibration, CalibrationRun)


def make_probing() -> RunTask[PreparedEvaluation]:
    from grmpipe.run.tasks.probe_judge import ProbeRun, prepare_probe

    return make_evaluation(prepare_probe, ProbeRun)


def make_evaluation(
    prepare_work: Callable[[RunConfig], PreparedEvaluation], make_run: type[Run[PreparedEvaluation]]
) -> RunTask[PreparedEvaluation]:
    from grmpipe.capacity.plan.memory_check import divide_gpus
    from grmpipe.run.tasks.prepare_evaluation import PreparedEvaluation

    def prepare_with_shares(config: RunConfig) -> PreparedEvaluation:
        ready = prepare_work(config)
        return replace(ready, prepared=with_room(divide_gpus(ready.prepared) if config.plays else ready.prepared))

    return RunTask(
        prepare=prepare_with_shares,
        make_run=make_run,
        notes=PreparedEvaluation.notes,
        continued="type the command again",
    )


def make_playing() -> RunTask[PreparedPlay]:
    from grmpipe.run.tasks.play import PlayRun, prepare_play

    return RunTask(prepare=prepare_play, make_run=PlayRun, continued="type the command again")


def make_scoring() -> RunTask[PreparedScoring]:
    from grmpipe.run.tasks.score import ScoringRun, prepare_scoring

    return RunTask(prepare=prepare_scoring, make_run=ScoringRun, continued="type the command again")


def make_serving() -> RunTask[PreparedScoring]:
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError("task: serve needs aiohttp; type: pip install 'grmpipe[serve]'")
    from grmpipe.run.tasks.score import prepare_scoring
    from grmpipe.run.tasks.serve import ServingRun

    def prepare_service(config: RunConfig) -> PreparedScoring:
        with section("serve."):
            _ = config.serve.key
        return prepare_scoring(config)

    return RunTask(prepare=prepare_service, make_run=ServingRun, continued=AS_BEFORE, is_service=True)


def rejudge() -> RunTask[PreparedRejudging]:
    from grmpipe.run.tasks.rejudge import PreparedRejudging, RejudgeRun, prepare_rejudging

    def prepare_with_room(config: RunConfig) -> PreparedRejudging:
        ready = prepare_rejudging(config)
        return replace(ready, prepared=with_room(ready.prepared))

    return RunTask(prepare=prepare_with_room, make_run=RejudgeRun, notes=PreparedRejudging.notes, continued=AS_BEFORE)


# -- tasks that show -------------------------------------------------------------------------------------------------


def show_plan(config: RunConfig) -> None:
    from grmpipe.capacity.plan.plan_report import plan

    planned = plan(config)
    print(planned.text)
    if planned.refusal:
        raise ConfigError(planned.refusal)


def show_simulation(config: RunConfig) -> float:
    """The objective is the simulated seconds of a step."""
    from grmpipe.capacity.simulate.simulation import run_simulation

    text, step_s = run_simulation(config)
    print(text)
    return step_s


SHOWN: dict[str, Callable[[RunConfig], float | None]] = {"plan": show_plan, "simulate": show_simulation}
RUNS: dict[str, Callable[[], RunTask[Any]]] = {
    "train": make_training,
    "train_judge_rft": rft,
    "train_meta_rm": meta_rm_training,
    "evaluate": evaluation,
    "calibrate": make_calibration,
    "probe_judge": make_probing,
    "score": make_scoring,
    "serve": make_serving,
    "rejudge": rejudge,
    "play": make_playing,
}


def notes(prepared: Prepared) -> list[str]:
    """Notes on settings that are allowed but may not be meant."""
    from grmpipe.capacity.notes import device_notes, hyperparameter_notes
    from grmpipe.capacity.plan.memory_check import size_roles

    config, objective, said = prepared.config, prepared.config.objective, []
    for name in config.rewards.weightless():
        said.append(
            f"reward.mix.{name}: has weight 0, and a verdict that it fails to give fails the reward's; to let {name} "
            f"only watch, leave it out and type 'judge_monitor.watch={{{name}: 1}}'"
        )
    if objective.startswith("eval.") and not prepared.held_out:
        said.append(f"no held-out prompts: nothing is evaluated, {objective} stays null; data.eval_path=... takes some")
    if any(pool.resource == "gpu" for pool in prepared.placement.pools.values()):
        footprints = {role: model.footprint for role, model in size_roles(prepared).items()}
        said += device_notes(config.train, prepared.roles, footprints)
    return [*said, *hyperparameter_notes(config)]
