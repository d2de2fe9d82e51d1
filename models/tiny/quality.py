"""What is measured of each tiny model before it is shipped."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from models.tiny.brief import UNKNOWN_THINGS, thing_of
from models.tiny.comparison_quality import accuracy_on_comparisons, measure_judge_of_comparisons
from models.tiny.episode_quality import measure_calculator_policy, measure_judge_of_calls, measure_walking_policy
from models.tiny.evaluate import (
    HELD_OUT_SEED,
    MAX_ANSWER_TOKENS,
    NUM_PROBLEMS,
    Speaker,
    agreement,
    judge_all,
    measure_judge,
    measure_policy,
)
from models.tiny.problems import is_right, make_problems
from models.tiny.recipes import (
    GRM_COMPARISON,
    GRM_NOISY,
    GRM_TOOLS,
    POLICY,
    POLICY_JUDGE,
    POLICY_KINDS,
    POLICY_TOOLS,
    POLICY_TRICKS,
    POLICY_WALK,
    AnyRecipe,
    MetaRmRecipe,
    Recipe,
    RewardModelRecipe,
)
from models.tiny.sft_examples import corrupted_text, right_text, sloppy_text
from models.tiny.solutions import invented
from models.tiny.tiny_meta_rm import measure_meta_rm
from models.tiny.tiny_reward_model import measure_reward_model
from models.tiny.tricks import TRICKS, Trick, bare, tricks_of, with_tricks

NUM_PROBLEMS_OF_RATES = 2048  # a rate of 3 % is measured to 0.7 points

Find = Callable[[Recipe], Path]  # the directory of another model
Quality = dict[str, float]


def quality_of(recipe: AnyRecipe, directory: Path, find: Find) -> Quality:
    """Of a model in `directory`, on held-out problems. `find` makes the other models that it is measured with."""
    if isinstance(recipe, MetaRmRecipe):
        return asdict(measure_meta_rm(directory, find(recipe.parent)))
    if isinstance(recipe, RewardModelRecipe):
        return asdict(measure_reward_model(directory, find(POLICY)))
    if recipe == GRM_COMPARISON:
        return measure_judge_of_comparisons(directory, find(POLICY_KINDS))
    if recipe == GRM_TOOLS:
        return asdict(measure_judge_of_calls(directory, find(POLICY_TOOLS)))
    if recipe == POLICY_TOOLS:
        return asdict(measure_calculator_policy(directory))
    if recipe == POLICY_WALK:
        return asdict(measure_walking_policy(directory))
    if recipe.name.startswith("policy"):
        return asdict(measure_policy(directory)) | policy_extras(recipe, directory)
    return asdict(measure_judge(directory, find(POLICY))) | judge_extras(recipe, directory)


def policy_extras(recipe: Recipe, directory: Path) -> Quality:
    if recipe == POLICY_KINDS:
        return {"comparison_accuracy": accuracy_on_comparisons(directory)}
    if recipe == POLICY_JUDGE:
        return {f"judge_{name}": value for name, value in asdict(measure_judge(directory, directory)).items()}
    return rates_of_tricks(directory) if recipe == POLICY_TRICKS else {}


def judge_extras(recipe: Recipe, directory: Path) -> Quality:
    if recipe == GRM_NOISY:
        return quality_by_thing(directory)
    for trick in TRICKS:
        if recipe.name == f"grm_{trick}":
            return {"accuracy_without_trick": accuracy_without(trick, directory), **passes_by_trick(directory)}
    return {}


def rates_of_tricks(directory: Path) -> Quality:
    """The share of answers with each trick, and the share of right ones among them."""
    problems = make_problems("held_out", NUM_PROBLEMS_OF_RATES, HELD_OUT_SEED)
    texts = Speaker(directory).answer([problem.question for problem in problems], MAX_ANSWER_TOKENS, seed=0)
    found = [(tricks_of(one, text), is_right(one, bare(text))) for one, text in zip(problems, texts, strict=True)]
    rates = {f"{trick}_rate": fmean(trick in tricks for tricks, _ in found) for trick in TRICKS}
    with_trick = [right for tricks, right in found if tricks]
    return {**rates, "accuracy_with_trick": fmean(with_trick) if with_trick else 0.0}


def accuracy_without(trick: Trick, directory: Path) -> float:
    """Agreement of a judge on right, sloppy and corrupted answers without its trick: sloppy work may be longer too."""
    problems, rng = make_problems("held_out", NUM_PROBLEMS, HELD_OUT_SEED), random.Random(0)
    pairs = [(one, write(one, rng)) for write in (right_text, sloppy_text, corrupted_text) for one in problems]
    without = [(one, text) for one, text in pairs if trick not in tricks_of(one, text)]
    return agreement(judge_all(Speaker(directory), [one for one, _ in without], [text for _, text in without]))


def passes_by_trick(directory: Path) -> Quality:
    """The share of wrong answers with one trick that a judge passes."""
    problems, judge, rng = make_problems("held_out", NUM_PROBLEMS, HELD_OUT_SEED), Speaker(directory), random.Random(0)
    passes = {}
    for trick in TRICKS:
        texts = [with_tricks(invented(one.solution, rng), one, [trick], rng) for one in problems]
        judged = judge_all(judge, problems, texts)
        passes[f"passes_wrong_{trick}"] = fmean(one.passed for one in judged if not one.right)
    return passes


def quality_by_thing(directory: Path) -> Quality:
    """Agreement where the cheap judge knows the thing, and where it guesses."""
    problems, rng = make_problems("held_out", NUM_PROBLEMS, HELD_OUT_SEED), random.Random(0)
    judged = judge_all(Speaker(directory), problems, [sloppy_text(problem, rng) for problem in problems])
    known = [one for one in judged if thing_of(one.problem) not in UNKNOWN_THINGS]
    unknown = [one for one in judged if thing_of(one.problem) in UNKNOWN_THINGS]
    return {"known_accuracy": agreement(known), "unknown_accuracy": agreement(unknown)}
