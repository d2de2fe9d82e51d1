"""Samples that begin alike, and what they share. Pure: compares token ids, and assumes nothing of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from grmpipe.train.batching.bin_packing import Load, work
from grmpipe.types import TrainingSample


@dataclass(frozen=True, slots=True)
class SharedPrefixGroup:
    """Samples that are packed side by side. The first has all its tokens itself, the others those after the shared."""

    samples: tuple[TrainingSample, ...]
    num_shared: int  # tokens that all begin with; 0 for a sample by itself

    @staticmethod
    def of(samples: Sequence[TrainingSample]) -> SharedPrefixGroup:
        return SharedPrefixGroup(tuple(samples), num_shared(samples) if len(samples) > 1 else 0)

    @property
    def load(self) -> Load:
        first, *others = (len(sample.token_ids) for sample in self.samples)
        own = [length - self.num_shared for length in others]
        return Load(tokens=first + sum(own), work=work(first) + sum(work(length, self.num_shared) for length in own))

    def split(self, max_tokens: int) -> list[SharedPrefixGroup]:
        """Prefix groups of at most this many packed tokens, each with the shared ones again; a longer sample by
        itself."""
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
    """A prefix group for each group, in order; one for each sample where they have nothing to share, or are not to."""
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
    """The tokens that all begin with and none learns from. Each keeps one of its own at least."""
    ids = [sample.token_ids for sample in samples]
    first, last = min(ids), max(ids)  # what these two begin with, all in between do
    alike = next((place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), None)
    untrained = min(map(num_untrained, samples))
    return untrained if alike is None else min(alike, untrained)


def num_untrained(sample: TrainingSample) -> int:
    """Tokens ahead of the first that is trained; the last of all is none of them."""
    return (*sample.loss_mask[:-1], 1).index(1)
