"""task=train_meta_rm: a meta-RM learns from labelled judgements which are right. Samples, trains, measures, exports.

    labelled work -> GRM, k judgements each -> right or wrong by the label -> BCE on a scalar head -> <run_dir>/meta_rm

First the GRM uses its slots, then the learner its own: never both at the same time.
"""

import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import numpy as np

from grmpipe.config.raw_scores import sigmoid
from grmpipe.evaluation.labelled_judgements import (
    LabelledJudgement,
    SampledExamples,
    Split,
    batches,
    sample,
    write_examples,
)
from grmpipe.evaluation.meta_rm_quality import measure
from grmpipe.judge.grm_client import GrmClient
from grmpipe.observe.summary import EvalSummary, JudgingSummary, Status, Summary
from grmpipe.pipeline.outage_breaker import OutageBreaker
from grmpipe.roles.machines import check_shared
from grmpipe.run.build.compose_pipeline import compose_health
from grmpipe.run.build.engines import engine_factory
from grmpipe.run.build.start_cluster import start_cluster
from grmpipe.run.build.start_models import local_grm
from grmpipe.run.errors import RunFailed
from grmpipe.run.run_context import Run, RunContext
from grmpipe.scheduler.placement import Placement
from grmpipe.scheduler.processes.actors import ActorRanks, Cluster
from grmpipe.scheduler.routing.router import Router
from grmpipe.train.scalar.scalar_batch import Classified, pack_classified, plan_rounds
from grmpipe.train.scalar.scalar_learner import ScalarLearner
from grmpipe.train.scalar.scalar_rank import ScalarSpec
from grmpipe.types import Metrics
from grmpipe.validate.meta_rm_training import MetaRmTraining

STEPS_PER_NOTE = 20


class MetaRmRun(Run[MetaRmTraining]):
    """A scalar model that learns which judgements are right."""

    is_policy_run = False

    def __init__(self, prepared: MetaRmTraining, context: RunContext) -> None:
        super().__init__(prepared, context)
        self._num_steps = 0
        self._evaluations: list[Metrics] = []
        self._sampled = SampledExamples(examples=prepared.stored, failed={}, num_tokens=0)

    async def run(self) -> Status:
        if not self._prepared.stored:
            await self._sample()
        await self._learn()
        return "completed"

    async def _sample(self) -> None:
        prepared, judge = self._prepared, self._config.main_judge
        num_items = sum(map(len, prepared.judging_tasks.values()))
        self._observers.note(f"the GRM judges {num_items} items, {judge.num_judgements} times each")
        async with self._cluster(prepared.sampling) as cluster:
            make_engine = engine_factory(prepared.grm, prepared.roles, self._config.seed)
            engines = await cluster.start_engines(prepared.grm.name, make_engine)
            router = Router(prepared.grm.name, engines, self._observers.timeline)
            requests = self._observers.requests.of_model(prepared.grm.name)
            client = GrmClient(local_grm(prepared.grm, router, requests=requests), judge, self._config.seed)
            breaker = OutageBreaker(compose_health(self._config))
            self._sampled = await sample(client, prepared.judging_tasks, judge.num_judgements, breaker)
        breaker.check()
        for split in prepared.judging_tasks:
            if len({example.right for example in self._of(split)}) < 2:
                causes = ", ".join(f"{n} {cause}" for cause, n in self._sampled.failed.items()) or "none failed"
                raise RunFailed(f"the judgements of {split} are all right or all wrong, or there are none ({causes})")
        write_examples(self._run_dir / "judgements.jsonl", self._sampled.examples)

    async def _learn(self) -> None:
        config, train = self._config, self._config.train
        spec = ScalarSpec(
            model_path=self._prepared.start_path,
            tokenizer_path=self._prepared.grm.path,
            train=train,
            device=self._prepared.learner.device,
        )
        async with self._cluster(self._prepared.learning) as cluster:
            await check_shared(cluster, self._run_dir)
            learner = await cluster.start_members("learner", functools.partial(ScalarLearner, spec))
            await self._evaluate(learner)
            for batch in batches(self._of("train"), train.groups_per_batch, train.num_steps, config.seed):
                for indices in self._rounds(batch, learner.size):
                    packed = [(pack_classified([to_classified(batch[i]) for i in some]),) for some in indices]
                    await learner.call_each("accumulate", packed)
                metrics = cast(list[Metrics], await learner.call_all("step"))[0]
                self._num_steps += 1
                self._observers.trackers.log(self._num_steps, metrics)
                if self._num_steps % STEPS_PER_NOTE == 0:
                    self._observers.note(f"step {self._num_steps}/{train.num_steps}  loss {metrics['train/loss']:.3f}")
            await self._evaluate(learner)
            await learner.call_all("export", str(self._run_dir / "meta_rm"))

    async def _evaluate(self, learner: ActorRanks) -> None:
        """Evaluate on the held-out judgements, before the first step and after the last."""
        examples = self._of("held_out")
        probabilities = [0.0] * len(examples)
        for indices in self._rounds(examples, learner.size):
            packed = [pack_classified([to_classified(examples[i]) for i in some]) for some in indices]
            answers = await learner.call_each("scores", [(batch,) for batch in packed])
            for some, batch, scores_T in zip(indices, packed, answers, strict=True):
                ends = batch.sequence_lengths_S.cumsum() - 1
                for i, logit in zip(some, cast(np.ndarray, scores_T)[ends], strict=False):  # an idle rank has none
                    probabilities[i] = sigmoid(float(logit))
        self._evaluations.append(measure(examples, probabilities, self._config.main_judge.votes.k_meta))
        self._observers.trackers.log(self._num_steps, {f"eval/{name}": x for name, x in self._evaluations[-1].items()})
        metrics_text = ", ".join(f"{name} {value:.3f}" for name, value in self._evaluations[-1].items())
        self._observers.note(f"held out, after {self._num_steps} steps: {metrics_text}")

    def _of(self, split: Split) -> list[LabelledJudgement]:
        return [example for example in self._sampled.examples if example.split == split]

    def _rounds(self, examples: Sequence[LabelledJudgement], world_size: int) -> list[list[list[int]]]:
        lengths = [len(example.token_ids) for example in examples]
        return plan_rounds(lengths, self._config.train.micro_batch_tokens, world_size)

    @asynccontextmanager
    async def _cluster(self, placement: Placement) -> AsyncIterator[Cluster]:
        cluster = await start_cluster(self._config, placement)
        try:
            yield cluster
        finally:
            await cluster.shutdown()

    def results(self) -> Summary:
        sampled, evaluations = self._sampled, self._evaluations
        failed = sum(sampled.failed.values())
        counted = 0 if self._prepared.stored else len(sampled.examples)
        return Summary(
            steps=self._num_steps,
            versions={"meta_rm": self._num_steps},
            eval=EvalSummary(
                initial=evaluations[0] if evaluations else {}, final=evaluations[1] if len(evaluations) > 1 else {}
            ),
            judging=JudgingSummary(
                asked=counted + failed, counted=counted, failed=sampled.failed, tokens=sampled.num_tokens
            ),
        )


def to_classified(example: LabelledJudgement) -> Classified:
    return Classified(token_ids=example.token_ids, right=example.right)
