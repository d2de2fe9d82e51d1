"""Benchmarks whose leaderboard is a mean over sections, and how sections are made of subsets. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

RM_BENCH_DOMAINS = ("chat", "math", "code", "safety")
DIFFICULTIES = ("easy", "normal", "hard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaderboard:
    """A benchmark. sections: section -> its subsets and their weights among each other; sections weigh the same.

    apart: how its own figure differs from the one here, in words; empty if it doesn't.
    """

    name: str
    sections: Mapping[str, Mapping[str, float]]
    apart: str = ""

    @property
    def subsets(self) -> frozenset[str]:
        return frozenset(subset for subsets in self.sections.values() for subset in subsets)


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
    sections={name: {name: 1} for name in ("Factuality", "Precise IF", "Math", "Safety", "Focus", "Ties")},
    apart="Ties is measured here by one item per right answer, which isn't the leaderboard's measure",
)
# arXiv 2410.16184: the mean of easy, normal and hard in each domain, then over domains; THU-KEG/RM-Bench, scripts.
RM_BENCH = Leaderboard(
    name="RM-Bench",
    sections={domain: {f"{domain}/{grade}": 1 for grade in DIFFICULTIES} for domain in RM_BENCH_DOMAINS},
)
LEADERBOARDS = (REWARD_BENCH, REWARD_BENCH_2, RM_BENCH)


def find_leaderboard(subsets: Collection[str]) -> tuple[Leaderboard | None, frozenset[str]]:
    """The benchmark that all of these subsets belong to, and those of its subsets that are missing. A benchmark is
    recognised by more than half of its subsets.
    """
    for board in LEADERBOARDS:
        if board.subsets.issuperset(subsets) and 2 * len(set(subsets)) > len(board.subsets):
            return board, board.subsets - set(subsets)
    return None, frozenset()
