"""Questions to the index of a run. Pure SQL: reads no journal."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from urllib.parse import urlencode

from grmpipe.viewer.snippets import match_expression

PAGE_ROWS = 50
HIGH = 0.5  # from this reward on, or this truth, an answer counts as good
# Value of `truth` -> condition; {of}: the table that has the judge's reward.
AGREEMENTS = {
    "fooled": f"{{of}}.reward >= {HIGH} AND r.truth < {HIGH}",
    "missed": f"{{of}}.reward < {HIGH} AND r.truth >= {HIGH}",
    "agree": f"({{of}}.reward >= {HIGH}) = (r.truth >= {HIGH})",
}
SORTS = {
    "newest": "r.line DESC",
    "oldest": "r.line",
    "score, highest": "{of}.score DESC",
    "score, lowest": "{of}.score IS NULL, {of}.score",
    "spread, widest": "{of}.spread DESC",
    "judge above truth": "{of}.reward - r.truth DESC",
    "judge below truth": "r.truth - {of}.reward DESC",
    "longest": "r.tokens DESC",
    "advantage, highest": "r.advantage DESC",
    "advantage, lowest": "r.advantage IS NULL, r.advantage",
}
# Field of Filter -> condition with its value.
CONDITIONS = {
    "step_from": "r.step >= ?",
    "step_to": "r.step <= ?",
    "score_from": "{of}.score >= ?",
    "score_to": "{of}.score <= ?",
    "spread_from": "{of}.spread >= ?",
    "tokens_from": "r.tokens >= ?",
    "tokens_to": "r.tokens <= ?",
    "source": "r.source = ?",
    "status": "r.status = ?",
    "outcome": "r.outcome = ?",
    "prompt": "r.prompt_id = ?",
    "failure": "? IN ({of}.failure, iif({of}.failure != '', 'any', NULL))",
    "fault": "instr(' ' || r.faults || ' ', ' ' || ? || ' ')",
    "cause": "EXISTS (SELECT 1 FROM failures f WHERE f.evaluation = r.evaluation AND f.round = r.round "
    "AND f.group_id = r.group_id AND f.sibling = r.sibling AND f.cause = ?)",
}
SAME_ROLLOUT = "o.evaluation = r.evaluation AND o.round = r.round AND o.group_id = r.group_id AND o.sibling = r.sibling"
COLUMNS = (
    "r.evaluation, r.round, r.group_id, r.sibling, r.line, r.report, r.prompt_id, r.source, r.question, r.answer, "
    "r.status, r.version, r.tokens, r.turns, r.faults, {of}.score, {of}.reward, {of}.spread, {of}.votes, {of}.failure, "
    "r.step, r.outcome, r.advantage, r.truth"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """A rollout as the index knows it. None: not known, or not there. failure: of its verdict, which then has no
    number.
    """

    evaluation: str
    round: int
    group_id: str
    sibling: int
    line: int | None
    report: int | None
    prompt_id: str | None
    source: str | None
    question: str | None
    answer: str | None
    status: str | None
    version: int | None
    tokens: int | None
    turns: int | None
    faults: str | None
    score: float | None
    reward: float | None
    spread: float | None
    votes: int | None
    failure: str | None
    step: int | None
    outcome: str | None
    advantage: float | None
    truth: float | None

    @property
    def link(self) -> str:
        """What names its group in a URL."""
        who = {"group": self.group_id} | (
            {"evaluation": self.evaluation, "round": self.round} if self.evaluation else {}
        )
        return urlencode(who)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """What the table of rollouts shows, as it stands in its URL. None and "": everything.

    evaluation: the name of held-out prompts; "": the rollouts of training.
    judge: of several, the one whose score, reward, spread and failure are meant.
    truth: where the judge and the truth part or agree.
    """

    evaluation: str = ""
    words: str = ""
    judge: str = ""
    truth: str = ""
    step_from: int | None = None
    step_to: int | None = None
    score_from: float | None = None
    score_to: float | None = None
    spread_from: float | None = None
    tokens_from: int | None = None
    tokens_to: int | None = None
    source: str = ""
    status: str = ""
    outcome: str = ""
    prompt: str = ""
    failure: str = ""
    cause: str = ""
    fault: str = ""
    sort: str = "newest"
    page: int = 1

    @staticmethod
    def parse(query: Mapping[str, str]) -> Filter:
        """Raises ValueError, naming the field, for what is no number or no known choice."""
        given = {one.name: query[one.name].strip() for one in fields(Filter) if query.get(one.name, "").strip()}
        values: dict[str, object] = {}
        for name, text in given.items():
            kind = Filter.__annotations__[name]
            values[name] = parse_number(name, text, float if "float" in kind else int) if kind != "str" else text
        found = Filter(**values)  # type: ignore[arg-type]
        if found.sort not in SORTS or found.truth not in ("", *AGREEMENTS) or found.page < 1:
            raise ValueError("sort, truth or page: not one of the choices of the form")
        return found

    def url(self, **changes: object) -> str:
        """The query string of this filter with changes; the page begins anew unless it is changed."""
        changed = replace(self, **{"page": 1, **changes})  # type: ignore[arg-type]
        default = Filter()
        found = {one.name: getattr(changed, one.name) for one in fields(Filter)}
        return urlencode({name: value for name, value in found.items() if value != getattr(default, name)})


def parse_number(name: str, text: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name}: {text!r} is no {'whole ' if kind is int else ''}number") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPage:
    rows: Sequence[RolloutRow]
    total: int
    page: int

    @property
    def num_pages(self) -> int:
        return max(1, -(-self.total // PAGE_ROWS))


def find_rollouts(connection: sqlite3.Connection, wanted: Filter) -> RolloutPage:
    """Raises sqlite3.Error."""
    source, values = select_from(wanted)
    of = table(wanted)
    total = connection.execute(f"SELECT count(*) {source}", values).fetchone()[0]
    limits = (PAGE_ROWS, (wanted.page - 1) * PAGE_ROWS)
    order = f"{SORTS[wanted.sort].format(of=of)}, r.line DESC" if wanted.sort != "oldest" else "r.line"
    query = f"SELECT {COLUMNS.format(of=of)} {source} ORDER BY {order} LIMIT ? OFFSET ?"
    rows = [RolloutRow(**dict(row)) for row in connection.execute(query, (*values, *limits))]
    return RolloutPage(rows=rows, total=total, page=wanted.page)


def table(wanted: Filter) -> str:
    """The table with the outcome of the wanted judge."""
    return "o" if wanted.judge else "r"


def select_from(wanted: Filter) -> tuple[str, list[object]]:
    """FROM and WHERE, with their values."""
    joined = f" JOIN opinions o ON {SAME_ROLLOUT} AND o.judge = ?" if wanted.judge else ""
    values: list[object] = [wanted.judge] if wanted.judge else []
    conditions = ["r.evaluation = ?", "r.line IS NOT NULL"]
    values.append(wanted.evaluation)
    for name, condition in CONDITIONS.items():
        value = getattr(wanted, name)
        if value not in (None, ""):
            conditions.append(condition)
            values.append(value)
    if wanted.truth:
        conditions.append(AGREEMENTS[wanted.truth])
    if expression := match_expression(wanted.words):
        found = "(SELECT rowid FROM words WHERE words MATCH ?)"
        conditions.append(f"(r.line IN {found} OR r.report IN {found})")
        values += [expression, expression]
    return f"FROM rollouts r{joined} WHERE {' AND '.join(conditions)}".format(of=table(wanted)), values


# -- groups and prompts ------------------------------------------------------------------------------------------------


def read_group(connection: sqlite3.Connection, group_id: str, *, evaluation: str, round_: int) -> list[RolloutRow]:
    """The siblings in their order."""
    query = f"SELECT {COLUMNS.format(of='r')} FROM rollouts r WHERE evaluation = ? AND round = ? AND group_id = ? "
    rows = connection.execute(f"{query} AND line IS NOT NULL ORDER BY sibling", (evaluation, round_, group_id))
    return [RolloutRow(**dict(row)) for row in rows]


def read_prompt(connection: sqlite3.Connection, prompt_id: str, limit: int) -> list[RolloutRow]:
    """The last answers to a prompt, in training or held out."""
    query = f"SELECT {COLUMNS.format(of='r')} FROM rollouts r WHERE prompt_id = ? AND line IS NOT NULL "
    rows = connection.execute(f"{query} ORDER BY round DESC, line DESC LIMIT ?", (prompt_id, limit))
    return [RolloutRow(**dict(row)) for row in rows]


def find_shared_prompts(a: sqlite3.Connection, b: sqlite3.Connection, limit: int) -> list[tuple[str, str]]:
    """Prompts that both runs answered, as id and question: where their rewards differ most first."""
    query = (
        "SELECT prompt_id, max(question) AS question, avg(reward) AS reward FROM rollouts "
        "WHERE prompt_id != '' AND reward IS NOT NULL GROUP BY prompt_id"
    )
    of_a = {row["prompt_id"]: row for row in a.execute(query)}
    both = [(abs(row["reward"] - of_a[row["prompt_id"]]["reward"]), row["prompt_id"], row["question"])
            for row in b.execute(query) if row["prompt_id"] in of_a]  # fmt: skip
    return [(prompt_id, question) for _, prompt_id, question in sorted(both, key=lambda one: -one[0])[:limit]]
