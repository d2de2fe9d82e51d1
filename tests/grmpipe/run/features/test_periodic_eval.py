"""Evaluations during a run: what they measure, when they take place, and when the alarm fires."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from scored_rollouts import LOST, prompt, rollout, verdict

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.envs.play import RolloutRequest
from grmpipe.envs.retry_episode import EpisodeFailed
from grmpipe.evaluation.held_out import Evaluator
from grmpipe.evaluation.sampled_answers import AnswerSampling
from grmpipe.judge.composition.combine_verdicts import MeasuredSkill
from grmpipe.judge.kinds.rule import is_right
from grmpipe.judge.monitor.reward_hacking import REWARD, RewardHackingDetector
from grmpipe.judge.pointwise_adapter import PointwiseAdapter
from grmpipe.models.types import EngineRefused
from grmpipe.observe.all_trackers import AllTrackers
from grmpipe.observe.journal import Mark
from grmpipe.observe.recorder import EVAL_ROLLOUTS, EvalRecorder, load_eval_rollouts
from grmpipe.pipeline.health import ServiceHealth, Unfit
from grmpipe.run.errors import RunFailed
from grmpipe.run.features.periodic_eval import PeriodicEval
from grmpipe.run.features.run_feature import StepEnd
from grmpipe.types import (
    Failed,
    JudgeReport,
    JudgeSession,
    JudgeTask,
    Prompt,
    Rollout,
    Verdict,
)

NOWHERE = Path("/dev/null/nowhere")  # no folder can be made there
UNRECORDED = EvalRecorder(NOWHERE)


def end_of(step: int, *, is_last: bool) -> StepEnd:
    return cast(StepEnd, SimpleNamespace(step=step, is_last=is_last))


class Judge:
    def __init__(self, score: Callable[[Rollout], Verdict | Failed]) -> None:
        self._score = score

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        return JudgeReport(verdict=self._score(rollout))


async def played(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
    index = int(request.group_id.rsplit("-", 1)[1])
    if index == 3:
        raise EngineRefused("too long")
    return rollout(0, text=f"Answer: {index}")


def evaluator(score: Callable[[Rollout], Verdict | Failed], references: tuple[str | None, ...]) -> Evaluator:
    return Evaluator(
        prompts=[prompt(reference) for reference in references],
        play_sampled=played, play_greedy=played, judge=PointwiseAdapter(Judge(score)), is_right=is_right, seed=0,
    )  # fmt: skip


def test_evaluation_leaves_out_what_failed() -> None:
    def score(rollout: Rollout) -> Verdict | Failed:
        return LOST if "0" in rollout.text else verdict(8)

    looked = asyncio.run(evaluator(score, ("0", "7", None, "3")).evaluate("look"))
    assert looked.metrics["true_accuracy"] == 0.5  # over two with a reference; the fourth could not be played
    assert looked.metrics["grm_score"] == 8
    assert len(looked.rollouts) == 3


def test_several_samples_of_a_prompt_give_avg_and_pass_at_k_and_keep_the_first_sample() -> None:
    """The second prompt is right in two of four samples, and the verdict on one of these fails."""
    seeds: dict[str, int] = {}

    async def sampled(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        seeds[request.group_id] = request.seed
        _, _, sample = request.group_id.rpartition("-")[2].partition(".")
        right = prompt.prompt_id == "p1" and int(sample or 0) in (0, 2)
        return rollout(0, text=f"Answer: {7 if right else 8} {'lost' * (sample == '2')}")

    def score(rollout: Rollout) -> Verdict | Failed:
        return LOST if "lost" in rollout.text else verdict(10 if "7" in rollout.text else 1)

    prompts = [dataclasses.replace(prompt("7"), prompt_id=f"p{index}") for index in range(2)]
    alone = dataclasses.replace(
        evaluator(score, ()), prompts=prompts, play_sampled=sampled, play_greedy=sampled, pass_reward=0.5
    )
    four = dataclasses.replace(alone, counting=AnswerSampling(num_samples=4, pass_k=(1, 4)), greedy=False)
    looked = asyncio.run(four.evaluate("look")).metrics
    assert [looked[name] for name in ("avg_at_4", "pass_at_1")] == pytest.approx([(0 + 1 / 3) / 2] * 2)
    assert "pass_at_4" not in looked, "one verdict on each prompt failed"
    assert (looked["true_avg_at_4"], looked["true_pass_at_4"], looked["true_accuracy"]) == (0.25, 0.5, 0.25)
    assert looked["true_pass_at_4_low"] < 0.5 < looked["true_pass_at_4_high"]
    assert "true_accuracy_greedy" not in looked
    assert len(seeds) == len(set(seeds.values())) == 8
    before = {group_id: seed for group_id, seed in seeds.items() if "." not in group_id}
    one = asyncio.run(alone.evaluate("look")).metrics
    assert {group_id: seeds[group_id] for group_id in before} == before
    assert not [name for name in one if "_at_" in name]


def test_an_evaluation_counts_its_episodes_and_those_that_its_environment_failed() -> None:
    async def episode(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        if request.group_id.endswith("-1"):
            raise EpisodeFailed((Failed(stage="env", cause="died", attempts=1),) * 2)
        return dataclasses.replace(rollout(0, text="Answer: 0"), took_s=1.0)

    looker = dataclasses.replace(
        evaluator(lambda rollout: verdict(8), ("0",) * 4), play_sampled=episode, play_greedy=episode
    )
    asyncio.run(looker.evaluate("look"))
    counts = looker.episodes
    assert (counts.episodes, counts.turns, counts.failed, counts.faults) == (6, 6, 2, {"died": 4})


async def hanging_play(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
    await asyncio.sleep(int(request.group_id.rsplit("-", 1)[1]) * 50.0 if "-3" not in request.group_id else 1e9)
    return rollout(0, text="Answer: 0")


def test_evaluation_leaves_out_answers_after_its_deadline() -> None:
    async def go() -> float:
        looker = dataclasses.replace(
            evaluator(lambda rollout: verdict(8), ("0",) * 4), play_sampled=hanging_play, play_greedy=hanging_play,
            deadline_s=60.0,
        )  # fmt: skip
        looked = await looker.evaluate("look")
        assert len(looked.rollouts) == 3
        assert looked.metrics["true_accuracy_greedy"] == 1.0
        return asyncio.get_running_loop().time()

    assert run_virtually(go) == pytest.approx(160.0)


@pytest.mark.parametrize(("num_prompts", "num_played"), [(0, 0), (1, 2)])
def test_the_last_evaluation_takes_place_once_and_none_without_prompts(
    caplog: pytest.LogCaptureFixture, num_prompts: int, num_played: int
) -> None:
    asked: list[str] = []

    async def refused(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        asked.append(request.group_id)
        raise EngineRefused("not now")

    looker = dataclasses.replace(
        evaluator(lambda rollout: verdict(8), ("0",) * num_prompts), play_sampled=refused, play_greedy=refused
    )
    alarm = RewardHackingDetector()
    periodic_eval = PeriodicEval(looker, alarm, AllTrackers({}), UNRECORDED, NOWHERE, anchors=4, every=10)

    async def end() -> None:
        assert await periodic_eval.after_step(end_of(2, is_last=True)) == {}
        await periodic_eval.last(2)

    with caplog.at_level(logging.INFO):
        asyncio.run(end())
    assert len(asked) == num_played
    assert [record.message for record in caplog.records if "held-out at step" in record.message] == (
        ["held-out at step 2: {}"] * num_prompts
    )


def test_interrupt_ends_an_evaluation_and_discards_it(tmp_path: Path) -> None:
    async def go() -> None:
        looker = dataclasses.replace(
            evaluator(lambda rollout: verdict(8), ("0",) * 4), play_sampled=hanging_play, play_greedy=hanging_play
        )
        periodic_eval = PeriodicEval(
            looker,
            RewardHackingDetector(),
            AllTrackers({}),
            recorder := EvalRecorder(tmp_path),
            NOWHERE,
            anchors=4,
            every=10,
        )
        asyncio.get_running_loop().call_later(30.0, periodic_eval.interrupt)
        assert await periodic_eval.after_step(end_of(10, is_last=True)) == {}
        assert asyncio.get_running_loop().time() == pytest.approx(30.0)
        assert (periodic_eval.final, periodic_eval.rows) == ({}, [])
        assert [line.sample for line in load_eval_rollouts(tmp_path / EVAL_ROLLOUTS)] == [0, None]
        assert recorder.marks[EVAL_ROLLOUTS] == Mark(), "a resume makes it again, and removes these lines"
        looker.play_sampled = looker.play_greedy = played
        periodic_eval.interrupted = False
        await periodic_eval.after_step(end_of(10, is_last=True))
        assert recorder.marks[EVAL_ROLLOUTS].offset == (tmp_path / EVAL_ROLLOUTS).stat().st_size

    run_virtually(go)


def test_a_judge_is_right_where_it_passes_right_answers_and_no_others() -> None:
    def score(rollout: Rollout) -> Verdict | Failed:
        return LOST if "5" in rollout.text else verdict(9 if "4" not in rollout.text else 3)

    looking = dataclasses.replace(evaluator(score, ("0", "7", None, "3", "7", "5")), pass_reward=7 / 9)
    looked = asyncio.run(
        looking.evaluate("look")
    )  # passed and right, passed and wrong, -, not played, not passed, failed
    assert looked.metrics["grm_accuracy"] == pytest.approx(2 / 3)
    assert "grm_accuracy" not in asyncio.run(evaluator(score, ("0",)).evaluate("look")).metrics
    by_rule = dataclasses.replace(looking, by_model=False)
    assert "grm_accuracy" not in asyncio.run(by_rule.evaluate("look")).metrics


class TwoJudges:
    """A first judge that gives everything 4 of 10, and a rule that knows the truth; the reward is the rule's."""

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        right = rollout.text in ("Answer: 0", "Answer: 2")
        mine, ruled = verdict(4), verdict(10 if right else 1)
        own = {"judge": JudgeReport(verdict=mine), "rule": JudgeReport(verdict=ruled)}
        return JudgeReport(verdict=LOST if "1" in rollout.text else ruled, by_judge=own)


def test_evaluation_separates_the_first_judges_score_from_the_reward() -> None:
    """The first judge's metrics hold nothing of the truth that the rule added."""
    skill = MeasuredSkill()
    looking = dataclasses.replace(
        evaluator(lambda rollout: LOST, ("0", "7", "2")),
        judge=PointwiseAdapter(TwoJudges()), first="judge", pass_reward=0.7, skill=skill,
    )  # fmt: skip
    metrics = asyncio.run(looking.evaluate("look")).metrics
    assert metrics["grm_score"] == 4
    assert metrics["reward"] == pytest.approx(verdict(10).outcome), "the verdict of the second answer failed"
    assert metrics["grm_accuracy"] == pytest.approx(1 / 3)
    assert metrics["rule_accuracy"] == 1.0 and "judge_accuracy" not in metrics
    assert skill.weights() == {"judge": 0.0, "rule": 1.0}


class Escalating:
    """A rule, and behind it a judge that gives 10 to the only answer that it is asked about."""

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        good, cheap = JudgeReport(verdict=verdict(10)), JudgeReport(verdict=verdict(1))
        own = {"rule": cheap} | ({"judge": good} if "2" in rollout.text else {})
        return JudgeReport(verdict=(good if "judge" in own else cheap).verdict, by_judge=own)


def test_judge_that_sees_a_part_of_the_answers_gives_no_score_and_no_accuracy_of_the_grm() -> None:
    """A mean over answers that other verdicts have chosen would move with the choice, and the hacking alarm with it."""
    looking = dataclasses.replace(
        evaluator(lambda rollout: LOST, ("0", "7", "2")), judge=PointwiseAdapter(Escalating()), pass_reward=0.7
    )
    metrics = asyncio.run(looking.evaluate("look")).metrics
    assert metrics["grm_score"] == (1 + 1 + 10) / 3
    assert metrics["reward"] == pytest.approx(1 / 3)
    assert metrics["grm_accuracy"] == metrics["rule_accuracy"] + 1 / 3 == pytest.approx(2 / 3)
    assert metrics["judge_accuracy"] == 1.0


def dead(rollout: Rollout) -> Failed:
    return Failed(stage="judge", cause="refused", attempts=3, detail="no such host")


def unreadable(rollout: Rollout) -> Failed:
    return Failed(stage="judge", cause="unparseable", attempts=3)


def breakable(window: int = 256) -> Callable[[], ServiceHealth]:
    return lambda: ServiceHealth(
        "judging", max_failure_rate=0.2, window=window, pause_s=0.01, counted="verdicts", key="judge.max_failure_rate"
    )


def test_an_evaluation_of_a_dead_judge_is_no_number_and_of_an_unreadable_one_has_none_of_it() -> None:
    looker = dataclasses.replace(evaluator(dead, ("0", "1", "2")), make_health=breakable())
    with pytest.raises(Unfit, match=r"^3 of 3 verdicts failed \(100%; judge\.max_failure_rate=0\.2\): 3 refused; "):
        asyncio.run(looker.evaluate("look"))
    read = dataclasses.replace(evaluator(unreadable, ("0", "1", "2")), make_health=breakable())
    assert "grm_score" not in asyncio.run(read.evaluate("look")).metrics


def test_an_evaluation_pauses_once_and_then_asks_a_dead_judge_no_more() -> None:
    asked = 0

    def count(rollout: Rollout) -> Failed:
        nonlocal asked
        asked += 1
        return dead(rollout)

    async def play(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        return rollout(0, text="Answer: 1")

    looker = dataclasses.replace(
        evaluator(count, ("1",) * 512), play_sampled=play, greedy=False, make_health=breakable(window=16)
    )

    async def evaluate() -> None:
        await dataclasses.replace(looker, places=asyncio.Semaphore(4)).evaluate("look")

    with pytest.raises(Unfit, match=r"again after a pause of 0\.01 s: 4 refused"):
        asyncio.run(evaluate())
    assert asked < 24


def test_a_judge_that_is_silent_to_the_deadline_has_timed_out() -> None:
    class Silent:
        async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
            if "0" not in rollout.text:
                await asyncio.Event().wait()
            return JudgeReport(verdict=verdict(8))

    looker = dataclasses.replace(
        evaluator(dead, ("0", "1", "2")), judge=PointwiseAdapter(Silent()), deadline_s=0.05, make_health=breakable()
    )
    with pytest.raises(Unfit, match="2 of 3 verdicts failed .*2 timeout"):
        asyncio.run(looker.evaluate("look"))


@pytest.mark.parametrize("is_last", [False, True])
def test_a_judge_that_dies_during_a_run_stops_it_in_order_and_leaves_no_figures(is_last: bool) -> None:
    interrupted: list[bool] = []
    pipeline = SimpleNamespace(interrupt=lambda: interrupted.append(True))
    looker = dataclasses.replace(evaluator(dead, ("0", "1", "2")), make_health=breakable())
    periodic = PeriodicEval(looker, RewardHackingDetector(), AllTrackers({}), UNRECORDED, NOWHERE, anchors=8, every=10)
    end = cast(StepEnd, SimpleNamespace(step=10, is_last=is_last, pipeline=pipeline))
    assert asyncio.run(periodic.after_step(end)) == {} == periodic.final
    assert interrupted and periodic.interrupted
    assert periodic.stopped.startswith("the evaluation at step 10 has no figures: 3 of 3 verdicts failed")
    asyncio.run(periodic.last(10))  # it is over: nothing is asked again
    by_hand = PeriodicEval(looker, RewardHackingDetector(), AllTrackers({}), UNRECORDED, NOWHERE, anchors=8, every=10)
    with pytest.raises(RunFailed, match="the evaluation at step 3 has no figures"):
        asyncio.run(by_hand.evaluate_all(3))
    with pytest.raises(Unfit):
        asyncio.run(by_hand.first(0))


def test_without_references_there_is_no_accuracy() -> None:
    assert "true_accuracy" not in asyncio.run(evaluator(lambda r: verdict(5), (None, None)).evaluate("look")).metrics


def test_alarm_fires_once_and_a_restored_run_compares_with_its_first_evaluation() -> None:
    rung: list[str] = []
    looks = [(4.0, "Answer: 1"), (9.0, "Answer: 5"), (9.5, "Answer: 5"), (4.0, "Answer: 1"), (9.0, "Answer: 5")]
    now = SimpleNamespace(score=0.0, text="")

    async def play(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        return rollout(0, text=now.text)

    judge = Judge(lambda rollout: verdict(now.score))
    looker = Evaluator(
        prompts=[dataclasses.replace(prompt("1"), prompt_id=str(number)) for number in range(8)],
        play_sampled=play,
        play_greedy=play,
        judge=PointwiseAdapter(judge),
        is_right=is_right,
        seed=0,
    )
    alarm = RewardHackingDetector()
    periodic_eval = PeriodicEval(looker, alarm, AllTrackers({}), UNRECORDED, NOWHERE, anchors=8, every=10)
    ringing = []
    for step, (now.score, now.text) in enumerate(looks):
        asyncio.run(periodic_eval.first(0) if step == 0 else periodic_eval.after_step(end_of(step * 10, is_last=False)))
        ringing.append(periodic_eval.ringing)
        rung += periodic_eval.alarms(is_last=False)
    assert ringing == [False, True, True, False, True]
    assert len(rung) == 2
    again = PeriodicEval(
        looker,
        RewardHackingDetector(),
        AllTrackers({}),
        UNRECORDED,
        NOWHERE,
        anchors=8,
        every=10,
    )
    again.restore(periodic_eval.state())
    assert again.ringing
    assert again.initial["grm_score"] == 4


class Pairs:
    """Gives the longer of two responses the win; takes no response by itself."""

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        return PairsSession(size)


class PairsSession:
    def __init__(self, size: int) -> None:
        self._size = size
        self._rollouts: list[Rollout] = []

    def begin(self) -> tuple[JudgeTask, ...]:
        return ()

    def add(self, rollout: Rollout) -> tuple[JudgeTask, ...]:
        self._rollouts.append(rollout)
        return (JudgeTask(members=(0, 1)),) if len(self._rollouts) == self._size == 2 else ()

    async def judge(self, judge_task: JudgeTask, priority: int = 0) -> dict[int, JudgeReport]:
        one, other = (len(rollout.text) for rollout in self._rollouts)
        won = 0.5 if one == other else float(one > other)
        return {i: JudgeReport(verdict=verdict(1 + 9 * share)) for i, share in enumerate((won, 1 - won))}


def test_comparing_judge_gets_each_answer_next_to_the_first_one_also_after_a_resume(tmp_path: Path) -> None:
    now = SimpleNamespace(text="Answer: 1")

    async def play(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        return rollout(0, text=now.text)

    def periodic() -> PeriodicEval:
        looker = Evaluator(
            prompts=[dataclasses.replace(prompt("1"), prompt_id=str(number)) for number in range(8)],
            play_sampled=play, play_greedy=play, judge=Pairs(), is_right=is_right, seed=0, compares=True,
        )  # fmt: skip
        alarm = RewardHackingDetector()
        return PeriodicEval(
            looker, alarm, AllTrackers({}), EvalRecorder(tmp_path), tmp_path / "anchors.jsonl", anchors=8, every=10
        )

    begun = periodic()
    asyncio.run(begun.first(0))
    assert begun.state()["alarm"]["kept"][0]["rewards"] == {REWARD: dict.fromkeys("01234567", 0.5)}
    resumed = periodic()
    resumed.restore(begun.state())
    now.text = "So long. Answer: 5"
    asyncio.run(resumed.after_step(end_of(10, is_last=False)))
    rung = resumed.alarms(is_last=False)
    assert len(rung) == 1 and "the reward is 1.00 (0.50 at step 0)" in rung[0]
