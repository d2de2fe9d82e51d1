"""Makes the tiny models with a scalar head on one CPU thread: the meta-RM and the reward model; measures the first."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForSequenceClassification
from transformers.utils import logging as transformers_logging

from grmpipe.models.engines.scorer import ScalarScorer, ScorerSpec
from grmpipe.models.lm.scalar_head import compute_packed_scores, last_of_samples, start_scalar_head
from grmpipe.tiny.build import MAX_GRAD_NORM, lr_share, one_thread
from grmpipe.tiny.judgements import RankedTexts, ScoredText, make_judgements
from grmpipe.tiny.problems import PASSING_SCORE, Problem, Split, is_right, judge_prompt, parse_score
from grmpipe.tiny.recipes import MetaRmRecipe, ScalarRecipe
from grmpipe.tiny.tiny_sampler import MAX_CRITIQUE_TOKENS, TinySampler
from grmpipe.tiny.tokenizer import TURN_END, encode_content, encode_prompt

NUM_HELD_OUT_ITEMS = 512  # every second one is a scored text
NUM_VOTES = 8
HELD_OUT_SEED = 0
AFTER_ANSWER = f"{TURN_END}\n"
NUM_BATCHES_PER_SORT = 16  # texts of this many batches are sorted by length before they are split


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A text as the model reads it, and the label of its last token. item: that it belongs to."""

    token_ids: tuple[int, ...]
    right: bool
    item: int = 0


Loss = Callable[[Any, Sequence[Read]], Tensor]


def build_meta_rm(recipe: MetaRmRecipe, judge: Path, directory: Path) -> None:
    """Sample the judge, train a head on its trunk to predict which judgements are right; write a Hugging Face directory
    in bf16.
    """
    with one_thread():
        judgements = ask(judge, "train", recipe.num_items, recipe.num_judgements, recipe.seed)
        model = start_scalar_head(str(judge))
        train(model, batches_of_items(judgements, recipe), compute_packed_loss, recipe)
    write(model, judge, directory)


def build_reward_model(recipe: ScalarRecipe, parent: Path, directory: Path) -> None:
    """Train a head on the parent's trunk to say whether an answer is right; write a Hugging Face directory of a
    sequence classifier with one label, in bf16.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # the head is new, as it should be
    with one_thread():
        torch.manual_seed(recipe.seed)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(parent)
        model = Qwen3ForSequenceClassification.from_pretrained(parent, num_labels=1, dtype=torch.float32)
        train(model, batches_of_answers(tokenizer, recipe), compute_padded_loss, recipe)
    write(model, parent, directory)


def train(model: PreTrainedModel, batches: Iterable[Sequence[Read]], loss: Loss, recipe: ScalarRecipe) -> None:
    """Train by binary cross-entropy, so that the score is the log-odds that the text is right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step, batch in enumerate(batches):
        loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * lr_share(step, recipe)
        optimizer.step()
        optimizer.zero_grad()


def write(model: PreTrainedModel, parent: Path, directory: Path) -> None:
    model.bfloat16().save_pretrained(directory)
    PreTrainedTokenizerFast.from_pretrained(parent).save_pretrained(directory, save_jinja_files=False)


# -- the meta-RM -------------------------------------------------------------------------------------------------------


def ask(judge: Path, split: Split, num_items: int, num_judgements: int, seed: int) -> list[Read]:
    """Judgements of the scored texts of tiny://judgements, and whether each passes a right text or fails a wrong one;
    unparseable ones are left out.
    """
    sampler = TinySampler(judge)
    texts = [item for item in make_judgements(split, num_items, seed) if isinstance(item, ScoredText)]
    asked = [(index, made) for index, made in enumerate(texts) for _ in range(num_judgements)]
    prompts = [judge_prompt(made.problem.question, made.text) for _, made in asked]
    critiques = sampler.answer(prompts, MAX_CRITIQUE_TOKENS, seed)
    found = []
    for (index, made), prompt, critique in zip(asked, prompts, critiques, strict=True):
        if (score := parse_score(critique)) is not None:
            ids = encode_prompt(sampler.tokenizer, prompt) + encode_content(sampler.tokenizer, critique)
            ids.append(int(sampler.tokenizer.eos_token_id))
            right = (score >= PASSING_SCORE) == (made.score >= PASSING_SCORE)
            found.append(Read(item=index, token_ids=tuple(ids), right=right))
    return found


def batches_of_items(judgements: Sequence[Read], recipe: MetaRmRecipe) -> Iterator[list[Read]]:
    """`batch_size` items per step, in a new order in each epoch."""
    by_item: dict[int, list[Read]] = {}
    for one in judgements:
        by_item.setdefault(one.item, []).append(one)
    rng, items, waiting = random.Random(recipe.seed), list(by_item), list[int]()
    for _ in range(recipe.num_steps):
        while len(waiting) < recipe.batch_size:
            waiting += rng.sample(items, len(items))
        batch, waiting = waiting[: recipe.batch_size], waiting[recipe.batch_size :]
        yield [one for item in batch for one in by_item[item]]


def compute_packed_loss(model: PreTrainedModel, batch: Sequence[Read]) -> Tensor:
    by_length = sorted(batch, key=lambda one: len(one.token_ids))
    lengths_S = torch.tensor([len(one.token_ids) for one in by_length])
    ids_T = torch.tensor([token_id for one in by_length for token_id in one.token_ids])
    positions_T = torch.cat([torch.arange(length) for length in lengths_S.tolist()])
    scores_S = last_of_samples(compute_packed_scores(model, ids_T, positions_T, lengths_S), lengths_S)
    return F.binary_cross_entropy_with_logits(scores_S, torch.tensor([float(one.right) for one in by_length]))


def measure_meta_rm(directory: Path, judge: Path) -> dict[str, float]:
    """Over held-out items with eight judgements each: the shares of judgements that are right and that the meta-RM
    classifies correctly, and the accuracy of majority votes of all eight, and of the four with the highest
    probabilities.
    """
    judgements = ask(judge, "held_out", NUM_HELD_OUT_ITEMS, NUM_VOTES, HELD_OUT_SEED)
    scores = ScalarScorer(ScorerSpec(path=str(directory))).scores([one.token_ids for one in judgements])
    by_item: dict[int, list[tuple[float, Read]]] = {}
    for score, one in zip(scores, judgements, strict=True):
        by_item.setdefault(one.item, []).append((score, one))
    best = [sorted(some, key=lambda pair: -pair[0])[: max(1, len(some) // 2)] for some in by_item.values()]
    return {
        "base_rate": fmean(one.right for one in judgements),
        "accuracy": fmean((score > 0) == one.right for score, one in zip(scores, judgements, strict=True)),
        "vote_accuracy": fmean(map(majority_right, by_item.values())),
        "guided_vote_accuracy": fmean(map(majority_right, best)),
    }


def majority_right(votes: Sequence[tuple[float, Read]]) -> float:
    """A tie counts half."""
    share = fmean(one.right for _, one in votes)
    return 0.5 if share == 0.5 else float(share > 0.5)


# -- the reward model --------------------------------------------------------------------------------------------------


def batches_of_answers(tokenizer: PreTrainedTokenizerFast, recipe: ScalarRecipe) -> Iterator[list[Read]]:
    """Batches of texts of similar length, in a random order. Each text is seen once."""
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
        chunk = [encode_answer(tokenizer, *pair) for pair in pairs[start : start + NUM_BATCHES_PER_SORT * size]]
        chunk.sort(key=lambda answer: len(answer.token_ids))
        split = [chunk[at : at + size] for at in range(0, len(chunk), size)]
        yield from rng.sample(split, len(split))


def encode_answer(tokenizer: PreTrainedTokenizerFast, problem: Problem, text: str) -> Read:
    """The question, then the text as the assistant's turn."""
    token_ids = (
        *encode_prompt(tokenizer, problem.question),
        *encode_content(tokenizer, text),
        *tokenizer.encode(AFTER_ANSWER, add_special_tokens=False),
    )
    return Read(token_ids=token_ids, right=is_right(problem, text))


def compute_padded_loss(model: Qwen3ForSequenceClassification, answers: Sequence[Read]) -> Tensor:
    longest = max(len(answer.token_ids) for answer in answers)
    pad_id = model.config.pad_token_id
    assert pad_id is not None, "the tiny tokenizer has a padding token"
    ids_BT = torch.tensor([answer.token_ids + (pad_id,) * (longest - len(answer.token_ids)) for answer in answers])
    scores_B = model(input_ids=ids_BT, attention_mask=torch.ne(ids_BT, pad_id).long()).logits[:, 0]
    return F.binary_cross_entropy_with_logits(scores_B, torch.tensor([float(answer.right) for answer in answers]))


def passed_by_scores(directory: Path, problems: Sequence[Problem], texts: Sequence[str]) -> list[bool]:
    """For each text whether the model passes it: its score is positive."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    answers = [encode_answer(tokenizer, problem, text) for problem, text in zip(problems, texts, strict=True)]
    scores = ScalarScorer(ScorerSpec(path=str(directory))).scores([answer.token_ids for answer in answers])
    return [score > 0 for score in scores]
