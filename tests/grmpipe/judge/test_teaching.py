"""Teachers beside a judge: what they are asked, what their scores belong to, and what a failed score does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from grmpipe.judge.pointwise_adapter import judge_group
from grmpipe.judge.teaching import NoReward, Teacher, TeachingJudge
from grmpipe.judge.verdict import get_reward
from grmpipe.models.request_gates import PrioritySemaphore
from grmpipe.models.types import (
    Completion,
    EngineDied,
    EngineRefused,
    RequestContext,
    SamplingParams,
    TokenScores,
    VersionSpan,
    ignore_first_token,
)
from grmpipe.pipeline.health import JudgeHealth, ServiceHealth, Unfit
from grmpipe.types import Failed, JudgeReport, Prompt, Rollout, TeacherScores, Turn, Verdict

PROMPT = Prompt(prompt_id="p", messages=(), source="sums")


class Scores:
    """An engine that gives each token minus its id as log-prob, and twice that to one likely token."""

    def __init__(self, error: Exception | None = None, worth: Callable[[int], float] = float) -> None:
        self.asked: list[tuple[tuple[int, ...], int, str]] = []
        self._error, self._worth = error, worth

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        assert params.scoring is not None
        self.asked.append((tuple(prompt_ids), params.scoring.start, context.request_id))
        if self._error is not None:
            raise self._error
        ids = np.array(prompt_ids[params.scoring.start :])
        logprobs_N = np.array([-self._worth(one) for one in ids.tolist()], np.float32)
        top = params.scoring.top_k > 0
        return Completion(
            token_ids=(),
            logprobs=(),
            text="",
            finish_reason="stop",
            versions=(VersionSpan(model="t", version=0, start=0, end=0),),
            scores=TokenScores(
                logprobs_N=logprobs_N,
                top_ids_NK=ids[:, None].astype(np.int32) if top else None,
                top_logprobs_NK=2 * logprobs_N[:, None] if top else None,
            ),
        )


def completion(*ids: int) -> Completion:
    spans = (VersionSpan(model="policy", version=0, start=0, end=len(ids)),)
    return Completion(token_ids=ids, logprobs=(-1.0,) * len(ids), text="", finish_reason="stop", versions=spans)


def rollout(*turns: Turn, sibling: int = 0) -> Rollout:
    return Rollout(group_id="g", sibling=sibling, turns=turns, status="finished")


SINGLE = rollout(Turn(new_ids=(1, 2), completion=completion(3, 4, 5)))
# The second turn continues the first after a tool's reply (20, 21), the third begins from a rewritten history.
EPISODE = rollout(
    Turn(new_ids=(1, 2), completion=completion(3, 4)),
    Turn(new_ids=(20, 21), completion=completion(5)),
    Turn(new_ids=(1, 9), completion=completion(6, 7), rewritten=True),
)


def teach(
    engine: Scores, *rollouts: Rollout, top_k: int = 0, required: bool = True, taught: bool = True
) -> list[JudgeReport]:
    async def main() -> list[JudgeReport]:
        teacher = Teacher(name="t", engine=engine, top_k=top_k)
        judge = TeachingJudge(
            judge=NoReward(),
            find_teacher=lambda source: teacher if taught else None,
            places=PrioritySemaphore(1),
            required=required,
        )
        return list(await judge_group(judge, PROMPT, rollouts))

    return asyncio.run(main())


def scores_of(report: JudgeReport) -> TeacherScores:
    assert isinstance(report.verdict, Verdict) and report.verdict.teacher is not None
    return report.verdict.teacher


def test_the_sampled_tokens_of_every_turn_are_scored_in_the_context_that_the_policy_had() -> None:
    engine = Scores()
    (report,) = teach(engine, EPISODE, top_k=1)
    assert engine.asked == [((1, 2, 3, 4, 20, 21, 5), 2, "g/0/0@t"), ((1, 9, 6, 7), 2, "g/0/1@t")]
    by_turn = scores_of(report).by_turn
    assert [scores.logprobs_N.tolist() for scores in by_turn] == [[-3.0, -4.0], [-5.0], [-6.0, -7.0]]
    assert [scores.top_ids_NK.tolist() for scores in by_turn if scores.top_ids_NK is not None] == [
        [[3], [4]], [[5]], [[6], [7]],
    ]  # fmt: skip


@pytest.mark.parametrize("top_k", [0, 3])
def test_an_empty_answer_has_empty_scores_and_asks_nobody(top_k: int) -> None:
    engine = Scores()
    (report,) = teach(engine, rollout(Turn(new_ids=(1, 2), completion=completion())), top_k=top_k)
    (scores,) = scores_of(report).by_turn
    assert not engine.asked and scores.logprobs_N.shape == (0,)
    assert (scores.top_ids_NK is None) == (top_k == 0)


def test_each_sibling_is_scored_once() -> None:
    engine = Scores()
    reports = teach(engine, *(replace(SINGLE, sibling=n) for n in range(3)))
    assert sorted(name for _, _, name in engine.asked) == [f"g/{n}/0@t" for n in range(3)]
    assert all(scores_of(report).by_turn[0].logprobs_N.tolist() == [-3.0, -4.0, -5.0] for report in reports)


@pytest.mark.parametrize(
    ("engine", "cause"),
    [
        (Scores(EngineRefused("longer than its window")), "refused"),
        (Scores(EngineDied("out of memory")), "died"),
        (Scores(worth=lambda one: float("nan")), "unparseable"),
    ],
)
def test_a_failed_score_is_a_failed_verdict_with_its_cause(engine: Scores, cause: str) -> None:
    (report,) = teach(engine, SINGLE)
    assert isinstance(report.verdict, Failed)
    assert (report.verdict.stage, report.verdict.cause) == ("teacher", cause)


def test_without_required_scores_a_failed_one_leaves_the_verdict() -> None:
    (report,) = teach(Scores(EngineDied("x")), SINGLE, required=False)
    assert isinstance(report.verdict, Verdict) and report.verdict.teacher is None
    assert isinstance(report.taught, Failed)


def test_a_prompt_that_no_teacher_teaches_is_only_judged() -> None:
    engine = Scores()
    (report,) = teach(engine, SINGLE, taught=False)
    assert isinstance(report.verdict, Verdict) and report.taught is None and not engine.asked


def test_a_verdict_without_rewards_has_no_reward_rather_than_0() -> None:
    (report,) = teach(Scores(), SINGLE)
    assert get_reward(report.verdict) is None


def test_too_many_failed_scores_stop_the_run_and_leave_the_judge_fit() -> None:
    async def main() -> None:
        settings = {"max_failure_rate": 0.5, "window": 4, "pause_s": 0.0, "counted": "x", "now": lambda: 0.0}
        judge = ServiceHealth("judging", key="judge.max_failure_rate", **settings)
        teaching = ServiceHealth("judging", key="a key of teachers", **settings)
        health = JudgeHealth(judge, teaching)
        (report,) = [
            JudgeReport(verdict=failed, taught=failed)
            for failed in [Failed(stage="teacher", cause="died", attempts=1, detail="t: gone")]
        ]
        with pytest.raises(Unfit, match="a key of teachers.*t: gone"):
            for _ in range(12):
                health.verdict(report)
        assert judge.state == "closed"

    asyncio.run(main())
