"""Token ids and log-probs of a journal's line, packed into one field of it. Pure.

    {..., "turns": [{"token_ids": 17, "logprobs": 17, ...}], ..., "packed": "eJxjYGBgY..."}

Where a list stood stands its length. `packed` is base64 of zlib of all ids of the line (int32), then all its log-probs
(float32), little-endian, in the order in which they stand. So the line's checksum and its torn tail mean what they do
without it, and judgements that share a prompt share its bytes. A thinned line has the lengths, and nothing
packed.
"""

import base64
import math
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from grmpipe.models.types import UNKNOWN_ID

Record = dict[str, Any]
PACKED, THINNED, TEACHER = "packed", "thinned", "teacher"
NUMBERS, TEXT = "numbers", "text"  # what was dropped of a thinned line
MAX_NUMBERS = 1 << 26  # of a line: more than any has, and less than the memory
UNKNOWN_LOGPROB = math.nan  # of a thinned line, as it is read: nothing can be trained on it
IDS, LOGPROBS = ("token_ids", "new_ids", "prompt_ids"), "logprobs"
NESTED = ("turns", "judgements", "failures", "completion", "failed", "principles")  # none of them is a user's
BY_NAME = "by_judge"


def pack_numbers(record: Record) -> Record:
    """Pack a record in place. Log-probs come back as the float32 that the sampler gave."""
    ids: list[int] = []
    logprobs: list[float] = []
    for holder, key in _places(record):
        (logprobs if key == LOGPROBS else ids).extend(holder[key])
        holder[key] = len(holder[key])
    plain = np.array(ids, "<i4").tobytes() + np.array(logprobs, "<f4").tobytes()
    record[PACKED] = base64.b64encode(zlib.compress(plain)).decode("ascii")
    return record


def drop_numbers(record: Record) -> Record:
    """Drop the ids and log-probs of a record in place, packed or not; their lengths stay. A teacher's leave none."""
    record.pop(TEACHER, None)
    if record.pop(PACKED, None) is None:
        for holder, key in _places(record):
            holder[key] = len(holder[key])
    return record


def unpack_numbers(record: Record) -> Record:
    """Undo `pack_numbers` in place; a record that isn't packed stays as it is. Numbers that were dropped are unknown
    ones, as many. Raises ValueError if its numbers don't fit.
    """
    if PACKED not in record and THINNED not in record:
        return record
    packed = record.pop(PACKED, None)
    places = list(_places(record))
    lengths = [holder[key] for holder, key in places]
    if not all(type(length) is int and length >= 0 for length in lengths) or sum(lengths) > MAX_NUMBERS:
        raise ValueError("its packed numbers have no lengths that a line can have")
    if packed is None:
        for holder, key in places:
            holder[key] = [UNKNOWN_LOGPROB if key == LOGPROBS else UNKNOWN_ID] * holder[key]
        return record
    num_logprobs = sum(length for length, (_, key) in zip(lengths, places, strict=True) if key == LOGPROBS)
    num_ids = sum(lengths) - num_logprobs
    try:
        plain = zlib.decompressobj().decompress(base64.b64decode(packed, validate=True), 4 * sum(lengths) + 1)
    except zlib.error as error:
        raise ValueError(f"its packed numbers can't be read ({error})") from error
    if len(plain) != 4 * (num_ids + num_logprobs):
        raise ValueError(f"its packed numbers are {len(plain) // 4}, not {num_ids} ids and {num_logprobs} log-probs")
    ids = iter(np.frombuffer(plain, "<i4", num_ids).tolist())
    logprobs = iter(np.frombuffer(plain, "<f4", offset=4 * num_ids).tolist())
    for holder, key in places:
        holder[key] = list(islice(logprobs if key == LOGPROBS else ids, holder[key]))
    return record


def _places(record: Record) -> Iterator[tuple[Record, str]]:
    """Every list of ids or log-probs, by the object that holds it and its key, in the order of the line."""
    for key, value in list(record.items()):
        if key in IDS or key == LOGPROBS:
            yield record, key
        elif key in NESTED or key == BY_NAME:
            nested = value.values() if key == BY_NAME else value if isinstance(value, list | tuple) else [value]
            for one in nested:
                yield from _places(one)
