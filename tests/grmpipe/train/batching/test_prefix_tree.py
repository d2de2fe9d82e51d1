"""A tree packs each token that samples have in common once, and every sample still has all its tokens and entries."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grmpipe.models.types import VersionSpan
from grmpipe.tiny.examples import in_store, to_messages
from grmpipe.tiny.tokenizer import build_tokenizer, encode_message
from grmpipe.tiny.walks import Haste, hasty_turns, make_walks
from grmpipe.train.batching.packer import PackedLayout, Packer, pack, pack_rounds, pack_trees
from grmpipe.train.batching.prefix_tree import (
    ATTENDED_PER_PACKED,
    CHUNK,
    PrefixTree,
    build_trees,
    num_common,
    num_equal,
)
from grmpipe.train.batching.samples import count
from grmpipe.types import MicroBatch, TrainingSample


def episode(
    sibling: int, *turns: tuple[str, str], segment: int = 0, advantage: float = 1.0, group_id: str = "g"
) -> TrainingSample:
    """Prompt and answer of each turn; a letter is a token."""
    ids = tuple(ord(letter) for turn in turns for text in turn for letter in text)
    mask = tuple(trained for turn in turns for trained, text in enumerate(turn) for _ in text)
    return TrainingSample(
        group_id=group_id, sibling=sibling, segment=segment, token_ids=ids, loss_mask=mask,
        sampler_logprobs=tuple(-(1.0 + sibling) * trained for trained in mask),
        advantages=tuple(advantage * trained for trained in mask),
        versions=(VersionSpan(model="policy", version=sibling, start=0, end=len(ids)),), num_turns=len(turns),
    )  # fmt: skip


def letters(ids: np.ndarray) -> str:
    return "".join(map(chr, ids))


def test_runs_of_siblings_are_packed_once_also_if_they_were_sampled() -> None:
    """The first two go the same way at first: xy, then 12. The last one goes another way."""
    samples = [
        episode(0, ("ask", "xy"), ("12", "p"), advantage=1.0),
        episode(1, ("ask", "xy"), ("12", "qr"), advantage=2.0),
        episode(2, ("ask", "xz"), ("3", "s"), advantage=4.0),
    ]
    batch = pack_trees([PrefixTree.of(samples)])
    assert letters(batch.token_ids_T) == "askxy12p" + "qr" + "z3s"
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 4, 5, 6]
    assert batch.parents_S.tolist() == [0, 0, 0] and batch.prefix_lengths_S.tolist() == [0, 7, 4]
    entries = [letters(part) for part in np.split(batch.token_ids_T[batch.places_E], batch.rollout_lengths_R.cumsum())]
    assert entries == ["askxy12p", "xyqr", "xz3s", ""], "of a shared run, what the sample trains"
    assert batch.advantages_E[batch.loss_mask_E > 0].tolist() == [1, 1, 1, 2, 2, 2, 2, 4, 4, 4]
    assert batch.sampler_logprobs_E[batch.loss_mask_E > 0].tolist() == [-1] * 3 + [-2] * 4 + [-3] * 3
    assert batch.versions_E[batch.loss_mask_E > 0].tolist() == [0] * 3 + [1] * 4 + [2] * 3


def test_a_prefix_may_lie_in_several_samples() -> None:
    samples = [
        episode(0, ("a", "b"), ("c", "d")),
        episode(1, ("a", "x"), ("c", "y"), ("c", "d")),
        episode(2, ("a", "x"), ("c", "y"), ("c", "z")),
    ]
    batch = pack_trees([PrefixTree.of(samples)])
    assert letters(batch.token_ids_T) == "abcd" + "xcycd" + "z"
    assert batch.parents_S.tolist() == [0, 0, 1] and batch.prefix_lengths_S.tolist() == [0, 1, 5]
    places = PackedLayout.of(batch).places(2, np.arange(6))
    assert letters(batch.token_ids_T[places]) == "axcycz"


def test_tokens_that_one_sample_trains_may_be_the_prompt_of_another() -> None:
    """A history that was rewritten after the first turn: its first answer is a part of the next prompt."""
    first, second = episode(0, ("ask", "xy"), ("1", "p")), episode(0, ("askxy", "p"), segment=1)
    batch = pack_trees([PrefixTree.of([first, second])])
    assert letters(batch.token_ids_T) == "askxy1pp"
    assert batch.loss_mask_E.tolist() == [0, 0, 0, 1, 1, 0, 1, 1] and batch.rollout_lengths_R.tolist() == [8]


def test_equal_rollouts_hold_one_token_each_after_the_first() -> None:
    samples = [episode(sibling, ("ask", "xy"), ("1", "p")) for sibling in range(4)]
    batch = pack_trees([PrefixTree.of(samples)])
    assert letters(batch.token_ids_T) == "askxy1p" + "p" * 3 and batch.parents_S.tolist() == [0] * 4
    assert batch.loss_mask_E.sum() == 4 * 3


def test_single_turns_share_only_what_none_of_them_trains() -> None:
    samples = [episode(sibling, ("ask", "xy" + "ab"[sibling])) for sibling in range(2)]
    batch = pack_trees([PrefixTree.of(samples)])
    assert letters(batch.token_ids_T) == "askxyaxyb" and batch.places_E.tolist() == list(range(9))
    first, second = samples
    longer = episode(2, ("ask", "xyc"), ("1", "p"))
    assert letters(pack_trees([PrefixTree.of([first, second, longer])]).token_ids_T) == "askxyabc1p"


@pytest.mark.parametrize("common", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
def test_a_common_prefix_ends_at_the_first_other_token(common: int) -> None:
    same = tuple(range(common))
    assert num_equal((*same, -1, 5), (*same, -2, 5)) == common
    assert num_equal(same, (*same, 7)) == common


def test_sampled_tokens_of_other_experts_are_packed_twice() -> None:
    """Experts of a prompt are those of the sample that holds it."""
    first, second = episode(0, ("ask", "xy"), ("1", "p")), episode(1, ("ask", "xy"), ("1", "q"))
    experts = np.zeros((7, 2, 1), dtype=np.int16)
    elsewhere, asked = experts.copy(), experts.copy()
    elsewhere[4], asked[1] = 3, 3
    assert num_common(first, second) == 6
    assert num_common(replace(first, experts_TLK=experts), replace(second, experts_TLK=experts)) == 6
    assert num_common(replace(first, experts_TLK=experts), replace(second, experts_TLK=elsewhere)) == 4
    assert num_common(replace(first, experts_TLK=experts), replace(second, experts_TLK=asked)) == 6
    assert num_common(replace(first, experts_TLK=experts), second) == 3, "unknown experts are other ones"


def test_nothing_is_shared_where_sharing_is_off() -> None:
    samples = [episode(sibling, ("ask", "xy"), ("1", "p")) for sibling in range(3)]
    assert [len(tree.samples) for tree in build_trees(samples, shared=False)] == [1] * 3
    assert len(pack(samples).token_ids_T) == 21


def test_siblings_in_a_store_are_at_most_half_the_tokens() -> None:
    """Eight siblings a walk, who take the first entry at nearly every second name."""
    tokenizer, draw, samples = build_tokenizer(), random.Random(0), []
    for number, walk in enumerate(make_walks("train", 8, 0)):
        for sibling in range(8):
            said = to_messages(in_store(walk, hasty_turns(walk, Haste(), draw)))
            ids, mask = [], []
            for place, message in enumerate(said):
                before, content = encode_message(tokenizer, message, is_first=place == 0)
                ids += before + content
                mask += [0] * len(before) + [int(message.role == "assistant")] * len(content)
            samples.append(
                replace(
                    episode(sibling, group_id=str(number)), token_ids=tuple(ids), loss_mask=tuple(mask),
                    sampler_logprobs=(0.0,) * len(ids), advantages=(0.0,) * len(ids), num_turns=len(said) // 2,
                    versions=(VersionSpan(model="policy", version=0, start=0, end=len(ids)),),
                )
            )  # fmt: skip
    once, each = (
        sum(len(round_.micro_batches[0].token_ids_T) for round_ in pack_rounds(samples, 4096, 1, shared))
        for shared in (True, False)
    )
    assert each == sum(len(sample.token_ids) for sample in samples) and once < 0.3 * each


# -- limits ----------------------------------------------------------------------------------------------------------


def whole_entries(batch: MicroBatch, samples: tuple[TrainingSample, ...]) -> dict[tuple[str, int], list[float]]:
    """The advantages of each rollout's trained tokens, as the loss gets them."""
    if not samples:
        return {}
    keys = dict.fromkeys((sample.group_id, sample.sibling) for sample in samples)
    parts = np.split(batch.advantages_E, batch.rollout_lengths_R.cumsum()[:-1])
    masks = np.split(batch.loss_mask_E, batch.rollout_lengths_R.cumsum()[:-1])
    return {key: part[mask > 0].tolist() for key, part, mask in zip(keys, parts, masks, strict=True)}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rollout_that_must_stay_whole_is_never_cut(make_episodes, shared: bool, world_size: int) -> None:
    samples = make_episodes(4)
    for max_tokens, streams in itertools.product((5, 30, 60, 1000), (False, True)):
        packer = Packer(max_tokens, world_size, shared, whole_rollouts=True)
        rounds = (
            packer.add(samples) + packer.flush()
            if streams
            else pack_rounds(samples, max_tokens, world_size, shared, whole_rollouts=True)
        )
        found: dict[tuple[str, int], list[float]] = {}
        for round_ in rounds:
            for packed, batch in zip(round_.samples, round_.micro_batches, strict=True):
                entries = whole_entries(batch, packed)
                assert not entries.keys() & found.keys(), "all of a rollout is in one micro-batch"
                found |= entries
                assert len(batch.token_ids_T) <= max_tokens or len(entries) == 1
        assert len(found) == 20 and sum(map(len, found.values())) == count(samples, 0).num_loss_tokens
    for cut in (pack_rounds(samples, 5, 1, True), Packer(5, 1).add(samples)):
        assert max(len(round_.samples[0]) for round_ in cut) == 1, "else a long one is packed in parts"


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.text("ab", min_size=1, max_size=4), min_size=2, max_size=5), min_size=1, max_size=8),
    st.integers(4, 60), st.booleans(), st.integers(1, 2),
)  # fmt: skip
def test_every_sample_keeps_all_its_tokens_in_any_tree(
    texts: list[list[str]], max_tokens: int, whole: bool, world_size: int
) -> None:
    samples = [
        episode(number // 2, *[("?", text) for text in said], segment=number % 2, group_id=str(number // 4))
        for number, said in enumerate(texts)
    ]
    packer = Packer(max_tokens, world_size, whole_rollouts=whole)
    rounds, seen = packer.add(samples) + packer.flush(), []
    for round_ in rounds:
        for packed, batch in zip(round_.samples, round_.micro_batches, strict=True):
            layout = PackedLayout.of(batch)
            for place, sample in enumerate(packed):
                places = layout.places(place, np.arange(len(sample.token_ids)))
                assert batch.token_ids_T[places].tolist() == list(sample.token_ids)
                assert batch.position_ids_T[places].tolist() == list(range(len(places)))
                seen.append((sample.group_id, sample.sibling, sample.segment))
            units = {sample.sibling for sample in packed} if whole else packed
            assert len(batch.token_ids_T) <= max_tokens or len(units) == 1
    assert sorted(seen) == sorted((one.group_id, one.sibling, one.segment) for one in samples)


def test_a_tree_is_split_where_its_samples_have_least_in_common() -> None:
    samples = [episode(sibling, ("ask", "ab"[sibling % 2] * 4), ("1", "pq"[sibling // 2])) for sibling in range(4)]
    pieces = PrefixTree.of(samples).split(13)
    assert [[one.sibling for one in piece.samples] for piece in pieces] == [[0, 2], [1, 3]]
    assert [piece.load.tokens for piece in pieces] == [10, 10]


def test_a_rollout_that_may_be_cut_is_cut_only_if_it_is_too_long() -> None:
    """The two samples of each rollout are 9 tokens together."""
    samples = [
        episode(sibling, ("a", "bcdx"[sibling] * 3), ("e" * length, "f"), segment=length - 1)
        for sibling in range(4)
        for length in (1, 3)
    ]
    pieces = PrefixTree.of(samples).split(11)
    assert [{one.sibling for one in piece.samples} for piece in pieces] == [{0}, {1}, {2}, {3}]
    assert len(PrefixTree.of(samples).split(7)) == 8


def test_the_limit_also_bounds_the_keys_of_long_prefixes() -> None:
    """Many short tails of one long history are little to compute and much to attend to."""
    samples = [episode(0, ("a" * 100, "b"), ("c", chr(200 + number)), segment=number) for number in range(60)]
    tree = PrefixTree.of(samples)
    packed = sum(len(one.token_ids) - shared for one, shared in zip(samples, tree.shared, strict=True))
    assert packed == 103 + 59 and tree.load.tokens == -(-60 * 103 // ATTENDED_PER_PACKED)
    assert len(tree.split(400)) > 1
