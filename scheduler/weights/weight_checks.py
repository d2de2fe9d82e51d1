"""Checks that prove a push: receipts against what was sent, log-probs against the learner's. Pure: asks no engine."""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from grmpipe.models.types import WeightBucket, WeightReceipt, WeightTensor

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LAYERS_SHOWN = 4
PROBE_FLOOR = 0.05  # in nats: an error below it may grow by any factor
NOISE_FACTOR = 10.0  # by which an error above it may grow from push to push


class WeightMismatch(Exception):
    """An engine has other weights than were sent. The run must stop."""


class WeightsNotFinite(ArithmeticError):
    """The learner itself scores the probe with nan or inf. Nothing was sent."""


def check_finite(logprobs: Sequence[float], version: int) -> None:
    if not all(map(math.isfinite, logprobs)):
        raise WeightsNotFinite(
            f"the learner's log-probs are not finite at version {version}: training diverged; try a lower train.lr"
        )


def check_receipt(engine: str, version: int, sent: Mapping[str, str], receipt: WeightReceipt) -> None:
    """Check that what was sent (name -> checksum) arrived, and that the engine has it now. An empty checksum isn't
    checked: the probe replaces it. Raises WeightMismatch.
    """
    if receipt.version != version:
        raise WeightMismatch(f"{engine} reports version {receipt.version}; version {version} was sent")
    got = receipt.checksums
    wrong = sorted(name for name in sent.keys() | got.keys() if not _agree(sent.get(name), got.get(name)))
    if wrong:
        first = wrong[0]
        raise WeightMismatch(
            f"{engine} received other weights than version {version} in {describe_tensors(wrong)}: "
            f"{first} arrived as {_checksum_text(got.get(first))}, {_checksum_text(sent.get(first))} was sent (xxh3-64)"
        )
    if receipt.unapplied:
        raise WeightMismatch(
            f"{engine} received version {version} but has not applied it in "
            f"{describe_tensors(sorted(receipt.unapplied))}: its parameters don't show these tensors; "
            "report this with the output of task=doctor"
        )


def check_probe(
    engine: str, version: int, expected: Sequence[float], scored: Sequence[float], tolerance: float
) -> float:
    """Check that the engine samples from these weights. Returns the error in nats. Raises WeightMismatch."""
    error = probe_error(expected, scored)
    if not error <= tolerance:  # also true for nan
        raise WeightMismatch(
            f"{engine} received version {version}, but its score of the probe differs by {error:.2g} nats from the "
            f"learner's (median of the likelier tokens; tolerance {tolerance:g}): its weights were not applied"
        )
    return error


def probe_error(expected: Sequence[float], scored: Sequence[float]) -> float:
    """The median difference over the likelier half of the tokens, which the policy could have sampled.

    For an unlikely token, two correct implementations in 16 bits may differ by tenths of a nat; other weights differ
    everywhere. Any nan makes the result nan.
    """
    errors_T = np.abs(np.subtract(expected, scored))
    if np.isnan(errors_T).any():
        return math.nan
    likelier = np.argsort(np.negative(expected), kind="stable")[: max(1, math.ceil(len(errors_T) / 2))]
    return float(np.median(errors_T[likelier]))


def probe_bound(tolerance: float, last_error: float | None) -> float:
    """The allowed error: the tolerance or, after a good push, NOISE_FACTOR times its error if that is less. That
    error is the noise between the two implementations, and grows only slowly while a policy sharpens.
    """
    return tolerance if last_error is None else min(tolerance, max(PROBE_FLOOR, NOISE_FACTOR * last_error))


def describe_tensors(names: Collection[str]) -> str:
    """Names of tensors in short: all of one layer as `model.layers.3.*`, a single one by its name."""
    counts = Counter(_layer_of(name) for name in names)
    layers = [next(n for n in names if _layer_of(n) == layer) if count == 1 else f"{layer}.* ({count} tensors)"
              for layer, count in counts.items()]  # fmt: skip
    more = f" and {len(layers) - LAYERS_SHOWN} more layers" if len(layers) > LAYERS_SHOWN else ""
    return ", ".join(layers[:LAYERS_SHOWN]) + more


def describe_span(bucket: WeightBucket) -> str:
    """The tensors of a bucket, for a message."""
    names = [tensor.name for tensor in bucket.tensors]
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}" if names else "empty"


def num_bytes(tensor: WeightTensor) -> int:
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def _agree(sent: str | None, got: str | None) -> bool:
    if sent is None or got is None:
        return False  # too few or too many tensors
    return sent == got or not sent or not got


def _checksum_text(checksum: str | None) -> str:
    return "nothing" if checksum is None else checksum or "something unhashed"


def _layer_of(name: str) -> str:
    """The layer of a tensor: its name up to the layer's number, or up to its siblings outside of layers."""
    layer = re.match(r".*?\.\d+(?=\.)", name)
    return layer[0] if layer else name.rpartition(".")[0] or name
