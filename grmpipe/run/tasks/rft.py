"""task=train_judge_rft: rejection-sampling fine-tuning of a GRM, which imitates its right critiques.

    judging tasks -> [3 samples each] -> rule -> keep | drop | [one hinted sample] -> critiques.jsonl -> fine-tuning
    steps

Sampling is durable: after a kill, `resume=auto` samples only what is missing, and makes the few steps again. There are
no checkpoints.
"""

import asyncio
import dataclasses
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from grmpipe.config.train import AlgorithmConfig
from grmpipe.data.trained_prompts import write_trained_prompts
from grmpipe.envs.play import Play, RolloutRequest
from grmpipe.judge.kinds.labels import Fate, add_hint, keep_critiques, without_hint
from grmpipe.models.seeds import derive_seed
from grmpipe.models.types import EngineRefused, ignore_first_token
from grmpipe.observe.journal import Journal, read_records
from grmpipe.observe.records import Record, decode_rollout, encode_rollout
from grmpipe.observe.summary import EvalSummary, Status, Summary
from grmpipe.run.build.compose_pipeline import compose_push, make_evaluator, make_play, too_long
from grmpipe.run.build.start import Running, start
from grmpipe.run.export import export
from grmpipe.run.features.periodic_eval import prefix_names
from grmpipe.run.prepare import Prepared
from grmpipe.run.run_context import Run, RunContext
from grmpipe.run_dir.identity import read_run_id
from grmpipe.scheduler.run_together import raise_first_failure, run_until
from grmpipe.train.batching.packer import pack_rounds
from grmpipe.train.batching.samples import count, split_rollout
from grmpipe.types import Metrics, Prompt, Rollout, TrainingSample

log = logging.getLogger(__name__)

CRITIQUES = "critiques.jsonl"
Critiques = tuple[Fate, Sequence[Rollout]]  # what became of a judging task, and what is kept of it
# With advantage 1 on every token the loss is the plain negative log-likelihood.
IMITATION = AlgorithmConfig(loss="policy_gradient", correction="none")


class RftRun(Run[Prepared]):
    """A GRM that imitates its own right critiques."""

    is_policy_run = False

    def __init__(self, prepared: Prepared, context: RunContext) -> None:
        super().__init__(prepared.under(dataclasses.replace(prepared.config, algorithm=IMITATION)), context)
        self._steps = 0
        self._evaluations: dict[str, Metrics] = {"initial": {}, "final": {}}
        self._running: Running | None = None

    async def run(self) -> Status:
        self._observers.note(f"starting {', '.join(self._config.roles)} ({self._config.cluster.kind})")
        self._running = running = await start(self._prepared, self._observers, self._run_dir)
        await run_until(self._train(running), **running.background())
        return "completed"

    async def close(self) -> None:
        if self._running is not None:
            await self._running.close()

    async def _train(self, running: Running) -> None:
        self._observers.metrics.truncate_after(-1)  # a resume makes the steps again
        push = compose_push(running.policy.push, running.maintenance.share)
        await push(0)
        await self._evaluate(running, "initial")
        num_judging_tasks, num_samples = len(self._prepared.prompts), self._config.data.rft.num_samples
        self._observers.note(f"the GRM judges {num_judging_tasks} judging tasks, {num_samples} times each")
        critiques = await Sampling(self._prepared, running, self._run_dir / CRITIQUES, self._observers.note).run()
        await self._imitate(running, critiques)
        await push(self._steps)
        await self._evaluate(running, "final")
        await export(running.policy.learner, self._run_dir / "policy", self._config.policy)
        write_trained_prompts(self._run_dir / "policy", self._prepared.prompts.prompts)

    async def _imitate(self, running: Running, critiques: Sequence[Rollout]) -> None:
        if not critiques:
            raise ValueError(
                "data.path: no critique to imitate: the GRM judges every judging task right each time, or none; give "
                "other judging tasks, or more data.rft.num_samples"
            )
        samples = [sample for one in critiques for sample in to_samples(one)]
        train, size = self._config.train, self._config.data.rft.critiques_per_batch
        learner = running.policy.learner
        await learner.expect(self._config.data.rft.num_epochs * num_batches(len(samples), size))
        for batch in batches(samples, size, self._epochs()):
            for round_ in pack_rounds(batch, train.max_packed_tokens, learner.dp_size, train.prefix_sharing):
                await learner.accumulate(round_)
            metrics = await learner.step(count(batch, oldest_version=0))
            self._steps += 1
            self._observers.trackers.log(self._steps, metrics)

    def _epochs(self) -> Iterable[random.Random]:
        return (random.Random(f"{self._config.seed} {n}") for n in range(self._config.data.rft.num_epochs))

    async def _evaluate(self, running: Running, when: str) -> None:
        evaluated = await make_evaluator(self._prepared, running, self._observers.progress).evaluate(f"held-out-{when}")
        self._evaluations[when] = evaluated.metrics
        log.info("held-out, %s: %s", when, evaluated.metrics)
        metrics_text = ", ".join(f"{name} {value:.3f}" for name, value in evaluated.metrics.items())
        self._observers.note(f"held out, after {self._steps} steps: {metrics_text}")
        if when == "initial" and evaluated.metrics:
            self._observers.trackers.log(0, prefix_names(evaluated.metrics))

    def results(self) -> Summary:
        return Summary(
            steps=self._steps,
            versions={"policy": self._steps},
            eval=EvalSummary(initial=self._evaluations["initial"], final=self._evaluations["final"]),
        )


class Sampling:
    """Samples every judging task once, and journals what is kept of it."""

    def __init__(self, prepared: Prepared, running: Running, path: Path, note: Callable[[str], None]) -> None:
        self._prepared = prepared
        self._note = note
        self._settings = prepared.config.data.rft
        self._play: Play = make_play(prepared, running.policy.router, running.envs, prepared.config.rollout.temperature)
        self._too_long = too_long(prepared)
        self._path = path
        self._places = asyncio.Semaphore(max(1, prepared.config.rollout.max_concurrency // self._settings.num_samples))

    async def run(self) -> list[Rollout]:
        """The critiques to imitate, in the order of the judging tasks."""
        known = dict(read_records(self._path, decode_critiques))
        judging_tasks = [self._prepared.prompts.at(prompt_index) for prompt_index in range(len(self._prepared.prompts))]
        journal = Journal(self._path, run_id=read_run_id(self._path.parent))
        try:
            async with raise_first_failure() as tasks:
                for judging_task in judging_tasks:
                    if judging_task.prompt_id not in known:
                        tasks.create_task(self._sample(judging_task, journal, known))
        finally:
            journal.close()
        fates = Counter(fate for fate, _ in known.values())
        counts = ", ".join(f"{number} {fate}" for fate, number in fates.most_common())
        log.info("judging tasks: %s", counts)
        self._note(f"judging tasks: {counts}")
        return [one for judging_task in judging_tasks for one in known[judging_task.prompt_id][1]]

    async def _sample(self, judging_task: Prompt, journal: Journal, known: dict[str, Critiques]) -> None:
        async with self._places:
            fate, kept = await self._fate(judging_task)
        journal.append(
            {"prompt_id": judging_task.prompt_id, "fate": fate, "kept": [encode_rollout(one) for one in kept]}
        )
        known[judging_task.prompt_id] = fate, kept

    async def _fate(self, judging_task: Prompt) -> tuple[Fate, Sequence[Rollout]]:
        if self._too_long(judging_task):
            return "too_long", ()
        rollouts = await asyncio.gather(
            *(self._ask(judging_task, index) for index in range(self._settings.num_samples))
        )
        fate, kept = keep_critiques(rollouts, [self._is_right(judging_task, rollout) for rollout in rollouts])
        if fate != "none_right" or not self._settings.hint:
            return fate, kept
        try:
            hinted_rollout = await self._ask(add_hint(judging_task), self._settings.num_samples)
        except EngineRefused:  # no room for the hint
            return fate, ()
        if not self._is_right(judging_task, hinted_rollout):
            return fate, ()
        plain_ids = self._prepared.policy.renderer.render(judging_task.messages)
        return "hinted", (without_hint(hinted_rollout, plain_ids),)

    async def _ask(self, judging_task: Prompt, index: int) -> Rollout:
        seed = derive_seed(self._prepared.config.seed, f"{judging_task.prompt_id}/{index}")
        request = RolloutRequest(group_id=judging_task.prompt_id, sibling=index, seed=seed)
        return await self._play(request, judging_task, ignore_first_token)

    def _is_right(self, judging_task: Prompt, rollout: Rollout) -> bool:
        assert judging_task.reference is not None
        return rollout.status == "finished" and self._prepared.is_right(rollout.answer, judging_task.reference) == 1


def decode_critiques(record: Record) -> tuple[str, Critiques]:
    kept = tuple(decode_rollout(one) for one in record["kept"])
    prompt_id, fate = msgspec.convert((record["prompt_id"], record["fate"]), tuple[str, Fate])
    return prompt_id, (fate, kept)


def to_samples(critique: Rollout) -> Sequence[TrainingSample]:
    return split_rollout(critique, np.ones(critique.num_sampled_tokens))


def num_batches(num_samples: int, size: int) -> int:
    """The number of batches of an epoch."""
    return max(1, num_samples // size)


def batches(
    samples: Sequence[TrainingSample], size: int, epochs: Iterable[random.Random]
) -> Iterable[list[TrainingSample]]:
    """The batches of all epochs, each in its own order; a rest that fills no batch joins the last one."""
    for order in epochs:
        shuffled = order.sample(samples, len(samples))
        starts = [size * number for number in range(num_batches(len(shuffled), size))]
        for first, end in zip(starts, [*starts[1:], len(shuffled)], strict=True):
            yield shuffled[first:end]
