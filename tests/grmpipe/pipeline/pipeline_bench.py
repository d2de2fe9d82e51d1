"""A pipeline on simulated parts for the tests beside this file: prompts, engines, judges, a trainer, a journal."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.data.stream import EndOfData
from grmpipe.envs.play import RolloutRequest, play_single_turn
from grmpipe.judge.pointwise_adapter import PointwiseAdapter
from grmpipe.judge.protocols.generative import GenerativeJudge
from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine
from grmpipe.models.types import Message, RequestContext, SamplingParams, ToolSpec
from grmpipe.pipeline.health import JudgeHealth, ServiceHealth
from grmpipe.pipeline.interfaces import (
    FlowConfig,
    PipelineComponents,
    PipelineState,
    RecoveredGroup,
    StepReport,
    TrainedBatch,
)
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.scheduler.events import NoEvents
from grmpipe.scheduler.routing.router import Router
from grmpipe.scheduler.weights.weight_sync import SyncReport
from grmpipe.types import (
    Failed,
    GroupEnd,
    JudgedGroup,
    JudgeReport,
    JudgeTask,
    Prompt,
    RewardSpan,
    Rollout,
    Verdict,
)


class Renderer:
    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        return (1, 2, 3)

    def extend(
        self, replies: Sequence[Message], tools: Sequence[ToolSpec] = (), *, ended: bool = True
    ) -> tuple[int, ...]:
        return (1, 2, 3)


@dataclass
class Prompts:
    count: int = 10**6

    def at(self, prompt_index: int) -> Prompt:
        if prompt_index >= self.count:
            raise EndOfData
        return Prompt(
            prompt_id=f"p{prompt_index}", messages=(Message(role="user", content=f"question {prompt_index}"),)
        )


@dataclass
class Journal:
    rollouts: list[Rollout] = field(default_factory=list)
    verdicts: Counter[tuple[str, int]] = field(default_factory=Counter)
    ends: dict[str, str] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)
    early: list[str] = field(default_factory=list)

    def rollout(self, prompt_index: int, prompt: Prompt, rollout: Rollout) -> None:
        self.rollouts.append(rollout)

    def record_verdict(self, rollout: Rollout, report: JudgeReport) -> None:
        self.verdicts[rollout.group_id, rollout.sibling] += 1

    def group_ended(self, end: GroupEnd) -> None:
        assert end.group_id not in self.ends, f"{end.group_id} ended twice"
        self.ends[end.group_id] = end.cause or end.outcome
        self.prompts[end.prompt_id] = end.cause or end.outcome
        self.early += [end.group_id] if end.early else []


@dataclass
class Trainer:
    """A trainer that takes time, and remembers what it was trained on."""

    step_s: float = 0.2
    taken: list[JudgedGroup] = field(default_factory=list)
    steps: list[list[JudgedGroup]] = field(default_factory=list)
    discarded: int = 0
    waited: list[int] = field(default_factory=list)  # with how many groups of the batch

    async def take(self, group: JudgedGroup) -> None:
        self.taken.append(group)

    async def while_waiting(self) -> bool:
        self.waited.append(len(self.taken))
        return len(self.taken) == 1

    async def step(self, batch: Sequence[JudgedGroup]) -> TrainedBatch:
        assert list(batch) == self.taken
        await asyncio.sleep(self.step_s)
        self.steps.append(self.taken)
        self.taken = []
        return TrainedBatch()

    async def discard(self) -> None:
        self.discarded += 1
        self.taken = []


@dataclass
class Judge:
    """A judge that gives the sibling's number as its score, unless `mishap` says otherwise."""

    mishap: Callable[[Rollout], Failed | None] = lambda rollout: None
    delay: Callable[[Rollout], float] = lambda rollout: 0.1
    began: list[float] = field(default_factory=list)

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        self.began.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.delay(rollout))
        if (failed := self.mishap(rollout)) is not None:
            return JudgeReport(verdict=failed, failures=(failed,))
        value = rollout.sibling / 10
        span = RewardSpan(turn=0, start=0, end=1, value=value)
        verdict = Verdict(rewards=(span,), score=value * 10, breakdown={}, score_std=0.0, num_judgements=1)
        return JudgeReport(verdict=verdict)


@dataclass
class Together:
    """A judge that judges once the whole group is complete; every judge session by its group_id."""

    sessions: dict[str, TogetherSession] = field(default_factory=dict)

    def open(self, prompt: Prompt, group_id: str, size: int) -> TogetherSession:
        assert group_id not in self.sessions
        return self.sessions.setdefault(group_id, TogetherSession(size=size))


@dataclass
class TogetherSession:
    """Remembers its siblings and its judge tasks."""

    size: int
    seen: list[int] = field(default_factory=list)
    held: list[tuple[int, ...]] = field(default_factory=list)

    def begin(self) -> Sequence[JudgeTask]:
        return (JudgeTask(members=()),)

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        self.seen.append(rollout.sibling)
        return (JudgeTask(members=tuple(range(self.size))),) if len(self.seen) == self.size else ()

    async def judge(self, judge_task: JudgeTask, priority: int = 0) -> Mapping[int, JudgeReport]:
        await asyncio.sleep(0.1)
        self.held.append(judge_task.members)
        span = RewardSpan(turn=0, start=0, end=1, value=0.5)
        verdict = Verdict(rewards=(span,), score=5.0, breakdown={}, score_std=0.0, num_judgements=1)
        return {sibling: JudgeReport(verdict=verdict) for sibling in judge_task.members}


@dataclass
class Bench:
    """A pipeline on simulated parts, with all that a test reads."""

    config: FlowConfig
    judge: Judge = field(default_factory=Judge)
    group_judge: Together | GenerativeJudge | None = None  # instead of `judge`
    trainer: Trainer = field(default_factory=Trainer)
    prompts: Prompts = field(default_factory=Prompts)
    lengths: Callable[[RequestContext], int] = lambda context: 20
    too_long: Callable[[Prompt], bool] = lambda prompt: False
    sync_s: float = 0.05
    pipeline_state: PipelineState | None = None
    kept: dict[int, RecoveredGroup] | None = None
    max_failure_rate: float = 1.0
    num_engines: int = 1
    reports: list[StepReport] = field(default_factory=list)
    journal: Journal = field(default_factory=Journal)
    ended_rollouts: list[float] = field(default_factory=list)

    def make_engine(self, version: int) -> SimulatedEngine:
        def author(ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
            return Script(token_ids=(7,) * self.lengths(context), text="Answer: 1")

        return SimulatedEngine("policy", author, tokens_per_s=100, version=version)

    def build(self) -> Pipeline:
        version = self.pipeline_state.version if self.pipeline_state else 0
        self.engines = [self.make_engine(version) for _ in range(self.num_engines)]
        self.policy = Router("policy", {f"policy-{n}": engine for n, engine in enumerate(self.engines)})
        health = ServiceHealth(
            "judging",
            max_failure_rate=self.max_failure_rate,
            window=32,
            pause_s=5.0,
            counted="verdicts",
            key="judge.max_failure_rate",
        )
        parts = PipelineComponents(
            prompts=self.prompts,
            too_long=self.too_long,
            play=self.play,
            judge=self.group_judge or PointwiseAdapter(self.judge),
            judge_guard=JudgeHealth(health),
            trainer=self.trainer,
            push_weights=self.push,
            journal=self.journal,
            events=NoEvents(),
        )
        return Pipeline(parts, self.config, self.after_step, self.pipeline_state, self.kept)

    async def play(self, request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        params = SamplingParams(max_new_tokens=64)
        rollout = await play_single_turn(request, prompt, self.policy, Renderer(), params, on_first_token)
        self.ended_rollouts.append(asyncio.get_running_loop().time())
        return rollout

    async def push(self, version: int) -> SyncReport:
        for engine in list(self.policy.in_use.values()):
            await engine.pause()
        await asyncio.sleep(self.sync_s)
        for engine in list(self.policy.in_use.values()):
            await engine.commit_weights(version)
            await engine.resume()
        return SyncReport(version=version, seconds=self.sync_s, pause_seconds=self.sync_s, num_bytes=0, probe_error=0.0)

    async def after_step(self, report: StepReport) -> None:
        self.reports.append(report)

    def run(self) -> Pipeline:
        async def go() -> Pipeline:
            self.pipeline = self.build()
            await self.pipeline.run()
            return self.pipeline

        return run_virtually(go)


def flow(**changes) -> FlowConfig:
    values = {
        "num_steps": 6, "groups_per_batch": 4, "group_size": 4, "min_valid_siblings": 2, "max_staleness": 1,
        "group_deadline_s": 10.0, "rollout_concurrency": 64, "judge_concurrency": 64, "seed": 0,
    }  # fmt: skip
    return FlowConfig(**{**values, **changes})


def long_tailed(context: RequestContext) -> int:
    return 5 + int(60 * random.Random(context.request_id).random() ** 4)


@dataclass
class LearningJudge(Judge):
    """A judge whose verdicts have the version that they were requested with, and whether it changed meanwhile."""

    version: int = 0
    asked: Counter[tuple[str, int, int]] = field(default_factory=Counter)  # group, sibling, version

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        asked = self.version
        self.asked[rollout.group_id, rollout.sibling, asked] += 1
        await asyncio.sleep(self.delay(rollout))
        assert self.version == asked, "a judgement was not broken off"
        span = RewardSpan(turn=0, start=0, end=1, value=rollout.sibling / 10)
        told = {"asked": float(asked)}
        return JudgeReport(verdict=Verdict(rewards=(span,), score=1.0, breakdown=told, score_std=0.0, num_judgements=1))
