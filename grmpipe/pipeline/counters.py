"""Counts of tokens, judgements and failures by cause, per step and in total; metrics of a step. Decides nothing."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from grmpipe.algorithm.advantages import all_advantages_zero
from grmpipe.algorithm.rewards import place_rewards
from grmpipe.config.train import AlgorithmConfig
from grmpipe.counts import Counts
from grmpipe.judge.composition.cascade_counts import CascadeCounts
from grmpipe.judge.monitor.position_bias import correlation
from grmpipe.pipeline.env_counts import EnvCounts
from grmpipe.pipeline.interfaces import RolloutKey, StepReport, UncountedWork
from grmpipe.pipeline.learner_pace import with_pace
from grmpipe.pipeline.stall_times import StallTimes
from grmpipe.types import FailedJudgement, JudgedGroup, JudgeReport, Metrics, Rollout, Verdict
from scheduler.admission import Ledger


@dataclass(slots=True)
class JudgeCounts(Counts):
    """Counts of one judge, or of all judges together."""

    asked: int = 0  # judgements requested, retries included
    counted: int = 0  # judgements that entered a vote
    forced: int = 0  # of these, judgements whose thought the budget ended
    judge_tokens: int = 0
    kept_tokens: int = 0  # of these, tokens from before a resume
    failed: Counter[str] = field(default_factory=Counter)  # judgements by cause
    saved_tokens: int = 0  # in judgements that an early stop left out; a lower bound
    audits: int = 0  # rollouts judged in full to check the early stop
    audit_error: float = 0.0  # sum, in score units, of the differences between the vote at the stop and the full one
    verdicts: int = 0
    failed_verdicts: int = 0  # without abstentions
    scores: float = 0.0  # sum over verdicts
    score_stds: float = 0.0  # sum over verdicts

    @property
    def early_stop_error(self) -> float | None:
        """The mean error of early stops, in score units. None without an audit."""
        return self.audit_error / self.audits if self.audits else None

    def report(self, report: JudgeReport) -> None:
        """Count a judge's own report."""
        generated = [f.completion for f in report.failures if isinstance(f, FailedJudgement)]
        generated += [judgement.completion for judgement in report.judgements]
        if report.principles is not None:
            generated.append(report.principles)
            self.asked += 1
        if (audit := report.audit) is not None:
            self.audits += 1
            self.audit_error += abs(audit.stopped_score - audit.full_score)
        self.saved_tokens += report.saved_tokens
        self.asked += len(report.judgements) + len(report.failures)
        self.counted += len(report.judgements)
        self.forced += sum(judgement.is_forced for judgement in report.judgements)
        self.judge_tokens += sum(completion.num_tokens for completion in generated)
        self.failed.update(failure.cause for failure in report.failures)
        if isinstance(verdict := report.verdict, Verdict):
            self.verdicts += 1
            self.scores += verdict.score
            self.score_stds += verdict.score_std
        elif verdict.cause != "undecided":
            self.failed_verdicts += 1

    def metrics(self, seconds: float) -> Metrics:
        """Metrics of the judgements that ended in a step of `seconds`."""
        metrics = {
            "asked": float(self.asked),
            "counted": float(self.counted),
            "tokens": float(self.judge_tokens),
            "tokens_per_s": (self.judge_tokens - self.kept_tokens) / seconds,
            **{f"failed_{cause}": float(n) for cause, n in sorted(self.failed.items())},
        }
        if self.forced:
            metrics["forced_verdicts"] = float(self.forced)
        return metrics

    def mean_scores(self) -> Metrics:
        """The mean score, and the mean spread of the votes; empty without a verdict."""
        if not self.verdicts:
            return {}
        return {"score_mean": self.scores / self.verdicts, "score_std": self.score_stds / self.verdicts}

    def early_stop_metrics(self) -> Metrics:
        """What early stops saved, and their error; empty without one."""
        metrics: Metrics = {}
        if self.saved_tokens or self.audits:
            metrics["saved_tokens"] = float(self.saved_tokens)
        if (error := self.early_stop_error) is not None:
            metrics["early_stop_error"] = error
        return metrics


@dataclass(slots=True)
class Counters(Counts):
    """Counts since the last step, or since the run began."""

    rollouts: int = 0
    truncated: int = 0
    policy_tokens: int = 0
    kept_policy_tokens: int = 0  # of these, tokens from before a resume
    aborted: int = 0  # judge tasks aborted because a new version of the judge came
    voided: int = 0  # verdicts that a new version of the judge had to give again
    void_rollouts: int = 0  # finished after a checkpoint and made void by a resume from it; in no other count
    void_policy_tokens: int = 0
    void_asked: int = 0
    void_judge_tokens: int = 0
    judging: JudgeCounts = field(default_factory=JudgeCounts)  # of all judges
    by_judge: dict[str, JudgeCounts] = field(default_factory=dict)  # empty with a single one
    cascades: dict[str, CascadeCounts] = field(default_factory=dict)
    envs: EnvCounts = field(default_factory=EnvCounts)
    stalls: StallTimes = field(default_factory=StallTimes)

    def rollout(self, rollout: Rollout) -> None:
        self.rollouts += 1
        self.truncated += rollout.status == "truncated"
        self.policy_tokens += rollout.num_sampled_tokens
        self.envs.rollout(rollout)

    def report(self, report: JudgeReport) -> None:
        """Count a report: as a whole, by judge if there are several, and what its cascades did."""
        for name, own in report.own_reports.items():
            self.judging.report(own)
            if name:
                self.by_judge.setdefault(name, JudgeCounts()).report(own)
        for event in report.cascades:
            self.cascades.setdefault(event.cascade, CascadeCounts()).count(event)

    def void(self, rollouts: Sequence[Rollout], reports: Sequence[JudgeReport]) -> None:
        """Count work that a resume made void."""
        void = Counters()
        for report in reports:
            void.report(report)
        self.void_rollouts += len(rollouts)
        self.void_policy_tokens += sum(rollout.num_sampled_tokens for rollout in rollouts)
        self.void_asked += void.judging.asked
        self.void_judge_tokens += void.judging.judge_tokens

    def as_kept(self) -> Counters:
        """The same counts, of work from before a resume: its tokens took none of this process's time."""
        self.kept_policy_tokens = self.policy_tokens
        for judge in (self.judging, *self.by_judge.values()):
            judge.kept_tokens = judge.judge_tokens
        return self


class FlowCounters:
    """Counters of a run: `step` restarts with every step, `total` continues over a resume."""

    def __init__(self) -> None:
        self.step = Counters()
        self.total = Counters()

    def add_recovered(self, work: UncountedWork) -> None:
        """Count what was finished after the checkpoint that a resume continues from, in the first step after it."""
        kept = Counters()
        for rollout in work.rollouts:
            kept.rollout(rollout)
        for report in work.reports:
            kept.report(report)
        kept.void(work.void_rollouts, work.void_reports)
        self.step += kept.as_kept()

    def add_stalls(self, times: StallTimes) -> None:
        """Add the stall times of a step, at its end."""
        self.step.stalls += replace(times, envs_s=self.step.envs.stall_s(times.rollouts_s))

    def close_step(self) -> Counters:
        """Return this step's counts and add them to the totals."""
        closed, self.step = self.step, Counters()
        self.total += closed
        return closed

    def total_so_far(self) -> Counters:
        """The totals, including the open step."""
        return self.total + self.step

    def restore(self, saved: Mapping[str, object], saved_step: Mapping[str, object]) -> None:
        """The counts of all closed steps and of the open one from a checkpoint: the metrics of its end lack nothing."""
        self.total = Counters.restore(saved)
        self.step = Counters.restore(saved_step).as_kept()


def step_metrics(
    report: StepReport,
    counts: Counters,
    ledger: Ledger,
    right: Mapping[RolloutKey, float],
    algorithm: AlgorithmConfig,
) -> Metrics:
    """All metrics of one step. right: by the rule, of its rollouts."""
    return {
        **flow_metrics(counts, report.stalls.steps_s),
        **batch_metrics(report.groups, report.step - 1, algorithm),
        **truth_metrics(right),
        **with_pace(report.learner, report.learner_busy_s),
        "time/step_s": report.stalls.steps_s,
        "time/train_s": report.learner_busy_s,
        **{f"stall/{name}": seconds for name, seconds in asdict(report.stalls).items() if name != "steps_s"},
        "stall/envs_s": counts.envs.stall_s(report.stalls.rollouts_s),
        "stall/groups_s": report.stalls.for_groups_s,
        "stall/engines_idle_s": report.policy_idle_s,
        "sync/push_s": report.sync.seconds,
        "sync/pause_s": report.sync.pause_seconds,
        "sync/bytes": float(report.sync.num_bytes),
        "sync/probe_error_nats": report.sync.probe_error,
        "groups/in_flight": float(ledger.in_flight),
        **{f"groups/dropped_{cause}": float(count) for cause, count in ledger.dropped.items()},
    }


def truth_metrics(right: Mapping[RolloutKey, float]) -> Metrics:
    """How right a batch is by the rule, on average. Empty if there are no references."""
    return {"train/true_accuracy": statistics.fmean(right.values())} if right else {}


def flow_metrics(counts: Counters, seconds: float) -> Metrics:
    """Metrics of the rollouts and judgements that ended in a step of `seconds`."""
    judging = counts.judging.metrics(seconds) | counts.judging.early_stop_metrics()
    metrics = {
        "rollout/finished": float(counts.rollouts),
        "rollout/truncated_share": counts.truncated / counts.rollouts if counts.rollouts else 0.0,
        "rollout/tokens": float(counts.policy_tokens),
        "rollout/tokens_per_s": (counts.policy_tokens - counts.kept_policy_tokens) / seconds,
        **{f"judge/{key}": value for key, value in judging.items()},
        "judge/aborted_tasks": float(counts.aborted),
        "judge/voided_verdicts": float(counts.voided),
        **counts.envs.metrics(),
    }
    for name, judge in counts.by_judge.items():
        own = judge.metrics(seconds) | judge.mean_scores()
        metrics |= {f"judge/{name}/{key}": value for key, value in own.items()}
    for name, cascade in counts.cascades.items():
        metrics |= {f"cascade/{name}/{key}": value for key, value in cascade_metrics(cascade).items()}
    return metrics


def cascade_metrics(counts: CascadeCounts) -> Metrics:
    """Metrics of a cascade: what it escalated, and the error of its sure verdicts as far as the audit knows it."""
    known = {
        "audit_error": counts.mean_error,
        "audit_error_se": counts.standard_error,
        "flipped_share": counts.flipped_share,
    }
    return {
        "rollouts": float(counts.rollouts),
        "unsure_share": counts.unsure_share,
        "escalated_share": counts.escalated_share,
        "audited": float(counts.audited),
        **{name: value for name, value in known.items() if value is not None},
    }


def batch_metrics(groups: Sequence[JudgedGroup], version: int, algorithm: AlgorithmConfig) -> Metrics:
    """Metrics of the batch that version `version` was trained on: scores, rewards, lengths, staleness."""
    pairs = [pair for group in groups for pair in zip(group.rollouts, group.verdicts, strict=True)]
    lengths = [rollout.num_sampled_tokens for rollout, _ in pairs]
    valid = [(length, v) for length, (_, v) in zip(lengths, pairs, strict=True) if isinstance(v, Verdict)]
    verdicts = [verdict for _, verdict in valid]
    ages = [version - group.version for group in groups]
    metrics = {
        "train/grm_score": statistics.fmean(v.score for v in verdicts),
        "train/reward": statistics.fmean(v.outcome for v in verdicts),
        "train/reward_std": statistics.pstdev(v.outcome for v in verdicts),
        **spread("response_length/", lengths),
        **spread("prompt_length/", [len(rollout.turns[0].new_ids) for rollout, _ in pairs if rollout.turns]),
        "train/zero_advantage_share": statistics.fmean(has_zero_advantages(group, algorithm) for group in groups),
        "train/siblings_without_verdict": float(len(pairs) - len(verdicts)),
        "judge/score_std": statistics.fmean(v.score_std for v in verdicts),
        "staleness/mean": statistics.fmean(ages),
        "staleness/max": float(max(ages)),
    }
    correlated = correlation([float(length) for length, _ in valid], [verdict.score for verdict in verdicts])
    if correlated is not None:
        metrics["judge/score_length_correlation"] = correlated
    for name in sorted({name for verdict in verdicts for name in verdict.breakdown}):
        parts = [verdict.breakdown[name] for verdict in verdicts if name in verdict.breakdown]
        metrics |= {**spread(f"reward/{name}_", parts), f"reward/{name}_std": statistics.pstdev(parts)}
    return metrics


def spread(name: str, values: Sequence[float]) -> Metrics:
    """Mean and bounds of values, as metrics whose names begin with `name`."""
    if not values:
        return {}
    return {
        f"{name}mean": statistics.fmean(values),
        f"{name}min": float(min(values)),
        f"{name}max": float(max(values)),
    }


def has_zero_advantages(group: JudgedGroup, algorithm: AlgorithmConfig) -> bool:
    """Whether the estimator gives all siblings an advantage of zero, before any penalty: nothing to learn from."""
    judged = zip(group.rollouts, group.verdicts, strict=True)
    return all_advantages_zero([place_rewards(r, v) for r, v in judged if isinstance(v, Verdict)], algorithm)
