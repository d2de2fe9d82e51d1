"""Of a batch-invariant engine a request's tokens and log-probs are the same bits, whatever other requests decode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from grmpipe.models.engines.embedded import batch_invariance
from grmpipe.models.engines.embedded.batch_invariance import BatchInvariantDecoder, is_batch_invariant
from grmpipe.models.engines.embedded.kv_slots import KvShape, KvSlots
from grmpipe.models.types import Completion

SHAPE = KvShape(num_layers=1, num_kv_heads=1, head_dim=2, dtype=torch.float32, device=torch.device("cpu"))


def test_a_request_gets_the_same_bits_alone_and_in_any_company(open_engine: Any, ask: Any, prompt_of: Any) -> None:
    torch.set_num_threads(2)  # which the engine does not use: two threads divide products by their rows
    engine = open_engine(batch_invariant=True, max_batch_rows=21, prefill_tokens=20)  # prompts are cut
    mine = [(prompt_of(3 + 17 * i), i) for i in range(4)]

    async def run() -> tuple[list[Completion], list[Completion]]:
        alone = [await ask(engine, prompt_ids, i, max_new_tokens=40) for prompt_ids, i in mine]
        others = [
            ask(engine, prompt_of(2 + 5 * (i % 11)), f"other {i}", max_new_tokens=1 + 3 * i, temperature=0.7)
            for i in range(30)
        ]
        together = await asyncio.gather(
            *others, *(ask(engine, prompt_ids, i, max_new_tokens=40) for prompt_ids, i in mine)
        )
        return alone, together[-len(mine) :]

    alone, together = asyncio.run(run())
    assert together == alone, "tokens and log-probs, bit for bit"


class Leaky:
    """A decoder whose logits change slightly with the number of rows, like a product that sums in another order."""

    row_block = 1

    def prefill(
        self, prompts: Sequence[Sequence[int]], rows: Sequence[int], starts: Sequence[int] = (), *adapters: object
    ) -> None:
        raise AssertionError("a prompt's tokens are fed as if they were decoded")

    def feed(self, token_ids_P: Tensor, positions_P: Tensor, row: int, num_attended: int, adapter: str = "") -> None:
        assert len(token_ids_P) % 8 == 0

    def decode(self, token_ids_B: Tensor, positions_B: Tensor, num_attended: int, *adapters: object) -> Tensor:
        logits_BV = torch.stack([token_ids_B, positions_B], 1).float()
        return logits_BV * (1 + 1e-6 * (len(token_ids_B) > 8))


def test_a_decoder_whose_rows_depend_on_their_number_is_noticed() -> None:
    slots = KvSlots(SHAPE, 256, 512)
    assert not is_batch_invariant(BatchInvariantDecoder(Leaky(), slots), slots, 256, 512)
    assert is_batch_invariant(BatchInvariantDecoder(Leaky(), slots), slots, 8, 512), "there are no more rows than 8"


class Forgetful(Leaky):
    """A decoder whose logits change slightly with the number of tokens that were prefilled at once."""

    def __init__(self) -> None:
        self._num_fed = 0

    def feed(self, token_ids_P: Tensor, positions_P: Tensor, row: int, num_attended: int, adapter: str = "") -> None:
        self._num_fed = len(set(positions_P.tolist()))

    def decode(self, token_ids_B: Tensor, positions_B: Tensor, num_attended: int, *adapters: object) -> Tensor:
        return torch.stack([token_ids_B, positions_B], 1).float() * (1 + 1e-6 * (self._num_fed < 6))


def test_a_decoder_whose_logits_depend_on_where_a_prompt_was_cut_is_noticed() -> None:
    slots = KvSlots(SHAPE, 256, 512)
    assert not is_batch_invariant(BatchInvariantDecoder(Forgetful(), slots), slots, 1, 64)


def test_an_engine_refuses_to_start_where_sums_depend_on_the_batch(
    open_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_invariance, "is_batch_invariant", lambda *_: False)
    with pytest.raises(ValueError, match=r"^train\.deterministic: .*MKL_CBWR=.* or type train\.deter"):
        open_engine(batch_invariant=True)
    open_engine()
