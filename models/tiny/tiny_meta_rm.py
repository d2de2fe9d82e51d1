"""Makes the tiny meta-RM from a tiny judge, on one CPU thread, and measures it. Knows no cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from models.engines.scorer import ScalarScorer, ScorerSpec
from models.lm.scalar_head import last_of_samples, packed_scores, start_scalar_head
from models.tiny.build import MAX_GRAD_NORM, lr_share, one_thread
from models.tiny.evaluate import MAX_CRITIQUE_TOKENS, Speaker, score_of
from models.tiny.judgements import ScoredText, make_judgements
from models.tiny.problems import PASSING_SCORE, Split, judge_prompt
from models.tiny.recipes import MetaRmRecipe
from models.tiny.tokenizer import encode_content, encode_prompt

NUM_HELD_OUT_ITEMS = 512  # every second one is a scored text
NUM_VOTES = 8
HELD_OUT_SEED = 0
SHARE_SAMPLING = 0.5  # of the time of a build


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledJudgement:
    """A parsed judgement. `right`: whether it passes a right text, or fails a wrong one."""

    item: int
    token_ids: tuple[int, ...]
    right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaRmQuality:
    """Quality over held-out items with eight judgements each: of single judgements, and of majority votes over
    items.
    """

    base_rate: float  # judgements that are right
    accuracy: float  # judgements that the meta-RM classifies correctly
    vote_accuracy: float  # of all eight
    guided_vote_accuracy: float  # of the four with the highest probabilities


def build_meta_rm(recipe: MetaRmRecipe, judge: Path, directory: Path, progress: Callable[[float], None]) -> None:
    """Sample the judge, train a head on its trunk to predict which judgements are right; write a Hugging Face directory
    in bf16.
    """
    with one_thread():
        judgements = ask(judge, "train", recipe.num_items, recipe.num_judgements, recipe.seed)
        progress(SHARE_SAMPLING)
        model = start_scalar_head(str(judge))
        train(model, judgements, recipe, lambda done: progress(SHARE_SAMPLING + (1 - SHARE_SAMPLING) * done))
    model.bfloat16().save_pretrained(directory)
    PreTrainedTokenizerFast.from_pretrained(judge).save_pretrained(directory, save_jinja_files=False)


def ask(judge: Path, split: Split, num_items: int, num_judgements: int, seed: int) -> list[SampledJudgement]:
    """Judgements of the scored texts of tiny://judgements; unparseable ones are left out."""
    speaker = Speaker(judge)
    texts = [item for item in make_judgements(split, num_items, seed) if isinstance(item, ScoredText)]
    asked = [(index, made) for index, made in enumerate(texts) for _ in range(num_judgements)]
    prompts = [judge_prompt(made.problem.question, made.text) for _, made in asked]
    critiques = speaker.answer(prompts, MAX_CRITIQUE_TOKENS, seed)
    found = []
    for (index, made), prompt, critique in zip(asked, prompts, critiques, strict=True):
        if (score := score_of(critique)) is not None:
            ids = encode_prompt(speaker.tokenizer, prompt) + encode_content(speaker.tokenizer, critique)
            ids.append(int(speaker.tokenizer.eos_token_id))
            right = (score >= PASSING_SCORE) == (made.score >= PASSING_SCORE)
            found.append(SampledJudgement(item=index, token_ids=tuple(ids), right=right))
    return found


def train(
    model: PreTrainedModel,
    judgements: Sequence[SampledJudgement],
    recipe: MetaRmRecipe,
    progress: Callable[[float], None],
) -> None:
    """Train by binary cross-entropy, `batch_size` items per step, in a new order in each epoch."""
    by_item: dict[int, list[SampledJudgement]] = {}
    for one in judgements:
        by_item.setdefault(one.item, []).append(one)
    rng, items, waiting = random.Random(recipe.seed), list(by_item), list[int]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(recipe.num_steps):
        while len(waiting) < recipe.batch_size:
            waiting += rng.sample(items, len(items))
        batch, waiting = waiting[: recipe.batch_size], waiting[recipe.batch_size :]
        loss(model, [one for item in batch for one in by_item[item]]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * lr_share(step, recipe)
        optimizer.step()
        optimizer.zero_grad()
        progress((step + 1) / recipe.num_steps)


def loss(model: PreTrainedModel, judgements: Sequence[SampledJudgement]) -> Tensor:
    by_length = sorted(judgements, key=lambda one: len(one.token_ids))
    lengths_S = torch.tensor([len(one.token_ids) for one in by_length])
    ids_T = torch.tensor([token_id for one in by_length for token_id in one.token_ids])
    positions_T = torch.cat([torch.arange(length) for length in lengths_S.tolist()])
    scores_S = last_of_samples(packed_scores(model, ids_T, positions_T, lengths_S), lengths_S)
    return F.binary_cross_entropy_with_logits(scores_S, torch.tensor([float(one.right) for one in by_length]))


def measure_meta_rm(directory: Path, judge: Path) -> MetaRmQuality:
    judgements = ask(judge, "held_out", NUM_HELD_OUT_ITEMS, NUM_VOTES, HELD_OUT_SEED)
    scores = ScalarScorer(ScorerSpec(path=str(directory))).scores([one.token_ids for one in judgements])
    by_item: dict[int, list[tuple[float, SampledJudgement]]] = {}
    for score, one in zip(scores, judgements, strict=True):
        by_item.setdefault(one.item, []).append((score, one))
    best = [sorted(some, key=lambda pair: -pair[0])[: max(1, len(some) // 2)] for some in by_item.values()]
    return MetaRmQuality(
        base_rate=fmean(one.right for one in judgements),
        accuracy=fmean((score > 0) == one.right for score, one in zip(scores, judgements, strict=True)),
        vote_accuracy=fmean(majority_right(some) for some in by_item.values()),
        guided_vote_accuracy=fmean(majority_right(some) for some in best),
    )


def majority_right(votes: Sequence[tuple[float, SampledJudgement]]) -> float:
    """A tie counts half."""
    share = fmean(one.right for _, one in votes)
    return 0.5 if share == 0.5 else float(share > 0.5)
