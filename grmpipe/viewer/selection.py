"""Which answers to annotate next, each with its share: the probability with which it is in the queue.

Poisson sampling: an answer is in if a uniform number of its own is below its share, independently of all others.
So means weighted by 1 / share (Horvitz and Thompson, JASA 1952) stand for all answers. The queue is in the order of
number / share: its first answers are such a sample too, with shares in the same proportions (sequential Poisson
sampling: Ohlsson, J. Off. Stat. 1998).
"""

import contextlib
import functools
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
    "threshold": f"abs(coalesce(r.reward - {HIGH}, (r.score - :passes) / :span))",
}
WAYS_OUT = {
    "disagreement": "no two judges differ on an answer here",
    "split": "no votes of a judge differ here",
    "threshold": "no answer has a reward or a score here",
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
    index: RunIndex,
    state: IndexProgress,
    evaluation: str,
    select: str,
    num_items: int,
    seed: int,
    passes: tuple[float, float] = (HIGH, 1.0),
) -> Sequence[Selected]:
    """The queue. state: of the index, to select again once it grew. passes: the score from which an answer passes where
    it has no reward, and the width of the scale. Raises ValueError, sqlite3.Error.
    """
    if select not in GROWS_WITH:
        raise ValueError(f"select: unknown value {select!r}; known: {', '.join(GROWS_WITH)}")
    query = (
        f"SELECT r.id, {GROWS_WITH[select]} FROM rollouts r WHERE +r.evaluation = :evaluation AND r.line IS NOT NULL "
        "ORDER BY r.id"  # the order of the journal, in any index of it
    )
    names = (
        "SELECT r.evaluation, r.round, r.group_id, r.sibling FROM json_each(?) wanted "
        "CROSS JOIN rollouts r ON r.id = wanted.value ORDER BY wanted.key"
    )
    with contextlib.closing(index.read()) as connection:
        connection.row_factory = None  # plain tuples: there is one for each answer
        given = {"evaluation": evaluation, "passes": passes[0], "span": passes[1]}
        rows = connection.execute(query, given).fetchall()
        if not rows:
            return []
        share = compute_shares(np.array([row[1] for row in rows], dtype=float), select, num_items)  # NaN: not known
        rank = np.random.default_rng(seed % 2**64).random(len(rows)) / share
        within = np.flatnonzero(rank < 1)
        chosen = within[np.argsort(rank[within])]
        found = connection.execute(names, (json.dumps([rows[place][0] for place in chosen]),)).fetchall()
    shares = (round(float(one), 9) for one in share[chosen])
    return [Selected._make((*name, one)) for name, one in zip(found, shares, strict=True)]


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
