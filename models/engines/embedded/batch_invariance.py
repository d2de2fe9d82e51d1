"""Batch-invariant decoding: a row's logits don't depend, to the last bit, on the other rows.

Matrix products choose their kernels by the number of rows, and attention sums by the number of positions. So both are
rounded up to whole blocks, within which the kernels add in one order (He et al., Defeating Nondeterminism in LLM
Inference, 2025), and prompts go through the model one by one, as if their tokens were decoded: a token's keys and
values are the same, wherever the prompt was cut. No library guarantees that order: `is_batch_invariant` tests it with
the model, on the machine.

B: rows that decode, V: vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from grmpipe.models.engines.embedded.decoder import PROBE, Decoder, open_decoder
from grmpipe.models.engines.embedded.fused_decoder import ROW_BLOCK, Ids, Names
from grmpipe.models.engines.embedded.kv_slots import KvSlots
from grmpipe.models.engines.embedded.prompt_packing import whole_blocks
from grmpipe.models.lm.lora import adapters, list_names
from grmpipe.models.repeatable_kernels import KERNELS, VARIABLE

TOKEN_BLOCK = 64
FED_TOKENS = 64  # how many of a prompt at a time
TRIED_ROWS = (1, 7, 20, 64)
TRIED_TOKENS = (1, 65)  # in addition to those of the tested row
TRIED_PROMPT = (5, 3, 8, 2, 9, 4, 6)
TRIED_CUTS = (1, 4)  # where it is cut
COMPANY = ((7, 1, 3, 3), (2, 2, 8, 1, 6, 5, 4, 9, 3), (4,))


class BatchInvariantDecoder:
    """A decoder whose calls have whole blocks of rows and positions. Rows without a request are padding."""

    row_block = ROW_BLOCK

    def __init__(self, decoder: Decoder, slots: KvSlots) -> None:
        self._decoder = decoder
        self._slots = slots

    def prefill(self, prompts: Sequence[Ids], rows: Ids, starts: Ids = (), adapters: Names = ()) -> None:
        names, begins = adapters or [""] * len(prompts), starts or [0] * len(prompts)
        for prompt, row, start, name in zip(prompts, rows, begins, names, strict=True):
            token_ids_P = torch.tensor(prompt, device=self._slots.shape.device)
            positions_P = torch.arange(start, start + len(prompt), device=self._slots.shape.device)
            for some_P, at_P in zip(token_ids_P.split(FED_TOKENS), positions_P.split(FED_TOKENS), strict=True):
                self.feed(some_P, at_P, row, int(at_P[-1]) + 1, name)

    def decode(self, token_ids_B: Tensor, positions_B: Tensor, num_attended: int, adapters: Names = ()) -> Tensor:
        num_rows = len(token_ids_B)
        rows, tokens = whole_blocks(num_rows, ROW_BLOCK), whole_blocks(num_attended, TOKEN_BLOCK)
        self._slots.reserve(rows, tokens)
        idle = (0, rows - num_rows)
        names = [*adapters, *[adapters[-1]] * (rows - num_rows)] if adapters else []
        return self._decoder.decode(F.pad(token_ids_B, idle), F.pad(positions_B, idle), tokens, names)[:num_rows]

    def verify(self, token_ids_BQ: Tensor, positions_BQ: Tensor, num_attended: int, adapters: Names = ()) -> Tensor:
        columns = zip(token_ids_BQ.unbind(1), positions_BQ.unbind(1), strict=True)
        return torch.stack([self.decode(*column, num_attended, adapters) for column in columns], 1)

    def feed(self, token_ids_P: Tensor, positions_P: Tensor, row: int, num_attended: int, adapter: str = "") -> None:
        """Padding repeats the last token."""
        count, tokens = whole_blocks(len(token_ids_P), ROW_BLOCK), whole_blocks(num_attended, TOKEN_BLOCK)
        self._slots.reserve(row + 1, tokens)
        index_P = torch.arange(count, device=token_ids_P.device).clamp(max=len(token_ids_P) - 1)
        self._decoder.feed(token_ids_P[index_P], positions_P[index_P], row, tokens, adapter)

    def weights_changed(self) -> None:
        """There are no copies: products with them add in another order, which was not tested."""


@torch.no_grad()
def open_batch_invariant_decoder(
    model: PreTrainedModel,
    max_rows: int,
    max_tokens: int,
    return_routed_experts: bool = False,
    probe: Sequence[Sequence[int]] = PROBE,
) -> tuple[Decoder, KvSlots]:
    """Like `open_decoder`, on one thread of a CPU. Also raises ValueError if logits still depend on the batch size."""
    if model.device.type == "cpu":
        torch.set_num_threads(1)  # threads divide a product by its number of rows
    rows, tokens = whole_blocks(max_rows, ROW_BLOCK), whole_blocks(max_tokens, TOKEN_BLOCK)
    plain, slots = open_decoder(model, rows, tokens, return_routed_experts, probe)
    decoder = BatchInvariantDecoder(plain, slots)
    with random_adapters(model) as names:
        invariant = is_batch_invariant(decoder, slots, max_rows, max_tokens, names)
    if not invariant:
        raise ValueError(
            f"train.deterministic: on this machine the last bits of the logits of a {type(model).__name__} "
            f"depend on the other requests of the batch; set the environment variable {VARIABLE}={KERNELS} before "
            "Python (and Ray) starts, or type train.deterministic=false"
        )
    return decoder, slots


@contextmanager
def random_adapters(model: PreTrainedModel) -> Iterator[list[str]]:
    """Context: all adapters change what their layers give, as after some training. Yields their names."""
    names = dict.fromkeys(name for module in model.modules() for name in list_names(module))
    held = [(low_rank.b_OR, low_rank.b_OR.clone()) for name in names for _, low_rank in adapters(model, name)]
    dice = torch.Generator().manual_seed(0)
    try:
        for b_OR, before_OR in held:
            b_OR.copy_(torch.randn(before_OR.shape, generator=dice) * 0.02)
        yield list(names)
    finally:
        for b_OR, before_OR in held:
            b_OR.copy_(before_OR)


def is_batch_invariant(
    decoder: Decoder, slots: KvSlots, max_rows: int, max_tokens: int, adapters: Sequence[str] = ()
) -> bool:
    """Whether a row's logits are the same in batches of several sizes, in the first and in the last place, with other
    adapters beside it, and however many of its tokens are prefilled.
    """
    alone_V = _logits_at(decoder, slots, 1, 0, len(TRIED_PROMPT), adapters)
    cut_apart = all(torch.equal(_logits_after(decoder, slots, cut, adapters), alone_V) for cut in TRIED_CUTS)
    return cut_apart and all(
        torch.equal(_logits_at(decoder, slots, num_rows, place, num_attended, adapters), alone_V)
        for num_rows in TRIED_ROWS
        if num_rows <= max_rows
        for num_attended in (len(TRIED_PROMPT) + more for more in TRIED_TOKENS)
        if num_attended <= max_tokens
        for place in {0, num_rows - 1}
    )


def _logits_after(decoder: Decoder, slots: KvSlots, cut: int, adapters: Sequence[str]) -> Tensor:
    """The logits of the tested prompt, [V]: of its first tokens one is decoded, then the others are prefilled. It has
    the first adapter.
    """
    own = adapters[:1]
    decoder.prefill([TRIED_PROMPT[:cut]], [0], adapters=own)
    token_ids_T = torch.tensor(TRIED_PROMPT, device=slots.shape.device)
    positions_T = torch.arange(len(TRIED_PROMPT), device=slots.shape.device)
    decoder.decode(token_ids_T[cut : cut + 1], positions_T[cut : cut + 1], cut + 1, own)
    decoder.prefill([TRIED_PROMPT[cut + 1 : -1]], [0], [cut + 1], own)
    return decoder.decode(token_ids_T[-1:], positions_T[-1:], len(TRIED_PROMPT), own)[0]


def _logits_at(
    decoder: Decoder, slots: KvSlots, num_rows: int, place: int, num_attended: int, adapters: Sequence[str]
) -> Tensor:
    """The logits of the tested prompt, [V], at one place of a batch with other rows, which have all adapters."""
    names = [adapters[(row - place) % len(adapters)] for row in range(num_rows)] if adapters else []
    prompts: list[Sequence[int]] = [COMPANY[row % len(COMPANY)] for row in range(num_rows)]
    prompts[place] = TRIED_PROMPT
    num_attended = max(num_attended, *map(len, prompts))
    slots.reserve(num_rows, num_attended)
    rows = [row for row, prompt in enumerate(prompts) if len(prompt) > 1]
    decoder.prefill([prompts[row][:-1] for row in rows], rows, adapters=[names[row] for row in rows] if names else [])
    device = slots.shape.device
    last_B = torch.tensor([prompt[-1] for prompt in prompts], device=device)
    positions_B = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    return decoder.decode(last_B, positions_B, num_attended, names)[place]
