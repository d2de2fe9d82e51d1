"""Every sample is packed once, and every rank has work in every round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.models.types import TokenScores, VersionSpan
from grmpipe.train.batching.packer import (
    EARLY_SHARE,
    MicroBatchRound,
    PackedLayout,
    Packer,
    idle,
    pack,
    pack_rounds,
    pack_trees,
)
from grmpipe.train.batching.prefix_tree import PrefixTree, build_trees, num_shared
from grmpipe.train.batching.samples import count
from grmpipe.train.batching.seqlen_balancing import RankWork, work
from grmpipe.types import TrainingSample


def sample(index: int, length: int) -> TrainingSample:
    """Its ids are its index, so that it can be found."""
    return TrainingSample(
        group_id="g", sibling=index, segment=0, token_ids=(index,) * length,
        loss_mask=(0, *(1,) * (length - 1)), sampler_logprobs=(0.0, *(-1.0,) * (length - 1)),
        advantages=(0.0, *(0.5,) * (length - 1)),
        versions=(VersionSpan(model="policy", version=index, start=0, end=length),),
    )  # fmt: skip


def test_a_sample_without_a_teacher_beside_one_with_a_teacher_is_taught_nothing() -> None:
    scores = TokenScores(
        logprobs_N=np.array([0.0, -1.0, -2.0]),
        top_ids_NK=np.array([[0, 0], [7, 8], [8, 9]]),
        top_logprobs_NK=np.array([[0.0, 0.0], [-0.5, -1.5], [-0.25, -2.5]]),
    )
    teacher = pack([replace(sample(0, 3), teacher=scores), sample(1, 2)]).teacher
    assert teacher is not None and teacher.top_ids_EK is not None and teacher.top_logprobs_EK is not None
    assert teacher.taught_E.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0]
    assert teacher.logprobs_E.tolist() == [0.0, -1.0, -2.0, 0.0, 0.0]
    assert teacher.top_ids_EK.tolist() == [[0, 0], [7, 8], [8, 9], [0, 0], [0, 0]]
    assert teacher.top_logprobs_EK[2:].tolist() == [[-0.25, -2.5], [0.0, 0.0], [0.0, 0.0]]
    assert pack([sample(1, 2)]).teacher is None


lengths = st.lists(st.integers(2, 40), min_size=1, max_size=30)


@given(lengths, st.integers(1, 4), st.integers(8, 50))
def test_what_goes_early_is_worth_a_pass_and_packed_once(sizes: list[int], world_size: int, max_tokens: int) -> None:
    packer, rounds, waiting = Packer(max_tokens, world_size, shared=False), [], 0
    for index, size in enumerate(sizes):
        full = packer.add([sample(index, size)])
        waiting += size - sum(packed_lengths(full).values())
        early = packer.early()
        assert bool(early) == (waiting >= EARLY_SHARE * max_tokens * world_size)
        waiting -= sum(packed_lengths(early).values())
        assert waiting == 0 or not early
        rounds += [*full, *early]
    assert packed_lengths([*rounds, *packer.flush()]) == dict(enumerate(sizes))
    assert all(len(round_.micro_batches) == world_size for round_ in rounds)


def packed_lengths(rounds: list[MicroBatchRound]) -> dict[int, int]:
    found: dict[int, int] = {}
    for round_ in rounds:
        for batch in round_.micro_batches:
            if batch.loss_mask_E.sum() == 0:
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
    assert batch.loss_mask_E.tolist() == [0, 1, 1, 0, 1]
    assert batch.sampler_logprobs_E.tolist() == [0, -1, -1, 0, -1]
    assert batch.advantages_E.tolist() == [0, 0.5, 0.5, 0, 0.5]
    assert batch.versions_E.tolist() == [7, 7, 7, 8, 8]


@pytest.mark.parametrize("shared", [False, True])
def test_arrays_are_sent_in_the_types_that_the_learner_reads(shared: bool) -> None:
    """Whatever engines and teachers gave: numbers of 8 bytes would double what is sent and kept."""
    likely_NK = np.zeros((3, 1))
    scores = TokenScores(logprobs_N=np.zeros(3), top_ids_NK=likely_NK.astype(np.int16), top_logprobs_NK=likely_NK)
    one = replace(sample(0, 3), teacher=scores, experts_TLK=np.zeros((3, 1, 1), np.int64), num_turns=2)
    trees = [PrefixTree.of([one, replace(one, sibling=1)])] if shared else [PrefixTree.copy_samples([one])]
    batch = pack_trees([*trees, PrefixTree.copy_samples([replace(one, sibling=2, experts_TLK=None)])])
    assert bool(batch.prefix_lengths_S.any()) == shared
    teacher = batch.teacher
    assert teacher is not None and teacher.top_ids_EK is not None and teacher.top_logprobs_EK is not None
    for kind, arrays in {
        np.int64: (
            batch.token_ids_T, batch.position_ids_T, batch.sample_lengths_S, batch.parents_S, batch.prefix_lengths_S,
            batch.places_E, batch.rollout_lengths_R, teacher.top_ids_EK,
        ),
        np.int32: (batch.versions_E,),
        np.int16: (batch.experts_TLK,),
        np.float32: (
            batch.loss_mask_E, batch.sampler_logprobs_E, batch.advantages_E, teacher.taught_E, teacher.logprobs_E,
            teacher.top_logprobs_EK,
        ),
    }.items():  # fmt: skip
        assert [array.dtype for array in arrays if array is not None] == [kind] * len(arrays)


def test_a_sample_without_experts_beside_one_with_experts_is_routed_anew() -> None:
    experts_TLK = pack([replace(sample(0, 2), experts_TLK=np.full((2, 3, 2), 5)), sample(1, 3)]).experts_TLK
    assert experts_TLK is not None and experts_TLK.shape == (5, 3, 2)
    assert (experts_TLK[:2] == 5).all() and (experts_TLK[2:] == -1).all()


def test_first_token_is_not_trained_or_counted() -> None:
    unprompted = replace(sample(0, 4), loss_mask=(1, 1, 1, 1))
    assert pack([unprompted]).loss_mask_E.tolist() == [0, 1, 1, 1]
    assert count([unprompted], oldest_version=0).num_loss_tokens == 3


def test_sampled_tokens_have_versions_and_other_tokens_have_none() -> None:
    spans = (
        VersionSpan(model="policy", version=4, start=2, end=3),
        VersionSpan(model="policy", version=5, start=3, end=5),
    )
    resumed = replace(sample(0, 6), loss_mask=(0, 0, 1, 1, 1, 0), versions=spans)
    assert pack([resumed]).versions_E.tolist() == [-1, -1, 4, 5, 5, -1]
    with pytest.raises(AssertionError, match="^only what was sampled is trained$"):
        pack([replace(resumed, versions=spans[:1])])


def test_an_idle_rank_trains_nothing() -> None:
    assert idle().loss_mask_E.sum() == 0 and idle().sample_lengths_S.sum() == len(idle().token_ids_T)


# -- siblings --------------------------------------------------------------------------------------------------------


def sibling(index: int, prompt: tuple[int, ...], answer: tuple[int, ...], group_id: str = "g") -> TrainingSample:
    before, sampled = len(prompt), len(answer)
    return TrainingSample(
        group_id=group_id, sibling=index, segment=0, token_ids=prompt + answer,
        loss_mask=(0,) * before + (1,) * sampled, sampler_logprobs=(0.0,) * before + (-1.0 - index,) * sampled,
        advantages=(0.0,) * before + (0.5 + index,) * sampled,
        versions=(VersionSpan(model="policy", version=index, start=before, end=before + sampled),),
    )  # fmt: skip


def siblings_of(number: int, prompt_tokens: int, answer_tokens: int, group: int = 0) -> list[TrainingSample]:
    prompt = tuple(range(100 * group, 100 * group + prompt_tokens))
    return [sibling(index, prompt, (index,) * answer_tokens, str(group)) for index in range(number)]


def whole(samples: tuple[TrainingSample, ...], batch_: MicroBatchRound, rank: int) -> list[list[int]]:
    """The ids of each sample, joined from its own and the shared ones."""
    batch = batch_.micro_batches[rank]
    layout = PackedLayout.of(batch)
    return [
        batch.token_ids_T[layout.places(place, np.arange(len(one.token_ids)))].tolist()
        for place, one in enumerate(samples)
    ]


def test_a_prompt_that_siblings_share_is_packed_once() -> None:
    tree = PrefixTree.of([sibling(0, (1, 2, 3), (4, 5)), sibling(1, (1, 2, 3), (6,)), sibling(2, (1, 2, 3), (4, 7))])
    batch = pack_trees([tree, PrefixTree.of([sibling(3, (1, 2), (9,))])])
    assert batch.token_ids_T.tolist() == [1, 2, 3, 4, 5, 6, 4, 7, 1, 2, 9]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 4, 3, 3, 4, 0, 1, 2]
    assert batch.sample_lengths_S.tolist() == [5, 1, 2, 3]
    assert batch.parents_S.tolist() == [0, 0, 0, 3]
    assert batch.prefix_lengths_S.tolist() == [0, 3, 3, 0]
    assert batch.places_E.tolist() == list(range(11)), "single turns: an entry for each packed token"
    assert batch.rollout_lengths_R.tolist() == [5, 1, 2, 3]
    assert batch.loss_mask_E.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1]
    assert batch.advantages_E.tolist() == [0, 0, 0, 0.5, 0.5, 1.5, 2.5, 2.5, 0, 0, 3.5]
    assert batch.sampler_logprobs_E.tolist() == [0, 0, 0, -1, -1, -2, -3, -3, 0, 0, -4]
    assert batch.versions_E.tolist() == [-1, -1, -1, 0, 0, 1, 2, 2, -1, -1, 3]


def test_what_is_shared_is_found_in_the_ids_and_ends_before_anything_is_trained() -> None:
    first, second = sibling(0, (1, 2, 3), (4, 5)), sibling(1, (1, 2, 3), (4, 5))
    assert num_shared([first, second]) == 3, "that both answer alike is no reason to train it once"
    assert num_shared([first, sibling(1, (1, 2, 8, 3), (4,))]) == 2
    assert num_shared([first, sibling(1, (9, 2, 3), (4,))]) == 0
    assert num_shared([first, sibling(1, (1,), (2,))]) == 1
    untrained = replace(second, loss_mask=(0,) * 5)
    assert num_shared([untrained, replace(untrained, sibling=2)]) == 4, "each keeps a token of its own"
    unprompted = replace(sample(0, 4), loss_mask=(1, 1, 1, 1))
    assert num_shared([unprompted, replace(unprompted, sibling=1)]) == 0


def test_only_samples_of_one_group_are_a_family() -> None:
    samples = [sibling(index, (1, 2), (3 + index,), group_id="ab"[index % 2]) for index in range(4)]
    assert [len(tree.samples) for tree in build_trees(samples, shared=True)] == [2, 2]
    assert [len(tree.samples) for tree in build_trees(samples, shared=False)] == [1] * 4


def test_shared_experts_are_those_of_the_first_sibling() -> None:
    samples = [
        replace(one, experts_TLK=np.full((3, 1, 1), 10 + one.sibling, dtype=np.int16))
        for one in (sibling(0, (1, 2), (3,)), sibling(1, (1, 2), (4,)))
    ]
    experts_TLK = pack_trees([PrefixTree.of(samples)]).experts_TLK
    assert experts_TLK is not None and experts_TLK[:, 0, 0].tolist() == [10, 10, 10, 11]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=6),
       st.integers(1, 4), st.integers(2, 60))  # fmt: skip
def test_every_sibling_is_packed_once_with_all_that_comes_before_it(
    groups: list[tuple[int, int, int]], world_size: int, max_tokens: int
) -> None:
    samples = [one for place, sizes in enumerate(groups) for one in siblings_of(*sizes, group=place)]
    packer = Packer(max_tokens, world_size)
    streamed = [round_ for one in samples for round_ in packer.add([one])] + packer.flush()
    packer = Packer(max_tokens, world_size)
    by_group = [siblings_of(*sizes, group=place) for place, sizes in enumerate(groups)]
    together = [round_ for group in by_group for round_ in packer.add(group)] + packer.flush()
    for rounds in (streamed, together, pack_rounds(samples, max_tokens, world_size)):
        seen = []
        for round_ in rounds:
            assert len(round_.micro_batches) == world_size
            for rank, (packed, batch) in enumerate(zip(round_.samples, round_.micro_batches, strict=True)):
                assert whole(packed, round_, rank) == [list(one.token_ids) for one in packed]
                assert len(batch.token_ids_T) <= max_tokens or len(packed) == 1
                seen += [(one.group_id, one.sibling) for one in packed]
        assert sorted(seen) == sorted((one.group_id, one.sibling) for one in samples)


def test_a_limit_counts_what_is_really_packed() -> None:
    """Eight siblings of 10 + 5 tokens are 50, not 120: two groups fit into 100."""
    groups = [siblings_of(8, 10, 5, group) for group in range(2)]
    packer = Packer(max_tokens=100, world_size=1)
    assert packer.add(groups[0]) == []
    (round_,) = packer.add(groups[1])
    assert [len(batch.token_ids_T) for batch in round_.micro_batches] == [100]
    packer = Packer(max_tokens=100, world_size=1, shared=False)
    assert [len(packer.add(group)) for group in groups] == [1, 1]


def test_a_group_that_is_too_large_is_split_and_its_prompt_repeated() -> None:
    samples = siblings_of(8, 10, 5)
    for rounds in (pack_rounds(samples, max_tokens=30, world_size=1), Packer(max_tokens=30, world_size=1).add(samples)):
        assert [len(round_.micro_batches[0].token_ids_T) for round_ in rounds] == [30, 30]
        assert [round_.micro_batches[0].sample_lengths_S.tolist() for round_ in rounds] == [[15, 5, 5, 5]] * 2


def test_a_group_is_split_into_two_pieces_for_each_of_several_ranks() -> None:
    (round_,) = pack_rounds(siblings_of(8, 1, 4), max_tokens=1000, world_size=2)
    assert [batch.sample_lengths_S.tolist() for batch in round_.micro_batches] == [[5, 4, 5, 4]] * 2


def test_a_group_by_itself_is_work_for_all_ranks() -> None:
    (round_,) = pack_rounds(siblings_of(8, 10, 20), max_tokens=1000, world_size=4)
    assert [len(packed) for packed in round_.samples] == [2] * 4


def test_ranks_wait_little_for_each_other_though_siblings_stay_together() -> None:
    """For long-tailed answers: at most 8 % of a step, for at most 5 % more tokens than without splitting groups."""
    draw, works, packed, least = np.random.default_rng(0), RankWork(), 0, 0
    for batch in range(6):
        samples = []
        for group in range(32):
            prompt = tuple(range(int(draw.integers(200, 800))))
            answers = np.clip(draw.lognormal(6.0, 1.0, 8), 8, 4096).astype(int)
            members = [sibling(i, prompt, (i,) * n, f"{batch}/{group}") for i, n in enumerate(answers.tolist())]
            least += PrefixTree.of(members).load.tokens
            samples += members
        for round_ in pack_rounds(samples, 16_384, 8):
            packed += sum(len(micro.token_ids_T) for micro in round_.micro_batches)
            works.add(
                [sum(map(work, micro.sample_lengths_S, micro.prefix_lengths_S)) for micro in round_.micro_batches]
            )
    assert works.imbalance < 1.08 and packed < 1.05 * least
