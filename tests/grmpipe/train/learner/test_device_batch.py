"""A micro-batch on its way to a pass of the model: how often it is copied, and that nothing waits for the device."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grmpipe.models.lm import packed_attention
from grmpipe.models.lm.causal_lm import compute_packed_logprobs, outline_causal_lm
from grmpipe.models.types import TokenScores, VersionSpan
from grmpipe.train.batching.packer import pack_trees
from grmpipe.train.batching.prefix_tree import PrefixTree
from grmpipe.train.learner.device_batch import DeviceBatch, DeviceTeacher
from grmpipe.types import MicroBatch, OldPass, TrainingSample

CPU, META = torch.device("cpu"), torch.device("meta")  # reading a number on `meta` is an error


class CopiesFromHost(TorchDispatchMode):
    """Counts copies of the host's tensors to another device."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.device.type != "cpu":
            self.number += any(isinstance(one, Tensor) and one.device.type == "cpu" and one.dim() for one in args)
        return result


def make_micro_batch() -> MicroBatch:
    """Three siblings with one prompt, taught by a teacher's three likeliest tokens."""
    scores = TokenScores(
        logprobs_N=np.linspace(-1.0, 0.0, 9),
        top_ids_NK=np.arange(27).reshape(9, 3),
        top_logprobs_NK=np.linspace(-3.0, -1.0, 27).reshape(9, 3),
    )
    samples = [
        TrainingSample(
            group_id="g", sibling=sibling, segment=0, token_ids=(1, 2, 3, 4, 5, *(6 + sibling,) * 4),
            loss_mask=(0,) * 5 + (1,) * 4, sampler_logprobs=(-0.5,) * 9, advantages=(1.0 - sibling,) * 9,
            versions=(VersionSpan(model="policy", version=3, start=5, end=9),), teacher=scores,
        )
        for sibling in range(3)
    ]  # fmt: skip
    batch = pack_trees([PrefixTree.of(samples)])
    return replace(batch, experts_TLK=np.full((len(batch.token_ids_T), 2, 1), 7, np.int16))


def test_a_micro_batch_is_copied_three_times_and_its_layout_waits_for_nothing(
    qwen_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arrays; the tokens with a prediction; the keys of attention."""
    monkeypatch.setattr(packed_attention, "on_gpu", lambda states: True)
    monkeypatch.setattr(packed_attention, "varlen_attn", lambda query, *_, **__: torch.empty_like(query))
    micro_batch, model = make_micro_batch(), outline_causal_lm(qwen_path, "bfloat16")
    old = OldPass(logprobs_T=np.zeros(len(micro_batch.token_ids_T), np.float32))
    with CopiesFromHost() as copies, torch.no_grad():
        batch = DeviceBatch.of(micro_batch, META, old)
        assert copies.number == 1
        assert batch.teacher is not None
        scored = compute_packed_logprobs(
            model, batch.token_ids_T, batch.position_ids_T, batch.sample_lengths_S, batch.prefixes,
            want_entropy=True, wanted_T=batch.wanted_T, also_TK=batch.teacher.likely_ids_TK,
        )  # fmt: skip
    assert scored.also_TK is not None and scored.also_TK.is_meta
    assert copies.number == 3


def test_a_micro_batch_has_the_same_numbers_on_the_device() -> None:
    micro_batch = make_micro_batch()
    old = OldPass(logprobs_T=np.linspace(-2.0, -1.0, len(micro_batch.token_ids_T), dtype=np.float32))
    batch = DeviceBatch.of(micro_batch, CPU, old)
    same = {field.name for field in fields(DeviceBatch)} & {field.name for field in fields(MicroBatch)} - {"teacher"}
    assert len(same) == 10
    for name in same:
        found, array = getattr(batch, name).numpy(), getattr(micro_batch, name)
        assert (found.dtype, found.tobytes()) == (array.dtype, array.tobytes()), name
    assert batch.prefixes.parents_S.tolist() == micro_batch.parents_S.tolist() == [0, 0, 0]
    assert batch.prefixes.lengths_S.tolist() == micro_batch.prefix_lengths_S.tolist() == [0, 5, 5]
    assert batch.old_logprobs_T is not None and batch.old_logprobs_T.numpy().tobytes() == old.logprobs_T.tobytes()
    assert batch.wanted_T.tolist() == [False] * 5 + [True] * 12


def test_likely_tokens_stand_at_the_packed_tokens_that_are_taught() -> None:
    batch = DeviceBatch.of(make_micro_batch(), CPU)
    assert isinstance(batch.teacher, DeviceTeacher) and batch.teacher.likely_ids_TK is not None
    own = [[15, 16, 17], [18, 19, 20], [21, 22, 23], [24, 25, 26]]
    assert batch.teacher.likely_ids_TK.tolist() == [[0, 0, 0]] * 5 + own * 3


def test_experts_of_the_earlier_pass_replace_those_of_the_sampler() -> None:
    micro_batch = make_micro_batch()
    chosen_TLK = np.full((len(micro_batch.token_ids_T), 2, 1), 9, np.uint8)
    old = OldPass(logprobs_T=np.zeros(len(micro_batch.token_ids_T), np.float32), experts_TLK=chosen_TLK)
    first, later = DeviceBatch.of(micro_batch, CPU), DeviceBatch.of(micro_batch, CPU, old)
    assert first.experts_TLK is not None and first.experts_TLK.unique().tolist() == [7]
    assert later.experts_TLK is not None and later.experts_TLK.unique().tolist() == [9]
