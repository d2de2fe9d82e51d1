"""Slices of tokens and shares of heads, without processes. Ranks exchange them in test_learner_parallel_ranks.py."""

from __future__ import annotations

import pytest
import torch

from grmpipe.models.lm.parallel.context_parallel import ContextRanks


def ranks(size: int) -> list[ContextRanks]:
    return [ContextRanks(group=None, rank=rank, size=size) for rank in range(size)]  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("num_tokens", [1, 5, 16])
def test_each_token_is_in_one_slice_and_slices_are_as_long(size: int, num_tokens: int) -> None:
    """Also if there are fewer tokens than ranks."""
    whole_T2 = torch.arange(2 * num_tokens).view(-1, 2)
    slices = [rank.own_slice(whole_T2, fill=-7) for rank in ranks(size)]
    assert len({len(own) for own in slices}) == 1
    together = torch.cat(slices)
    assert torch.equal(together[:num_tokens], whole_T2) and (together[num_tokens:] == -7).all()
    assert len(together) - num_tokens < size


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_place_is_held_by_the_rank_whose_slice_has_it(size: int) -> None:
    whole_T, places_R = torch.arange(100, 113), torch.tensor([12, 0, 5, 5, 7])
    found = torch.zeros_like(places_R)
    for rank in ranks(size):
        is_own_R, here = rank.own_places(places_R, len(whole_T))
        assert not found[is_own_R].any()
        found[is_own_R] = rank.own_slice(whole_T)[here]
    assert torch.equal(found, whole_T[places_R])


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(32, 8, 8), (32, 8, 4), (8, 2, 4), (24, 6, 4), (12, 1, 3)])
def test_a_rank_gets_the_key_heads_that_its_query_heads_read(heads: int, key_heads: int, size: int) -> None:
    read_by = torch.arange(key_heads).repeat_interleave(heads // key_heads)  # query head -> key head
    repeated = ranks(size)[0].for_each_rank(torch.arange(key_heads).view(1, -1, 1)).flatten()
    for rank, own in enumerate(repeated.view(size, -1)):
        queries = read_by.view(size, -1)[rank]
        assert torch.equal(own.repeat_interleave(len(queries) // len(own)), queries)
