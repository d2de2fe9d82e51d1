"""A judge against labelled work: asks it, writes and prints what came of it."""

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.judge_tables import VOTES_WITH_META_RM
from grmpipe.config.keys.entry_names import GRM
from grmpipe.config.run_config import RunConfig
from grmpipe.config.task_settings import ITEMS_AT_ONCE
from grmpipe.evaluation.evaluation_files import show, write_files
from grmpipe.evaluation.judge_accuracy import Accuracy, JudgedItem, JudgeEvaluation, Recount, evaluate
from grmpipe.judge.grm import set_purpose
from grmpipe.judge.meta_rm import MetaRm
from grmpipe.judge.pointwise_adapter import judge_together
from grmpipe.judge.prompt import load_rubric
from grmpipe.judge.votes import Weights, mean, vote_named
from grmpipe.models.types import EngineRefused
from grmpipe.observe.progress import Progress, counts_text, join_shown, left_at_pace, left_text
from grmpipe.pipeline.counters import Counters
from grmpipe.pipeline.health import OutageBreaker
from grmpipe.run.build.compose_pipeline import compose_health
from grmpipe.run.build.make_judge import make_judge, make_meta_rm
from grmpipe.run.build.start import Running
from grmpipe.run.tasks.prepare_evaluation import PreparedEvaluation
from grmpipe.scheduler.run_together import raise_first_failure
from grmpipe.types import Judge, Labelled, Metrics, Prompt

log = logging.getLogger(__name__)

MAX_SUBSETS = 32  # subsets of an item's judgements for each smaller k


async def evaluate_judge(
    ready: PreparedEvaluation, running: Running, run_dir: Path, counters: Counters, progress: Progress
) -> JudgeEvaluation:
    """Judge all items, write evaluation.json, print the table. counters: get the reports.

    Raises Unfit if the judge's service failed on too many of them.
    """
    config = ready.measured
    breaker = OutageBreaker(compose_health(config))
    with set_purpose("evaluation"):
        judge = breaker.guard(make_judge(ready.prepared.under(config), running.models))
        judged = await judge_items(judge, make_meta_rm(running.models), ready.items, config, progress, counters)
    breaker.check()
    lost = [one.outage.detail for one in judged if one.outage is not None]
    if len(lost) == len(judged):
        raise ValueError(f"no item has all its verdicts; of the first one failed: {lost[0]}")
    result = evaluate(judged, config.main_judge.scale, make_recount(config))
    scales = {name: judge.scale for name, judge in config.judging.judges.items()}
    write_files(run_dir, judged, result, config.main_judge.scale, scales)
    show(result, MAX_SUBSETS, run_dir)
    return result


async def judge_items(
    judge: Judge,
    meta_rm: MetaRm | None,
    items: Sequence[Labelled],
    config: RunConfig,
    progress: Progress,
    counters: Counters,
) -> list[JudgedItem]:
    """Judge items in their order, ITEMS_AT_ONCE at a time: those begun first end first."""
    places = asyncio.Semaphore(ITEMS_AT_ONCE)
    first, *others = config.judging.judges.values()

    async def judged(index: int, item: Labelled) -> JudgedItem:
        async with places:
            reports = await judge_together(judge, item.prompt, f"e{index}", item.responses, priority=index)
            for report in reports:
                counters.report(report)
            one = JudgedItem(item=item, reports=reports, num_asked=first.num_judgements)
            return (
                one
                if meta_rm is None or others
                else replace(one, meta_rm_weights=await weigh_judgements(meta_rm, one, index))
            )

    running: list[asyncio.Task[JudgedItem]] = []
    with progress.show_while(functools.partial(describe_items, running)):
        async with raise_first_failure() as tasks:
            running += [tasks.create_task(judged(index, item)) for index, item in enumerate(items)]
    return [task.result() for task in running]


def describe_items(running: Sequence[asyncio.Task[JudgedItem]], took_s: float) -> str:
    """The line on an evaluation in progress, after `took_s` seconds."""
    done = sum(task.done() for task in running)
    left = left_text(left_at_pace(done, len(running), took_s))
    return join_shown("evaluation of the judge", counts_text("items", done, len(running)), left)


async def weigh_judgements(meta_rm: MetaRm, one: JudgedItem, priority: int) -> tuple[float, ...]:
    """The meta-RM's weight of each judgement; empty if it could not read them. Raises EngineDied: without a meta-RM
    there is nothing to measure.
    """
    try:
        return tuple(await meta_rm.scores(one.judgements, priority))
    except EngineRefused as error:
        log.warning("the meta-RM gave no weights for item %s: %s", one.item.item_id, error)
        return ()


def make_recount(config: RunConfig) -> Recount:
    """How to recount smaller votes. A composition isn't recounted: a smaller k would change only a part of it."""
    name, *others = config.judging.judges
    judge = config.judging.judges[name]
    recounts = name in config.judging.generative and not others
    return Recount(
        ks=tuple(config.evaluate.ks) if recounts else (),
        vote=mean if judge.vote in VOTES_WITH_META_RM else vote_named(judge.vote),
        most=MAX_SUBSETS,
        seed=config.seed,
        pairwise=judge.protocol_kind.about == "pair",
        weigh=weigh_criteria(judge) if judge.protocol_kind.scores == "criteria" else None,
    )


def weigh_criteria(judge: JudgeConfig) -> Callable[[Prompt], Weights]:
    """A function: the weights of the criteria by which a judge judges a prompt."""
    rubric = load_rubric(judge)
    return lambda prompt: Weights.of_rubric(rubric.join(prompt), judge.rubric.essential_cap)


def name_metrics(result: JudgeEvaluation, first: str) -> Metrics:
    """Metrics by their names in summary.json: accuracy, accuracy_at_4, accuracy_with_meta_at_8. Those of each of
    several judges are named as in the evaluations of a training: grm_accuracy is the first judge's, safety_accuracy
    that of the judge safety. first: the first judge's name.
    """
    overall = result.overall
    metrics = {
        "accuracy": overall.judged.accuracy,
        "accuracy_low": overall.judged.low,
        "accuracy_high": overall.judged.high,
        "tied_share": overall.judged.tied_share,
        "failed_share": overall.judged.failed_share,
        "lost_items": sum(result.lost_items.values()),
        **at_k("accuracy", overall.by_k),
        **at_k("accuracy_with_meta_rm", overall.with_meta_rm),
        **result.bias,
    }
    for name, own in result.by_judge.items():
        if not own.overall.judged.num_items:
            continue
        shown = GRM if name == first else name
        metrics[f"{shown}_accuracy"] = own.overall.judged.accuracy
        metrics[f"{shown}_failed_share"] = own.overall.judged.failed_share
    return metrics if result.score_error is None else metrics | {"score_error": result.score_error}


def at_k(name: str, by_k: Mapping[int, Accuracy]) -> Metrics:
    return {f"{name}_at_{k}": one.accuracy for k, one in by_k.items()}
