"""Reads the files of a finished or crashed run, as far as they exist.

Every file may be missing, torn or of another version: unreadable parts are left out. Journals can be huge, so only
their two ends are read.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import yaml

from grmpipe.config.judge import KINDS, JudgeKind
from grmpipe.config.keys.secrets import REDACTED, environment_secrets, looks_secret, mask
from grmpipe.judge.verdict import describe_criteria, get_shown_score
from grmpipe.models.types import Message
from grmpipe.observe.changes import read_changes
from grmpipe.observe.charts import Point
from grmpipe.observe.console import by_part, failures_by_cause
from grmpipe.observe.journal import UNREADABLE, read_what_can_be
from grmpipe.observe.judge_requests import read_totals
from grmpipe.observe.recorder import (
    EVAL_JUDGEMENTS,
    EVAL_ROLLOUTS,
    EvalRollout,
    RecordedRollout,
    decode_eval_judgement,
    decode_eval_rollout,
    decode_judged,
    decode_recorded,
)
from grmpipe.observe.records import TEXT
from grmpipe.observe.spending import describe_spending
from grmpipe.observe.summary import (
    CascadeSummary,
    GroupsSummary,
    JudgeSummary,
    JudgingSummary,
    ServingSummary,
    with_requests,
)
from grmpipe.types import Failed, JudgeReport, Metrics, Prompt, RewardSpan, Rollout, Turn, Verdict

LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
END_BYTES = 4_000_000  # read at each end of a journal
LOG_BYTES = 16_000
UNREAD = ("unparseable", "truncated")
MOST_UNREAD = 5  # of a judge
LARGEST = 1e100  # number that is shown
NEVER_ENDED = "no end recorded"
JUDGED = "judged.jsonl"  # labelled items, and what a judge said of them
FIGURES = "figures.txt"  # the tables of task=evaluate

Record = dict[str, Any]  # a line of a journal or a part of the summary; used in this file only
T = TypeVar("T")
by_score = attrgetter("score")


@dataclass(frozen=True, slots=True, kw_only=True)
class Critique:
    """A judgement, or the cause of a failed verdict. judge: whose it is, if there are several. turn: which it is
    about, from 1; None: all of the rollout. scores: all of a judgement of one response, as by the criteria of a rubric.
    criteria: whose these are, where they are those of some criteria only.
    """

    text: str
    score: float | None
    judge: str = ""
    turn: int | None = None
    scores: Sequence[float] = ()
    criteria: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownMessage:
    """A message of an environment. by: its role, and the tool if it has a name."""

    by: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTurn:
    """A turn of an episode, and the environment's answer to it.

    history: what is new before a branch, as the agent wrote it.
    calls:   the tool calls, as the environment got them.
    facts:   what else is known of it, in words: rewards, faults, time.
    """

    history: Sequence[ShownMessage]
    text: str
    calls: Sequence[str]
    facts: Sequence[str]
    replies: Sequence[ShownMessage]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The files of a run. metrics: one mapping per line, in the order of the file, with its `step`."""

    name: str
    task: str
    run_id: str
    status: str
    failure: str | None
    bottleneck: str | None
    alarms: Sequence[str]
    restarts: Sequence[str]  # the cause of each
    changes: Sequence[str]  # what resumes changed in the configuration
    wall_s: float | None
    steps: int
    metrics: Sequence[Metrics]
    eval_initial: Metrics
    eval_final: Metrics
    busy_s: Metrics
    judge: JudgeKind
    judging: JudgingSummary
    serving: ServingSummary  # of a service
    spent: str  # at endpoints, in words
    groups: Mapping[str, int]  # trained, in flight, dropped by cause
    figures: str  # for task=evaluate
    shown: Sequence[ShownRollout]
    unread: Mapping[str, Sequence[str]]  # by judge: the failures of judgements without a verdict to read
    config: str
    log_end: str
    present: Sequence[str]  # names of files

    def series(self, name: str) -> list[Point]:
        return [(line["step"], line[name]) for line in self.metrics if name in line]

    def total(self, name: str) -> float:
        return sum(line.get(name, 0.0) for line in self.metrics)


def read_run(run_dir: Path) -> RunFiles:
    summary = read_object(run_dir / "summary.json")
    lines = map(find_numbers, read_what_can_be(run_dir / "metrics.jsonl"))
    metrics = [line for line in lines if "step" in line]
    evaluations, seen = part(summary, "eval"), evaluations_in(metrics)
    secrets = environment_secrets()
    config = config_text(read_bytes(run_dir / "config.yaml"), secrets)
    values = read_values(config)
    return RunFiles(
        name=find_title(run_dir, config),
        task=values.get("task", ""),
        run_id=str(read_object(run_dir / "run.json").get("run_id", "")),
        status=str(summary.get("status", NEVER_ENDED)),
        failure=mask_text(summary.get("failure"), secrets),
        bottleneck=mask_text(summary.get("bottleneck"), secrets),
        alarms=[mask(str(alarm), secrets) for alarm in get_list(summary, "alarms")],
        restarts=[mask(str(cause), secrets) for cause in get_list(summary, "restarts")],
        changes=[mask(change, secrets) for change in read_changes(run_dir)],
        wall_s=number(summary, "wall_s"),
        steps=int(number(summary, "steps") or max((line["step"] for line in metrics), default=0)),
        metrics=metrics,
        eval_initial=find_numbers(part(evaluations, "initial")) if summary else (*seen, {})[0],
        eval_final=find_numbers(part(evaluations, "final")) or ({}, *seen[1:])[-1],
        busy_s=find_numbers(part(summary, "busy_s")),
        judge=find_judge(values),
        judging=(
            read_as(JudgingSummary, summary["judging"])
            if "judging" in summary
            else with_requests(summarise_judging(metrics), read_totals(run_dir))
        ),
        serving=read_as(ServingSummary, summary.get("serving")),
        spent=describe_spent(summary, metrics),
        groups=count_groups(summary, metrics),
        figures=to_text(read_bytes(run_dir / FIGURES)),
        shown=pick_rollouts(run_dir) or pick_answers(run_dir),
        unread=pick_unread(run_dir),
        config=config,
        log_end=mask(to_text(read_bytes(run_dir / "run.log", from_end=LOG_BYTES)), secrets),
        present=sorted(path.name + "/" * path.is_dir() for path in run_dir.iterdir()),
    )


def describe_spent(summary: Record, metrics: Sequence[Metrics]) -> str:
    """What endpoints were asked and cost, in words; of a run without a summary by its last step. Empty without a price
    or a budget.
    """
    last = next((line for line in reversed(metrics) if "budget/requests" in line), {})
    by_steps = {name.removeprefix("budget/"): value for name, value in last.items() if name.startswith("budget/")}
    return describe_spending(find_numbers(part(part(summary, "judging"), "spending")) or by_steps)


def find_title(run_dir: Path, config: str) -> str:
    """The title of a run: its experiment's name, because directories are named by date."""
    name = re.search(r"^experiment_name: (\S+)$", config, re.MULTILINE)
    return f"{name[1]}, {run_dir.resolve().name}" if name else run_dir.resolve().name


def find_judge(values: Mapping[str, str]) -> JudgeKind:
    """What gives the reward, by what people read; values: dotted key -> value as text. A run without a readable
    configuration has a judge.
    """
    if (composed := values.get("reward.kind", "single")) != "single":
        return JudgeKind(shown="no judge") if composed == "none" else JudgeKind(shown="the judges", writes=True)
    section = find_judge_section(values)
    kind = KINDS.get(values.get(f"{section}.kind", ""), KINDS["generative"])
    return kind.describe(lambda key: values.get(f"{section}.{key}"))


def find_judge_section(values: Mapping[str, str], name: str = "") -> str:
    """The section of a judge; without a name, of the one that gives the reward."""
    name = name or values.get("reward.judge", "null")
    return "judge" if name in ("null", "judge") else f"judges.{name}"


def read_values(config: str) -> dict[str, str]:
    """Dotted key -> value as text. Empty if it is no YAML."""
    try:
        return dict(flatten_fields("", yaml.load(config, LOADER) or {}))
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}


def flatten_fields(prefix: str, value: object) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [
            one for key, own in value.items() for one in flatten_fields(f"{prefix}.{key}" if prefix else str(key), own)
        ]
    return [(prefix, "null" if value is None else str(value))]


# -- metrics ---------------------------------------------------------------------------------------------------------


def find_numbers(record: Mapping[str, object]) -> dict[str, float]:
    """The finite numbers of a record."""
    return {name: found for name in record if (found := number(record, name)) is not None}


def number(record: Mapping[str, object], name: str) -> float | None:
    """The number under a name; None if it isn't finite, or so large that sums of such numbers aren't."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) < LARGEST else None


def evaluations_in(metrics: Iterable[Metrics]) -> list[Metrics]:
    """The evaluations on held-out prompts, with their metrics' names in the summary."""
    found = ({name[5:]: value for name, value in line.items() if name.startswith("eval/")} for line in metrics)
    return [evaluation for evaluation in found if evaluation]


def failures_in(metrics: Iterable[Metrics]) -> dict[str, int]:
    failed: Counter[str] = Counter()
    for line in metrics:
        failed.update(failures_by_cause(line))
    return dict(failed)


def read_as(kind: type[T], value: object) -> T:
    """The value as a type, of an object all that can be read: a field of a wrong type keeps its default. Raises
    ValidationError.
    """
    entries = value if isinstance(value, dict) else {}
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**read_each({name: (hints[name], entries[name]) for name in hints if name in entries}))
    if get_origin(kind) is Mapping:
        own = get_args(kind)[1]
        return read_each({name: (own, entry) for name, entry in entries.items()})  # type: ignore[return-value]
    return msgspec.convert(value, kind, strict=False)


def read_each(entries: Mapping[str, tuple[type[Any], object]]) -> dict[str, Any]:
    found = {}
    for name, (kind, value) in entries.items():
        with contextlib.suppress(msgspec.ValidationError):
            found[name] = read_as(kind, value)
    return found


def summarise_judging(metrics: Sequence[Metrics]) -> JudgingSummary:
    """The judging of a run without a summary, as far as the steps report it. Mean scores, and the numbers of cascades,
    are those of the last step.
    """
    judges: dict[str, list[Metrics]] = {}
    cascades: dict[str, Metrics] = {}
    for line in metrics:
        for name, own in by_part(line, "judge").items():
            judges.setdefault(name, []).append(own)
        cascades |= by_part(line, "cascade")
    return JudgingSummary(
        asked=int(sum(line.get("judge/asked", 0) for line in metrics)),
        asked_verdicts=int(sum(line.get("judge/asked_verdicts", 0) for line in metrics)),
        asked_verdicts_read=int(sum(line.get("judge/asked_verdicts_read", 0) for line in metrics)),
        tool_calls=int(sum(line.get("judge/tool_calls", 0) for line in metrics)),
        called_tools=int(sum(line.get("judge/called_tools", 0) for line in metrics)),
        failed=failures_in(metrics),
        by_judge={
            name: JudgeSummary(
                asked=int(sum(line.get("asked", 0) for line in own)),
                tokens=int(sum(line.get("tokens", 0) for line in own)),
                failed=failures_in({f"judge/{key}": value for key, value in line.items()} for line in own),
                score_mean=next((line["score_mean"] for line in reversed(own) if "score_mean" in line), None),
            )
            for name, own in judges.items()
            if any("asked" in line for line in own)
        },
        cascades={name: read_as(CascadeSummary, own) for name, own in cascades.items()},
    )


def count_groups(summary: Record, metrics: Sequence[Metrics]) -> dict[str, int]:
    """The number of groups by how they ended; without a summary, as of the last step."""
    if "groups" in summary:
        known = read_as(GroupsSummary, summary["groups"])
        dropped = {f"dropped: {cause}": count for cause, count in known.dropped.items()}
        return {"trained": known.trained, "in flight": known.in_flight} | dropped
    last = metrics[-1] if metrics else {}
    names = {name: name.removeprefix("groups/").replace("_", " ") for name in last if name.startswith("groups/")}
    return {label: int(last[name]) for name, label in names.items()}


# -- rollouts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRollout:
    """A rollout with its judging. why: the reason for showing it."""

    prompt: Prompt
    rollout: Rollout
    report: JudgeReport
    why: str = ""

    @property
    def verdict(self) -> Verdict | None:
        return self.report.verdict if isinstance(self.report.verdict, Verdict) else None

    @property
    def score(self) -> float | None:
        return get_shown_score(self.report.verdict)

    @property
    def spread(self) -> float:
        return self.verdict.score_std if self.verdict else 0.0

    @property
    def version(self) -> int:
        return self.rollout.oldest_version if self.rollout.turns else 0

    @property
    def parts(self) -> Mapping[str, float]:
        """The reward of each part of the composition, where there are several judges."""
        return self.verdict.breakdown if self.verdict and self.report.by_judge else {}

    @property
    def opening(self) -> list[ShownMessage]:
        """What the environment began with, if it isn't the prompt."""
        return [show_message(message) for message in self.rollout.opening]

    @property
    def turns(self) -> list[ShownTurn]:
        """The turns of an episode; none if it is a single answer."""
        turns = self.rollout.turns
        is_episode = len(turns) > 1 or bool(self.rollout.opening) or any(turn.replies for turn in turns)
        return [*show_turns(turns, self.verdict)] if is_episode else []

    @property
    def critiques(self) -> Iterator[Critique]:
        """The failed verdict of all judges, those of single ones, then the judgements."""
        for name, own in {"": self.report, **self.report.by_judge}.items():
            if isinstance(failed := own.verdict, Failed):
                yield Critique(text=f"{failed.stage} failed: {failed.cause} {failed.detail}", score=None, judge=name)
        for name, own in self.report.own_reports.items():
            if own.criteria:
                yield Critique(text=describe_criteria(own.criteria), score=None, judge=name)
            for one in own.judgements:
                score = get_score(one.siblings, one.scores, self.rollout.sibling)
                turn = None if one.turn is None else one.turn + 1
                yield Critique(text=one.completion.text, score=score, judge=name, turn=turn)


def pick_rollouts(run_dir: Path) -> list[ShownRollout]:
    """A few informative rollouts: from the beginning and, of the last ones, the ends of the scale and failures."""
    rollouts = read_ends(run_dir / "rollouts.jsonl", decode_recorded)
    reports = map(dict, read_ends(run_dir / "judgements.jsonl", decode_judged))
    whole = ([line for line in lines if line.thinned != TEXT] for lines in rollouts)
    early, late = map(join_reports, whole, reports)
    judging = next((one for one in reversed(late or early) if one.prompt.self_judging), None)
    early, late = ([one for one in some if not one.prompt.self_judging] for some in (early, late))
    late = late or early
    judged = [one for one in late if one.score is not None]
    divided = [one for one in judged if one.spread > 0]
    return each_once(
        ("early", next((one for one in early if one.score is not None), None)),
        ("late, scored highest", max(judged, key=by_score, default=None)),
        ("late, scored lowest", min(judged, key=by_score, default=None)),
        ("late, judged most differently", max(divided, key=attrgetter("spread"), default=None)),
        ("late, judging failed", next((one for one in late if one.score is None), None)),
        ("the last", late[-1] if late else None),
        ("a judging task of the policy", judging),
    )


def pick_unread(run_dir: Path) -> dict[str, list[str]]:
    """Words of up to five judgements of each judge that had no verdict to read: the last ones."""
    found: dict[str, dict[str, None]] = {}
    first, last = read_ends(run_dir / "judgements.jsonl", decode_judged)
    for _, report in reversed([*first, *last]):
        for judge, own in report.own_reports.items():
            for failed in own.failures:
                if failed.cause in UNREAD:
                    found.setdefault(judge, {})[failed.detail] = None
    return {judge: list(details)[:MOST_UNREAD] for judge, details in found.items()}


def pick_answers(run_dir: Path) -> list[ShownRollout]:
    """A few answers of an evaluated policy: the ends of the scale, and a failure."""
    reports = {
        (line.group_id, line.sibling): line.report
        for lines in read_ends(run_dir / EVAL_JUDGEMENTS, decode_eval_judgement)
        for line in lines
    }
    some = join_reports(itertools.chain(*read_ends(run_dir / EVAL_ROLLOUTS, decode_eval_rollout)), reports)
    judged = [one for one in some if one.score is not None]
    return each_once(
        ("scored highest", max(judged, key=by_score, default=None)),
        ("scored lowest", min(judged, key=by_score, default=None)),
        ("judging failed", next((one for one in some if one.score is None), None)),
    )


def join_reports(
    lines: Iterable[RecordedRollout | EvalRollout], reports: Mapping[tuple[str, int], JudgeReport]
) -> list[ShownRollout]:
    """The rollouts that have a report."""
    keys = ((line, (line.rollout.group_id, line.rollout.sibling)) for line in lines)
    return [
        ShownRollout(prompt=line.prompt, rollout=line.rollout, report=reports[key])
        for line, key in keys
        if key in reports
    ]


def each_once(*choices: tuple[str, ShownRollout | None]) -> list[ShownRollout]:
    """The chosen rollouts, each for the first reason that chose it."""
    chosen: dict[int, ShownRollout] = {}
    for why, one in choices:
        if one is not None:
            chosen.setdefault(id(one), replace(one, why=why))
    return list(chosen.values())


def get_score(siblings: Sequence[int], scores: Sequence[float], sibling: int) -> float | None:
    """The sibling's score of a judgement. None if it has several scores per sibling, as for steps."""
    return dict(zip(siblings, scores, strict=True)).get(sibling) if len(siblings) == len(scores) else None


def show_message(message: Message) -> ShownMessage:
    return ShownMessage(by=" ".join(filter(None, (message.role, message.name))), text=message.content)


def show_history(message: Message) -> ShownMessage:
    """A message of a history that the agent wrote."""
    if message.role != "assistant":
        return show_message(message)
    text = "\n".join(filter(None, (message.content, *format_calls(message))))
    return ShownMessage(by="assistant, as the agent wrote it, not the policy", text=text)


def format_calls(caller: Message | Turn) -> list[str]:
    return [f"{call.name}({json.dumps(call.arguments)})" for call in caller.tool_calls]


def show_turns(turns: Sequence[Turn], verdict: Verdict | None) -> Iterator[ShownTurn]:
    """The turns of an episode. What a turn before a branch was answered is the history of the branch."""
    for place, turn in enumerate(turns):
        is_left = place + 1 < len(turns) and turns[place + 1].rewritten
        history = turns[place - 1].replies if place and turn.rewritten else ()
        spans = [span for span in verdict.rewards if span.turn == place] if verdict else []
        yield ShownTurn(
            history=[show_history(message) for message in history],
            text=turn.completion.text,
            calls=format_calls(turn),
            facts=[*list_facts(turn, spans)],
            replies=[] if is_left else [show_message(message) for message in turn.replies],
        )


def list_facts(turn: Turn, spans: Sequence[RewardSpan]) -> Iterator[str]:
    """spans: of the verdict, on this turn."""
    if turn.rewritten:
        yield "a branch: it doesn't continue the turn before"
    yield from (f"judged {span.value / span.share if span.share else span.value:.3g}" for span in spans)
    yield from (f"{name} {reward:.3g}" for name, reward in turn.rewards.items())
    yield from (f"fault: {kind}" for kind in turn.faults)
    if turn.env_s:
        yield f"environment {turn.env_s:.3g} s"


# -- files -----------------------------------------------------------------------------------------------------------


def read_bytes(path: Path, *, from_end: int = 0) -> bytes:
    """The content of a file; empty if it is missing. from_end: only this many last bytes, from the start of a line."""
    try:
        with path.open("rb") as file:
            if from_end and path.stat().st_size > from_end:
                file.seek(-from_end, 2)
                file.readline()
            return file.read()
    except OSError:
        return b""


def read_ends(path: Path, decode: Callable[[Record], T], num_bytes: int = END_BYTES) -> tuple[list[T], list[T]]:
    """The first and the last lines of a journal that can be read, without overlap."""
    try:
        with path.open("rb") as file:
            first = b"".join(file.readlines(num_bytes))
            rest = path.stat().st_size - file.tell()
            if rest > num_bytes:
                file.seek(-num_bytes, 2)
                file.readline()
            return [*decode_lines(first, decode)], [*decode_lines(file.read(), decode)]
    except OSError:
        return [], []


def decode_lines(lines: bytes, decode: Callable[[Record], T]) -> Iterator[T]:
    """The whole lines that can be read."""
    for line in lines.splitlines(keepends=True):
        with contextlib.suppress(*UNREADABLE):
            if line.endswith(b"\n"):
                yield decode(json.loads(line))


def read_object(path: Path) -> Record:
    try:
        found = json.loads(read_bytes(path) or b"{}", parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def part(record: Record, name: str) -> Record:
    found = record.get(name)
    return found if isinstance(found, dict) else {}


def get_list(record: Record, name: str) -> list[object]:
    found = record.get(name)
    return found if isinstance(found, list) else []


def to_text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def mask_text(text: object, secrets: Sequence[str]) -> str | None:
    return None if text is None else mask(str(text), secrets)


CONFIG_LINE = re.compile(r"^(\s*(?:- )?)([\w.-]+): +(\S.*)$")


def config_text(data: bytes, secrets: Sequence[str]) -> str:
    return "\n".join(mask(config_line(line), secrets) for line in to_text(data).splitlines())


def config_line(line: str) -> str:
    """A line of the configuration. Numbers and booleans stay under any name, as in `redact`."""
    found = CONFIG_LINE.match(line)
    if not found or not looks_secret(found[2]) or re.fullmatch(r"[-+.\de]+|null|true|false|\{\}|\[\]", found[3]):
        return line
    return f"{found[1]}{found[2]}: {REDACTED}"
