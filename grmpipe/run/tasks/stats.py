"""The statistics of a run, including before resumes: time by role, and the summary."""

import os
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

from grmpipe.config.keys.entry_names import POLICY
from grmpipe.config.run_config import RunConfig
from grmpipe.envs.opened_envs import OpenedEnvs
from grmpipe.judge.composition.cascade_counts import CascadeCounts
from grmpipe.observe.summary import (
    CascadeSummary,
    EnvSummary,
    EvalSummary,
    GroupsSummary,
    HeldOutEpisodes,
    JudgeSummary,
    JudgingSummary,
    Summary,
    SyncSummary,
    TeachingSummary,
    VoidedWork,
)
from grmpipe.pipeline.counters import Counters, EnvCounts, JudgeCounts
from grmpipe.pipeline.interfaces import PipelineState
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.pipeline.stall_times import Setup, bottleneck
from grmpipe.roles.roles import resolve_engine
from grmpipe.run.build.start import Running
from grmpipe.run.features.cotrain.cotraining import CoTrainings
from grmpipe.run.features.engine_counts import EngineCounts
from grmpipe.run.features.periodic_eval import PeriodicEval
from grmpipe.run.features.watching_judges import WatchingJudges, summaries
from grmpipe.run_dir.run_state import RunState
from grmpipe.scheduler.placement import ClusterConfig, PoolConfig
from grmpipe.train.critic.critic_ranks import CriticLearnerRanks
from grmpipe.types import Metrics


class RunStats:
    """Statistics of the started components, and of the state that a resume continues from."""

    def __init__(self, config: RunConfig, before: RunState, predicted_pause_s: float | None = None) -> None:
        """before: the state that a resume continues from. predicted_pause_s: the plan's, of a push."""
        self.learner_busy_s = 0.0
        self.cotrainings = CoTrainings()  # set once they are started
        self._running: Running | None = None
        self._config = config
        self._grms = config.asked.roles
        self._before = before
        self._predicted_pause_s = predicted_pause_s

    def watch(self, running: Running) -> None:
        """Take statistics from the started components from now on."""
        self._running = running

    @property
    def grm_versions(self) -> dict[str, int]:
        """Model that judges -> its completed optimizer steps, or those of the policy whose weights it took over; 0 if
        its weights never change.
        """
        before = {role: one.version for role, one in self._before.grm_pipeline_states.items()}
        trained = before | self.cotrainings.versions
        updated = self._running.policy_updates.versions if self._running is not None else {}
        return dict.fromkeys(self._grms, 0) | trained | updated

    def busy_s(self, pipeline: Pipeline | None) -> dict[str, float]:
        """Role -> seconds with at least one training request in flight; for the learner, seconds in its calls."""
        busy: defaultdict[str, float] = defaultdict(float, self._before.busy_s)
        busy["learner"] += self.learner_busy_s
        for model in self._running.trained if self._running is not None else ():
            if isinstance(model.ranks, CriticLearnerRanks):
                busy[model.learner_role] += model.ranks.busy_s
        for role, seconds in self.cotrainings.learner_busy_s.items():
            busy[role] += seconds
        if pipeline is not None:
            busy[POLICY] += pipeline.playing_s
            for role, seconds in self._judging_busy_s(pipeline).items():
                busy[role] += seconds
        return {role: round(seconds, 3) for role, seconds in busy.items()}

    def _judging_busy_s(self, pipeline: Pipeline) -> dict[str, float]:
        """Model that judges or teaches -> seconds with requests in flight; if there are several, in evaluations too."""
        if len(self._grms) == 1:
            return {self._grms[0]: pipeline.judging_s}
        if self._running is None:
            return {}
        busy: dict[str, float] = defaultdict(float)
        for role, model in self._running.models.items():
            if model.grm is not None:
                busy[role] += model.grm.busy_s
        for role, teacher in self._running.teachers.items():
            busy[role] += teacher.meter.busy_s
        return {role: busy[role] for role in self._grms if role in busy}

    def _with_counts(self, envs: EnvSummary, held_out: EnvCounts) -> EnvSummary:
        """With held-out episodes, and with what became of the environments that this process opened."""
        counts = self._running.envs.counts if self._running is not None else OpenedEnvs()
        episodes = HeldOutEpisodes(
            episodes=held_out.episodes,
            turns=held_out.turns,
            faults=dict(held_out.faults),
            failed_episodes=held_out.failed,
        )
        return replace(envs, opened=counts.opened, closed=counts.closed, killed=counts.killed, held_out=episodes)

    def results(
        self,
        pipeline: Pipeline | None,
        features: Mapping[str, Mapping[str, Any]],
        eval_final: Metrics,
        alarms: tuple[str, ...],
    ) -> Summary:
        """pipeline: None for a run that may fail before it has one. features: their states, by name."""
        evaluation, engines = features.get(PeriodicEval.name, {}), features.get(EngineCounts.name, {})
        before = self._before
        state = pipeline.state() if pipeline else before.pipeline_state
        total = (
            pipeline.counters.total_so_far()
            if pipeline
            else Counters.restore(before.totals) + Counters.restore(before.open_counts)
        )
        versions = {POLICY: state.version} | self.grm_versions
        if self._config.critic.enabled:
            versions["critic"] = state.version  # every batch is also a step of the critic
        return Summary(
            steps=state.version,
            versions=versions,
            eval=EvalSummary(initial=evaluation.get("initial", {}), final=eval_final),
            busy_s=self.busy_s(pipeline),
            judging=summarize_judging(total),
            teaching=TeachingSummary(
                scored=total.teaching.scored, tokens=total.teaching.tokens, failed=dict(total.teaching.failed)
            ),
            watching=summaries(features.get(WatchingJudges.name, {})),
            envs=self._with_counts(env_summary(total.envs), EnvCounts.restore(evaluation.get("episodes", {}))),
            groups=groups_summary(state, self._config.train.groups_per_batch),
            voided_by_resumes=VoidedWork(
                rollouts=total.void_rollouts,
                rollout_tokens=total.void_policy_tokens,
                judgements=total.void_asked,
                judgement_tokens=total.void_judge_tokens,
            ),
            max_staleness_trained=state.max_staleness_trained,
            sync=SyncSummary(
                pause_s=round(total.push_pause_s / state.version, 4) if state.version else None,
                predicted_pause_s=self._predicted_pause_s,
            ),
            engines_replaced=engines.get("replaced", {}),
            moves=engines.get("moves", {}),
            bottleneck=bottleneck(total.stalls, read_setup(self._config)),
            alarms=alarms,
        )


def read_setup(config: RunConfig) -> Setup:
    """The settings that decide which advice can shorten a run's stalls."""
    judging = config.judging
    judge: Literal["here", "outside"] | None = "here" if config.judged_by_model else None
    endpoints = [resolve_engine(role, config).endpoint for role in judging.remote_roles]
    elastic = {name for name, pool in config.placement.pools.items() if pool.elastic}
    pools = {role: where.pool for role, where in config.placement.roles.items() if role in config.served}
    return Setup(
        judge="outside" if judging.roles and not judging.local_roles else judge,
        grms=judging.host_roles or (POLICY,),
        num_judgements=max((judge.num_judgements for judge in judging.generative.values()), default=1),
        max_staleness=config.train.max_staleness,
        rate_limited=any(endpoint is not None and endpoint.is_limited for endpoint in endpoints),
        env_hosts=config.places_envs,
        cores_taken=count_taken_cores(config.cluster, config.placement.pools.values()),
        elastic_pools={role: pool for role, pool in pools.items() if pool in elastic},
    )


def count_taken_cores(cluster: ClusterConfig, pools: Collection[PoolConfig]) -> int:
    """The cores of this machine, if the run's slots are on them and leave none free; else 0."""
    cores = os.cpu_count() or 1
    is_here = not cluster.is_joined and all(pool.resource == "cpu" for pool in pools)
    return cores if is_here and sum(pool.slots for pool in pools) >= cores else 0


def groups_summary(state: PipelineState, groups_per_batch: int) -> GroupsSummary:
    trained, dropped, in_flight = state.version * groups_per_batch, sum(state.dropped.values()), len(state.in_flight)
    return GroupsSummary(
        submitted=trained + dropped + in_flight, trained=trained, dropped=state.dropped, in_flight=in_flight
    )


def summarize_judging(total: Counters) -> JudgingSummary:
    return JudgingSummary(
        **judgement_totals(total.judging),
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


def judgement_totals(counts: JudgeCounts) -> dict[str, Any]:
    """The fields of JudgementTotals."""
    return {
        "asked": counts.asked,
        "counted": counts.counted,
        "forced_verdicts": counts.forced,
        "asked_verdicts": counts.asked_verdicts,
        "asked_verdicts_read": counts.asked_verdicts_read,
        "tool_calls": counts.tool_calls,
        "called_tools": counts.called_tools,
        "failed": counts.failed,
        "tokens": counts.judge_tokens,
        "saved_by_early_stop": counts.saved_tokens,
        "early_stop_error": counts.early_stop_error,
    }


def judge_summary(counts: JudgeCounts) -> JudgeSummary:
    return JudgeSummary(**judgement_totals(counts), score_mean=counts.mean_scores().get("score_mean"))


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
