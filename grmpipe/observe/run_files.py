"""Reads the files of a finished or crashed run, as far as they exist. Writes nothing.

Every file may be missing, torn or of another version: unreadable parts are left out. Journals can be huge, so only
their two ends are read.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from grmpipe.config.redact import REDACTED, environment_secrets, looks_secret, mask
from grmpipe.observe.charts import Point
from grmpipe.observe.evaluation_tables import FigureTable, evaluation_tables
from grmpipe.observe.gauges import by_part, failures_by_cause
from grmpipe.observe.judge_requests import RequestCounts, RequestTotals, read_totals
from grmpipe.types import Metrics

END_BYTES = 4_000_000  # read at each end of a journal
LOG_BYTES = 16_000
NEVER_ENDED = "no end recorded"

Record = dict[str, Any]  # a line of a journal or a part of the summary; used in this file only


@dataclass(frozen=True, slots=True, kw_only=True)
class Critique:
    """A judgement, or the cause of a failed verdict. judge: whose it is, if there are several. turn: which it is
    about, from 1; None: all of the rollout.
    """

    text: str
    score: float | None
    judge: str = ""
    turn: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeNumbers:
    """What one of several judges did."""

    asked: int
    tokens: int
    failed: Mapping[str, int]  # judgements by cause
    score: float | None  # mean, on its own scale


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeNumbers:
    """What a cascade did. error, flipped: None without an audit."""

    rollouts: int
    unsure: float
    escalated: float
    audited: int
    error: float | None
    flipped: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A message of an environment. by: its role, and the tool if it has a name."""

    by: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTurn:
    """A turn of an episode, and the environment's answer to it.

    history: what is new before a branch, as the agent wrote it.
    calls:   of tools, as the environment got them.
    facts:   what else is known of it, in words: rewards, faults, time.
    """

    history: Sequence[Said]
    text: str
    calls: Sequence[str]
    facts: Sequence[str]
    replies: Sequence[Said]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A rollout with its judging. score: None if judging failed; the critiques then begin with the cause.

    why:     the reason for showing it.
    opening: what the environment began with, if it isn't the prompt.
    turns:   of an episode; none if it is a single answer, which is then `answer`.
    ended:   what truncated an episode, in words.
    parts:   of several judges, the reward of each part of their composition.
    """

    why: str
    group_id: str
    sibling: int
    version: int
    question: str
    reference: str | None
    answer: str
    opening: Sequence[Said]
    turns: Sequence[ShownTurn]
    ended: str
    score: float | None
    reward: float | None
    parts: Mapping[str, float]
    critiques: Sequence[Critique]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The files of a run. metrics: one mapping per line, in the order of the file, with its `step`."""

    name: str
    status: str
    failure: str | None
    bottleneck: str | None
    alarms: Sequence[str]
    changes: Sequence[str]  # of the configuration, by resumes
    wall_s: float | None
    steps: int
    metrics: Sequence[Metrics]
    eval_initial: Metrics
    eval_final: Metrics
    busy_s: Metrics
    asked: int
    failed: Mapping[str, int]  # judgements by cause
    by_judge: Mapping[str, JudgeNumbers]  # empty with a single judge
    cascades: Mapping[str, CascadeNumbers]
    requests: RequestTotals  # to the models that judge
    groups: Mapping[str, int]  # trained, in flight, dropped by cause
    figures: Sequence[FigureTable]  # of task=evaluate
    shown: Sequence[Shown]
    config: str
    log_end: str
    present: Sequence[str]  # names of files

    def series(self, name: str) -> list[Point]:
        return [(line["step"], line[name]) for line in self.metrics if name in line]

    def total(self, name: str) -> float:
        return sum(line.get(name, 0.0) for line in self.metrics)


def read_run(run_dir: Path) -> RunFiles:
    summary = read_object(run_dir / "summary.json")
    lines = (numbers_of(line) for line in records(read_bytes(run_dir / "metrics.jsonl")))
    metrics = [line for line in lines if "step" in line]
    evaluations, judging, groups = part(summary, "eval"), part(summary, "judging"), part(summary, "groups")
    secrets = environment_secrets()
    config = config_text(read_bytes(run_dir / "config.yaml"), secrets)
    return RunFiles(
        name=title_of(run_dir, config),
        status=str(summary.get("status", NEVER_ENDED)),
        failure=masked(summary.get("failure"), secrets),
        bottleneck=masked(summary.get("bottleneck"), secrets),
        alarms=[mask(str(alarm), secrets) for alarm in listed(summary, "alarms")],
        changes=[mask(change_of(line), secrets) for line in records(read_bytes(run_dir / "changes.jsonl"))],
        wall_s=number(summary, "wall_s"),
        steps=int(number(summary, "steps") or max((line["step"] for line in metrics), default=0)),
        metrics=metrics,
        eval_initial=numbers_of(part(evaluations, "initial")) if summary else look_of(metrics[:1]),
        eval_final=numbers_of(part(evaluations, "final")) or look_of([*filter(look_of_line, metrics)][1:][-1:]),
        busy_s=numbers_of(part(summary, "busy_s")),
        asked=int(number(judging, "asked") or sum(line.get("judge/asked", 0) for line in metrics)),
        failed=counts(part(judging, "failed")) if judging else failures_in(metrics),
        by_judge=judges_of(part(judging, "by_judge"), metrics),
        cascades=cascades_of(part(judging, "cascades"), metrics),
        requests=requests_of(part(judging, "requests_by_model")) if judging else read_totals(run_dir),
        groups=groups_of(groups, metrics),
        figures=evaluation_tables(run_dir),
        shown=shown_of(run_dir) or answers_of(run_dir),
        config=config,
        log_end=mask(text_of(read_bytes(run_dir / "run.log", from_end=LOG_BYTES)), secrets),
        present=sorted(path.name + "/" * path.is_dir() for path in run_dir.iterdir()),
    )


def change_of(line: Record) -> str:
    return f"after step {line.get('step')}: {line.get('key')}: {line.get('old')} -> {line.get('new')}"


def title_of(run_dir: Path, config: str) -> str:
    """The title of a run: its experiment's name, because directories are named by date."""
    name = re.search(r"^experiment_name: (\S+)$", config, re.MULTILINE)
    return f"{name[1]}, {run_dir.resolve().name}" if name else run_dir.resolve().name


# -- metrics ---------------------------------------------------------------------------------------------------------


def numbers_of(record: Mapping[str, object]) -> dict[str, float]:
    """The finite numbers of a record."""
    return {name: found for name in record if (found := number(record, name)) is not None}


def number(record: Mapping[str, object], name: str) -> float | None:
    """The number under a name; None if it isn't finite."""
    value = record.get(name)
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:
        return None


def counts(record: Mapping[str, object]) -> dict[str, int]:
    return {name: int(value) for name, value in numbers_of(record).items()}


def look_of_line(line: Metrics) -> bool:
    return any(name.startswith("eval/") for name in line)


def look_of(lines: Sequence[Metrics]) -> dict[str, float]:
    """The held-out metrics of the only line, by their names in the summary."""
    found = [item for line in lines for item in line.items() if item[0].startswith("eval/")]
    return {name.removeprefix("eval/"): value for name, value in found}


def failures_in(metrics: Iterable[Metrics]) -> dict[str, int]:
    failed: Counter[str] = Counter()
    for line in metrics:
        failed.update(failures_by_cause(line))
    return dict(failed)


def judges_of(summed: Record, metrics: Sequence[Metrics]) -> dict[str, JudgeNumbers]:
    """The numbers of each of several judges; without a summary, as far as the steps report them."""
    if summed:
        return {name: judge_numbers(part(summed, name)) for name in summed}
    steps: dict[str, list[Metrics]] = {}
    for line in metrics:
        for name, own in by_part(line, "judge").items():
            steps.setdefault(name, []).append(own)
    return {name: judge_numbers_so_far(own) for name, own in steps.items() if any("asked" in line for line in own)}


def judge_numbers(summed: Record) -> JudgeNumbers:
    return JudgeNumbers(
        asked=int(number(summed, "asked") or 0),
        tokens=int(number(summed, "tokens") or 0),
        failed=counts(part(summed, "failed")),
        score=number(summed, "score_mean"),
    )


def judge_numbers_so_far(steps: Sequence[Metrics]) -> JudgeNumbers:
    """The mean score is that of the last step."""
    scores = [line["score_mean"] for line in steps if "score_mean" in line]
    return JudgeNumbers(
        asked=int(sum(line.get("asked", 0) for line in steps)),
        tokens=int(sum(line.get("tokens", 0) for line in steps)),
        failed=failures_in({f"judge/{name}": value for name, value in line.items()} for line in steps),
        score=scores[-1] if scores else None,
    )


def requests_of(summed: Record) -> RequestTotals:
    """The requests to each model, by purpose."""
    known = {spec.name for spec in fields(RequestCounts)}
    return RequestTotals(
        {
            model: {
                purpose: RequestCounts(**{name: n for name, n in counts(part(own, purpose)).items() if name in known})
                for purpose in own
            }
            for model in summed
            if (own := part(summed, model))
        }
    )


def cascades_of(summed: Record, metrics: Sequence[Metrics]) -> dict[str, CascadeNumbers]:
    """The numbers of each cascade; without a summary, of its last step."""
    last: dict[str, Metrics] = {}
    for line in metrics:
        last |= by_part(line, "cascade")
    known = {name: numbers_of(part(summed, name)) for name in summed} or last
    return {name: cascade_numbers(own) for name, own in known.items()}


def cascade_numbers(known: Metrics) -> CascadeNumbers:
    return CascadeNumbers(
        rollouts=int(known.get("rollouts", 0)),
        unsure=known.get("unsure_share", 0.0),
        escalated=known.get("escalated_share", 0.0),
        audited=int(known.get("audited", 0)),
        error=known.get("audit_error"),
        flipped=known.get("flipped_share"),
    )


def groups_of(summed: Record, metrics: Sequence[Metrics]) -> dict[str, int]:
    """The number of groups by how they ended; without a summary, as of the last step."""
    if summed:
        known = counts(summed)
        ended = {"trained": known.get("trained", 0), "in flight": known.get("in_flight", 0)}
        return ended | {f"dropped: {cause}": count for cause, count in counts(part(summed, "dropped")).items()}
    last = metrics[-1] if metrics else {}
    names = {name: name.removeprefix("groups/").replace("_", " ") for name in last if name.startswith("groups/")}
    return {label: int(last[name]) for name, label in names.items()}


# -- rollouts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The lines of one rollout."""

    rollout: Record
    report: Record

    @property
    def seat(self) -> tuple[str, int]:
        return self.rollout["group_id"], self.rollout["sibling"]

    @property
    def score(self) -> float | None:
        return self.report["verdict"]["score"] if "verdict" in self.report else None

    @property
    def spread(self) -> float:
        return self.report["verdict"]["score_std"] if "verdict" in self.report else 0.0


def shown_of(run_dir: Path) -> list[Shown]:
    """A few informative rollouts: from the beginning and, of the last ones, the ends of the scale and failures."""
    rollouts, reports = ends_of(run_dir / "rollouts.jsonl"), ends_of(run_dir / "judgements.jsonl")
    early, late = (joined(*both) for both in zip(rollouts, reports, strict=True))
    late = late or early
    judged = [pair for pair in late if pair.score is not None]
    divided = [pair for pair in judged if pair.spread > 0]
    choices: list[tuple[str, Pair | None]] = [
        ("early", first_of([pair for pair in early if pair.score is not None])),
        ("late, scored highest", first_of(judged, key=lambda pair: -(pair.score or 0))),
        ("late, scored lowest", first_of(judged, key=lambda pair: pair.score or 0)),
        ("late, judged most differently", first_of(divided, key=lambda pair: -pair.spread)),
        ("late, judging failed", first_of([pair for pair in late if pair.score is None])),
        ("the last", late[-1] if late else None),
    ]
    return each_once(choices)


def answers_of(run_dir: Path) -> list[Shown]:
    """A few answers of an evaluated policy: the ends of the scale, and a failure."""
    early, late = ends_of(run_dir / "eval_rollouts.jsonl")
    pairs = [Pair(rollout=line, report=line) for line in (*early, *late)]
    judged = [pair for pair in pairs if pair.score is not None]
    choices: list[tuple[str, Pair | None]] = [
        ("scored highest", first_of(judged, key=lambda pair: -(pair.score or 0))),
        ("scored lowest", first_of(judged, key=lambda pair: pair.score or 0)),
        ("judging failed", first_of([pair for pair in pairs if pair.score is None])),
    ]
    return each_once(choices)


def each_once(choices: Sequence[tuple[str, Pair | None]]) -> list[Shown]:
    """The chosen rollouts, each for the first reason that chose it."""
    chosen: dict[tuple[str, int], tuple[str, Pair]] = {}
    for why, pair in choices:
        if pair is not None:
            chosen.setdefault(pair.seat, (why, pair))
    return [shown(why, pair) for why, pair in chosen.values()]


def first_of(pairs: Sequence[Pair], key: Callable[[Pair], float] = lambda pair: 0.0) -> Pair | None:
    return min(pairs, key=key, default=None)


def joined(rollouts: Sequence[Record], reports: Sequence[Record]) -> list[Pair]:
    """Rollouts and their reports by group and sibling. Judgements of labelled work, which have no group, are left
    out.
    """
    by_seat = {(report["group_id"], report["sibling"]): report for report in reports if "group_id" in report}
    seats = ((rollout, by_seat.get((rollout["group_id"], rollout["sibling"]))) for rollout in rollouts)
    return [Pair(rollout=rollout, report=report) for rollout, report in seats if report is not None]


def shown(why: str, pair: Pair) -> Shown:
    prompt, turns = pair.rollout["prompt"], pair.rollout["turns"]
    verdict = pair.report.get("verdict")
    opening = [said(message) for message in pair.rollout.get("opening", ())]
    is_episode = len(turns) > 1 or bool(opening) or any(turn["replies"] for turn in turns)
    return Shown(
        why=why,
        group_id=str(pair.rollout["group_id"]),
        sibling=int(pair.rollout["sibling"]),
        version=min((span["version"] for turn in turns for span in turn["versions"]), default=0),
        question="\n\n".join(f"{message['role']}: {message['content']}" for message in prompt["messages"]),
        reference=prompt["reference"],
        answer="" if is_episode else "\n\n".join(turn["text"] for turn in turns),
        opening=opening,
        turns=[*shown_turns(turns, verdict)] if is_episode else [],
        ended=f"truncated: {pair.rollout['reason']}" if pair.rollout.get("reason") else "",
        score=pair.score,
        reward=sum(span["value"] for span in verdict["rewards"]) if verdict else None,
        parts=dict(verdict["breakdown"]) if verdict and "by_judge" in pair.report else {},
        critiques=[*failed_verdicts(pair.report), *judgements_on(pair)],
    )


def failed_verdicts(report: Record) -> Iterator[Critique]:
    """The failed verdict of all judges, then those of single ones."""
    for name, own in {"": report, **report.get("by_judge", {})}.items():
        if failed := own.get("failed"):
            yield Critique(
                text=f"{failed['stage']} failed: {failed['cause']} {failed['detail']}", score=None, judge=name
            )


def judgements_on(pair: Pair) -> Iterator[Critique]:
    for one in pair.report["judgements"]:
        score = score_of(one, pair.rollout["sibling"])
        turn = one["turn"] + 1 if "turn" in one else None
        yield Critique(text=one["completion"]["text"], score=score, judge=one.get("judge", ""), turn=turn)


def score_of(judgement: Record, sibling: int) -> float | None:
    """The sibling's score. None if the judgement has several scores per sibling, as for steps."""
    siblings, scores = judgement["siblings"], judgement["scores"]
    return dict(zip(siblings, scores, strict=True)).get(sibling) if len(siblings) == len(scores) else None


def said(message: Record) -> Said:
    return Said(by=" ".join(filter(None, (message["role"], message.get("name")))), text=message["content"])


def written(message: Record) -> Said:
    """A message of a history that the agent wrote."""
    if message["role"] != "assistant":
        return said(message)
    text = "\n".join(filter(None, (message["content"], *calls_of(message))))
    return Said(by="assistant, as the agent wrote it, not the policy", text=text)


def calls_of(record: Record) -> list[str]:
    return [f"{call['name']}({json.dumps(call['arguments'])})" for call in record.get("tool_calls", ())]


def shown_turns(turns: Sequence[Record], verdict: Record | None) -> Iterator[ShownTurn]:
    """The turns of an episode. What a turn before a branch was answered is the history of the branch."""
    for place, turn in enumerate(turns):
        is_left = place + 1 < len(turns) and turns[place + 1].get("rewritten", False)
        history = turns[place - 1]["replies"] if place and turn.get("rewritten") else ()
        replies = () if is_left else turn["replies"]
        yield shown_turn({**turn, "replies": replies}, spans_on(verdict, place), history)


def shown_turn(turn: Record, spans: Sequence[Record], history: Sequence[Record] = ()) -> ShownTurn:
    """spans: of the verdict, on this turn. history: new messages before a branch."""
    facts = ["a branch: it doesn't continue the turn before"] if turn.get("rewritten") else []
    facts += [f"judged {own_reward(span):.3g}" for span in spans]
    facts += [f"{name} {reward:.3g}" for name, reward in turn.get("rewards", {}).items()]
    facts += [f"fault: {kind}" for kind in turn.get("faults", ())]
    if took_s := turn.get("env_s"):
        facts.append(f"environment {took_s:.3g} s")
    return ShownTurn(
        history=[written(message) for message in history],
        text=turn["text"],
        calls=calls_of(turn),
        facts=facts,
        replies=[said(message) for message in turn["replies"]],
    )


def spans_on(verdict: Record | None, turn: int) -> list[Record]:
    return [span for span in verdict["rewards"] if span["turn"] == turn] if verdict else []


def own_reward(span: Record) -> float:
    """The reward of a step or a turn, without its share in the mean of all."""
    share = span.get("share")
    return float(span["value"] / share if share else span["value"])


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


def ends_of(path: Path, num_bytes: int = END_BYTES) -> tuple[list[Record], list[Record]]:
    """The first and the last lines of a journal, without overlap."""
    try:
        with path.open("rb") as file:
            first = file.readlines(num_bytes)
            rest = path.stat().st_size - file.tell()
            if rest > num_bytes:
                file.seek(-num_bytes, 2)
                file.readline()
            return [*records(b"".join(first))], [*records(file.read())]
    except OSError:
        return [], []


def records(data: bytes) -> Iterator[Record]:
    """The JSON objects on whole lines."""
    for line in data.splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def read_object(path: Path) -> Record:
    try:
        found = json.loads(read_bytes(path) or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def part(record: Record, name: str) -> Record:
    found = record.get(name)
    return found if isinstance(found, dict) else {}


def listed(record: Record, name: str) -> list[object]:
    found = record.get(name)
    return found if isinstance(found, list) else []


def text_of(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def masked(text: object, secrets: Sequence[str]) -> str | None:
    return None if text is None else mask(str(text), secrets)


CONFIG_LINE = re.compile(r"^(\s*(?:- )?)([\w.-]+): +(\S.*)$")


def config_text(data: bytes, secrets: Sequence[str]) -> str:
    return "\n".join(mask(config_line(line), secrets) for line in text_of(data).splitlines())


def config_line(line: str) -> str:
    """A line of the configuration. Numbers and booleans stay under any name, as in `redact`."""
    found = CONFIG_LINE.match(line)
    if not found or not looks_secret(found[2]) or re.fullmatch(r"[-+.\de]+|null|true|false|\{\}|\[\]", found[3]):
        return line
    return f"{found[1]}{found[2]}: {REDACTED}"
