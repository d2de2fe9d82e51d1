"""Thins the journals of a run: a draft of each, in a process of its own, which the run puts in the journal's place.

    python -m grmpipe.run_dir.thinning <a ThinningJob as JSON>      prints draft -> how many bytes of the journal it has

Lines that no resume needs lose their numbers, or their text too. Their number and order stay, and all lines after
them are copied to the byte.
"""

import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from grmpipe.config.journals import JournalsConfig
from grmpipe.models.seeds import first_name, is_drawn
from grmpipe.observe.journal import UNREADABLE, Thinning, encode_line, end_of_last_line, parsed, read_thinning
from grmpipe.observe.recorder import JUDGEMENTS, ROLLOUTS
from grmpipe.observe.records import NUMBERS, TEXT, THINNED, Record, drop_numbers
from grmpipe.run_dir.checkpoints import Checkpoints, load_state

DRAFT = ".thin"
# What stands where text stood, if it is of the same type: other things have names of a user.
EMPTY: Mapping[str, object] = {
    "text": "", "detail": "", "stop_text": "", "thought_chars": 0, "messages": [], "replies": [], "opening": [],
    "state": "", "tool_calls": [], "rubric": [], "info": {}, "columns": {}, "unread": {},
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThinningJob:
    """share: of the groups that stay whole, by seed; None: the text of all stays. until: journal -> the end of what may
    be thinned, as a mark counts it.
    """

    run_dir: str
    share: float | None
    seed: int
    until: Mapping[str, int]


def plan_thinning(run_dir: Path, config: JournalsConfig, seed: int, least_bytes: int) -> ThinningJob | None:
    """Thin what the oldest checkpoint doesn't need, where that is more than `least_bytes` and than all that was thinned
    before: so all work is a small multiple of what is written. None: nothing to do.
    """
    until = {
        name: end
        for name, end in find_unneeded(run_dir).items()
        if (thinned := read_thinning(run_dir / name)) is not None
        and end - thinned.until > max(least_bytes, (thinned.until - thinned.removed) * (least_bytes > 0))
    }
    return ThinningJob(run_dir=str(run_dir), share=config.kept_share, seed=seed, until=until) if until else None


def find_unneeded(run_dir: Path) -> dict[str, int]:
    """Journal -> the end of the lines that no checkpoint needs. Of a checkpoint that can't be read it isn't known."""
    checkpoints = Checkpoints(directory=run_dir / "checkpoints", keep=1)
    try:
        marks = [load_state(path).journal_marks for path in checkpoints.list_published()]
    except (OSError, msgspec.MsgspecError):
        return {}
    return {
        name: min((mark[name].offset if name in mark else 0 for mark in marks), default=0)
        for name in (ROLLOUTS, JUDGEMENTS)
    }


def thin_record(record: Record, job: ThinningJob) -> Record:
    """Thin a line in place."""
    if THINNED in record:
        return record
    group = first_name(str(record.get("group_id")))
    if job.share is not None and is_drawn(job.seed, f"journals.keep/{group}", job.share):
        return record
    drop_numbers(record)
    if job.share is not None:
        drop_text(record)
    return {**record, THINNED: NUMBERS if job.share is None else TEXT}


def drop_text(value: object) -> None:
    """Empty all texts of a line in place."""
    if isinstance(value, list):
        for one in value:
            drop_text(one)
    elif isinstance(value, dict):
        value |= {name: empty for name, empty in EMPTY.items() if type(value.get(name)) is type(empty)}
        if isinstance(value.get("reference"), str):
            value["reference"] = None
        for one in value.values():
            drop_text(one)


def thin_line(line: bytes, job: ThinningJob, thinning: Thinning | None = None) -> bytes:
    """thinning: for the first line. A line that can't be read stays as it is."""
    try:
        record, run_id, is_checked = parsed(line)
        thinned = thin_record(record, job)
    except UNREADABLE:
        return line
    if thinned is record and thinning is None:
        return line
    return encode_line(thinned | (thinning.to_record() if thinning is not None else {}), run_id, checked=is_checked)


def thin_journal(path: Path, draft: Path, job: ThinningJob) -> int:
    """Write a thinned draft of a journal. Returns how many bytes of the journal it has; 0: nothing may be thinned.

    Raises OSError, ValueError.
    """
    before, until = read_thinning(path), job.until[path.name]
    with path.open("rb") as old, draft.open("x+b") as new:
        first = old.readline()
        parsed(first)  # it says what was thinned, so it must be readable
        if len(first) >= until:
            return 0
        new.write(thin_line(first, job, before))
        copy_until(old, new, before.until - before.removed)
        begin = old.tell()
        # The last line before the mark stays: by it a resume sees that the mark holds.
        while (line := old.readline()) and begin + len(line) + before.removed < until:
            new.write(thin_line(line, job))
            begin += len(line)
        done = Thinning(until=begin + before.removed, removed=begin + before.removed - new.tell())
        new.seek(0)
        new.write(thin_line(first, job, done))
        new.seek(0, os.SEEK_END)
        old.seek(begin)
        shutil.copyfileobj(old, new)
        copied, size, end = old.tell(), new.tell(), end_of_last_line(new)  # a line may have been half written
        new.truncate(end)
        new.flush()
        os.fsync(new.fileno())
    return copied - (size - end)


def copy_until(old: BinaryIO, new: BinaryIO, end: int) -> None:
    while old.tell() < end and (block := old.read(min(1 << 20, end - old.tell()))):
        new.write(block)


def main() -> None:
    os.nice(10)
    job = msgspec.json.decode(sys.argv[1], type=ThinningJob)
    drafts = {path: path.with_name(path.name + DRAFT) for path in map(Path(job.run_dir).joinpath, job.until)}
    copied = {str(draft): thin_journal(path, draft, job) for path, draft in drafts.items()}
    sys.stdout.write(msgspec.json.encode({draft: end for draft, end in copied.items() if end}).decode())


if __name__ == "__main__":
    main()
