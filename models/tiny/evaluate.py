"""Measures tiny models on held-out problems."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import correlation, fmean

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from models.tiny.malformed import malformed_text
from models.tiny.problems import PASSING_SCORE, Problem, is_right, judge_prompt, make_problems, score_label
from models.tiny.solutions import corrupted_solution
from models.tiny.tokenizer import encode_prompt
from models.tiny.tricks import bare

NUM_PROBLEMS = 512
HELD_OUT_SEED = 20_000
MAX_ANSWER_TOKENS = 64
MAX_CRITIQUE_TOKENS = 128
BATCH_SIZE = 128
SCORE = re.compile(r"\nScore: (\d{1,2})\Z", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyQuality:
    """Shares of held-out problems answered right."""

    true_accuracy: float  # sampled at temperature 1
    true_accuracy_greedy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeQuality:
    """At temperature 1, over the policy's, corrupted and right answers in equal parts; malformed texts are separate.

    A critique without a score agrees with nothing.
    """

    accuracy: float  # the judge passes an answer if and only if its final answer is right
    policy_accuracy: float  # the same over only the policy's answers
    malformed_accuracy: float
    false_pass_rate: float  # of wrong answers
    false_fail_rate: float  # of right answers
    correlation: float  # of scores with the exact labels
    unparseable_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """An answer and the score that a judge gave; None: no score."""

    problem: Problem
    text: str
    score: int | None

    @property
    def passed(self) -> bool:
        return self.score is not None and self.score >= PASSING_SCORE

    @property
    def right(self) -> bool:
        return is_right(self.problem, bare(self.text))

    @property
    def agrees(self) -> bool:
        return self.score is not None and self.passed == self.right


class Speaker:
    """A tiny model that answers user messages in batches."""

    def __init__(self, directory: Path) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)

    def answer(self, contents: Sequence[str], max_new_tokens: int, seed: int, greedy: bool = False) -> list[str]:
        """One answer per message, at temperature 1 or greedy. `seed` makes it repeatable."""
        torch.manual_seed(seed)
        prompts = [encode_prompt(self.tokenizer, content) for content in contents]
        answers = [""] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
        for start in range(0, len(order), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            texts = self.generate([prompts[row] for row in rows], max_new_tokens, greedy)
            for row, text in zip(rows, texts, strict=True):
                answers[row] = text
        return answers

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], max_new_tokens: int, greedy: bool) -> list[str]:
        padded = self.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        # top_k=0: the library's default of 50 would sample from another distribution than the policy's.
        how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        output = self.model.generate(**padded, max_new_tokens=max_new_tokens, **how)
        return self.tokenizer.batch_decode(output[:, padded["input_ids"].shape[1] :], skip_special_tokens=True)


def measure_policy(directory: Path) -> PolicyQuality:
    problems = make_problems("held_out", NUM_PROBLEMS, HELD_OUT_SEED)
    policy = Speaker(directory)
    return PolicyQuality(
        true_accuracy=accuracy_of(policy, problems, greedy=False),
        true_accuracy_greedy=accuracy_of(policy, problems, greedy=True),
    )


def accuracy_of(policy: Speaker, problems: Sequence[Problem], greedy: bool) -> float:
    texts = policy.answer([problem.question for problem in problems], MAX_ANSWER_TOKENS, seed=0, greedy=greedy)
    return fmean(is_right(problem, bare(text)) for problem, text in zip(problems, texts, strict=True))


def measure_judge(directory: Path, policy_directory: Path) -> JudgeQuality:
    problems = make_problems("held_out", NUM_PROBLEMS, HELD_OUT_SEED)
    judge, rng = Speaker(directory), random.Random("measure the judge")
    questions = [problem.question for problem in problems]
    from_policy = judge_all(judge, problems, Speaker(policy_directory).answer(questions, MAX_ANSWER_TOKENS, seed=1))
    corrupted = judge_all(judge, problems, [str(corrupted_solution(problem, rng)) for problem in problems])
    right = judge_all(judge, problems, [str(problem.solution) for problem in problems])
    malformed = judge_all(judge, problems, [malformed_text(problem, rng) for problem in problems])
    everything = [*from_policy, *corrupted, *right]
    return JudgeQuality(
        accuracy=agreement(everything),
        policy_accuracy=agreement(from_policy),
        malformed_accuracy=agreement(malformed),
        false_pass_rate=fmean(one.passed for one in everything if not one.right),
        false_fail_rate=fmean(not one.passed for one in everything if one.right),
        correlation=correlation_with_labels(everything),
        unparseable_rate=fmean(one.score is None for one in everything),
    )


def correlation_with_labels(judged: Sequence[Judged]) -> float:
    pairs = [(one.score, score_label(one.problem, bare(one.text))) for one in judged if one.score is not None]
    scores, labels = zip(*pairs, strict=True)
    return correlation(scores, labels)


def agreement(judged: Sequence[Judged]) -> float:
    return fmean(one.agrees for one in judged)


def judge_all(judge: Speaker, problems: Sequence[Problem], texts: Sequence[str], seed: int = 2) -> list[Judged]:
    prompts = [judge_prompt(problem.question, text) for problem, text in zip(problems, texts, strict=True)]
    critiques = judge.answer(prompts, MAX_CRITIQUE_TOKENS, seed)
    return [
        Judged(problem=problem, text=text, score=score_of(critique))
        for problem, text, critique in zip(problems, texts, critiques, strict=True)
    ]


def score_of(critique: str) -> int | None:
    match = SCORE.search(critique)
    return int(match[1]) if match and 1 <= int(match[1]) <= 10 else None
