"""Measures tiny policies in episodes, and the judge of their calls, on held-out problems."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from models.tiny.calculator import (
    answers_right,
    check_calls,
    judge_prompt_of_view,
    parse_view,
)
from models.tiny.dialogues import careless_view, corrupted_view, right_view
from models.tiny.evaluate import HELD_OUT_SEED, NUM_PROBLEMS, PolicyQuality, Speaker, score_of
from models.tiny.malformed_views import malformed_view
from models.tiny.play_episodes import play_in_store, play_with_calculator, view_of
from models.tiny.problems import LARGE, PASSING_SCORE, Problem, make_problems
from models.tiny.walks import Walk, final, make_walks

MAX_CRITIQUE_TOKENS = 128
CHECKED = re.compile(r" (ok|no)(?=[;.])", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallJudgeQuality:
    """At temperature 1, over the policy's, careless, corrupted and right episodes in equal parts; malformed ones are
    separate. A critique without a score agrees with nothing, and has the score 0.
    """

    accuracy: float  # the judge passes an episode if and only if its answer is right
    policy_accuracy: float  # the same over only the policy's episodes
    malformed_accuracy: float
    auc: float  # probability that a right episode has the higher score than a wrong one; ties count half
    policy_auc: float
    turn_accuracy: float  # of the verdicts on single calls; a missing verdict is wrong
    false_pass_rate: float
    false_fail_rate: float
    unparseable_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedView:
    """An episode as the judge saw it, and its critique."""

    problem: Problem
    view: str
    critique: str

    @property
    def score(self) -> int:
        return score_of(self.critique) or 0

    @property
    def right(self) -> bool:
        return answers_right(self.problem, self.view)

    @property
    def agrees(self) -> bool:
        return self.score > 0 and (self.score >= PASSING_SCORE) == self.right

    @property
    def turns(self) -> list[bool]:
        """For each call, whether the judge's verdict on it is right."""
        episode = parse_view(self.view)
        if episode is None:
            return []
        verdicts = [found == "ok" for found in CHECKED.findall(self.critique)]
        truths = [checked.ok for checked in check_calls(self.problem, episode)]
        return [at < len(verdicts) and verdicts[at] == truth for at, truth in enumerate(truths)]


def measure_calculator_policy(directory: Path) -> PolicyQuality:
    problems, policy = held_out_sums(), Speaker(directory)
    return PolicyQuality(
        true_accuracy=calculator_accuracy(policy, problems, greedy=False),
        true_accuracy_greedy=calculator_accuracy(policy, problems, greedy=True),
    )


def calculator_accuracy(policy: Speaker, problems: Sequence[Problem], greedy: bool) -> float:
    views = policy_views(policy, problems, seed=0, greedy=greedy)
    return fmean(answers_right(problem, view) for problem, view in zip(problems, views, strict=True))


def measure_walking_policy(directory: Path) -> PolicyQuality:
    walks, policy = make_walks("held_out", NUM_PROBLEMS, HELD_OUT_SEED), Speaker(directory)
    return PolicyQuality(
        true_accuracy=walk_accuracy(policy, walks, greedy=False),
        true_accuracy_greedy=walk_accuracy(policy, walks, greedy=True),
    )


def walk_accuracy(policy: Speaker, walks: Sequence[Walk], greedy: bool) -> float:
    played = play_in_store(policy, walks, seed=0, greedy=greedy)
    return fmean(said[-1].text == final(walk) for walk, said in zip(walks, played, strict=True))


def measure_judge_of_calls(directory: Path, policy_directory: Path) -> CallJudgeQuality:
    problems, judge, rng = held_out_sums(), Speaker(directory), random.Random("measure the judge")
    from_policy = judge_views(judge, problems, policy_views(Speaker(policy_directory), problems, seed=1))
    written = [
        judge_views(judge, problems, [write(problem, rng) for problem in problems])
        for write in (careless_view, corrupted_view, right_view)
    ]
    malformed = judge_views(judge, problems, [malformed_view(problem, rng) for problem in problems])
    everything = [*from_policy, *(one for some in written for one in some)]
    return CallJudgeQuality(
        accuracy=fmean(one.agrees for one in everything),
        policy_accuracy=fmean(one.agrees for one in from_policy),
        malformed_accuracy=fmean(one.agrees for one in malformed),
        auc=auc(everything),
        policy_auc=auc(from_policy),
        turn_accuracy=fmean(verdict for one in everything for verdict in one.turns),
        false_pass_rate=fmean(one.score >= PASSING_SCORE for one in everything if not one.right),
        false_fail_rate=fmean(one.score < PASSING_SCORE for one in everything if one.right),
        unparseable_rate=fmean(one.score == 0 for one in everything),
    )


def held_out_sums() -> tuple[Problem, ...]:
    return make_problems("held_out", NUM_PROBLEMS, HELD_OUT_SEED, LARGE)


def policy_views(policy: Speaker, problems: Sequence[Problem], seed: int, greedy: bool = False) -> list[str]:
    return [view_of(said) for said in play_with_calculator(policy, problems, seed, greedy)]


def judge_views(judge: Speaker, problems: Sequence[Problem], views: Sequence[str], seed: int = 2) -> list[JudgedView]:
    prompts = [judge_prompt_of_view(problem.question, view) for problem, view in zip(problems, views, strict=True)]
    critiques = judge.answer(prompts, MAX_CRITIQUE_TOKENS, seed)
    return [
        JudgedView(problem=problem, view=view, critique=critique)
        for problem, view, critique in zip(problems, views, critiques, strict=True)
    ]


def auc(judged: Sequence[JudgedView]) -> float:
    """The area under the ROC curve of score against truth."""
    right = [one.score for one in judged if one.right]
    wrong = [one.score for one in judged if not one.right]
    return fmean((a > b) + 0.5 * (a == b) for a in right for b in wrong)
