"""Makes the tiny scalar reward model on one CPU thread, and measures it. Knows no cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3ForSequenceClassification
from transformers.utils import logging as transformers_logging

from models.engines.scorer import ScalarScorer, ScorerSpec
from models.tiny.build import MAX_GRAD_NORM, lr_share, one_thread
from models.tiny.evaluate import HELD_OUT_SEED, MAX_ANSWER_TOKENS, NUM_PROBLEMS, Speaker
from models.tiny.judgements import RankedTexts, make_judgements
from models.tiny.malformed import malformed_text
from models.tiny.problems import Problem, is_right, make_problems
from models.tiny.recipes import RewardModelRecipe
from models.tiny.solutions import corrupted_solution
from models.tiny.tokenizer import TURN_END, encode_content, encode_prompt

AFTER_ANSWER = f"{TURN_END}\n"
NUM_BATCHES_PER_SORT = 16  # texts of this many batches are sorted by length before they are split


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A text that answers a problem, as the reward model reads it: the question, then the text as the assistant's
    turn.
    """

    token_ids: tuple[int, ...]
    right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelQuality:
    """Quality over the policy's, corrupted and right answers in equal parts; malformed texts are separate. A positive
    score passes an answer.
    """

    accuracy: float  # the model passes an answer if and only if its final answer is right
    policy_accuracy: float  # the same over only the policy's answers
    malformed_accuracy: float
    false_pass_rate: float  # of wrong answers
    false_fail_rate: float  # of right answers


def build_reward_model(
    recipe: RewardModelRecipe, parent: Path, directory: Path, progress: Callable[[float], None]
) -> None:
    """Train a head on the parent's trunk to say whether an answer is right; write a Hugging Face directory of a
    sequence classifier with one label, in bf16.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # the head is new, as it should be
    with one_thread():
        torch.manual_seed(recipe.seed)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(parent)
        model = Qwen3ForSequenceClassification.from_pretrained(parent, num_labels=1, dtype=torch.float32)
        train(model, tokenizer, recipe, progress)
    model.bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory, save_jinja_files=False)


def train(
    model: Qwen3ForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    recipe: RewardModelRecipe,
    progress: Callable[[float], None],
) -> None:
    """Train by binary cross-entropy, so that the score is the log-odds that the answer is right. Each text is seen
    once.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step, batch in enumerate(batches(tokenizer, recipe)):
        loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * lr_share(step, recipe)
        optimizer.step()
        optimizer.zero_grad()
        progress((step + 1) / recipe.num_steps)


def batches(tokenizer: PreTrainedTokenizerFast, recipe: RewardModelRecipe) -> Iterator[list[Answer]]:
    """Batches of texts of similar length, in a random order."""
    rng, size = random.Random(recipe.seed), recipe.batch_size
    # An item has at least one text.
    items = make_judgements("train", recipe.num_steps * size, recipe.seed)
    pairs = [
        (item.problem, text)
        for item in items
        for text in (item.texts if isinstance(item, RankedTexts) else (item.text,))
    ]
    rng.shuffle(pairs)
    pairs = pairs[: recipe.num_steps * size]
    for start in range(0, len(pairs), NUM_BATCHES_PER_SORT * size):
        chunk = [answer_of(tokenizer, *pair) for pair in pairs[start : start + NUM_BATCHES_PER_SORT * size]]
        chunk.sort(key=lambda answer: len(answer.token_ids))
        split = [chunk[at : at + size] for at in range(0, len(chunk), size)]
        yield from rng.sample(split, len(split))


def answer_of(tokenizer: PreTrainedTokenizerFast, problem: Problem, text: str) -> Answer:
    token_ids = (
        *encode_prompt(tokenizer, problem.question),
        *encode_content(tokenizer, text),
        *tokenizer.encode(AFTER_ANSWER, add_special_tokens=False),
    )
    return Answer(token_ids=token_ids, right=is_right(problem, text))


def loss(model: Qwen3ForSequenceClassification, answers: Sequence[Answer]) -> Tensor:
    longest = max(len(answer.token_ids) for answer in answers)
    pad_id = model.config.pad_token_id
    assert pad_id is not None, "the tiny tokenizer has a padding token"
    ids_BT = torch.tensor([answer.token_ids + (pad_id,) * (longest - len(answer.token_ids)) for answer in answers])
    scores_B = model(input_ids=ids_BT, attention_mask=torch.ne(ids_BT, pad_id).long()).logits[:, 0]
    return F.binary_cross_entropy_with_logits(scores_B, torch.tensor([float(answer.right) for answer in answers]))


def measure_reward_model(directory: Path, policy_directory: Path) -> RewardModelQuality:
    problems, rng = make_problems("held_out", NUM_PROBLEMS, HELD_OUT_SEED), random.Random("measure the judge")
    policy = Speaker(policy_directory)
    sampled = policy.answer([problem.question for problem in problems], MAX_ANSWER_TOKENS, seed=1)
    from_policy = judged(directory, problems, sampled)
    corrupted = judged(directory, problems, [str(corrupted_solution(problem, rng)) for problem in problems])
    right = judged(directory, problems, [str(problem.solution) for problem in problems])
    malformed = judged(directory, problems, [malformed_text(problem, rng) for problem in problems])
    everything = [*from_policy, *corrupted, *right]
    return RewardModelQuality(
        accuracy=agreement(everything),
        policy_accuracy=agreement(from_policy),
        malformed_accuracy=agreement(malformed),
        false_pass_rate=fmean(passed for passed, is_right in everything if not is_right),
        false_fail_rate=fmean(not passed for passed, is_right in everything if is_right),
    )


def judged(directory: Path, problems: Sequence[Problem], texts: Sequence[str]) -> list[tuple[bool, bool]]:
    """For each text whether the model passes it, and whether it is right."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    answers = [answer_of(tokenizer, problem, text) for problem, text in zip(problems, texts, strict=True)]
    scores = ScalarScorer(ScorerSpec(path=str(directory))).scores([answer.token_ids for answer in answers])
    return [(score > 0, answer.right) for score, answer in zip(scores, answers, strict=True)]


def agreement(judged: Sequence[tuple[bool, bool]]) -> float:
    return fmean(passed == is_right for passed, is_right in judged)
