"""Every sample is packed once, and every rank has work in every round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.train.packer import Packer, Round, idle, pack
from grmpipe.train.samples import count
from grmpipe.types import TrainingSample
from models.types import VersionSpan


def sample(index: int, length: int) -> TrainingSample:
    """Its ids are its index, so that it's found again."""
    return TrainingSample(
        group_id="g", sibling=index, segment=0, token_ids=(index,) * length,
        loss_mask=(0, *(1,) * (length - 1)), sampler_logprobs=(0.0, *(-1.0,) * (length - 1)),
        advantages=(0.0, *(0.5,) * (length - 1)),
        versions=(VersionSpan(model="policy", version=index, start=0, end=length),),
    )  # fmt: skip


lengths = st.lists(st.integers(2, 40), min_size=1, max_size=30)


def packed_lengths(rounds: list[Round]) -> dict[int, int]:
    found: dict[int, int] = {}
    for round_ in rounds:
        for batch in round_.micro_batches:
            if batch.loss_mask_T.sum() == 0:
                continue
            for ids in np.split(batch.token_ids_T, batch.sample_lengths_S.cumsum()[:-1]):
                assert len(set(ids.tolist())) == 1 and ids[0] not in found
                found[int(ids[0])] = len(ids)
    return found


@given(lengths, st.integers(1, 4), st.integers(2, 50), st.integers(1, 7))
def test_every_sample_is_packed_once_and_no_rank_is_left_out(
    sizes: list[int], world_size: int, max_tokens: int, chunk: int
) -> None:
    samples = [sample(i, size) for i, size in enumerate(sizes)]
    packer = Packer(max_tokens, world_size)
    rounds = [round_ for i in range(0, len(samples), chunk) for round_ in packer.add(samples[i : i + chunk])]
    rounds += packer.flush()
    assert packed_lengths(rounds) == dict(enumerate(sizes))
    assert all(len(round_.micro_batches) == world_size for round_ in rounds)
    for round_ in rounds:
        for batch in round_.micro_batches:
            assert len(batch.token_ids_T) <= max_tokens or len(batch.sample_lengths_S) == 1
    assert packer.flush() == []


def test_add_waits_for_a_round_of_work() -> None:
    packer = Packer(max_tokens=10, world_size=2)
    assert packer.add([sample(0, 9), sample(1, 5)]) == []
    (round_,) = packer.add([sample(2, 5), sample(3, 4)])
    assert [batch.sample_lengths_S.tolist() for batch in round_.micro_batches] == [[9], [5, 5]]


def test_a_sample_longer_than_a_micro_batch_goes_alone() -> None:
    rounds = Packer(max_tokens=10, world_size=1).add([sample(0, 25), sample(1, 2)])
    assert [batch.sample_lengths_S.tolist() for round_ in rounds for batch in round_.micro_batches] == [[25]]


def test_the_rest_is_spread_evenly() -> None:
    packer = Packer(max_tokens=100, world_size=2)
    packer.add([sample(i, 10) for i in range(6)])
    (round_,) = packer.flush()
    assert [batch.sample_lengths_S.sum() for batch in round_.micro_batches] == [30, 30]


def test_discarded_samples_are_forgotten() -> None:
    packer = Packer(max_tokens=100, world_size=1)
    packer.add([sample(0, 10)])
    packer.discard()
    assert packer.flush() == []


def test_packed_arrays_line_up() -> None:
    batch = pack([sample(7, 3), sample(8, 2)])
    assert batch.token_ids_T.tolist() == [7, 7, 7, 8, 8]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 0, 1]
    assert batch.loss_mask_T.tolist() == [0, 1, 1, 0, 1]
    assert batch.sampler_logprobs_T.tolist() == [0, -1, -1, 0, -1]
    assert batch.advantages_T.tolist() == [0, 0.5, 0.5, 0, 0.5]
    assert batch.versions_T.tolist() == [7, 7, 7, 8, 8]
    assert batch.loss_mask_T.dtype == np.float32 and batch.token_ids_T.dtype == np.int64


def test_a_first_token_is_neither_trained_nor_counted() -> None:
    unprompted = replace(sample(0, 4), loss_mask=(1, 1, 1, 1))
    assert pack([unprompted]).loss_mask_T.tolist() == [0, 1, 1, 1]
    assert count([unprompted], oldest_version=0).num_loss_tokens == 3


def test_every_sampled_token_knows_who_sampled_it_and_the_others_nobody() -> None:
    spans = (
        VersionSpan(model="policy", version=4, start=2, end=3),
        VersionSpan(model="policy", version=5, start=3, end=5),
    )
    resumed = replace(sample(0, 6), loss_mask=(0, 0, 1, 1, 1, 0), versions=spans)
    assert pack([resumed]).versions_T.tolist() == [-1, -1, 4, 5, 5, -1]
    with pytest.raises(AssertionError, match="only what was sampled is trained"):
        pack([replace(resumed, versions=spans[:1])])


def test_an_idle_rank_trains_nothing() -> None:
    assert idle().loss_mask_T.sum() == 0 and idle().sample_lengths_S.sum() == len(idle().token_ids_T)
