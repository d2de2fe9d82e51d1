"""The order of prompts. Random access: a position is one integer. Pure."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grmpipe.types import Prompt


class EndOfData(Exception):
    """All epochs are over."""


class NothingToJudge(Exception):
    """The place of a judging task stays empty: there is none that may be given now."""


class PromptStream:
    """The order of prompts: index i is item i % n of epoch i // n. Each epoch has its own permutation, or the file's
    order.

    groups_per_step: gives each prompt the step that its place in the order belongs to, the same after a resume and for
    whoever judges again; None: no step.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int = 0,
        shuffle: bool = True,
        max_epochs: int | None = None,
        groups_per_step: float | None = None,
    ) -> None:
        self.prompts = tuple(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._max_epochs = max_epochs
        self._groups_per_step = groups_per_step
        self._epoch = 0
        self._order_N = self._permutation(0)  # N: prompts

    def __len__(self) -> int:
        """The number of prompts in one epoch."""
        return len(self.prompts)

    def at(self, prompt_index: int) -> Prompt:
        """The prompt at an index, from 0. Raises EndOfData after `max_epochs`."""
        assert prompt_index >= 0 and self.prompts, prompt_index  # a judge alone has no prompts
        epoch, item = divmod(prompt_index, len(self.prompts))
        if self._max_epochs is not None and epoch >= self._max_epochs:
            raise EndOfData(f"{self._max_epochs} epochs of {len(self.prompts)} prompts have been drawn")
        if epoch != self._epoch:
            self._epoch, self._order_N = epoch, self._permutation(epoch)
        prompt = self.prompts[int(self._order_N[item])]
        if self._groups_per_step is None:
            return prompt
        return replace(prompt, step=int(prompt_index // self._groups_per_step) + 1)

    def _permutation(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self.prompts))
        return permute(len(self.prompts), self._seed, epoch)


@functools.lru_cache(4)
def permute(num_items: int, seed: int, epoch: int) -> np.ndarray:
    """[N] int64: the order of N items in an epoch."""
    # RandomState never changes (NEP 19): a run resumed under a newer numpy gets the same prompts.
    bits = np.random.MT19937(np.random.SeedSequence((seed, epoch)))
    return np.random.RandomState(bits).permutation(num_items)
