"""Turns are judged one by one, from when they end; the verdict is the same as if all were judged at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from configs import judge_config

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.reward import RewardConfig, RewardTree
from grmpipe.judge.composition.composed_judge import compose_judge
from grmpipe.judge.kinds.rule import RuleJudge
from grmpipe.judge.pointwise_adapter import PointwiseAdapter, judge_alone
from grmpipe.judge.prompt import TEMPLATES
from grmpipe.models.types import EngineDied, Message
from grmpipe.types import (
    Failed,
    Judge,
    JudgeReport,
    JudgeTask,
    RewardSpan,
    Rollout,
    Turn,
    TurnwiseJudgeSession,
    judge_tasks_of_turn,
)

TURNS: dict[str, Any] = {"protocol": "turns", "template": "turns", "parser": "boxed"}
SCORES = {0: 9, 1: 1, 2: 4}  # turn -> score
MEAN = (9 + 1 + 4) / 3


def episode(bench: Any, texts: Sequence[str] = ("look", "take", "Answer: 12"), sibling: int = 0) -> Rollout:
    """A rollout of these turns; the environment answers all but the last."""
    turns = [Turn(new_ids=(1,), completion=bench.rollout(text).turns[0].completion) for text in texts]
    answered = [
        replace(turn, replies=(Message(role="tool", content=f"seen {number}"),))
        for number, turn in enumerate(turns[:-1])
    ]
    return Rollout(group_id="g7", sibling=sibling, turns=(*answered, turns[-1]), status="finished")


def so_far(rollout: Rollout, num_turns: int) -> Rollout:
    return replace(rollout, turns=rollout.turns[:num_turns], status="truncated")


def turn_in(request_id: str) -> int:
    return int(request_id.split("/t")[1].split("/")[0])


def by_turn(bench: Any, delay_s: float = 1.0) -> Any:
    return lambda prompt, context: bench.answer(f"\\boxed{{{SCORES[turn_in(context.request_id)]}}}", delay_s=delay_s)


async def played(judge: Judge, prompt: Any, rollout: Rollout, turn_s: float) -> JudgeReport:
    """The report on a rollout whose turns take their time."""
    session = judge.open(prompt, "g7", 1)
    found: dict[int, JudgeReport] = {}

    async def do(judge_task: JudgeTask) -> None:
        reports = await session.judge(judge_task)
        assert not found.keys() & reports.keys(), "a report is given once"
        found.update(reports)

    async with asyncio.TaskGroup() as tasks:
        for judge_task in session.begin():
            tasks.create_task(do(judge_task))
        for num_turns in range(1, len(rollout.turns)):
            await asyncio.sleep(turn_s)
            for judge_task in judge_tasks_of_turn(session, so_far(rollout, num_turns)):
                assert judge_task.turn == num_turns - 1
                tasks.create_task(do(judge_task))
        await asyncio.sleep(turn_s)
        for judge_task in session.add(rollout):
            tasks.create_task(do(judge_task))
    return found[rollout.sibling]


def test_each_turns_tokens_get_its_share_of_the_verdict(bench: Any) -> None:
    judge, _ = bench.generative(by_turn(bench), **TURNS)
    report = bench.run(judge_alone(judge, bench.prompt(), episode(bench)))
    third = pytest.approx(1 / 3)
    assert report.verdict.rewards == (
        RewardSpan(turn=0, start=0, end=4, value=pytest.approx(8 / 27), share=third),
        RewardSpan(turn=1, start=0, end=4, value=0.0, share=third),
        RewardSpan(turn=2, start=0, end=10, value=pytest.approx(1 / 9), share=third),
    )
    assert report.verdict.score == pytest.approx(MEAN)
    assert report.verdict.breakdown == {"generative": pytest.approx((MEAN - 1) / 9)}
    assert [(judgement.turn, judgement.scores) for judgement in report.judgements] == [
        (0, (9.0,)),
        (1, (1.0,)),
        (2, (4.0,)),
    ]


def test_a_judgement_shows_the_turn_and_what_came_before_it(bench: Any) -> None:
    prompts: dict[int, str] = {}

    def author(prompt: str, context: Any) -> Any:
        prompts[turn_in(context.request_id)] = prompt
        return bench.answer("\\boxed{3}")

    judge, _ = bench.generative(author, **TURNS)
    bench.run(judge_alone(judge, bench.prompt(), episode(bench)))
    assert "# What came before\n\n[... nothing: this is the first turn ...]\n" in prompts[0]
    assert "# The turn to judge\n\n> look\n| seen 0\n" in prompts[0]
    assert "# What came before\n\n> look\n| seen 0\n> take\n| seen 1\n" in prompts[2]
    assert "# The turn to judge\n\n> Answer: 12\n" in prompts[2]


@pytest.mark.parametrize("delay_s", [0.1, 10.0])
@pytest.mark.parametrize("settings", [{}, {"num_judgements": 3}, {"principles": "shared"}])
def test_turns_judged_during_the_rollout_give_the_report_of_its_end(
    bench: Any, tmp_path: Path, delay_s: float, settings: dict[str, Any]
) -> None:
    """Whether the judge is faster than the episode, or still judges its first turn when it has ended."""

    def author(prompt: str, context: Any) -> Any:
        if "/principles/" in context.request_id:
            return bench.answer("Be strict.")
        return by_turn(bench, delay_s)(prompt, context)

    if settings.get("principles"):
        settings = {**settings, "template": str(template_with_principles(tmp_path))}
    early, engine = bench.generative(author, **(TURNS | settings))
    at_end, _ = bench.generative(author, **(TURNS | settings))
    report = bench.run(played(early, bench.prompt(), episode(bench), turn_s=2.0))
    assert report == bench.run(judge_alone(at_end, bench.prompt(), episode(bench)))
    ids = [context.request_id for context, _ in engine.asked]
    assert len(ids) == len(set(ids)), "no turn is judged twice"


def template_with_principles(folder: Path) -> Path:
    text = (TEMPLATES / "turns.jinja").read_text(encoding="utf-8")
    path = folder / "turns_by_principles.jinja"
    path.write_text(text.replace("# What came before", "{{ principles }}\n\n# What came before"), encoding="utf-8")
    return path


def test_a_turn_is_judged_before_the_episode_has_ended(bench: Any) -> None:
    judge, engine = bench.generative(by_turn(bench), **TURNS)
    rollout = episode(bench)

    async def go() -> list[Any]:
        session = judge.open(bench.prompt(), "g7", 1)
        (first,) = judge_tasks_of_turn(session, so_far(rollout, 1))
        early = await session.judge(first)
        asked_early = [context.request_id for context, _ in engine.asked]
        assert judge_tasks_of_turn(session, so_far(rollout, 1)) == []
        rest = [await session.judge(judge_task) for judge_task in session.add(rollout)]
        return [early, asked_early, rest]

    early, asked_early, rest = bench.run(go())
    assert (early, asked_early) == ({}, ["g7/0/t0/j0.0"])
    assert [sorted(reports) for reports in rest] == [[], [0]]


def test_a_turn_that_still_waits_at_the_end_gets_another_task_and_is_judged_once(bench: Any) -> None:
    judge, engine = bench.generative(by_turn(bench), **TURNS)
    rollout = episode(bench)

    async def go() -> list[Any]:
        session = judge.open(bench.prompt(), "g7", 1)
        waiting = judge_tasks_of_turn(session, so_far(rollout, 1))
        found = [await session.judge(judge_task) for judge_task in (*session.add(rollout), *waiting)]
        return [sorted(reports) for reports in found]

    assert bench.run(go()) == [[], [], [0], []]
    assert len(engine.asked) == 3


def test_a_rollout_whose_turns_are_all_judged_is_reported_at_its_end(bench: Any) -> None:
    judge, engine = bench.generative(by_turn(bench), **TURNS)
    rollout = episode(bench)

    async def go() -> Any:
        session = judge.open(bench.prompt(), "g7", 1)
        for judge_task in judge_tasks_of_turn(session, rollout):
            assert await session.judge(judge_task) == {}
        (last,) = session.add(rollout)
        assert last.turn is None
        return await session.judge(last)

    assert bench.run(go())[0].verdict.score == pytest.approx(MEAN)
    assert len(engine.asked) == 3


def test_judged_turns_of_an_episode_that_failed_count_for_nothing(bench: Any) -> None:
    """The first episode's turns would get 9; those of the second, under ids of their own, get 1."""

    def author(prompt: str, context: Any) -> Any:
        return bench.answer(f"\\boxed{{{1 if '/a1/t' in context.request_id else 9}}}", delay_s=1.0)

    judge, engine = bench.generative(author, **TURNS)
    failed = episode(bench, ("look", "fall", "die"))
    again = replace(episode(bench), attempt=1)

    async def go() -> Any:
        session = judge.open(bench.prompt(), "g7", 1)
        first = [*judge_tasks_of_turn(session, so_far(failed, 1))]
        late = [*judge_tasks_of_turn(session, so_far(failed, 2))]
        await session.judge(first[0])
        tasks = [*judge_tasks_of_turn(session, so_far(again, 1)), *late, *session.add(again)]
        reports = await asyncio.gather(*(session.judge(judge_task) for judge_task in tasks))
        return [report for some in reports for report in some.values()]

    (report,) = bench.run(go())
    assert report.verdict.score == 1.0
    assert [judgement.completion.text for judgement in report.judgements] == ["\\boxed{1}"] * 3
    ids = [context.request_id for context, _ in engine.asked]
    assert ids[0] == "g7/0/t0/j0.0" and sorted(ids[1:]) == [f"g7/0/a1/t{turn}/j0.0" for turn in range(3)]


def test_without_the_score_of_a_turn_there_is_no_verdict(bench: Any) -> None:
    def author(prompt: str, context: Any) -> Any:
        return EngineDied("killed") if turn_in(context.request_id) == 1 else bench.answer("\\boxed{9}")

    judge, _ = bench.generative(author, **TURNS)
    report = bench.run(judge_alone(judge, bench.prompt(), episode(bench)))
    assert isinstance(report.verdict, Failed)
    assert (report.verdict.cause, report.verdict.detail) == ("died", "turn 1: killed")
    assert len(report.judgements) == 2


def test_turns_that_disagree_with_each_other_are_no_reason_to_abstain(bench: Any) -> None:
    judge, _ = bench.generative(by_turn(bench), abstain_above_std=0.5, num_judgements=2, **TURNS)
    assert bench.run(judge_alone(judge, bench.prompt(), episode(bench))).verdict.score == pytest.approx(MEAN)


def test_a_judge_of_whole_rollouts_waits_for_their_end(bench: Any) -> None:
    judge, _ = bench.generative(by_turn(bench))
    session = judge.open(bench.prompt(), "g7", 1)
    assert not isinstance(session, TurnwiseJudgeSession)
    assert judge_tasks_of_turn(session, so_far(episode(bench), 1)) == ()


def beside_a_rule(grm: Judge, **reward: Any) -> Judge:
    configs = {"judge": judge_config(**TURNS), "exact": JudgeConfig(kind="rule")}
    judges = {"judge": grm, "exact": PointwiseAdapter(RuleJudge("exact_answer"))}
    return compose_judge(RewardTree.of(RewardConfig(**reward)), judges, configs, 0)


@pytest.mark.parametrize("delay_s", [0.1, 10.0])
@pytest.mark.parametrize(
    "reward", [{"kind": "mix", "mix": {"judge": 1, "exact": 1}}, {"kind": "gate", "gate": "exact", "inner": "judge"}]
)
def test_a_composition_passes_turns_on_and_reports_the_same(bench: Any, delay_s: float, reward: dict[str, Any]) -> None:
    grm, engine = bench.generative(by_turn(bench, delay_s), **TURNS)
    judge = beside_a_rule(grm, **reward)
    report = bench.run(played(judge, bench.prompt(), episode(bench), turn_s=2.0))
    assert report == bench.run(judge_alone(judge, bench.prompt(), episode(bench)))
    assert len(engine.asked) == 6
    assert sorted(report.by_judge) == ["exact", "judge"]


def test_a_judge_behind_a_gate_is_asked_about_no_turn_before_the_gate_has_passed(bench: Any) -> None:
    grm, engine = bench.generative(by_turn(bench), **TURNS)
    judge = beside_a_rule(grm, kind="gate", gate="exact", inner="judge")
    wrong = episode(bench, ("look", "Answer: 13"))
    report = bench.run(played(judge, bench.prompt(), wrong, turn_s=2.0))
    assert (report.verdict.outcome, engine.asked) == (0.0, [])
