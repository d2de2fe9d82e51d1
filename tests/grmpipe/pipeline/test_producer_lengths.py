"""What rollouts will probably sample is learned from those before, and where they wait the longest begin first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from pipeline_bench import Bench, Prompts, flow
from simulated_workload import COSTS, SPEED, seats, workload

from grmpipe.capacity.simulate.simulated_answers import lognormal
from grmpipe.capacity.simulate.simulated_cluster import simulate
from grmpipe.capacity.simulate.workload import Workload
from grmpipe.data.stream import PromptStream
from grmpipe.models.types import Completion, Message, RequestContext, VersionSpan
from grmpipe.pipeline.producer import WEIGHT_OF_LATEST, ExpectedLengths
from grmpipe.types import Prompt, Rollout, Turn


def prompt(name: str, source: str = "") -> Prompt:
    return Prompt(prompt_id=name, source=source, messages=(Message(role="user", content=name),))


def rollout(*lengths: int) -> Rollout:
    turns = []
    for length in lengths:
        span = VersionSpan(model="policy", version=0, start=0, end=length)
        answer = Completion(
            token_ids=(7,) * length, logprobs=(-1.0,) * length, text="x", finish_reason="stop", versions=(span,)
        )
        turns.append(Turn(new_ids=(1,), completion=answer))
    return Rollout(group_id="g", sibling=0, turns=tuple(turns), status="finished")


def test_a_prompt_is_expected_to_be_as_before_else_as_its_source_else_as_all() -> None:
    lengths = ExpectedLengths()
    assert lengths[prompt("a", "math")] == 0
    lengths.record(prompt("a", "math"), rollout(100, 100))
    lengths.record(prompt("a", "math"), rollout(300))
    lengths.record(prompt("b", "math"), rollout(1000))
    lengths.record(prompt("c", "chat"), rollout(10))
    assert lengths[prompt("a", "math")] == 250
    assert lengths[prompt("new", "math")] == 500
    assert lengths[prompt("new", "chat")] == 10
    assert lengths[prompt("new", "code")] == pytest.approx(1510 / 4)


def test_a_policy_that_learns_to_write_longer_is_followed() -> None:
    lengths = ExpectedLengths()
    for tokens in [100] * 100 + [200] * 24:
        lengths.record(prompt("a"), rollout(tokens))
    assert lengths[prompt("a")] == pytest.approx(200 - 100 * (1 - WEIGHT_OF_LATEST) ** 24)


def differing(staleness: int, max_concurrency: int) -> Workload:
    """8 prompts in groups of 4: half of a batch waits if there is room for 8 rollouts."""
    load = workload(staleness=staleness, lengths=lognormal(100, 0.7))
    limited = replace(load.config.rollout, max_concurrency=max_concurrency)
    prompts = PromptStream([prompt(f"question {n}") for n in range(8)])
    return replace(load, config=replace(load.config, rollout=limited), prompts=prompts, sibling_correlation=0.8)


@pytest.mark.parametrize(("max_rows", "max_concurrency"), [(8, 1024), (64, 8)])
@pytest.mark.parametrize("staleness", [0, 1])
def test_where_rollouts_wait_steps_are_shorter_if_the_longest_begin_first(
    staleness: int, max_rows: int, max_concurrency: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step_s() -> float:
        costs = replace(COSTS, engines={"policy": replace(SPEED, max_rows=max_rows), "grm": SPEED})
        return simulate(differing(staleness, max_concurrency), seats(policy=1), costs, 24).step_s

    known_s = step_s()
    monkeypatch.setattr(ExpectedLengths, "__getitem__", lambda *_: 0.0)
    assert known_s < 0.98 * step_s()


@dataclass
class TwoPrompts(Prompts):
    """A short question and a long one, in turn."""

    def at(self, prompt_index: int) -> Prompt:
        return super().at(prompt_index % 2)


def test_batches_keep_their_order_and_in_each_the_longest_go_first() -> None:
    asked: dict[str, int] = {}  # group_id -> priority of its rollouts

    def write(context: RequestContext) -> int:
        asked[context.group_id] = context.priority
        return 40 if int(context.group_id[1:]) % 2 else 10

    Bench(flow(groups_per_batch=2, max_staleness=2), lengths=write, prompts=TwoPrompts()).run()
    ranks = [asked[name] for name in sorted(asked)]
    assert len(ranks) == 12
    assert max(ranks) < 0  # before evaluations, and judgements on the same engine
    assert len(set(ranks[:6])) == 1  # opened before anything is known
    batches = [ranks[n : n + 2] for n in range(4, 12, 2)]
    assert all(max(a) < min(b) for a, b in pairwise(batches))
    assert [short - long for short, long in batches[1:]] == [30, 30, 30]
