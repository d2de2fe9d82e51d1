"""Rejective fine-tuning of a GRM: it samples critiques of labelled work, and imitates those that judged right.

    lessons -> [3 samples each] -> rule -> keep | drop | [one hinted sample] -> critiques.jsonl -> fine-tuning steps

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
from grmpipe.envs.play import Play, Seat
from grmpipe.judge.labels import Fate, hinted, kept_of, without_hint
from grmpipe.observe.journal import Journal, read_journal
from grmpipe.observe.records import decode_rollout, encode_rollout
from grmpipe.observe.summary import EvalSummary, Status, Summary, written
from grmpipe.run.components import make_evaluator, make_play, make_push, too_long
from grmpipe.run.observers import Observers
from grmpipe.run.periodic_eval import named
from grmpipe.run.signals import ended_by_signals
from grmpipe.run.start import Running, start
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


async def finetune(prepared: Prepared, run_dir: Path, resumed: Path | None) -> Summary:
    """Sample, fine-tune, export to <run_dir>/policy. `resumed` is always None: there are no checkpoints."""
    with ended_by_signals():
        return await finetune_to_an_end(prepared, run_dir, resumed)


async def finetune_to_an_end(prepared: Prepared, run_dir: Path, resumed: Path | None) -> Summary:
    assert resumed is None
    prepared = prepared.under(dataclasses.replace(prepared.config, algorithm=IMITATION))
    observers = Observers.open(prepared.config, run_dir, None, gauges=False)
    run = FinetuneRun(prepared, run_dir, observers)
    observers.tell_changes(changes := changes_of(run_dir))
    try:
        summary = dataclasses.replace(await run.execute(), changes=changes)
    finally:
        observers.close()
    summary = written(summary, run_dir / "summary.json")
    observers.show_end(run_dir, [], None)
    return summary


class FinetuneRun:
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
        running: Running | None = None
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

    async def _run(self, running: Running) -> None:
        self._observers.metrics.truncate_after(-1)  # of before a resume: the steps are made anew
        await make_push(running)(0)
        await self._look(running, "initial")
        num_lessons, num_samples = len(self._prepared.prompts), self._config.finetune.num_samples
        self._observers.note(f"the GRM judges {num_lessons} lessons, {num_samples} times each")
        critiques = await Sampling(self._prepared, running, self._run_dir / CRITIQUES, self._observers.note).run()
        await self._imitate(running, critiques)
        await make_push(running)(self.steps)
        await self._look(running, "final")
        await running.learner.export(str(self._run_dir / "policy"))

    async def _imitate(self, running: Running, critiques: Sequence[Rollout]) -> None:
        if not critiques:
            raise ValueError(
                "data.path: no critique to imitate: the GRM judges every lesson right each time, or none; give "
                "other lessons, or more finetune.num_samples"
            )
        samples = [sample for one in critiques for sample in imitated(one)]
        train, size = self._config.train, self._config.finetune.critiques_per_batch
        await running.learner.expect(self._config.finetune.num_epochs * num_batches(len(samples), size))
        for batch in batches(samples, size, self._epochs()):
            for round_ in rounds_of(batch, train.micro_batch_tokens, running.learner.size, train.shared_prompts):
                await running.learner.accumulate(round_)
            metrics = await running.learner.step(count(batch, oldest_version=0))
            self.steps += 1
            self._observers.tracker.log(self.steps, metrics)

    def _epochs(self) -> Iterable[random.Random]:
        return (random.Random(f"{self._config.seed} {n}") for n in range(self._config.finetune.num_epochs))

    async def _look(self, running: Running, when: str) -> None:
        looked = await make_evaluator(self._prepared, running).look(f"held-out-{when}")
        self.looks[when] = looked.metrics
        log.info("held-out, %s: %s", when, looked.metrics)
        told = ", ".join(f"{name} {value:.3f}" for name, value in looked.metrics.items())
        self._observers.note(f"held out, after {self.steps} steps: {told}")
        if when == "initial" and looked.metrics:
            self._observers.tracker.log(0, named(looked.metrics))

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
    """Every lesson, once, with what is kept of it in a journal."""

    def __init__(self, prepared: Prepared, running: Running, path: Path, note: Callable[[str], None]) -> None:
        self._prepared = prepared
        self._note = note
        self._settings = prepared.config.finetune
        self._play: Play = make_play(prepared, running.policy, prepared.config.rollout.temperature)
        self._too_long = too_long(prepared)
        self._path = path
        self._places = asyncio.Semaphore(max(1, prepared.config.rollout.width // self._settings.num_samples))

    async def run(self) -> list[Rollout]:
        """The critiques to imitate, in the order of the lessons."""
        known = {record["lesson"]: record for record in read_journal(self._path)}
        lessons = [self._prepared.prompts.at(draw) for draw in range(len(self._prepared.prompts))]
        journal = Journal(self._path)
        try:
            async with raising_first() as tasks:
                for lesson in lessons:
                    if lesson.prompt_id not in known:
                        tasks.create_task(self._sample(lesson, journal, known))
        finally:
            journal.close()
        fates = Counter(record["fate"] for record in known.values())
        told = ", ".join(f"{number} {fate}" for fate, number in fates.most_common())
        log.info("lessons: %s", told)
        self._note(f"lessons: {told}")
        return [decode_rollout(one) for lesson in lessons for one in known[lesson.prompt_id]["kept"]]

    async def _sample(self, lesson: Prompt, journal: Journal, known: dict[str, dict[str, object]]) -> None:
        async with self._places:
            fate, kept = await self._fate(lesson)
        record: dict[str, object] = {
            "lesson": lesson.prompt_id,
            "fate": fate,
            "kept": [encode_rollout(one) for one in kept],
        }
        journal.append(record)
        known[lesson.prompt_id] = record

    async def _fate(self, lesson: Prompt) -> tuple[Fate, Sequence[Rollout]]:
        if self._too_long(lesson):
            return "too_long", ()
        rollouts = await asyncio.gather(*(self._ask(lesson, index) for index in range(self._settings.num_samples)))
        fate, kept = kept_of(rollouts, [self._is_right(lesson, rollout) for rollout in rollouts])
        if fate != "none_right" or not self._settings.hint:
            return fate, kept
        try:
            told = await self._ask(hinted(lesson), self._settings.num_samples)
        except EngineRefused:  # no room for the hint
            return fate, ()
        plain_ids = self._prepared.policy.renderer.render(lesson.messages)
        return ("hinted", (without_hint(told, plain_ids),)) if self._is_right(lesson, told) else (fate, ())

    async def _ask(self, lesson: Prompt, index: int) -> Rollout:
        seed = derive_seed(self._prepared.config.seed, f"{lesson.prompt_id}/{index}")
        seat = Seat(group_id=lesson.prompt_id, sibling=index, seed=seed)
        return await self._play(seat, lesson, ignore_first_token)

    def _is_right(self, lesson: Prompt, rollout: Rollout) -> bool:
        assert lesson.reference is not None
        return rollout.status == "finished" and self._prepared.is_right(rollout.text, lesson.reference)


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
