"""Guarantee 1: in a pipeline no failure of the judge becomes a number; too many pause judging, then end the run."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
from collections import Counter

import httpx
import pytest
from configs import judge_config
from pipeline_bench import Bench, Judge, flow

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.judge.grm import RemoteGrm
from grmpipe.judge.markup import Markup
from grmpipe.judge.protocols.generative import GenerativeJudge
from grmpipe.models.engines.endpoint_use import EndpointUse
from grmpipe.models.engines.openai.openai_engine import OpenAIEngine
from grmpipe.models.settings import OpenAIConfig
from grmpipe.pipeline.health import Unfit
from grmpipe.scheduler.events import NoEvents
from grmpipe.scheduler.routing.rate_limits import RateLimits
from grmpipe.types import (
    Failed,
    JudgeReport,
    Prompt,
    Rollout,
    Verdict,
)


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


def test_verdicts_that_a_missing_rollout_ended_say_nothing_of_the_judge() -> None:
    lost = {f"g{prompt_index:06d}/1/t0" for prompt_index in range(8)}
    bench = Bench(
        flow(),
        judge=Judge(delay=lambda rollout: 1e9 if f"{rollout.group_id}/1/t0" in lost else 0.1),
        lengths=lambda context: 10**6 if context.request_id in lost else 10,
        max_failure_rate=0.2,
    )
    assert bench.run().ledger.dropped == {"rollout_timeout": 8}


def test_judge_that_recovers_during_the_pause_continues() -> None:
    lost = Failed(stage="judge", cause="timeout", attempts=1)

    def mishap(rollout: Rollout) -> Failed | None:
        return lost if asyncio.get_running_loop().time() < 3.0 else None

    bench = Bench(flow(), judge=Judge(mishap=mishap), max_failure_rate=0.2)
    assert bench.run().version == 6


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_non_finite_number_of_a_judge_is_a_failed_verdict(number: float) -> None:
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
