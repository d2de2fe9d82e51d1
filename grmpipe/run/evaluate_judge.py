"""task=evaluate: the judge against labelled work. Starts the judge's engines alone; trains nothing, plays nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grmpipe.config.judge import EarlyStopConfig, JudgeConfig
from grmpipe.config.judge_tables import VOTES_WITH_META_RM
from grmpipe.config.roles import resolve_roles
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.data.labelled import load_labelled
from grmpipe.data.stream import PromptStream
from grmpipe.evaluation.against_labels import Accuracy, JudgedItem, JudgeEvaluation, Recount, evaluate
from grmpipe.evaluation.evaluation_files import show, write_files
from grmpipe.judge.meta_rm import JudgedResponses, MetaRmScorer
from grmpipe.judge.pointwise_adapter import judge_together
from grmpipe.judge.verdict import mean, vote_named
from grmpipe.observe.summary import EvalSummary, JudgingSummary, Summary
from grmpipe.observe.timeline import Timeline
from grmpipe.run.engines import start_engines
from grmpipe.run.registry import CLUSTERS, JUDGES
from grmpipe.run.start import grm_of, remote_judge_engine
from grmpipe.run.start_meta_rm import meta_rm_of, start_scorers
from grmpipe.types import Judge, Labelled, Metrics, RankedResponses
from grmpipe.validate.context_limits import check_template
from grmpipe.validate.engines import check_installed
from grmpipe.validate.meta_rm_model import find_meta_rm
from grmpipe.validate.models import Progress, find_model
from grmpipe.validate.prepare import Prepared
from grmpipe.validate.seats import check_machine
from grmpipe.validate.sections import section
from models.types import Engine, EngineDied, EngineRefused
from scheduler.clock import ActiveClock
from scheduler.placement import place
from scheduler.supervise import describe_failure, raising_first

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEvaluation:
    """A measurement that may start. `prepared.config` asks for the largest k."""

    prepared: Prepared
    items: tuple[Labelled, ...]


def prepare_evaluation(config: RunConfig, progress: Progress) -> PreparedEvaluation:
    """Find data and models, and see that the judge can be measured. Raises ConfigError."""
    config = replace(config, judge=measured(config))
    judge = config.judge
    with section("evaluate.path: "):
        items = load_labelled(
            config.evaluate.path, scale=(judge.score_min, judge.score_max), num_tiny=config.evaluate.num_items
        )[: config.evaluate.num_items]
    if config.judged_by_model:
        check_template(judge, [item.prompt for item in items])
    pools = {name: replace(pool, time_shared=False) for name, pool in config.placement.pools.items()}
    here = "grm" in config.roles
    guided = here and config.meta_rm.path is not None  # measured beside the plain vote, whatever judge.vote is
    with section(""):
        needed = ("grm", "meta_rm") if guided else ("grm",) if here else ()
        placement = place(replace(config.placement, pools=pools), needed, config.served)
        roles = resolve_roles(config, placement)
    check_machine(config, placement)
    check_installed(roles, config)
    grm = find_model(roles.served["grm"], config, progress) if here else None
    with section("meta_rm."):
        meta_rm = find_meta_rm(config, grm, progress) if grm is not None and guided else None
    prepared = Prepared(
        config=config,
        policy=find_model(roles.served["policy"], config, progress, weights=False),
        grm=grm,
        meta_rm=meta_rm,
        prompts=PromptStream([item.prompt for item in items]),
        held_out=(),
        placement=placement,
        roles=roles,
    )
    return PreparedEvaluation(prepared=prepared, items=items)


def measured(config: RunConfig) -> JudgeConfig:
    """The judge as it is measured: with the most judgements, all of them asked for."""
    judge, largest = config.judge, max(config.evaluate.ks)
    if judge.kind == "label":
        raise ConfigError("judge.kind: label rules on a judge in training by what it wrote; type judge=generative")
    if judge.protocol_kind.scores == "steps":
        raise ConfigError("judge.protocol: steps are cut in a policy's own tokens; type judge.protocol=pointwise")
    if judge.temperature == 0 and largest > 1:
        raise ConfigError("evaluate.ks: greedy judgements are all the same; type evaluate.ks=[1]")
    if judge.kind == "rule":
        return judge
    with section("evaluate.ks: judge."):
        return replace(judge, num_judgements=largest, early_stop=EarlyStopConfig())


async def run_evaluation(ready: PreparedEvaluation, run_dir: Path) -> Summary:
    """Judge everything, write evaluation.json, its picture and summary.json, print the table; or sum up why not."""
    began_s = time.monotonic()
    config = ready.prepared.config
    timeline = Timeline(run_dir / "timeline.json")
    try:
        judged = await judge_all(ready, timeline)
    except Exception as error:
        log.exception("the evaluation failed", extra={"file_only": True})
        wall_s = round(time.monotonic() - began_s, 3)
        summary = Summary(status="failed", steps=0, versions={}, wall_s=wall_s, failure=describe_failure(error))
    else:
        result = evaluate(judged, config.judge.scale, recount_of(config))
        show(result, config.evaluate.max_subsets, write_files(run_dir, judged, result, config.judge.scale), run_dir)
        summary = summary_of(result, time.monotonic() - began_s, config)
    finally:
        timeline.close()
    summary.write(run_dir / "summary.json")
    return summary


async def judge_all(ready: PreparedEvaluation, timeline: Timeline) -> list[JudgedItem]:
    config, prepared = ready.prepared.config, ready.prepared
    outside = remote_judge_engine(prepared.roles)
    cluster = await CLUSTERS[config.cluster.kind](config, prepared.placement) if prepared.grm is not None else None
    try:
        engine: Engine | None = None
        guide: MetaRmScorer | None = None
        if cluster is not None and prepared.grm is not None:
            engine = await start_engines(cluster, prepared.grm, prepared, timeline)
            scorers = await start_scorers(cluster, prepared.meta_rm, config, prepared.roles, timeline)
            guide = meta_rm_of(prepared.meta_rm, scorers)
        judge = JUDGES[config.judge.kind](prepared, grm_of(prepared, engine, outside, timeline, ActiveClock()), guide)
        return await judge_items(judge, guide, ready.items, config)
    finally:
        if outside is not None:
            await outside.close()
        if cluster is not None:
            await cluster.shutdown()


async def judge_items(
    judge: Judge, guide: MetaRmScorer | None, items: Sequence[Labelled], config: RunConfig
) -> list[JudgedItem]:
    """In the items' order, evaluate.max_concurrency at a time: what is begun first ends first."""
    places = asyncio.Semaphore(config.evaluate.max_concurrency)

    async def judged(index: int, item: Labelled) -> JudgedItem:
        async with places:
            reports = await judge_together(judge, item.prompt, f"e{index}", responses_of(item), priority=index)
            one = JudgedItem(item=item, reports=reports, num_asked=config.judge.num_judgements)
            return one if guide is None else replace(one, meta_rm_weights=await weights_of(guide, one, index))

    async with raising_first() as tasks:
        running = [tasks.create_task(judged(index, item)) for index, item in enumerate(items)]
    return [task.result() for task in running]


async def weights_of(guide: MetaRmScorer, one: JudgedItem, priority: int) -> tuple[float, ...]:
    """The meta-RM's, of each judgement; none where it could not read them."""
    responses = responses_of(one.item)
    judged = [
        JudgedResponses(
            prompt=one.item.prompt, responses=tuple(responses[i] for i in judgement.siblings), judgement=judgement
        )
        for judgement in one.judgements
    ]
    try:
        return tuple(await guide.scores(judged, priority))
    except (EngineDied, EngineRefused) as error:
        log.warning("the meta-RM gave no weights for item %s: %s", one.item.item_id, error)
        return ()


def responses_of(item: Labelled) -> tuple[str, ...]:
    return item.responses if isinstance(item, RankedResponses) else (item.response,)


def recount_of(config: RunConfig) -> Recount:
    """Of a mixture nothing is recounted: a smaller k would change a part of it only."""
    recounts = config.judge.kind == "generative"
    return Recount(
        ks=tuple(config.evaluate.ks) if recounts else (),
        vote=mean if config.judge.vote in VOTES_WITH_META_RM else vote_named(config.judge.vote),
        most=config.evaluate.max_subsets,
        seed=config.seed,
        pairwise=config.judge.protocol_kind.about == "pair",
    )


# -- the end -------------------------------------------------------------------------------------------------------


def summary_of(result: JudgeEvaluation, wall_s: float, config: RunConfig) -> Summary:
    summary = Summary(
        status="completed",
        steps=0,
        versions={"grm": 0} if config.judged_by_model else {},
        wall_s=round(wall_s, 3),
        eval=EvalSummary(final=metrics_of(result)),
        judging=JudgingSummary(
            asked=result.num_judgements,
            counted=result.num_judgements - sum(result.failed_judgements.values()),
            failed=result.failed_judgements,
            tokens=result.num_tokens,
        ),
    )
    try:
        return summary.with_objective(config.objective)
    except ValueError as error:
        log.info("%s", error)
        return summary


def metrics_of(result: JudgeEvaluation) -> Metrics:
    """By their names in summary.json: accuracy, accuracy_at_4, accuracy_with_meta_at_8, ..."""
    overall = result.overall
    metrics = {
        "accuracy": overall.judged.accuracy,
        "tied_share": overall.judged.tied_share,
        "failed_share": overall.judged.failed_share,
        **at_k("accuracy", overall.by_k),
        **at_k("accuracy_with_meta_rm", overall.with_meta_rm),
        **result.bias,
    }
    return metrics if result.score_error is None else metrics | {"score_error": result.score_error}


def at_k(name: str, by_k: Mapping[int, Accuracy]) -> Metrics:
    return {f"{name}_at_{k}": one.accuracy for k, one in by_k.items()}
