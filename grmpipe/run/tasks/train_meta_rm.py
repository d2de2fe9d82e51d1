"""task=train_meta_rm: a meta-RM learns from labelled judgements which are right. Samples, trains, measures, exports.

    labelled work -> GRM, k judgements each -> right or wrong by the label -> BCE on a scalar head -> <run_dir>/meta_rm

First the GRM uses its slots, then the learner its own: never both at the same time.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import cast

import numpy as np

from grmpipe.algorithm.advantages import sigmoid
from grmpipe.config.grm import ModelEntry
from grmpipe.config.io.key_errors import section
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.data.catalogs import resolve_model
from grmpipe.evaluation.labelled_judgements import (
    LabelledJudgement,
    SampledExamples,
    Split,
    batches,
    read_examples,
    sample,
    write_examples,
)
from grmpipe.judge.context_limits import check_thinking_budget
from grmpipe.judge.grm import GrmClient
from grmpipe.judge.kinds.label_format import judged_right
from grmpipe.judge.votes import average_weighted, best_indices, mean
from grmpipe.models.hub import find_files
from grmpipe.models.lm.packed_check import check_packable
from grmpipe.models.lm.scalar_head import outline_scalar_head
from grmpipe.models.settings import ParallelConfig
from grmpipe.observe.summary import EvalSummary, JudgingSummary, Status, Summary
from grmpipe.pipeline.health import OutageBreaker
from grmpipe.roles.determinism import check_deterministic
from grmpipe.roles.find_models import find_model, find_shared_limit
from grmpipe.roles.learners import check_experts
from grmpipe.roles.machines import check_machine, check_shared
from grmpipe.roles.roles import LearnerRole, Model, Roles, resolve_roles
from grmpipe.run.build.compose_pipeline import compose_health
from grmpipe.run.build.start_cluster import start_cluster
from grmpipe.run.build.start_models import engine_factory, local_grm
from grmpipe.run.errors import RunFailed
from grmpipe.run.run_context import Run, RunContext
from grmpipe.run.run_prompts import HELD_OUT_OF, load_judging_tasks
from grmpipe.scheduler.placement import Placement, place
from grmpipe.scheduler.processes.actors import ActorRanks, Cluster
from grmpipe.scheduler.routing.router import Router
from grmpipe.train.scalar.classification import quality
from grmpipe.train.scalar.scalar_batch import Classified, pack_classified, plan_rounds
from grmpipe.train.scalar.scalar_rank import ScalarLearner, ScalarSpec
from grmpipe.types import Metrics, Prompt


def prepare_meta_training(config: RunConfig) -> MetaRmTraining:
    """Prepare a training of a meta-RM. Every refusal is a ConfigError that names the key and what to type."""
    judge = config.main_judge
    if judge.model not in config.judging.local_roles:
        raise ConfigError(
            "judge.kind: task=train_meta_rm samples a local GRM; type judge.kind=generative, and a grm.engine that "
            "isn't openai"
        )
    if config.resume != "never":
        raise ConfigError(
            "resume: task=train_meta_rm can't be resumed, but its judgements can be used again: type resume=never and "
            "meta_rm.judgements=<its run_dir>/judgements.jsonl"
        )
    with section(""):
        sampling, learning = (
            place(config.placement, (role,), config.served, config.learners) for role in (judge.model, "learner")
        )
    for placement in (sampling, learning):
        check_machine(config.cluster, placement)
    roles, learner = resolve_roles(config, sampling), resolve_roles(config, learning).learners["learner"]
    check_deterministic(config, sampling, roles)
    learner.check_ranks()
    check_shares_no_samples(learner.parallel)
    stored: tuple[LabelledJudgement, ...] = ()
    if config.meta_rm.judgements is not None:
        with section("meta_rm.judgements: "):
            stored = read_examples(Path(config.meta_rm.judgements))
    judging_tasks = {} if stored else read_judging_tasks(config)
    roles.check_installed(joined=config.cluster.is_joined)
    grm = find_model(roles.served[judge.model], config.cluster)
    check_thinking_budget(judge, roles.served[judge.model], grm)
    start_path = find_start(config.meta_rm.start_path, grm, config.models[judge.model])
    check_experts(learner, start_path)
    return MetaRmTraining(
        config=config,
        grm=grm,
        start_path=start_path,
        judging_tasks=judging_tasks,
        stored=stored,
        sampling=sampling,
        learning=learning,
        roles=roles,
        learner=learner,
    )


def check_shares_no_samples(parallel: ParallelConfig) -> None:
    """Raises ConfigError if ranks of a model with a scalar head would share samples."""
    if parallel.cp > 1:
        raise ConfigError(
            "train.parallel.cp: ranks of a model with a scalar head (task=train_meta_rm) can't share samples; type "
            "train.parallel.cp=1"
        )


def read_judging_tasks(config: RunConfig) -> Mapping[Split, Sequence[Prompt]]:
    """Read labelled work for training and for measuring; none is in both."""
    held_out_path = HELD_OUT_OF.get(config.data.path) if config.data.eval_path == "auto" else config.data.eval_path
    if held_out_path is None:
        raise ConfigError("data.eval_path: held-out labelled responses are needed to measure the result; give a file")
    judge, data = config.main_judge, config.data
    with section("data.path: "):
        train = load_judging_tasks(judge, data, data.path, data.num_prompts)
    with section("data.eval_path: "):
        held_out = load_judging_tasks(judge, data, held_out_path, data.num_eval_prompts)
    asked = {judging_task.messages for judging_task in held_out}
    return {
        "train": [judging_task for judging_task in train if judging_task.messages not in asked],
        "held_out": held_out,
    }


def find_start(path: str | None, grm: Model, entry: ModelEntry) -> str:
    """The directory that training starts from: the GRM, or a model that reads the same tokens. entry: the GRM's."""
    with section("meta_rm.start_"):
        directory = grm.path if path is None else find_files(resolve_model(path), weights=True)
        check_packable(outline_scalar_head(directory), directory)
        window = find_shared_limit(directory, grm, entry)
        if window < grm.context_tokens:
            raise ValueError(
                f"path: its context window of {window} tokens is smaller than the GRM's ({grm.context_tokens})"
            )
    return directory


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaRmTraining:
    """A checked training of a meta-RM.

    start_path: the model that gets a head, or already has one.
    judging tasks:    the questions for the GRM; `stored`: judgements that need not be sampled.
    """

    config: RunConfig
    grm: Model
    start_path: str
    judging_tasks: Mapping[Split, Sequence[Prompt]]
    stored: tuple[LabelledJudgement, ...]
    sampling: Placement
    learning: Placement
    roles: Roles  # while the GRM samples
    learner: LearnerRole


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
            as_read = replace(judge, score_from="text")  # the meta-RM learns whether what it reads is right
            client = GrmClient(local_grm(prepared.grm, router, requests=requests), as_read, self._config.seed)
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


Weighed = tuple[LabelledJudgement, float]  # a judgement, and the probability that the meta-RM gives it
VoteOf = Callable[[Sequence[float], Sequence[float]], float]  # (scores of a response, probabilities) -> its score


def measure(examples: Sequence[LabelledJudgement], probabilities: Sequence[float], k_meta: int) -> Metrics:
    """Metrics of single judgements, then of votes over all judgements of an item: unweighted, best `k_meta` (0: half),
    weighted.

    accuracy, auc, brier, calibration_error, base_rate: of `right` under the probabilities.
    vote_*: share of items whose voted scores agree with the label.
    """
    weighed = list(zip(examples, probabilities, strict=True))
    items = [[one for one in weighed if one[0].item_id == item_id] for item_id in {e.item_id: None for e in examples}]

    def best(scores: Sequence[float], weights: Sequence[float]) -> float:
        return mean([scores[index] for index in best_indices(weights, k_meta or max(1, len(scores) // 2))])

    votes: dict[str, VoteOf] = {
        "mean": lambda scores, weights: mean(scores),
        "best": best,
        "weighted": average_weighted,
    }
    agreed = {f"vote_{name}": fmean(agrees(item, vote) for item in items) for name, vote in votes.items()}
    return quality(probabilities, [example.right for example in examples]) | agreed


def agrees(item: Iterable[Weighed], vote: VoteOf) -> bool:
    """Whether the voted scores of an item agree with its label."""
    judgements, weights = zip(*item, strict=True)
    by_response = zip(*(judgement.scores for judgement in judgements), strict=True)
    return judged_right([vote(scores, weights) for scores in by_response], judgements[0].label)
