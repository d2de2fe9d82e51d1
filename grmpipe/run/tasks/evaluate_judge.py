"""A judge against labelled work: asks it, writes and prints what came of it."""

import asyncio
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.judge_tables import VOTES_WITH_META_RM
from grmpipe.config.keys.entry_names import GRM, REWARD
from grmpipe.config.run_config import RunConfig
from grmpipe.config.task_settings import ITEMS_AT_ONCE
from grmpipe.evaluation.evaluation_files import TOGETHER, show, write_files
from grmpipe.evaluation.judge_accuracy import Accuracy, JudgeEvaluation, Recount, evaluate
from grmpipe.evaluation.judge_comparison import JudgeComparison, MeasuredJudge, compare_judges, tabulate
from grmpipe.evaluation.judged_items import JudgedItem
from grmpipe.judge.grm import set_purpose
from grmpipe.judge.meta_rm import MetaRm
from grmpipe.judge.pointwise_adapter import judge_together
from grmpipe.judge.prompt import load_rubric
from grmpipe.judge.votes import Weights, mean, vote_named
from grmpipe.models.types import EngineRefused
from grmpipe.observe.progress import Progress, counts_text, join_shown, left_at_pace, left_text
from grmpipe.observe.spending import Spending
from grmpipe.pipeline.counters import Counters
from grmpipe.pipeline.health import OutageBreaker
from grmpipe.run.build.compose_pipeline import compose_health
from grmpipe.run.build.make_judge import make_meta_rm, make_named
from grmpipe.run.build.start import Running
from grmpipe.run.tasks.prepare_evaluation import PreparedEvaluation, recounts_votes
from grmpipe.scheduler.run_together import raise_first_failure
from grmpipe.types import Judge, Labelled, Metrics, Prompt

log = logging.getLogger(__name__)

MAX_SUBSETS = 32  # subsets of an item's judgements for each smaller k


async def evaluate_judge(
    ready: PreparedEvaluation,
    running: Running,
    run_dir: Path,
    counters: Counters,
    progress: Progress,
    spending: Spending,
) -> tuple[JudgeEvaluation, list[JudgedItem]]:
    """Judge all items by what makes the reward, then by each judge that nothing uses; write evaluation.json, print the
    tables. counters: get the reports. spending: of the run so far.

    Raises Unfit if a judge's service failed on too many of them.
    """
    config, items = ready.measured, ready.items
    main, scale = config.judging.main, config.main_judge.scale

    async def measure(name: str) -> tuple[list[JudgedItem], JudgeEvaluation]:
        breaker, began_s, before = OutageBreaker(compose_health(config)), time.monotonic(), spending.known.cost_usd
        own = config.main_judge if name == REWARD else config.judges[name]
        with set_purpose("evaluation"):
            judge = breaker.guard(make_named(ready.prepared.under(config), running.models, name))
            meta_rm = make_meta_rm(running.models) if name == REWARD and len(config.judging.judges) == 1 else None
            shown = own.name if config.watchers else ""
            judged = await judge_items(judge, meta_rm, items, own.num_judgements, shown, progress, counters)
        breaker.check()
        lost = [one.outage.detail for one in judged if one.outage is not None]
        if len(lost) == len(judged):
            raise ValueError(f"no item has all its verdicts; of the first one failed: {lost[0]}")
        is_single = name != REWARD or len(config.judging.judges) == 1
        result = evaluate(judged, scale, make_recount(config, own, is_single=is_single))
        cost_usd = spending.known.cost_usd - before if spending.is_priced else None
        return judged, replace(result, seconds=time.monotonic() - began_s, cost_usd=cost_usd)

    judged, result = await measure(REWARD)
    others = {name: await measure(name) for name in config.watchers}
    parts = {name: [one.by(name) for one in judged if name in one.judges] for name in result.by_judge}
    measured = {name: (parts[name], own) for name, own in result.by_judge.items()}
    if others and not measured:
        measured[main] = (judged, result)
    measured |= others
    comparisons = compare_measured(ready, measured, (judged, result))
    result = replace(result, by_judge={name: own for name, (_, own) in measured.items()}, comparisons=comparisons)
    for name, (own, _) in others.items():
        judged = [one.beside(main, name, other) for one, other in zip(judged, own, strict=True)]
    scales = {name: judge.scale for name, judge in config.judges.items()}
    write_files(run_dir, judged, result, scale, scales, config.data.labels.pass_score)
    show(result, MAX_SUBSETS, run_dir)
    return result, judged


def compare_measured(
    ready: PreparedEvaluation,
    measured: Mapping[str, tuple[Sequence[JudgedItem], JudgeEvaluation]],
    whole: tuple[Sequence[JudgedItem], JudgeEvaluation],
) -> tuple[JudgeComparison, ...]:
    """Each further judge, and a composition of several, with the first judge; what makes the reward with the earlier
    evaluation. measured: by judge; empty with a single one. whole: what makes the reward.
    """
    config = ready.measured
    scale, pass_score = config.main_judge.scale, config.data.labels.pass_score

    def describe(name: str, judged: Sequence[JudgedItem], result: JudgeEvaluation) -> MeasuredJudge:
        num_items = max(1, len(ready.items))
        return MeasuredJudge(
            name=name,
            verdicts=tabulate(judged, scale, pass_score),
            tokens=result.num_tokens / num_items,
            seconds=None if result.seconds is None else result.seconds / num_items,
            cost_usd=None if result.cost_usd is None else result.cost_usd / num_items,
        )

    judges = [describe(name, *own) for name, own in measured.items()]
    now = describe(TOGETHER if len(config.judging.judges) > 1 else config.judging.main, *whole)
    first = next((one for one in judges if one.name == config.judging.main), judges[0] if judges else now)
    further = [one for one in judges if one is not first] + [now] * (now.name == TOGETHER)
    found = [compare_judges(one, first, ready.items) for one in further]
    if ready.earlier is not None:
        found.append(compare_judges(now, ready.earlier, ready.items))
    return tuple(found)


async def judge_items(
    judge: Judge,
    meta_rm: MetaRm | None,
    items: Sequence[Labelled],
    num_asked: int,
    name: str,
    progress: Progress,
    counters: Counters,
) -> list[JudgedItem]:
    """Judge items in their order, ITEMS_AT_ONCE at a time: those begun first end first. name: that the judge is counted
    by; empty for the only one.
    """
    places = asyncio.Semaphore(ITEMS_AT_ONCE)

    async def judged(index: int, item: Labelled) -> JudgedItem:
        async with places:
            reports = await judge_together(judge, item.prompt, f"e{index}", item.responses, priority=index)
            for report in reports:
                counters.report(replace(report, by_judge={name: report}) if name and not report.by_judge else report)
            one = JudgedItem(item=item, reports=reports, num_asked=num_asked)
            return one if meta_rm is None else replace(one, meta_rm_weights=await weigh_judgements(meta_rm, one, index))

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


def make_recount(config: RunConfig, judge: JudgeConfig, *, is_single: bool) -> Recount:
    """How to recount smaller votes. A composition isn't recounted: a smaller k would change only a part of it."""
    return Recount(
        ks=tuple(config.evaluate.ks) if is_single and recounts_votes(config, judge) else (),
        vote=mean if judge.vote in VOTES_WITH_META_RM else vote_named(judge.vote),
        most=MAX_SUBSETS,
        seed=config.seed,
        pairwise=judge.protocol_kind.about == "pair",
        margins=judge.scale_of_margins,
        weigh=weigh_criteria(judge) if judge.protocol_kind.scores == "criteria" else None,
        pass_score=config.data.labels.pass_score,
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
    for name, figure in result.figures.items():
        metrics |= {name: figure.mean, f"{name}_low": figure.low, f"{name}_high": figure.high}
    for one in result.comparisons:
        name = f"{one.judge}_difference" if one.against in result.by_judge else "difference"
        metrics |= {name: one.accuracy.mean, f"{name}_low": one.accuracy.low, f"{name}_high": one.accuracy.high}
        metrics[f"{name}_p"] = one.accuracy.p
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def at_k(name: str, by_k: Mapping[int, Accuracy]) -> Metrics:
    return {f"{name}_at_{k}": one.accuracy for k, one in by_k.items()}
