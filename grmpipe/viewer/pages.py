"""The pages of the viewer as HTML. A page is a function of the run and the query of its URL, and a line in PAGES.

Everything that a run's files hold is shown as text: the templates escape it, and the pages' policy forbids foreign
scripts.
"""

import contextlib
import html
from collections.abc import Callable, Mapping
from dataclasses import replace
from urllib.parse import quote, urlencode

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from grmpipe.models.terminal_text import replace_controls
from grmpipe.observe.charts import Chart, Point, Series, chart, short
from grmpipe.observe.console import failures_by_cause
from grmpipe.observe.report import ALARMS, REWARDS, SCORES, percent
from grmpipe.observe.run_files import FIGURES, describe_spent, read_bytes, read_object, to_text
from grmpipe.viewer import figures, queries
from grmpipe.viewer.annotate_pages import (
    DECIDES,
    NotThere,
    Rater,
    annotations_page,
    describe_desk,
    name_scores,
    read_whole_group,
)
from grmpipe.viewer.details import Sibling, read_siblings
from grmpipe.viewer.figures import Means
from grmpipe.viewer.queries import COLUMN_SORTS, LABELLED, SORTS, Filter
from grmpipe.viewer.runs import ViewedRun, ViewedState, config_differences

MAX_CHARS = 200_000  # in one text; what is longer loses its middle
SHOWN_PROMPTS, SHOWN_ANSWERS, SHOWN_FAILURES, SHOWN_METRICS, SHOWN_STEPS = 30, 8, 30, 60, 500
Query = Mapping[str, str]
CURVES = {  # title -> title of a curve -> its metric
    "Reward": REWARDS,
    "True accuracy": {"batches": "train/true_accuracy", "held-out": "eval/true_accuracy"},
    "Score": SCORES,
    "Spread of a vote": {"mean of a batch": "judge/score_std"},
    "Length": {"mean": "response_length/mean", "longest": "response_length/max"},
}


def make_environment() -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("grmpipe.viewer"), PackageLoader("grmpipe.observe")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"sent": escape_sent, "shown": show_text, "short": format_known, "percent": percent}
    environment.globals |= {"link": link, "means_rows": MEANS_ROWS, "name_scores": name_scores}
    return environment


def show_text(text: object) -> str:
    """Text that control characters can't hide or reorder."""
    whole = str(text)
    if len(whole) > MAX_CHARS:
        half, left_out = MAX_CHARS // 2, len(whole) - MAX_CHARS
        whole = f"{whole[:half]}\n\n[… {left_out:,} characters left out …]\n\n{whole[-half:]}"
    return replace_controls(whole)


def escape_sent(text: object) -> str:
    """The HTML of an attribute that a form sends back as it is: control characters stand there by their numbers."""
    return "".join(char if char.isprintable() else f"&#{ord(char)};" for char in html.escape(str(text)))


def format_known(value: float | None) -> str:
    return "–" if value is None else short(value)


def link(page: str, run: str = "", query: str = "", **more: object) -> str:
    """The URL of a page, which can be sent to a colleague at this machine."""
    path = "/" + "/".join(filter(None, (page, quote(run))))
    whole = "&".join(
        filter(None, (query, urlencode({name: one for name, one in more.items() if one not in ("", None)})))
    )
    return f"{path}?{whole}" if whole else path


# -- one run -----------------------------------------------------------------------------------------------------------


def run_page(run: ViewedRun, query: Query, rater: Rater) -> dict[str, object]:
    found = query.get("metrics", "").strip()
    since = queries.parse_number("since", query["since"], int) if query.get("since") else None
    of_run = figures.run_figures(run.index, run.index.progress())
    with contextlib.closing(run.index.read()) as connection:
        return {
            "state": run.state(),
            "spent": describe_spent(read_object(run.run_dir / "summary.json"), run.metrics),
            "charts": present(judge_and_truth(of_run.by_step), *draw_curves(run)),
            "metrics": found,
            "found": present(*(chart(name, [Series(name="", points=run.series(name))]) for name in names(run, found))),
            "by_step": [*reversed(of_run.by_step.items())][:SHOWN_STEPS],
            "num_steps": len(of_run.by_step),
            "around": figures.means_around(connection, int(since)) if since is not None else {},
            "since": since,
            "bins": of_run.bins,
            "counts": of_run.counts,
            "labelled": LABELLED,
            "figures": to_text(read_bytes(run.run_dir / FIGURES)),
        }


def names(run: ViewedRun, part: str) -> list[str]:
    """Metrics whose name holds this; none if it is empty."""
    every = dict.fromkeys(name for line in run.metrics for name in line if part and part in name)
    return sorted(every)[:SHOWN_METRICS]


def draw_curves(run: ViewedRun) -> list[Chart | None]:
    """Charts of metrics.jsonl. Steps with an alarm are marked."""
    charts, ringing = [], [line["step"] for line in run.metrics if any(line.get(alarm) for alarm in ALARMS)]
    for title, curves in CURVES.items():
        if title == "Score" and run.judge.score == "reward":  # the same once more
            continue
        series = [
            Series(name=name, points=run.series(metric), quiet=name == "batches") for name, metric in curves.items()
        ]
        if any(value for one in series for _, value in one.points):  # one vote has no spread
            charts.append(chart(title, series, marked=ringing))
    causes: dict[str, list[Point]] = {}
    for line in run.metrics:
        for cause, count in failures_by_cause(line).items():
            causes.setdefault(cause, []).append((line["step"], float(count)))
    failed = [Series(name=cause, points=points) for cause, points in causes.items()]
    return [*charts, chart("Failed judgements", failed, note="of a step, by cause")]


def judge_and_truth(by_step: Mapping[int, Means]) -> Chart | None:
    """A chart of the rollouts that a step trained; None without a truth."""
    known = [(float(step), means.reward, means.truth) for step, means in by_step.items()]
    reward = [(step, one) for step, one, _ in known if one is not None]
    truth = [(step, one) for step, _, one in known if one is not None]
    series = [Series(name="reward", points=reward), Series(name="truth", points=truth)]
    return chart("Reward and truth", series, note="means of trained rollouts") if truth else None


def present(*charts: Chart | None) -> list[Chart]:
    return [one for one in charts if one is not None]


def read_filter(run: ViewedRun, query: Query) -> Filter:
    """Raises ValueError, sqlite3.Error."""
    with contextlib.closing(run.index.read()) as connection:
        return Filter.parse(query, evaluation=figures.first_evaluation(connection))


def rollouts_page(run: ViewedRun, query: Query, rater: Rater) -> dict[str, object]:
    with contextlib.closing(run.index.read()) as connection:
        first = figures.first_evaluation(connection)
        wanted = Filter.parse(query, evaluation=first)
        return {
            "trains": not first,
            "wanted": wanted,
            "here": wanted.url(page=wanted.page),
            "narrowed": replace(wanted, words="", sort="newest", page=1) != Filter(evaluation=wanted.evaluation),
            "found": queries.find_rollouts(connection, wanted),
            "choices": figures.choices(connection),
            "sorts": [*SORTS],
            "column_sorts": COLUMN_SORTS,
            "own": {one.place: one for one in rater.read_own(run) if one.field in DECIDES},
        }


def group_page(run: ViewedRun, query: Query, rater: Rater) -> dict[str, object]:
    """The siblings side by side; one of them alone if the query has a `sibling`."""
    every = siblings = read_whole_group(run, query)
    prompt = next((one.recorded.prompt for one in siblings if one.recorded is not None), None)
    if "sibling" in query:
        wanted = queries.parse_number("sibling", query["sibling"], int)
        siblings = [one for one in siblings if one.row.sibling == wanted]
        if not siblings:
            raise NotThere(f"no sibling {query['sibling']} in group {query.get('group', '')!r}")
    return {
        "rows": [one.row for one in every],
        "siblings": siblings,
        "prompt": prompt,
        "alone": "sibling" in query,
        **describe_desk(run, query, rater, siblings),
    }


def failures_page(run: ViewedRun, query: Query, rater: Rater) -> dict[str, object]:
    asked = {name: query[name] for name in ("cause", "page", "evaluation") if name in query}
    with contextlib.closing(run.index.read()) as connection:
        wanted = Filter.parse(asked, evaluation=figures.first_evaluation(connection))
        found = queries.find_rollouts(connection, wanted) if wanted.cause else None
        rows = found.rows[:SHOWN_FAILURES] if found is not None else ()
        return {
            "by_judge": figures.failures_by_judge(connection),
            "verdicts": figures.verdict_failures(connection),
            "wanted": wanted,
            "total": found.total if found is not None else "0",
            "siblings": [sibling for row in rows for sibling in read_siblings(run.run_dir, [row])],
        }


PAGES: Mapping[str, Callable[[ViewedRun, Query, Rater], dict[str, object]]] = {
    "run": run_page,
    "rollouts": rollouts_page,
    "group": group_page,
    "failures": failures_page,
    "annotations": annotations_page,
}
RUN_SORTS = {  # column of the list of runs -> field of ViewedState
    "run": "",
    "status": "status",
    "steps": "steps",
    "held-out reward": "reward",
    "true accuracy": "true_accuracy",
    "last change": "changed",
}
MEANS_ROWS = {  # title -> field of Means
    "rollouts": "rollouts",
    "reward": "reward",
    "truth": "truth",
    "reward minus truth": "gap",
    "score": "score",
    "spread of votes": "spread",
    "tokens": "tokens",
    "share without verdict": "failed",
    "share truncated": "truncated",
}


# -- several runs ------------------------------------------------------------------------------------------------------


def states(runs: Mapping[str, ViewedRun], sort: str) -> dict[str, ViewedState]:
    """By a column of the list, ascending, or descending with a minus in front. Unknown values come last. Raises
    ValueError.
    """
    column, is_down = sort.removeprefix("-"), sort.startswith("-")
    if column not in RUN_SORTS:
        raise ValueError(f"sort: unknown column {column!r}; known: {', '.join(RUN_SORTS)}")
    found = {name: run.state() for name, run in runs.items()}
    values = {name: name if column == "run" else getattr(state, RUN_SORTS[column]) for name, state in found.items()}
    known = sorted((name for name in found if values[name] is not None), key=lambda name: values[name], reverse=is_down)
    return {name: found[name] for name in (*known, *(name for name in found if values[name] is None))}


def compare(a: ViewedRun, b: ViewedRun) -> dict[str, object]:
    """Curves of two runs over each other, and what differs."""
    charts = []
    for title, curves in CURVES.items():
        series = [
            Series(name=f"{letter} {name}", points=run.series(metric), quiet=name == "batches")
            for letter, run in (("A", a), ("B", b))
            for name, metric in curves.items()
        ]
        charts.append(chart(title, series))
    with contextlib.closing(a.index.read()) as of_a, contextlib.closing(b.index.read()) as of_b:
        prompts = queries.find_shared_prompts(of_a, of_b, SHOWN_PROMPTS)
    return {"a": a, "b": b, "charts": present(*charts), "differences": config_differences(a, b), "prompts": prompts}


def answers(a: ViewedRun, b: ViewedRun, prompt_id: str) -> dict[str, object]:
    """The last answers of two runs to a prompt, with their judgements."""
    found = [("A", a, answers_to(a, prompt_id)), ("B", b, answers_to(b, prompt_id))]
    recorded = (one.recorded for _, _, siblings in found for one in siblings if one.recorded is not None)
    prompt = next((one.prompt for one in recorded), None)
    return {"a": a, "b": b, "prompt_id": prompt_id, "prompt": prompt, "answers": found}


def answers_to(run: ViewedRun, prompt_id: str) -> list[Sibling]:
    with contextlib.closing(run.index.read()) as connection:
        rows = queries.read_prompt(connection, prompt_id, SHOWN_ANSWERS)
    return [sibling for row in rows for sibling in read_siblings(run.run_dir, [row])]
