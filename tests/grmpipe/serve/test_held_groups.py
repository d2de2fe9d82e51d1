"""Requests of trainers that can't be told "failed": what they wait for, how long, what they get. On a virtual clock."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

import grmpipe
from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.config.run_config import RunConfig
from grmpipe.data.rows import Row
from grmpipe.judge.pointwise_adapter import rollout_of_text
from grmpipe.judge.verdict import make_failure, outcome, report_failures, report_score
from grmpipe.observe.guard import Guard
from grmpipe.observe.journal import read_journal
from grmpipe.observe.recorder import JudgedSibling
from grmpipe.run.tasks.serve import find_served_judges
from grmpipe.serve.admission import Refused
from grmpipe.serve.call_log import Imputations
from grmpipe.serve.held_groups import Call, HeldGroups
from grmpipe.serve.wire import Asked, Reward
from grmpipe.serve.wires import WIRES

ROW: Row = {"prompt": "6 x 7?", "reference": "42"}
FUNCTION = ("judge=function", "judge.function=own.reward")
MEAN = (*FUNCTION, "serve.on_failure=mean_of_group")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class FakeJudge:
    """A response is a number, its reward, or "lost", which fails; from `heals_s` on it has the reward 0.75.

    asked: when, the name and the responses of each question.
    """

    def __init__(self, takes_s: float = 5, heals_s: float = 1e9, busy_s: float = 0) -> None:
        self.asked: list[tuple[float, str, tuple[str, ...]]] = []
        self.num_ended = 0
        self._takes_s, self._heals_s, self._busy_s = takes_s, heals_s, busy_s

    async def judge(self, row: Row, name: str, client: str) -> Sequence[JudgedSibling]:
        now_s = asyncio.get_running_loop().time()
        if now_s < self._busy_s:
            raise Refused(429, "too many")
        texts: Any = row["responses"]
        self.asked.append((now_s, str(row["prompt_id"]), tuple(texts)))
        await asyncio.sleep(self._takes_s)
        self.num_ended += 1
        return [self._judge_text(place, text) for place, text in enumerate(texts)]

    def _judge_text(self, place: int, text: str) -> JudgedSibling:
        rollout = rollout_of_text("g", place, text)
        if text == "lost" and asyncio.get_running_loop().time() < self._heals_s:
            report = report_failures(make_failure("unparseable", "it ends with 'hm'", 1))
        else:
            reward = 0.75 if text == "lost" else float(text)
            report = report_score(outcome(rollout, reward), reward, {})
        return JudgedSibling(group_id="g", sibling=place, report=report)


@functools.cache
def compose(*overrides: str) -> RunConfig:
    return grmpipe.compose(overrides=["task=serve", *overrides])


def hold(
    judge: FakeJudge, *overrides: str, degraded: bool = False, imputations: Imputations | None = None
) -> HeldGroups:
    imputations = imputations or Imputations(Path(), "run", Guard())
    config = compose(*overrides)
    return HeldGroups(config.serve, find_served_judges(config), judge.judge, lambda: degraded, imputations)


def call_of(trainer: str = "openrlhf", size: int | None = None, judge: str = "reward") -> Call:
    wire = WIRES[trainer]
    return Call(
        judge=judge, client="run1", sender="run1", group_size=size, timeout_s=wire.timeout_s or 900, tries=wire.tries,
        gap_s=wire.gap_s,
    )  # fmt: skip


def ask(held: HeldGroups, response: str, call: Call, **fields: Any) -> asyncio.Task[Reward]:
    return asyncio.ensure_future(held.ask(Asked(row=ROW, response=response, **fields), call))


def run(main: Callable[[], Any]) -> Any:
    return run_virtually(main)


def test_a_failed_judgement_is_asked_again_with_new_seeds_and_growing_pauses() -> None:
    async def main() -> None:
        judge = FakeJudge(takes_s=5, heals_s=33)
        reward = await ask(hold(judge, *FUNCTION), "lost", call_of())
        assert reward == Reward(value=0.75)
        assert [when for when, _, _ in judge.asked] == [0, 6, 13, 22, 35]
        names = [name for _, name, _ in judge.asked]
        assert len(set(names)) == 5 and all(name.startswith(names[0]) for name in names)

    run(main)


@pytest.mark.parametrize("trainer", WIRES)
def test_no_client_waits_to_its_timeout_and_each_is_told_the_cause(trainer: str) -> None:
    async def main() -> None:
        call = call_of(trainer)
        with pytest.raises(Refused, match="unparseable .it ends with 'hm'., judged .* times") as refused:
            await ask(hold(FakeJudge(), *FUNCTION), "lost", call)
        took_s = asyncio.get_running_loop().time()
        assert refused.value.status == 503 and 0.9 * call.timeout_s < took_s < call.timeout_s

    run(main)


def test_the_next_try_finds_what_was_asked_meanwhile() -> None:
    async def main() -> None:
        judge, call = FakeJudge(takes_s=1, heals_s=400), call_of("openrlhf")
        held = hold(judge, *FUNCTION)
        for _ in range(2):
            with pytest.raises(Refused):
                await ask(held, "lost", call)
            await asyncio.sleep(1)
        assert await ask(held, "lost", call) == Reward(value=0.75)
        times = [when for when, _, _ in judge.asked]
        assert max(later - one for one, later in itertools.pairwise(times)) == 31, "it goes on as before"
        assert not held._groups, "nothing stays"

    run(main)


def test_a_slow_judgement_is_waited_for_by_the_next_try_and_asked_once() -> None:
    async def main() -> None:
        judge = FakeJudge(takes_s=200)
        held = hold(judge, *FUNCTION)
        with pytest.raises(Refused, match="still being judged"):
            await ask(held, "0.5", call_of())
        await asyncio.sleep(1)
        assert await ask(held, "0.5", call_of()) == Reward(value=0.5) and len(judge.asked) == 1

    run(main)


def test_what_a_client_that_goes_away_has_asked_ends() -> None:
    async def main() -> None:
        judge = FakeJudge(takes_s=600)
        held = hold(judge, *FUNCTION)
        asked = ask(held, "lost", call_of("slime"))
        await asyncio.sleep(1)
        asked.cancel()
        await asyncio.sleep(1000)
        assert (len(judge.asked), judge.num_ended) == (1, 0) and not held._groups and not held.in_flight

    run(main)


def test_nothing_is_judged_again_for_a_client_that_is_away() -> None:
    async def main() -> None:
        judge = FakeJudge()
        held = hold(judge, *FUNCTION)
        asked = ask(held, "lost", call_of("slime"))
        await asyncio.sleep(1)
        asked.cancel()
        await asyncio.sleep(100)
        assert len(judge.asked) == 1
        again = ask(held, "lost", call_of("slime"))
        await asyncio.sleep(1)
        assert len(judge.asked) == 2, "it was only away"
        again.cancel()

    run(main)


def test_a_full_service_is_waited_for() -> None:
    async def main() -> None:
        assert await ask(hold(FakeJudge(busy_s=20), *FUNCTION), "0.5", call_of()) == Reward(value=0.5)

    run(main)


def test_equal_responses_at_once_have_one_name_so_that_they_are_judged_once() -> None:
    async def main() -> None:
        judge = FakeJudge()
        held = hold(judge, *FUNCTION)
        await asyncio.gather(*(ask(held, "1", call_of()) for _ in range(2)))
        assert len({name for _, name, _ in judge.asked}) == 1

    run(main)


# -- the mean of the group ---------------------------------------------------------------------------------------------


def ask_example(imputations: Imputations, *, degraded: bool = False) -> list[Reward | BaseException]:
    """Rewards of 1, 0, 0 and a lost one, which come at different times, of OpenRLHF's first try."""

    async def main() -> list[Reward | BaseException]:
        held = hold(FakeJudge(), *MEAN, degraded=degraded, imputations=imputations)
        tasks = []
        for response in ("1", "lost", "0", "0"):
            tasks.append(ask(held, response, call_of(size=4)))
            await asyncio.sleep(20)
        rewards = await asyncio.gather(*tasks, return_exceptions=True)
        assert degraded or not held._groups
        return rewards

    return run(main)


def test_a_failed_sibling_gets_the_mean_of_the_others_and_is_no_verdict(tmp_path: Path) -> None:
    imputations = Imputations(tmp_path, "run", Guard())
    first, lost, *rest = ask_example(imputations)
    assert [first, *rest] == [Reward(value=1), Reward(value=0), Reward(value=0)]
    assert lost == Reward(value=1 / 3, imputed="unparseable")
    assert imputations.causes == {"unparseable": 1}
    (found,) = read_journal(tmp_path / "imputed.jsonl")
    assert found["mean_of_siblings"] == 1 / 3 and found["num_siblings"] == 3 and found["failed"] == "unparseable"
    assert found["detail"] == "it ends with 'hm'" and found["judge"] == "reward" and found["client"] == "run1"


def test_the_advantages_of_the_judged_siblings_are_those_without_the_lost_one(tmp_path: Path) -> None:
    """By the formulas of OpenRLHF's dr_grpo, slime without std normalisation, verl with norm_adv_by_std_in_grpo=False:
    reward minus the group's mean. A division by the standard deviation makes all of them larger by one factor.
    """
    imputations = Imputations(tmp_path, "run", Guard())
    rewards = [one.value for one in ask_example(imputations) if isinstance(one, Reward)]
    mean = fmean(rewards)
    first, lost, *rest = [one - mean for one in rewards]
    assert [first, *rest] == pytest.approx([2 / 3, -1 / 3, -1 / 3], abs=1e-6) and abs(lost) < 1e-6
    assert stdev([1, 0, 0]) / stdev(rewards) == pytest.approx((3 / 2) ** 0.5), "the factor of docs/serving_urls.md"


def test_above_the_failure_rate_no_mean_is_given(tmp_path: Path) -> None:
    imputations = Imputations(tmp_path, "run", Guard())
    first, lost, *rest = ask_example(imputations, degraded=True)
    assert [first, *rest] == [Reward(value=1), Reward(value=0), Reward(value=0)]
    assert isinstance(lost, Refused) and lost.status == 503 and "unparseable" in str(lost)
    assert not imputations.causes and not (tmp_path / "imputed.jsonl").exists()


def test_one_judged_sibling_makes_no_mean() -> None:
    async def main() -> None:
        held = hold(FakeJudge(), *MEAN)
        judged, lost = (ask(held, response, call_of("miles", size=2)) for response in ("1", "lost"))
        assert await judged == Reward(value=1)
        with pytest.raises(Refused, match="unparseable"):
            await lost

    run(main)


def test_siblings_that_do_not_come_are_waited_for_once() -> None:
    async def main() -> None:
        judge = FakeJudge()
        held = hold(judge, *MEAN, "serve.group_wait_s=100")
        asked = [ask(held, response, call_of(size=8)) for response in ("1", "lost", "0.5")]
        assert await asked[1] == Reward(value=0.75, imputed="unparseable")
        assert asyncio.get_running_loop().time() == 100 and len(judge.asked) == 3 and not held._groups

    run(main)


def test_a_client_that_asks_once_gets_the_mean_of_what_is_there_before_its_timeout() -> None:
    async def main() -> None:
        held = hold(FakeJudge(), *MEAN)
        asked = [ask(held, response, call_of("miles", size=8)) for response in ("1", "lost", "0.5")]
        assert await asked[1] == Reward(value=0.75, imputed="unparseable")
        assert 250 < asyncio.get_running_loop().time() < 300

    run(main)


def test_equal_siblings_are_both_counted() -> None:
    async def main() -> None:
        held = hold(FakeJudge(), *MEAN)
        asked = [ask(held, response, call_of(size=4)) for response in ("1", "1", "0", "lost")]
        assert (await asyncio.gather(*asked))[3] == Reward(value=2 / 3, imputed="unparseable")

    run(main)


def test_groups_of_equal_prompts_are_told_apart_by_sender_and_group_id() -> None:
    async def main() -> None:
        held, call = hold(FakeJudge(), *MEAN), call_of(size=3)
        asked = [
            ask(held, response, who, group_id=group)
            for responses in (("1", "0", "1", "0"), ("1", "0", "1", "0"), ("lost",) * 4)
            for response, (who, group) in zip(
                responses, ((call, "a"), (call, "b"), (call, ""), (replace(call, sender="run2"), "")), strict=True
            )
        ]
        assert [one.value for one in (await asyncio.gather(*asked))[-4:]] == [1, 0, 1, 0]

    run(main)


# -- judges that compare -----------------------------------------------------------------------------------------------


def test_a_judge_that_compares_gets_the_group_whole() -> None:
    async def main() -> None:
        judge = FakeJudge()
        held = hold(judge, "judge=listwise")
        asked = []
        for response in ("1", "0", "0"):
            asked.append(ask(held, response, call_of(size=3)))
            await asyncio.sleep(30)
        assert [one.value for one in await asyncio.gather(*asked)] == [1, 0, 0]
        assert [(when, texts) for when, _, texts in judge.asked] == [(60, ("1", "0", "0"))] and not held._groups

    run(main)


def test_a_group_that_fails_in_part_is_judged_again_whole() -> None:
    async def main() -> None:
        judge = FakeJudge(heals_s=10)
        rewards = await asyncio.gather(
            *(
                ask(held, response, call_of(size=2))
                for held in [hold(judge, "judge=listwise")]
                for response in ("1", "lost")
            )
        )
        assert [one.value for one in rewards] == [1, 0.75] and [texts for *_, texts in judge.asked] == [
            ("1", "lost")
        ] * 2

    run(main)


def test_siblings_whose_clients_try_again_keep_their_places() -> None:
    async def main() -> None:
        judge, call = FakeJudge(), call_of(size=2)
        held = hold(judge, "judge=listwise")
        with pytest.raises(Refused, match=r"group_size=2: it waits for its siblings, 1 are here"):
            await ask(held, "1", call)
        await asyncio.sleep(1)
        rewards = await asyncio.gather(ask(held, "1", call), ask(held, "0", call))
        assert [one.value for one in rewards] == [1, 0] and len(judge.asked) == 1

    run(main)


def test_a_group_that_is_being_judged_takes_no_other_sibling() -> None:
    async def main() -> None:
        held, call = hold(FakeJudge(takes_s=60), "judge=listwise"), call_of(size=2)
        stays, goes = ask(held, "1", call), ask(held, "0", call)
        await asyncio.sleep(1)
        goes.cancel()
        await asyncio.sleep(30)
        other = [ask(held, response, call) for response in ("0.5", "0.25")]
        assert [one.value for one in await asyncio.gather(stays, *other)] == [1, 0.5, 0.25]

    run(main)


@pytest.mark.parametrize(
    ("trainer", "connections", "overrides", "outage"),
    [
        ("openrlhf", 10_000, MEAN, (0, 0)),
        ("openrlhf", 10_000, FUNCTION, (50, 600)),
        ("slime", 16, MEAN, (0, 0)),
        ("slime", 16, FUNCTION, (50, 600)),
        ("slime", 16, ("judge=listwise",), (0, 0)),
    ],
)
def test_a_step_of_a_trainer_gets_all_its_rewards(
    trainer: str, connections: int, overrides: tuple[str, ...], outage: tuple[float, float]
) -> None:
    """16 groups of 8 that come over five minutes, with the trainer's timeouts, tries and pauses. One response in
    sixteen is lost for the mean; else the judge is away for nine minutes.
    """
    rng, wire, size = random.Random(7), WIRES[trainer], 8

    class Judge(FakeJudge):
        async def judge(self, row: Row, name: str, client: str) -> Sequence[JudgedSibling]:
            self._takes_s = rng.uniform(2, 30)
            texts = [text.split()[0] for text in row["responses"]]  # type: ignore[attr-defined]
            is_away = outage[0] <= asyncio.get_running_loop().time() < outage[1]
            return await super().judge(row | {"responses": ["lost"] * len(texts) if is_away else texts}, name, client)

    async def main() -> None:
        held, places = hold(Judge(), *overrides), asyncio.Semaphore(connections)

        async def ask_again(prompt: str, response: str) -> Reward:
            await asyncio.sleep(rng.uniform(0, 300))
            for attempt in range(wire.tries):
                try:
                    async with asyncio.timeout(wire.timeout_s):
                        async with places:
                            return await held.ask(
                                Asked(row={"prompt": prompt}, response=response), call_of(trainer, size)
                            )
                except (Refused, TimeoutError):
                    await asyncio.sleep(1 if trainer == "openrlhf" else min(2**attempt, 30) + rng.random())
            raise AssertionError("the trainer has given up")

        def draw(place: int) -> str:
            is_lost = overrides == MEAN and place % 16 == 3
            return f"{'lost' if is_lost else rng.choice([0, 1])} {rng.random()}"

        responses = [draw(place) for place in range(16 * size)]
        asked = [ask_again(f"prompt {place // size}", one) for place, one in enumerate(responses)]
        rewards = await asyncio.gather(*asked)
        for begin in range(0, len(rewards), size):
            found = [one.split()[0] for one in responses[begin : begin + size]]
            known = [float(one) for one in found if one != "lost"]
            expected = [fmean(known) if one == "lost" else float(one) for one in found]
            assert [one.value for one in rewards[begin : begin + size]] == pytest.approx(expected)
        assert not held._groups

    run(main)


def test_a_group_that_stays_incomplete_is_refused() -> None:
    async def main() -> None:
        held = hold(judge := FakeJudge(), "judge=listwise", "serve.group_wait_s=50")
        with pytest.raises(Refused, match=r"group_size=3: only 1 siblings came within serve\.group_wait_s=50"):
            await ask(held, "1", call_of(size=3))
        assert not judge.asked and not held._groups

    run(main)


@pytest.mark.parametrize(
    ("overrides", "size", "fields", "words"),
    [
        (("judge=listwise",), None, {}, r"group_size: reward compares .*\?group_size="),
        (("judge=listwise",), 1, {}, r"group_size: reward compares .* for an evaluation another judge"),
        (MEAN, None, {}, r"group_size: serve\.on_failure=mean_of_group .*\?group_size=1"),
        ((*MEAN, "serve.max_in_flight=64"), 65, {}, r"group_size: at most serve\.max_in_flight=64, got 65"),
        ((*MEAN, "serve.max_in_flight=64"), 4, {"group_size": 65}, r"group_size: at most"),
    ],
)
def test_a_group_whose_size_does_not_fit_is_refused_with_the_way_out(
    overrides: tuple[str, ...], size: int | None, fields: Any, words: str
) -> None:
    async def main() -> None:
        with pytest.raises((Refused, ValueError), match=words):
            await ask(hold(FakeJudge(), *overrides), "1", call_of(size=size), **fields)

    run(main)


def test_a_group_of_another_size_or_prompt_than_it_says_is_refused() -> None:
    async def main() -> None:
        held, call = hold(FakeJudge(), *MEAN), call_of(size=2)
        asked = [ask(held, response, call, group_id="g") for response in ("1", "lost")]
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="group_id: 'g' has its group_size=2 siblings already"):
            await ask(held, "0", call, group_id="g")
        with pytest.raises(ValueError, match="group_id: the siblings of 'g' have another prompt"):
            await held.ask(Asked(row={"prompt": "7 x 7?"}, response="0", group_id="g"), call)
        for one in asked:
            one.cancel()

    run(main)


def test_the_end_of_the_service_lets_nobody_wait() -> None:
    async def main() -> None:
        failing, comparing = hold(FakeJudge(), *FUNCTION), hold(FakeJudge(), "judge=listwise")
        asked = [ask(failing, "lost", call_of()), ask(failing, "1", call_of()), ask(comparing, "1", call_of(size=2))]
        await asyncio.sleep(1)
        failing.end()
        comparing.end()
        lost, judged, waiting = await asyncio.gather(*asked, return_exceptions=True)
        assert judged == Reward(value=1) and asyncio.get_running_loop().time() == 5, "what is being judged is answered"
        assert [str(one) for one in (lost, waiting)] == ["the service is ending"] * 2

    run(main)
