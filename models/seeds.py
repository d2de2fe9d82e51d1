"""Seeds by name: the same name gives the same seed. Pure."""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, name: str) -> int:
    """A seed in [0, 2**63) that depends only on its arguments: not on the process, not on the order of calls."""
    digest = hashlib.blake2b(f"{run_seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
