"""How a pipeline judges: whole groups when complete, turns while their rollout continues, a group by one version."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipeline_bench import Bench, LearningJudge, Renderer, Together, flow, long_tailed

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.config.judge import JudgeConfig
from grmpipe.envs.env import Action, Episode, Observation, Opening
from grmpipe.envs.play import EpisodeLimits, RolloutRequest, play
from grmpipe.judge.grm import LocalGrm
from grmpipe.judge.pointwise_adapter import judge_group
from grmpipe.judge.protocols.generative import GenerativeJudge
from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine
from grmpipe.models.types import Message, RequestContext, SamplingParams
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.scheduler.run_together import run_until
from grmpipe.scheduler.weights.weight_sync import SyncReport
from grmpipe.types import (
    Prompt,
    Rollout,
    Verdict,
)


def test_judge_of_whole_groups_prepares_first_and_judges_each_group_once() -> None:
    bench = Bench(flow(num_steps=5), group_judge=Together(), lengths=long_tailed)
    pipeline = bench.run()
    assert pipeline.ledger.trained == 5 * 4
    assert all(session.held == [(), (0, 1, 2, 3)] for session in bench.group_judge.sessions.values())
    assert set(bench.journal.verdicts.values()) == {1}


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


def test_held_judging_judges_nothing_while_rollouts_continue() -> None:
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


def test_verdict_is_served_before_turns_of_running_rollouts() -> None:
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
