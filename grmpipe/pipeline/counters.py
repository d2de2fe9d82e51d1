"""Counts of tokens, judgements and failures by cause, per step and in total; metrics of a step. Decides nothing."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

from grmpipe.algorithm.advantages import all_advantages_zero
from grmpipe.algorithm.rewards import rewards_of
from grmpipe.config.train import AlgorithmConfig
from grmpipe.judge.rule import Rule
from grmpipe.pipeline.interfaces import StepReport
from grmpipe.pipeline.stall_times import StallTimes
from grmpipe.types import FailedJudgement, JudgedGroup, JudgeReport, Metrics, Rollout, Verdict
from scheduler.admission import Ledger


@dataclass(slots=True)
class Counters:
    """Counts since the last step, or since the run began."""

    rollouts: int = 0
    truncated: int = 0
    policy_tokens: int = 0
    asked: int = 0  # judgements requested, retries included
    counted: int = 0  # judgements that entered a vote
    forced: int = 0  # of these, judgements whose thought the budget ended
    judge_tokens: int = 0
    aborted: int = 0  # judge tasks aborted because a new version of the judge came
    voided: int = 0  # verdicts that a new version of the judge had to give again
    failed: Counter[str] = field(default_factory=Counter)  # judgements by cause
    saved_tokens: int = 0  # in judgements that an early stop left out; a lower bound
    audits: int = 0  # rollouts judged in full to check the early stop
    audit_error: float = 0.0  # sum, in score units, of the differences between the vote at the stop and the full one
    stalls: StallTimes = field(default_factory=StallTimes)

    @staticmethod
    def restored(saved: Mapping[str, object]) -> Counters:
        """Counters from what `FlowCounters.saved` wrote into a checkpoint."""
        failed = Counter(saved["failed"])  # type: ignore[call-overload]
        stalls = StallTimes(**saved.get("stalls", {}))  # type: ignore[arg-type]
        return Counters(**{**saved, "failed": failed, "stalls": stalls})

    def add(self, other: Counters) -> None:
        self.rollouts += other.rollouts
        self.truncated += other.truncated
        self.policy_tokens += other.policy_tokens
        self.asked += other.asked
        self.counted += other.counted
        self.forced += other.forced
        self.judge_tokens += other.judge_tokens
        self.aborted += other.aborted
        self.voided += other.voided
        self.failed += other.failed
        self.saved_tokens += other.saved_tokens
        self.audits += other.audits
        self.audit_error += other.audit_error
        self.stalls = self.stalls.plus(other.stalls)


class FlowCounters:
    """Counters of a run: `step` restarts with every step, `total` continues over a resume."""

    def __init__(self) -> None:
        self.step = Counters()
        self.total = Counters()

    def rollout(self, rollout: Rollout) -> None:
        self.step.rollouts += 1
        self.step.truncated += rollout.status == "truncated"
        self.step.policy_tokens += rollout.num_sampled_tokens

    def report(self, report: JudgeReport) -> None:
        generated = [f.completion for f in report.failures if isinstance(f, FailedJudgement)]
        generated += [judgement.completion for judgement in report.judgements]
        if report.principles is not None:
            generated.append(report.principles)
            self.step.asked += 1
        if (audit := report.audit) is not None:
            self.step.audits += 1
            self.step.audit_error += abs(audit.stopped_score - audit.full_score)
        self.step.saved_tokens += report.saved_tokens
        self.step.asked += len(report.judgements) + len(report.failures)
        self.step.counted += len(report.judgements)
        self.step.forced += sum(judgement.is_forced for judgement in report.judgements)
        self.step.judge_tokens += sum(completion.num_tokens for completion in generated)
        self.step.failed.update(failure.cause for failure in report.failures)

    def judge_changed(self, *, aborted: int, voided: int) -> None:
        """Count what a change of the judge's version aborted and voided."""
        self.step.aborted += aborted
        self.step.voided += voided

    def waited(self, times: StallTimes) -> None:
        """Add the stall times of a step, at its end."""
        self.step.stalls = self.step.stalls.plus(times)

    def close_step(self) -> Counters:
        """Return this step's counts and add them to the totals."""
        closed, self.step = self.step, Counters()
        self.total.add(closed)
        return closed

    def total_so_far(self) -> Counters:
        """The totals, including the open step."""
        counts = Counters()
        counts.add(self.total)
        counts.add(self.step)
        return counts

    def saved(self) -> dict[str, object]:
        """Totals for a checkpoint."""
        return {spec.name: getattr(self.total, spec.name) for spec in fields(Counters)} | {
            "failed": dict(self.total.failed),
            "stalls": asdict(self.total.stalls),
        }

    def restore(self, saved: Mapping[str, object]) -> None:
        """Totals from a checkpoint."""
        self.total = Counters.restored(saved)


def step_metrics(
    report: StepReport, counts: Counters, ledger: Ledger, is_right: Rule, algorithm: AlgorithmConfig
) -> Metrics:
    """All metrics of one step."""
    return {
        **flow_metrics(counts, report.stalls.steps_s),
        **batch_metrics(report.groups, report.step - 1, algorithm),
        **truth_metrics(report.groups, is_right),
        **report.learner,
        "time/step_s": report.stalls.steps_s,
        "time/train_s": report.learner_busy_s,
        "stall/rollouts_s": report.stalls.rollouts_s,
        "stall/verdicts_s": report.stalls.verdicts_s,
        "stall/training_s": report.stalls.training_s,
        "stall/weight_sync_s": report.stalls.weight_sync_s,
        "stall/groups_s": report.stalls.for_groups_s,
        "stall/engines_idle_s": report.policy_idle_s,
        "sync/push_s": report.sync.seconds,
        "sync/pause_s": report.sync.pause_seconds,
        "sync/bytes": float(report.sync.num_bytes),
        "sync/skipped_bytes": float(report.sync.num_skipped_bytes),
        "sync/probe_error_nats": report.sync.probe_error,
        "groups/in_flight": float(ledger.in_flight),
        **{f"groups/dropped_{cause}": float(count) for cause, count in ledger.dropped.items()},
    }


def truth_metrics(groups: Sequence[JudgedGroup], is_right: Rule) -> Metrics:
    """The share of a batch that is right by the rule: reported, never trained on. Empty if there are no references."""
    right = [verdict for group in groups for verdict in ruled(group, is_right)]
    return {"train/true_accuracy": statistics.fmean(right)} if right else {}


def ruled(group: JudgedGroup, is_right: Rule) -> list[bool]:
    """Whether the rule accepts each sibling. Empty without a reference, or with a rubric as one."""
    reference = group.prompt.reference
    if reference is None:
        return []
    try:
        return [is_right(rollout.answer, reference) for rollout in group.rollouts]
    except ValueError:
        return []


def flow_metrics(counts: Counters, seconds: float) -> Metrics:
    """Metrics of the rollouts and judgements that ended in a step of `seconds`."""
    metrics = {
        "rollout/finished": float(counts.rollouts),
        "rollout/truncated_share": counts.truncated / counts.rollouts if counts.rollouts else 0.0,
        "rollout/tokens": float(counts.policy_tokens),
        "rollout/tokens_per_s": counts.policy_tokens / seconds,
        "judge/asked": float(counts.asked),
        "judge/counted": float(counts.counted),
        "judge/tokens": float(counts.judge_tokens),
        "judge/tokens_per_s": counts.judge_tokens / seconds,
        "judge/aborted_tasks": float(counts.aborted),
        "judge/voided_verdicts": float(counts.voided),
    }
    if counts.forced:
        metrics["judge/forced_verdicts"] = float(counts.forced)
    if counts.saved_tokens or counts.audits:
        metrics["judge/saved_tokens"] = float(counts.saved_tokens)
    if counts.audits:
        metrics["judge/early_stop_error"] = counts.audit_error / counts.audits
    return metrics | {f"judge/failed_{cause}": float(n) for cause, n in sorted(counts.failed.items())}


def batch_metrics(groups: Sequence[JudgedGroup], version: int, algorithm: AlgorithmConfig) -> Metrics:
    """Metrics of the batch that version `version` was trained on: scores, rewards, lengths, staleness."""
    pairs = [pair for group in groups for pair in zip(group.rollouts, group.verdicts, strict=True)]
    verdicts = [verdict for _, verdict in pairs if isinstance(verdict, Verdict)]
    lengths = [rollout.num_sampled_tokens for rollout, _ in pairs]
    ages = [version - group.version for group in groups]
    metrics = {
        "train/grm_score": statistics.fmean(v.score for v in verdicts),
        "train/reward": statistics.fmean(v.outcome for v in verdicts),
        "train/reward_std": statistics.pstdev(v.outcome for v in verdicts),
        "response_length/mean": statistics.fmean(lengths),
        "train/zero_advantage_share": statistics.fmean(has_zero_advantages(group, algorithm) for group in groups),
        "train/siblings_without_verdict": float(len(pairs) - len(verdicts)),
        "judge/score_std": statistics.fmean(v.score_std for v in verdicts),
        "staleness/mean": statistics.fmean(ages),
        "staleness/max": float(max(ages)),
    }
    if (correlation := score_length_correlation(pairs)) is not None:
        metrics["judge/score_length_correlation"] = correlation
    for name in sorted({name for verdict in verdicts for name in verdict.breakdown}):
        parts = [verdict.breakdown[name] for verdict in verdicts if name in verdict.breakdown]
        metrics |= {
            f"reward/{name}_mean": statistics.fmean(parts),
            f"reward/{name}_std": statistics.pstdev(parts),
            f"reward/{name}_min": min(parts),
            f"reward/{name}_max": max(parts),
        }
    return metrics


def has_zero_advantages(group: JudgedGroup, algorithm: AlgorithmConfig) -> bool:
    """Whether the estimator gives all siblings an advantage of zero, before any penalty: nothing to learn from."""
    judged = zip(group.rollouts, group.verdicts, strict=True)
    return all_advantages_zero([rewards_of(r, v) for r, v in judged if isinstance(v, Verdict)], algorithm)


def score_length_correlation(pairs: Sequence[tuple[Rollout, object]]) -> float | None:
    """Pearson correlation of score and length over a batch. None if one of the two doesn't vary."""
    points = [(r.num_sampled_tokens, v.score) for r, v in pairs if isinstance(v, Verdict)]
    lengths, scores = [float(x) for x, _ in points], [y for _, y in points]
    if len(set(lengths)) < 2 or len(set(scores)) < 2:
        return None
    return statistics.correlation(lengths, scores)
