"""summary.json: the results of a run, and the objective for a sweeper. Written once, atomically."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from grmpipe.observe.judge_requests import RequestCounts, RequestTotals
from grmpipe.observe.plain_json import plain
from grmpipe.observe.spending import SpendingSummary
from grmpipe.types import Metrics

Status = Literal["completed", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSummary:
    """Held-out metrics before the first and after the last step; empty without an evaluation.

    by_prompts: a policy's metrics in task=evaluate, by the name of its prompts: in the file they stand beside `initial`
                and `final`.
    """

    initial: Metrics = field(default_factory=dict)
    final: Metrics = field(default_factory=dict)
    by_prompts: Mapping[str, Metrics] = field(default_factory=dict)

    def to_json(self) -> object:
        return plain({"initial": self.initial, "final": self.final, **self.by_prompts})


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgementTotals:
    """Judgements of one judge, or of all."""

    asked: int = 0
    counted: int = 0  # in a vote
    forced_verdicts: int = 0  # judgements whose thought the budget ended (judge.thinking.budget_tokens)
    asked_verdicts: int = 0  # judgements without a verdict that were asked for it (judge.format.ask_verdict)
    asked_verdicts_read: int = 0  # those of them that then had one; the others are in `failed`
    tool_calls: int = 0  # of judges with tools (judge.tools)
    called_tools: int = 0  # judgements with calls
    failed: Mapping[str, int] = field(default_factory=dict)  # by cause
    tokens: int = 0  # sampled
    saved_by_early_stop: int = 0  # tokens, a lower bound: judgements never requested, at the others' mean length
    early_stop_error: float | None = None  # score units, mean of the audited: the vote at the stop against the full one


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSummary(JudgementTotals):
    """Judgements of one of several judges."""

    score_mean: float | None = None  # on the judge's own scale; None without a verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeSummary:
    """What a cascade did, and what it costs."""

    rollouts: int = 0  # on which it decided
    escalated_share: float = 0.0
    unsure_share: float = 0.0
    audited: int = 0  # rollouts that both judges saw although the first one was sure
    audit_error: float | None = None  # reward units, mean absolute difference of both; None without an audit
    audit_error_se: float | None = None  # its standard error
    flipped_share: float | None = None  # share of the audited that only one of the judges passes


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingSummary(JudgementTotals):
    """Judgements of the whole run, resumes included: of training, those that `VoidedWork` lists excepted."""

    aborted_tasks: int = 0  # aborted by a new version of a GRM in training
    voided_verdicts: int = 0  # in groups that it judged again
    by_judge: Mapping[str, JudgeSummary] = field(default_factory=dict)  # empty with a single judge
    cascades: Mapping[str, CascadeSummary] = field(default_factory=dict)
    # All requests to the models that judge, by purpose: training, held_out, preflight, monitoring, evaluation. Those of
    # voided work and killed processes too: what an endpoint bills.
    requests: Mapping[str, RequestCounts] = field(default_factory=dict)
    requests_by_model: Mapping[str, Mapping[str, RequestCounts]] = field(default_factory=dict)
    spending: SpendingSummary | None = None  # without a price or a budget


def with_requests(
    judging: JudgingSummary, totals: RequestTotals, spending: SpendingSummary | None = None
) -> JudgingSummary:
    return replace(judging, requests=totals.by_purpose, requests_by_model=totals.by_model, spending=spending)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutEpisodes:
    """Episodes of held-out evaluations, of the whole run."""

    episodes: int = 0  # played to their end
    turns: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)  # environment failures by cause; each cost an episode
    failed_episodes: int = 0  # prompts whose episodes all failed


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSummary:
    """What a judge that only watches has found. The figures are None without a verdict."""

    groups: int = 0  # judged
    dropped_groups: int = 0  # its queue was full
    unfinished_groups: int = 0  # still waiting at the end of the run, or of a process that was killed
    failed: Mapping[str, int] = field(default_factory=dict)  # rollouts, by cause
    reward: float | None = None  # mean
    rank_correlation: float | None = None  # with the trained reward, within groups
    flips: float | None = None  # share of sibling pairs that both order, in opposite ways


@dataclass(frozen=True, slots=True, kw_only=True)
class TeachingSummary:
    """What teachers scored; all zero in a run without any."""

    scored: int = 0  # rollouts
    tokens: int = 0  # in their completions
    failed: Mapping[str, int] = field(default_factory=dict)  # rollouts, by cause


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSummary:
    """Episodes of the whole run; all zero in a run of single turns. Those that train, but for `opened`, `closed`,
    `killed` and `held_out`.
    """

    # Environments of all episodes, also held-out, failed and cut-off ones, by the last process of the run; all of them
    # were closed or killed.
    opened: int = 0
    closed: int = 0
    killed: int = 0
    episodes: int = 0  # played to their end
    turns: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)  # environment failures by cause; each cost an episode
    failed_episodes: int = 0  # siblings whose episodes all failed; their groups are dropped as env_<cause>
    policy_faults: Mapping[str, int] = field(default_factory=dict)  # what the policy did wrong, by kind
    truncated: Mapping[str, int] = field(default_factory=dict)  # episodes, by what truncated them
    time_share: float = 0.0  # the environments' share of the time of all episodes
    held_out: HeldOutEpisodes = field(default_factory=HeldOutEpisodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsSummary:
    """submitted == trained + sum(dropped) + in_flight."""

    submitted: int = 0
    trained: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)  # by cause
    in_flight: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSummary:
    """The pause of the policy's engines for a push of its weights."""

    pause_s: float | None = None  # mean of the steps; None without any
    predicted_pause_s: float | None = None  # by the plan; None if it doesn't know the model's size or the device


@dataclass(frozen=True, slots=True, kw_only=True)
class VoidedWork:
    """Finished work that no other total has: it came after a checkpoint, and a resume from that checkpoint can't use
    it.
    """

    rollouts: int = 0
    rollout_tokens: int = 0  # sampled
    judgements: int = 0  # asked
    judgement_tokens: int = 0  # sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSummary:
    """What a service answered, since its last start.

    from_cache: calls that were answered without judging.  seconds: percentiles of the latest 10,000 calls.
    imputed:    responses without a verdict whose trainer got the mean of their siblings, by cause.
    """

    calls: int = 0
    responses: int = 0
    from_cache: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    imputed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The content of summary.json, with its fields in this order.

    Counts are of the steps that stand, resumes included. Of a process that was killed, times and replaced engines are
    those up to its last checkpoint: no file has the rest.
    """

    status: Status = "completed"
    steps: int
    versions: Mapping[str, int]  # by model name
    wall_s: float = 0.0  # all processes of the run; a killed one counts up to its last checkpoint
    objective: float | None = None
    eval: EvalSummary = field(default_factory=EvalSummary)
    busy_s: Mapping[str, float] = field(default_factory=dict)  # by role, of the processes of wall_s
    judging: JudgingSummary = field(default_factory=JudgingSummary)
    watching: Mapping[str, WatchSummary] = field(default_factory=dict)  # by judge that only watches
    teaching: TeachingSummary = field(default_factory=TeachingSummary)
    envs: EnvSummary = field(default_factory=EnvSummary)
    groups: GroupsSummary = field(default_factory=GroupsSummary)
    voided_by_resumes: VoidedWork = field(default_factory=VoidedWork)
    serving: ServingSummary = field(default_factory=ServingSummary)
    max_staleness_trained: int = 0
    sync: SyncSummary = field(default_factory=SyncSummary)
    engines_replaced: Mapping[str, int] = field(default_factory=dict)  # by role
    # Why the run began again at its last checkpoint ("step 7: learner-0 died: .."), resumes included.
    restarts: tuple[str, ...] = ()
    moves: Mapping[str, int] = field(default_factory=dict)  # moves of elastic slots, by "policy->grm"
    bottleneck: str | None = None  # None if nothing dominated
    alarms: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()  # what resumes changed in the configuration
    # By file: lines that the last process could not write.
    journal_failures: Mapping[str, int] = field(default_factory=dict)
    run_id: str = ""  # also in run.json, checkpoints, run.log, report, timeline, and each line of a journal
    failure: str | None = None  # the first cause, in plain words; also of what failed after a signal

    def __post_init__(self) -> None:
        ended = ("failed", "interrupted") if self.failure is not None else ("completed", "interrupted")
        assert self.status in ended, "a failed run has a failure, a complete one has none"

    def to_json(self) -> dict[str, object]:
        """The summary as plain JSON: numbers that aren't finite become null."""
        names = [field.name for field in fields(self) if field.name != "failure" or self.failure is not None]
        return {name: plain(getattr(self, name)) for name in names} | {"eval": self.eval.to_json()}

    def with_objective(self, path: str) -> Summary:
        return replace(self, objective=lookup(self, path))

    def write(self, path: Path) -> None:
        """Write the file. Raises OSError, because a sweep must know that there is no result."""
        draft = path.with_name(path.name + ".tmp")
        draft.write_text(json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        draft.replace(path)


def write_summary(summary: Summary, path: Path) -> Summary:
    """Write the summary. If that fails, return a failed summary that says so after the first cause."""
    try:
        summary.write(path)
    except OSError as error:
        problem = f"{path} could not be written: {error.strerror or error}"
        first = f"{summary.failure}\n" if summary.failure is not None else ""
        return replace(summary, status="failed", failure=first + problem)
    return summary


def lookup(summary: Summary, path: str) -> float:
    """The number at a dotted path, such as "eval.final.true_accuracy".

    Raises ValueError that lists the paths.
    """
    known = dict(numbers(summary.to_json()))
    if path not in known:
        near = difflib.get_close_matches(path, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise ValueError(f"objective: no number at {path!r} in summary.json{hint} Known: {', '.join(known)}")
    return known[path]


def numbers(record: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every finite number under its dotted path."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", float(value)
