"""Samples whose prefixes form a tree. Pure: compares token ids and assumes nothing about prompts.

A token that several samples have in common, with the same tokens before it, is computed once, even if the policy
sampled it: each sample that trains it has its own entry in the loss.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from grmpipe.models.types import ANY_EXPERT
from grmpipe.train.batching.seqlen_balancing import Load, work
from grmpipe.types import TrainingSample

# A token that is only attended to costs its keys and values, copied for each sample that has it; a packed token costs
# everything else as well. A pass holds at most this many attended tokens for each packed one of its limit.
ATTENDED_PER_PACKED = 8
CHUNK = 512  # [tokens] compared at once


@dataclass(frozen=True)
class PrefixTree:
    """Samples that are packed side by side. Each holds the tokens after its prefix; others hold the prefix.

    parents: the sample that holds the last token of each one's prefix; itself without a prefix.
    shared:  tokens of each one's prefix, more than of its parent's; 0 without a prefix.
    """

    samples: tuple[TrainingSample, ...]
    parents: tuple[int, ...]
    shared: tuple[int, ...]
    branches: bool = False  # whether samples may have different prefixes
    whole_rollouts: bool = False  # whether the samples of a rollout stay together

    @staticmethod
    def copy_samples(samples: Sequence[TrainingSample]) -> PrefixTree:
        """Samples that share nothing."""
        return PrefixTree(tuple(samples), tuple(range(len(samples))), (0,) * len(samples), whole_rollouts=True)

    @staticmethod
    def of(samples: Sequence[TrainingSample], whole_rollouts: bool = False) -> PrefixTree:
        """Groups of single turns have one prefix, which none of their samples trains."""
        if any(sample.num_turns > 1 or sample.segment > 0 for sample in samples):
            return _branching(samples, whole_rollouts)
        shared = num_shared(samples) if len(samples) > 1 else 0
        parents = (0,) * len(samples) if shared else tuple(range(len(samples)))
        return PrefixTree(tuple(samples), parents, (0, *(shared,) * (len(samples) - 1)))

    @cached_property
    def load(self) -> Load:
        own = [len(sample.token_ids) - shared for sample, shared in zip(self.samples, self.shared, strict=True)]
        tokens = sum(own)
        if self.branches:
            tokens = max(tokens, math.ceil(sum(len(s.token_ids) for s in self.samples) / ATTENDED_PER_PACKED))
        return Load(tokens=tokens, work=sum(map(work, own, self.shared)))

    def split(self, max_tokens: int) -> list[PrefixTree]:
        """Split into trees of at most `max_tokens` packed tokens, each with its own copy of what its samples share. A
        longer sample stays alone, and so does a longer rollout that must stay whole.
        """
        if self.load.tokens <= max_tokens or not any(self.shared):
            return [self]
        pieces = self._split_branches(max_tokens) if self.branches else self._split_siblings(max_tokens)
        return [self] if len(pieces) == 1 else [PrefixTree.of(piece, self.whole_rollouts) for piece in pieces]

    def _split_siblings(self, max_tokens: int) -> list[list[TrainingSample]]:
        shared = max(self.shared)
        pieces: list[list[TrainingSample]] = []
        room = 0
        for sample in self.samples:
            own = len(sample.token_ids) - shared
            if not pieces or own > room:
                pieces.append([])
                room = max_tokens - shared
            pieces[-1].append(sample)
            room -= own
        return pieces

    def _split_branches(self, max_tokens: int) -> list[list[TrainingSample]]:
        """In the order of the tree: neighbours have most in common. Only a rollout that is too long is cut."""
        pieces: list[list[TrainingSample]] = []
        growing = _Growing()
        for unit in self._uncut(max_tokens):
            grown = growing.with_samples(unit)
            if pieces and grown.tokens <= max_tokens:
                pieces[-1] += unit
                growing = grown
            else:
                pieces.append(list(unit))
                growing = _Growing().with_samples(unit)
        return pieces

    def _uncut(self, max_tokens: int) -> Iterator[tuple[TrainingSample, ...]]:
        """Samples that go into the same piece."""
        for rollout in _units(self.samples, whole_rollouts=True):
            if self.whole_rollouts or _Growing().with_samples(rollout).tokens <= max_tokens:
                yield rollout
            else:
                yield from ((sample,) for sample in rollout)


class _Growing:
    """The size of a tree to which samples are added."""

    def __init__(self, ordered: Sequence[TrainingSample] = (), packed: int = 0) -> None:
        self._ordered = list(ordered)
        self._packed = packed

    @property
    def tokens(self) -> int:
        attended = sum(len(sample.token_ids) for sample in self._ordered)
        return max(self._packed, math.ceil(attended / ATTENDED_PER_PACKED))

    def with_samples(self, samples: Sequence[TrainingSample]) -> _Growing:
        grown = _Growing(self._ordered, self._packed)
        for sample in samples:
            place = bisect.bisect(grown._ordered, sample.token_ids, key=_ids)
            beside = grown._ordered[max(0, place - 1) : place + 1]
            grown._packed += len(sample.token_ids) - max((num_common(other, sample) for other in beside), default=0)
            grown._ordered.insert(place, sample)
        return grown


def build_trees(samples: Iterable[TrainingSample], shared: bool, whole_rollouts: bool = False) -> list[PrefixTree]:
    """One tree per group, in order. If nothing is shared, or with `shared=False`, one per sample, or per rollout if
    rollouts must stay whole.
    """
    groups: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    trees: list[PrefixTree] = []
    for group in groups.values():
        tree = PrefixTree.of(group, whole_rollouts) if shared else None
        if tree is not None and any(tree.shared):
            trees.append(tree)
        else:
            trees += [PrefixTree.copy_samples(unit) for unit in _units(group, whole_rollouts)]
    return trees


def num_shared(samples: Sequence[TrainingSample]) -> int:
    """The length of the common prefix that no sample trains on. Each sample keeps at least one token of its own."""
    ids = [sample.token_ids for sample in samples]
    first, last = min(ids), max(ids)  # a common prefix of these two is one of all samples
    alike = next((place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), None)
    untrained = min(map(num_untrained, samples))
    return untrained if alike is None else min(alike, untrained)


def num_untrained(sample: TrainingSample) -> int:
    """The number of tokens before the first trained one; never all tokens."""
    return (*sample.loss_mask[:-1], 1).index(1)


def num_common(holder: TrainingSample, sample: TrainingSample) -> int:
    """The number of first tokens of a sample that another one may hold. The sample keeps at least one of its own.

    A sampled token counts only if both were sent to the same experts. Those of a prompt are the holder's.
    """
    common = num_equal(holder.token_ids, sample.token_ids[:-1])
    if holder.experts_TLK is None and sample.experts_TLK is None:
        return common
    # With the routing replayed, a sampled token that was sent to other experts is another computation.
    first = min(num_untrained(holder), num_untrained(sample))
    sent = _sent_elsewhere(holder.experts_TLK, sample.experts_TLK, slice(first, common))
    return first + int(sent.argmax()) if sent.any() else common


def num_equal(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The length of the common prefix. Compares chunks: histories are long, and only their ends differ."""
    most = min(len(one), len(other))
    for start in range(0, most, CHUNK):
        end = min(start + CHUNK, most)
        if one[start:end] != other[start:end]:
            pairs = zip(one[start:end], other[start:end], strict=True)
            return start + next(place for place, (a, b) in enumerate(pairs) if a != b)
    return most


def _sent_elsewhere(one_TLK: np.ndarray | None, other_TLK: np.ndarray | None, tokens: slice) -> np.ndarray:
    """Which of these tokens have other experts in the second array than in the first. None: unknown for all."""
    known_TLK = one_TLK if one_TLK is not None else other_TLK
    assert known_TLK is not None
    unknown_TLK = np.broadcast_to(np.int16(ANY_EXPERT), known_TLK.shape)
    first_TLK, second_TLK = ((unknown_TLK if x is None else x)[tokens] for x in (one_TLK, other_TLK))
    return np.asarray((first_TLK != second_TLK).any(axis=(1, 2)))


def _branching(samples: Sequence[TrainingSample], whole_rollouts: bool) -> PrefixTree:
    """In the order of token ids each sample has its longest common prefix with the one before it."""
    ordered = sorted(samples, key=_ids)
    parents, shared = [0], [0]
    for place in range(1, len(ordered)):
        length = num_common(ordered[place - 1], ordered[place])
        parent = place - 1 if length else place
        # A parent that has the end of this prefix from others doesn't hold it: one of them does.
        while length and shared[parent] >= length:
            parent = parents[parent]
        parents.append(parent)
        shared.append(length)
    return PrefixTree(tuple(ordered), tuple(parents), tuple(shared), branches=True, whole_rollouts=whole_rollouts)


def _units(samples: Sequence[TrainingSample], whole_rollouts: bool) -> list[tuple[TrainingSample, ...]]:
    """Samples that are packed together: those of a rollout, or each alone; in the order of their first."""
    if not whole_rollouts:
        return [(sample,) for sample in samples]
    by_rollout: dict[tuple[str, int], list[TrainingSample]] = {}
    for sample in samples:
        by_rollout.setdefault((sample.group_id, sample.sibling), []).append(sample)
    return [tuple(unit) for unit in by_rollout.values()]


def _ids(sample: TrainingSample) -> tuple[int, ...]:
    return sample.token_ids
