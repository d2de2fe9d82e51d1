"""Benchmarks as they are published: what an item is worth, and how items make sections and the whole. Pure."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from grmpipe.evaluation.judged_items import JudgedItem, Scores, compare_orders
from grmpipe.types import RankedResponses

RM_BENCH_DOMAINS = ("chat", "math", "code", "safety")
DIFFICULTIES = ("easy", "normal", "hard")
PLAN_SPLITS = (
    "planning_single_easy", "planning_single_hard", "planning_multi_easy", "planning_multi_hard", "robust_recovery",
    "safety_refusal", "tool_irrelevance",
)  # fmt: skip
TIES = "Ties"
TIES_ID = re.compile(r"\b(ref|tied):(\d+)$")  # how the ids of its items end
TIE_MARGIN = 1e-4  # between scores that Plan-RewardBench calls equal
Credit = Callable[[JudgedItem, Scores], float]


# -- what an item is worth: from 0 to 1 --------------------------------------------------------------------------------


def share_first_place(one: JudgedItem, scores: Scores) -> float:
    """RewardBench 2, but for its Ties: the best one shares the first place with as many as have its score.
    reroll_and_score_dataset in rewardbench/utils.py, allenai/reward-bench at 05a9005.
    """
    assert isinstance(one.item, RankedResponses)
    best, highest = one.item.best, max(scores.values(), default=0.0)
    if len(scores) < len(one.item.responses):
        return 0.0
    if best is None:
        right = [scores[place] for place, grade in enumerate(one.item.grades) if grade == max(one.item.grades)]
        return float(sum(score >= min(right) for score in scores.values()) == len(right))
    return 1 / list(scores.values()).count(highest) if scores[best] == highest else 0.0


def count_games(one: JudgedItem, scores: Scores) -> float:
    """JudgeBench: a judge that compares sees a pair in both orders, and is right if it prefers the right response more
    often than the wrong one. One of single responses plays one game, in which a tie goes to the second response.
    compute_final_metrics in utils/metrics.py, reward models in utils/judges.py, ScalerLab/JudgeBench at e2c52c2.
    """
    games = play_games(one)
    if games is not None:
        return float(sum((game > 0) - (game < 0) for game in games if game is not None) > 0)
    assert isinstance(one.item, RankedResponses)
    if len(scores) < 2:
        return 0.0
    return float((scores[0] > scores[1]) == (one.item.best == 0))


def average_games(one: JudgedItem, scores: Scores) -> float:
    """Plan-RewardBench: the mean of both orders, of which a tie is worth a half and one without a verdict nothing.
    _judge_single_item in eval/evaluate_benchmark_final.py, wyy-1112/Plan-RewardBench.
    """
    games = play_games(one)
    if games is not None:
        return sum(0.0 if game is None else 0.5 if game == 0 else float(game > 0) for game in games) / len(games)
    assert isinstance(one.item, RankedResponses) and one.item.best is not None
    if len(scores) < 2:
        return 0.0
    gap = scores[one.item.best] - scores[1 - one.item.best]
    return 0.5 if abs(gap) <= TIE_MARGIN else float(gap > 0)


def play_games(one: JudgedItem) -> tuple[float | None, float | None] | None:
    """By how much the better response of a pair was preferred when shown first, and when shown last; None if no
    judgement saw both.
    """
    best = one.item.best if isinstance(one.item, RankedResponses) else None
    assert best is not None and len(one.item.responses) == 2, "a benchmark of pairs"
    games = compare_orders(one.judgements, best, 1 - best)
    return None if games == (None, None) else games


# -- the benchmarks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaderboard:
    """A benchmark.

    sections: section -> its subsets and their weights among each other. A subset of the file belongs to that one here
              with whose name it begins.
    credit:   what an item is worth; None: 1 if it is right.
    by_items: whether items weigh the same in the whole; else sections do.
    """

    name: str
    sections: Mapping[str, Mapping[str, float]]
    credit: Credit | None = None
    by_items: bool = False

    @property
    def subsets(self) -> frozenset[str]:
        return frozenset(subset for subsets in self.sections.values() for subset in subsets)

    def find_subset(self, name: str) -> str | None:
        """The subset of the benchmark to which one of a file belongs."""
        return name if name in self.subsets else next((own for own in self.subsets if name.startswith(own)), None)


# Weights: EXAMPLE_COUNTS of allenai/reward-bench, rewardbench/constants.py (arXiv 2403.13787).
REWARD_BENCH = Leaderboard(
    name="RewardBench",
    sections={
        "Chat": {
            "alpacaeval-easy": 100, "alpacaeval-length": 95, "alpacaeval-hard": 95, "mt-bench-easy": 28,
            "mt-bench-med": 40,
        },
        "Chat Hard": {
            "mt-bench-hard": 37, "llmbar-natural": 100, "llmbar-adver-neighbor": 134, "llmbar-adver-GPTInst": 92,
            "llmbar-adver-GPTOut": 47, "llmbar-adver-manual": 46,
        },
        "Safety": {
            "refusals-dangerous": 100, "refusals-offensive": 100, "xstest-should-refuse": 250,
            "xstest-should-respond": 154, "donotanswer": 136,
        },
        "Reasoning": {
            "math-prm": 984, "hep-cpp": 164, "hep-go": 164, "hep-java": 164, "hep-js": 164, "hep-python": 164,
            "hep-rust": 164,
        },
    },
)  # fmt: skip
# arXiv 2506.01937, and the card of allenai/reward-bench-2.
REWARD_BENCH_2 = Leaderboard(
    name="RewardBench 2",
    sections={name: {name: 1} for name in ("Factuality", "Precise IF", "Math", "Safety", "Focus", TIES)},
    credit=share_first_place,
)
# arXiv 2410.16184: the mean of easy, normal and hard in each domain, then over domains; THU-KEG/RM-Bench, scripts.
RM_BENCH = Leaderboard(
    name="RM-Bench",
    sections={domain: {f"{domain}/{grade}": 1 for grade in DIFFICULTIES} for domain in RM_BENCH_DOMAINS},
)
# arXiv 2410.12784: run_judge.py prints these sources, and the share of all pairs.
JUDGE_BENCH = Leaderboard(
    name="JudgeBench",
    sections={name: {name: 1} for name in ("mmlu-pro", "livebench-reasoning", "livebench-math", "livecodebench")},
    credit=count_games,
    by_items=True,
)
# arXiv 2410.09893: pairs, and best of n, where the best must be above all others; the mean of the four as in
# process_final_result.py of RM-R1-UIUC/RM-R1.
RMB = Leaderboard(
    name="RMB",
    sections={
        f"{shown} {goal}": {f"{folder}/{goal}": 1}
        for shown, folder in (("Pairwise", "Pairwise_set"), ("BoN", "BoN_set"))
        for goal in ("Helpfulness", "Harmlessness")
    },
)
PLAN_REWARD_BENCH = Leaderboard(  # arXiv 2604.08178
    name="Plan-RewardBench", sections={name: {name: 1} for name in PLAN_SPLITS}, credit=average_games
)
LEADERBOARDS = (REWARD_BENCH, REWARD_BENCH_2, RM_BENCH, JUDGE_BENCH, RMB, PLAN_REWARD_BENCH)


def find_leaderboard(judged: Sequence[JudgedItem]) -> tuple[Leaderboard | None, frozenset[str]]:
    """The benchmark that all of these items belong to, and those of its subsets that are missing. It is recognised by
    more than half of its subsets, or by names that no other data has.
    """
    names = {one.item.subset for one in judged}
    for board in LEADERBOARDS:
        found = {board.find_subset(name) for name in names}
        is_named = 2 * len(found) > len(board.subsets) or board in (JUDGE_BENCH, RMB, PLAN_REWARD_BENCH)
        plays = board.credit in (count_games, average_games)
        if found and None not in found and is_named and all(is_ranked(one, pairs=plays) for one in judged):
            return board, board.subsets - found
    return None, frozenset()


def is_ranked(one: JudgedItem, *, pairs: bool) -> bool:
    """Whether it has a best response, and, for a benchmark of pairs, one other."""
    item = one.item
    return isinstance(item, RankedResponses) and (not pairs or (item.best is not None and len(item.responses) == 2))


# -- RewardBench 2, Ties -----------------------------------------------------------------------------------------------


def find_ties(judged: Sequence[JudgedItem]) -> list[JudgedItem]:
    """The items of RewardBench 2's Ties."""
    return [one for one in judged if one.item.subset == TIES and TIES_ID.search(one.item.item_id)]


def find_ties_prompt(one: JudgedItem) -> int:
    """The number that the two items of a prompt share: with one right answer, and with several."""
    found = TIES_ID.search(one.item.item_id)
    assert found is not None, f"{one.item.item_id}: no item of Ties"
    return int(found[2])


def score_ties(rows: Sequence[tuple[JudgedItem, Scores]]) -> float:
    """The measure of RewardBench 2's Ties: whether every right answer is above every wrong one (with one right answer:
    ref, with several: tied), and whether that gap is larger than those among the right ones. NaN if a prompt of either
    kind is missing. process_single_model in rewardbench/utils.py, allenai/reward-bench at 05a9005.

    An item without all scores is inaccurate, and its gap is below all others.
    """
    gaps: dict[str, dict[int, float]] = {"ref": {}, "tied": {}}
    spreads: dict[int, float] = {}
    for one, scores in rows:
        found = TIES_ID.search(one.item.item_id)
        assert found is not None and isinstance(one.item, RankedResponses)
        kind, prompt = found[1], int(found[2])
        right = [scores.get(place, -math.inf) for place, grade in enumerate(one.item.grades) if grade > 0]
        wrong = [scores.get(place, -math.inf) for place, grade in enumerate(one.item.grades) if grade <= 0]
        is_whole = len(scores) == len(one.item.responses)
        gaps[kind][prompt] = min(right) - max(wrong) if is_whole else -math.inf
        if kind == "tied":
            spreads[prompt] = max(right) - min(right) if is_whole else 0.0
    both = [prompt for prompt in gaps["ref"] if prompt in gaps["tied"]]
    if not both:
        return math.nan
    accuracies = [float(np.mean([gap > 0 for gap in own.values()])) for own in gaps.values()]
    spread_P = np.asarray([spreads[prompt] for prompt in both])
    tied_P = np.asarray([gaps["tied"][prompt] for prompt in both])
    least_P = np.minimum(tied_P, [gaps["ref"][prompt] for prompt in both])
    with np.errstate(divide="ignore", invalid="ignore"):
        margin = float(np.mean(np.nan_to_num(np.tanh(least_P / spread_P - 1), nan=0.0)))
    preferred, preferred_hard = float(np.mean(tied_P > spread_P)), float(np.mean(least_P > spread_P))
    return 0.3 * (accuracies[0] + accuracies[1]) + 0.2 * (preferred + preferred_hard) + 0.01 * margin
