"""Steps, shared principles, votes by a meta-RM, prompts that don't fit, abstentions."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from configs import judge_config
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.config.train import AlgorithmConfig
from grmpipe.judge.grm import LocalGrm
from grmpipe.judge.protocols.generative import GenerativeJudge
from grmpipe.judge.protocols.stepwise import split_steps
from grmpipe.judge.trajectory import without_middle
from grmpipe.models.types import UNKNOWN_ID, Completion, EngineDied, EngineRefused, VersionSpan
from grmpipe.pipeline.step_metrics import has_zero_advantages
from grmpipe.train.batching.samples import to_samples
from grmpipe.types import Failed, JudgedGroup, Judgement, RewardSpan, Rollout, Turn

STEPS = {"protocol": "steps", "template": "steps", "parser": "boxed"}
AHEAD = {"principles": "shared", "template": "shared_principles", "parser": "boxed"}


class Renderer:
    def render(self, messages: Any) -> tuple[int, ...]:
        return tuple(map(ord, messages[-1].content))


def characters(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def test_the_protocol_of_the_docs_judges(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[4] / "docs" / "custom_judges.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(# my_module.py.*?)```", page, re.DOTALL)
    module = ModuleType("my_module")
    exec(block, module.__dict__)
    monkeypatch.setitem(sys.modules, "my_module", module)
    shown: list[str] = []
    author = lambda prompt, context: shown.append(prompt) or bench.answer("Score: 7/10")  # noqa: E731
    judge, _ = bench.generative(author, protocol="my_module.LAST_LINE", num_judgements=1)
    report = bench.run(judge.judge(bench.prompt(), bench.rollout("First 5.\nThen 12.")))
    assert report.verdict.score == 7
    assert "Then 12." in shown[0] and "First 5." not in shown[0]


# -- steps -----------------------------------------------------------------------------------------------------------


def with_decode(bench: Any, author: Any, **config: Any) -> GenerativeJudge:
    _, engine = bench.generative(author)
    return GenerativeJudge(
        LocalGrm("grm", engine, Renderer(), 10**6), judge_config(**config), seed=1, decode=characters
    )


def test_each_step_gets_its_own_span_and_the_spans_add_up_to_the_reward(bench: Any) -> None:
    judge = with_decode(bench, lambda prompt, context: bench.answer("\\boxed{10, 1}"), **STEPS)
    report = bench.run(judge.judge(bench.prompt(), bench.rollout("6 x 2 = 12\nSo 13.")))
    assert report.verdict.rewards == (
        RewardSpan(turn=0, start=0, end=11, value=0.5, share=0.5),
        RewardSpan(turn=0, start=11, end=17, value=0.0, share=0.5),
    )
    assert (report.verdict.outcome, report.verdict.score) == (0.5, 5.5)


async def judged_steps(judge: Any, bench: Any, texts: Sequence[str]) -> JudgedGroup:
    rollouts = tuple(replace(bench.rollout(text), sibling=sibling) for sibling, text in enumerate(texts))
    reports = [await judge.judge(bench.prompt(), rollout) for rollout in rollouts]
    verdicts = tuple(report.verdict for report in reports)
    return JudgedGroup(group_id="g7", prompt=bench.prompt(), rollouts=rollouts, verdicts=verdicts)


@pytest.mark.parametrize("estimator", ["process", "process_grpo", "grpo"])
def test_siblings_whose_steps_are_all_as_good_teach_nothing_however_many_steps_they_take(
    bench: Any, estimator: str
) -> None:
    def author(prompt: str, context: Any) -> Any:
        return bench.answer("\\boxed{8, 8}" if context.request_id.startswith("g7/0") else "\\boxed{8, 8, 8, 8}")

    group = bench.run(judged_steps(with_decode(bench, author, **STEPS), bench, ("a\nb", "a\nb\nc\nd")))
    algorithm = AlgorithmConfig(estimator=estimator)
    assert max(abs(one) for sample in to_samples([group], algorithm) for one in sample.advantages) < 1e-6
    assert has_zero_advantages(group, algorithm)


def test_a_step_may_be_a_turn(bench: Any) -> None:
    judge = with_decode(bench, lambda prompt, context: bench.answer("\\boxed{4, 7}"), step_end="", **STEPS)
    first, second = (bench.rollout(text).turns[0] for text in ("one\ntwo", "three"))
    rollout = Rollout(group_id="g7", sibling=0, turns=(first, second), status="finished")
    rewards = bench.run(judge.judge(bench.prompt(), rollout)).verdict.rewards
    assert [(span.turn, span.start, span.end) for span in rewards] == [(0, 0, 7), (1, 0, 5)]


@given(
    text=st.text(alphabet="ab \n;", max_size=40),
    step_end=st.sampled_from(["\n", "\n\n", ";", "", "ab"]),
    max_steps=st.integers(1, 4),
)
def test_steps_cover_every_token_once_and_none_but_an_only_one_is_blank(
    text: str, step_end: str, max_steps: int
) -> None:
    ids = tuple(map(ord, text))
    span = VersionSpan(model="policy", version=0, start=0, end=len(ids))
    sampled = Completion(token_ids=ids, logprobs=(-1.0,) * len(ids), text=text, finish_reason="stop", versions=(span,))
    rollout = Rollout(group_id="g", sibling=0, turns=(Turn(new_ids=(1,), completion=sampled),), status="finished")
    steps = split_steps(rollout, step_end, characters, max_steps=max_steps)
    assert 1 <= len(steps) <= max_steps
    assert "".join(step.text for step in steps) == text
    assert [steps[0].start, *(step.end for step in steps)] == [0, *(step.start for step in steps[1:]), len(ids)]
    assert len(steps) == 1 or all(step.text.strip() for step in steps)


def test_a_turn_whose_ids_were_dropped_is_one_step() -> None:
    completion = Completion(token_ids=(UNKNOWN_ID,) * 4, logprobs=(-1.0,) * 4, text="a\nb\n", finish_reason="stop",
                            versions=(VersionSpan(model="policy", version=0, start=0, end=4),))  # fmt: skip
    rollout = Rollout(group_id="g", sibling=0, turns=(Turn(new_ids=(1,), completion=completion),), status="finished")
    (step,) = split_steps(rollout, "\n", characters)
    assert (step.start, step.end, step.text) == (0, 4, "a\nb\n")


# -- principles ------------------------------------------------------------------------------------------------------


def writes_principles(bench: Any, asked: list[str], first: Any = None) -> Any:
    def author(prompt: str, context: Any) -> Any:
        asked.append(context.request_id)
        if "/principles/" not in context.request_id:
            assert "Be strict." in prompt
            return bench.answer("\\boxed{7}", delay_s=1)
        if first is not None and context.request_id.endswith("/0.0"):
            return first
        return bench.answer("Be strict.", delay_s=5)

    return author


@pytest.mark.parametrize("rollouts_first", [False, True])
def test_principles_are_written_once_and_shared_whoever_comes_first(bench: Any, rollouts_first: bool) -> None:
    asked: list[str] = []
    judge, _ = bench.generative(writes_principles(bench, asked), max_concurrency=1, **AHEAD)

    async def go() -> list[Any]:
        session = judge.open(bench.prompt(), "g7", 2)
        judge_tasks = [*session.begin()]
        judge_tasks += [one for sibling in (0, 1) for one in session.add(bench.rollout("12", sibling=sibling))]
        return await asyncio.gather(
            *(session.judge(one) for one in (judge_tasks[::-1] if rollouts_first else judge_tasks))
        )

    reports = [report for some in bench.run(go()) for report in some.values()]
    assert sum("/principles/" in request_id for request_id in asked) == 1
    assert sorted(report.verdict.score for report in reports) == [7, 7]
    assert [report.principles.text for report in reports if report.principles] == ["Be strict."]


@pytest.mark.parametrize("finish_reason", ["length", "abort"])
def test_principles_that_are_of_no_use_are_asked_for_again(bench: Any, finish_reason: Any) -> None:
    asked: list[str] = []
    judge, _ = bench.generative(writes_principles(bench, asked, bench.answer("Be", finish_reason)), **AHEAD)

    async def go() -> list[Any]:
        session = judge.open(bench.prompt(), "g7", 1)
        first = await session.judge(*session.begin())
        return [first, await session.judge(*session.add(bench.rollout("12")))]

    assert bench.run(go())[1][0].verdict.score == 7
    assert asked[0] == "g7/principles/0.0" and asked[1] in ("g7/principles/0.1", "g7/principles/1.0")


@pytest.mark.parametrize(
    ("finish_reason", "num_asked", "causes"),
    [("length", 1, ["truncated", "truncated"]), ("abort", 2, ["died", None])],  # a greedy judge would write the same
)
def test_greedy_principles_are_asked_for_again_only_if_the_engine_failed(
    bench: Any, finish_reason: Any, num_asked: int, causes: Any
) -> None:
    asked: list[str] = []
    author = writes_principles(bench, asked, bench.answer("Be", finish_reason))
    judge, _ = bench.generative(author, temperature=0, **AHEAD)

    async def go() -> list[Any]:
        session = judge.open(bench.prompt(), "g7", 2)
        members = [one for sibling in (0, 1) for one in session.add(bench.rollout("12", sibling=sibling))]
        return [report for one in members for report in (await session.judge(one)).values()]

    verdicts = [report.verdict for report in bench.run(go())]
    assert [verdict.cause if isinstance(verdict, Failed) else None for verdict in verdicts] == causes
    assert sum("/principles/" in request_id for request_id in asked) == num_asked


def test_without_principles_a_rollout_is_failed_by_their_cause(bench: Any) -> None:
    judge, _ = bench.generative(lambda prompt, context: EngineDied("killed"), **AHEAD)
    report = bench.run(judge.judge(bench.prompt(), bench.rollout("12")))
    assert (report.verdict.cause, report.judgements) == ("died", ())


def test_next_rollout_takes_over_principles_of_a_cancelled_one(bench: Any) -> None:
    asked: list[str] = []
    judge, engine = bench.generative(writes_principles(bench, asked), **AHEAD)

    async def go() -> Any:
        session = judge.open(bench.prompt(), "g7", 1)
        first = asyncio.ensure_future(session.judge(*session.begin()))
        second = asyncio.ensure_future(session.judge(*session.add(bench.rollout("12"))))
        await asyncio.sleep(1)
        first.cancel()
        return await second

    assert bench.run(go())[0].verdict.score == 7
    assert engine.cancelled == ["g7/principles/0.0"]


# -- votes -----------------------------------------------------------------------------------------------------------


@dataclass
class Meta:
    """Gives probabilities to judgements by their text."""

    trust: dict[str, float]
    seen: list[Judgement] = field(default_factory=list)
    priorities: set[int] = field(default_factory=set)

    async def scores(self, judgements: Sequence[Judgement], priority: int = 0) -> Sequence[float]:
        self.seen += judgements
        self.priorities.add(priority)
        return [self.trust[one.completion.text] for one in judgements]


def guided(bench: Any, scores: Sequence[int], meta_rm: Any, **config: Any) -> Any:
    def author(prompt: str, context: Any) -> Any:
        return bench.answer(f"Score: {scores[int(context.request_id.split('/j')[1].split('.')[0])]}")

    _, engine = bench.generative(author)
    grm = LocalGrm("grm", engine, Renderer(), 10**6)
    judge = GenerativeJudge(grm, judge_config(num_judgements=len(scores), **config), seed=1, meta_rm=meta_rm)
    return bench.run(judge.judge(bench.prompt(), bench.rollout("12"), priority=-3))


def test_the_meta_rm_weighs_judgements_or_keeps_the_best_half(bench: Any) -> None:
    meta_rm = Meta({"Score: 1": 0.9, "Score: 5": 0.1, "Score: 4": 0.8, "Score: 7": 0.2})
    best = guided(bench, (1, 5, 4, 7), meta_rm, vote="best").verdict
    assert (best.score, best.num_judgements, best.score_std) == (2.5, 2, 1.5)
    one = guided(bench, (1, 5, 4, 7), meta_rm, vote="best", k_meta=1).verdict
    assert (one.score, one.num_judgements) == (1, 1)
    of_two = guided(bench, (1, 5), meta_rm, vote="best").verdict
    assert (of_two.score, of_two.num_judgements) == (1, 1)
    weighed = guided(bench, (1, 5, 4, 7), meta_rm, vote="weighted").verdict
    assert weighed.score == pytest.approx((0.9 * 1 + 0.1 * 5 + 0.8 * 4 + 0.2 * 7) / 2)
    assert meta_rm.seen[0].siblings == (0,) and meta_rm.priorities == {-3}, "as urgent as the judgements"


def test_a_vote_that_weighs_nothing_asks_no_meta_rm(bench: Any) -> None:
    meta_rm = Meta({})
    assert guided(bench, (1, 5, 4, 7), meta_rm, vote="median").verdict.score == 4.5 and not meta_rm.seen


@pytest.mark.parametrize(("error", "cause"), [(EngineDied, "died"), (EngineRefused, "refused")])
def test_a_meta_rm_that_fails_fails_the_verdict_and_keeps_the_evidence(bench: Any, error: Any, cause: str) -> None:
    class Broken:
        async def scores(self, judged: Any, priority: int = 0) -> Any:
            raise error("its words")

    report = guided(bench, (1, 5), Broken(), vote="best")
    assert (report.verdict.cause, report.verdict.detail) == (cause, "meta-RM: its words")
    assert (report.verdict.attempts, len(report.judgements)) == (1, 2)


def test_a_vote_that_needs_a_meta_rm_is_refused_without_one(bench: Any) -> None:
    with pytest.raises(ValueError, match=r"^vote: best needs a meta-RM"):
        bench.generative(lambda prompt, context: None, vote="best")


def test_a_sum_is_shown_from_k_to_10_k_and_a_failure_makes_it_no_smaller(bench: Any) -> None:
    assert guided(bench, (5, 6, 8, 6), None, vote="sum").verdict.score == 25

    def author(prompt: str, context: Any) -> Any:
        return EngineDied("x") if "/j0." in context.request_id else bench.answer("Score: 6")

    judge, _ = bench.generative(author, num_judgements=4, vote="sum")
    verdict = bench.run(judge.judge(bench.prompt(), bench.rollout("12"))).verdict
    assert (verdict.score, verdict.outcome) == (24, pytest.approx(5 / 9))


def test_judgements_too_far_apart_are_no_verdict(bench: Any) -> None:
    report = guided(bench, (1, 9), None, abstain_above_std=3.9)
    assert isinstance(report.verdict, Failed) and report.verdict.cause == "undecided"
    assert "4.00 (std); judge.votes.abstain_above_std=3.9" in report.verdict.detail
    assert (report.verdict.attempts, len(report.judgements)) == (1, 2)
    assert guided(bench, (1, 9), None, abstain_above_std=4.0).verdict.score == 5


# -- prompts that don't fit ------------------------------------------------------------------------------------------


def test_a_response_that_does_not_fit_loses_its_middle_or_is_too_long(bench: Any) -> None:
    prompts: list[str] = []

    def author(prompt: str, context: Any) -> Any:
        prompts.append(prompt)
        return bench.answer("Score: 3")

    long = "\n".join(f"line {number}" for number in range(200))
    window = {"context_tokens": 400, "max_new_tokens": 100}
    judge, engine = bench.generative(author, **window)
    assert bench.run(judge.judge(bench.prompt(), bench.rollout(long))).verdict.cause == "too_long"
    assert engine.asked == []
    judge, _ = bench.generative(author, truncation="middle", **window)
    assert bench.run(judge.judge(bench.prompt(), bench.rollout(long))).verdict.score == 3
    assert 290 < len(prompts[0]) <= 300
    assert "> line 0\n" in prompts[0] and prompts[0].endswith("> line 199") and "\n> [... " in prompts[0]
    hopeless, _ = bench.generative(author, context_tokens=110, max_new_tokens=100, truncation="middle")
    assert bench.run(hopeless.judge(bench.prompt(), bench.rollout(long))).verdict.cause == "too_long"


@given(text=st.text(max_size=60), kept=st.integers(1, 60))
def test_a_cut_keeps_the_ends_and_says_how_much_is_gone(text: str, kept: int) -> None:
    cut = without_middle(text, kept)
    if len(text) <= kept:
        assert cut == text
    else:
        assert cut.startswith(text[: (kept + 1) // 2])
        assert cut.endswith(text[len(text) - kept // 2 :])
        assert f"[... {len(text) - kept} characters cut ...]" in cut
