"""Packs prompts end to end, each for a slot row: which go together, and how many tokens a pass takes. Pure.

N: prompts, P: packed tokens, T: positions of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPrompts:
    """Prompts as linear layers see them (packed), and as attention sees them (padded on the right).

    num_attended: positions that attention reads, cached ones included.
    seen_N1QT:    which of them each token sees, for prompts that continue cached tokens. None: a prompt's own tokens,
                  causally. Q: tokens of the longest prompt, T: num_attended.
    """

    token_ids_P: Tensor
    positions_P: Tensor
    rows_N: Tensor
    places_P: Tensor  # per token, in KV slots: row * tokens_per_row + position
    padded_P: Tensor  # per token, in a padded batch: prompt * longest + index
    longest: int
    num_attended: int
    seen_N1QT: Tensor | None

    @staticmethod
    def of(
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        tokens_per_row: int,
        device: torch.device,
        starts: Sequence[int] = (),
    ) -> PackedPrompts:
        """starts: the position of each prompt's first token, after cached ones; empty: 0 for all."""
        lengths_N = torch.tensor([len(prompt) for prompt in prompts])
        rows_N = torch.tensor(rows)
        starts_N = torch.tensor(starts or [0] * len(prompts))
        longest, num_attended = int(lengths_N.max()), int((starts_N + lengths_N).max())
        prompt_P = torch.arange(len(prompts)).repeat_interleave(lengths_N)
        index_P = torch.arange(len(prompt_P)) - (lengths_N.cumsum(0) - lengths_N)[prompt_P]
        positions_P = starts_N[prompt_P] + index_P
        seen_N1QT = None
        if any(starts):
            last_NQ1 = starts_N[:, None, None] + torch.arange(longest)[:, None]
            seen_N1QT = (torch.arange(num_attended) <= last_NQ1)[:, None].to(device)
        return PackedPrompts(
            token_ids_P=torch.tensor(list(chain.from_iterable(prompts))).to(device),
            positions_P=positions_P.to(device),
            rows_N=rows_N.to(device),
            places_P=(rows_N[prompt_P] * tokens_per_row + positions_P).to(device),
            padded_P=(prompt_P * longest + index_P).to(device),
            longest=longest,
            num_attended=num_attended,
            seen_N1QT=seen_N1QT,
        )

    def pad(self, x_PHD: Tensor) -> Tensor:
        """[P, H, D] -> [N, T, H, D], with zeros after a prompt's last token."""
        padded = x_PHD.new_zeros(len(self.rows_N) * self.longest, *x_PHD.shape[1:])
        padded_NTHD: Tensor = padded.index_copy_(0, self.padded_P, x_PHD).unflatten(0, (-1, self.longest))
        return padded_NTHD

    def unpad(self, x_NTHD: Tensor) -> Tensor:
        return x_NTHD.flatten(0, 1)[self.padded_P]


def whole_blocks(count: int, block: int) -> int:
    """The count rounded up to a multiple of the block."""
    return -(-count // block) * block


def bin_by_length(lengths_N: Sequence[int]) -> list[list[int]]:
    """Indices by ascending length, split where padding to the longest would cost more than a quarter (or 16 tokens)."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths_N)), key=lengths_N.__getitem__):
        if not groups or lengths_N[index] > 1.25 * lengths_N[groups[-1][0]] + 16:
            groups.append([])
        groups[-1].append(index)
    return groups


PIECE_S = 2.0  # for a forward pass; what waits for its end, such as an abort or a pause, waits about as long
FIRST_TOKENS = 64  # before any speed is known
LEAST_TOKENS = 32  # in a piece: fewer would be little faster, since each pass reads all weights; in a measurement, too


class PrefillPace:
    """The size of the next piece.

    tokens: how many the next pass takes, at most `most_tokens`. is_fixed: always that many, however long they take.
    """

    def __init__(self, most_tokens: int, *, is_fixed: bool = False) -> None:
        self._most_tokens, self._is_fixed = most_tokens, is_fixed
        self.tokens = most_tokens if is_fixed else min(FIRST_TOKENS, most_tokens)

    def note(self, num_tokens: int, seconds: float) -> None:
        """Take the duration of a pass. Only the last one counts: load comes and goes faster than an average does."""
        if self._is_fixed or num_tokens < min(LEAST_TOKENS, self._most_tokens):
            return
        in_time = self._most_tokens if seconds <= 0 else int(num_tokens * PIECE_S / seconds)
        self.tokens = min(max(in_time, LEAST_TOKENS), self._most_tokens)
