"""A generative judge requests k judgements, counts those that parse, and gives a cause for the others."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from grmpipe.config.judge import Scale
from grmpipe.judge.parse import form_named, judgement_pattern
from grmpipe.judge.prompt import JudgePrompt
from grmpipe.models.chat.chat_template import LONG_CHARS
from grmpipe.models.types import EngineDied, EngineRefused
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.types import Failed, FailedJudgement, JudgeReport, RewardSpan, Verdict


def test_a_score_becomes_one_reward_span_over_the_last_completion(bench: Any) -> None:
    judge, _ = bench.generative(lambda prompt, context: bench.answer("fine\nScore: 4"))
    report = bench.run(judge.judge(bench.prompt(), bench.rollout("Answer: 12")))
    assert report.verdict == Verdict(
        rewards=(RewardSpan(turn=0, start=0, end=10, value=pytest.approx(3 / 9)),),
        score=4,
        breakdown={"generative": pytest.approx(3 / 9)},
        score_std=0,
        num_judgements=1,
    )
    (judgement,) = report.judgements
    assert (judgement.group_id, judgement.siblings, judgement.scores) == ("g7", (0,), (4.0,))
    assert (judgement.grm, judgement.version) == ("tiny-grm", 3)
    assert "".join(map(chr, judgement.prompt_ids)) == "Q: What is 6 x 2?\nA:\n> Answer: 12"


def test_k_judgements_are_asked_at_once_and_voted_on(bench: Any) -> None:
    scores = {"j0": 2, "j1": 9, "j2": 9, "j3": 8}
    judge, engine = bench.generative(
        lambda prompt, context: bench.answer(f"Score: {scores[context.request_id.split('/')[2][:2]]}", delay_s=1),
        num_judgements=4,
        vote="median",
    )
    report = bench.run(judge.judge(bench.prompt(), bench.rollout("12", sibling=5), priority=-3))
    assert engine.most_in_flight == 4
    assert (report.verdict.score, report.verdict.num_judgements) == (8.5, 4)
    assert report.verdict.score_std == pytest.approx(8.5**0.5)
    assert [context.request_id for context, _ in engine.asked] == [f"g7/5/j{index}.0" for index in range(4)]
    assert {(c.role, c.group_id, c.priority) for c, _ in engine.asked} == {("tiny-grm", "g7", -3)}
    assert len({params.seed for _, params in engine.asked}) == 4


@pytest.mark.parametrize(("answer_s", "in_time"), [(19.0, True), (21.0, False)])
def test_a_judgement_does_not_time_out_while_its_engines_are_being_replaced(
    bench: Any, answer_s: float, in_time: bool
) -> None:
    async def go() -> JudgeReport:
        clock = ActiveClock()
        judge, _ = bench.generative(
            lambda prompt, context: bench.answer("Score: 5", delay_s=500 + answer_s), clock=clock, timeout_s=20.0
        )
        with clock.pause():
            judging = asyncio.ensure_future(judge.judge(bench.prompt(), bench.rollout("12")))
            await asyncio.sleep(500)
        return await judging

    verdict = bench.run(go()).verdict
    assert isinstance(verdict, Verdict) is in_time
    assert in_time or verdict.cause == "timeout"


def test_the_most_urgent_rollout_gets_the_next_place_(bench: Any) -> None:
    judge, engine = bench.generative(lambda prompt, context: bench.answer("Score: 5", delay_s=1), max_concurrency=1)

    async def go() -> None:
        async with asyncio.TaskGroup() as tasks:
            for sibling, priority in enumerate([4, 4, 1, 2]):
                tasks.create_task(judge.judge(bench.prompt(), bench.rollout("12", sibling=sibling), priority))

    bench.run(go())
    assert [context.request_id for context, _ in engine.asked] == [f"g7/{sibling}/j0.0" for sibling in (0, 2, 3, 1)]
    assert engine.most_in_flight == 1


def test_seeds_are_the_same_in_every_run_and_differ_by_request(bench: Any) -> None:
    seeds = []
    for _ in range(2):
        judge, engine = bench.generative(lambda prompt, context: bench.answer("Score: 1"))
        bench.run(judge.judge(bench.prompt(), bench.rollout("12")))
        bench.run(judge.judge(bench.prompt(), bench.rollout("12", sibling=1)))
        seeds.append([params.seed for _, params in engine.asked])
    assert seeds[0] == seeds[1]
    assert seeds[0][0] != seeds[0][1]


@pytest.mark.parametrize(
    ("text", "finish_reason", "cause"),
    [("I like it", "stop", "unparseable"), ("Score: 9", "length", "truncated"), ("", "stop", "unparseable")],
)
def test_data_failures_are_asked_again_under_a_new_seed_and_kept(
    bench: Any, text: str, finish_reason: Any, cause: str
) -> None:
    def author(prompt: str, context: Any) -> Any:
        return bench.answer("Score: 6") if context.request_id.endswith(".1") else bench.answer(text, finish_reason)

    judge, engine = bench.generative(author)
    report = bench.run(judge.judge(bench.prompt(), bench.rollout("12")))
    assert report.verdict.score == 6
    (failure,) = report.failures
    assert isinstance(failure, FailedJudgement)
    assert (failure.cause, failure.attempts, failure.completion.text) == (cause, 1, text)
    assert len({params.seed for _, params in engine.asked}) == 2


@pytest.mark.parametrize(("finish_reason", "cause"), [("stop", "unparseable"), ("length", "truncated")])
def test_a_greedy_judgement_is_not_asked_again_for_the_same_answer(bench: Any, finish_reason: Any, cause: str) -> None:
    judge, engine = bench.generative(lambda prompt, context: bench.answer("hm", finish_reason), temperature=0)
    report = bench.run(judge.judge(bench.prompt(), bench.rollout("12")))
    assert [context.request_id for context, _ in engine.asked] == ["g7/0/j0.0"]
    assert (report.verdict.cause, report.verdict.attempts, len(report.failures)) == (cause, 1, 1)


def test_without_one_judgement_that_parses_the_verdict_is_failed_by_its_last_cause(bench: Any) -> None:
    def author(prompt: str, context: Any) -> Any:
        return bench.answer("Score: 9", "length") if context.request_id.endswith("1.1") else bench.answer("hm")

    judge, _ = bench.generative(author, num_judgements=2)
    report = bench.run(judge.judge(bench.prompt(), bench.rollout("12")))
    assert isinstance(report.verdict, Failed)
    assert (report.verdict.stage, report.verdict.cause, report.verdict.attempts) == ("judge", "truncated", 4)
    assert [failure.cause for failure in report.failures] == ["unparseable"] * 3 + ["truncated"]
    assert report.judgements == ()


def test_a_vote_counts_only_what_succeeded(bench: Any) -> None:
    def author(prompt: str, context: Any) -> Any:
        return EngineDied("killed") if "/j0." in context.request_id else bench.answer("Score: 8")

    judge, _ = bench.generative(author, num_judgements=3)
    report = bench.run(judge.judge(bench.prompt(), bench.rollout("12")))
    assert (report.verdict.score, report.verdict.num_judgements) == (8, 2)
    assert [failure.cause for failure in report.failures] == ["died"]


@pytest.mark.parametrize(
    ("error", "cause"), [(EngineDied("killed"), "died"), (EngineRefused("window is 512"), "refused")]
)
def test_infrastructure_failures_have_their_own_causes_and_are_not_asked_again(
    bench: Any, error: Exception, cause: str
) -> None:
    judge, engine = bench.generative(lambda prompt, context: error)
    report = bench.run(judge.judge(bench.prompt(), bench.rollout("12")))
    assert report.verdict == Failed(stage="judge", cause=cause, attempts=1, detail=str(error))
    assert len(engine.asked) == 1


def test_a_slow_judgement_times_out_and_is_cancelled_at_the_engine(bench: Any) -> None:
    judge, engine = bench.generative(lambda prompt, context: bench.answer("Score: 9", delay_s=121.0))
    report = bench.run(judge.judge(bench.prompt(), bench.rollout("12")))
    assert (report.verdict.cause, report.judgements) == ("timeout", ())
    assert engine.cancelled == ["g7/0/j0.0"]


def test_aborted_judgement_counts_for_nothing(bench: Any) -> None:
    judge, _ = bench.generative(lambda prompt, context: bench.answer("Score: 9", "abort"))
    report = bench.run(judge.judge(bench.prompt(), bench.rollout("12")))
    assert (report.verdict.cause, report.judgements) == ("died", ())


def test_what_does_not_fit_the_window_is_never_sent(bench: Any) -> None:
    text = "Q: What is 6 x 2?\nA:\n> 12"
    for context_tokens, num_asked in ((len(text) + 160, 1), (len(text) + 159, 0)):
        judge, engine = bench.generative(lambda prompt, context: bench.answer("Score: 9"), context_tokens)
        report = bench.run(judge.judge(bench.prompt(), bench.rollout("12")))
        assert len(engine.asked) == num_asked
    assert (report.verdict.cause, report.verdict.attempts) == ("too_long", 0)
    assert report.failures == (report.verdict,)


def test_a_template_that_needs_a_reference_refuses_prompts_without_one(bench: Any, tmp_path: Any) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text("{{ reference }}\n{{ response }}")
    judge, engine = bench.generative(lambda prompt, context: bench.answer("Score: 9"), template=str(template))
    report = bench.run(judge.judge(bench.prompt(reference=None), bench.rollout("12")))
    assert report.verdict.cause == "refused"
    assert "p1" in report.verdict.detail and "reference" in report.verdict.detail
    assert engine.asked == []


def test_the_width_bounds_judgements_in_flight_and_waiting_for_a_place_is_no_timeout(bench: Any) -> None:
    judge, engine = bench.generative(
        lambda prompt, context: bench.answer("Score: 9", delay_s=100), num_judgements=6, max_concurrency=2
    )
    report = bench.run(judge.judge(bench.prompt(), bench.rollout("12")))
    assert engine.most_in_flight == 2
    assert report.verdict.num_judgements == 6


def test_judgements_are_held_to_their_form_only_where_the_run_asks_for_it(bench: Any) -> None:
    for structured in (False, True):
        judge, engine = bench.generative(lambda prompt, context: bench.answer("Score: 9"), structured=structured)
        bench.run(judge.judge(bench.prompt(), bench.rollout("12")))
        ((_, params),) = engine.asked
        assert params.pattern == (judgement_pattern(form_named("score_line"), Scale()) if structured else None)


def test_a_prompt_with_a_long_text_is_rendered_outside_of_the_loop(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    judge, _ = bench.generative(lambda prompt, context: bench.answer("Score: 7"))
    render, in_loop = JudgePrompt.render, list[bool]()

    def placed(self: JudgePrompt, *args: Any, **kwargs: Any) -> Any:
        in_loop.append(threading.current_thread() is threading.main_thread())
        return render(self, *args, **kwargs)

    async def judged() -> list[JudgeReport]:
        return [await judge.judge(bench.prompt(), bench.rollout(text)) for text in ("1" * LONG_CHARS, "12")]

    monkeypatch.setattr(JudgePrompt, "render", placed)
    reports = asyncio.run(judged())

    assert [report.verdict.score for report in reports if isinstance(report.verdict, Verdict)] == [7, 7]
    assert in_loop == [False, True]
