"""Floating-point operations of a model's passes over packed samples, by their formula. Pure: runs no model.

A product and its sum are two operations. A pass takes 2 operations per weight and token and, in attention, for each
pair of a query and a key that it sees, 2 per value of the query (scores) and 2 per value of the output (PaLM, arXiv
2204.02311, appendix B). Backward takes twice as much.

Counted is what the model needs: a shared prefix once, the pairs that a causal mask leaves (as Megatron-LM does; PaLM
and torchtitan count the masked half too), the experts that a token is sent to, the output head where one is trained.
Not counted is what an implementation adds: recomputed activations, padding, norms, softmax.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FULL = 0  # as a window: none


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSizes:
    """The sizes of packed samples that decide the work of a pass. S: samples.

    lengths_S: tokens that each sample holds itself; prefixes_S: tokens before them that other samples hold.
    head_rows: tokens at which the output head is computed.
    """

    lengths_S: Sequence[int]
    prefixes_S: Sequence[int]
    head_rows: int

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths_S)

    def pairs(self, window: int = FULL) -> int:
        """Pairs of a query and a key that it sees, itself included."""
        both = zip(self.lengths_S, self.prefixes_S, strict=True)
        return sum(_pairs_before(before + own, window) - _pairs_before(before, window) for own, before in both)


def _pairs_before(end: int, window: int) -> int:
    """The pairs of the queries at positions 0 to end - 1 of a sample: the query at position p sees p + 1 keys, or the
    last `window` of them.
    """
    ramp = min(end, window) if window else end
    return ramp * (ramp + 1) // 2 + (end - ramp) * window


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """The weights and widths of one model that decide the operations of its passes.

    layer_weights: those of the layers' matrices that multiply a token, so only of the experts it is sent to.
    head_weights: those of the output head. adapter_weights: trained instead of both; 0: both are trained.
    attention: window (FULL: none) -> operations for each pair of query and key, over all layers with this window.
    """

    layer_weights: int
    head_weights: int
    attention: Mapping[int, int]
    adapter_weights: int = 0

    def forward(self, sizes: PackedSizes) -> float:
        """The operations of a pass without gradients."""
        return self._matrices(sizes) + self._adapters(sizes) + self._attended(sizes)

    def count_training(self, sizes: PackedSizes) -> float:
        """The operations of forward and backward. Frozen weights have no gradient: they take twice a forward pass."""
        matrices = (2 if self.adapter_weights else 3) * self._matrices(sizes)
        return matrices + 3 * (self._adapters(sizes) + self._attended(sizes))

    def _matrices(self, sizes: PackedSizes) -> float:
        return 2.0 * (self.layer_weights * sizes.num_tokens + self.head_weights * sizes.head_rows)

    def _adapters(self, sizes: PackedSizes) -> float:
        return 2.0 * self.adapter_weights * sizes.num_tokens

    def _attended(self, sizes: PackedSizes) -> float:
        return float(sum(each * sizes.pairs(window) for window, each in self.attention.items()))
