"""The pages on which people annotate: forms beside the answers, the queue, the list of annotations."""

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode

import numpy as np
import numpy.typing as npt

from grmpipe.config.judge_protocols import DEFAULT_PROTOCOL, PROTOCOLS
from grmpipe.config.task_settings import AnnotateConfig
from grmpipe.data.rubrics import load_shared_rubric, name_criteria
from grmpipe.observe.run_files import Critique, find_judge_section
from grmpipe.types import Criterion
from grmpipe.viewer import figures, queries
from grmpipe.viewer.annotations import ANNOTATIONS, Annotation, append, make_label, make_line, read_annotations
from grmpipe.viewer.details import Sibling, read_siblings
from grmpipe.viewer.index import IndexProgress, RunIndex
from grmpipe.viewer.queries import HIGH, Filter, RolloutRow
from grmpipe.viewer.runs import ViewedRun, flat_config, read_stamp

SHOWN_ANNOTATIONS = 100
DECIDES = ("right", "score")  # fields after which an answer of the queue is done
Query = Mapping[str, str]


# -- which answers to annotate next, each with its share: the probability with which it is in the queue ----------------
# Poisson sampling: an answer is in if a uniform number of its own is below its share, independently of all others.
# So means weighted by 1 / share (Horvitz and Thompson, JASA 1952) stand for all answers. The queue is in the order of
# number / share: its first answers are such a sample too, with shares in the same proportions (sequential Poisson
# sampling: Ohlsson, J. Off. Stat. 1998).


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


class NotThere(Exception):
    """What the URL names isn't in the run, or not any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rater:
    """Who annotates. name: empty until it was given."""

    name: str
    settings: AnnotateConfig
    seed: int

    def find_file(self, run: ViewedRun) -> Path:
        return (Path(self.settings.dir) / run.name if self.settings.dir else run.run_dir) / ANNOTATIONS

    def read(self, run: ViewedRun) -> tuple[Sequence[Annotation], int]:
        """The annotations of all raters that stand, and the number of lines that can't be read. Raises OSError."""
        path = self.find_file(run)
        return read_annotations(path, *read_stamp(path))

    def read_own(self, run: ViewedRun) -> list[Annotation]:
        """The rater's own ones; none from a file that can't be read, for answers are shown all the same."""
        with contextlib.suppress(OSError):
            return [one for one in self.read(run)[0] if self.name and one.rater == self.name]
        return []

    def select(self, run: ViewedRun, evaluation: str, select: str) -> Sequence[Selected]:
        """The queue. Raises ValueError."""
        state = run.index.progress()
        passes = read_threshold(run)
        return select_answers(run.index, state, evaluation, select, self.settings.num_items, self.seed, passes)

    def find_next(self, run: ViewedRun, queue: Sequence[Selected], after: tuple[object, ...] = ()) -> Selected | None:
        """The first answer of the queue behind a place, else the first of all, that isn't annotated."""
        done = {one.place for one in self.read_own(run) if one.field in DECIDES}
        start = next((place + 1 for place, one in enumerate(queue) if one.place == after), 0)
        return next((one for one in (*queue[start:], *queue[:start]) if one.place not in done), None)


def read_whole_group(run: ViewedRun, query: Query) -> list[Sibling]:
    """Raises NotThere."""
    with contextlib.closing(run.index.read()) as connection:
        rows = queries.read_group(
            connection,
            query.get("group", ""),
            evaluation=query.get("evaluation", ""),
            round_=int(queries.parse_number("round", query.get("round", "0"), int)),
        )
    if not rows:
        raise NotThere(f"no group {query.get('group', '')!r} in this run")
    return read_siblings(run.run_dir, rows)


def link_selected(one: Selected, select: str) -> dict[str, str]:
    """The parameters of the page of an answer in the queue."""
    group = {"evaluation": one.evaluation, "round": str(one.round)} if one.evaluation else {}
    return {"group": one.group, **group, "sibling": str(one.sibling), "queue": select}


def describe_desk(run: ViewedRun, query: Query, rater: Rater, siblings: Sequence[Sibling]) -> dict[str, object]:
    """What a group's page has for annotating: the rater's annotations by sibling, and the way to the next answer."""
    row, own = siblings[0].row, rater.read_own(run)
    here = [one for one in own if one.place[:3] == row.place[:3]]
    return {
        "here": urlencode({name: value for name, value in query.items() if name != "about"}),
        "own": {one.row.sibling: [each for each in here if each.sibling == one.row.sibling] for one in siblings},
        "best": next((one.best for one in here if one.best is not None), None),
        "latest": own[-1] if own else None,
        "scale": read_scale(run),
        "rubric": find_rubric(run, siblings),
        **find_way(run, query, rater, row),
    }


def find_way(run: ViewedRun, query: Query, rater: Rater, row: RolloutRow) -> dict[str, object]:
    """The parameters of the answers before and after this one, in the queue or in the table that led here."""
    if select := query.get("queue", ""):
        queue = rater.select(run, row.evaluation, select)
        done = {one.place for one in rater.read_own(run) if one.field in DECIDES}
        at = next((number for number, one in enumerate(queue) if one.place == row.place), None)
        near = [] if at is None else [queue[at - 1] if at else None, *queue[at + 1 : at + 2], None][:2]
        return {
            "queue": f"{select}: {sum(one.place in done for one in queue)} of {len(queue)} annotated",
            "share": None if at is None else queue[at].share,
            "around": [link_selected(one, select) if one else None for one in near],
        }
    wanted = Filter.parse(dict(parse_qsl(query.get("in", ""))), evaluation=row.evaluation)
    alone = "sibling" in query
    with contextlib.closing(run.index.read()) as connection:
        found = queries.find_neighbours(connection, wanted, row, alone=alone)
    around = [
        one and {**dict(parse_qsl(one[0].link)), "sibling": one[0].sibling if alone else "",
                 "in": one[1].url(page=one[1].page)}
        for one in found
    ]  # fmt: skip
    return {"queue": "", "share": None, "around": around}


def annotate(run: ViewedRun, query: Query, form: Query, rater: Rater) -> tuple[str, dict[str, str]]:
    """Write what a form says. The page to go on with, and its parameters. Raises ValueError, NotThere, OSError."""
    if not rater.name:
        raise ValueError("rater: give your name first")
    path = rater.find_file(run)
    kept = {name: query[name] for name in ("queue", "in") if name in query}
    if "undoes" in form:
        undone = next((one for one in rater.read_own(run) if one.id == form["undoes"]), None)
        if undone is None:
            raise ValueError("undoes: it is no annotation of yours, or was undone before")
        append(path, make_line(rater.name, undoes=undone.id))
        if "group" not in query:
            return "annotations", {}
        place = {"evaluation": undone.evaluation, "round": str(undone.round)} if undone.evaluation else {}
        alone = {"sibling": str(undone.sibling)} if "sibling" in query and undone.sibling is not None else {}
        return "group", {"group": undone.group, **place, **alone, **kept}
    siblings = read_whole_group(run, query)
    sibling = int(queries.parse_number("about", query.get("about", ""), int))
    label = make_label(form, siblings, sibling, read_scale(run), find_rubric(run, siblings))
    back = {name: value for name, value in query.items() if name != "about"}
    at = next(one.row.place for one in siblings if one.row.sibling == sibling)
    select = query.get("queue", "")
    queue = rater.select(run, at[0], select) if select else []
    shares = [one.share for one in queue if one.place == at]
    # A correction keeps the share of what it replaces.
    shares += [one.share for one in rater.read_own(run) if one.place == at and one.share is not None]
    append(path, make_line(rater.name, run=run.name, **label, **({"share": shares[0]} if shares else {})))
    if not select or not any(form.get(name) for name in DECIDES):
        return "group", back
    following = rater.find_next(run, queue, at)
    return ("group", link_selected(following, select)) if following else ("annotations", {"done": select})


def annotations_page(run: ViewedRun, query: Query, rater: Rater) -> dict[str, object]:
    """All annotations that stand, the newest first, and the queues."""
    every, unreadable = rater.read(run)
    page = max(1, int(queries.parse_number("page", query.get("page") or "1", int)))
    with contextlib.closing(run.index.read()) as connection:
        choices = figures.choices(connection)["evaluation"]
        first = figures.first_evaluation(connection)
    return {
        "annotations": [*reversed(every)][(page - 1) * SHOWN_ANNOTATIONS : page * SHOWN_ANNOTATIONS],
        "total": len(every),
        "by_rater": Counter(one.rater for one in every),
        "unreadable": unreadable,
        "number": page,
        "is_more": len(every) > page * SHOWN_ANNOTATIONS,
        "file": str(rater.find_file(run)),
        "selections": [*GROWS_WITH],
        "select": query.get("done") or rater.settings.select,
        "done": query.get("done", ""),
        "evaluations": [*([] if first else [""]), *choices],
        "latest": next((one for one in reversed(every) if one.rater == rater.name), None),
    }


def find_next_link(run: ViewedRun, query: Query, rater: Rater) -> dict[str, str]:
    """The parameters of the next answer to annotate. Raises ValueError, NotThere."""
    with contextlib.closing(run.index.read()) as connection:
        evaluation = query.get("evaluation", figures.first_evaluation(connection))
    select = query.get("select") or rater.settings.select
    queue = rater.select(run, evaluation, select)
    if (one := rater.find_next(run, queue)) is None:
        raise NotThere(
            f"all {len(queue)} answers of the queue {select} are annotated by you: choose another one, or start the "
            "viewer with a larger annotate.num_items"
        )
    return link_selected(one, select)


# -- judges of rubrics, and scales -------------------------------------------------------------------------------------


def find_rubric(run: ViewedRun, siblings: Sequence[Sibling], judge: str = "") -> Sequence[Criterion]:
    """The criteria by which a judge judges a group: the prompt's, and those of its rubric.path if that can be read."""
    prompt = next((one.recorded.prompt for one in siblings if one.recorded is not None), None)
    if prompt is None:
        return ()
    values = flat_config(run)
    path = values.get(f"{find_judge_section(values, judge)}.rubric.path", "null")
    with contextlib.suppress(ValueError):
        return load_shared_rubric(None if path == "null" else path).join(prompt)
    return prompt.rubric


def name_scores(run: ViewedRun, sibling: Sibling, one: Critique) -> list[tuple[str, float]]:
    """Criterion and score, for a judgement by a rubric."""
    values = flat_config(run)
    name = values.get(f"{find_judge_section(values, one.judge)}.protocol", DEFAULT_PROTOCOL)
    if not one.scores or name not in PROTOCOLS or PROTOCOLS[name].scores != "criteria":
        return []
    found = find_rubric(run, [sibling], one.judge)
    rubric = dict(zip(name_criteria(found), found, strict=True))
    names = one.criteria or list(rubric)
    if len(names) != len(one.scores) or not rubric.keys() >= set(names):  # rubric.path holds others by now
        return []
    return [(rubric[name].name or rubric[name].text, score) for name, score in zip(names, one.scores, strict=True)]


def read_scale(run: ViewedRun) -> tuple[float, float] | None:
    """The ends of the judge's scale; None where that isn't known, or a reward is shown."""
    values = flat_config(run)
    section = find_judge_section(values)
    with contextlib.suppress(KeyError, ValueError):
        if run.judge.score != "reward":
            return float(values[f"{section}.scale.low"]), float(values[f"{section}.scale.high"])
    return None


def read_threshold(run: ViewedRun) -> tuple[float, float]:
    """The score from which an answer passes, and the width of the scale."""
    low, high = read_scale(run) or (0.0, 1.0)
    with contextlib.suppress(KeyError, ValueError):
        return float(flat_config(run)["data.labels.pass_score"]), high - low
    return low + HIGH * (high - low), high - low
