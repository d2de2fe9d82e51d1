"""A policy on prompts: plays and judges its answers as a run does, writes and prints what came of them."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from pathlib import Path

from grmpipe.config.task_settings import NUM_SAMPLES
from grmpipe.evaluation.held_out import Evaluator, HeldOutEvaluation, JudgedRollout
from grmpipe.evaluation.policy_evaluation import PolicyEvaluation, Scoring, evaluate_answers
from grmpipe.evaluation.policy_files import ANSWERS, record_of, show_policies, write_policies
from grmpipe.judge.composition.composed_judge import without_bounds
from grmpipe.observe.guard import Guard
from grmpipe.observe.journal import Journal
from grmpipe.observe.sample_rows import sample_row
from grmpipe.pipeline.counters import Counters
from grmpipe.run.build.make_evaluator import evaluator_on, pass_reward_of, sampling_of
from grmpipe.run.build.start_serving import Serving
from grmpipe.run.observers import Observers
from grmpipe.trackers.tracker import SampleRow
from grmpipe.validate.evaluation import PreparedEvaluation, PromptSet


class AnswerLog:
    """Writes each answer to eval_rollouts.jsonl as it comes, and counts it. An error of the file fails nothing."""

    def __init__(self, run_dir: Path, counters: Counters) -> None:
        self.run_dir = run_dir
        self.counters = counters
        self._journal = Journal(run_dir / ANSWERS)
        self._guard = Guard()

    def add(self, prompts: str, answer: JudgedRollout) -> None:
        self.counters.report(answer.report)
        with self._guard.watch(ANSWERS):
            self._journal.append(record_of(prompts, answer))

    def close(self) -> None:
        self._journal.close()


async def evaluate_policy(
    ready: PreparedEvaluation,
    running: Serving,
    answers: AnswerLog,
    policies: dict[str, PolicyEvaluation],
    rows: list[SampleRow],
    observers: Observers,
) -> None:
    """Evaluate on one set of prompts after the other; `policies` and `rows` get each one's results when it ends."""
    scoring = scoring_of(ready)
    try:
        for name, found in ready.prompt_sets.items():
            greedy = ", and a greedy one" if scoring.greedy else ""
            observers.note(
                f"{name}: {len(found.prompts)} prompts, {scoring.counting.num_samples} sampled answers each{greedy}"
            )
            evaluator = make_policy_evaluator(ready, running, name, found, answers)
            evaluated = await replace(evaluator, progress=observers.progress).evaluate(name)
            check_answered(name, evaluated)
            policies[name] = evaluate_answers(found.prompts, evaluated, scoring, found.num_left_out)
            rows += [
                sample_row(one.prompt, one.rollout, one.report, None if one.right is None else float(one.right))
                for one in evaluated.rollouts
                if one.sample == 0
            ]
            write_policies(answers.run_dir, policies)
    finally:
        answers.close()
    show_policies(policies, scoring, ready.config.data.labels.pass_score, answers.run_dir)


def scoring_of(ready: PreparedEvaluation) -> Scoring:
    config, pass_reward = ready.config, pass_reward_of(ready.config)
    assert pass_reward is not None, "check_scoring has refused it"
    judges = config.judging.judges.values()
    return Scoring(
        counting=sampling_of(config.evaluate, NUM_SAMPLES),
        pass_reward=pass_reward,
        greedy=config.evaluate.greedy,
        by_rule=len(judges) == 1 and all(judge.kind in ("rule", "label") for judge in judges),
    )


def make_policy_evaluator(
    ready: PreparedEvaluation, running: Serving, name: str, found: PromptSet, answers: AnswerLog
) -> Evaluator:
    evaluate, sampling = ready.config.evaluate, sampling_of(ready.config.evaluate, NUM_SAMPLES)
    judge = without_bounds(running.judge_for(ready.prepared))
    return replace(
        evaluator_on(found.prompts, ready.prepared, running, judge, sampling),
        judges_greedy=True,
        places=asyncio.Semaphore(evaluate.max_concurrency * (sampling.num_samples + evaluate.greedy)),
        on_answer=functools.partial(answers.add, name),
        episodes=answers.counters.envs,
    )


def check_answered(name: str, evaluated: HeldOutEvaluation) -> None:
    """Raises ValueError if the policy answered no prompt: there is nothing to report."""
    if not evaluated.rollouts and not evaluated.greedy:
        raise ValueError(f"no prompt of {name} was answered; the causes are above, and in run.log")
