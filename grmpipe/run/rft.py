"""Rejective fine-tuning of a GRM: it samples critiques of labelled work, and imitates those that judged right.

    judging tasks -> [3 samples each] -> rule -> keep | drop | [one hinted sample] -> critiques.jsonl -> fine-tuning
    steps

Sampling is durable: after a kill, `resume=auto` samples only what is missing; the few steps are made anew.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from grmpipe.config.train import AlgorithmConfig
from grmpipe.envs.play import Play, RolloutRequest
from grmpipe.judge.labels import Fate, hinted, kept_of, without_hint
from grmpipe.observe.journal import Journal, read_journal
from grmpipe.observe.records import decode_rollout, encode_rollout
from grmpipe.observe.summary import EvalSummary, Status, Summary, written
from grmpipe.run.components import make_evaluator, make_play, make_push, too_long
from grmpipe.run.observers import Observers
from grmpipe.run.periodic_eval import named
from grmpipe.run.signals import ended_by_signals
from grmpipe.run.start import RunComponents, start
from grmpipe.run_dir.changes import changes_of
from grmpipe.train.batching.packer import rounds_of
from grmpipe.train.batching.samples import count, split_rollout
from grmpipe.types import Metrics, Prompt, Rollout, TrainingSample
from grmpipe.validate.prepare import Prepared
from models.seeds import derive_seed
from models.types import EngineRefused, ignore_first_token
from scheduler.supervise import describe_failure, raising_first, run_until

log = logging.getLogger(__name__)

CRITIQUES = "critiques.jsonl"
# With advantage 1 on every token it is the plain negative log-likelihood.
IMITATION = AlgorithmConfig(loss="policy_gradient", correction="none")


async def train_judge_rft(prepared: Prepared, run_dir: Path, resumed: Path | None) -> Summary:
    """Sample, fine-tune, export to <run_dir>/policy. `resumed` is always None: there are no checkpoints."""
    with ended_by_signals():
        return await rft_to_an_end(prepared, run_dir, resumed)


async def rft_to_an_end(prepared: Prepared, run_dir: Path, resumed: Path | None) -> Summary:
    assert resumed is None
    prepared = prepared.under(dataclasses.replace(prepared.config, algorithm=IMITATION))
    observers = Observers.open(prepared.config, run_dir, None, gauges=False)
    run = RftRun(prepared, run_dir, observers)
    observers.tell_changes(changes := changes_of(run_dir))
    try:
        summary = dataclasses.replace(await run.execute(), changes=changes)
    finally:
        observers.close()
    summary = written(summary, run_dir / "summary.json")
    observers.show_end(run_dir, [], None)
    return summary


class RftRun:
    """From prepared parts to a summary. What goes wrong within is not raised: the summary says it."""

    def __init__(self, prepared: Prepared, run_dir: Path, observers: Observers) -> None:
        self.steps = 0
        self.looks: dict[str, Metrics] = {"initial": {}, "final": {}}
        self._prepared = prepared
        self._config = prepared.config
        self._run_dir = run_dir
        self._observers = observers
        self._began_s = time.monotonic()

    async def execute(self) -> Summary:
        running: RunComponents | None = None
        try:
            self._observers.note(f"starting {', '.join(self._config.roles)} ({self._config.cluster.kind})")
            running = await start(self._prepared, self._observers.timeline, self._run_dir)
            looks = {f"the health of {health.role}": health.run() for health in running.health}
            await run_until(self._run(running), **looks)
            return self._summary("completed")
        except asyncio.CancelledError:
            return self._summary("interrupted")
        except Exception as error:
            log.exception("the run failed", extra={"file_only": True})
            return self._summary("failed", describe_failure(error))
        finally:
            if running is not None:
                await running.close()

    async def _run(self, running: RunComponents) -> None:
        self._observers.metrics.truncate_after(-1)  # of before a resume: the steps are made anew
        await make_push(running)(0)
        await self._evaluate(running, "initial")
        num_judging_tasks, num_samples = len(self._prepared.prompts), self._config.rft.num_samples
        self._observers.note(f"the GRM judges {num_judging_tasks} judging tasks, {num_samples} times each")
        critiques = await Sampling(self._prepared, running, self._run_dir / CRITIQUES, self._observers.note).run()
        await self._imitate(running, critiques)
        await make_push(running)(self.steps)
        await self._evaluate(running, "final")
        await running.learner.export(str(self._run_dir / "policy"))

    async def _imitate(self, running: RunComponents, critiques: Sequence[Rollout]) -> None:
        if not critiques:
            raise ValueError(
                "data.path: no critique to imitate: the GRM judges every judging task right each time, or none; give "
                "other judging tasks, or more rft.num_samples"
            )
        samples = [sample for one in critiques for sample in imitated(one)]
        train, size = self._config.train, self._config.rft.critiques_per_batch
        await running.learner.expect(self._config.rft.num_epochs * num_batches(len(samples), size))
        for batch in batches(samples, size, self._epochs()):
            for round_ in rounds_of(batch, train.micro_batch_tokens, running.learner.size, train.prefix_sharing):
                await running.learner.accumulate(round_)
            metrics = await running.learner.step(count(batch, oldest_version=0))
            self.steps += 1
            self._observers.tracker.log(self.steps, metrics)

    def _epochs(self) -> Iterable[random.Random]:
        return (random.Random(f"{self._config.seed} {n}") for n in range(self._config.rft.num_epochs))

    async def _evaluate(self, running: RunComponents, when: str) -> None:
        evaluated = await make_evaluator(self._prepared, running).evaluate(f"held-out-{when}")
        self.looks[when] = evaluated.metrics
        log.info("held-out, %s: %s", when, evaluated.metrics)
        told = ", ".join(f"{name} {value:.3f}" for name, value in evaluated.metrics.items())
        self._observers.note(f"held out, after {self.steps} steps: {told}")
        if when == "initial" and evaluated.metrics:
            self._observers.tracker.log(0, named(evaluated.metrics))

    def _summary(self, status: Status, failure: str | None = None) -> Summary:
        summary = Summary(
            status=status,
            steps=self.steps,
            versions={"policy": self.steps},
            wall_s=round(time.monotonic() - self._began_s, 3),
            eval=EvalSummary(initial=self.looks["initial"], final=self.looks["final"]),
            failure=failure,
        )
        try:
            return summary.with_objective(self._config.objective)
        except ValueError as error:
            log.info("%s", error)
            return summary


class Sampling:
    """Every judging task, once, with what is kept of it in a journal."""

    def __init__(self, prepared: Prepared, running: RunComponents, path: Path, note: Callable[[str], None]) -> None:
        self._prepared = prepared
        self._note = note
        self._settings = prepared.config.rft
        self._play: Play = make_play(prepared, running.policy, prepared.config.rollout.temperature)
        self._too_long = too_long(prepared)
        self._path = path
        self._places = asyncio.Semaphore(max(1, prepared.config.rollout.max_concurrency // self._settings.num_samples))

    async def run(self) -> list[Rollout]:
        """The critiques to imitate, in the order of the judging tasks."""
        known = {record["prompt_id"]: record for record in read_journal(self._path)}
        judging_tasks = [self._prepared.prompts.at(prompt_index) for prompt_index in range(len(self._prepared.prompts))]
        journal = Journal(self._path)
        try:
            async with raising_first() as tasks:
                for judging_task in judging_tasks:
                    if judging_task.prompt_id not in known:
                        tasks.create_task(self._sample(judging_task, journal, known))
        finally:
            journal.close()
        fates = Counter(record["fate"] for record in known.values())
        told = ", ".join(f"{number} {fate}" for fate, number in fates.most_common())
        log.info("judging tasks: %s", told)
        self._note(f"judging tasks: {told}")
        return [decode_rollout(one) for judging_task in judging_tasks for one in known[judging_task.prompt_id]["kept"]]

    async def _sample(self, judging_task: Prompt, journal: Journal, known: dict[str, dict[str, object]]) -> None:
        async with self._places:
            fate, kept = await self._fate(judging_task)
        record: dict[str, object] = {
            "prompt_id": judging_task.prompt_id,
            "fate": fate,
            "kept": [encode_rollout(one) for one in kept],
        }
        journal.append(record)
        known[judging_task.prompt_id] = record

    async def _fate(self, judging_task: Prompt) -> tuple[Fate, Sequence[Rollout]]:
        if self._too_long(judging_task):
            return "too_long", ()
        rollouts = await asyncio.gather(
            *(self._ask(judging_task, index) for index in range(self._settings.num_samples))
        )
        fate, kept = kept_of(rollouts, [self._is_right(judging_task, rollout) for rollout in rollouts])
        if fate != "none_right" or not self._settings.hint:
            return fate, kept
        try:
            told = await self._ask(hinted(judging_task), self._settings.num_samples)
        except EngineRefused:  # no room for the hint
            return fate, ()
        plain_ids = self._prepared.policy.renderer.render(judging_task.messages)
        return ("hinted", (without_hint(told, plain_ids),)) if self._is_right(judging_task, told) else (fate, ())

    async def _ask(self, judging_task: Prompt, index: int) -> Rollout:
        seed = derive_seed(self._prepared.config.seed, f"{judging_task.prompt_id}/{index}")
        request = RolloutRequest(group_id=judging_task.prompt_id, sibling=index, seed=seed)
        return await self._play(request, judging_task, ignore_first_token)

    def _is_right(self, judging_task: Prompt, rollout: Rollout) -> bool:
        assert judging_task.reference is not None
        return rollout.status == "finished" and self._prepared.is_right(rollout.text, judging_task.reference)


def imitated(critique: Rollout) -> Sequence[TrainingSample]:
    return split_rollout(critique, np.ones(critique.num_sampled_tokens))


def num_batches(num_samples: int, size: int) -> int:
    """Of an epoch."""
    return max(1, num_samples // size)


def batches(
    samples: Sequence[TrainingSample], size: int, epochs: Iterable[random.Random]
) -> Iterable[list[TrainingSample]]:
    """Each epoch in an order of its own; what fills no batch joins the epoch's last one."""
    for order in epochs:
        shuffled = order.sample(samples, len(samples))
        starts = [size * number for number in range(num_batches(len(shuffled), size))]
        for first, end in zip(starts, [*starts[1:], len(shuffled)], strict=True):
            yield shuffled[first:end]
