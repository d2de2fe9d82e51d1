"""The figures of task=evaluate as tables, from its files. Unreadable parts are left out; writes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]  # a part of a file; used in this file only
BY_RULE = "true_"
UNKNOWN = "–"  # in the place of a number
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureTable:
    """A table. note: what its numbers are."""

    title: str
    note: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def evaluation_tables(run_dir: Path) -> list[FigureTable]:
    """The tables of an evaluation; none for another run."""
    found: list[FigureTable] = []
    for name, tables in (("policy_evaluation.json", policy_tables), ("evaluation.json", judge_tables)):
        try:
            found += tables(json.loads((run_dir / name).read_text("utf-8")))
        except UNREADABLE:
            continue
    return found


def policy_tables(policies: Record) -> Iterator[FigureTable]:
    rows = [row for name, policy in policies.items() for row in policy_rows(name, policy)]
    names = dict.fromkeys(name for _, own in rows for name in own["figures"])
    by_rule = [name for name in names if name.startswith(BY_RULE)]
    kinds = (
        ("The policy, as judged", "rewards", [name for name in names if name not in by_rule]),
        ("The policy, by the rule", "shares of right answers", by_rule),
    )
    for title, what, figures in kinds:
        if figures:
            heads = [name.removeprefix(BY_RULE).replace("_at_", "@") for name in figures]
            yield FigureTable(
                title=title,
                note=f"{what}, in percent, with 95 % intervals over prompts; failed verdicts are in no figure",
                heads=("prompts", "n", *heads, "failed verdicts"),
                rows=[
                    (
                        name, str(own["num_prompts"]), *(estimate_text(own["figures"].get(one)) for one in figures),
                        failures(own["failed"]),
                    )
                    for name, own in rows
                ],
            )  # fmt: skip


def policy_rows(name: str, policy: Record) -> Iterator[tuple[str, Record]]:
    yield name, policy["overall"]
    yield from ((f"{name}, {source}", own) for source, own in policy["by_source"].items())


def judge_tables(result: Record) -> Iterator[FigureTable]:
    ks = list(result["overall"]["by_k"])
    rows = [*result["subsets"].items(), *((f"= {name}", own) for name, own in result.get("sections", {}).items())]
    yield FigureTable(
        title="The judge against labels",
        note=f"right, in percent, with 95 % intervals over prompts; overall: the mean over {result['mean_over']}",
        heads=("subset", "items", "judged", *(f"k={k}" for k in ks), "tied", "failed"),
        rows=[judge_row(name, own, ks) for name, own in (*rows, ("overall", result["overall"]))],
    )


def judge_row(name: str, own: Record, ks: Sequence[str]) -> tuple[str, ...]:
    judged = own["judged"]
    whole = {"mean": judged["accuracy"], "low": judged["low"], "high": judged["high"]}
    shares = (own["by_k"][k]["accuracy"] for k in ks)
    return (
        name, str(judged["num_items"]), estimate_text(whole), *map(percent, shares), percent(judged["tied_share"]),
        percent(judged["failed_share"]),
    )  # fmt: skip


def estimate_text(one: Mapping[str, float] | None) -> str:
    if one is None or one.get("mean") is None:
        return UNKNOWN
    if one["low"] < 0 or one["high"] > 1:  # rewards on no scale
        return f"{one['mean']:.3g} ({one['low']:.3g} to {one['high']:.3g})"
    return f"{percent(one['mean'])} ({percent(one['low'])} to {percent(one['high'])})"


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.1f}"


def failures(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {cause}" for cause, count in sorted(counts.items())) or "none"
