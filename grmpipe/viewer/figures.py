"""Means and counts over the rollouts of a run, from its index."""

import contextlib
import functools
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from grmpipe.viewer.index import IndexProgress, RunIndex

NUM_BINS = 5
CHOICES = ("evaluation", "source", "status", "outcome", "failure", "judge", "cause", "fault")
MEANS = (
    "count(*) AS rollouts, avg(reward) AS reward, avg(truth) AS truth, avg(reward - truth) AS gap, "
    "avg(score) AS score, avg(spread) AS spread, avg(tokens) AS tokens, avg(failure != '') AS failed, "
    "avg(status NOT IN ('finished', '')) AS truncated"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Means over some rollouts. gap: reward minus truth, where both are known. failed: share without a verdict."""

    rollouts: int
    reward: float | None
    truth: float | None
    gap: float | None
    score: float | None
    spread: float | None
    tokens: float | None
    failed: float | None
    truncated: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Figures over all rollouts of a run."""

    state: IndexProgress
    by_step: dict[int, Means]
    bins: Sequence[tuple[float, float, int, float]]
    counts: Mapping[str, int]


@functools.lru_cache(maxsize=8)
def run_figures(index: RunIndex, state: IndexProgress) -> RunFigures:
    """state: of the index, to ask it again once it grew. Raises sqlite3.Error."""
    with contextlib.closing(index.read()) as connection:
        kept = connection.execute("SELECT value FROM facts WHERE name = 'figures'").fetchone()
        if kept is not None and (found := msgspec.json.decode(kept["value"], type=RunFigures)).state == state:
            return found
        return RunFigures(
            state=state,
            by_step=means_by_step(connection),
            bins=truth_by_reward(connection, first_evaluation(connection)),
            counts=counts(connection),
        )


def keep_figures(index: RunIndex, state: IndexProgress) -> None:
    """Keep them in the index for the next viewer: of a million rollouts they take seconds. Raises sqlite3.Error."""
    kept = msgspec.json.encode(run_figures(index, state)).decode()
    with contextlib.closing(sqlite3.connect(index.path, timeout=30)) as connection, connection:
        connection.execute("INSERT OR REPLACE INTO facts VALUES ('figures', ?)", (kept,))


def means_by_step(connection: sqlite3.Connection) -> dict[int, Means]:
    """By the step that trained the rollouts."""
    query = f"SELECT step, {MEANS} FROM rollouts WHERE evaluation = '' AND step IS NOT NULL GROUP BY step ORDER BY step"
    return {row["step"]: Means(**without(row, "step")) for row in connection.execute(query)}


def means_around(connection: sqlite3.Connection, step: int) -> dict[str, dict[bool, Means]]:
    """By source ("": all; alone if there is only one), and whether the rollouts were trained from this step on."""
    found: dict[str, dict[bool, Means]] = {}
    known = "FROM rollouts WHERE evaluation = '' AND step IS NOT NULL GROUP BY"
    for query in (
        f"SELECT '' AS source, step >= ? AS since, {MEANS} {known} since",
        f"SELECT source, step >= ? AS since, {MEANS} {known} source, since ORDER BY source",
    ):
        for row in connection.execute(query, (step,)):
            means = Means(**without(row, "source", "since"))
            found.setdefault(row["source"] or "", {}).setdefault(bool(row["since"]), means)
    return found if len(found) > 2 else {"": found[""]} if found else {}


def first_evaluation(connection: sqlite3.Connection) -> str:
    """Whose rollouts are shown where none is chosen: "", those of training, or, of a run without any, the first."""
    row = connection.execute("SELECT evaluation FROM rollouts WHERE line IS NOT NULL ORDER BY evaluation LIMIT 1")
    return next((str(one["evaluation"]) for one in row), "")


def truth_by_reward(connection: sqlite3.Connection, evaluation: str) -> list[tuple[float, float, int, float]]:
    """From, to, number of rollouts and mean truth, by the reward that the judge gave."""
    place = f"CAST(min(max(reward, 0), 0.9999) * {NUM_BINS} AS INTEGER)"
    query = (
        f"SELECT {place} AS place, count(*) AS rollouts, avg(truth) AS truth FROM rollouts "
        "WHERE +evaluation = ? AND truth IS NOT NULL AND reward IS NOT NULL GROUP BY place ORDER BY place"
    )
    rows = connection.execute(query, (evaluation,))
    return [(row["place"] / NUM_BINS, (row["place"] + 1) / NUM_BINS, row["rollouts"], row["truth"]) for row in rows]


class JudgeFailures(NamedTuple):
    """Single judgements of a judge that failed by one cause. share: of all its judgements, where their number is known.
    details: what was said of up to five, with the last line of one that could not be read.
    """

    judge: str
    cause: str
    number: int
    share: float | None
    details: list[str]


def failures_by_judge(connection: sqlite3.Connection) -> list[JudgeFailures]:
    """The most frequent first."""
    votes = "SELECT '', sum(votes) FROM rollouts UNION ALL SELECT judge, sum(votes) FROM opinions GROUP BY judge"
    asked = {judge: number for judge, number in connection.execute(votes) if number is not None}
    query = "SELECT judge, cause, count(*) AS n FROM failures GROUP BY judge, cause ORDER BY n DESC, judge, cause"
    rows = connection.execute(query).fetchall()
    for judge in asked:
        asked[judge] += sum(row["n"] for row in rows if row["judge"] == judge)
    some = "SELECT DISTINCT detail FROM failures WHERE judge = ? AND cause = ? AND detail != '' LIMIT 5"
    return [
        JudgeFailures(
            judge, cause, number, number / asked[judge] if judge in asked else None,
            [detail for (detail,) in connection.execute(some, (judge, cause))],
        )
        for judge, cause, number in map(tuple, rows)
    ]  # fmt: skip


def verdict_failures(connection: sqlite3.Connection) -> list[tuple[str, int]]:
    """Cause and number of the rollouts without a verdict."""
    query = "SELECT failure, count(*) AS n FROM rollouts WHERE failure != '' GROUP BY failure ORDER BY n DESC"
    return [(row["failure"], row["n"]) for row in connection.execute(query)]


def choices(connection: sqlite3.Connection) -> dict[str, list[str]]:
    """What can be chosen in the form, by field."""
    found: dict[str, list[str]] = {name: [] for name in CHOICES}
    for row in connection.execute("SELECT field, value FROM choices ORDER BY value"):
        found[row["field"]].append(row["value"])
    return found


def without(row: sqlite3.Row, *names: str) -> dict[str, Any]:
    return {name: row[name] for name in row.keys() if name not in names}  # noqa: SIM118


def counts(connection: sqlite3.Connection) -> dict[str, int]:
    """Rollouts by evaluation; "": in training."""
    query = "SELECT evaluation, count(*) FROM rollouts WHERE line IS NOT NULL GROUP BY evaluation"
    return {"": 0} | dict(map(tuple, connection.execute(query)))
