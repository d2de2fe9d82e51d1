"""The simulated engine against a slow step-by-step one; and the effects of pauses, pushes and deaths."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.models.engines.simulated.simulated_batch import PREFILL_TOKENS_PER_STEP
from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine
from grmpipe.models.engines.simulated.simulated_rate import SharedDevice
from grmpipe.models.types import (
    Completion,
    EngineDied,
    EngineRefused,
    EngineSpeed,
    RequestContext,
    SamplingParams,
    make_scoring_params,
)

T = TypeVar("T")
SPEED = EngineSpeed(step_s=0.01, row_s=0.001, cached_token_s=1e-6, prefill_token_s=1e-4, max_rows=4)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request of a test. Requests with one `prompt` share it."""

    at_s: float
    num_tokens: int
    prompt: int = 0
    prompt_tokens: int = 10
    priority: int = 0
    abort_after_s: float | None = None

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return (1000 + self.prompt, *(1,) * (self.prompt_tokens - 1))


@dataclass(frozen=True, kw_only=True)
class Answered:
    at_s: float
    num_tokens: int


def write(ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
    return Script(token_ids=tuple(range(params.max_new_tokens)), text="whole")


def ask(engine: SimulatedEngine, name: str, asked: Asked) -> Coroutine[object, object, Completion]:
    context = RequestContext(request_id=name, group_id="g", role="policy", priority=asked.priority)
    return engine.generate(asked.prompt_ids, SamplingParams(max_new_tokens=asked.num_tokens), context)


async def answers(engine: SimulatedEngine, requests: Sequence[Asked], pauses: Sequence[tuple[float, float]] = ()):
    """(time, number of tokens) by request. Pauses: (from, to)."""
    clock = asyncio.get_running_loop().time

    async def one(index: int, asked: Asked) -> Answered:
        await asyncio.sleep(asked.at_s)
        if asked.abort_after_s is not None:
            asyncio.get_running_loop().call_later(
                asked.abort_after_s, lambda: tasks.append(asyncio.create_task(engine.abort(str(index))))
            )
        completion = await ask(engine, str(index), asked)
        assert completion.token_ids == tuple(range(completion.num_tokens))
        assert len(completion.logprobs) == completion.num_tokens
        assert (completion.finish_reason == "stop") == (completion.num_tokens == asked.num_tokens)
        return Answered(at_s=clock(), num_tokens=completion.num_tokens)

    async def pause(start_s: float, end_s: float) -> None:
        await asyncio.sleep(start_s)
        await engine.pause()
        await asyncio.sleep(end_s - clock())
        await engine.resume()

    tasks: list[asyncio.Task[None]] = [asyncio.create_task(pause(*span)) for span in pauses]
    return await asyncio.gather(*(one(index, asked) for index, asked in enumerate(requests)))


# -- a slow engine to compare with -------------------------------------------------------------------------------------


@dataclass(eq=False)
class SlowRow:
    index: int
    asked: Asked
    sampled: int = 0
    gone: bool = False


@dataclass
class StepByStep:
    """Computes every step and every token."""

    speed: EngineSpeed
    pauses: Sequence[tuple[float, float]] = ()
    rows: list[SlowRow] = field(default_factory=list)
    known: set[int] = field(default_factory=set)
    num_preempted: int = 0

    def run(self, requests: Sequence[Asked]) -> list[Answered]:
        coming = sorted((SlowRow(i, asked) for i, asked in enumerate(requests)), key=lambda r: (r.asked.at_s, r.index))
        self.order = {row.index: place for place, row in enumerate(coming)}
        waiting: list[SlowRow] = []
        answered: dict[int, Answered] = {}
        now = 0.0
        while coming or waiting or self.rows:
            if not self.rows and not waiting:
                now = max(now, coming[0].asked.at_s)
            if not self.rows:
                now = self.after(now, 0.0)
            while coming and coming[0].asked.at_s <= now:
                waiting.append(coming.pop(0))
            for row in [row for row in waiting if self.aborted_by(row, now)]:
                waiting.remove(row)
                answered[row.index] = Answered(at_s=self.abort_s(row), num_tokens=row.sampled)
            waiting += self.preempt()
            before = set(self.rows)
            prefilled = self.admit(waiting)
            joined = len([row for row in self.rows if row not in before])
            if not self.rows:
                continue
            speed, read = self.speed, sum(row.asked.prompt_tokens + row.sampled for row in self.rows)
            lasts = speed.step_s + len(self.rows) * speed.row_s + read * speed.cached_token_s
            ended = self.after(now, lasts + prefilled * speed.prefill_token_s + joined * speed.request_s)
            for row in list(self.rows):
                if self.aborted_by(row, ended):
                    answered[row.index] = Answered(at_s=self.abort_s(row), num_tokens=row.sampled)
                    self.rows.remove(row)
                    continue
                row.sampled += 1
                if row.sampled == row.asked.num_tokens:
                    answered[row.index] = Answered(at_s=ended, num_tokens=row.sampled)
                    self.rows.remove(row)
            now = ended
        return [answered[index] for index in range(len(requests))]

    def after(self, start_s: float, work_s: float) -> float:
        """The time when this much work is done, without pauses."""
        for begin, end in self.pauses:
            if start_s + work_s >= begin and start_s < end:
                work_s -= max(0.0, begin - start_s)
                start_s = end
        return start_s + work_s

    def abort_s(self, row: SlowRow) -> float:
        return row.asked.at_s + (row.asked.abort_after_s or 0.0)

    def aborted_by(self, row: SlowRow, now: float) -> bool:
        return row.asked.abort_after_s is not None and self.abort_s(row) < now

    def held(self) -> int:
        prompts = {row.asked.prompt: row.asked.prompt_tokens for row in self.rows}
        return sum(prompts.values()) + sum(row.sampled for row in self.rows)

    def preempt(self) -> list[SlowRow]:
        out = []
        while len(self.rows) > 1 and self.speed.kv_tokens and self.held() + len(self.rows) > self.speed.kv_tokens:
            out.append(self.rows.pop())
            self.num_preempted += 1
        return out

    def admit(self, waiting: list[SlowRow]) -> int:
        waiting.sort(key=lambda row: (row.asked.priority, self.order[row.index]))
        prefilled = 0
        while waiting and len(self.rows) < self.speed.max_rows:
            row = waiting[0]
            shared = any(other.asked.prompt == row.asked.prompt for other in self.rows)
            needed = row.sampled + (0 if shared else row.asked.prompt_tokens) + len(self.rows) + 1
            if self.rows and self.speed.kv_tokens and self.held() + needed > self.speed.kv_tokens:
                break
            tokens = row.sampled + (0 if row.asked.prompt in self.known else row.asked.prompt_tokens)
            if prefilled and prefilled + tokens > PREFILL_TOKENS_PER_STEP:
                break
            prefilled += tokens
            self.known.add(row.asked.prompt)
            self.rows.append(waiting.pop(0))
        return prefilled


# -- claims ------------------------------------------------------------------------------------------------------------

# Times on an uneven grid: two changes at the same time have no defined order.
MOMENTS = st.integers(0, 4000).map(lambda n: n * 1.0007e-3 + 1.3e-5)
REQUESTS = st.lists(
    st.builds(
        Asked,
        at_s=MOMENTS,
        num_tokens=st.integers(1, 60),
        prompt=st.integers(0, 3),
        priority=st.integers(0, 2),
        abort_after_s=st.none() | st.integers(1, 900).map(lambda n: n * 1.00013e-3 + 7.7e-6),
    ),
    min_size=1,
    max_size=14,
    unique_by=lambda asked: asked.at_s,
)
SPEEDS = st.builds(
    EngineSpeed,
    step_s=st.sampled_from([0.0103, 0.0011]),
    row_s=st.sampled_from([0.0, 0.00107]),
    cached_token_s=st.sampled_from([0.0, 1.09e-5]),
    prefill_token_s=st.sampled_from([0.0, 1.003e-4]),
    max_rows=st.integers(1, 6),
    kv_tokens=st.just(0),
    request_s=st.sampled_from([0.0, 2.003e-3]),
)
CROWDED = SPEEDS.flatmap(lambda speed: st.sampled_from([75, 130]).map(lambda room: replace(speed, kv_tokens=room)))
PAUSES = st.lists(st.tuples(MOMENTS, st.floats(0.01, 0.5)), max_size=1).map(lambda all: [(a, a + d) for a, d in all])


async def answered(speed: EngineSpeed, requests: list[Asked], pauses: list[tuple[float, float]]) -> list[Answered]:
    return await answers(SimulatedEngine("policy", write, speed=speed), requests, pauses)


@settings(max_examples=150)
@given(REQUESTS, SPEEDS, PAUSES)
def test_between_changes_of_the_batch_time_is_what_it_is_step_by_step(
    requests: list[Asked], speed: EngineSpeed, pauses: list[tuple[float, float]]
) -> None:
    expected = StepByStep(speed, pauses).run(requests)
    for got, want in zip(run_virtually(lambda: answered(speed, requests, pauses)), expected, strict=True):
        assert got.num_tokens == want.num_tokens
        assert got.at_s == pytest.approx(want.at_s, abs=1e-9)


@settings(max_examples=150)
@given(REQUESTS, CROWDED, PAUSES)
def test_where_rows_have_to_make_room_nothing_is_lost_and_the_last_ends_at_about_the_same_time(
    requests: list[Asked], speed: EngineSpeed, pauses: list[tuple[float, float]]
) -> None:
    """Which row is preempted may depend on the order of events at the same time: an abort, the end of a step."""
    expected = StepByStep(speed, pauses).run(requests)
    got = run_virtually(lambda: answered(speed, requests, pauses))
    for asked, fast, slow in zip(requests, got, expected, strict=True):
        if asked.abort_after_s is None:
            assert fast.num_tokens == slow.num_tokens
    if got:
        last_s = max(slow.at_s for slow in expected)
        assert max(fast.at_s for fast in got) == pytest.approx(last_s, rel=0.25)


def test_the_slow_engine_preempts_too() -> None:
    """Otherwise the comparison would not cover preemption."""
    slow = StepByStep(replace(SPEED, kv_tokens=75))
    slow.run([Asked(at_s=0.0, num_tokens=60), Asked(at_s=0.0, num_tokens=60)])
    assert slow.num_preempted > 0


def timed(engine: Callable[[], SimulatedEngine], requests: Sequence[Asked]) -> list[float]:
    async def go() -> list[Answered]:
        return await answers(engine(), requests)

    return [answered.at_s for answered in run_virtually(go)]


def test_a_row_alone_takes_its_prefill_and_its_steps() -> None:
    (alone,) = timed(lambda: SimulatedEngine("policy", write, speed=SPEED), [Asked(at_s=0.0, num_tokens=100)])
    read = sum(10 + step for step in range(100))
    assert alone == pytest.approx(10 * 1e-4 + 100 * 0.011 + read * 1e-6, abs=1e-12)


def test_siblings_prefill_once_unless_nothing_is_cached() -> None:
    siblings = [Asked(at_s=0.0, num_tokens=1, prompt_tokens=100) for _ in range(4)]
    cached = timed(lambda: SimulatedEngine("policy", write, speed=SPEED), siblings)
    apart = timed(lambda: SimulatedEngine("policy", write, speed=SPEED, prefix_cache=False), siblings)
    assert max(apart) - max(cached) == pytest.approx(3 * 100 * 1e-4)


def test_the_most_urgent_waits_least() -> None:
    requests = [Asked(at_s=0.0, num_tokens=20)] * 4 + [
        Asked(at_s=0.01, num_tokens=20, priority=priority) for priority in (5, 1, 3)
    ]
    late, first, second = timed(lambda: SimulatedEngine("grm", write, speed=replace(SPEED, max_rows=1)), requests)[4:]
    assert first < second < late


def test_request_that_can_never_fit_the_cache_is_refused() -> None:
    async def go() -> None:
        engine = SimulatedEngine("policy", write, speed=replace(SPEED, kv_tokens=50))
        with pytest.raises(EngineRefused, match="10 \\+ 41 tokens"):
            await ask(engine, "r", Asked(at_s=0.0, num_tokens=41))
        assert (await ask(engine, "s", Asked(at_s=0.0, num_tokens=40))).num_tokens == 40

    run_virtually(go)


def test_a_request_over_three_versions_knows_which_token_is_whose() -> None:
    async def go() -> Completion:
        engine = SimulatedEngine("policy", write, tokens_per_s=10)
        answer = asyncio.create_task(ask(engine, "r", Asked(at_s=0.0, num_tokens=50)))
        for version, after_s in ((1, 1.05), (2, 2.0)):
            await asyncio.sleep(after_s)
            await engine.pause()
            await engine.commit_weights(version)
            await asyncio.sleep(5.0)
            await engine.resume()
        return await answer

    spans = run_virtually(go).versions
    assert [(span.version, span.start, span.end) for span in spans] == [(0, 0, 10), (1, 10, 30), (2, 30, 50)]


def test_version_spans_of_a_preempted_request_cover_all_its_tokens() -> None:
    async def go() -> list[Completion]:
        engine = SimulatedEngine("policy", write, speed=replace(SPEED, kv_tokens=75))
        requests = [Asked(at_s=0.0, num_tokens=60), Asked(at_s=0.0, num_tokens=60)]
        tasks = [asyncio.create_task(ask(engine, str(i), asked)) for i, asked in enumerate(requests)]
        for version in (1, 2):
            await asyncio.sleep(0.4)
            await engine.pause()
            await engine.commit_weights(version)
            await engine.resume()
        return await asyncio.gather(*tasks)

    for completion in run_virtually(go):
        edges = [edge for span in completion.versions for edge in (span.start, span.end)]
        assert edges[0] == 0
        assert edges[-1] == 60
        assert edges[1:-1:2] == edges[2:-1:2]
        assert len(completion.versions) > 1


def test_first_tokens_are_reported_when_they_arrive() -> None:
    async def go() -> float:
        clock, heard = asyncio.get_running_loop().time, []
        engine = SimulatedEngine("policy", write, speed=SPEED)
        context = RequestContext(request_id="r", group_id="g", role="policy")
        await engine.generate((1,) * 10, SamplingParams(max_new_tokens=5), context, lambda: heard.append(clock()))
        return heard[0]

    assert run_virtually(go) == pytest.approx(10 * 1e-4 + 0.011 + 10 * 1e-6)


def test_cancelled_request_leaves_no_trace() -> None:
    async def go() -> float:
        engine = SimulatedEngine("policy", write, speed=replace(SPEED, max_rows=1))
        tasks = [asyncio.create_task(ask(engine, str(i), Asked(at_s=0.0, num_tokens=1000))) for i in range(3)]
        await asyncio.sleep(0.5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        start = asyncio.get_running_loop().time()
        await ask(engine, "last", Asked(at_s=0.0, num_tokens=10))
        return asyncio.get_running_loop().time() - start

    step_s = 0.012  # of the preempted row, to its end
    assert run_virtually(go) <= 10 * (0.011 + 20e-6) + step_s


def test_a_death_fails_what_is_in_flight_and_what_comes() -> None:
    async def go() -> None:
        engine = SimulatedEngine("policy", write, speed=SPEED)
        tasks = [asyncio.create_task(ask(engine, str(i), Asked(at_s=0.0, num_tokens=50))) for i in range(6)]
        await asyncio.sleep(0.1)
        engine.die("killed by signal 9")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert Counter(map(type, results)) == {EngineDied: 6}
        for attempt in (ask(engine, "late", Asked(at_s=0.0, num_tokens=5)), engine.abort("0"), engine.score((1, 2))):
            with pytest.raises(EngineDied, match="signal 9"):
                await attempt

    run_virtually(go)


def test_two_engines_on_one_device_take_twice_as_long_while_both_work() -> None:
    async def go() -> tuple[float, float, float]:
        device = SharedDevice()
        engines = [SimulatedEngine("policy", write, tokens_per_s=10, device=device) for _ in range(2)]
        clock = asyncio.get_running_loop().time

        async def one(engine: SimulatedEngine, num_tokens: int) -> float:
            await ask(engine, "r", Asked(at_s=0.0, num_tokens=num_tokens))
            return clock()

        short, long = await asyncio.gather(one(engines[0], 10), one(engines[1], 30))
        return short, long, engines[1].busy_s

    assert run_virtually(go) == pytest.approx((2.0, 4.0, 3.0))


def test_busy_is_the_time_with_rows_and_without_pauses() -> None:
    async def go() -> float:
        engine = SimulatedEngine("policy", write, tokens_per_s=10)
        await answers(engine, [Asked(at_s=1.0, num_tokens=10), Asked(at_s=7.0, num_tokens=10)], pauses=[(1.5, 3.0)])
        await asyncio.sleep(5.0)
        return engine.busy_s

    assert run_virtually(go) == pytest.approx(2.0)


def turns_of(engine: SimulatedEngine, trajectory_id: str, push_after: int | None = None) -> int:
    """The tokens that five turns of one trajectory prefill: a prompt of 100, then 10 sampled and 5 observed each."""

    async def go() -> int:
        ids = (1,) * 100
        for turn in range(5):
            context = RequestContext(request_id=f"t{turn}", group_id="g", role="policy", trajectory_id=trajectory_id)
            before = engine.prefilled_tokens
            completion = await engine.generate(ids, SamplingParams(max_new_tokens=10), context)
            assert completion.cached_tokens == len(ids) - (engine.prefilled_tokens - before)
            if turn == push_after:
                await engine.pause()
                await engine.commit_weights(1)
                await engine.resume()
            ids = (*ids, *completion.token_ids, *(2,) * 5)
        return engine.prefilled_tokens

    return run_virtually(go)


def test_a_turn_prefills_what_its_trajectorys_last_turn_has_not() -> None:
    unshared = sum(100 + 15 * turn for turn in range(5))
    assert turns_of(SimulatedEngine("policy", write), "g/0") == 100 + 4 * (1 + 5)
    assert turns_of(SimulatedEngine("policy", write), "") == unshared
    assert turns_of(SimulatedEngine("policy", write, prefix_cache=False), "g/0") == unshared


def test_a_push_empties_the_cache_of_trajectories() -> None:
    assert turns_of(SimulatedEngine("policy", write), "g/0", push_after=2) == 100 + 3 * (1 + 5) + 100 + 3 * 15


def least_s(speed: EngineSpeed, requests: Sequence[Asked], num_rows: int) -> tuple[float, float]:
    """Seconds that an engine worked on requests, and would have worked in batches of `num_rows`."""

    async def both() -> tuple[float, float]:
        engine = SimulatedEngine("m", write, speed=speed)
        await answers(engine, requests)
        return engine.busy_s, engine.least_busy_s(num_rows)

    return run_virtually(both)


def test_an_engines_least_work_is_that_of_full_batches() -> None:
    one_by_one = [Asked(at_s=second, num_tokens=10, prompt=second) for second in range(4)]
    busy_s, saved_s = least_s(SPEED, one_by_one, num_rows=4)
    assert busy_s - saved_s == pytest.approx(40 * 0.01 * 3 / 4), "10 steps instead of 40"
    together = [Asked(at_s=0.0, num_tokens=10, prompt=n) for n in range(4)]
    busy_s, saved_s = least_s(SPEED, together, num_rows=4)
    assert busy_s == pytest.approx(saved_s)


def test_an_engines_least_work_leaves_out_what_was_computed_again() -> None:
    requests = [Asked(at_s=0.0, num_tokens=40, prompt=n) for n in range(2)]
    roomy, narrow = (replace(SPEED, step_s=0.0, cached_token_s=0.0, kv_tokens=room) for room in (0, 70))
    (_, least), (worked, least_again) = (least_s(speed, requests, num_rows=2) for speed in (roomy, narrow))
    assert worked > least_again == pytest.approx(least)


def test_a_scored_prompt_takes_the_time_of_its_prefill_and_one_step() -> None:
    async def score() -> tuple[Completion, float]:
        engine = SimulatedEngine("m", write, speed=replace(SPEED, prefill_token_s=0.001, request_s=0.0))
        context = RequestContext(request_id="r", group_id="g", role="m")
        completion = await engine.generate(tuple(range(500)), make_scoring_params(start=400, top_k=3), context)
        return completion, engine.busy_s

    completion, busy_s = run_virtually(score)
    assert (completion.token_ids, completion.finish_reason) == ((), "stop")
    assert completion.scores is not None and completion.scores.top_ids_NK is not None
    assert len(completion.scores.logprobs_N) == 100 and completion.scores.top_ids_NK.shape == (100, 3)
    assert 0.5 < busy_s < 0.6
