"""Which tensors of a push show in an SGLang server's parameters, by the server's checksums. Pure: sends nothing.

A server merges some tensors of a checkpoint into one parameter. It doesn't report which: the names tell. Nothing is
said about a tensor whose parameter isn't found.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from grmpipe.models.engines.typed_json import read_as

# (the end of a checkpoint's name, the end of SGLang's).
MERGED = (
    (r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight$", ".experts.w13_weight"),
    (r"\.experts\.\d+\.(down_proj|w2)\.weight$", ".experts.w2_weight"),
    (r"\.(q|k|v)_proj\.(weight|bias)$", r".qkv_proj.\2"),
    (r"\.(gate|up)_proj\.weight$", ".gate_up_proj.weight"),
)


class Rank(msgspec.Struct):
    checksums: dict[str, str | int]


class CheckedWeights(msgspec.Struct):
    ranks: list[Rank] | None = None


def read_digests(reply: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Parameter -> its checksum on every rank, from an answer of /weights_checker. Raises NoAnswer."""
    ranks = [rank.checksums for rank in read_as(CheckedWeights, reply).ranks or ()]
    return {name: tuple(str(rank[name]) for rank in ranks if name in rank) for name in (ranks[0] if ranks else ())}


def find_unapplied(
    sent: Mapping[str, str],
    last_sent: Mapping[str, str],
    before: Mapping[str, tuple[str, ...]],
    after: Mapping[str, tuple[str, ...]],
) -> tuple[str, ...]:
    """Tensors (name -> checksum) that changed since the last push while their parameter changed on no rank."""
    changed = [name for name, checksum in sent.items() if checksum and last_sent.get(name, checksum) != checksum]
    return tuple(
        sorted(
            name
            for name in changed
            if (held := _parameter(name, after)) and held in before and before[held] == after[held]
        )
    )


def _parameter(name: str, known: Mapping[str, tuple[str, ...]]) -> str | None:
    if name in known:
        return name
    merged = (re.sub(end, own, name) for end, own in MERGED if re.search(end, name))
    return next((parameter for parameter in merged if parameter in known), None)
