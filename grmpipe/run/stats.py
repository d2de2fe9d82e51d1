"""The statistics of a run, including before resumes: time by role, and the summary. Changes nothing."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from grmpipe.config.roles import resolve_engine
from grmpipe.config.run_config import RunConfig
from grmpipe.observe.summary import EvalSummary, GroupsSummary, JudgingSummary, Status, Summary
from grmpipe.pipeline.bottleneck import Setup, bottleneck
from grmpipe.pipeline.counters import Counters
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.pipeline.stall_times import StallTimes
from grmpipe.run.cotrain.cotraining import CoTraining
from grmpipe.run.start import RunComponents
from grmpipe.run_dir.run_state import RunState
from grmpipe.train.critic.critic import Critic
from grmpipe.types import Metrics
from scheduler.processes.actors import Cluster
from scheduler.processes.cpu_time import cpu_seconds
from scheduler.routing.scorers import ScorerPool
from scheduler.slots.elastic import ElasticPool
from scheduler.slots.health import RoleHealth


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The progress of the flow."""

    version: int = 0
    judging: JudgingSummary = field(default_factory=JudgingSummary)
    groups: GroupsSummary = field(default_factory=GroupsSummary)
    max_staleness_trained: int = 0
    stalls: StallTimes = field(default_factory=StallTimes)


class RunStats:
    def __init__(self, config: RunConfig) -> None:
        self.before = RunProgress()  # the state that a resume continues from
        self.learner_busy_s = 0.0
        self.cotraining: CoTraining | None = None  # set once it is started
        self.critic: Critic | None = None
        self.health: tuple[RoleHealth, ...] = ()  # of the engines; set once they are started
        self.elastic: tuple[ElasticPool, ...] = ()
        self.scorers: ScorerPool | None = None
        self._grm = "grm" if config.judged_by_model else None
        self._asks_critic = config.critic.enabled
        self._setup = setup_of(config)
        self._began_s = time.monotonic()
        self._wall_before_s = 0.0
        self._busy_before_s: Mapping[str, float] = {}
        self._replaced_before: Mapping[str, int] = {}
        self._moves_before: Mapping[str, int] = {}
        self._grm_version_before = 0
        self.cluster: Cluster | None = None
        self._roles = config.roles
        self._cpu_s_at_begin = self._cpu_s()

    def watch(self, running: RunComponents) -> None:
        """Take statistics from the started components from now on."""
        self.cluster, self.scorers, self.critic = running.cluster, running.scorers, running.critic
        self.health, self.elastic = running.maintenance.health, running.maintenance.elastic

    @property
    def since_start_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def wall_s(self) -> float:
        return round(self._wall_before_s + self.since_start_s, 3)

    def restore(self, state: RunState, groups_per_batch: int) -> None:
        self._wall_before_s, self._busy_before_s = state.wall_s, state.busy_s
        self._replaced_before, self._moves_before = state.engines_replaced, state.moves
        self._grm_version_before = state.grm_pipeline_state.version if state.grm_pipeline_state is not None else 0
        self.before = progress_at(state, groups_per_batch)

    @property
    def grm_version(self) -> int:
        """The GRM's completed optimizer steps; 0 if it isn't trained."""
        return self.cotraining.version if self.cotraining is not None else self._grm_version_before

    @property
    def engines_replaced(self) -> dict[str, int]:
        """Role -> number of replaced engines."""
        replaced = Counter(self._replaced_before)
        replaced.update({health.role: health.num_replaced for health in self.health})
        if self.scorers is not None:
            replaced[self.scorers.role] += self.scorers.num_replaced
        return dict(replaced)

    @property
    def moves(self) -> dict[str, int]:
        """Direction ("policy->grm") -> number of moves of elastic slots."""
        moves = Counter(self._moves_before)
        for pool in self.elastic:
            moves.update(pool.moves)
        return dict(moves)

    def slot_metrics(self) -> Metrics:
        """The roles of elastic slots, and the number of their moves; empty without elastic slots."""
        if not self.elastic:
            return {}
        slots = Counter[str]()
        for pool in self.elastic:
            slots.update(pool.slots_by_role)
        return {f"slots/{role}": float(count) for role, count in slots.items()} | {
            "moves/total": float(sum(self.moves.values()))
        }

    def driver_metrics(self) -> Metrics:
        """CPU seconds of the step that ends: of the driver process, and of each role whose processes are all on this
        machine.
        """
        began_s, now_s = self._cpu_s_at_begin, self._cpu_s()
        return {f"{name}/cpu_s": max(0.0, now_s[name] - began_s[name]) for name in now_s if name in began_s}

    def step_begins(self) -> None:
        """Mark the beginning of a step: the time between two steps (evaluations, checkpoints) counts in neither."""
        self._cpu_s_at_begin = self._cpu_s()

    def _cpu_s(self) -> dict[str, float]:
        """Role -> CPU seconds so far."""
        ids = {role: self.cluster.process_ids(role) for role in self._roles} if self.cluster is not None else {}
        return {"driver": time.process_time()} | {role: cpu_seconds(found) for role, found in ids.items() if found}

    def busy_s(self, pipeline: Pipeline | None) -> dict[str, float]:
        """Role -> seconds with at least one training request in flight; for the learner, seconds in its calls."""
        busy: defaultdict[str, float] = defaultdict(float, self._busy_before_s)
        busy["learner"] += self.learner_busy_s
        if self.critic is not None:
            busy["critic"] += self.critic.ranks.busy_s
        if self.cotraining is not None:
            busy["grm_learner"] += self.cotraining.learner_busy_s
        if pipeline is not None:
            busy["policy"] += pipeline.producer.playing.meter.busy_s
            if self._grm is not None:
                busy[self._grm] += pipeline.producer.judging.meter.busy_s
        return {role: round(seconds, 3) for role, seconds in busy.items()}

    def _versions(self, version: int) -> dict[str, int]:
        """Model name -> version. Every batch is also a step of the critic."""
        versions = {"policy": version}
        if self._grm is not None:
            versions[self._grm] = self.grm_version
        if self._asks_critic:
            versions["critic"] = version
        return versions

    def summary(
        self,
        status: Status,
        failure: str | None,
        pipeline: Pipeline | None,
        eval_initial: Metrics,
        eval_final: Metrics,
        alarms: tuple[str, ...],
    ) -> Summary:
        progress = progress_of(pipeline) if pipeline else self.before
        return Summary(
            status=status,
            steps=progress.version,
            versions=self._versions(progress.version),
            wall_s=self.wall_s,
            eval=EvalSummary(initial=eval_initial, final=eval_final),
            busy_s=self.busy_s(pipeline),
            judging=progress.judging,
            groups=progress.groups,
            max_staleness_trained=progress.max_staleness_trained,
            engines_replaced=self.engines_replaced,
            moves=self.moves,
            bottleneck=bottleneck(progress.stalls, self._setup),
            alarms=alarms,
            failure=failure,
        )


def setup_of(config: RunConfig) -> Setup:
    """The settings that decide which advice can shorten a run's stalls."""
    judge: Literal["here", "outside"] | None = "here" if config.judged_by_model else None
    return Setup(
        judge="outside" if config.judge_is_remote else judge,
        num_judgements=config.judge.num_judgements,
        max_staleness=config.train.max_staleness,
        rate_limited=is_rate_limited(config),
        elastic_pools=elastic_pools(config),
    )


def elastic_pools(config: RunConfig) -> dict[str, str]:
    """Role -> its elastic pool."""
    placement = config.placement
    served = {role: where.pool for role, where in placement.roles.items() if role in config.served}
    return {role: pool for role, pool in served.items() if pool in placement.pools and placement.pools[pool].elastic}


def is_rate_limited(config: RunConfig) -> bool:
    """Whether requests to a remote judge are rate-limited here."""
    endpoint = resolve_engine("grm", config).endpoint if config.judge_is_remote else None
    return endpoint is not None and endpoint.is_limited


def progress_of(pipeline: Pipeline) -> RunProgress:
    ledger = pipeline.ledger
    total = pipeline.counters.total_so_far()
    return RunProgress(
        version=pipeline.version,
        judging=judging(total),
        groups=GroupsSummary(
            submitted=ledger.submitted, trained=ledger.trained, dropped=ledger.dropped, in_flight=ledger.in_flight
        ),
        max_staleness_trained=pipeline.buffer.max_staleness_trained,
        stalls=total.stalls,
    )


def progress_at(state: RunState, groups_per_batch: int) -> RunProgress:
    """The progress of a resumed run that has no pipeline yet, and may fail before it has one."""
    pipeline_state, trained = state.pipeline_state, state.pipeline_state.version * groups_per_batch
    total = Counters.restored(state.totals)
    return RunProgress(
        version=pipeline_state.version,
        judging=judging(total),
        groups=GroupsSummary(
            submitted=trained + sum(pipeline_state.dropped.values()) + len(pipeline_state.in_flight),
            trained=trained,
            dropped=pipeline_state.dropped,
            in_flight=len(pipeline_state.in_flight),
        ),
        max_staleness_trained=pipeline_state.max_staleness_trained,
        stalls=total.stalls,
    )


def judging(total: Counters) -> JudgingSummary:
    return JudgingSummary(
        asked=total.asked,
        counted=total.counted,
        forced_verdicts=total.forced,
        failed=total.failed,
        tokens=total.judge_tokens,
        saved_by_early_stop=total.saved_tokens,
        early_stop_error=total.audit_error / total.audits if total.audits else None,
        aborted_tasks=total.aborted,
        voided_verdicts=total.voided,
    )
