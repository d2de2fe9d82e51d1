"""report.html: a run as one self-contained page, without network or scripts. Made only from the run's files.

Text of models is always shown as text: the template escapes it, and the page's policy forbids scripts.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from grmpipe.observe.charts import SPARK_HEIGHT, SPARK_WIDTH, Chart, Series, Spark, chart, short, spark, stacked
from grmpipe.observe.console import readable
from grmpipe.observe.gauges import failures_text
from grmpipe.observe.guard import Guard
from grmpipe.observe.run_files import NEVER_ENDED, RunFiles, read_run

log = logging.getLogger(__name__)

REPORT = "report.html"
TEXT_CHARS = 6_000  # of one text
ALARMS = ("alarm/hacking", "alarm/fooled", "alarm/canary_drift", "alarm/cascade")
REST = "learns, engines busy"
WAITS = (
    ("stall/training_s", "learns, engines idle"),
    ("stall/weight_sync_s", "weights move"),
    ("stall/verdicts_s", "waits for verdicts"),
    ("stall/rollouts_s", "waits for rollouts"),
)
MISMATCH = re.compile(r"mismatch/age_(\d+)/mean_nats")
SCORE_OF_JUDGE = re.compile(r"judge/(\w+)/score_mean")
CANARIES_OF_JUDGE = re.compile(r"judge_monitor/(\w+)/canary_score")
REWARD_OF_PART = re.compile(r"reward/(\w+)_mean")
ESCALATED = re.compile(r"cascade/(\w+)/escalated_share")
AUDIT_ERROR = re.compile(r"cascade/(\w+)/audit_error")
JUDGE_HEADS = ("judge", "judgements", "failed", "tokens", "mean score")
REQUEST_HEADS = (
    "requests to", "for", "requests", "retries", "prompt tokens", "of these cached", "sampled tokens", "unknown"
)  # fmt: skip
CASCADE_HEADS = ("cascade", "rollouts", "unsure", "escalated", "audited", "error where sure", "changes sides")
UNKNOWN = "–"  # in the place of a number


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One of the numbers at the top of the page. before: its value at the start of the run."""

    name: str
    value: str
    before: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar. share: of the whole, 0 to 1."""

    name: str
    share: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The data of the template."""

    run: RunFiles
    tiles: Sequence[Tile]
    learning: Sequence[Chart]
    judging: Sequence[Chart]
    judges: Sequence[Sequence[str]]  # rows under JUDGE_HEADS
    cascades: Sequence[Sequence[str]]  # rows under CASCADE_HEADS
    requests: Sequence[Sequence[str]]  # rows under REQUEST_HEADS
    failures: Sequence[Bar]
    time: Sequence[Chart]
    waits: Sequence[Bar]
    busy: Sequence[Bar]
    age: Sequence[Chart]
    metrics: Mapping[str, Sequence[Spark]]  # by the part before the slash


def write_report(run_dir: Path, bottleneck: str | None = None) -> bool:
    """Write the report. Returns whether that worked; raises nothing.

    bottleneck: for a run without a summary.
    """
    guard = Guard()
    with guard.watch(REPORT):
        run = read_run(run_dir)
        run = replace(run, bottleneck=run.bottleneck or bottleneck)
        draft = run_dir / f"{REPORT}.tmp"
        draft.write_text(render(page_of(run)), encoding="utf-8", errors="replace")
        draft.replace(run_dir / REPORT)
    return not guard.failures


def render(page: Page) -> str:
    environment = Environment(
        loader=PackageLoader("grmpipe.observe"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shown": shown_text, "short": short, "duration": duration}
    template = environment.get_template("report.html.jinja")
    return template.render(
        page=page,
        run=page.run,
        never_ended=NEVER_ENDED,
        spark=(SPARK_WIDTH, SPARK_HEIGHT),
        judge_heads=JUDGE_HEADS,
        cascade_heads=CASCADE_HEADS,
        request_heads=REQUEST_HEADS,
    )


def page_of(run: RunFiles) -> Page:
    ringing = [line["step"] for line in run.metrics if any(line.get(alarm) for alarm in ALARMS)]
    return Page(
        run=run,
        tiles=[*tiles(run)],
        learning=present(
            chart("True accuracy", accuracy_series(run), marked=ringing, note="by a rule with access to the reference"),
            *score_charts(run, ringing),
        ),
        judging=present(
            chart("Scores by judge", named_series(run, SCORE_OF_JUDGE), note="each on its judge's own scale"),
            chart("Escalated", named_series(run, ESCALATED), note="share of rollouts that the second judge decided"),
            chart(
                "Error of the cheap judge", named_series(run, AUDIT_ERROR), note="audited, where it is sure: in reward"
            ),
            chart("Spread of a vote", [*spread_series(run)], note="std of the judgements on a rollout, or of a jury"),
            chart("Canaries", canary_series(run), note="fixed responses: a stable judge gives them the same scores"),
        ),
        judges=judge_rows(run),
        cascades=cascade_rows(run),
        requests=request_rows(run),
        failures=failure_bars(run),
        time=present(stacked("Seconds of each step", wait_layers(run), note="with the mean of each part")),
        waits=wait_bars(run),
        busy=busy_bars(run),
        age=present(
            chart(
                "Mismatch of sampler and learner",
                [*mismatch_series(run)],
                note="mean |log-prob difference|, nats, by age",
            ),
            chart("Staleness", staleness_series(run), note="versions between a group's oldest token and its batch"),
        ),
        metrics=sparks(run),
    )


def score_charts(run: RunFiles, ringing: Sequence[float]) -> list[Chart | None]:
    """The score of a single judge, or the reward that several make."""
    if not run.by_judge:
        return [chart("GRM score", score_series(run), marked=ringing, note="the training reward")]
    parts = named_series(run, REWARD_OF_PART)
    return [
        chart("Reward", reward_series(run), marked=ringing, note="of all judges together"),
        chart("Reward by part", parts, marked=ringing, note="mean of a batch, before weighting"),
    ]


def present(*charts: Chart | None) -> list[Chart]:
    return [one for one in charts if one is not None]


# -- numbers ---------------------------------------------------------------------------------------------------------


def tiles(run: RunFiles) -> Iterator[Tile]:
    yield Tile(name="steps", value=str(run.steps))
    if run.wall_s is not None:
        yield Tile(name="wall time", value=duration(run.wall_s))
    for name, value in run.eval_final.items() or run.eval_initial.items():
        if is_end_of_interval(name, run.eval_final or run.eval_initial):
            continue
        before = short(run.eval_initial[name]) if run.eval_final and name in run.eval_initial else ""
        yield Tile(name=name.replace("_", " "), value=short(value), before=before)
    if run.asked:
        yield Tile(name="judgements", value=f"{run.asked:,}")
        yield Tile(name="failed", value=percent(sum(run.failed.values()) / run.asked))
    if oldest := run.series("staleness/max"):
        yield Tile(name="staleness, at most", value=short(max(age for _, age in oldest)))


def is_end_of_interval(name: str, metrics: Mapping[str, float]) -> bool:
    """Whether a metric is the end of another one's interval."""
    return any(name.endswith(end) and name.removesuffix(end) in metrics for end in ("_low", "_high"))


def judge_rows(run: RunFiles) -> list[tuple[str, ...]]:
    return [
        (
            name,
            f"{judge.asked:,}",
            failures_text(judge.failed),
            f"{judge.tokens:,}",
            UNKNOWN if judge.score is None else short(judge.score),
        )
        for name, judge in run.by_judge.items()
    ]


def cascade_rows(run: RunFiles) -> list[tuple[str, ...]]:
    return [
        (
            name,
            f"{cascade.rollouts:,}",
            percent(cascade.unsure),
            percent(cascade.escalated),
            f"{cascade.audited:,}",
            UNKNOWN if cascade.error is None else short(cascade.error),
            UNKNOWN if cascade.flipped is None else percent(cascade.flipped),
        )
        for name, cascade in run.cascades.items()
    ]


def request_rows(run: RunFiles) -> list[tuple[str, ...]]:
    return [
        (model, purpose.replace("_", "-"), *(f"{count:,}" for count in astuple(counts)))
        for model, by_purpose in run.requests.by_model.items()
        for purpose, counts in by_purpose.items()
    ]


def failure_bars(run: RunFiles) -> list[Bar]:
    """Failed judgements as shares of all; bars are scaled to the most frequent cause."""
    most = max(run.failed.values(), default=0) or 1
    ordered = sorted(run.failed.items(), key=lambda item: -item[1])
    return [
        Bar(name=cause, share=count / most, text=f"{count:,} ({percent(count / max(1, run.asked))})")
        for cause, count in ordered
    ]


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
    return [
        Bar(name=title, share=min(1.0, wait_s / seconds), text=f"{100 * wait_s / seconds:.0f} %")
        for title, wait_s in waits.items()
    ]


def busy_bars(run: RunFiles) -> list[Bar]:
    """Busy times of roles as shares of the time of all steps."""
    seconds = run.total("time/step_s")
    shares = {role: min(1.0, busy_s / seconds) for role, busy_s in run.busy_s.items()} if seconds else {}
    return [Bar(name=role, share=share, text=f"{100 * share:.0f} %") for role, share in shares.items()]


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


# -- curves ----------------------------------------------------------------------------------------------------------


def accuracy_series(run: RunFiles) -> list[Series]:
    return [
        Series(name="batches", points=run.series("train/true_accuracy"), quiet=True),
        Series(name="held-out", points=run.series("eval/true_accuracy")),
        Series(name="held-out, greedy", points=run.series("eval/true_accuracy_greedy")),
    ]


def score_series(run: RunFiles) -> list[Series]:
    return [
        Series(name="batches", points=run.series("train/grm_score"), quiet=True),
        Series(name="held-out", points=run.series("eval/grm_score")),
    ]


def reward_series(run: RunFiles) -> list[Series]:
    return [
        Series(name="batches", points=run.series("train/reward"), quiet=True),
        Series(name="held-out", points=run.series("eval/reward")),
    ]


def named_series(run: RunFiles, metric: re.Pattern[str]) -> list[Series]:
    """A series for each metric that the pattern matches, under the name in its group, in the order of the file."""
    names = dict.fromkeys(name for line in run.metrics for name in line)
    found = [(match[1], name) for name in names if (match := metric.fullmatch(name))]
    return [Series(name=title, points=run.series(name)) for title, name in found]


def spread_series(run: RunFiles) -> Iterator[Series]:
    """The spread of judgements and of scores. With one judgement each there is none."""
    points = run.series("judge/score_std")
    if any(spread for _, spread in points):
        yield Series(name="mean of a batch", points=points)


def canary_series(run: RunFiles) -> list[Series]:
    return [
        Series(name="mean score", points=run.series("judge_monitor/canary_score")),
        Series(name="of adversarial answers", points=run.series("judge_monitor/adversarial_score")),
        *named_series(run, CANARIES_OF_JUDGE),
    ]


def staleness_series(run: RunFiles) -> list[Series]:
    return [
        Series(name="oldest", points=run.series("staleness/max")),
        Series(name="mean", points=run.series("staleness/mean")),
    ]


def mismatch_series(run: RunFiles) -> Iterator[Series]:
    names = {name for line in run.metrics for name in line}
    ages = sorted(int(found[1]) for name in names if (found := MISMATCH.fullmatch(name)))
    for age in ages:
        yield Series(name=f"age {age}", points=run.series(f"mismatch/age_{age}/mean_nats"))


def wait_layers(run: RunFiles) -> list[Series]:
    """The learner's states, which add up to the time of a step."""
    lines = [line for line in run.metrics if "time/step_s" in line]
    layers = [
        Series(name=title, points=[(line["step"], line.get(name, 0.0)) for line in lines]) for name, title in WAITS
    ]
    known = [sum(line.get(name, 0.0) for name, _ in WAITS) for line in lines]
    rest = [(line["step"], max(0.0, line["time/step_s"] - wait)) for line, wait in zip(lines, known, strict=True)]
    return [Series(name=REST, points=rest), *layers]


def sparks(run: RunFiles) -> dict[str, list[Spark]]:
    names = sorted({name for line in run.metrics for name in line} - {"step", "time"})
    houses: dict[str, list[Spark]] = {}
    for name in names:
        house, _, inside = name.partition("/")
        houses.setdefault(house, []).append(spark(inside or name, run.series(name)))
    return houses


# -- texts -----------------------------------------------------------------------------------------------------------


def shown_text(text: str) -> str:
    """Text that control characters can't hide or reorder; very long text loses its middle."""
    if len(text) > TEXT_CHARS:
        half, left_out = TEXT_CHARS // 2, len(text) - TEXT_CHARS
        text = f"{text[:half]}\n\n[… {left_out:,} characters left out …]\n\n{text[-half:]}"
    return readable(text)
