"""Trains a tiny model from its recipe on one CPU thread."""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from grmpipe.tiny.examples import Example, draw_examples, to_messages
from grmpipe.tiny.recipes import AnyRecipe, Recipe, Shape
from grmpipe.tiny.tokenizer import MAX_POSITIONS, build_tokenizer, encode_message

MAX_GRAD_NORM = 1.0
NUM_BATCHES_PER_BUCKET_SORT = 16  # examples of this many batches are sorted by length before they are split


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """An example as ids. `imitated`: for each id whether it is the assistant's, with its end-of-turn token."""

    ids: tuple[int, ...]
    imitated: tuple[bool, ...]


def build(recipe: Recipe, parent: Path | None, directory: Path) -> None:
    """Train `recipe` from the weights in `parent` (None: random ones); write a Hugging Face directory in bf16."""
    transformers_logging.disable_progress_bar()
    with one_thread():
        tokenizer = build_tokenizer()
        torch.manual_seed(recipe.seed)
        model = load(parent) if parent else create(recipe.shape, tokenizer)
        train(model, tokenizer, recipe)
    model.bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory, save_jinja_files=False)


@contextmanager
def one_thread() -> Iterator[None]:
    """Context: at this size a second thread costs more than it saves, and sums in another order."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def load(directory: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)


def create(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
    """Imitation: cross-entropy on response tokens, each example seen once."""
    examples = draw_examples(recipe.mixture, recipe.num_steps * recipe.batch_size, recipe.seed)
    encoded = [encode(tokenizer, example) for example in examples]
    optimizers = make_optimizers(model, recipe.lr)
    schedules = [LambdaLR(optimizer, lambda step: lr_share(step, recipe)) for optimizer in optimizers]
    model.train()
    for batch in batches(encoded, recipe.batch_size, random.Random(recipe.seed)):
        response_loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        model.zero_grad()


def encode(tokenizer: PreTrainedTokenizerFast, example: Example) -> Encoded:
    ids: list[int] = []
    imitated: list[bool] = []
    for message in to_messages(example):
        before, content = encode_message(tokenizer, message, is_first=not ids)
        ids += [*before, *content]
        imitated += [False] * len(before) + [message.role == "assistant"] * len(content)
    return Encoded(ids=tuple(ids), imitated=tuple(imitated))


def make_optimizers(model: Qwen3ForCausalLM, lr: float) -> tuple[Optimizer, Optimizer]:
    """Muon for the matrices of the layers (with AdamW alone they learn to judge far slower), AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return muon, AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


def lr_share(step: int, recipe: AnyRecipe) -> float:
    """Linear warm-up, then a cosine down to 0."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.num_steps - recipe.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * done))


def batches(encoded: Sequence[Encoded], batch_size: int, rng: random.Random) -> Iterator[Sequence[Encoded]]:
    """Batches of similar lengths, in random order within each stretch."""
    stretch = batch_size * NUM_BATCHES_PER_BUCKET_SORT
    for start in range(0, len(encoded), stretch):
        by_length = sorted(encoded[start : start + stretch], key=lambda example: len(example.ids))
        cut = [by_length[at : at + batch_size] for at in range(0, len(by_length), batch_size)]
        rng.shuffle(cut)
        yield from cut


def response_loss(model: Qwen3ForCausalLM, batch: Sequence[Encoded]) -> Tensor:
    """The mean over the response tokens of the batch. Padding is on the right, where causal attention can't see it."""
    longest = max(len(example.ids) for example in batch)
    ids_BL = torch.zeros(len(batch), longest, dtype=torch.long)  # B: batch, L: longest sequence
    predicts_BL = torch.zeros(len(batch), longest, dtype=torch.bool)  # positions whose next token is the response's
    for row, example in enumerate(batch):
        ids_BL[row, : len(example.ids)] = torch.tensor(example.ids)
        predicts_BL[row, : len(example.ids) - 1] = torch.tensor(example.imitated[1:])
    hidden_TH = model.model(input_ids=ids_BL, use_cache=False).last_hidden_state[predicts_BL]  # T: response tokens
    return F.cross_entropy(model.lm_head(hidden_TH), ids_BL.roll(-1, dims=1)[predicts_BL])
