"""Questions to the index of a run. Pure SQL: reads no journal."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from urllib.parse import urlencode

PAGE_ROWS = 50
COUNTED = 1000  # more are not counted
LARGEST = 2**40  # whole number that is asked for
LABELLED = "labelled work"  # an evaluation of the judge: no name of prompts has a space
HIGH = 0.5  # from this reward on, or this truth, an answer counts as good
# Value of `truth` -> condition; {of}: the table that has the judge's reward.
AGREEMENTS = {
    "fooled": f"{{of}}.reward >= {HIGH} AND r.truth < {HIGH}",
    "missed": f"{{of}}.reward < {HIGH} AND r.truth >= {HIGH}",
    "agree": f"({{of}}.reward >= {HIGH}) = (r.truth >= {HIGH})",
}
SORTS = {
    "newest": "r.id DESC",
    "oldest": "r.id",
    "score, highest": "{of}.score DESC",
    "score, lowest": "{of}.score IS NULL, {of}.score",
    "spread, widest": "{of}.spread DESC",
    "judge above truth": "{of}.reward - r.truth DESC",
    "judge below truth": "r.truth - {of}.reward DESC",
    "longest": "r.tokens DESC",
    "advantage, highest": "r.advantage DESC",
    "advantage, lowest": "r.advantage IS NULL, r.advantage",
    "spread, narrowest": "{of}.spread IS NULL, {of}.spread",
    "reward, highest": "{of}.reward DESC",
    "reward, lowest": "{of}.reward IS NULL, {of}.reward",
    "truth, highest": "r.truth DESC",
    "truth, lowest": "r.truth IS NULL, r.truth",
    "shortest": "r.tokens IS NULL, r.tokens",
    "source": "r.source",
}
BY_ID = ("newest", "oldest")
# Column of the table -> the sorts of a click on it, and of another one.
COLUMN_SORTS = {
    "step": ("newest", "oldest"),
    "verdict": ("score, highest", "score, lowest"),
    "reward": ("reward, highest", "reward, lowest"),
    "spread": ("spread, widest", "spread, narrowest"),
    "truth": ("truth, highest", "truth, lowest"),
    "advantage": ("advantage, highest", "advantage, lowest"),
    "tokens": ("longest", "shortest"),
    "source": ("source", "newest"),
}
# Field of Filter -> condition with its value.
CONDITIONS = {
    "step_from": "r.step >= :step_from",
    "step_to": "r.step <= :step_to",
    "score_from": "{of}.score >= :score_from",
    "score_to": "{of}.score <= :score_to",
    "spread_from": "{of}.spread >= :spread_from",
    "tokens_from": "r.tokens >= :tokens_from",
    "tokens_to": "r.tokens <= :tokens_to",
    "source": "r.source = :source",
    "status": "r.status = :status",
    "outcome": "r.outcome = :outcome",
    "prompt": "r.prompt_id = :prompt",
    "failure": ":failure IN ({of}.failure, iif({of}.failure != '', 'any', NULL))",
    "fault": "instr(' ' || r.faults || ' ', ' ' || :fault || ' ')",
    "words": "r.id IN (SELECT rowid >> 1 FROM words WHERE words MATCH :words)",
    "cause": "r.id IN (SELECT id FROM failures WHERE cause = :cause)",
}
COLUMNS = (
    "r.evaluation, r.round, r.group_id, r.sibling, r.line, r.report, r.prompt_id, r.source, s.question, s.answer, "
    "r.status, r.version, r.tokens, r.turns, r.faults, {of}.score, {of}.reward, {of}.spread, {of}.votes, {of}.failure, "
    "r.step, r.outcome, r.advantage, r.truth"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """A rollout as the index knows it. None: not known, or not there. failure: why its verdict failed, which
    then has no number.
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
    def place(self) -> tuple[str, int, str, int]:
        return self.evaluation, self.round, self.group_id, self.sibling

    @property
    def truth_name(self) -> str:
        return "label" if self.evaluation == LABELLED else "truth"

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
    judge: whose score, reward, spread and failure are meant, where several judge.
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
    def parse(query: Mapping[str, str], *, evaluation: str = "") -> Filter:
        """evaluation: where the query names none. Raises ValueError, naming the field, for what is no number or no
        known choice.
        """
        given = {"evaluation": evaluation} | {
            one.name: query[one.name].strip() for one in fields(Filter) if query.get(one.name, "").strip()
        }
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
        number = kind(text)
    except ValueError:
        raise ValueError(f"{name}: {text!r} is no {'whole ' if kind is int else ''}number") from None
    if kind is int and abs(number) > LARGEST:
        raise ValueError(f"{name}: {text} is more than any run has")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPage:
    """found: rollouts that match; where `is_more`, there are more, which nobody counted."""

    rows: Sequence[RolloutRow]
    page: int
    found: int
    is_more: bool

    @property
    def total(self) -> str:
        return f"more than {self.found:,}" if self.is_more else f"{self.found:,}"

    @property
    def num_pages(self) -> int:
        return max(1, -(-self.found // PAGE_ROWS))


def find_rollouts(connection: sqlite3.Connection, wanted: Filter) -> RolloutPage:
    """Raises sqlite3.Error."""
    end = wanted.page * PAGE_ROWS
    counted = max(COUNTED, end)
    ids = select_all(connection, wanted, counted + 1)
    rows = read_rows(connection, wanted.judge, ids[end - PAGE_ROWS : end])
    return RolloutPage(rows=rows, page=wanted.page, found=min(len(ids), counted), is_more=len(ids) > counted)


def select_all(connection: sqlite3.Connection, wanted: Filter, limit: int = -1) -> list[int]:
    """The ids of all rollouts that match, in their order. Raises sqlite3.Error."""
    wanted = replace(wanted, words=match_expression(wanted.words))
    return [row["id"] for row in connection.execute(select_ids(wanted), {**asdict(wanted), "limit": limit})]


def find_neighbours(
    connection: sqlite3.Connection, wanted: Filter, row: RolloutRow, *, alone: bool
) -> list[tuple[RolloutRow, Filter] | None]:
    """The rollout before this one in the table, and the one after it, each with its page of the table; of a whole group
    those of other groups. None: there is none near the page of `wanted`.
    """
    start = max(0, (wanted.page - 2) * PAGE_ROWS)
    ids = select_all(connection, wanted, (wanted.page + 1) * PAGE_ROWS)[start:]
    first: dict[tuple[object, ...], tuple[RolloutRow, int]] = {}
    for place, one in enumerate(read_rows(connection, wanted.judge, ids), start):
        first.setdefault((one.link, one.sibling if alone else None), (one, place // PAGE_ROWS + 1))
    keys, own = [*first], (row.link, row.sibling if alone else None)
    if own not in first:
        return [None, None]
    here = keys.index(own)
    around = [keys[here - 1] if here else None, keys[here + 1] if here + 1 < len(keys) else None]
    return [(first[key][0], replace(wanted, page=first[key][1])) if key is not None else None for key in around]


def read_rows(connection: sqlite3.Connection, judge: str, ids: Sequence[int]) -> list[RolloutRow]:
    """The rollouts of these ids, in their order."""
    of, joined = ("o", "JOIN opinions o ON o.id = r.id AND o.judge = :judge") if judge else ("r", "")
    query = (
        f"SELECT {COLUMNS.format(of=of)} FROM json_each(:ids) wanted CROSS JOIN rollouts r ON r.id = wanted.value "
        f"JOIN snippets s ON s.id = r.id {joined} ORDER BY wanted.key"
    )
    return [RolloutRow(**dict(row)) for row in connection.execute(query, {"ids": json.dumps(ids), "judge": judge})]


def select_ids(wanted: Filter) -> str:
    """The query for the first :limit ids, with a parameter per field of the filter: one pass over the table at most."""
    conditions = ["+r.evaluation = :evaluation", "r.line IS NOT NULL"]  # +: not by an index, most rollouts have it
    conditions += [text for name, text in CONDITIONS.items() if getattr(wanted, name) not in (None, "")]
    if wanted.truth:
        conditions.append(AGREEMENTS[wanted.truth])
    of, joined = ("o", "CROSS JOIN opinions o ON o.id = r.id AND o.judge = :judge") if wanted.judge else ("r", "")
    order = SORTS[wanted.sort] if wanted.sort in BY_ID else f"{SORTS[wanted.sort]}, r.id DESC"
    query = f"SELECT r.id FROM rollouts r {joined} WHERE {' AND '.join(conditions)} ORDER BY {order} LIMIT :limit"
    return query.format(of=of)


# -- groups and prompts ------------------------------------------------------------------------------------------------


def read_group(connection: sqlite3.Connection, group_id: str, *, evaluation: str, round_: int) -> list[RolloutRow]:
    """The siblings in their order."""
    query = "SELECT id FROM rollouts WHERE evaluation = ? AND round = ? AND group_id = ? AND line IS NOT NULL"
    found = connection.execute(f"{query} ORDER BY sibling", (evaluation, round_, group_id))
    return read_rows(connection, "", [row["id"] for row in found])


def read_prompt(connection: sqlite3.Connection, prompt_id: str, limit: int) -> list[RolloutRow]:
    """The last answers to a prompt, in training or held out."""
    query = "SELECT id FROM rollouts WHERE prompt_id = ? AND line IS NOT NULL ORDER BY round DESC, id DESC LIMIT ?"
    return read_rows(connection, "", [row["id"] for row in connection.execute(query, (prompt_id, limit))])


def find_shared_prompts(a: sqlite3.Connection, b: sqlite3.Connection, limit: int) -> list[tuple[str, str]]:
    """Prompts that both runs answered, as id and question: where their rewards differ most first."""
    query = (
        "SELECT prompt_id, max(id) AS id, avg(reward) AS reward FROM rollouts "
        "WHERE prompt_id != '' AND reward IS NOT NULL AND line IS NOT NULL GROUP BY prompt_id"
    )
    of_a = {row["prompt_id"]: row["reward"] for row in a.execute(query)}
    both = [(abs(row["reward"] - of_a[row["prompt_id"]]), row["id"])
            for row in b.execute(query) if row["prompt_id"] in of_a]  # fmt: skip
    shown = [id_ for _, id_ in sorted(both, key=lambda one: -one[0])[:limit]]
    return [(row.prompt_id or "", row.question or "") for row in read_rows(b, "", shown)]


SNIPPET_CHARS = 160
PIECE = re.compile(r'(-?)"([^"]*)"|(-?)(\S+)')


def snippet(text: str, *, from_end: bool = False) -> str:
    """The first or the last words of a text, in one line."""
    part = text[-4 * SNIPPET_CHARS :] if from_end else text[: 4 * SNIPPET_CHARS]
    line = " ".join(part.split())
    if len(line) <= SNIPPET_CHARS and len(part) == len(text):
        return line
    return f"… {line[-SNIPPET_CHARS:]}" if from_end else f"{line[:SNIPPET_CHARS]} …"


def match_expression(words: str) -> str:
    """The FTS5 expression of what a person types: all words, "phrases in quotes", -without, begin*. Empty: no word.

    Every piece becomes a quoted string, so that nothing typed is taken for an operator.
    """
    wanted: list[str] = []
    unwanted: list[str] = []
    words = words.replace("\0", " ")  # where SQLite takes an expression to end
    for minus, phrase, minus_of_word, word in PIECE.findall(words):
        text = phrase or word.rstrip("*").lstrip('"')
        if not re.search(r"\w", text):
            continue
        quoted = '"{}"{}'.format(text.replace('"', ""), "*" if word.endswith("*") else "")
        (unwanted if minus or minus_of_word else wanted).append(quoted)
    if not wanted:
        return ""
    return " ".join(wanted) + "".join(f" NOT {one}" for one in unwanted)
