"""A policy on prompts: plays and judges its answers as a run does, writes and prints what came of them."""

import asyncio
from dataclasses import dataclass, replace

from grmpipe.config.task_settings import ITEMS_AT_ONCE, NUM_SAMPLES
from grmpipe.evaluation.held_out import AnswerJournal, Evaluator, HeldOutEvaluation
from grmpipe.evaluation.policy_evaluation import (
    PolicyEvaluation,
    Scoring,
    evaluate_answers,
    show_policies,
    write_policies,
)
from grmpipe.judge.composition.composed_judge import without_bounds
from grmpipe.observe.sample_rows import sample_row
from grmpipe.pipeline.counters import Counters
from grmpipe.run.build.compose_pipeline import compute_pass_reward, evaluator_on, read_sampling
from grmpipe.run.build.start import Running
from grmpipe.run.run_context import RunContext
from grmpipe.run.tasks.prepare_evaluation import PreparedEvaluation, PromptSet
from grmpipe.trackers.tracker import SampleRow
from grmpipe.types import JudgeReport, Prompt, Rollout


@dataclass(frozen=True, slots=True)
class CountedAnswers:
    """Counts the verdicts of an evaluation, and records its answers."""

    journal: AnswerJournal
    counters: Counters

    def rollout(self, prompt: Prompt, rollout: Rollout, sample: int | None, right: float | None) -> None:
        self.journal.rollout(prompt, rollout, sample, right)

    def record_verdict(self, rollout: Rollout, report: JudgeReport) -> None:
        self.counters.report(report)
        self.journal.record_verdict(rollout, report)


async def evaluate_policy(
    ready: PreparedEvaluation,
    running: Running,
    context: RunContext,
    counters: Counters,
    policies: dict[str, PolicyEvaluation],
    rows: list[SampleRow],
) -> None:
    """Evaluate on one set of prompts after the other; `policies` and `rows` get each one's results when it ends."""
    scoring, observers, run_dir = make_scoring(ready), context.observers, context.run_dir
    for name, found in ready.prompt_sets.items():
        greedy = ", and a greedy one" if scoring.greedy else ""
        observers.note(
            f"{name}: {len(found.prompts)} prompts, {scoring.counting.num_samples} sampled answers each{greedy}"
        )
        answers = CountedAnswers(observers.evaluations.of_evaluation(name), counters)
        evaluator = make_policy_evaluator(ready, running, found, answers)
        evaluated = await replace(evaluator, progress=observers.progress).evaluate(name)
        check_answered(name, evaluated)
        policies[name] = evaluate_answers(found.prompts, evaluated, scoring, found.num_left_out)
        rows += [
            sample_row(one.prompt, one.rollout, one.report, None if one.right is None else float(one.right))
            for one in evaluated.rollouts
            if one.sample == 0
        ]
        write_policies(run_dir, policies)
    show_policies(policies, scoring, ready.config.data.labels.pass_score, run_dir)


def make_scoring(ready: PreparedEvaluation) -> Scoring:
    config = ready.config
    judges = config.judging.judges.values()
    return Scoring(
        counting=read_sampling(config.evaluate, NUM_SAMPLES),
        pass_reward=compute_pass_reward(config),
        greedy=config.evaluate.greedy,
        by_rule=len(judges) == 1 and all(judge.kind in ("rule", "label") for judge in judges),
    )


def make_policy_evaluator(
    ready: PreparedEvaluation, running: Running, found: PromptSet, answers: CountedAnswers
) -> Evaluator:
    evaluate, sampling = ready.config.evaluate, read_sampling(ready.config.evaluate, NUM_SAMPLES)
    judge = without_bounds(running.judge)
    return replace(
        evaluator_on(found.prompts, ready.prepared, running, judge, sampling),
        judges_greedy=True,
        places=asyncio.Semaphore(ITEMS_AT_ONCE * (sampling.num_samples + evaluate.greedy)),
        journal=answers,
        episodes=answers.counters.envs,
    )


def check_answered(name: str, evaluated: HeldOutEvaluation) -> None:
    """Raises ValueError if the policy answered no prompt: there is nothing to report."""
    if not evaluated.rollouts and not evaluated.greedy:
        raise ValueError(f"no prompt of {name} was answered; the causes are above, and in run.log")
