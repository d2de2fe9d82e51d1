"""A benchmark's overall figure is its leaderboard's: a mean over sections, if all of its subsets are there."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from grmpipe.config.judge import Scale
from grmpipe.evaluation.judge_accuracy import JudgeEvaluation, Recount, evaluate
from grmpipe.evaluation.judged_items import JudgedItem
from grmpipe.evaluation.leaderboards import REWARD_BENCH, REWARD_BENCH_2, RM_BENCH, Leaderboard
from grmpipe.judge.pointwise_adapter import rollout_of_text
from grmpipe.judge.votes import mean, voted
from grmpipe.models.types import Message
from grmpipe.types import JudgeReport, Prompt, RankedResponses


def judged(subset: str, number: int, right: bool) -> JudgedItem:
    prompt = Prompt(prompt_id=f"{subset}{number}", messages=(Message(role="user", content=f"{subset} {number}?"),))
    item = RankedResponses(
        item_id=prompt.prompt_id, prompt=prompt, responses=("a", "b"), grades=(1, 0) if right else (0, 1), subset=subset
    )
    verdicts = [voted("rule", rollout_of_text("g", i, "x"), (score,), mean, Scale()) for i, score in enumerate((9, 2))]
    return JudgedItem(item=item, reports=tuple(JudgeReport(verdict=verdict) for verdict in verdicts), num_asked=1)


def evaluated(rights: Mapping[str, str]) -> JudgeEvaluation:
    """rights: by subset, a letter for each item: r for a right one."""
    items = [judged(subset, i, one == "r") for subset, all_ in rights.items() for i, one in enumerate(all_)]
    return evaluate(items, Scale(), Recount(ks=(), vote=mean, most=1, seed=0))


def test_reward_bench_weighs_subsets_within_sections_and_sections_alike() -> None:
    """math-prm counts as much as all code together, and a section as much as any other, however many items it has."""
    rights = dict.fromkeys(REWARD_BENCH.subsets, "r") | {"math-prm": "w", "hep-go": "rrrrrrrr"}
    found = evaluated(rights)
    assert {name: round(one.judged.accuracy, 6) for name, one in found.sections.items()} == {
        "Chat": 1.0, "Chat Hard": 1.0, "Safety": 1.0, "Reasoning": 0.5,
    }  # fmt: skip
    assert found.overall.judged.accuracy == pytest.approx(0.875)
    assert found.over_items.judged.accuracy == pytest.approx(29 / 30)
    assert found.mean_over == "RewardBench's sections Chat, Chat Hard, Safety, Reasoning"


def test_rm_bench_is_the_mean_of_its_domains_and_their_difficulties() -> None:
    found = evaluated(dict.fromkeys(RM_BENCH.subsets, "r") | {"chat/hard": "w", "safety/hard": "wwww"})
    assert found.sections["chat"].judged.accuracy == pytest.approx(2 / 3)
    assert found.overall.judged.accuracy == pytest.approx((2 / 3 + 1 + 1 + 2 / 3) / 4)


@pytest.mark.parametrize("board", [REWARD_BENCH, REWARD_BENCH_2, RM_BENCH])
def test_a_part_of_a_benchmark_is_no_leaderboards_figure(board: Leaderboard) -> None:
    missing, *there = sorted(board.subsets)
    found = evaluated(dict.fromkeys(there, "r") | {there[0]: "www"})
    assert found.overall == found.over_items
    assert found.mean_over == f"items, not {board.name}'s sections: {missing} missing"


def test_subsets_of_no_benchmark_have_a_mean_over_items() -> None:
    found = evaluated({"mine": "rrr", "Math": "w"})
    assert (found.overall.judged.accuracy, found.mean_over, found.sections) == (0.75, "items", {})
