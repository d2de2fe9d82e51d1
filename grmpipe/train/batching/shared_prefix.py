"""Samples with a shared prefix. Pure: compares token ids and assumes nothing about prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from grmpipe.train.batching.bin_packing import Load, work
from grmpipe.types import TrainingSample


@dataclass(frozen=True, slots=True)
class SharedPrefixGroup:
    """Samples that are packed side by side. The first holds all its tokens, the others only those after the shared
    prefix.
    """

    samples: tuple[TrainingSample, ...]
    num_shared: int  # length of the shared prefix; 0 for a single sample

    @staticmethod
    def of(samples: Sequence[TrainingSample]) -> SharedPrefixGroup:
        return SharedPrefixGroup(tuple(samples), num_shared(samples) if len(samples) > 1 else 0)

    @property
    def load(self) -> Load:
        first, *others = (len(sample.token_ids) for sample in self.samples)
        own = [length - self.num_shared for length in others]
        return Load(tokens=first + sum(own), work=work(first) + sum(work(length, self.num_shared) for length in own))

    def split(self, max_tokens: int) -> list[SharedPrefixGroup]:
        """Split into prefix groups of at most `max_tokens` packed tokens, each with its own copy of the prefix. A
        longer sample stays alone.
        """
        pieces: list[list[TrainingSample]] = []
        room = 0
        for sample in self.samples:
            own = len(sample.token_ids) - self.num_shared
            if not pieces or own > room:
                pieces.append([])
                room = max_tokens - self.num_shared
            pieces[-1].append(sample)
            room -= own
        return [self] if len(pieces) == 1 else [SharedPrefixGroup.of(piece) for piece in pieces]


def prefix_groups_of(samples: Iterable[TrainingSample], shared: bool) -> list[SharedPrefixGroup]:
    """One prefix group per group, in order. One per sample if nothing is shared, or with `shared=False`."""
    groups: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    prefix_groups: list[SharedPrefixGroup] = []
    for group in groups.values():
        prefix_group = SharedPrefixGroup.of(group)
        prefix_groups += (
            [prefix_group]
            if shared and prefix_group.num_shared > 0
            else [SharedPrefixGroup((sample,), 0) for sample in group]
        )
    return prefix_groups


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
