"""Tiny random models, and samples to train them on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grmpipe.models.types import VersionSpan
from grmpipe.types import TrainingSample

MakeSamples = Callable[..., list[TrainingSample]]


@pytest.fixture(scope="session")
def qwen_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=128, tie_word_embeddings=True,
        )
    ).save_pretrained(path)  # fmt: skip
    return str(path)


@pytest.fixture(scope="session")
def gpt2_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Float64 throughout, while Qwen3's norms round to float32: for tests of exactness."""
    path = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
    ).save_pretrained(path)
    (Path(path) / "tokenizer.json").write_text("{}")
    return str(path)


@pytest.fixture(scope="session")
def mixture_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers of four experts, two per token."""
    path = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128, num_experts=4,
            num_experts_per_tok=2, norm_topk_prob=True, initializer_range=0.2,
        )
    ).save_pretrained(path)  # fmt: skip
    return str(path)


@pytest.fixture(scope="session")
def make_siblings(make_samples: MakeSamples) -> MakeSamples:
    """Samples whose groups share a prompt; some siblings are as short as possible, one group has only one."""

    def make(num_samples: int = 13, seed: int = 0) -> list[TrainingSample]:
        prompts: dict[str, tuple[int, ...]] = {}
        samples = []
        for place, sample in enumerate(make_samples(num_samples, seed)):
            before = sample.loss_mask.index(1)
            answer = len(sample.token_ids) - before if place % 5 else 1
            prompt = prompts.setdefault(sample.group_id, 3 * sample.token_ids[:before])
            mask = slice(before, before + answer)
            samples.append(
                replace(
                    sample,
                    token_ids=prompt + sample.token_ids[mask],
                    loss_mask=(0,) * len(prompt) + sample.loss_mask[mask],
                    sampler_logprobs=(0.0,) * len(prompt) + sample.sampler_logprobs[mask],
                    advantages=(0.0,) * len(prompt) + sample.advantages[mask],
                    versions=(replace(sample.versions[0], start=len(prompt), end=len(prompt) + answer),),
                )
            )
        return samples

    return make


@pytest.fixture(scope="session")
def make_samples() -> MakeSamples:
    """Random prompts and answers; the sampler's log-probs are close to those of an untrained model."""

    def make(num_samples: int = 12, seed: int = 0) -> list[TrainingSample]:
        draw = np.random.default_rng(seed)
        samples = []
        for index in range(num_samples):
            prompt, answer = int(draw.integers(2, 8)), int(draw.integers(1, 9))
            samples.append(
                TrainingSample(
                    group_id=str(index // 4),
                    sibling=index % 4,
                    segment=0,
                    token_ids=tuple(draw.integers(0, 64, prompt + answer).tolist()),
                    loss_mask=(0,) * prompt + (1,) * answer,
                    sampler_logprobs=(0.0,) * prompt + tuple(draw.normal(-4.2, 0.5, answer).tolist()),
                    advantages=(0.0,) * prompt + (float(draw.normal()),) * answer,
                    versions=(VersionSpan(model="policy", version=index % 2, start=prompt, end=prompt + answer),),
                )
            )
        return samples

    return make


@pytest.fixture(scope="session")
def make_episodes() -> MakeSamples:
    """Groups of rollouts of several turns. Siblings often choose alike, so they have sampled tokens in common, with
    their own advantages; some histories are rewritten, some rollouts are equal.
    """

    def make(num_groups: int = 3, seed: int = 0, rewrites: bool = True) -> list[TrainingSample]:
        draw = np.random.default_rng(seed)
        samples = []
        for group in range(num_groups):
            question = tuple(draw.integers(0, 64, 6).tolist())
            for sibling in range(5):
                advantage, history, segment = float(draw.normal()), [(0, token) for token in question], 0
                for turn in range(4):
                    if rewrites and turn == 2 and sibling % 2:
                        samples.append(episode_sample(group, sibling, segment, history, advantage, draw))
                        # What was sampled before is a prompt now, and a part of it is gone.
                        history, segment = [(0, token) for _, token in history[: 8 + sibling]], segment + 1
                    said = int(draw.integers(0, 2))
                    history += [(1, 10 * said + place) for place in range(2 + said)]
                    history += [(0, 40 + said + place) for place in range(3)]
                samples.append(episode_sample(group, sibling, segment, history[:-3], advantage, draw))
        return samples

    return make


def episode_sample(
    group: int, sibling: int, segment: int, history: list[tuple[int, int]], advantage: float, draw: np.random.Generator
) -> TrainingSample:
    mask = tuple(trained for trained, _ in history)
    return TrainingSample(
        group_id=str(group),
        sibling=sibling,
        segment=segment,
        token_ids=tuple(token for _, token in history),
        loss_mask=mask,
        sampler_logprobs=tuple(float(draw.normal(-4.2, 0.5)) * trained for trained in mask),
        advantages=tuple((advantage + 0.1 * place) * trained for place, trained in enumerate(mask)),
        versions=(VersionSpan(model="policy", version=sibling % 2, start=0, end=len(mask)),),
        num_turns=2 if segment else 4,
    )
