"""task=evaluate: the judge against labelled work. Starts only the judge's engines; trains nothing, plays nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from grmpipe.config.judge_tables import VOTES_WITH_META_RM
from grmpipe.config.judging import GRM
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.evaluation.against_labels import Accuracy, JudgedItem, JudgeEvaluation, Recount, evaluate
from grmpipe.evaluation.evaluation_files import show, write_files
from grmpipe.judge.meta_rm import JudgedResponses, MetaRmScorer
from grmpipe.judge.pointwise_adapter import judge_together
from grmpipe.judge.purpose import asking_for
from grmpipe.judge.verdict import mean, vote_named
from grmpipe.observe.summary import EvalSummary, JudgingSummary, Status, Summary
from grmpipe.pipeline.counters import Counters
from grmpipe.run.engines import start_engines
from grmpipe.run.registry import CLUSTERS, JudgeParts, make_judge
from grmpipe.run.session import Run, Session
from grmpipe.run.start_grm import LogOf, connect_endpoints, find_grms
from grmpipe.run.start_meta_rm import meta_rm_of, start_scorers
from grmpipe.run.start_scorers import ScalarModels, start_scalar_models
from grmpipe.run.stats import judging
from grmpipe.types import Judge, Labelled, Metrics, RankedResponses
from grmpipe.validate.judge_evaluation import PreparedEvaluation
from models.types import Engine, EngineDenied, EngineDied, EngineRefused
from scheduler.events import EventSink
from scheduler.supervise import raising_first

log = logging.getLogger(__name__)


class EvaluationRun(Run[PreparedEvaluation]):
    """A judge's accuracy on labelled work."""

    is_policy_run = False

    def __init__(self, prepared: PreparedEvaluation, session: Session) -> None:
        super().__init__(prepared, session)
        self._began_s = time.monotonic()
        self._result: JudgeEvaluation | None = None
        self._counters = Counters()

    async def run(self) -> Status:
        """Judge everything, write evaluation.json and its picture, print the table."""
        config = self._config
        judged = await self._judge_all()
        for report in (report for one in judged for report in one.reports):
            self._counters.report(report)
        self._result = result = evaluate(judged, config.first_judge.scale, recount_of(config))
        scales = {name: judge.scale for name, judge in config.judging.judges.items()}
        is_drawn = write_files(self._run_dir, judged, result, config.first_judge.scale, scales)
        show(result, config.evaluate.max_subsets, is_drawn=is_drawn)
        metrics = metrics_of(result, config.judging.first)
        self._observers.tracker.log(0, {f"eval/{name}": value for name, value in metrics.items()})
        return "completed"

    async def _judge_all(self) -> list[JudgedItem]:
        """Raises ConfigError if an endpoint serves nothing."""
        try:
            with asking_for("evaluation"):
                return await judge_all(self._prepared, self._observers.timeline, self._observers.requests.of_model)
        except EngineDenied as error:
            raise ConfigError(str(error)) from error

    def summary(self, status: Status, failure: str | None) -> Summary:
        result = self._result
        return Summary(
            status=status,
            steps=0,
            versions=dict.fromkeys(self._config.judging.roles, 0) if result is not None else {},
            wall_s=round(time.monotonic() - self._began_s, 3),
            eval=EvalSummary() if result is None else EvalSummary(final=metrics_of(result, self._config.judging.first)),
            judging=JudgingSummary() if result is None else judging_of(result, self._counters),
            failure=failure,
        )


async def judge_all(ready: PreparedEvaluation, events: EventSink, requests: LogOf) -> list[JudgedItem]:
    config, prepared = ready.config, ready.prepared
    endpoints = connect_endpoints(prepared.roles, requests)
    is_local = bool(prepared.grms or config.judging.scorer_roles)
    cluster = await CLUSTERS[config.cluster.kind](config, prepared.placement) if is_local else None
    scalars: ScalarModels | None = None
    try:
        engines: dict[str, Engine] = {}
        meta_rm: MetaRmScorer | None = None
        if cluster is not None:
            started = await asyncio.gather(*(start_engines(cluster, grm, prepared, events) for grm in prepared.grms))
            engines = {grm.name: router for grm, router in zip(prepared.grms, started, strict=True)}
            scorers = await start_scorers(cluster, prepared.meta_rm, config, prepared.roles, events)
            meta_rm = meta_rm_of(prepared.meta_rm, scorers, requests)
        scalars = await start_scalar_models(cluster, prepared, events, requests)
        grms = find_grms(prepared, engines, endpoints, events, requests)
        judge = make_judge(JudgeParts(prepared=prepared, grms=grms, meta_rm=meta_rm, scalars=scalars.by_role))
        return await judge_items(judge, meta_rm, ready.items, config)
    finally:
        for endpoint in endpoints.values():
            await endpoint.close()
        if scalars is not None:
            await scalars.close()
        if cluster is not None:
            await cluster.shutdown()


async def judge_items(
    judge: Judge, meta_rm: MetaRmScorer | None, items: Sequence[Labelled], config: RunConfig
) -> list[JudgedItem]:
    """Judge items in their order, evaluate.max_concurrency at a time: those begun first end first."""
    places = asyncio.Semaphore(config.evaluate.max_concurrency)
    first, *others = config.judging.judges.values()

    async def judged(index: int, item: Labelled) -> JudgedItem:
        async with places:
            reports = await judge_together(judge, item.prompt, f"e{index}", responses_of(item), priority=index)
            one = JudgedItem(item=item, reports=reports, num_asked=first.num_judgements)
            return (
                one
                if meta_rm is None or others
                else replace(one, meta_rm_weights=await weights_of(meta_rm, one, index))
            )

    async with raising_first() as tasks:
        running = [tasks.create_task(judged(index, item)) for index, item in enumerate(items)]
    return [task.result() for task in running]


async def weights_of(meta_rm: MetaRmScorer, one: JudgedItem, priority: int) -> tuple[float, ...]:
    """The meta-RM's weight of each judgement; empty if it could not read them."""
    responses = responses_of(one.item)
    judged = [
        JudgedResponses(
            prompt=one.item.prompt, responses=tuple(responses[i] for i in judgement.siblings), judgement=judgement
        )
        for judgement in one.judgements
    ]
    try:
        return tuple(await meta_rm.scores(judged, priority))
    except (EngineDied, EngineRefused) as error:
        log.warning("the meta-RM gave no weights for item %s: %s", one.item.item_id, error)
        return ()


def responses_of(item: Labelled) -> tuple[str, ...]:
    return item.responses if isinstance(item, RankedResponses) else (item.response,)


def recount_of(config: RunConfig) -> Recount:
    """How to recount smaller votes. A composition isn't recounted: a smaller k would change only a part of it."""
    name, *others = config.judging.judges
    judge = config.judging.judges[name]
    recounts = name in config.judging.generative and not others
    return Recount(
        ks=tuple(config.evaluate.ks) if recounts else (),
        vote=mean if judge.vote in VOTES_WITH_META_RM else vote_named(judge.vote),
        most=config.evaluate.max_subsets,
        seed=config.seed,
        pairwise=judge.protocol_kind.about == "pair",
    )


# -- the summary ---------------------------------------------------------------------------------------------------


def judging_of(result: JudgeEvaluation, counters: Counters) -> JudgingSummary:
    parts = judging(counters)
    return JudgingSummary(
        asked=result.num_judgements,
        counted=result.num_judgements - sum(result.failed_judgements.values()),
        failed=result.failed_judgements,
        tokens=result.num_tokens,
        by_judge=parts.by_judge,
        cascades=parts.cascades,
    )


def metrics_of(result: JudgeEvaluation, first: str) -> Metrics:
    """Metrics by their names in summary.json: accuracy, accuracy_at_4, accuracy_with_meta_at_8. Those of each of
    several judges are named as in the evaluations of a training: grm_accuracy is the first judge's, safety_accuracy
    that of the judge safety. first: the first judge's name.
    """
    overall = result.overall
    metrics = {
        "accuracy": overall.judged.accuracy,
        "tied_share": overall.judged.tied_share,
        "failed_share": overall.judged.failed_share,
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
