"""Counts of tokens, judgements, episodes, and failures by cause, per step and in total."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from grmpipe.counts import Counts
from grmpipe.judge.composition.cascade_counts import CascadeCounts
from grmpipe.judge.protocols.rubric_counts import RubricCounts
from grmpipe.pipeline.interfaces import UncountedWork
from grmpipe.pipeline.stall_times import StallTimes
from grmpipe.types import Failed, FailedJudgement, JudgeReport, Metrics, Rollout, TeacherScores, Verdict


@dataclass(slots=True)
class EnvCounts(Counts):
    """Counts of episodes in an environment that takes time or may fail; all zero in a run of single turns.

    rewritten:     turns after a history that a workflow rewrote, or of a parallel one.
    faults:        failures of the environment, by cause: one for each episode that it failed.
    failed:        siblings whose episodes all failed.
    policy_faults: what the policy did wrong, by kind.
    truncated:     episodes by what truncated them; single turns count, too.
    rewards:       sums of the rewards that environments gave, by name; rewarded: the episodes that have one.
    tokens:        prompts, completions and observations, each counted once.
    prefilled:     tokens of prompts that engines computed; more than `tokens` if they compute turns again.
    boot_s, step_s: times in this step and process only, from which quantiles are taken.
    """

    episodes: int = 0
    turns: int = 0
    rewritten: int = 0
    tokens: int = 0
    prefilled: int = 0
    failed: int = 0
    env_s: float = 0.0
    took_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    policy_faults: Counter[str] = field(default_factory=Counter)
    truncated: Counter[str] = field(default_factory=Counter)
    rewards: Counter[str] = field(default_factory=Counter)
    rewarded: Counter[str] = field(default_factory=Counter)
    boot_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def rollout(self, rollout: Rollout) -> None:
        if rollout.reason:
            self.truncated[rollout.reason] += 1
        if not rollout.took_s:
            return
        self.rewards.update(rewards := rollout.env_rewards)
        self.rewarded.update(rewards.keys())
        self.episodes += 1
        self.turns += len(rollout.turns)
        self.rewritten += sum(turn.rewritten for turn in rollout.turns)
        self.tokens += sum(len(turn.new_ids) for turn in rollout.turns) + rollout.num_sampled_tokens
        self.prefilled += sum(map(len, rollout.prompts()))
        self.prefilled -= sum(turn.completion.cached_tokens for turn in rollout.turns)
        self.env_s += rollout.env_s
        self.took_s += rollout.took_s
        self.boot_s.append(rollout.boot_s)
        self.step_s += [turn.env_s for turn in rollout.turns]
        self.faults.update(failure.cause for failure in rollout.env_failures)
        self.policy_faults.update(kind for turn in rollout.turns for kind in turn.faults)

    def episode_failed(self, failures: Sequence[Failed]) -> None:
        """Count a sibling whose episodes all failed."""
        self.failed += 1
        self.faults.update(failure.cause for failure in failures)

    @property
    def time_share(self) -> float:
        """The environments' share of the time of all episodes."""
        return self.env_s / self.took_s if self.took_s else 0.0

    def stall_s(self, rollouts_s: float) -> float:
        """The part of a wait for rollouts for which the environments are to blame: an estimate."""
        return rollouts_s * self.time_share

    def metrics(self) -> Metrics:
        """Metrics of a step; without an environment only what truncated the rollouts."""
        metrics = {f"rollout/truncated_{reason}": float(n) for reason, n in sorted(self.truncated.items())}
        if self.episodes + self.failed == 0:
            return metrics
        metrics |= {f"env/faults_{cause}": float(n) for cause, n in sorted(self.faults.items())}
        metrics |= {f"env/policy_faults_{kind}": float(n) for kind, n in sorted(self.policy_faults.items())}
        metrics |= {f"env/reward_{name}": total / self.rewarded[name] for name, total in sorted(self.rewards.items())}
        metrics["env/failed_episodes"] = float(self.failed)
        metrics["env/time_share"] = self.time_share
        if self.episodes:
            metrics["env/turns_mean"] = self.turns / self.episodes
            metrics["env/prefilled_share"] = self.prefilled / self.tokens
            if self.rewritten:
                metrics["env/rewritten_share"] = self.rewritten / self.turns
        if self.boot_s:
            metrics["env/boot_s_mean"] = statistics.fmean(self.boot_s)
            metrics["env/step_s_p50"], metrics["env/step_s_p95"] = np.quantile(self.step_s, [0.5, 0.95]).tolist()
        return metrics


@dataclass(slots=True)
class JudgeCounts(Counts):
    """Counts of one judge, or of all judges together."""

    asked: int = 0  # judgements requested, retries included
    counted: int = 0  # judgements that entered a vote
    forced: int = 0  # judgements whose thought the budget ended
    asked_verdicts: int = 0  # judgements without a verdict that were asked for it
    asked_verdicts_read: int = 0  # those of them that then had one
    tool_calls: int = 0
    called_tools: int = 0  # judgements with calls
    judge_tokens: int = 0
    kept_tokens: int = 0  # those of them from before a resume
    drafted_tokens: int = 0  # by speculative decoding
    accepted_tokens: int = 0  # those of them that judgements contain
    failed: Counter[str] = field(default_factory=Counter)  # judgements by cause
    saved_tokens: int = 0  # in judgements that an early stop left out; a lower bound
    audits: int = 0  # rollouts judged in full to check the early stop
    audit_error: float = 0.0  # sum, in score units, of the differences between the vote at the stop and the full one
    verdicts: int = 0
    failed_verdicts: int = 0  # without abstentions
    scores: float = 0.0  # sum over verdicts
    score_stds: float = 0.0  # sum over verdicts
    rubric: RubricCounts = field(default_factory=RubricCounts)

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
        self.asked_verdicts += sum(completion.has_asked_verdict for completion in generated)
        self.asked_verdicts_read += sum(one.completion.has_asked_verdict for one in report.judgements)
        self.tool_calls += sum(completion.num_calls for completion in generated)
        self.called_tools += sum(bool(completion.tool_results) for completion in generated)
        self.judge_tokens += sum(completion.num_generated for completion in generated)
        self.drafted_tokens += sum(completion.drafted_tokens for completion in generated)
        self.accepted_tokens += sum(completion.accepted_tokens for completion in generated)
        self.failed.update(failure.cause for failure in report.failures)
        self.rubric.add(report.criteria)
        if isinstance(verdict := report.verdict, Verdict):
            if not verdict.rewards:
                return
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
            **self.rubric.metrics(),
        }
        if self.forced:
            metrics["forced_verdicts"] = float(self.forced)
        if self.asked_verdicts:
            metrics["asked_verdicts"] = float(self.asked_verdicts)
            metrics["asked_verdicts_read"] = float(self.asked_verdicts_read)
        if self.tool_calls:
            metrics |= {"tool_calls": float(self.tool_calls), "called_tools": float(self.called_tools)}
        if self.drafted_tokens:
            metrics |= {"drafted_tokens": float(self.drafted_tokens), "accepted_tokens": float(self.accepted_tokens)}
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
class TeacherCounts(Counts):
    """Counts of one teacher."""

    scored: int = 0  # rollouts
    tokens: int = 0  # in their completions
    failed: Counter[str] = field(default_factory=Counter)  # rollouts by cause

    def count(self, taught: TeacherScores | Failed) -> None:
        if isinstance(taught, Failed):
            self.failed[taught.cause] += 1
        else:
            self.scored += 1
            self.tokens += sum(len(scores.logprobs_N) for scores in taught.by_turn)


@dataclass(slots=True)
class Counters(Counts):
    """Counts since the last step, or since the run began."""

    rollouts: int = 0
    truncated: int = 0
    forced: int = 0  # rollouts in which the thinking budget ended a thought
    policy_tokens: int = 0
    kept_policy_tokens: int = 0  # those of them from before a resume
    aborted: int = 0  # judge tasks aborted because a new version of the judge came
    voided: int = 0  # verdicts that a new version of the judge had to give again
    void_rollouts: int = 0  # finished after a checkpoint and made void by a resume from it; in no other count
    void_policy_tokens: int = 0
    void_asked: int = 0
    void_judge_tokens: int = 0
    judging: JudgeCounts = field(default_factory=JudgeCounts)  # all judges together
    by_judge: dict[str, JudgeCounts] = field(default_factory=dict)  # empty with a single one
    cascades: dict[str, CascadeCounts] = field(default_factory=dict)
    teaching: TeacherCounts = field(default_factory=TeacherCounts)  # by all teachers
    envs: EnvCounts = field(default_factory=EnvCounts)
    stalls: StallTimes = field(default_factory=StallTimes)
    push_pause_s: float = 0.0  # while weights were pushed: the part of stalls.weight_sync_s without generation

    def rollout(self, rollout: Rollout) -> None:
        self.rollouts += 1
        self.truncated += rollout.status == "truncated"
        self.forced += any(turn.completion.inserted is not None for turn in rollout.turns)
        self.envs.rollout(rollout)
        self.policy_tokens += rollout.num_sampled_tokens

    def report(self, report: JudgeReport) -> None:
        """Count a report: as a whole, by judge if there are several, and what its cascades did."""
        for name, own in report.own_reports.items():
            self.judging.report(own)
            if name:
                self.by_judge.setdefault(name, JudgeCounts()).report(own)
        if report.taught is not None:
            self.teaching.count(report.taught)
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
        """The same counts for work from before a resume: its tokens took none of this process's time."""
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

    def add_stalls(self, times: StallTimes, push_pause_s: float) -> None:
        """Add the stall times of a step, at its end, and the pause of its push."""
        self.step.stalls += replace(times, envs_s=self.step.envs.stall_s(times.rollouts_s))
        self.step.push_pause_s += push_pause_s

    def close_step(self) -> Counters:
        """Return this step's counts and add them to the totals."""
        closed, self.step = self.step, Counters()
        self.total += closed
        return closed

    def total_so_far(self) -> Counters:
        """The totals, including the open step."""
        return self.total + self.step

    def restore(self, saved: Mapping[str, object], saved_step: Mapping[str, object]) -> None:
        """Take over a checkpoint's counts of closed steps and of the open one, so that its metrics are complete."""
        self.total = Counters.restore(saved)
        self.step = Counters.restore(saved_step).as_kept()
