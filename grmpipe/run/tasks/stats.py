"""The statistics of a run, including before resumes: time by role, and the summary."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from grmpipe.config.entry_names import POLICY
from grmpipe.config.roles import resolve_engine
from grmpipe.config.run_config import RunConfig
from grmpipe.envs.isolation.seat_counts import SeatCounts
from grmpipe.judge.composition.cascade_counts import CascadeCounts
from grmpipe.observe.summary import (
    CascadeSummary,
    EnvSummary,
    EvalSummary,
    GroupsSummary,
    HeldOutEpisodes,
    JudgeSummary,
    JudgingSummary,
    Status,
    Summary,
    VoidedWork,
)
from grmpipe.pipeline.bottleneck import Setup, bottleneck
from grmpipe.pipeline.counters import Counters, JudgeCounts
from grmpipe.pipeline.env_counts import EnvCounts
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.pipeline.stall_times import StallTimes
from grmpipe.run.build.start import RunComponents
from grmpipe.run.features.cotrain.cotrainings import CoTrainings
from grmpipe.run.features.engine_counts import EngineCounts
from grmpipe.run.features.periodic_eval import PeriodicEval
from grmpipe.run_dir.run_state import RunState
from grmpipe.types import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The progress of the flow."""

    version: int = 0
    judging: JudgingSummary = field(default_factory=JudgingSummary)
    envs: EnvSummary = field(default_factory=EnvSummary)
    groups: GroupsSummary = field(default_factory=GroupsSummary)
    max_staleness_trained: int = 0
    stalls: StallTimes = field(default_factory=StallTimes)
    voided: VoidedWork = field(default_factory=VoidedWork)


class RunStats:
    """Statistics of the started components, and of the state that a resume continues from."""

    def __init__(self, config: RunConfig) -> None:
        self.before = RunProgress()  # the state that a resume continues from
        self.learner_busy_s = 0.0
        self.cotrainings = CoTrainings()  # set once they are started
        self._running: RunComponents | None = None
        self._grms = config.judging.roles
        self._asks_critic = config.critic.enabled
        self._setup = setup_of(config)
        self._began_s = time.monotonic()
        self._state: RunState | None = None

    def watch(self, running: RunComponents) -> None:
        """Take statistics from the started components from now on."""
        self._running = running

    @property
    def since_start_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def wall_s(self) -> float:
        before_s = self._state.wall_s if self._state is not None else 0.0
        return round(before_s + self.since_start_s, 3)

    def restore(self, state: RunState, groups_per_batch: int) -> None:
        self._state = state
        self.before = progress_at(state, groups_per_batch)

    @property
    def grm_versions(self) -> dict[str, int]:
        """Model that judges -> its completed optimizer steps, or those of the policy whose weights it took over; 0 if
        its weights never change.
        """
        before = self._state.grm_pipeline_states if self._state is not None else {}
        trained = {role: one.version for role, one in before.items()} | self.cotrainings.versions
        updated = self._running.policy_updates.versions if self._running is not None else {}
        return dict.fromkeys(self._grms, 0) | trained | updated

    def busy_s(self, pipeline: Pipeline | None) -> dict[str, float]:
        """Role -> seconds with at least one training request in flight; for the learner, seconds in its calls."""
        busy: defaultdict[str, float] = defaultdict(float, self._state.busy_s if self._state is not None else {})
        busy["learner"] += self.learner_busy_s
        if self._running is not None and self._running.critic is not None:
            busy["critic"] += self._running.critic.ranks.busy_s
        for role, seconds in self.cotrainings.learner_busy_s.items():
            busy[role] += seconds
        if pipeline is not None:
            busy[POLICY] += pipeline.playing_s
            for role, seconds in self._judging_busy_s(pipeline).items():
                busy[role] += seconds
        return {role: round(seconds, 3) for role, seconds in busy.items()}

    def _judging_busy_s(self, pipeline: Pipeline) -> dict[str, float]:
        """Model that judges -> seconds with requests in flight; of several models, evaluations count too."""
        if len(self._grms) == 1:
            return {self._grms[0]: pipeline.judging_s}
        grms = self._running.grms if self._running is not None else {}
        return {role: grms[role].busy_s for role in self._grms if role in grms}

    def _versions(self, version: int) -> dict[str, int]:
        """Model name -> version. Every batch is also a step of the critic."""
        versions = {POLICY: version}
        versions |= self.grm_versions
        if self._asks_critic:
            versions["critic"] = version
        return versions

    def _with_counts(self, envs: EnvSummary, held_out: EnvCounts) -> EnvSummary:
        """With held-out episodes, and with what became of the environments that this process opened."""
        counts = self._running.envs.counts if self._running is not None else SeatCounts()
        episodes = HeldOutEpisodes(
            episodes=held_out.episodes,
            turns=held_out.turns,
            faults=dict(held_out.faults),
            failed_episodes=held_out.failed,
        )
        return replace(envs, opened=counts.opened, closed=counts.closed, killed=counts.killed, held_out=episodes)

    def summary(
        self,
        status: Status,
        failure: str | None,
        pipeline: Pipeline | None,
        features: Mapping[str, Mapping[str, Any]],
        eval_final: Metrics,
        alarms: tuple[str, ...],
    ) -> Summary:
        """features: their states, by name."""
        evaluation, engines = features.get(PeriodicEval.name, {}), features.get(EngineCounts.name, {})
        progress = progress_of(pipeline) if pipeline else self.before
        return Summary(
            status=status,
            steps=progress.version,
            versions=self._versions(progress.version),
            wall_s=self.wall_s,
            eval=EvalSummary(initial=evaluation.get("initial", {}), final=eval_final),
            busy_s=self.busy_s(pipeline),
            judging=progress.judging,
            envs=self._with_counts(progress.envs, EnvCounts.restored(evaluation.get("episodes", {}))),
            groups=progress.groups,
            voided_by_resumes=progress.voided,
            max_staleness_trained=progress.max_staleness_trained,
            engines_replaced=engines.get("replaced", {}),
            moves=engines.get("moves", {}),
            bottleneck=bottleneck(progress.stalls, self._setup),
            alarms=alarms,
            failure=failure,
        )


def setup_of(config: RunConfig) -> Setup:
    """The settings that decide which advice can shorten a run's stalls."""
    judging = config.judging
    judge: Literal["here", "outside"] | None = "here" if config.judged_by_model else None
    return Setup(
        judge="outside" if judging.roles and not judging.local_roles else judge,
        grms=judging.local_roles or (POLICY,),
        num_judgements=max((judge.num_judgements for judge in judging.generative.values()), default=1),
        max_staleness=config.train.max_staleness,
        rate_limited=is_rate_limited(config),
        env_hosts=config.places_envs,
        elastic_pools=elastic_pools(config),
    )


def elastic_pools(config: RunConfig) -> dict[str, str]:
    """Role -> its elastic pool."""
    placement = config.placement
    served = {role: where.pool for role, where in placement.roles.items() if role in config.served}
    return {role: pool for role, pool in served.items() if pool in placement.pools and placement.pools[pool].elastic}


def is_rate_limited(config: RunConfig) -> bool:
    """Whether requests to a remote judge are rate-limited here."""
    endpoints = [resolve_engine(role, config).endpoint for role in config.judging.remote_roles]
    return any(endpoint is not None and endpoint.is_limited for endpoint in endpoints)


def progress_of(pipeline: Pipeline) -> RunProgress:
    ledger = pipeline.ledger
    total = pipeline.counters.total_so_far()
    return RunProgress(
        version=pipeline.version,
        judging=judging(total),
        envs=env_summary(total.envs),
        groups=GroupsSummary(
            submitted=ledger.submitted, trained=ledger.trained, dropped=ledger.dropped, in_flight=ledger.in_flight
        ),
        max_staleness_trained=pipeline.max_staleness_trained,
        stalls=total.stalls,
        voided=voided_work(total),
    )


def progress_at(state: RunState, groups_per_batch: int) -> RunProgress:
    """The progress of a resumed run that has no pipeline yet, and may fail before it has one."""
    pipeline_state, trained = state.pipeline_state, state.pipeline_state.version * groups_per_batch
    total = Counters.restored(state.totals) + Counters.restored(state.open_counts)
    return RunProgress(
        version=pipeline_state.version,
        judging=judging(total),
        envs=env_summary(total.envs),
        groups=GroupsSummary(
            submitted=trained + sum(pipeline_state.dropped.values()) + len(pipeline_state.in_flight),
            trained=trained,
            dropped=pipeline_state.dropped,
            in_flight=len(pipeline_state.in_flight),
        ),
        max_staleness_trained=pipeline_state.max_staleness_trained,
        stalls=total.stalls,
        voided=voided_work(total),
    )


def voided_work(total: Counters) -> VoidedWork:
    return VoidedWork(
        rollouts=total.void_rollouts,
        rollout_tokens=total.void_policy_tokens,
        judgements=total.void_asked,
        judgement_tokens=total.void_judge_tokens,
    )


def judging(total: Counters) -> JudgingSummary:
    judges = total.judging
    return JudgingSummary(
        asked=judges.asked,
        counted=judges.counted,
        forced_verdicts=judges.forced,
        failed=judges.failed,
        tokens=judges.judge_tokens,
        saved_by_early_stop=judges.saved_tokens,
        early_stop_error=judges.early_stop_error,
        aborted_tasks=total.aborted,
        voided_verdicts=total.voided,
        by_judge={name: judge_summary(counts) for name, counts in total.by_judge.items()},
        cascades={name: cascade_summary(counts) for name, counts in total.cascades.items()},
    )


def env_summary(counts: EnvCounts) -> EnvSummary:
    return EnvSummary(
        episodes=counts.episodes,
        turns=counts.turns,
        faults=dict(counts.faults),
        failed_episodes=counts.failed,
        policy_faults=dict(counts.policy_faults),
        truncated=dict(counts.truncated),
        time_share=round(counts.time_share, 4),
    )


def judge_summary(counts: JudgeCounts) -> JudgeSummary:
    return JudgeSummary(
        asked=counts.asked,
        counted=counts.counted,
        forced_verdicts=counts.forced,
        failed=counts.failed,
        tokens=counts.judge_tokens,
        saved_by_early_stop=counts.saved_tokens,
        early_stop_error=counts.early_stop_error,
        score_mean=counts.scores / counts.verdicts if counts.verdicts else None,
    )


def cascade_summary(counts: CascadeCounts) -> CascadeSummary:
    return CascadeSummary(
        rollouts=counts.rollouts,
        escalated_share=counts.escalated_share,
        unsure_share=counts.unsure_share,
        audited=counts.audited,
        audit_error=counts.mean_error,
        audit_error_se=counts.standard_error,
        flipped_share=counts.flipped_share,
    )
