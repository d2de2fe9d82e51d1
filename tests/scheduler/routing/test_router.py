"""Several engines as one: where requests go, and what a death changes (only the place)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine
from grmpipe.models.types import (
    Completion,
    EngineDied,
    EngineRefused,
    EngineSpeed,
    RequestContext,
    SamplingParams,
    make_scoring_params,
)
from grmpipe.scheduler.routing.load import SIBLINGS_AHEAD
from grmpipe.scheduler.routing.router import Router


class Spans:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def span(self, lane: str, name: str, start_s: float, end_s: float, **args: str | int | float) -> None:
        assert end_s >= start_s
        self.seen.append((lane, name))


class Recorded(SimulatedEngine):
    """Its answer depends only on ids and seed, like a real engine's."""

    def __init__(self, tokens_per_s: float = 1e6) -> None:
        super().__init__("policy", self._write, tokens_per_s=tokens_per_s)
        self.asked: list[tuple[str, int]] = []

    def _write(self, ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
        if not ids:
            raise EngineRefused("an empty prompt")
        self.asked.append((context.request_id, params.seed))
        return Script(token_ids=(*ids, params.seed), text="x")


def ask(
    router: Router, number: int, group: str | None = None, ids: tuple[int, ...] = (1, 2)
) -> asyncio.Task[Completion]:
    context = RequestContext(request_id=f"r{number}", group_id=group or f"g{number}", role="policy")
    return asyncio.create_task(
        router.generate(ids, SamplingParams(max_new_tokens=8, seed=number), context)  # type: ignore[arg-type]
    )


def two(tokens_per_s: float = 1e6) -> tuple[Router, Recorded, Recorded, Spans]:
    a, b, spans = Recorded(tokens_per_s), Recorded(tokens_per_s), Spans()
    return Router("policy", {"policy-0": a, "policy-1": b}, spans), a, b, spans


def test_requests_go_to_the_engine_with_the_least_to_do() -> None:
    async def main() -> None:
        router, a, b, spans = two()
        await asyncio.gather(*(ask(router, number) for number in range(10)))
        assert len(a.asked) == len(b.asked) == 5
        assert sorted(spans.seen) == [("policy-0", "policy")] * 5 + [("policy-1", "policy")] * 5

    asyncio.run(main())


def test_siblings_stay_together_until_that_would_cost_too_much() -> None:
    async def main() -> None:
        router, a, b, _ = two()
        await asyncio.gather(*(ask(router, number, "g") for number in range(SIBLINGS_AHEAD)))
        assert {len(a.asked), len(b.asked)} == {0, SIBLINGS_AHEAD}
        await asyncio.gather(*(ask(router, number, "h") for number in range(100, 100 + 4 * SIBLINGS_AHEAD)))
        assert min(len(a.asked), len(b.asked)) > SIBLINGS_AHEAD

    asyncio.run(main())


async def turn(router: Router, trajectory: str, ids: tuple[int, ...]) -> Completion:
    """One turn; its group is another each time, so that no home of a group helps."""
    request_id = f"{trajectory}/{len(ids)}"
    context = RequestContext(request_id=request_id, group_id=request_id, role="policy", trajectory_id=trajectory)
    return await router.generate(ids, SamplingParams(max_new_tokens=8), context)


def test_all_turns_of_a_trajectory_go_to_one_engine_until_it_dies() -> None:
    async def main() -> None:
        router, a, b, _ = two()
        for num_tokens in range(1, 6):  # one trajectory less in each round: the least load alone would mix them
            await asyncio.gather(*(turn(router, f"t{n}", (1,) * num_tokens) for n in range(num_tokens, 10)))
        homes = [{request_id.split("/")[0] for request_id, _ in engine.asked} for engine in (a, b)]
        assert homes[0].isdisjoint(homes[1])
        assert all(len(names) >= 4 for names in homes)
        a.die("gone")
        for num_tokens in range(6, 8):
            await asyncio.gather(*(turn(router, name, (1,) * num_tokens) for name in sorted(homes[0])))
        assert homes[0] < {request_id.split("/")[0] for request_id, _ in b.asked}

    asyncio.run(main())


class Keeping(Recorded):
    """An engine that keeps trajectories."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[str] = []

    def end_trajectory(self, trajectory_id: str) -> None:
        self.ended.append(trajectory_id)


def test_the_end_of_a_trajectory_reaches_the_engine_that_has_it_once() -> None:
    async def main() -> None:
        a, b, c = Keeping(), Keeping(), Recorded()
        router = Router("policy", {"policy-0": a, "policy-1": b, "policy-2": c})
        await asyncio.gather(*(turn(router, f"t{n}", (n,) * 9) for n in range(9)))
        homes = [{request_id.split("/")[0] for request_id, _ in engine.asked} for engine in (a, b, c)]
        assert all(homes)
        for name in (*(f"t{n}" for n in range(9)), "unknown", "t0"):
            router.end_trajectory(name)
        assert [set(a.ended), set(b.ended)] == homes[:2], "an engine that keeps none is left alone"
        assert len(a.ended) + len(b.ended) == len(homes[0] | homes[1])

    asyncio.run(main())


def prefilled_share(num_turns: int, keeps_homes: bool) -> float:
    """Tokens that two engines prefill for twelve trajectories, over those of the trajectories."""

    def write(ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
        return Script(token_ids=(5,) * 8, text="x")

    async def play(router: Router, name: str) -> int:
        ids: tuple[int, ...] = (int(name),) * 20
        for number in range(num_turns):
            context = RequestContext(
                request_id=f"{name}/t{number}",
                group_id="g",
                role="policy",
                trajectory_id=name if keeps_homes else f"{name}/{number}",
            )
            completion = await router.generate(ids, SamplingParams(max_new_tokens=8), context)
            ids = (*ids, *completion.token_ids, *(6,) * 12)
            await asyncio.sleep(0.001 * (int(name) % 5))  # its environment
        return len(ids) - 12

    async def main() -> float:
        engines = {name: SimulatedEngine("policy", write, tokens_per_s=1e4) for name in ("policy-0", "policy-1")}
        router = Router("policy", engines)
        lengths = await asyncio.gather(*(play(router, str(name)) for name in range(12)))
        return sum(engine.prefilled_tokens for engine in engines.values()) / sum(lengths)

    return asyncio.run(main())


def test_twenty_turns_over_two_engines_prefill_less_than_the_length_of_the_episodes() -> None:
    assert prefilled_share(20, keeps_homes=True) < 1.0
    assert prefilled_share(20, keeps_homes=False) > 8


def test_requests_of_a_dead_engine_are_sampled_elsewhere_once_with_the_same_seed() -> None:
    async def main() -> None:
        router, a, b, spans = two(tokens_per_s=200)
        answers = [ask(router, number) for number in range(8)]
        await asyncio.sleep(0.005)
        a.die("out of memory")
        done = await asyncio.gather(*answers)
        assert [answer.token_ids for answer in done] == [(1, 2, number) for number in range(8)]
        assert sorted(b.asked) == sorted((f"r{number}", number) for number in range(8))
        assert list(router.members.alive) == ["policy-1"]
        assert spans.seen.count(("policy-0", "died")) == 1

    asyncio.run(main())


def test_prompts_on_a_dead_engine_are_scored_elsewhere_and_no_length_is_learned_from_them() -> None:
    async def main() -> None:
        router, a, _, _ = two(tokens_per_s=200)
        contexts = [RequestContext(request_id=f"s{n}", group_id=f"g{n}", role="policy") for n in range(8)]
        scored = [asyncio.create_task(router.generate((1, 2, 3), make_scoring_params(1), one)) for one in contexts]
        await asyncio.sleep(0.001)
        a.die("out of memory")
        assert [len(one.scores.logprobs_N) for one in await asyncio.gather(*scored) if one.scores] == [2] * 8
        assert router._estimate.new_tokens(SamplingParams(max_new_tokens=64)) == 64

    asyncio.run(main())


def test_the_first_token_is_heard_once_over_a_retry() -> None:
    async def main() -> None:
        router, a, b, _ = two(tokens_per_s=100)
        heard: list[int] = []
        context = RequestContext(request_id="r", group_id="g", role="policy")
        params = SamplingParams(max_new_tokens=8)
        answer = asyncio.create_task(router.generate((1, 2), params, context, lambda: heard.append(1)))
        await asyncio.sleep(0.015)  # after the first of three tokens
        assert heard == [1]
        (a if a.asked else b).die("gone")
        await answer
        assert heard == [1]

    asyncio.run(main())


def test_a_refusal_is_not_tried_elsewhere() -> None:
    async def main() -> None:
        router, a, b, _ = two()
        with pytest.raises(EngineRefused):
            await ask(router, 1, ids=())
        assert len(router.members.alive) == 2
        assert not a.asked
        assert not b.asked

    asyncio.run(main())


def test_router_of_dead_engines_reports_the_first_cause() -> None:
    async def main() -> None:
        router, a, b, _ = two(tokens_per_s=100)
        answer = ask(router, 1)
        await asyncio.sleep(0.005)
        (a if a.asked else b).die("the first cause")
        await asyncio.sleep(0.005)
        (b if router.members.alive == {"policy-1": b} else a).die("the second")
        with pytest.raises(EngineDied, match=r"all engines of role policy died; the first: policy-.: the first cause"):
            await answer

    asyncio.run(main())


def test_requests_wait_for_an_engine_that_is_on_its_way_and_go_to_it() -> None:
    async def main() -> None:
        router, a, b, _ = two(tokens_per_s=100)
        heard: list[str] = []

        def on_death(name: str, death: EngineDied) -> bool:
            heard.append(f"{name}: {death}")
            return True

        router.members.on_death = on_death
        answers = [ask(router, number) for number in range(4)]
        await asyncio.sleep(0.005)
        for engine in (a, b):
            engine.die("out of memory")
        late = ask(router, 9)
        await asyncio.sleep(0.1)
        assert not router.members.alive
        assert not any(answer.done() for answer in (*answers, late))
        assert sorted(heard) == ["policy-0: out of memory", "policy-1: out of memory"]
        newcomer = Recorded()
        router.members.admit("policy-0", newcomer)
        done = await asyncio.gather(*answers, late)
        assert [answer.token_ids for answer in done] == [(1, 2, number) for number in (0, 1, 2, 3, 9)]
        assert sorted(newcomer.asked) == sorted((f"r{number}", number) for number in (0, 1, 2, 3, 9))

    asyncio.run(main())


def test_when_the_last_replacement_is_given_up_those_who_wait_hear_the_first_cause() -> None:
    async def main() -> None:
        router, a, b, _ = two(tokens_per_s=100)
        router.members.on_death = lambda name, death: True
        router.members.mark_dead("policy-0", a, EngineDied("the first cause"))
        answer = ask(router, 1)
        await asyncio.sleep(0.005)
        b.die("the second")
        await asyncio.sleep(0.05)
        router.members.give_up("policy-0")
        await asyncio.sleep(0.01)
        assert not answer.done(), "the other one is still on its way"
        router.members.give_up("policy-1")
        with pytest.raises(EngineDied, match=r"all engines of role policy died; the first: policy-.: the first cause"):
            await answer

    asyncio.run(main())


class Slow(SimulatedEngine):
    """One row at a time; `step_s` per token. Its answer depends only on the seed."""

    def __init__(self, step_s: float) -> None:
        speed = EngineSpeed(step_s=step_s, row_s=0.0, cached_token_s=0.0, prefill_token_s=0.0, max_rows=1)
        super().__init__("policy", self._write, speed=speed)
        self.begun: list[str] = []

    def _write(self, ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
        self.begun.append(context.request_id)
        return Script(token_ids=(params.seed,) * 10, text="x")


def serve_unevenly(num_requests: int, **context: str) -> tuple[float, dict[str, int], list[Completion]]:
    """Seconds, requests that each of a fast and a slow engine was sent, and the answers."""

    async def main() -> tuple[float, dict[str, int], list[Completion]]:
        engines = {"slow": Slow(0.1), "fast": Slow(0.01)}
        router = Router("policy", engines)
        contexts = [
            RequestContext(request_id=f"r{number}", group_id=f"g{number}", role="policy", priority=-number, **context)
            for number in range(num_requests)
        ]
        asked = [
            router.generate((1, 2), SamplingParams(max_new_tokens=10, seed=number), one)
            for number, one in enumerate(contexts)
        ]
        answers = await asyncio.gather(*asked)
        assert router.load.num_requests == 0
        return asyncio.get_running_loop().time(), {name: len(e.begun) for name, e in engines.items()}, answers

    return run_virtually(main)


def test_what_waits_at_a_slow_engine_goes_to_one_with_a_free_row() -> None:
    seconds, sent, answers = serve_unevenly(24)
    assert seconds < 6.0  # it would take 12 if the slow one kept its half
    assert sent["fast"] > 16
    assert [answer.token_ids for answer in answers] == [(number,) * 10 for number in range(24)]


def test_the_turns_of_a_trajectory_stay_where_its_keys_and_values_are() -> None:
    seconds, sent, _ = serve_unevenly(24, trajectory_id="t")
    assert seconds > 11.0
    assert sent == {"slow": 12, "fast": 12}


def test_an_engine_that_dies_while_it_loses_a_request_is_noticed_as_any_other() -> None:
    async def main() -> None:
        engines = {"slow": Slow(0.1), "fast": Slow(0.01)}
        router = Router("policy", engines)
        asked = [ask(router, number) for number in range(24)]
        await asyncio.sleep(0.35)
        engines["slow"].die("gone")
        answers = await asyncio.gather(*asked)
        assert [answer.token_ids[0] for answer in answers] == list(range(24))
        assert router.members.serving.keys() == {"fast"}
        assert router.load.num_requests == 0

    run_virtually(main)
