"""Held-out evaluations before, during and after the steps; raises the reward-hacking alarm."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from grmpipe.evaluation.held_out import HELD_OUT, Evaluator, HeldOutEvaluation, JudgedRollout, read_anchor
from grmpipe.judge.composition.composed_judge import get_members
from grmpipe.judge.monitor.reward_hacking import REWARD, AnchorReading, RewardHackingDetector
from grmpipe.models.types import EngineDenied
from grmpipe.observe.all_trackers import AllTrackers
from grmpipe.observe.journal import read_records, replace_journal
from grmpipe.observe.recorder import EvalRecorder
from grmpipe.observe.records import Record, decode_rollout, encode_rollout
from grmpipe.observe.sample_rows import sample_row
from grmpipe.pipeline.counters import EnvCounts
from grmpipe.pipeline.health import Unfit
from grmpipe.run.errors import RunFailed
from grmpipe.run.features.run_feature import RunFeature, StepEnd
from grmpipe.trackers.tracker import SampleRow
from grmpipe.types import Metrics, Prompt, Rollout

log = logging.getLogger(__name__)

ANCHORS = "anchors.jsonl"


class PeriodicEval(RunFeature):
    """Runs held-out evaluations: the first and the last on all problems, those between only on the anchors; none
    without problems.

    start: file of the first evaluation's answers, beside which a judge that compares is shown later ones.
    """

    name = "evaluation"

    def __init__(
        self,
        evaluator: Evaluator,
        alarm: RewardHackingDetector,
        trackers: AllTrackers,
        answers: EvalRecorder,
        start: Path,
        *,
        anchors: int,
        every: int,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """note: receives what a user should know and what is no alarm."""
        self.initial: Metrics = {}
        self.final: Metrics = {}
        self.rows: list[SampleRow] = []  # the last evaluation's, an answer per prompt
        self.seen: list[tuple[Prompt, Rollout]] = []  # the same
        self._evaluator = evaluator
        self._alarm = alarm
        self._trackers = trackers
        self._answers = answers
        self._start = start
        self._anchors = anchors
        self._every = every
        self._note = note
        self._is_noticed = False  # noted once, until an evaluation finds nothing
        self._has_ended = False  # the last evaluation took place
        self.interrupted = False
        self._evaluating: asyncio.Task[HeldOutEvaluation] | None = None
        self.ringing = False  # reported once, until an evaluation finds nothing

    async def first(self, step: int, beside: Callable[[], Awaitable[Metrics]] | None = None) -> None:
        """Evaluate before the first step. `beside`: what else is measured then, afterwards; it is in the same line of
        metrics. Raises Unfit.
        """
        self.initial = await self._evaluate(step, None)
        self._log(step, prefix_names(self.initial) | (await beside() if beside is not None else {}))

    async def after_step(self, end: StepEnd) -> Metrics:
        """The metrics of an evaluation after a step, if one is due, and whether the alarm is on."""
        metrics: Metrics = {}
        if end.is_last:
            metrics = prefix_names(await self._evaluate_at_the_end(end.step))
        elif end.step % self._every == 0:
            metrics = prefix_names(await self._evaluate_or_stop(end.step, self._anchors))
        if self.stopped:
            end.pipeline.interrupt()
        return metrics | {"alarm/hacking": float(self.ringing)} if self._alarm.has_read else metrics

    async def evaluate_all(self, step: int) -> Metrics:
        """Evaluate on all problems between two steps. Raises RunFailed if that can't be done."""
        try:
            metrics = await self._evaluate(step, None)
        except (Unfit, EngineDenied) as error:
            raise RunFailed(no_evaluation(step, error)) from error
        self._log(step, prefix_names(metrics))
        return metrics

    async def last(self, step: int) -> None:
        """Evaluate a run that ended before its last step."""
        if not self._has_ended:
            self._log(step, prefix_names(await self._evaluate_at_the_end(step)))

    async def _evaluate_or_stop(self, step: int, limit: int | None) -> Metrics:
        """Evaluate between two steps: where the judge fails, the run stops with a checkpoint, without figures."""
        try:
            return await self._evaluate(step, limit)
        except (Unfit, EngineDenied) as error:
            self.stopped = no_evaluation(step, error)
            self.interrupted = True
            return {}

    def interrupt(self) -> None:
        """Stop evaluations; one in progress ends now and isn't counted."""
        self.interrupted = True
        if self._evaluating is not None:
            self._evaluating.cancel()

    def _log(self, step: int, metrics: Metrics) -> None:
        """Log an evaluation that belongs to no step on its own line. Does nothing without held-out problems."""
        if metrics:
            self._trackers.log(step, metrics)

    def state(self) -> Mapping[str, Any]:
        return {
            "initial": self.initial,
            "alarm": self._alarm.state(),
            "ringing": self.ringing,
            "noticed": self._is_noticed,
            "episodes": self._evaluator.episodes.to_dict(),
            "judge_accuracy": self._evaluator.skill.accuracy,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint: the alarm compares with the start of the run, not of its resumption."""
        self.initial = state.get("initial", {})
        if (alarm := state.get("alarm")) is not None:
            self._alarm.restore(alarm)
            self.ringing, self._is_noticed = state["ringing"], state["noticed"]
        self._evaluator.episodes += EnvCounts.restore(state.get("episodes", {}))
        self._evaluator.skill.take_accuracies(state.get("judge_accuracy", {}))
        if self._evaluator.compares and self._start.exists():
            self._evaluator.start.update(read_records(self._start, decode_answer))

    async def _evaluate_at_the_end(self, step: int) -> Metrics:
        self.final = await self._evaluate_or_stop(step, None)
        self._has_ended = not self.interrupted
        return self.final

    async def _evaluate(self, step: int, limit: int | None) -> Metrics:
        if not self._evaluator.prompts or self.interrupted:
            return {}
        self._evaluator.journal = self._answers.of_evaluation(HELD_OUT, step)
        self._evaluating = asyncio.create_task(self._evaluator.evaluate(f"held-out-{step}", limit))
        try:
            await asyncio.wait([self._evaluating])
        finally:
            self._evaluating.cancel()
        if self.interrupted:
            return {}
        evaluated = self._evaluating.result()
        self._answers.evaluation_ended()
        firsts = [one for one in evaluated.rollouts if one.sample == 0]
        self.rows = [
            sample_row(one.prompt, one.rollout, one.report, None if one.right is None else float(one.right))
            for one in firsts
        ]
        self.seen = [(one.prompt, one.rollout) for one in firsts]
        log.info("held-out at step %d: %s", step, evaluated.metrics)
        on_anchors = select_answers(evaluated.rollouts, self._evaluator.prompts[: self._anchors])
        if self._evaluator.compares and not self._evaluator.start:
            on_anchors = keep_start(on_anchors, self._evaluator, self._start)
        if (found := read_anchor(step, on_anchors)) is not None:
            self._sound_alarm(found)
        return evaluated.metrics

    def _sound_alarm(self, found: AnchorReading) -> None:
        news = self._alarm.record(found)
        if news.alarm and not self.ringing:
            self.new_alarms = [*self.new_alarms, news.alarm]
        if news.notice and not self._is_noticed:
            log.info("%s", news.notice)
            self._note(news.notice)
        self.ringing, self._is_noticed = bool(news.alarm), bool(news.notice)


def decode_answer(record: Record) -> tuple[str, Rollout]:
    return msgspec.convert(record["prompt_id"], str), decode_rollout(record)


def select_answers(judged: Sequence[JudgedRollout], anchors: Sequence[Prompt]) -> list[JudgedRollout]:
    """The answers to the anchors, which every evaluation asks for."""
    wanted = {prompt.prompt_id for prompt in anchors}
    return [one for one in judged if one.prompt.prompt_id in wanted]


def keep_start(judged: Sequence[JudgedRollout], evaluator: Evaluator, path: Path) -> list[JudgedRollout]:
    """Keep the answers of the first evaluation. Returns them with the rewards that they have beside themselves."""
    alike = dict.fromkeys((REWARD, *get_members(evaluator.judge)), 0.5)
    evaluator.start.update((one.prompt.prompt_id, one.rollout) for one in judged)
    replace_journal(path, ({"prompt_id": one.prompt.prompt_id, **encode_rollout(one.rollout)} for one in judged))
    return [replace(one, rewards=alike) for one in judged]


def no_evaluation(step: int, error: Exception) -> str:
    return f"the evaluation at step {step} has no figures: {error}"


def prefix_names(metrics: Metrics) -> Metrics:
    return {f"eval/{name}": value for name, value in metrics.items()}
