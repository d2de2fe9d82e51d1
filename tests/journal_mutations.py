"""Lines of journals with a few places changed, by a seed: values of other types and sizes, fields that are missing or
from elsewhere in the line, values that are nested too deeply, bytes that are no text.
"""

from __future__ import annotations

import copy
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from viewed_run import (
    answer,
    by_judges,
    evaluate,
    judge_jointly,
    judge_labelled_work,
    judgement,
    report,
    thin_run,
    write_run,
)

from grmpipe.observe.journal import CHECKSUM
from grmpipe.observe.recorder import Recorder

Record = dict[str, Any]
Place = tuple[str | int, ...]
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**40, 2**63 - 1, 2**63, -(2**63) - 1, 2**70, 10**30, 1.5, -0.5, 1e308, -1e308, 5e-324,
    float("nan"), float("inf"), "", "x", "42", "\u202e\0\x1b[2J", "p" * 2000, [], {}, [[]], [None], [1, 2**64],
    {"a": {}}, {"": None}, [["x"] * 3],
)  # fmt: skip
DEPTHS = (200, 900, 970, 990, 1100, 3000, 50_000)  # around Python's limit, and far above


def write_all_journals(folder: Path) -> Path:
    """A run with every journal that the viewer and the readers know."""
    run_dir = write_run(folder / "whole")
    evaluate(run_dir, prompts="held_out", step=1, score=5.0)
    judge_jointly(run_dir, "both")
    recorder = Recorder(run_dir)
    own = report(2.0, judgement("g1", (1,), (2.0,), "strict words"))
    recorder.record_verdict(answer("g1", 1, ""), by_judges(strict=own, kind=report(9.0)))
    recorder.close()
    labelled = judge_labelled_work(folder / "labelled") / "judged.jsonl"
    labelled.rename(run_dir / "judged.jsonl")
    return run_dir


def collect_records(folder: Path) -> dict[str, list[Record]]:
    """Journal -> records of every form: plain, packed and thinned. Without their checksums, so that changes count."""
    runs = (
        write_all_journals(folder),
        write_run(folder / "packed", compact=True),
        thin_run(write_run(folder / "thinned"), 1e-9),
    )
    found = defaultdict[str, list[Record]](list)
    for path in (path for run in runs for path in sorted(run.glob("*.jsonl"))):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            record.pop(CHECKSUM, None)
            found[path.name].append(record)
    return dict(found)


def list_places(value: object, place: Place = ()) -> Iterator[Place]:
    if place:
        yield place
    if isinstance(value, dict | list):
        for key, own in value.items() if isinstance(value, dict) else enumerate(value):
            yield from list_places(own, (*place, key))


def find(value: Any, place: Place) -> Any:
    for key in place:
        value = value[key]
    return value


def mutate(record: Record, rng: random.Random) -> Record:
    record = copy.deepcopy(record)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = [*list_places(record)]
        if not places:
            break
        *holder, key = rng.choice(places)
        how = rng.random()
        if how < 0.6:
            find(record, tuple(holder))[key] = copy.deepcopy(rng.choice(VALUES))
        elif how < 0.8:
            del find(record, tuple(holder))[key]
        else:
            find(record, tuple(holder))[key] = copy.deepcopy(find(record, rng.choice(places)))
    return record


def mutate_line(record: Record, rng: random.Random) -> bytes:
    """A line with its end."""
    how = rng.random()
    if how < 0.9:
        return json.dumps(mutate(record, rng)).encode() + b"\n"
    if how < 0.95:
        *holder, key = rng.choice([*list_places(record)])
        record = copy.deepcopy(record)
        find(record, tuple(holder))[key] = "DEEP"
        depth = rng.choice(DEPTHS)
        return json.dumps(record).replace('"DEEP"', "[" * depth + "]" * depth).encode() + b"\n"
    whole = bytearray(json.dumps(record).encode())
    for _ in range(rng.randint(1, 3)):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    return bytes(whole).replace(b"\n", b" ") + b"\n"


def write_mutated(run_dir: Path, records: dict[str, list[Record]], rng: random.Random, num_lines: int) -> Path:
    """A run with so many mutated lines in each journal."""
    run_dir.mkdir()
    for name, own in records.items():
        (run_dir / name).write_bytes(b"".join(mutate_line(rng.choice(own), rng) for _ in range(num_lines)))
    return run_dir
