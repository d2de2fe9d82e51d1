"""report.html: a run as one self-contained page, without network or scripts. Made only from the run's files.

Text of models is always shown as text: the template escapes it, and the page's policy forbids scripts.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from grmpipe.models.terminal_text import replace_controls
from grmpipe.observe.charts import Chart, Series, chart, short
from grmpipe.observe.console import REPORT
from grmpipe.observe.guard import Guard
from grmpipe.observe.run_files import NEVER_ENDED, RunFiles, read_run
from grmpipe.observe.summary import ServingSummary

log = logging.getLogger(__name__)

STEPLESS = ("serve", "score", "play")  # tasks without steps or figures
TEXT_CHARS = 6_000  # in one text
ALARMS = ("alarm/hacking", "alarm/fooled", "alarm/canary_drift", "alarm/cascade")
REST = "learns, engines busy"
WAITS = (
    ("stall/training_s", "learns, engines idle"),
    ("stall/weight_sync_s", "weights move"),
    ("stall/verdicts_s", "waits for verdicts"),
    ("stall/rollouts_s", "waits for rollouts"),
)
BATCHES = "batches"
ACCURACIES = {
    BATCHES: "train/true_accuracy",
    "held-out": "eval/true_accuracy",
    "held-out, greedy": "eval/true_accuracy_greedy",
}
SCORES = {BATCHES: "train/grm_score", "held-out": "eval/grm_score"}
REWARDS = {BATCHES: "train/reward", "held-out": "eval/reward"}
CANARIES = {
    "mean score": "judge_monitor/canary_score",
    "of adversarial answers": "judge_monitor/adversarial_score",
}
JUDGING = {"of judging tasks": "self_judging/reward"}
RUBRIC = {"version": "rubric/version", "criteria that a writer wrote": "rubric/evolved_criteria"}
STALENESS = {"oldest": "staleness/max", "mean": "staleness/mean"}
MISMATCH = re.compile(r"mismatch/age_(\d+)/mean_nats")
SCORE_OF_JUDGE = re.compile(r"judge/(\w+)/score_mean")
CANARIES_OF_JUDGE = re.compile(r"judge_monitor/(\w+)/canary_score")
CRITERION_MET = re.compile(r"judge/criterion/([^/]+)/met_mean")
TAG_MET = re.compile(r"judge/tag/([^/]+)/met_mean")
REWARD_OF_PART = re.compile(r"reward/(\w+)_mean")
ESCALATED = re.compile(r"cascade/(\w+)/escalated_share")
AUDIT_ERROR = re.compile(r"cascade/(\w+)/audit_error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One of the numbers at the top of the page. before: its value at the start of the run."""

    name: str
    value: str
    before: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar. share: its part of the whole, 0 to 1."""

    name: str
    share: float
    text: str


def write_report(run_dir: Path, bottleneck: str | None = None) -> bool:
    """Write the report. Returns whether that worked; raises nothing.

    bottleneck: for a run without a summary.
    """
    guard = Guard()
    with guard.watch(REPORT):
        run = read_run(run_dir)
        run = replace(run, bottleneck=run.bottleneck or bottleneck)
        draft = run_dir / f"{REPORT}.tmp"
        draft.write_text(render(run), encoding="utf-8", errors="replace")
        draft.replace(run_dir / REPORT)
    return not guard.failures


def render(run: RunFiles) -> str:
    environment = Environment(
        loader=PackageLoader("grmpipe.observe"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"readable": replace_controls, "shown": show_text, "short": short, "percent": percent}
    environment.filters["failures"] = describe_failures
    template = environment.get_template("report.html.jinja")
    return template.render(run=run, never_ended=NEVER_ENDED, stepless=STEPLESS, **make_sections(run))


def make_sections(run: RunFiles) -> dict[str, object]:
    """What the template shows beside the run itself: charts, bars, tiles, and charts of all metrics by their area."""
    ringing = [line["step"] for line in run.metrics if any(line.get(alarm) for alarm in ALARMS)]
    return {
        "tiles": [*tiles(run)],
        "learning": present(
            chart(
                "True accuracy",
                make_series(run, ACCURACIES),
                marked=ringing,
                note="by a rule with access to the reference",
            ),
            *score_charts(run, ringing),
            chart("Reward of judging", make_series(run, JUDGING), note="of the policy's judgements, by their labels"),
        ),
        "judging": present(
            chart("Scores by judge", find_series(run, SCORE_OF_JUDGE), note="each on its judge's own scale"),
            chart("Escalated", find_series(run, ESCALATED), note="share of rollouts that the second judge decided"),
            chart(
                "Error of the cheap judge", find_series(run, AUDIT_ERROR), note="audited, where it is sure: in reward"
            ),
            chart("Criteria", find_series(run, CRITERION_MET), note="of rubrics for all prompts: how far they are met"),
            chart("Criteria by tag", find_series(run, TAG_MET), note="how far all criteria with a tag are met"),
            chart("Rubric that evolves", make_series(run, RUBRIC), note="the files of its versions are in rubrics/"),
            chart("Spread of a vote", spread_series(run), note="std of the judgements on a rollout, or of a jury"),
            chart(
                "Canaries",
                [*make_series(run, CANARIES), *find_series(run, CANARIES_OF_JUDGE)],
                note="fixed responses: a stable judge gives them the same scores",
            ),
        ),
        "judge_title": capitalise(run.judge.shown),
        "failures": failure_bars(run),
        "time": present(chart("Seconds of each step", wait_series(run))),
        "waits": wait_bars(run),
        "busy": busy_bars(run),
        "age": present(
            chart(
                "Mismatch of sampler and learner",
                mismatch_series(run),
                note="mean |log-prob difference|, nats, by age",
            ),
            chart(
                "Staleness", make_series(run, STALENESS), note="versions between a group's oldest token and its batch"
            ),
        ),
        "metrics": charts_by_area(run),
    }


def score_charts(run: RunFiles, ringing: Sequence[float]) -> list[Chart | None]:
    """The score of a single judge, or its reward if that is on no scale; or the reward that several make."""
    if not run.judging.by_judge:
        series = make_series(run, REWARDS if run.judge.score == "reward" else SCORES)
        title, note = capitalise(run.judge.score), f"the training reward, by {run.judge.shown}"
        return [chart(title, series, marked=ringing, note=note)]
    parts = find_series(run, REWARD_OF_PART)
    return [
        chart("Reward", make_series(run, REWARDS), marked=ringing, note="of all judges together"),
        chart("Reward by part", parts, marked=ringing, note="mean of a batch, before weighting"),
    ]


def present(*charts: Chart | None) -> list[Chart]:
    return [one for one in charts if one is not None]


# -- numbers ---------------------------------------------------------------------------------------------------------


def tiles(run: RunFiles) -> Iterator[Tile]:
    if run.task not in STEPLESS:
        yield Tile(name="steps", value=str(run.steps))
    elif run.task == "serve":
        yield from describe_serving(run.serving)
    if run.wall_s is not None:
        yield Tile(name="wall time", value=duration(run.wall_s))
    for name, value in run.eval_final.items() or run.eval_initial.items():
        if is_end_of_interval(name, run.eval_final or run.eval_initial):
            continue
        title = name.replace("_", " ")
        if name == "grm_score" and not run.judging.by_judge:
            if run.judge.score in run.eval_final | run.eval_initial:  # the reward, which has a tile of its own
                continue
            title = run.judge.score
        before = short(run.eval_initial[name]) if run.eval_final and name in run.eval_initial else ""
        yield Tile(name=title, value=short(value), before=before)
    failed = sum(run.judging.failed.values())
    if (asked := run.judging.asked) and run.judge.writes:
        yield Tile(name="judgements", value=f"{asked:,}")
        yield Tile(name="failed", value=percent(failed / asked))
        if of_them := run.judging.asked_verdicts:
            yield Tile(name="verdicts asked for", value=f"{of_them:,}, {run.judging.asked_verdicts_read:,} read")
        if of_them := run.judging.called_tools:
            yield Tile(name="called tools", value=percent(of_them / asked))
    elif failed:
        yield Tile(name="failed verdicts", value=f"{failed:,}")
    if oldest := run.series("staleness/max"):
        yield Tile(name="staleness, at most", value=short(max(age for _, age in oldest)))


def describe_serving(serving: ServingSummary) -> Iterator[Tile]:
    """What a service answered since its last start."""
    yield Tile(name="calls", value=f"{serving.calls:,}")
    yield Tile(name="responses", value=f"{serving.responses:,}")
    if serving.from_cache:
        yield Tile(name="calls answered from the cache", value=f"{serving.from_cache:,}")
    for name, seconds in serving.seconds.items():
        yield Tile(name=f"seconds of a call, {name}", value=short(seconds))
    if serving.imputed:
        yield Tile(name="responses that got the mean of their group", value=f"{sum(serving.imputed.values()):,}")


def is_end_of_interval(name: str, metrics: Mapping[str, float]) -> bool:
    """Whether a metric is the end of another one's interval."""
    return any(name.endswith(end) and name.removesuffix(end) in metrics for end in ("_low", "_high"))


def failure_bars(run: RunFiles) -> list[Bar]:
    """Failed judgements as shares of all, or failed verdicts of what writes none; bars are scaled to the most frequent
    cause.
    """
    asked, failed = run.judging.asked, run.judging.failed
    return [
        Bar(
            name=cause,
            share=count / max(1, *failed.values()),
            text=f"{count:,} ({percent(count / max(1, asked))})" if run.judge.writes else f"{count:,}",
        )
        for cause, count in sorted(failed.items(), key=lambda item: -item[1])
    ]


def describe_failures(failed: Mapping[str, int], asked: int) -> str:
    """The failed judgements of a judge by cause, with their shares of all that were asked for."""
    shares = (f"{count:,} {cause} ({percent(count / max(1, asked))})" for cause, count in failed.items())
    return ", ".join(shares) or "none"


def percent(share: float) -> str:
    """With two significant digits, so that a rare failure isn't 0 %."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def wait_bars(run: RunFiles) -> list[Bar]:
    """Stalls as shares of the time of all steps."""
    seconds = run.total("time/step_s")
    if not seconds:
        return []
    waits = {title: run.total(name) for name, title in WAITS}
    waits = {REST: max(0.0, seconds - sum(waits.values()))} | waits
    return [time_bar(title, wait_s / seconds) for title, wait_s in waits.items()]


def busy_bars(run: RunFiles) -> list[Bar]:
    """Busy times of roles as shares of the time of all steps."""
    seconds = run.total("time/step_s")
    return [time_bar(role, min(1.0, busy_s / seconds)) for role, busy_s in run.busy_s.items()] if seconds else []


def time_bar(name: str, share: float) -> Bar:
    return Bar(name=name, share=min(1.0, share), text=f"{100 * share:.0f} %")


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


# -- curves ----------------------------------------------------------------------------------------------------------


def make_series(run: RunFiles, metrics: Mapping[str, str]) -> list[Series]:
    """metrics: title -> metric. What batches measure is the background of what held-out prompts do."""
    return [Series(name=title, points=run.series(metric), quiet=title == BATCHES) for title, metric in metrics.items()]


def find_series(run: RunFiles, metric: re.Pattern[str]) -> list[Series]:
    """A series for each metric that the pattern matches, under the name in its group, in the order of the file."""
    names = dict.fromkeys(name for line in run.metrics for name in line)
    found = [(match[1], name) for name in names if (match := metric.fullmatch(name))]
    return [Series(name=title, points=run.series(name)) for title, name in found]


def spread_series(run: RunFiles) -> list[Series]:
    """The spread of judgements and of scores. With one judgement each there is none."""
    found = make_series(run, {"mean of a batch": "judge/score_std"})
    return found if any(spread for _, spread in found[0].points) else []


def mismatch_series(run: RunFiles) -> list[Series]:
    names = {name for line in run.metrics for name in line}
    ages = sorted(int(found[1]) for name in names if (found := MISMATCH.fullmatch(name)))
    return make_series(run, {f"age {age}": f"mismatch/age_{age}/mean_nats" for age in ages})


def wait_series(run: RunFiles) -> list[Series]:
    """The learner's states, which add up to the time of a step."""
    lines = [line for line in run.metrics if "time/step_s" in line]
    rest = [
        (line["step"], max(0.0, line["time/step_s"] - sum(line.get(name, 0.0) for name, _ in WAITS))) for line in lines
    ]
    return [Series(name=REST, points=rest), *make_series(run, {title: name for name, title in WAITS})]


def charts_by_area(run: RunFiles) -> dict[str, list[Chart]]:
    """A chart of each metric, by the part of its name before the slash."""
    areas: dict[str, list[Chart]] = {}
    for name in sorted({name for line in run.metrics for name in line} - {"step", "time"}):
        area, _, inside = name.partition("/")
        areas.setdefault(area, []).extend(present(chart(inside or name, [Series(name="", points=run.series(name))])))
    return areas


# -- texts -----------------------------------------------------------------------------------------------------------


def capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]


def show_text(text: str) -> str:
    """Text that control characters can't hide or reorder; very long text loses its middle."""
    if len(text) > TEXT_CHARS:
        half, left_out = TEXT_CHARS // 2, len(text) - TEXT_CHARS
        text = f"{text[:half]}\n\n[… {left_out:,} characters left out …]\n\n{text[-half:]}"
    return replace_controls(text)
