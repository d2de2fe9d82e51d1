"""The console during a run: a line per step, notes, and at the end samples and files."""

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from grmpipe.models.terminal_text import replace_controls
from grmpipe.observe.guard import Guard
from grmpipe.trackers.tracker import SampleRow, Tracker
from grmpipe.types import Metrics

FAILED = re.compile(r"judge/failed_(\w+)")  # the cause
ENV_FAULT = re.compile(r"env/faults_(\w+)")  # the cause
PASS_AT = re.compile(r"eval/(true_)?pass_at_(\d+)")
OF_PART = re.compile(r"(judge|cascade)/(\w+)/(\w+)")  # area, name of the judge or cascade, metric


@dataclass(frozen=True, slots=True)
class Gauge:
    """A shown metric: its name in a line per step, and its format. width: the value's, so that lines align."""

    metric: str
    name: str
    decimals: int
    width: int
    unit: str = ""

    def text(self, metrics: Metrics) -> str:
        value = metrics.get(self.metric, math.nan)
        shown = f"{value:,.{self.decimals}f}{self.unit}" if math.isfinite(value) else "-"
        return shown.rjust(self.width)


SCORE = Gauge("train/grm_score", "score", 1, 4)
REWARD = Gauge("train/reward", "reward", 2, 4)
HELD_OUT = (
    Gauge("eval/true_accuracy", "true", 2, 4),
    Gauge("eval/true_accuracy_greedy", "greedy", 2, 4),
    Gauge("eval/grm_score", "score", 1, 4),
)
HELD_OUT_REWARD = (
    *HELD_OUT[:2],
    Gauge("eval/reward", "reward", 2, 4),
    Gauge("eval/grm_score", "first judge", 1, 4),
)
ZERO_ADVANTAGE = "train/zero_advantage_share"
MANY = 0.5  # above this share of groups without a signal a step, or a run, says so
LINE = (
    Gauge("time/step_s", "took", 1, 6, "s"),
    Gauge("train/true_accuracy", "true", 2, 4),
    SCORE,
    Gauge("env/turns_mean", "turns", 1, 4),  # of an episode
    Gauge("rollout/tokens_per_s", "tok/s", 0, 7),
    Gauge("learner/tokens_per_s", "learner tok/s", 0, 7),
    Gauge("perf/mfu", "mfu", 2, 4),
    Gauge("staleness/max", "stale", 0, 2),
    Gauge("stall/groups_s", "learner waits", 1, 6, "s"),
    Gauge("stall/engines_idle_s", "engines wait", 1, 6, "s"),
    Gauge("sync/push_s", "sync", 2, 6, "s"),
    Gauge("budget/requests", "asked outside", 0, 6),  # by the whole run
    Gauge("budget/cost_usd", "cost", 4, 8, " USD"),
    Gauge("budget/left_requests", "left", 0, 6, " requests"),
    Gauge("budget/left_tokens", "left", 0, 9, " tokens"),
    Gauge("budget/left_cost_usd", "left", 4, 8, " USD"),
)
OF_JUDGE = (Gauge("score_mean", "score", 1, 4), Gauge("tokens_per_s", "tok/s", 0, 5))
OF_CASCADE = (Gauge("escalated_share", "escalated", 2, 4), Gauge("audit_error", "audit error", 2, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeSet:
    """The gauges of a run. With several judges the reward is theirs together, and no score is. sample: what the number
    of a sample is called.
    """

    line: Sequence[Gauge]
    held_out: Sequence[Gauge]
    sample: str = "score"


WITHOUT_SCORE = [REWARD if gauge is SCORE else gauge for gauge in LINE]
ONE_JUDGE = GaugeSet(line=LINE, held_out=HELD_OUT)
ONE_REWARD = GaugeSet(line=WITHOUT_SCORE, held_out=HELD_OUT_REWARD[:3], sample="reward")
SEVERAL_JUDGES = GaugeSet(line=WITHOUT_SCORE, held_out=HELD_OUT_REWARD)


def failures_by_cause(metrics: Metrics) -> dict[str, int]:
    """Failed judgements of this step by cause, without causes that did not occur."""
    return by_cause(FAILED, metrics)


def by_cause(pattern: re.Pattern[str], metrics: Metrics) -> dict[str, int]:
    found = {cause[1]: value for name, value in metrics.items() if (cause := pattern.fullmatch(name))}
    return {cause: int(value) for cause, value in sorted(found.items()) if value > 0}


def by_part(metrics: Metrics, area: str) -> dict[str, Metrics]:
    """The metrics of each of several judges, or of each cascade (`area`), by its name. A judge's have the names that
    those of all judges have after their area.
    """
    parts: dict[str, Metrics] = {}
    for name, value in metrics.items():
        if (found := OF_PART.fullmatch(name)) and found[1] == area:
            parts.setdefault(found[2], {})[found[3]] = value
    return parts


def judge_texts(metrics: Metrics) -> Iterator[tuple[str, str]]:
    """(name, its gauges) for each of several judges and each cascade. Failures come last: they have no fixed width."""
    for name, own in by_part(metrics, "judge").items():
        asks_model = own.get("tokens", 0) > 0
        failures = failures_by_cause({f"judge/{key}": value for key, value in own.items()})
        failed = [f"failed {failures_text(failures)}"] if failures else []
        yield name, "  ".join([*write_gauges(OF_JUDGE if asks_model else OF_JUDGE[:1], own), *failed])
    for name, own in by_part(metrics, "cascade").items():
        yield f"cascade {name}", "  ".join(write_gauges(OF_CASCADE, own))


def describe_missing_signal(metrics: Metrics) -> str:
    """How many groups of a step have equal rewards, if most do; otherwise empty."""
    share = metrics.get(ZERO_ADVANTAGE, 0.0)
    if share <= MANY:
        return ""
    return "in no group rewards differ" if share == 1.0 else f"in {share:.0%} of groups rewards don't differ"


def describe_run_signal(steps: Sequence[Metrics]) -> str | None:
    """A sentence on the groups of a run whose siblings had equal rewards. None if these were few in the run and no
    step had only such groups.
    """
    shares = [step[ZERO_ADVANTAGE] for step in steps if ZERO_ADVANTAGE in step]
    without = sum(share == 1.0 for share in shares)
    mean = math.fsum(shares) / max(1, len(shares))
    if not without and mean <= MANY:
        return None
    only_such = f", and {without} of {len(shares)} steps had no other groups" if without else ""
    return (
        f"in {mean:.0%} of the groups the rewards of all siblings were equal{only_such}; an algorithm that compares "
        "siblings learns nothing from them. See in judgements.jsonl whether the judge separates good answers from bad "
        "ones; or take prompts that are neither too easy nor too hard (algorithm.dynamic_sampling_batches replaces "
        "such groups)"
    )


def failures_text(failures: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {cause}" for cause, count in failures.items()) or "none"


def step_lines(step: int, num_steps: int, metrics: Metrics, shown: GaugeSet = ONE_JUDGE) -> Iterator[str]:
    """The lines of a step: one for its batch, one for several judges, one for an evaluation on held-out
    prompts. Empty if it has none of them.
    """
    place = f"step {step:>{len(str(num_steps))}}/{num_steps}"
    if any(gauge.metric in metrics for gauge in shown.line):
        # Failures come last: their text has no fixed width.
        failed = [f"failed {failures_text(failures_by_cause(metrics))}"]
        if signal := describe_missing_signal(metrics):
            failed.append(signal)
        if faults := by_cause(ENV_FAULT, metrics):
            failed.append(f"env failed {failures_text(faults)}")
        yield "  ".join([place, *write_gauges(shown.line, metrics), *failed])
    if judges := [f"{name} {text}" for name, text in judge_texts(metrics)]:
        yield "  ".join([place, "judges:", " | ".join(judges)])
    if any(gauge.metric in metrics for gauge in shown.held_out):
        yield "  ".join([place, "held-out:", *describe_held_out(shown, metrics)])


def describe_held_out(shown: GaugeSet, metrics: Metrics) -> list[str]:
    """The gauges of an evaluation on held-out prompts, with pass@k where several answers are sampled."""
    ks = {(bool(found[1]), int(found[2])) for name in metrics if (found := PASS_AT.fullmatch(name))}
    passes = [
        Gauge(f"eval/{'true_' * by_rule}pass_at_{k}", f"{'true ' * by_rule}pass@{k}", 2, 4)
        for by_rule, k in sorted(ks)
        if k > 1
    ]
    return write_gauges([*shown.held_out, *passes], metrics)


def write_gauges(gauges: Sequence[Gauge], metrics: Metrics) -> list[str]:
    """The gauges that this run measures: a replay has no engines, prompts may have no reference."""
    return [f"{gauge.name} {gauge.text(metrics)}" for gauge in gauges if gauge.metric in metrics]


SAMPLES_SHOWN = 3
REPORT = "report.html"
VIEWED = {"rollouts.jsonl", "eval_rollouts.jsonl", "judged.jsonl"}  # of a run that the viewer has more of
PANEL_COLUMNS = 96  # longer lines are hard to read


class RunConsole(Console):
    """A console whose output may be closed (`| head`, a closed terminal), on which rich would end the process."""

    def show_cursor(self, show: bool = True) -> bool:
        """Leave the cursor as it is: a process that is ended at once would leave its terminal without one."""
        return False

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with Path(os.devnull).open("wb") as nowhere:  # buffered text must be flushed somewhere
            os.dup2(nowhere.fileno(), self.file.fileno())


class ConsoleSink(Tracker):
    """Text of models is never read as markup, and its control characters never reach the terminal."""

    def __init__(
        self, num_steps: int, console: Console | None = None, shown: GaugeSet = ONE_JUDGE, *, shows_steps: bool = True
    ) -> None:
        self._num_steps = num_steps
        self._shown, self._shows_steps = shown, shows_steps
        self.console = console or RunConsole(highlight=False)
        self._guard = Guard()
        self._width = min(PANEL_COLUMNS, self.console.width)

    def log(self, step: int, metrics: Metrics) -> None:
        if self._shows_steps:
            self._print(*(Text(line) for line in step_lines(step, self._num_steps, metrics, self._shown)))

    def note(self, text: str) -> None:
        self._print(Text(replace_controls(text), style="dim"))

    def alarm(self, text: str) -> None:
        self._print(Text(f"ALARM  {replace_controls(text)}", style="bold red"))

    def remark(self, about: str, text: str, style: str = "yellow") -> None:
        """Print a line on the whole run: its bottleneck, the requests to a model that judges."""
        self._print(Text(f"{about}  {replace_controls(text)}", style=style))

    def print_samples(self, rows: Sequence[SampleRow]) -> None:
        """Print three rollouts with the GRM's critiques, so that no score is shown without its critique."""
        self._print(*(sample_panel(row, self._width, self._shown.sample) for row in rows[:SAMPLES_SHOWN]))

    def print_files(self, run_dir: Path, files: Mapping[str, str]) -> None:
        """Where the files are, what shows them, and which keys take some of them; `files`: name -> such a key, or an
        empty text.
        """
        self._print(Text(str(run_dir), style="bold cyan").append(f"  {', '.join(files)}", style="not bold default"))
        shows = [f"open {REPORT} in a browser"] if REPORT in files else []
        script = sys.argv[0]
        command = f"{sys.orig_argv[0]} {script}" if Path(script).name == "launch.py" else "grmpipe"
        shows += [f"{command} task=view run_dir={run_dir}"] if VIEWED & files.keys() else []
        if shows:
            self._print(Text(f"to look into it: {', or '.join(shows)}", style="bold cyan"))
        taken = " ".join(f"{key}={run_dir / name}" for name, key in files.items() if key)
        if taken:
            self._print(Text(f"for a further command: {taken}", style="cyan"))

    def _print(self, *parts: RenderableType) -> None:
        with self._guard.watch("console"):
            for part in parts:
                # soft_wrap: a log file has no width, and a wrapped path can't be copied.
                self.console.print(part, soft_wrap=isinstance(part, Text))


def sample_panel(row: SampleRow, width: int, number: str) -> Panel:
    parts = [("question", row.question, ""), ("answer", row.answer, "cyan")]
    parts += [("critique", row.critique, "yellow")] if row.critique else []  # a rule writes none
    grid = Table.grid(padding=(0, 2))
    for part, text, style in parts:
        grid.add_row(Text(part, style="dim"), Text(replace_controls(text), style=style))
    score = f"no {number}" if row.score is None else f"{number} {row.score:g}"
    title = Text(f"{row.group_id} · sibling {row.sibling}")
    ended = Text(f"{score} · {truth_text(row)}")
    return Panel(grid, title=title, subtitle=ended, title_align="left", width=width)


def truth_text(row: SampleRow) -> str:
    if row.truth is None:
        return "truth unknown"
    return {1.0: "truly right", 0.0: "truly wrong"}.get(row.truth, f"truth {row.truth:g}")
