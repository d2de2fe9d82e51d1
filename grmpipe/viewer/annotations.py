"""Annotations: what raters say of a run's answers, in a file whose lines are complete label rows.

{"time":.., "id":.., "rater": "anna", "run":.., "group": "g1", "sibling": 0, "prompt":.., "response":.., "right": true}
{"time":.., "id":.., "rater": "anna", "undoes": "<id>"}

A line is on the disk before `append` returns. A later line of the same rater on the same answer and field replaces the
earlier one.
"""

import contextlib
import fcntl
import functools
import io
import json
import math
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from grmpipe.data.rubrics import encode_criterion
from grmpipe.models.stored_files import sync_directory
from grmpipe.observe.journal import end_of_last_line
from grmpipe.observe.plain_json import json_bytes
from grmpipe.run_dir.directory import NO_LOCKS
from grmpipe.types import Criterion
from grmpipe.viewer.details import Sibling
from grmpipe.viewer.journal_lines import DROPPED

ANNOTATIONS = "annotations.jsonl"
FIELDS = ("right", "score", "best", "met", "unmet", "note")  # of a form, which has one of them
MOST_CHARS = 20_000  # of a note
HALF = re.compile("[\ud800-\udfff]")  # half of a surrogate pair, which no file of labels may hold
Line = dict[str, object]


class Annotation(msgspec.Struct, frozen=True, kw_only=True):
    """A line without the texts that it is about. share: the probability with which its answer came into the queue."""

    id: str
    time: str = ""
    rater: str = ""
    group: str = ""
    evaluation: str = ""
    round: int = 0
    sibling: int | None = None
    right: bool | None = None
    score: float | None = None
    best: int | None = None
    criterion: str | None = None
    note: str | None = None
    share: float | None = None
    undoes: str = ""

    @property
    def field(self) -> str:
        """What a later line replaces."""
        if self.criterion is not None:
            return f"criterion {self.criterion}"
        return next((name for name in ("right", "score", "best", "note") if getattr(self, name) is not None), "")

    @property
    def key(self) -> tuple[object, ...]:
        return (self.rater, *self.place, self.field)

    @property
    def place(self) -> tuple[str, int, str, int | None]:
        return self.evaluation, self.round, self.group, self.sibling

    @property
    def words(self) -> str:
        """What it says."""
        if self.criterion is not None:
            return f"{'met' if self.right else 'not met'}: {self.criterion}"
        if self.best is not None:
            return f"best: {self.best}"
        if self.score is not None:
            return f"score {self.score:g}"
        return self.note if self.note is not None else "right" if self.right else "wrong"


@functools.lru_cache(maxsize=16)
def read_annotations(path: Path, size: int, changed_ns: int) -> tuple[Sequence[Annotation], int]:
    """The annotations that stand, in the order of their lines, and the number of lines that can't be read.

    size, changed_ns: of the file, to read it again once it grew.
    """
    standing: dict[tuple[object, ...], list[Annotation]] = {}
    found, undone, unreadable = list[Annotation](), set[str](), 0
    decoder = msgspec.json.Decoder(Annotation)
    for line in path.read_bytes().split(b"\n")[:-1] if size else ():  # a cut last line was never confirmed
        try:
            one = decoder.decode(line)
        except (msgspec.DecodeError, RecursionError):
            unreadable += bool(line.strip())
            continue
        undone.add(one.undoes)
        found.append(one)
    for one in found:
        if one.field and one.id not in undone:
            standing.setdefault(one.key, []).append(one)
    last = {lines[-1].id for lines in standing.values()}
    return [one for one in found if one.id in last], unreadable


def append(path: Path, line: Line) -> None:
    """Append a line and return once it is on the disk. Any number of processes may append. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # released with the file
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        end = heal(file)
        written = file.write(data := json_bytes(line) + b"\n")
        if written != len(data):
            file.truncate(end)
            raise OSError(f"{path}: only part of a line could be written; is the disk full?")
        os.fsync(file.fileno())
    if not end:
        sync_directory(path.parent)


def heal(file: io.FileIO) -> int:
    """End the file behind a whole line, and return the place. A last line that lacks nothing but its newline stays: an
    editor may have left it so. One that was cut was never confirmed, and goes.
    """
    end = end_of_last_line(file)
    file.seek(end)
    if rest := file.read():
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(json.loads(rest), dict):
                file.write(b"\n")
                return end + len(rest) + 1
        file.truncate(end)
    return end


# -- lines -------------------------------------------------------------------------------------------------------------


def make_line(rater: str, **more: object) -> Line:
    return {"time": datetime.now(UTC).isoformat(timespec="seconds"), "id": secrets.token_hex(8), "rater": rater, **more}


def make_label(
    form: Mapping[str, str],
    siblings: Sequence[Sibling],
    sibling: int,
    scale: tuple[float, float] | None,
    rubric: Sequence[Criterion],
) -> Line:
    """What a form says of a sibling, as a label row without its head. scale: the ends of the judge's, where known.
    rubric: the criteria, of which `met` and `unmet` give the place.

    Of an episode the response is its last answer. Raises ValueError.
    """
    one = next((one for one in siblings if one.row.sibling == sibling), None)
    given = [name for name in FIELDS if form.get(name, "").strip()]
    if one is None or len(given) != 1:
        raise ValueError(f"expected a sibling of the group and one of {', '.join(FIELDS)}, got {', '.join(given)}")
    field, said = given[0], form[given[0]].strip()
    about = siblings if field == "best" else [one]
    for each in about:
        if each.rollout is None or each.row.answer == DROPPED:
            raise ValueError(f"nothing can be said of an answer that isn't there: {'; '.join(each.problems)}")
    texts = [HALF.sub("\ufffd", each.rollout.answer) for each in about if each.rollout is not None]
    row = one.row
    head: Line = {"group": row.group_id, "sibling": None if field == "best" else sibling}
    head |= {"evaluation": row.evaluation, "round": row.round} if row.evaluation else {}
    head |= describe_prompt(one)
    if field != "best":
        return head | {"response": texts[0]} | parse_said(field, said, scale, rubric)
    if len(siblings) < 2:
        raise ValueError("best: this answer has no siblings")
    return head | {"responses": texts, "best": siblings.index(one)}


def parse_said(field: str, said: str, scale: tuple[float, float] | None, rubric: Sequence[Criterion]) -> Line:
    if field == "right":
        if said not in ("true", "false"):
            raise ValueError(f"right: expected true or false, got {said!r}")
        return {"right": said == "true"}
    if field == "note":
        if len(said) > MOST_CHARS:
            raise ValueError(f"note: has {len(said):,} characters, and at most {MOST_CHARS:,} are taken")
        return {"note": said.replace("\r\n", "\n")}
    if field in ("met", "unmet"):
        if not said.isdecimal() or int(said) >= len(rubric):
            raise ValueError(f"{field}: no criterion {said!r} here")
        return {"criterion": encode_criterion(rubric[int(said)]), "right": field == "met"}
    try:
        score = float(said)
    except ValueError:
        raise ValueError(f"score: {said!r} is no number") from None
    low, high = scale or (-math.inf, math.inf)
    if not math.isfinite(score) or not low <= score <= high:
        raise ValueError(f"score: {said} is outside the judge's scale, {low:g} to {high:g}")
    return {"score": int(score) if score == int(score) else score}


def describe_prompt(one: Sibling) -> Line:
    """The fields of a prompt in files of labels."""
    assert one.recorded is not None
    prompt = one.recorded.prompt
    messages = [{"role": message.role, "content": HALF.sub("\ufffd", message.content)} for message in prompt.messages]
    is_text = len(messages) == 1 and messages[0]["role"] == "user"
    told = {"reference": prompt.reference, "source": prompt.source}
    return {
        **({"prompt": messages[0]["content"]} if is_text else {"messages": messages}),
        **{name: value for name, value in told.items() if value},
    }


def parse_rater(name: str) -> str:
    """Raises ValueError."""
    name = " ".join(name.split())
    if not 0 < len(name) <= 64 or not name.isprintable():
        raise ValueError("rater: expected a name of 1 to 64 characters")
    return name
