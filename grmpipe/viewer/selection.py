"""Which answers to annotate next, each with its share: the probability with which it is in the queue.

Poisson sampling: an answer is in if its own uniform number, a hash, is below its share, independently of all others.
So means weighted by 1 / share (Horvitz and Thompson, JASA 1952) stand for all answers. The queue is in the order of
number / share: its first answers are such a sample too, with shares in the same proportions (sequential Poisson
sampling: Ohlsson, J. Off. Stat. 1998).
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from grmpipe.viewer.index import IndexProgress, RunIndex
from grmpipe.viewer.queries import HIGH

AT_RANDOM = 0.5  # of the queue, whatever else it is selected by: every answer has a share
WIDTH = 0.1  # in rewards, of what is near the threshold
# Selection -> what an answer's share grows with; nothing: at random.
GROWS_WITH = {
    "random": "NULL",
    "disagreement": "(SELECT max(coalesce(reward, score)) - min(coalesce(reward, score)) FROM opinions o "
    "WHERE o.id = r.id)",
    "split": "r.spread",
    "threshold": f"abs(r.reward - {HIGH})",
}
WAYS_OUT = {
    "disagreement": "no two judges differ on an answer here",
    "split": "no votes of a judge differ here",
    "threshold": "no answer has a reward here",
}


class Selected(NamedTuple):
    evaluation: str
    round: int
    group: str
    sibling: int
    share: float

    @property
    def place(self) -> tuple[str, int, str, int]:
        return self[:4]


@functools.lru_cache(maxsize=8)
def select_answers(
    index: RunIndex, state: IndexProgress, evaluation: str, select: str, num_items: int, seed: int
) -> Sequence[Selected]:
    """The queue. state: of the index, to select again once it grew. Raises ValueError, sqlite3.Error."""
    if select not in GROWS_WITH:
        raise ValueError(f"select: unknown value {select!r}; known: {', '.join(GROWS_WITH)}")
    query = (
        f"SELECT r.round, r.group_id, r.sibling, {GROWS_WITH[select]} FROM rollouts r "
        "WHERE +r.evaluation = ? AND r.line IS NOT NULL"
    )
    with contextlib.closing(index.read()) as connection:
        connection.row_factory = None  # plain tuples: of all answers
        rows = connection.execute(query, (evaluation,)).fetchall()
        if not rows:
            return []
        rounds, groups, siblings, values = zip(*rows, strict=True)
        share = compute_shares(np.array(values, dtype=float), select, num_items)  # NaN where nothing is known
        rank = draw_uniform(evaluation, rounds, groups, siblings, seed) / share
        order = np.flatnonzero(rank < 1)
        chosen = order[np.argsort(rank[order])].tolist()
    return [Selected(evaluation, rounds[i], groups[i], siblings[i], round(float(share[i]), 9)) for i in chosen]


def draw_uniform(
    evaluation: str, rounds: Sequence[int], groups: Sequence[str], siblings: Sequence[int], seed: int
) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each answer, by what names it: the same again in another index of the same run."""
    hashes = {
        group: xxhash.xxh3_64_intdigest(f"{evaluation}\0{group}".encode(), seed=seed % 2**64) for group in set(groups)
    }
    mixed = np.fromiter(map(hashes.__getitem__, groups), np.uint64, len(groups))
    for part in (rounds, siblings):  # SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)
        mixed += (np.array(part, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)) / np.float64(2**53)


def compute_shares(values: npt.NDArray[np.float64], select: str, num_items: int) -> npt.NDArray[np.float64]:
    """The share of each answer, by what its share grows with."""
    even = np.full(len(values), 1 / len(values))
    if select != "random":
        grown = np.nan_to_num(np.exp(-values / WIDTH) if select == "threshold" else values)
        if not grown.any():
            raise ValueError(f"select: {WAYS_OUT[select]}; choose select=random")
        even = AT_RANDOM * even + (1 - AT_RANDOM) * grown / grown.sum()
    shares = num_items * even
    while (sure := shares >= 1).any() and not sure.all():  # what they can't use is the others'
        others = (num_items - sure.sum()) * even / even[~sure].sum()
        if np.array_equal(shares, capped := np.where(sure, 1.0, others)):
            break
        shares = capped
    bounded: npt.NDArray[np.float64] = np.minimum(1.0, shares)
    return bounded
