"""The decoder of a running batch: prefills prompts, decodes one token per row, or verifies several.

B: rows that decode, N: prompts, T: positions, Q: query positions, G: KV heads, D: head, V: vocabulary.
"""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from grmpipe.models.engines.embedded.fused_decoder import FusedDecoder, Ids, Names, find_places
from grmpipe.models.engines.embedded.kv_slots import KvShape, KvSlots
from grmpipe.models.lm.lora import with_adapter
from grmpipe.models.lm.moe.expert_routing import Routers, RoutingShape

log = logging.getLogger(__name__)

# Two lengths, to test masks and positions. A model's own words are better: the lowest ids are special tokens of many
# tokenizers, which models never saw in a row, and whose logits 16 bits can't hold.
PROBE_TEXTS = ("The quick brown fox has 12 dogs.", "6 x 7 = 42")
PROBE = ((5, 3, 8, 2, 9, 4, 6), (7, 1, 3, 3))
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # relative to the largest logit


class Decoder(Protocol):
    """The forward passes of a running batch. The running rows are the first rows of the slots.

    row_block: decoding writes to as many rows as run, rounded up to a multiple of it.
    adapters: the name of each prompt's or row's adapter, empty for one without; no names: none has any.
    """

    row_block: int

    def prefill(self, prompts: Sequence[Ids], rows: Ids, starts: Ids = (), adapters: Names = ()) -> None:
        """Compute keys and values of prompts into these rows. No prompt is empty.

        starts: how many tokens each row has cached, after which its prompt continues; empty: none has any.
        """
        ...

    def decode(self, token_ids_B: Tensor, positions_B: Tensor, num_attended: int, adapters: Names = ()) -> Tensor:
        """Feed each row one token at its position. Returns logits_BV of the next token. All positions are below
        num_attended.
        """
        ...

    def verify(self, token_ids_BQ: Tensor, positions_BQ: Tensor, num_attended: int, adapters: Names = ()) -> Tensor:
        """Feed each row several tokens, which see each other by position. Returns logits_BQV of what follows each. A
        row with fewer tokens repeats its last one, position included.
        """
        ...

    def feed(self, token_ids_P: Tensor, positions_P: Tensor, row: int, num_attended: int, adapter: str = "") -> None:
        """Compute keys and values of one row's tokens, each as `decode` does it. They see each other by position."""
        ...

    def weights_changed(self) -> None:
        """The model's weights are whole, and new or others than before: copies of them may be made."""
        ...


class ModuleDecoder:
    """A decoder for any causal LM of transformers with full attention, called unchanged with the slots as its cache.

    Records the experts of each fed token, if the slots have memory for them.
    """

    row_block = 1

    def __init__(self, model: PreTrainedModel, slots: KvSlots) -> None:
        self._model = model
        self._routers = None if slots.shape.routing is None else Routers.of(model)
        self._slots = slots
        self._layers = [SlotLayer(slots, index) for index in range(slots.shape.num_layers)]
        self._cache = Cache(layers=[*self._layers])

    def prefill(self, prompts: Sequence[Ids], rows: Ids, starts: Ids = (), adapters: Names = ()) -> None:
        slots, device = self._slots, self._slots.shape.device
        lengths = [len(prompt) for prompt in prompts]
        longest, starts = max(lengths), starts or [0] * len(prompts)
        # Padding repeats the last token: other tokens might not fit into the row.
        padded = [[*prompt, *[prompt[-1]] * (longest - len(prompt))] for prompt in prompts]
        token_ids_NQ = torch.tensor(padded, device=device)
        last_N1 = torch.tensor(lengths, device=device)[:, None] - 1
        index_NQ = torch.arange(longest, device=device).expand_as(token_ids_NQ).minimum(last_N1)
        positions_NQ = torch.tensor(starts, device=device)[:, None] + index_NQ
        num_attended = max(start + length for start, length in zip(starts, lengths, strict=True))
        seen_N1QT = (torch.arange(num_attended, device=device) <= positions_NQ[..., None])[:, None]
        rows_N = torch.tensor(rows, device=device)
        places_NQ = rows_N[:, None] * slots.tokens_per_row + positions_NQ
        self._call(token_ids_NQ, positions_NQ, places_NQ, rows_N, seen_N1QT, adapters)

    def decode(self, token_ids_B: Tensor, positions_B: Tensor, num_attended: int, adapters: Names = ()) -> Tensor:
        return self.verify(token_ids_B[:, None], positions_B[:, None], num_attended, adapters)[:, 0]

    def verify(self, token_ids_BQ: Tensor, positions_BQ: Tensor, num_attended: int, adapters: Names = ()) -> Tensor:
        num_rows, device = len(token_ids_BQ), token_ids_BQ.device
        places_BQ = torch.arange(num_rows, device=device)[:, None] * self._slots.tokens_per_row + positions_BQ
        seen_B1QT = (torch.arange(num_attended, device=device) <= positions_BQ[..., None])[:, None]
        return self._call(token_ids_BQ, positions_BQ, places_BQ, slice(num_rows), seen_B1QT, adapters, logits_to_keep=0)

    def feed(self, token_ids_P: Tensor, positions_P: Tensor, row: int, num_attended: int, adapter: str = "") -> None:
        device = token_ids_P.device
        places_P = row * self._slots.tokens_per_row + positions_P
        seen_P11T = (torch.arange(num_attended, device=device) <= positions_P[:, None])[:, None, None]
        rows_P = torch.full_like(positions_P, row)
        self._call(token_ids_P[:, None], positions_P[:, None], places_P, rows_P, seen_P11T, [adapter])

    def weights_changed(self) -> None:
        """There are no copies."""

    def _call(
        self,
        token_ids_NQ: Tensor,
        positions_NQ: Tensor,
        places: Tensor,
        rows: slice | Tensor,
        seen_NHQT: Tensor,
        adapters: Sequence[str],
        logits_to_keep: int = 1,
    ) -> Tensor:
        """logits_to_keep: how many of each row's last tokens get logits; 0: all. One pass for each adapter."""
        num_rows, num_queries = token_ids_NQ.shape
        seen_NHQT = seen_NHQT.expand(num_rows, 1, num_queries, -1)
        if len(set(adapters)) > 1:
            rows_N = torch.arange(num_rows, device=token_ids_NQ.device) if isinstance(rows, slice) else rows
            places_NQ, logits = places.view(num_rows, num_queries), torch.empty(0)
            for name, own_N in find_places(adapters, token_ids_NQ.device).items():
                assert own_N is not None
                some = (token_ids_NQ[own_N], positions_NQ[own_N], places_NQ[own_N], rows_N[own_N], seen_NHQT[own_N])
                part = self._call(*some, [name], logits_to_keep)
                logits = logits if len(logits) else part.new_empty(num_rows, *part.shape[1:])
                logits[own_N] = part
            return logits
        for layer in self._layers:
            layer.aim(places.flatten(), rows, seen_NHQT.shape[-1])
        with with_adapter(self._model, next(iter(adapters), "")):
            if self._routers is None:
                return self._logits(token_ids_NQ, positions_NQ, seen_NHQT, logits_to_keep)
            with self._routers.record_routing() as recording:
                logits = self._logits(token_ids_NQ, positions_NQ, seen_NHQT, logits_to_keep)
        self._slots.write_experts(places.flatten(), recording.experts_TLK)
        return logits

    def _logits(self, token_ids_NQ: Tensor, positions_NQ: Tensor, seen_NHQT: Tensor, logits_to_keep: int) -> Tensor:
        logits = self._model(
            input_ids=token_ids_NQ,
            position_ids=positions_NQ,
            attention_mask=seen_NHQT,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        ).logits
        assert isinstance(logits, Tensor)
        return logits


class SlotLayer(CacheLayerMixin):
    """One layer of a transformers cache that writes to given rows, and shows those rows."""

    def __init__(self, slots: KvSlots, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self._slots, self._index = slots, index

    def aim(self, places_P: Tensor, rows: slice | Tensor, num_attended: int) -> None:
        self._places_P, self._rows, self._num_attended = places_P, rows, num_attended

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        kv_NQ2GD = torch.stack([key_states, value_states], 1).permute(0, 3, 1, 2, 4)
        self._slots.write(self._index, self._places_P, kv_NQ2GD.flatten(0, 1).flatten(1))
        return self._slots.read(self._index, self._rows, self._num_attended)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        return None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._num_attended, 0

    def get_seq_length(self) -> int:
        return 0  # every call passes its own positions and mask

    def get_max_length(self) -> int:
        return self._slots.tokens_per_row


@torch.no_grad()
def open_decoder(
    model: PreTrainedModel,
    max_rows: int,
    max_tokens: int,
    return_routed_experts: bool = False,
    probe: Sequence[Sequence[int]] = PROBE,
) -> tuple[Decoder, KvSlots]:
    """The fastest decoder whose logits equal the model's own on the tokens of `probe`. ValueError if there is none, or
    if `return_routed_experts` is set for a model without experts.
    """
    with with_adapter(model, ""):
        expected_NV = torch.stack([model(torch.tensor([ids], device=model.device)).logits[0, -1] for ids in probe])
    shape = _measure_kv_shape(model, Routers.of(model).shape if return_routed_experts else None)
    kinds: list[type[FusedDecoder] | type[ModuleDecoder]] = [ModuleDecoder]
    if FusedDecoder.supports(model):
        kinds.insert(0, FusedDecoder)
    for kind in kinds:
        slots = KvSlots(shape, max(max_rows, len(probe)), max(max_tokens, *map(len, probe)))
        decoder = kind(model, slots)
        error, most = _probe_error(decoder, slots, expected_NV, probe), PROBE_TOLERANCE[shape.dtype]
        if error <= most:
            return decoder, slots
        log.warning(
            "a %s isn't decoded by the %s: its logits differ from the model's by %.2g of the largest (at most %g)",
            type(model).__name__, kind.__name__, error, most,
        )  # fmt: skip
    raise ValueError(_unfit(model, "its logits differ when it decodes from a cache"))


def _probe_error(decoder: Decoder, slots: KvSlots, expected_NV: Tensor, probe: Sequence[Sequence[int]]) -> float:
    """The error of a prefill and a decoding step, relative to the largest logit."""
    longest = max(len(ids) for ids in probe)
    slots.reserve(len(probe), longest)
    decoder.prefill([ids[:-1] for ids in probe], range(len(probe)))
    last_N = torch.tensor([ids[-1] for ids in probe], device=expected_NV.device)
    positions_N = torch.tensor([len(ids) - 1 for ids in probe], device=expected_NV.device)
    error_NV = decoder.decode(last_N, positions_N, longest).float() - expected_NV.float()
    return float(error_NV.abs().max() / expected_NV.float().abs().max().clamp_min(1e-6))


def _measure_kv_shape(model: PreTrainedModel, routing: RoutingShape | None) -> KvShape:
    """The shape from the cache that the model itself fills: configs name heads in too many ways."""
    cache = model(torch.tensor([PROBE[0]], device=model.device), use_cache=True).past_key_values
    if not isinstance(cache, DynamicCache):
        raise ValueError(_unfit(model, "its cache isn't keys and values only"))
    keys_and_values: list[Tensor] = []
    for layer in cache.layers:
        if type(layer) is not DynamicLayer:
            raise ValueError(_unfit(model, "not all of its layers have full attention"))
        assert layer.keys is not None and layer.values is not None
        keys_and_values += [layer.keys, layer.values]
    _, num_kv_heads, _, head_dim = keys_and_values[0].shape
    if any(states.shape != keys_and_values[0].shape for states in keys_and_values):
        raise ValueError(_unfit(model, "keys and values of its layers differ in shape"))
    return KvShape(
        num_layers=len(cache.layers),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=keys_and_values[0].dtype,
        device=model.device,
        routing=routing,
    )


def _unfit(model: PreTrainedModel, why: str) -> str:
    return f"engine: embedded can't run a {type(model).__name__}: {why}; give another model or engine"
