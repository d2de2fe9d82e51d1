"""The whole pipeline on simulated engines: guarantees 1 to 3 with drops, delays, duplicates and staleness."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import logging
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import cast

import httpx
import pytest
from configs import judge_config

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.config.judge import JudgeConfig
from grmpipe.data.stream import EndOfData
from grmpipe.envs.env import Action, Episode, Observation, Opening
from grmpipe.envs.play import EpisodeLimits, RolloutRequest, play
from grmpipe.envs.single_turn import play_single_turn
from grmpipe.judge.grm import LocalGrm, RemoteGrm
from grmpipe.judge.markup import Markup
from grmpipe.judge.pointwise_adapter import PointwiseAdapter, judge_group
from grmpipe.judge.protocols.generative import GenerativeJudge
from grmpipe.pipeline.consumer import Interrupted
from grmpipe.pipeline.interfaces import (
    FlowConfig,
    PipelineComponents,
    PipelineState,
    RecoveredGroup,
    StepReport,
    TrainedBatch,
)
from grmpipe.pipeline.judge_health import JudgeHealth
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.pipeline.service_health import ServiceHealth, Unfit
from grmpipe.pipeline.stall_times import StallTimes
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
from models.engines.endpoint_use import EndpointUse
from models.engines.openai.openai_engine import OpenAIEngine
from models.engines.simulated.simulated_engine import Script, SimulatedEngine
from models.settings import OpenAIConfig
from models.types import Engine, EngineDied, EngineRefused, Message, RequestContext, SamplingParams, ToolSpec
from scheduler.events import NoEvents
from scheduler.routing.rate_limits import RateLimits
from scheduler.routing.router import Router
from scheduler.slots.health import HealthConfig, RoleHealth
from scheduler.supervise import run_until
from scheduler.weights.weight_sync import SyncReport


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

    def judged(self, rollout: Rollout, report: JudgeReport) -> None:
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


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_every_batch_keeps_the_staleness_bound_and_nothing_is_lost(max_staleness: int) -> None:
    bench = Bench(flow(max_staleness=max_staleness, num_steps=20, rollout_concurrency=8), lengths=long_tailed)
    pipeline = bench.run()
    ledger = pipeline.ledger
    assert (ledger.trained, ledger.submitted, ledger.in_flight) == (80, 80, 0)
    for version, groups in enumerate(bench.trainer.steps):
        assert len(groups) == 4
        assert all(0 <= version - group.version <= max_staleness for group in groups)
    assert pipeline.max_staleness_trained <= max_staleness


def test_synchronous_training_uses_only_tokens_of_the_current_version() -> None:
    bench = Bench(flow(max_staleness=0), lengths=long_tailed)
    bench.run()
    for version, groups in enumerate(bench.trainer.steps):
        assert {s.version for g in groups for r in g.rollouts for s in r.turns[0].completion.versions} == {version}


def test_a_rollout_that_spans_a_sync_knows_both_versions() -> None:
    bench = Bench(flow(max_staleness=2), lengths=long_tailed)
    bench.run()
    spans = [r.turns[0].completion.versions for r in bench.journal.rollouts]
    assert any(len(stretch) > 1 for stretch in spans)
    assert all(a.end == b.start and a.version < b.version for s in spans for a, b in pairwise(s))


def test_judging_starts_before_the_last_rollout_of_the_batch_ends() -> None:
    bench = Bench(flow(num_steps=1, max_staleness=0), lengths=long_tailed)
    bench.run()
    assert min(bench.judge.began) < max(bench.ended_rollouts)


def test_a_learner_that_waits_goes_on_with_what_it_has_and_the_journal_says_where() -> None:
    bench = Bench(flow(max_staleness=0), lengths=long_tailed)
    bench.run()
    assert set(bench.trainer.waited) == {1, 2, 3}  # never with an empty batch, nor with a full one
    firsts = [groups[0].group_id for groups in bench.trainer.steps]
    assert bench.journal.early and set(bench.journal.early) <= set(firsts)


def test_a_partial_group_is_trained_and_its_failed_sibling_has_no_number() -> None:
    lost = Failed(stage="judge", cause="unparseable", attempts=2)
    bench = Bench(flow(), judge=Judge(mishap=lambda rollout: lost if rollout.sibling == 3 else None))
    bench.run()
    verdicts = [group.verdicts for groups in bench.trainer.steps for group in groups]
    assert all(v[3] is lost and [x.score for x in v[:3]] == [0.0, 1.0, 2.0] for v in verdicts)


def test_a_group_with_too_few_verdicts_is_dropped_by_cause_and_replaced() -> None:
    lost = Failed(stage="judge", cause="truncated", attempts=2)

    def mishap(rollout: Rollout) -> Failed | None:
        return lost if rollout.group_id == "g000001" and rollout.sibling > 0 else None

    bench = Bench(flow(), judge=Judge(mishap=mishap))
    ledger = bench.run().ledger
    assert ledger.dropped == {"judge_truncated": 1}
    assert (ledger.trained, ledger.submitted) == (24, 25)


@dataclass
class Undecided(Judge):
    """A judge that gives the siblings of one group the same reward."""

    group_id: str = "g000001"

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        alike = dataclasses.replace(rollout, sibling=5) if rollout.group_id == self.group_id else rollout
        return await Judge.judge(self, prompt, alike, priority)


def test_a_group_without_signal_is_dropped_and_replaced() -> None:
    bench = Bench(flow(max_zero_advantage_groups=2), judge=Undecided())
    ledger = bench.run().ledger
    assert ledger.dropped == {"zero_advantage": 1}
    assert (ledger.trained, ledger.submitted) == (24, 25)
    assert "g000001" not in {group.group_id for groups in bench.trainer.steps for group in groups}


def test_groups_without_signal_are_trained_once_a_step_has_dropped_its_share() -> None:
    """Every group has zero advantages: per step 2 are dropped and 4 trained. Groups that end after a step count for the
    next.
    """
    bench = Bench(flow(max_zero_advantage_groups=2, max_staleness=0), group_judge=Together())
    ledger = bench.run().ledger
    assert ledger.dropped == {"zero_advantage": 2 * 6}
    assert ledger.trained == 24


def test_a_group_ends_at_its_deadline_when_a_rollout_never_comes_back() -> None:
    bench = Bench(flow(), lengths=lambda context: 10**6 if context.request_id == "g000002/1/t0" else 10)
    ledger = bench.run().ledger
    assert ledger.dropped == {"rollout_timeout": 1}
    assert bench.journal.ends["g000002"] == "rollout_timeout"


def test_missing_verdicts_at_the_deadline_are_timeouts_and_the_rest_is_trained() -> None:
    def delay(rollout: Rollout) -> float:
        return 1e6 if (rollout.group_id, rollout.sibling) == ("g000000", 2) else 0.1

    bench = Bench(flow(), judge=Judge(delay=delay))
    bench.run()
    (group,) = [g for groups in bench.trainer.steps for g in groups if g.group_id == "g000000"]
    assert isinstance(group.verdicts[2], Failed)
    assert group.verdicts[2].cause == "timeout"


def test_the_deadline_stands_still_during_a_sync() -> None:
    bench = Bench(flow(group_deadline_s=1.0, num_steps=3), sync_s=30.0, lengths=lambda context: 80)
    assert bench.run().ledger.dropped == {}


def test_judging_pauses_above_the_failure_rate_and_then_the_run_stops_with_the_cause() -> None:
    lost = Failed(stage="judge", cause="unparseable", attempts=2)
    bench = Bench(flow(), judge=Judge(mishap=lambda rollout: lost), max_failure_rate=0.2)
    with pytest.raises(Unfit, match="unparseable"):
        bench.run()
    assert max(bench.judge.began) - min(bench.judge.began) > 5.0  # the pause
    assert bench.trainer.steps == []


def test_a_judge_that_goes_silent_pauses_judging_and_then_stops_the_run_with_the_cause() -> None:
    """The judge has no time limit of its own: the deadlines of groups end its verdicts."""
    bench = Bench(flow(), judge=Judge(delay=lambda rollout: 1e9), max_failure_rate=0.2)
    with pytest.raises(Unfit, match=r"again after a pause of 5 s: \d+ timeout; the last one: .*group deadline"):
        bench.run()
    assert max(bench.judge.began) < 100  # two deadlines of 10 s and a pause
    assert bench.trainer.steps == []


def test_a_wait_of_60_s_names_what_it_waits_for_and_why_whatever_ends_meanwhile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One rollout never ends; the second batch keeps a place for its group. Another group ends after 50 s."""
    bench = Bench(
        flow(num_steps=3, group_deadline_s=100.0),
        lengths=lambda context: 10**6 if context.request_id == "g000002/1/t0" else 20,
        judge=Judge(delay=lambda rollout: 50.0 if rollout.group_id == "g000009" else 0.1),
    )
    bench.run()
    (told,) = [record.message for record in caplog.records if "the learner waits for groups" in record.message]
    hangs = r"pending: g000002 \(rolling out: rollouts missing: 1; verdicts missing: 1; the policy has begun; 40 s to"
    assert re.search(hangs, told)
    assert re.search(r"; g000009 \(ready: the open batch's places are for groups .* due before it: g000002\)", told)


def test_verdicts_that_a_missing_rollout_ended_say_nothing_of_the_judge() -> None:
    lost = {f"g{prompt_index:06d}/1/t0" for prompt_index in range(8)}
    bench = Bench(
        flow(),
        judge=Judge(delay=lambda rollout: 1e9 if f"{rollout.group_id}/1/t0" in lost else 0.1),
        lengths=lambda context: 10**6 if context.request_id in lost else 10,
        max_failure_rate=0.2,
    )
    assert bench.run().ledger.dropped == {"rollout_timeout": 8}


def test_a_judge_that_recovers_in_the_pause_goes_on() -> None:
    lost = Failed(stage="judge", cause="timeout", attempts=1)

    def mishap(rollout: Rollout) -> Failed | None:
        return lost if asyncio.get_running_loop().time() < 3.0 else None

    bench = Bench(flow(), judge=Judge(mishap=mishap), max_failure_rate=0.2)
    assert bench.run().version == 6


def refusing_all(context: RequestContext) -> int:
    raise EngineRefused("HTTP 400: unknown field top_n")


def hanging(context: RequestContext) -> int:
    return 10**5


@pytest.mark.parametrize(
    ("lengths", "words"), [(refusing_all, "8 refused; .*top_n"), (hanging, "8 timeout; .*0, 1, 2, 3")]
)
def test_a_policy_that_brings_no_rollout_pauses_and_then_stops_the_run_with_the_last_words(
    lengths: Callable[[RequestContext], int], words: str
) -> None:
    bench = Bench(flow(rollout_max_failure_rate=0.5, rollout_pause_s=5.0), lengths=lengths)
    with pytest.raises(Unfit, match=rf"rollout\.max_failure_rate=0\.5\), again after a pause of 5 s: {words}"):
        bench.run()
    assert len(bench.journal.ends) < 40


def test_a_policy_that_recovers_in_the_pause_goes_on() -> None:
    def lengths(context: RequestContext) -> int:
        return 20 if asyncio.get_running_loop().time() > 3.0 else refusing_all(context)

    bench = Bench(flow(rollout_max_failure_rate=0.5, rollout_pause_s=5.0), lengths=lengths)
    ledger = bench.run().ledger
    assert (ledger.trained, ledger.dropped) == (24, {"rollout_refused": 8})


def test_a_group_whose_request_kills_engines_is_dropped_by_cause_and_never_asked_for_on_resume() -> None:
    def poisonous(bench: Bench) -> Callable[[RequestContext], int]:
        def lengths(context: RequestContext) -> int:
            if context.request_id == "g000002/1/t0":
                asked = {name: bench.policy.load.requests(name) for name in bench.policy.members.alive}
                name = next(name for name, of in asked.items() if context.request_id in {ask.request_id for ask in of})
                engine = bench.policy.members.alive[name]
                asyncio.get_running_loop().call_soon(engine.die, "illegal memory access")  # type: ignore[attr-defined]
            return 20

        return lengths

    struck = Bench(flow(), num_engines=3)
    struck.lengths = poisonous(struck)
    ledger = struck.run().ledger
    assert ledger.dropped["rollout_killed_engines"] >= 1
    assert struck.journal.ends["g000002"] == "rollout_killed_engines"
    pipeline_state = PipelineState(next_prompt_index=3, in_flight={2: "g000002"})
    resumed = Bench(
        flow(), pipeline_state=pipeline_state, kept={2: RecoveredGroup(group_id="g000002", killed_engines=True)}
    )
    asked: list[str] = []
    resumed.lengths = lambda context: asked.append(context.group_id) or 20
    assert resumed.run().ledger.dropped == {"rollout_killed_engines": 1}
    assert "g000002" not in asked


def test_a_prompt_that_is_too_long_warns_in_its_first_epoch_only(caplog: pytest.LogCaptureFixture) -> None:
    class Epochs(Prompts):
        def at(self, prompt_index: int) -> Prompt:
            return Prompts.at(self, prompt_index % 3)

    bench = Bench(flow(), prompts=Epochs(), too_long=lambda prompt: prompt.prompt_id == "p1")
    with caplog.at_level(logging.INFO):
        ledger = bench.run().ledger
    assert ledger.dropped["prompt_too_long"] > 1
    levels = [record.levelname for record in caplog.records if "prompt p1 is longer than" in record.message]
    assert levels == ["WARNING"] + ["INFO"] * (ledger.dropped["prompt_too_long"] - 1)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_of_a_judge_that_is_none_is_a_failed_verdict_and_in_no_journal(number: float) -> None:
    class Dividing(Judge):
        async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
            report = await Judge.judge(self, prompt, rollout, priority)
            return with_reward(report, number) if rollout.sibling == 2 else report

    bench = Bench(flow(), judge=Dividing())
    bench.run()
    verdicts = [group.verdicts[2] for groups in bench.trainer.steps for group in groups]
    assert {v.cause for v in verdicts if isinstance(v, Failed)} == {"unparseable"}
    assert all(isinstance(v, Failed) and f"rewards {number:g}" in v.detail for v in verdicts)


def with_reward(report: JudgeReport, number: float) -> JudgeReport:
    assert isinstance(report.verdict, Verdict)
    (span,) = report.verdict.rewards
    rewards = (dataclasses.replace(span, value=number),)
    return dataclasses.replace(report, verdict=dataclasses.replace(report.verdict, rewards=rewards))


def test_an_aborted_rollout_drops_its_group_by_cause_and_is_not_judged() -> None:
    bench = Bench(flow(), lengths=lambda context: 1000 if context.request_id == "g000001/2/t0" else 20)

    async def abort_one() -> Pipeline:
        bench.pipeline = bench.build()
        (engine,) = bench.engines
        asyncio.get_running_loop().call_later(1.0, lambda: asyncio.ensure_future(engine.abort("g000001/2/t0")))
        await bench.pipeline.run()
        return bench.pipeline

    assert run_virtually(abort_one).ledger.dropped == {"rollout_died": 1}
    assert ("g000001", 2) not in bench.journal.verdicts


def test_a_run_ends_when_the_prompts_do_and_says_what_became_of_each() -> None:
    bench = Bench(flow(num_steps=100), prompts=Prompts(count=10))
    pipeline = bench.run()
    assert pipeline.version == 2
    assert (pipeline.ledger.trained, pipeline.ledger.dropped) == (8, {"end_of_prompts": 2})
    assert set(bench.journal.prompts) == {f"p{prompt_index}" for prompt_index in range(10)}


def test_an_interrupted_run_goes_on_from_its_cut_and_trains_each_prompt_once() -> None:
    first = Bench(flow(num_steps=8), lengths=long_tailed)

    async def stop_after_three() -> None:
        first.pipeline = first.build()
        first.after_step_hook = first.after_step

        async def after_step(report: StepReport) -> None:
            first.reports.append(report)
            if report.step == 3:
                first.pipeline.interrupt()

        first.pipeline.after_step = after_step
        await first.pipeline.run()

    with pytest.raises(Interrupted):
        run_virtually(stop_after_three)
    pipeline_state = first.pipeline.state()
    assert pipeline_state.version == 3
    done = {group.prompt.prompt_id for groups in first.trainer.steps for group in groups}
    kept = {
        prompt_index: RecoveredGroup(
            group_id=group_id, rollouts=tuple(r for r in first.journal.rollouts if r.group_id == group_id)
        )
        for prompt_index, group_id in pipeline_state.in_flight.items()
    }
    second = Bench(flow(num_steps=8), lengths=long_tailed, pipeline_state=pipeline_state, kept=kept)
    ledger = second.run().ledger
    trained = [group.prompt.prompt_id for groups in second.trainer.steps for group in groups]
    assert len(trained) == len(set(trained)) == 20
    assert not done & set(trained)
    assert done | set(trained) == {f"p{prompt_index}" for prompt_index in range(32)}
    assert ledger.submitted == ledger.trained == 32


def sampled(bench: Bench) -> dict[tuple[str, int], tuple[int, ...]]:
    """Every rollout's tokens; asserts that none is there twice."""
    found = {(r.group_id, r.sibling): r.turns[0].completion.token_ids for r in bench.journal.rollouts}
    assert len(found) == len(bench.journal.rollouts), "doubled"
    return found


def test_a_dead_engine_is_survived_and_no_sample_is_altered_or_doubled() -> None:
    quiet, struck = (Bench(flow(num_steps=8), lengths=long_tailed, num_engines=2) for _ in range(2))

    async def strike(report: StepReport) -> None:
        struck.reports.append(report)
        if report.step == 3:
            struck.engines[0].die("killed by signal 9")

    struck.after_step = strike  # type: ignore[method-assign]
    quiet.run()
    ledger = struck.run().ledger
    assert (ledger.trained, ledger.dropped) == (32, {})
    assert set(struck.policy.members.alive) == {"policy-1"}
    assert sampled(struck) == sampled(quiet)


def test_the_only_engine_is_replaced_and_no_sample_is_altered_or_doubled() -> None:
    quiet, struck = (Bench(flow(num_steps=8), lengths=long_tailed) for _ in range(2))

    async def strike(report: StepReport) -> None:
        struck.reports.append(report)
        if report.step in (3, 5):
            struck.policy.members.alive["policy-0"].die("killed by signal 9")  # type: ignore[attr-defined]

    async def restart(name: str) -> Engine:
        await asyncio.sleep(2.0)
        return struck.make_engine(struck.pipeline.version)

    async def run() -> Pipeline:
        struck.pipeline = struck.build()
        health = RoleHealth("policy", struck.policy, restart, HealthConfig())
        await run_until(struck.pipeline.run(), health=health.run())
        assert health.num_replaced == 2
        return struck.pipeline

    struck.after_step = strike  # type: ignore[method-assign]
    quiet.run()
    ledger = run_virtually(run).ledger
    assert (ledger.trained, ledger.dropped) == (32, {})
    assert sampled(struck) == sampled(quiet)


@pytest.mark.parametrize("stopped", [True, False])
def test_a_deadline_stands_still_while_the_only_engine_is_replaced(stopped: bool) -> None:
    """The deadline passes only if no clock stands still."""
    struck = Bench(flow(num_steps=6, max_staleness=0, group_deadline_s=3.0))

    async def strike(report: StepReport) -> None:
        if report.step == 3:
            asyncio.get_running_loop().call_later(0.1, struck.engines[0].die, "killed by signal 9")

    async def restart(name: str) -> Engine:
        await asyncio.sleep(30.0)
        return struck.make_engine(struck.pipeline.version)

    async def run() -> Pipeline:
        struck.pipeline = struck.build()
        health = RoleHealth("policy", struck.policy, restart, HealthConfig())
        if stopped:
            health.clocks.add(struck.pipeline.clock)
        await run_until(struck.pipeline.run(), health=health.run())
        return struck.pipeline

    struck.after_step = strike  # type: ignore[method-assign]
    dropped = run_virtually(run).ledger.dropped
    assert (dropped == {}) is stopped


def test_when_no_engine_is_left_and_none_will_come_the_run_ends_with_the_cause_instead_of_dropping_for_ever() -> None:
    bench = Bench(flow())

    async def strike(report: StepReport) -> None:
        bench.engines[0].die("killed by signal 9")

    bench.after_step = strike  # type: ignore[method-assign]
    with pytest.raises(EngineDied, match="killed by signal 9"):
        bench.run()


@pytest.mark.parametrize("seed", range(6))
def test_chaos_of_lost_late_doubled_and_failed_answers_keeps_guarantees_1_to_3(seed: int) -> None:
    """Judge answers are dropped, delayed, doubled and failed at random; rollouts hang at random."""
    rng = random.Random(seed)
    lost = Failed(stage="judge", cause="died", attempts=1)
    bench = Bench(
        flow(num_steps=15, max_staleness=seed % 3, group_deadline_s=4.0),
        judge=Judge(
            mishap=lambda rollout: lost if rng.random() < 0.15 else None,
            delay=lambda rollout: 1e9 if rng.random() < 0.05 else rng.random() * 3,
        ),
        lengths=lambda context: 10**7 if rng.random() < 0.02 else 5 + int(rng.random() * 100),
    )
    judge_once = bench.judge.judge
    doubled = 0

    async def judge_sometimes_twice(prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        nonlocal doubled
        group = bench.pipeline._buffer.groups.get(rollout.group_id)
        if group is not None and group.session is not None and rng.random() < 0.1:
            doubled += 1
            await bench.pipeline._producer.judging.put((group, group.session, JudgeTask(members=(rollout.sibling,))))
        return await judge_once(prompt, rollout, priority)

    bench.judge.judge = judge_sometimes_twice  # type: ignore[method-assign]
    pipeline = bench.run()
    assert doubled > 10
    assert pipeline.ledger
    assert pipeline.version == 15
    for version, groups in enumerate(bench.trainer.steps):
        assert all(version - group.version <= seed % 3 for group in groups)
        for group in groups:
            scores = {r.sibling: v.score for r, v in zip(group.rollouts, group.verdicts, strict=True) if v is not lost
                      and not isinstance(v, Failed)}  # fmt: skip
            assert len(scores) >= 2
            assert all(score == pytest.approx(sibling) for sibling, score in scores.items())
    assert max(bench.journal.verdicts.values()) == 1
    ends = Counter(bench.journal.ends.values())
    assert ends["trained"] == 60
    assert sum(ends.values()) == pipeline.ledger.submitted - pipeline.ledger.in_flight


def total_waits(bench: Bench) -> StallTimes:
    return sum((report.stalls for report in bench.reports), StallTimes())


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_every_second_of_a_step_is_a_wait_the_learners_work_or_the_push(max_staleness: int) -> None:
    bench = Bench(flow(num_steps=12, max_staleness=max_staleness), lengths=long_tailed)
    bench.run()
    for report in bench.reports:
        times = report.stalls
        assert times.steps_s == pytest.approx(
            times.for_groups_s + report.learner_busy_s + times.weight_sync_s, abs=1e-3
        )
        assert times.weight_sync_s == pytest.approx(bench.sync_s, abs=1e-3)
        assert 0 <= times.training_s <= report.learner_busy_s + 1e-3


def test_a_slow_judge_a_slow_policy_and_a_slow_learner_are_each_named_by_their_waits() -> None:
    slow_judge = Bench(flow(num_steps=12), judge=Judge(delay=lambda rollout: 3.0), lengths=lambda context: 10)
    slow_policy = Bench(flow(num_steps=12), lengths=lambda context: 300)
    slow_learner = Bench(flow(num_steps=12), trainer=Trainer(step_s=3.0), lengths=lambda context: 10)
    for bench, name in ((slow_judge, "verdicts_s"), (slow_policy, "rollouts_s"), (slow_learner, "training_s")):
        bench.run()
        times = asdict(total_waits(bench))
        steps_s = times.pop("steps_s")
        assert max(times, key=times.__getitem__) == name
        assert times[name] > 0.5 * steps_s


def test_the_last_steps_which_need_no_new_groups_hold_no_engine_up() -> None:
    bench = Bench(flow(num_steps=3, max_staleness=0), trainer=Trainer(step_s=2.0))
    bench.run()
    assert [round(report.stalls.training_s) for report in bench.reports] == [2, 2, 0]


def test_a_judge_that_serves_the_nearly_complete_and_the_due_first_lets_the_learner_begin_sooner() -> None:
    def first_step_s(ranked: bool) -> float:
        bench = Bench(
            flow(num_steps=6, judge_concurrency=1), judge=Judge(delay=lambda rollout: 0.2), lengths=long_tailed
        )

        async def go() -> None:
            pipeline = bench.build()
            if not ranked:
                pipeline._producer.judging._rank = lambda item: 0  # in the order of arrival
            await pipeline.run()

        run_virtually(go)
        return bench.reports[0].stalls.steps_s

    assert first_step_s(ranked=True) < 0.9 * first_step_s(ranked=False)


def outside_judge(refused_share: float, statuses: Counter[int]) -> GenerativeJudge:
    """A GRM behind an endpoint that refuses a share of tries. Its score depends only on the request's seed."""
    rng = random.Random(5)

    def answer(request: httpx.Request) -> httpx.Response:
        refused = rng.random() < refused_share
        statuses[429 if refused else 200] += 1
        if refused:
            return httpx.Response(429, json={"error": {"message": "slow down"}})
        seed = json.loads(request.content)["seed"]
        choice = {"message": {"content": f"Score: {1 + seed % 10}"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 20, "completion_tokens": 5}
        return httpx.Response(200, json={"model": "judge", "choices": [choice], "usage": usage})

    config = OpenAIConfig(api_key_env="", max_retries=50, max_connections=8)
    limits = RateLimits(requests_per_minute=1200, tokens_per_minute=200_000)
    engine = OpenAIEngine("judge", "grm", config, transport=httpx.MockTransport(answer), use=EndpointUse(limits=limits))
    judging = judge_config(num_judgements=3, timeout_s=1e5)
    return GenerativeJudge(RemoteGrm("grm", engine, 0, NoEvents(), Markup(())), judging, seed=1)


def test_a_storm_of_429s_changes_no_reward() -> None:
    def rewards(refused_share: float) -> tuple[dict[tuple[str, int], float], Counter[int]]:
        bench, statuses = Bench(flow(group_deadline_s=1e6)), Counter[int]()

        async def go() -> None:
            bench.judge = outside_judge(refused_share, statuses)  # type: ignore[assignment]
            await bench.build().run()

        run_virtually(go)
        groups = [group for step in bench.trainer.steps for group in step]
        pairs = [pair for group in groups for pair in zip(group.rollouts, group.verdicts, strict=True)]
        return {(r.group_id, r.sibling): v.outcome for r, v in pairs if isinstance(v, Verdict)}, statuses

    calm, calm_statuses = rewards(0.0)
    stormy, stormy_statuses = rewards(0.7)
    assert len(calm) == 96
    assert len(set(calm.values())) > 5
    assert stormy == calm
    assert calm_statuses == {200: 288}
    assert stormy_statuses[429] > 300
    assert stormy_statuses[200] == 288


def test_a_judge_of_whole_groups_sits_once_for_each_and_before_it_prepares() -> None:
    bench = Bench(flow(num_steps=5), group_judge=Together(), lengths=long_tailed)
    pipeline = bench.run()
    assert pipeline.ledger.trained == 5 * 4
    assert all(session.held == [(), (0, 1, 2, 3)] for session in bench.group_judge.sessions.values())
    assert set(bench.journal.verdicts.values()) == {1}


def test_on_resume_a_judge_of_whole_groups_sees_what_is_kept_and_sits_for_what_has_no_verdict() -> None:
    first = Bench(flow(num_steps=1, max_staleness=0))
    first.run()
    rollouts = [dataclasses.replace(r, group_id="g000000") for r in first.trainer.steps[0][0].rollouts]
    verdict = first.trainer.steps[0][0].verdicts[0]
    kept = {
        0: RecoveredGroup(group_id="g000000", rollouts=tuple(rollouts), reports={0: JudgeReport(verdict=verdict)}),
        1: RecoveredGroup(
            group_id="g000001",
            rollouts=tuple(dataclasses.replace(r, group_id="g000001") for r in rollouts),
            reports={sibling: JudgeReport(verdict=verdict) for sibling in range(4)},
        ),
    }
    bench = Bench(flow(num_steps=1, max_staleness=0), group_judge=Together(), kept=kept)
    bench.run()
    assert bench.group_judge.sessions["g000000"].held == [(), (0, 1, 2, 3)]
    assert bench.group_judge.sessions["g000001"].held == []
    assert {key: count for key, count in bench.journal.verdicts.items() if key[0] == "g000000"} == {
        ("g000000", sibling): 1 for sibling in (1, 2, 3)
    }


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


def run_with_a_judge_that_changes(bench: Bench, judge: LearningJudge | TurnByTurn, every_s: float) -> Pipeline:
    async def change(version: int) -> SyncReport:
        await asyncio.sleep(0.05)
        judge.version = version
        return SyncReport(version=version, seconds=0.05, pause_seconds=0.05, num_bytes=0, probe_error=0.0)

    async def keep_changing() -> None:
        for version in range(1, 1000):
            await asyncio.sleep(every_s)
            await bench.pipeline.change_judge(1, functools.partial(change, version))

    async def go() -> Pipeline:
        bench.pipeline = bench.build()
        await run_until(bench.pipeline.run(), changes=keep_changing())
        return bench.pipeline

    return run_virtually(go)


def test_a_group_is_judged_by_one_version_of_a_judge_that_changes() -> None:
    judge = LearningJudge(
        delay=lambda rollout: 0.1 + 0.3 * random.Random(f"{rollout.group_id}{rollout.sibling}").random()
    )
    bench = Bench(flow(num_steps=12), judge=judge, lengths=long_tailed)
    pipeline = run_with_a_judge_that_changes(bench, judge, every_s=0.7)
    groups = [group for groups in bench.trainer.steps for group in groups]
    assert len(groups) == 48
    versions = [{v.grm_version for v in group.verdicts if isinstance(v, Verdict)} for group in groups]
    assert all(len(of_group) == 1 for of_group in versions)
    assert len(set.union(*versions)) > 3
    assert all(v.breakdown["asked"] == v.grm_version for g in groups for v in g.verdicts if isinstance(v, Verdict))
    totals = pipeline.counters.total_so_far()
    assert totals.aborted > 0
    assert totals.voided > 0
    assert set(judge.asked.values()) == {1}  # at most once by each version
    assert pipeline.state().judge_version > 0


class SelfJudging(Bench):
    """A bench whose judge has the policy's weights."""

    async def push(self, version: int) -> SyncReport:
        report = await super().push(version)
        assert isinstance(self.judge, LearningJudge)
        self.judge.version = version
        return report


def test_a_policy_that_judges_itself_judges_a_group_by_one_version() -> None:
    judge = LearningJudge(delay=lambda rollout: 0.1 + rollout.sibling)  # some verdicts are under way at each push
    bench = SelfJudging(flow(num_steps=6, policy_judges=True), judge=judge, lengths=long_tailed)
    pipeline = bench.run()
    groups = [group for groups in bench.trainer.steps for group in groups]
    versions = [{v.grm_version for v in group.verdicts if isinstance(v, Verdict)} for group in groups]
    assert all(len(of_group) == 1 for of_group in versions)
    assert len(set.union(*versions)) > 2
    assert all(v.breakdown["asked"] == v.grm_version for g in groups for v in g.verdicts if isinstance(v, Verdict))
    assert pipeline.state().judge_version == pipeline.version == 6


def test_a_judge_that_changes_costs_no_group_its_deadline() -> None:
    judge = LearningJudge(delay=lambda rollout: 0.3)
    bench = Bench(flow(num_steps=4, group_deadline_s=3.0), judge=judge)

    async def slow_change() -> SyncReport:
        await asyncio.sleep(30.0)
        judge.version = 1
        return SyncReport(version=1, seconds=30.0, pause_seconds=0.0, num_bytes=0, probe_error=0.0)

    async def change_once() -> None:
        await asyncio.sleep(0.5)
        await bench.pipeline.change_judge(1, slow_change)
        await asyncio.sleep(1e9)

    async def go() -> None:
        bench.pipeline = bench.build()
        await run_until(bench.pipeline.run(), change=change_once())

    run_virtually(go)
    assert bench.pipeline.ledger.dropped == {}


def test_nothing_is_judged_while_judging_is_held_and_rollouts_go_on() -> None:
    bench = Bench(flow(num_steps=1))

    async def go() -> None:
        bench.pipeline = bench.build()

        async def release_later() -> None:
            with bench.pipeline.hold_judging():
                await asyncio.sleep(50.0)
            await asyncio.sleep(1e9)

        await run_until(bench.pipeline.run(), hold=release_later())

    run_virtually(go)
    assert min(bench.judge.began) >= 50.0
    assert min(bench.ended_rollouts) < 5.0


@pytest.mark.parametrize(("versions", "kept"), [((2, 2), True), ((1, 1), False), ((1, 2), False), ((1,) * 4, True)])
def test_verdicts_kept_over_a_resume_are_not_mixed_with_those_of_another_version(
    versions: tuple[int, ...], kept: bool
) -> None:
    """The judge is at version 2; two verdicts of four leave a group incomplete."""
    first = Bench(flow(num_steps=1, max_staleness=0))
    first.run()
    rollouts = tuple(dataclasses.replace(r, group_id="g000000") for r in first.trainer.steps[0][0].rollouts)
    span = RewardSpan(turn=0, start=0, end=1, value=0.5)
    old = Verdict(rewards=(span,), score=5.0, breakdown={}, score_std=0.0, num_judgements=1)
    reports = {n: JudgeReport(verdict=dataclasses.replace(old, grm_version=v)) for n, v in enumerate(versions)}
    work = RecoveredGroup(group_id="g000000", rollouts=rollouts, reports=reports)
    pipeline_state = PipelineState(version=0, next_prompt_index=1, in_flight={0: "g000000"}, judge_version=2)
    bench = Bench(
        flow(num_steps=1, max_staleness=0),
        judge=LearningJudge(version=2),
        pipeline_state=pipeline_state,
        kept={0: work},
    )
    bench.run()
    (group,) = [group for group in bench.trainer.steps[0] if group.group_id == "g000000"]
    got = [verdict.grm_version for verdict in group.verdicts if isinstance(verdict, Verdict)]
    assert got == (list(versions) + [2] * (4 - len(versions)) if kept else [2] * 4)
    assert sum(v.score == 5.0 for v in group.verdicts if isinstance(v, Verdict)) == (len(versions) if kept else 0)


@pytest.mark.parametrize("num_kept", [1, 4])
def test_where_rewards_depend_on_their_group_a_resume_keeps_the_verdicts_of_whole_groups_only(num_kept: int) -> None:
    first = Bench(flow(num_steps=1, max_staleness=0))
    first.run()
    before = next(group for group in first.trainer.steps[0] if group.group_id == "g000000")
    better = dataclasses.replace(cast(Verdict, before.verdicts[0]), score=9.0)  # by the second judge of a cascade
    reports = {sibling: JudgeReport(verdict=better) for sibling in range(num_kept)}
    bench = Bench(
        flow(num_steps=1, max_staleness=0, keeps_whole_groups=True),
        pipeline_state=PipelineState(next_prompt_index=1, in_flight={0: "g000000"}),
        kept={0: RecoveredGroup(group_id="g000000", rollouts=tuple(before.rollouts), reports=reports)},
    )
    bench.run()
    (group,) = [group for group in bench.trainer.steps[0] if group.group_id == "g000000"]
    kept = [isinstance(verdict, Verdict) and verdict.score == 9.0 for verdict in group.verdicts]
    assert kept == [num_kept == 4] * 4


# -- turns judged while their rollout goes on ------------------------------------------------------------------------


class ThreeTurns:
    """An environment that takes its time over each of three turns."""

    async def open(self, episode: Episode) -> Opening:
        return Opening(messages=episode.prompt.messages)

    async def step(self, action: Action) -> Observation:
        await asyncio.sleep(0.5)
        said = Message(role="user", content=f"seen {action.turn}")
        return Observation(done=True) if action.turn == 2 else Observation(messages=(said,))

    async def close(self) -> None: ...


class CodePoints:
    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(map(ord, messages[0].content))


@dataclass
class TurnByTurn(Bench):
    """Episodes of three turns, and a GRM that judges turn by turn with scores drawn from the ids of its requests; one
    that learns gives its version as the score.
    """

    version: int | None = None
    asked: list[tuple[str, int, float]] = field(default_factory=list)  # request id, priority, time
    ends: dict[str, float] = field(default_factory=dict)  # group/sibling -> the end of its rollout

    def turn_judge(self) -> GenerativeJudge:
        def author(ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
            self.asked.append((context.request_id, context.priority, asyncio.get_running_loop().time()))
            score = 1 + (self.version or 0) % 10
            if self.version is None:
                score = 1 + random.Random(context.request_id).randrange(10)
            return Script(token_ids=(7,) * 10, text=f"\\boxed{{{score}}}")

        grm = LocalGrm("grm", SimulatedEngine("grm", author, tokens_per_s=100), CodePoints(), 10**6)
        return GenerativeJudge(grm, JudgeConfig(protocol="turns", template="turns", parser="boxed"), seed=0)

    async def play(self, request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        params, limits = SamplingParams(max_new_tokens=64), EpisodeLimits(max_turns=3)
        rollout = await play(request, prompt, ThreeTurns(), self.policy, Renderer(), params, limits, on_first_token)
        self.ends[f"{request.group_id}/{request.sibling}"] = asyncio.get_running_loop().time()
        return rollout


def test_turns_are_judged_before_their_episode_ends_and_the_verdicts_are_those_of_its_end() -> None:
    bench = TurnByTurn(flow(num_steps=3))
    bench.group_judge = bench.turn_judge()
    bench.run()
    early = [request_id for request_id, _, time in bench.asked if time < bench.ends[request_id.split("/t")[0]]]
    assert {request_id.split("/t")[1] for request_id in early} == {"0/j0.0", "1/j0.0"}
    assert len(early) == 2 * len(bench.ends)
    assert len({request_id for request_id, _, _ in bench.asked}) == len(bench.asked)
    groups = [group for groups in bench.trainer.steps for group in groups]
    assert len(groups) == 12
    for group in groups:
        at_end = run_virtually(
            lambda group=group: judge_group(TurnByTurn(flow()).turn_judge(), group.prompt, group.rollouts)
        )
        assert tuple(report.verdict for report in at_end) == group.verdicts
        assert [len(rollout.turns) for rollout in group.rollouts] == [3] * 4


def test_a_verdict_is_served_before_turns_of_rollouts_that_go_on() -> None:
    bench = TurnByTurn(flow(num_steps=1, max_staleness=0))
    bench.group_judge = bench.turn_judge()
    bench.run()
    by_place: dict[bool, list[int]] = {True: [], False: []}
    for request_id, priority, time in bench.asked:
        by_place[time < bench.ends[request_id.split("/t")[0]]].append(priority)
    assert max(by_place[False]) < min(by_place[True])


def test_turns_that_an_earlier_version_of_the_judge_judged_are_judged_again() -> None:
    bench = TurnByTurn(flow(num_steps=4, group_deadline_s=100.0), version=0)
    bench.group_judge = bench.turn_judge()
    run_with_a_judge_that_changes(bench, bench, every_s=1.1)
    assert len({request_id for request_id, _, _ in bench.asked}) < len(bench.asked)
    groups = [group for groups in bench.trainer.steps for group in groups]
    verdicts = [[one for one in group.verdicts if isinstance(one, Verdict)] for group in groups]
    assert [len(one) for one in verdicts] == [4] * 16
    for by_group in verdicts:
        scores = {round(span.value / (span.share or 1), 6) for verdict in by_group for span in verdict.rewards}
        assert len(scores) == 1, "a group is judged by one version"
