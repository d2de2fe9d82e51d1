"""Seeds by name: the same name gives the same seed. Pure."""

import hashlib
import re

REPEAT = re.compile(r"(?<=\d{6})~\d+")  # suffix that a resume adds to the id of a group that is sampled again


def derive_seed(run_seed: int, name: str) -> int:
    """A seed in [0, 2**63) that depends only on its arguments: not on the process, not on the order of calls."""
    digest = hashlib.blake2b(f"{run_seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def is_drawn(run_seed: int, name: str, share: float) -> bool:
    """Whether a name is in a sample of this share: the same names every time."""
    return derive_seed(run_seed, name) < share * 2**63


def name_repetition(group_id: str, times: int) -> str:
    """The id of a group that is sampled again."""
    return f"{first_name(group_id)}~{times}"


def first_name(name: str) -> str:
    """A group's id, or the name of a request about it, without that suffix: a group that is sampled again draws the
    same numbers."""
    return REPEAT.sub("", name) if "~" in name else name
