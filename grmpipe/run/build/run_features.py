"""The features of a training run, in the order in which they look at a step."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grmpipe.config.keys.entry_names import POLICY
from grmpipe.judge.composition.composed_judge import get_members, without_bounds
from grmpipe.judge.monitor.reward_hacking import RewardHackingDetector
from grmpipe.pipeline.health import JudgeHealth
from grmpipe.pipeline.interfaces import PipelineComponents
from grmpipe.run.build.compose_pipeline import compose_health, make_evaluator
from grmpipe.run.build.make_judge import find_evolving
from grmpipe.run.build.start import Running
from grmpipe.run.features.cotrain.cotraining import CoTraining, CoTrainings
from grmpipe.run.features.cpu_seconds import BudgetMetrics, CpuSeconds
from grmpipe.run.features.engine_counts import EngineCounts
from grmpipe.run.features.journal_size import JournalSize
from grmpipe.run.features.judge_alarms import CascadeAlarm, FailingJudges, RubricAlarm
from grmpipe.run.features.judge_monitor import JudgeMonitor, MonitoredJudge
from grmpipe.run.features.periodic_eval import ANCHORS, PeriodicEval
from grmpipe.run.features.rubric_evolution import RubricEvolution
from grmpipe.run.features.run_feature import RunFeature
from grmpipe.run.features.watching_judges import STEPS_WAITING, Watcher, WatchingJudges
from grmpipe.run.observers import Observers
from grmpipe.run.prepare import Prepared
from grmpipe.run_dir.identity import read_run_id
from grmpipe.run_dir.run_state import RunState
from grmpipe.types import Prompt, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFeatures:
    """All features of a run; those that it asks for more than its steps by name too."""

    each: tuple[RunFeature, ...]
    periodic_eval: PeriodicEval
    judge_monitor: JudgeMonitor

    @property
    def states(self) -> dict[str, Mapping[str, Any]]:
        """Name -> state, of those that keep one."""
        return {feature.name: feature.state() for feature in self.each if feature.name}


def make_cotrainings(
    prepared: Prepared,
    running: Running,
    state: RunState,
    rollouts: Sequence[tuple[Prompt, Rollout]],
    observers: Observers,
    run_dir: Path,
) -> CoTrainings:
    """The training of GRMs next to the policy. rollouts: those that a resume found."""
    before = state.grm_pipeline_states
    health, events, guard = running.maintenance.health, observers.timeline, observers.journal_guard
    return CoTrainings(
        [
            CoTraining(prepared, grm, run_dir, events, health, before.get(grm.name), rollouts, guard)
            for grm in running.trained
            if grm.name in prepared.config.trained_grms
        ]
    )


def make_features(
    prepared: Prepared,
    running: Running,
    components: PipelineComponents,
    cotrainings: CoTrainings,
    observers: Observers,
    run_dir: Path,
) -> RunFeatures:
    config, hosts = prepared.config, running.envs.hosts
    scorers = [model.scorer_pool for model in running.models.values() if model.scorer_pool is not None]
    replacing = (*running.maintenance.health, *scorers, *(() if hosts is None else (hosts,)))
    periodic_eval = make_periodic_eval(prepared, running, observers, run_dir)
    judge_monitor = make_judge_monitor(prepared, running, components, observers, run_dir)
    return RunFeatures(
        each=(
            cotrainings,
            EngineCounts(replacing, running.maintenance.elastic),
            CpuSeconds(running.cluster, config.roles),
            periodic_eval,
            running.policy_updates,
            CascadeAlarm(config.rewards.max_errors(), config.learning_cascades),
            FailingJudges(config.judging.judges),
            RubricAlarm(),
            *make_rubric_evolutions(prepared, running, observers, run_dir),
            JournalSize(run_dir, config.journals, config.seed, observers.recorder),
            WatchingJudges(
                make_watchers(prepared, running), run_dir, config.seed, read_run_id(run_dir), observers.journal_guard
            ),
            BudgetMetrics(observers.budget.spending),
            judge_monitor,  # the last: its limits are on any metric
        ),
        periodic_eval=periodic_eval,
        judge_monitor=judge_monitor,
    )


def make_rubric_evolutions(
    prepared: Prepared, running: Running, observers: Observers, run_dir: Path
) -> Iterator[RubricEvolution]:
    for judge in prepared.config.judging.generative.values():
        rubric, writer = find_evolving(prepared, judge), judge.rubric.evolve.writer
        if rubric is not None and writer is not None:
            grm, writing = running.models[judge.model].grm, running.models[writer].grm
            assert grm is not None and writing is not None, "both are asked"
            yield RubricEvolution(
                judge, rubric, writing, grm, prepared.is_right, prepared.config.seed, run_dir, observers.journal_guard,
                observers.note,
            )  # fmt: skip


def make_watchers(prepared: Prepared, running: Running) -> list[Watcher]:
    """The judges that only watch."""
    config, judges = prepared.config, running.watchers
    group_size, num_queued = config.train.group_size, STEPS_WAITING * config.train.groups_per_batch
    list_judges, limits = config.rewards.list_judges, {name: judge.limits for name, judge in config.judges.items()}
    concurrency = {name: sum(limits[one].max_concurrency for one in list_judges(name)) for name in judges}
    return [
        Watcher(
            name=name,
            judge=without_bounds(judge),
            share=config.watchers[name],
            num_queued=num_queued,
            at_once=min(num_queued, max(1, concurrency[name] // group_size)),
            deadline_s=config.rollout.group_deadline_s,
        )
        for name, judge in judges.items()
    ]


def make_periodic_eval(prepared: Prepared, running: Running, observers: Observers, run_dir: Path) -> PeriodicEval:
    monitored = prepared.config.judge_monitor
    return PeriodicEval(
        make_evaluator(prepared, running, observers.progress),
        RewardHackingDetector(),
        observers.trackers,
        observers.evaluations,
        run_dir / ANCHORS,
        anchors=monitored.anchors,
        every=prepared.config.evaluate.every,
        note=observers.note,
    )


def make_judge_monitor(
    prepared: Prepared, running: Running, components: PipelineComponents, observers: Observers, run_dir: Path
) -> JudgeMonitor:
    config, main = prepared.config, prepared.config.main_judge
    assert isinstance(components.judge_guard, JudgeHealth)
    generative, members = config.judging.generative, get_members(running.judge)
    learning = {POLICY, *config.trained_grms, *running.policy_updates.versions}
    changing = {name for name, one in generative.items() if one.model in learning or one.rubric.evolve.writer}
    monitored = MonitoredJudge(
        judge=running.judge,
        members=members,
        frozen=members.keys() - changing if members else () if changing else ("",),
        health=components.judge_guard,
        compares=config.judging.compares,
        scale=(main.scale.low, main.scale.high),
        show_thoughts=main.format.show_thoughts,
        make_health=functools.partial(compose_health, config),
    )
    watch = config.judge_monitor if config.judged_by_model else replace(config.judge_monitor, every=0)
    return JudgeMonitor(monitored, watch, run_dir, observers.note)
