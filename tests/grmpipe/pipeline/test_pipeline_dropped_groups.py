"""Groups that a pipeline drops, each by its cause, and replaces."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from pipeline_bench import Bench, Judge, Prompts, Together, Trainer, flow

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.models.types import EngineRefused, RequestContext
from grmpipe.pipeline.health import Unfit
from grmpipe.pipeline.interfaces import (
    PipelineState,
    RecoveredGroup,
    TrainedBatch,
)
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.types import (
    JudgedGroup,
    JudgeReport,
    Prompt,
    Rollout,
)


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
    bench = Bench(flow(rollout_max_failure_rate=0.5, pause_s=5.0), lengths=lengths)
    with pytest.raises(Unfit, match=rf"rollout\.max_failure_rate=0\.5\), again after a pause of 5 s: {words}"):
        bench.run()
    assert len(bench.journal.ends) < 40


def test_policy_that_recovers_during_the_pause_continues() -> None:
    def lengths(context: RequestContext) -> int:
        return 20 if asyncio.get_running_loop().time() > 3.0 else refusing_all(context)

    bench = Bench(flow(rollout_max_failure_rate=0.5, pause_s=5.0), lengths=lengths)
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


class Diverging(Trainer):
    """A trainer two of whose batches have numbers that aren't finite; it discards them."""

    failing = (1, 3)  # which of its batches

    def __init__(self) -> None:
        super().__init__()
        self.num_batches = 0

    async def step(self, batch: Sequence[JudgedGroup]) -> TrainedBatch:
        self.num_batches += 1
        if self.num_batches in self.failing:
            self.taken = []
            raise ArithmeticError("the gradient norm is nan")
        return await super().step(batch)


def test_batches_that_may_be_skipped_are_dropped_and_others_are_trained_in_their_place() -> None:
    bench = Bench(flow(max_skipped_steps=2), trainer=Diverging())
    pipeline = bench.run()
    assert pipeline.version == 6 == len(bench.trainer.steps)
    assert pipeline.ledger.dropped == {"not_finite": 8}
    trained = {group.group_id for batch in bench.trainer.steps for group in batch}
    assert len(trained) == 24 and pipeline.ledger.trained == 24


def test_one_skipped_batch_too_many_fails_the_run_with_the_batch_still_open() -> None:
    bench = Bench(flow(max_skipped_steps=1), trainer=Diverging())
    with pytest.raises(ArithmeticError, match="norm is nan"):
        bench.run()
    assert bench.pipeline.version == 1
    assert bench.pipeline.ledger.dropped == {"not_finite": 4}
    assert len(bench.pipeline.open_batch) == 4
