"""Counts what flows by: tokens, judgements, failures by cause. Per step and in total; it decides nothing."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

from grmpipe.algorithm.advantages import teaches_nothing
from grmpipe.algorithm.rewards import rewards_of
from grmpipe.config.train import AlgorithmConfig
from grmpipe.judge.rule import Rule
from grmpipe.pipeline.interfaces import StepReport
from grmpipe.pipeline.stall_times import WaitTimes
from grmpipe.types import FailedJudgement, JudgedGroup, JudgeReport, Metrics, Rollout, Verdict
from scheduler.admission import Ledger


@dataclass(slots=True)
class Counts:
    """Since the last step, or since the run began."""

    rollouts: int = 0
    cut: int = 0
    policy_tokens: int = 0
    asked: int = 0  # judgements requested, re-asked ones included
    counted: int = 0  # judgements that entered a vote
    judge_tokens: int = 0
    aborted: int = 0  # sittings that a new version of the judge broke off
    voided: int = 0  # verdicts of groups that it had to judge again
    failed: Counter[str] = field(default_factory=Counter)  # judgements by cause
    saved_tokens: int = 0  # of judgements that an early stop left out, estimated from below
    audits: int = 0  # rollouts judged in full to try the early stop
    audit_error: float = 0.0  # score units, summed up: the vote at the stop against the full one
    waits: WaitTimes = field(default_factory=WaitTimes)

    @staticmethod
    def restored(saved: Mapping[str, object]) -> Counts:
        """From what `Tally.saved` gave a checkpoint."""
        failed = Counter(saved["failed"])  # type: ignore[call-overload]
        waits = WaitTimes(**saved.get("waits", {}))  # type: ignore[arg-type]
        return Counts(**{**saved, "failed": failed, "waits": waits})

    def add(self, other: Counts) -> None:
        self.rollouts += other.rollouts
        self.cut += other.cut
        self.policy_tokens += other.policy_tokens
        self.asked += other.asked
        self.counted += other.counted
        self.judge_tokens += other.judge_tokens
        self.aborted += other.aborted
        self.voided += other.voided
        self.failed += other.failed
        self.saved_tokens += other.saved_tokens
        self.audits += other.audits
        self.audit_error += other.audit_error
        self.waits = self.waits.plus(other.waits)


class Tally:
    """`step` starts anew with every step, `total` goes on over a resume."""

    def __init__(self) -> None:
        self.step = Counts()
        self.total = Counts()

    def rollout(self, rollout: Rollout) -> None:
        self.step.rollouts += 1
        self.step.cut += rollout.status == "cut"
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
        self.step.judge_tokens += sum(completion.num_tokens for completion in generated)
        self.step.failed.update(failure.cause for failure in report.failures)

    def judge_changed(self, *, aborted: int, voided: int) -> None:
        """A new version of the GRM judges from now on."""
        self.step.aborted += aborted
        self.step.voided += voided

    def waited(self, times: WaitTimes) -> None:
        """At the end of a step."""
        self.step.waits = self.step.waits.plus(times)

    def close_step(self) -> Counts:
        """This step's counts; they enter the totals."""
        closed, self.step = self.step, Counts()
        self.total.add(closed)
        return closed

    def total_so_far(self) -> Counts:
        """With the open step."""
        counts = Counts()
        counts.add(self.total)
        counts.add(self.step)
        return counts

    def saved(self) -> dict[str, object]:
        """Totals for a checkpoint."""
        return {spec.name: getattr(self.total, spec.name) for spec in fields(Counts)} | {
            "failed": dict(self.total.failed),
            "waits": asdict(self.total.waits),
        }

    def restore(self, saved: Mapping[str, object]) -> None:
        """Totals from a checkpoint."""
        self.total = Counts.restored(saved)


def step_metrics(
    report: StepReport, counts: Counts, ledger: Ledger, is_right: Rule, algorithm: AlgorithmConfig
) -> Metrics:
    """Everything that one step is told by."""
    return {
        **flow_metrics(counts, report.waits.steps_s),
        **batch_metrics(report.groups, report.step - 1, algorithm),
        **truth_metrics(report.groups, is_right),
        **report.learner,
        "time/step_s": report.waits.steps_s,
        "time/learner_s": report.learner_busy_s,
        "wait/policy_s": report.waits.policy_s,
        "wait/judge_s": report.waits.judge_s,
        "wait/batch_s": report.waits.batch_s,
        "wait/weights_s": report.waits.weights_s,
        "wait/learner_for_groups_s": report.waits.for_groups_s,
        "wait/engines_for_learner_s": report.policy_idle_s,
        "sync/push_s": report.sync.seconds,
        "sync/pause_s": report.sync.pause_seconds,
        "sync/bytes": float(report.sync.num_bytes),
        "sync/skipped_bytes": float(report.sync.num_skipped_bytes),
        "sync/probe_error_nats": report.sync.probe_error,
        "groups/in_flight": float(ledger.in_flight),
        **{f"groups/dropped_{cause}": float(count) for cause, count in ledger.dropped.items()},
    }


def truth_metrics(groups: Sequence[JudgedGroup], is_right: Rule) -> Metrics:
    """How much of a batch is right by the rule: shown, never trained on. Empty where there are no references."""
    right = [verdict for group in groups for verdict in ruled(group, is_right)]
    return {"train/true_accuracy": statistics.fmean(right)} if right else {}


def ruled(group: JudgedGroup, is_right: Rule) -> list[bool]:
    """Each sibling by the rule. Empty without a reference, or with one that it can't read: a rubric."""
    reference = group.prompt.reference
    if reference is None:
        return []
    try:
        return [is_right(rollout.text, reference) for rollout in group.rollouts]
    except ValueError:
        return []


def flow_metrics(counts: Counts, seconds: float) -> Metrics:
    """What moved in a step that took `seconds`."""
    metrics = {
        "rollout/finished": float(counts.rollouts),
        "rollout/cut_share": counts.cut / counts.rollouts if counts.rollouts else 0.0,
        "rollout/tokens": float(counts.policy_tokens),
        "rollout/tokens_per_s": counts.policy_tokens / seconds,
        "judge/asked": float(counts.asked),
        "judge/counted": float(counts.counted),
        "judge/tokens": float(counts.judge_tokens),
        "judge/tokens_per_s": counts.judge_tokens / seconds,
        "judge/aborted_sittings": float(counts.aborted),
        "judge/voided_verdicts": float(counts.voided),
    }
    if counts.saved_tokens or counts.audits:
        metrics["judge/saved_tokens"] = float(counts.saved_tokens)
    if counts.audits:
        metrics["judge/early_stop_error"] = counts.audit_error / counts.audits
    return metrics | {f"judge/failed_{cause}": float(n) for cause, n in sorted(counts.failed.items())}


def batch_metrics(groups: Sequence[JudgedGroup], version: int, algorithm: AlgorithmConfig) -> Metrics:
    """What a batch of version `version` was trained on: scores, rewards, lengths, ages."""
    pairs = [pair for group in groups for pair in zip(group.rollouts, group.verdicts, strict=True)]
    verdicts = [verdict for _, verdict in pairs if isinstance(verdict, Verdict)]
    lengths = [rollout.num_sampled_tokens for rollout, _ in pairs]
    ages = [version - group.version for group in groups]
    metrics = {
        "train/grm_score": statistics.fmean(v.score for v in verdicts),
        "train/reward": statistics.fmean(v.outcome for v in verdicts),
        "train/reward_std": statistics.pstdev(v.outcome for v in verdicts),
        "train/response_tokens": statistics.fmean(lengths),
        "train/groups_without_signal_share": statistics.fmean(without_signal(group, algorithm) for group in groups),
        "train/siblings_without_verdict": float(len(pairs) - len(verdicts)),
        "judge/agreement_std": statistics.fmean(v.agreement for v in verdicts),
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


def without_signal(group: JudgedGroup, algorithm: AlgorithmConfig) -> bool:
    """Whether its verdicts, before any penalty, are all alike to the estimator: nothing to learn from."""
    judged = zip(group.rollouts, group.verdicts, strict=True)
    return teaches_nothing([rewards_of(r, v) for r, v in judged if isinstance(v, Verdict)], algorithm)


def score_length_correlation(pairs: Sequence[tuple[Rollout, object]]) -> float | None:
    """Pearson's, over a batch; None where one of the two doesn't vary."""
    points = [(r.num_sampled_tokens, v.score) for r, v in pairs if isinstance(v, Verdict)]
    lengths, scores = [float(x) for x, _ in points], [y for _, y in points]
    if len(set(lengths)) < 2 or len(set(scores)) < 2:
        return None
    return statistics.correlation(lengths, scores)
