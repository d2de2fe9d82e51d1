"""What is measured of tiny models of comparisons on held-out ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from models.tiny.comparison_examples import careless_comparison
from models.tiny.comparisons import (
    Comparison,
    compares_right,
    corrupted_comparison,
    invented_comparison,
    make_comparisons,
)
from models.tiny.evaluate import (
    HELD_OUT_SEED,
    MAX_ANSWER_TOKENS,
    MAX_CRITIQUE_TOKENS,
    NUM_PROBLEMS,
    Speaker,
    score_of,
)
from models.tiny.problems import PASSING_SCORE, judge_prompt


def accuracy_on_comparisons(directory: Path) -> float:
    """The share of held-out comparisons that a policy answers right at temperature 1."""
    made = make_comparisons("held_out", NUM_PROBLEMS, HELD_OUT_SEED)
    texts = Speaker(directory).answer([one.question for one in made], MAX_ANSWER_TOKENS, seed=0)
    return fmean(compares_right(one, text) for one, text in zip(made, texts, strict=True))


def measure_judge_of_comparisons(directory: Path, policy_directory: Path) -> dict[str, float]:
    """Agreement of a judge with the rule on right, careless, corrupted and invented answers and on those of a policy;
    `accuracy` is their mean.
    """
    made, rng = make_comparisons("held_out", NUM_PROBLEMS, HELD_OUT_SEED), random.Random(0)
    judge, questions = Speaker(directory), [one.question for one in made]
    texts = {
        "right_accuracy": [one.solution for one in made],
        "careless_accuracy": [careless_comparison(one, rng) for one in made],
        "corrupted_accuracy": [corrupted_comparison(one, rng) for one in made],
        "invented_accuracy": [invented_comparison(one, rng) for one in made],
        "policy_accuracy": Speaker(policy_directory).answer(questions, MAX_ANSWER_TOKENS, seed=1),
    }
    parts = {name: agreement_on_comparisons(judge, made, some) for name, some in texts.items()}
    return {"accuracy": fmean(parts.values()), **parts}


def agreement_on_comparisons(judge: Speaker, made: Sequence[Comparison], texts: Sequence[str]) -> float:
    """The share of texts that a judge passes if and only if they are right; a critique without a score never agrees."""
    prompts = [judge_prompt(one.question, text) for one, text in zip(made, texts, strict=True)]
    scores = [score_of(critique) for critique in judge.answer(prompts, MAX_CRITIQUE_TOKENS, seed=2)]
    return fmean(
        score is not None and (score >= PASSING_SCORE) == compares_right(one, text)
        for one, text, score in zip(made, texts, scores, strict=True)
    )
