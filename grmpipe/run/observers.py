"""All observers of a run in one place: metrics, journals, timeline, console, trackers. None of them can fail a step."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grmpipe.config.io.resolve_config import fill_sections
from grmpipe.config.io.resume_rules import free_on_resume
from grmpipe.config.keys.entry_names import GRM
from grmpipe.config.keys.secrets import environment_secrets, mask, redact, without_secrets
from grmpipe.config.run_config import RunConfig
from grmpipe.observe.all_trackers import AllTrackers, JsonlSink
from grmpipe.observe.budget_gate import PAID_ANSWERS, BudgetGate, PaidAnswers
from grmpipe.observe.console import (
    ONE_JUDGE,
    ONE_REWARD,
    REPORT,
    SEVERAL_JUDGES,
    ConsoleSink,
    describe_run_signal,
)
from grmpipe.observe.guard import Guard
from grmpipe.observe.journal import decode_what_can_be
from grmpipe.observe.json_console import JsonConsole, JsonConsoleSink
from grmpipe.observe.judge_requests import JUDGE_REQUESTS, RequestJournal
from grmpipe.observe.logs import setup_logging
from grmpipe.observe.progress import Progress
from grmpipe.observe.recorder import EvalRecorder, Recorder
from grmpipe.observe.report import write_report
from grmpipe.observe.run_files import find_numbers
from grmpipe.observe.spending import Spending, describe_spending
from grmpipe.observe.timeline import Timeline
from grmpipe.run_dir.begun_rollouts import BegunRollouts
from grmpipe.run_dir.identity import read_run_id
from grmpipe.run_dir.run_state import RunState
from grmpipe.trackers.tracker import SampleRow, TrackedRun, Tracker

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"

# What a run may write, in the order in which its end lists it; docs/reading_a_run.md says what each holds.
FILES = (
    REPORT,
    "summary.json",
    "evaluation.json",
    "policy_evaluation.json",
    "watched.jsonl",
    "to_label.jsonl",
    "comparison.json",
    "figures.txt",
    "eval_rollouts.jsonl",
    "eval_judgements.jsonl",
    "verdicts.jsonl",
    "probe.json",
    "probes_train.jsonl",
    "probes_held_out.jsonl",
    "calibration.json",
    "judged.jsonl",
    "metrics.jsonl",
    "rollouts.jsonl",
    "judgements.jsonl",
    "calls.jsonl",
    "imputed.jsonl",
    "groups.jsonl",
    "trained.jsonl",
    "anchors.jsonl",
    JUDGE_REQUESTS,
    PAID_ANSWERS,
    "rubrics/",
    "rubric_candidates.jsonl",
    "canaries.jsonl",
    "timeline.json",
    "changes.jsonl",
    "checkpoints/",
    "policy/",
    "meta_rm/",
    "critic/",
    "grm/",
    "policy_versions/",
    "adapter/",
    "critiques.jsonl",
    "cotrain/",
    "in_flight/",
    "run.log",
)
# What is made for a further command, and its key there.
INPUTS = {
    "probes_train.jsonl": "data.path",
    "probes_held_out.jsonl": "judge_monitor.canaries_path",
    "calibration.json": "judge.calibration",
    "policy/": "policy.path",
    "meta_rm/": "meta_rm.path",
    "critic/": "critic.path",
    "grm/": "grm.path",
}


def holds_anything(path: Path) -> bool:
    return path.is_dir() or (path.exists() and path.stat().st_size > 0)


def list_files(config: RunConfig) -> dict[str, str]:
    """The files of a run, and for one that a further command takes the key that it is given as. Each GRM in training
    has a directory of its own name.
    """
    *before, last = FILES
    names = [*before, *(f"{role}/" for role in config.trained_grms if role != GRM), last]
    judge = {"policy/": "grm.path"} if config.main_judge.kind == "label" else {}  # the judge was the policy
    return {name: (INPUTS | judge).get(name, "") for name in names}


def open_trackers(config: RunConfig, run_dir: Path, state: RunState | None, own: Mapping[str, Tracker]) -> AllTrackers:
    """The run's own trackers, and those that the configuration chooses. What was logged after a checkpoint is void."""
    settings, states = config.tracking, state.trackers if state is not None else {}
    first_step = state.pipeline_state.version + 1 if state is not None else 0
    shown = redact(without_secrets(fill_sections(config), free_on_resume))
    trackers = AllTrackers(own, states, table_every=settings.table_every)
    for name in settings.trackers:
        run = TrackedRun(run_dir=run_dir, config=shown, state=states.get(name, {}), first_step=first_step)
        trackers.open(name, functools.partial(settings.open, name, run))
    return trackers


@dataclass(frozen=True, slots=True, kw_only=True)
class Observers:
    """The observers of a run, open from the first evaluation to the summary."""

    trackers: AllTrackers
    metrics: JsonlSink
    journal_guard: Guard  # counts the lines that journals lost, by file
    recorder: Recorder
    begun: BegunRollouts
    evaluations: EvalRecorder
    requests: RequestJournal
    budget: BudgetGate
    timeline: Timeline
    console: ConsoleSink | None
    progress: Progress
    files: Mapping[str, str]  # see list_files

    @staticmethod
    def open(config: RunConfig, run_dir: Path, state: RunState | None = None, *, gauges: bool = True) -> Observers:
        """state:  that a resume continues from.
        gauges: whether the console shows each step; it shows metrics of a policy.
        """
        one = ONE_REWARD if config.main_judge.in_words.score == "reward" else ONE_JUDGE
        shown = SEVERAL_JUDGES if len(config.judging.judges) > 1 else one
        console: ConsoleSink | None = None
        if config.tracking.json_logging:
            console = JsonConsoleSink(config.train.num_steps, JsonConsole(), shown)
        elif config.tracking.console:
            console = ConsoleSink(config.train.num_steps, shown=shown, shows_steps=gauges)
        libraries = [row.library for row in config.tracking.chosen.values() if row.library]
        setup_logging(run_dir, console.console if console else None, libraries)
        run_id, compact, guard = read_run_id(run_dir), config.journals.compact, Guard()
        metrics = JsonlSink(run_dir / METRICS, run_id)
        requests = RequestJournal(run_dir, run_id, guard)
        spending = Spending(config.prices, config.budget, requests.totals)
        is_service = config.task == "serve" or (config.task == "score" and config.score.path is None)
        trackers = open_trackers(config, run_dir, state, {METRICS: metrics} | ({"console": console} if console else {}))
        setup_logging(run_dir, console.console if console else None, libraries)  # again: libraries add own handlers
        return Observers(
            trackers=trackers,
            metrics=metrics,
            journal_guard=guard,
            recorder=Recorder(run_dir, run_id, compact=compact, guard=guard),
            begun=BegunRollouts(run_dir, run_id, compact=compact, guard=guard),
            evaluations=EvalRecorder(run_dir, run_id, compact=compact, guard=guard),
            requests=requests,
            budget=BudgetGate(
                spending,
                requests,
                PaidAnswers(run_dir, run_id, guard, is_kept=spending.is_bounded),
                is_service=is_service,
            ),
            timeline=Timeline(run_dir / "timeline.json", run_id, trackers),
            console=console,
            progress=Progress(console.console if console else None),
            files=list_files(config),
        )

    def note(self, text: str) -> None:
        if self.console:
            self.console.note(text)

    def show_changes(self, changes: Sequence[str]) -> None:
        """Show what resumes changed in the configuration."""
        for change in changes:
            log.info("changed %s", change)
            self.note(f"changed {change}")

    @property
    def journal_failures(self) -> dict[str, int]:
        """File -> lines that this process could not write. A resume or a replay lacks them."""
        metrics = {name: count for name, count in self.trackers.failures.items() if name == METRICS}
        return metrics | self.journal_guard.failures

    def describe_lost_lines(self) -> list[str]:
        """An alarm for each file of `journal_failures`, with its first cause, without secrets."""
        causes, secrets = {**self.trackers.causes, **self.journal_guard.causes}, environment_secrets()
        return [
            f"{count} lines of {name} could not be written: a resume or a replay will miss them. The first one: "
            f"{mask(causes[name], secrets)}"
            for name, count in self.journal_failures.items()
        ]

    def show_end(self, run_dir: Path, rows: Sequence[SampleRow], bottleneck: str | None) -> None:
        """Write the report; show some rollouts with their critiques, the bottleneck, groups without a signal, the
        requests to models that judge, and where the files are.
        """
        write_report(run_dir)
        signal = describe_run_signal(list(decode_what_can_be(run_dir / "metrics.jsonl", find_numbers)))
        if signal is not None:
            log.info("%s", signal)
        spent = describe_spending(self.budget.spending.figures)
        for text in (requests := [*self.requests.totals.texts, *filter(None, [spent])]):
            log.info("requests to %s", text)
        if self.console:
            self.console.print_samples(rows)
            if bottleneck is not None:
                self.console.remark("bottleneck", bottleneck)
            if signal is not None:
                self.console.remark("no signal", signal)
            for text in requests:
                self.console.remark("requests", text, "dim")
            for text in self.describe_lost_lines():
                self.console.alarm(text)
            for name, count in (self.trackers.failures - Counter(self.journal_failures)).items():
                calls = "1 call" if count == 1 else f"{count} calls"
                self.console.alarm(f"{calls} of the tracker {name} failed; run.log says why")
            self.console.print_files(
                run_dir, {name: key for name, key in self.files.items() if holds_anything(run_dir / name)}
            )

    def close(self) -> None:
        self.trackers.close()
        self.recorder.close()
        self.evaluations.close()
        self.requests.close()
        self.budget.close()
        self.timeline.close()
