"""Balances lengths over ranks, so that no rank waits long for another. Pure: numbers in, places out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Tokens at which attention costs a layer as much as all the rest: 2 n h against 24 h^2 operations a token, for hidden
# sizes of 2048 to 4096.
ATTENTION_PARITY = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The unit dealt to a rank: one sample, or several samples packed side by side."""

    tokens: int
    work: float  # in units of one token of a short sample


def work(length: int, before: int = 0) -> float:
    """The work of one sample, in units of one token of a short one. `before`: tokens it attends to that are computed
    elsewhere.
    """
    return length * (1 + (2 * before + length) / ATTENTION_PARITY)


def fill(
    loads: Sequence[Load], max_tokens: int, world_size: int, share: float = math.inf
) -> tuple[list[list[int]], list[int]]:
    """Fill one round: longest first, each to the rank with the least work that has room (LPT: Graham, 1969).

    A rank without work takes any load; otherwise one above `max_tokens` would never be dealt. No rank gets more than
    `share`, unless another already has more work. Returns indices into `loads`: those of each rank, and the rest.
    """
    by_rank: list[list[int]] = [[] for _ in range(world_size)]
    tokens, works = [0] * world_size, [0.0] * world_size
    left_over = []
    for place in sorted(range(len(loads)), key=lambda place: loads[place].tokens, reverse=True):
        load, most = loads[place], max(share, *works)
        least = min(
            (rank for rank in range(world_size)
             if not by_rank[rank] or (tokens[rank] + load.tokens <= max_tokens and works[rank] + load.work <= most)),
            key=works.__getitem__,
            default=None,
        )  # fmt: skip
        if least is None:
            left_over.append(place)
            continue
        by_rank[least].append(place)
        tokens[least] += load.tokens
        works[least] += load.work
    return by_rank, left_over


def deal(loads: Sequence[Load], max_tokens: int, world_size: int) -> list[list[list[int]]]:
    """Deal all loads: [round][rank] -> indices into `loads`. Uses as few rounds as full ones would, with similar work
    in each: full rounds have no room to balance the long sample of another rank.
    """
    full = _rounds(loads, max_tokens, world_size, 0)
    even = _rounds(loads, max_tokens, world_size, len(full))
    return even if len(even) == len(full) else full


def _rounds(loads: Sequence[Load], max_tokens: int, world_size: int, num_rounds: int) -> list[list[list[int]]]:
    """Deal in `num_rounds` rounds, each with its share of the rest; further rounds are filled."""
    rounds: list[list[list[int]]] = []
    places = list(range(len(loads)))
    while places:
        rest = [loads[place] for place in places]
        to_come = num_rounds - len(rounds)
        share = sum(load.work for load in rest) / (to_come * world_size) if to_come > 1 else math.inf
        by_rank, left_over = fill(rest, max_tokens, world_size, share)
        rounds.append([[places[place] for place in own] for own in by_rank])
        places = [places[place] for place in left_over]
    return rounds


class RankWork:
    """The imbalance of a batch's rounds between ranks."""

    def __init__(self) -> None:
        self._fullest = self._mean = 0.0

    def add(self, works_by_rank: Sequence[float]) -> None:
        """Add a round."""
        self._fullest += max(works_by_rank)
        self._mean += sum(works_by_rank) / len(works_by_rank)

    @property
    def imbalance(self) -> float:
        """Time of all rounds over the time without waiting for the slowest rank: 1 at best."""
        return self._fullest / self._mean if self._mean else 1.0
