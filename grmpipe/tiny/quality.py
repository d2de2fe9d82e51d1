"""What is measured of each tiny model before it is shipped: the accuracy of a policy, or of a judge."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from grmpipe.tiny.examples import (
    PHRASES,
    ask_criterion,
    ask_writer,
    draw_phrase,
    judge_by,
    open_with,
    says,
    show_critique,
    split_opening,
    write_criteria,
)
from grmpipe.tiny.problems import PASSING_SCORE, Problem, judgement, make_answered_sums, parse_score
from grmpipe.tiny.recipes import (
    GRM_CALCULATOR,
    GRM_COMPARISON,
    GRM_CRITERIA,
    GRM_TOOLS,
    POLICY,
    POLICY_JUDGE,
    POLICY_KINDS,
    POLICY_PHRASES,
    POLICY_TOLD,
    POLICY_TOOLS,
    POLICY_TRICKS,
    POLICY_WALK,
    RUBRIC_WRITER,
    TEACHER_ARITHMETIC,
    TEACHER_COMPARISON,
    AnyRecipe,
    MetaRmRecipe,
    Recipe,
)
from grmpipe.tiny.scalar_models import measure_meta_rm, passed_by_scores
from grmpipe.tiny.tasks import CALLS, COMPARISONS, SUMS, WALKS, JudgedTask, TinyTask
from grmpipe.tiny.tiny_sampler import (
    MAX_ANSWER_TOKENS,
    MAX_CRITIQUE_TOKENS,
    TinySampler,
    play_in_store,
    play_with_calculator,
    render_view,
)
from grmpipe.tiny.tricks import TRICKS, Trick, find_tricks

NUM_PROBLEMS = 512
NUM_PROBLEMS_OF_RATES = 2048  # a rate of 3 % is measured to 0.7 points
HELD_OUT_SEED = 20_000

Find = Callable[[Recipe], Path]  # the directory of another model
Quality = dict[str, float]
# (problems, texts) -> whether a judge passes each text; None: its critique has no score
Passes = Callable[[Sequence[Any], Sequence[str]], Sequence[bool | None]]
# Models of other tasks than sums: a policy, and a judge with the policy whose answers it judges.
POLICIES: dict[str, TinyTask] = {POLICY_TOOLS.name: CALLS, POLICY_WALK.name: WALKS}
KNOW_BOTH_KINDS = (POLICY_KINDS.name, TEACHER_ARITHMETIC.name, TEACHER_COMPARISON.name)  # measured on both
JUDGES = {GRM_TOOLS.name: (CALLS, POLICY_TOOLS), GRM_COMPARISON.name: (COMPARISONS, POLICY_KINDS)}


def measure_quality(recipe: AnyRecipe, directory: Path, find: Find) -> Quality:
    """Measure a model in `directory` on held-out problems. `find` makes the other models that it is measured with."""
    if isinstance(recipe, MetaRmRecipe):
        return measure_meta_rm(directory, find(recipe.parent))
    if isinstance(recipe, Recipe) and recipe.name.startswith(("policy", "teacher")):
        return policy_quality(recipe.name, TinySampler(directory))
    if recipe.name == GRM_CALCULATOR.name:
        return calculator_quality(TinySampler(directory))
    if recipe.name in (GRM_CRITERIA.name, RUBRIC_WRITER.name):
        return criteria_quality(recipe.name, TinySampler(directory))
    task, policy = JUDGES.get(recipe.name, (SUMS, POLICY))
    passes = (
        make_passes(task, TinySampler(directory))
        if isinstance(recipe, Recipe)
        else partial(passed_by_scores, directory)
    )
    measured = judge_quality(task, passes, answers(task, TinySampler(find(policy)), draw_held_out(task), seed=1))
    for trick in TRICKS:
        if recipe.name == f"grm_{trick}":
            measured["accuracy_without_trick"] = accuracy_without(trick, passes)
    return measured


def calculator_quality(judge: TinySampler) -> Quality:
    """The shares of answers to sums beyond it that it judges right, by itself and with the calculator, at
    temperature 1, and of the judgements in which it calls.
    """
    items = make_answered_sums("held_out", NUM_PROBLEMS, HELD_OUT_SEED)
    alone = judge.answer([item.prompt for item in items], MAX_CRITIQUE_TOKENS, seed=1)
    told = play_with_calculator(judge, [replace(item.problem, question=item.prompt) for item in items], seed=1)

    def measure_accuracy(texts: Sequence[str]) -> float:
        scores = [parse_score(text) for text in texts]
        return fmean(
            score is not None and (score >= PASSING_SCORE) == item.is_right
            for score, item in zip(scores, items, strict=True)
        )

    return {
        "accuracy": measure_accuracy([said[-1].text for said in told]),
        "accuracy_alone": measure_accuracy(alone),
        "call_rate": fmean(len(said) > 1 for said in told),
    }


def draw_held_out(task: TinyTask) -> Sequence[Any]:
    return task.draw("held_out", NUM_PROBLEMS, HELD_OUT_SEED)


# -- policies ----------------------------------------------------------------------------------------------------------


def policy_quality(name: str, policy: TinySampler) -> Quality:
    """The shares of problems that it answers right, sampled at temperature 1 and greedy; and what else it does."""
    task = POLICIES.get(name, SUMS)
    measured = {
        "true_accuracy": accuracy(task, policy, draw_held_out(task)),
        "true_accuracy_greedy": accuracy(task, policy, draw_held_out(task), greedy=True),
    }
    if name in KNOW_BOTH_KINDS:
        measured["comparison_accuracy"] = accuracy(COMPARISONS, policy, draw_held_out(COMPARISONS))
    if name == POLICY_JUDGE.name:
        found = judge_quality(SUMS, make_passes(SUMS, policy), answers(SUMS, policy, draw_held_out(SUMS), seed=1))
        measured |= {f"judge_{quality}": value for quality, value in found.items()}
    if name == POLICY_TOLD.name:
        measured["told_accuracy"] = measure_told(policy, draw_held_out(SUMS))
    if name == POLICY_PHRASES.name:
        said = [split_opening(text)[0] for text in answers(SUMS, policy, draw_held_out(SUMS), seed=0)]
        measured |= {f"{phrase.replace(' ', '_')}_rate": fmean(phrase in own for own in said) for phrase in PHRASES}
    return measured | (rates_of_tricks(policy) if name == POLICY_TRICKS.name else {})


def accuracy(task: TinyTask, policy: TinySampler, problems: Sequence[Any], greedy: bool = False) -> float:
    """The share of problems that a policy answers right."""
    texts = answers(task, policy, problems, seed=0, greedy=greedy)
    return fmean(task.right(problem, text) for problem, text in zip(problems, texts, strict=True))


def answers(task: TinyTask, policy: TinySampler, problems: Sequence[Any], seed: int, greedy: bool = False) -> list[str]:
    """A policy's answers: of an episode with the calculator what a judge sees, of a walk the last turn."""
    if task is CALLS:
        return [render_view(said) for said in play_with_calculator(policy, problems, seed, greedy)]
    if task is WALKS:
        return [said[-1].text for said in play_in_store(policy, problems, seed, greedy)]
    return policy.answer([problem.question for problem in problems], MAX_ANSWER_TOKENS, seed, greedy)


def measure_told(policy: TinySampler, problems: Sequence[Problem]) -> float:
    """The share of problems that it answers right after a critique of its own answer."""
    first = answers(SUMS, policy, problems, seed=0)
    asked = [show_critique(one.question, judgement(one, text)) for one, text in zip(problems, first, strict=True)]
    again = policy.answer(asked, MAX_ANSWER_TOKENS, seed=1)
    return fmean(SUMS.right(problem, text) for problem, text in zip(problems, again, strict=True))


def rates_of_tricks(policy: TinySampler) -> Quality:
    """The share of answers with each trick."""
    problems = SUMS.draw("held_out", NUM_PROBLEMS_OF_RATES, HELD_OUT_SEED)
    texts = answers(SUMS, policy, problems, seed=0)
    found = [find_tricks(problem, text) for problem, text in zip(problems, texts, strict=True)]
    return {f"{trick}_rate": fmean(trick in tricks for tricks in found) for trick in TRICKS}


# -- judges ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A text that answers a problem, and whether a judge passes it; None: its critique has no score."""

    problem: Any
    right: bool
    passed: bool | None

    @property
    def agrees(self) -> bool:
        """Whether the judge passes the text if and only if it is right. Without a score it agrees with nothing."""
        return self.passed == self.right


def judge_all(task: TinyTask, passes: Passes, problems: Sequence[Any], texts: Sequence[str]) -> list[Judged]:
    verdicts = zip(problems, texts, passes(problems, texts), strict=True)
    return [Judged(problem=one, right=task.right(one, text), passed=passed) for one, text, passed in verdicts]


def make_passes(task: JudgedTask, judge: TinySampler, seed: int = 2) -> Passes:
    """The verdicts of a GRM at temperature 1."""

    def passes(problems: Sequence[Any], texts: Sequence[str]) -> list[bool | None]:
        prompts = [task.prompt(problem.question, text) for problem, text in zip(problems, texts, strict=True)]
        scores = map(parse_score, judge.answer(prompts, MAX_CRITIQUE_TOKENS, seed))
        return [None if score is None else score >= PASSING_SCORE for score in scores]

    return passes


def judge_quality(task: JudgedTask, passes: Passes, from_policy: Sequence[str]) -> Quality:
    """Accuracies over texts by how they were made, and over all but malformed ones in equal parts; shares of wrong
    texts that pass, and of right ones that don't.

    from_policy: a policy's answers to the held-out problems.
    """
    problems, rng = draw_held_out(task), random.Random("measure the judge")
    texts = {kind: [write(one, rng) for one in problems] for kind, write in task.texts.items()} | {
        "policy": from_policy
    }
    by_kind = {kind: judge_all(task, passes, problems, some) for kind, some in texts.items()}
    everything = [one for kind, some in by_kind.items() if kind != "malformed" for one in some]
    return {
        "accuracy": agreement(everything),
        **{f"{kind}_accuracy": agreement(some) for kind, some in by_kind.items()},
        "false_pass_rate": fmean(one.passed is True for one in everything if not one.right),
        "false_fail_rate": fmean(one.passed is not True for one in everything if one.right),
        "unparseable_rate": fmean(one.passed is None for one in everything),
    }


def criteria_quality(name: str, model: TinySampler) -> Quality:
    """By phrases that the model was never shown: the share of judgements with the right score of a criterion that names
    the answer's phrase, or one with a common word; of pairs of which the writer says what a perfect one says.
    """
    rng, problems = random.Random("measure criteria"), draw_held_out(SUMS)
    texts = [SUMS.texts["sloppy"](problem, rng) for problem in problems]
    own = [draw_phrase(rng, held_out=True) for _ in problems]
    opened = [open_with([phrase], text) for phrase, text in zip(own, texts, strict=True)]
    if name == RUBRIC_WRITER.name:
        asked = [ask_writer(one.question, *pair) for one, *pair in zip(problems, texts, opened, strict=True)]
        written = model.answer(asked, MAX_CRITIQUE_TOKENS, seed=2)
        wanted = map(write_criteria, texts, opened)
        return {"held_out_exact": fmean(one == other for one, other in zip(written, wanted, strict=True))}
    measured = {}
    for kind, phrases in {"named": own, "near": [draw_phrase(rng, phrase, held_out=True) for phrase in own]}.items():
        rows = [(one, text, says(phrase)) for one, text, phrase in zip(problems, opened, phrases, strict=True)]
        judged = model.answer([ask_criterion(one.question, *row) for one, *row in rows], MAX_CRITIQUE_TOKENS, seed=2)
        right = [parse_score(judge_by(criterion, one, text)) for one, text, criterion in rows]
        measured[f"held_out_{kind}"] = fmean(
            parse_score(one) == score for one, score in zip(judged, right, strict=True)
        )
    return measured


def agreement(judged: Sequence[Judged]) -> float:
    return fmean(one.agrees for one in judged)


def accuracy_without(trick: Trick, passes: Passes) -> float:
    """Agreement of a judge on right, sloppy and corrupted answers without its trick: sloppy work may be longer too."""
    problems, rng = draw_held_out(SUMS), random.Random(0)
    pairs = [(one, SUMS.texts[kind](one, rng)) for kind in ("right", "sloppy", "corrupted") for one in problems]
    without = [(one, text) for one, text in pairs if trick not in find_tricks(one, text)]
    return agreement(judge_all(SUMS, passes, [one for one, _ in without], [text for _, text in without]))
