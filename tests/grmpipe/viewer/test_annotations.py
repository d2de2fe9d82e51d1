"""Annotations in their file: what stands, what a kill leaves, what two processes write at once, what a form may say."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from viewed_run import completion, rollout

from grmpipe.models.types import Message
from grmpipe.types import Criterion, Prompt, Turn
from grmpipe.viewer.annotations import ANNOTATIONS, append, make_label, make_line, parse_rater, read_annotations
from grmpipe.viewer.details import Recorded, Sibling
from grmpipe.viewer.queries import RolloutRow
from grmpipe.viewer.runs import read_stamp

FORK = multiprocessing.get_context("fork")
RUBRIC = (Criterion(text="It rhymes."), Criterion(text="It is short."))


def read(path: Path) -> list[str]:
    return [
        f"{one.rater} {one.group}/{one.sibling} {one.words}" for one in read_annotations(path, *read_stamp(path))[0]
    ]


def say(path: Path, rater: str = "anna", sibling: int = 0, **said: object) -> str:
    line = make_line(rater, group="g1", sibling=sibling, **said)
    append(path, line)
    return str(line["id"])


def test_a_later_line_replaces_the_one_of_the_same_rater_answer_and_field(tmp_path: Path) -> None:
    path = tmp_path / ANNOTATIONS
    say(path, right=True)
    say(path, score=7)
    say(path, criterion="It rhymes.", right=True)
    say(path, rater="ben", right=True)
    say(path, sibling=1, right=True)
    say(path, right=False)
    assert read(path) == [
        "anna g1/0 score 7", "anna g1/0 met: It rhymes.", "ben g1/0 right", "anna g1/1 right", "anna g1/0 wrong",
    ]  # fmt: skip


def test_what_an_undone_line_replaced_stands_again(tmp_path: Path) -> None:
    path = tmp_path / ANNOTATIONS
    say(path, right=True)
    append(path, make_line("anna", undoes=say(path, right=False)))
    assert read(path) == ["anna g1/0 right"]


def test_lines_that_cannot_be_read_are_counted_and_a_cut_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / ANNOTATIONS
    say(path, right=True)
    with path.open("a") as file:
        file.write('not JSON\n{"id": 5}\n\n{"id": "x", "rater": "anna", "gro')
    annotations, unreadable = read_annotations(path, *read_stamp(path))
    assert (len(annotations), unreadable) == (1, 2)
    assert read_annotations(tmp_path / "none", *read_stamp(tmp_path / "none")) == ([], 0)


@pytest.mark.parametrize(
    ("end", "kept"), [('{"id":"x","rater":"ben","group":"g1","ri', 1), ('{"id":"x","rater":"ben","right":true}', 2)]
)
def test_a_cut_line_goes_at_the_next_append_and_a_whole_one_without_its_newline_stays(
    tmp_path: Path, end: str, kept: int
) -> None:
    path = tmp_path / ANNOTATIONS
    say(path, right=True)
    with path.open("a") as file:
        file.write(end)
    say(path, sibling=1, right=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == kept + 1 and lines[-1]["sibling"] == 1


def write_on(path: Path, confirmed: Connection) -> None:
    """Append lines of all lengths, and say of each that it is written."""
    for number in range(100_000):
        confirmed.send(say(path, note="x" * (number * 997 % 60_000)))


def test_a_kill_at_any_moment_loses_no_line_that_was_confirmed(tmp_path: Path) -> None:
    path, rng, confirmed = tmp_path / ANNOTATIONS, random.Random(1), list[str]()
    for _ in range(12):
        here, there = FORK.Pipe(duplex=False)
        process = FORK.Process(target=write_on, args=(path, there))
        process.start()
        there.close()
        confirmed.append(here.recv())
        time.sleep(rng.random() * 0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        while True:
            try:
                confirmed.append(here.recv())
            except (EOFError, OSError):
                break
    say(path, right=True)
    lines = [json.loads(line)["id"] for line in path.read_text().splitlines()]
    assert len(confirmed) > 12 and set(confirmed) <= set(lines)


def write_some(path: Path, rater: str) -> None:
    for number in range(100):
        say(path, rater, number, note="x" * 5000)


def test_two_processes_append_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / ANNOTATIONS
    processes = [FORK.Process(target=write_some, args=(path, rater)) for rater in ("anna", "ben", "cleo")]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    annotations, unreadable = read_annotations(path, *read_stamp(path))
    assert (len(annotations), unreadable) == (300, 0)


# -- what a form may say -----------------------------------------------------------------------------------------------


def make_siblings(*texts: str, reference: str | None = "42") -> list[Sibling]:
    known = dict.fromkeys(RolloutRow.__dataclass_fields__) | {"evaluation": "", "round": 0, "group_id": "g1"}
    prompt = Prompt(
        prompt_id="p1", messages=(Message(role="user", content="6 * 7?"),), source="math", reference=reference
    )
    return [
        Sibling(
            row=RolloutRow(**known | {"sibling": place}),
            recorded=Recorded(
                prompt=prompt, rollout=rollout("g1", place, Turn(new_ids=(1,), completion=completion(text)))
            ),
            report=None,
            critiques=[],
            problems=[],
        )
        for place, text in enumerate(texts)
    ]


def test_a_line_is_a_whole_label_row() -> None:
    siblings = make_siblings("It is 41", "It is 42\ud800")
    head = {"group": "g1", "prompt": "6 * 7?", "reference": "42", "source": "math"}
    of_one = head | {"sibling": 1, "response": "It is 42\ufffd"}
    for form, said in (
        ({"right": "false"}, {"right": False}),
        ({"score": "7"}, {"score": 7}),
        ({"score": " 7.5 "}, {"score": 7.5}),
        ({"unmet": "1"}, {"criterion": "It is short.", "right": False}),
        ({"note": "a\r\nb"}, {"note": "a\nb"}),
    ):
        assert make_label(form, siblings, 1, (1, 10), RUBRIC) == of_one | said
    best = make_label({"best": "1"}, siblings, 1, None, ())
    assert best == head | {"sibling": None, "responses": ["It is 41", "It is 42\ufffd"], "best": 1}


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({}, "one of right, score"),
        ({"right": "true", "score": "3"}, "got right, score"),
        ({"right": "maybe"}, "true or false"),
        ({"score": "many"}, "'many' is no number"),
        ({"score": "nan"}, "outside the judge's scale, 1 to 10"),
        ({"score": "11"}, "outside the judge's scale, 1 to 10"),
        ({"met": "2"}, "no criterion '2'"),
        ({"note": "x" * 20_001}, "20,001 characters"),
        ({"best": "1"}, "has no siblings"),
    ],
)
def test_what_a_form_may_not_say_is_refused_in_words(form: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_label(form, make_siblings("It is 42"), 0, (1, 10), RUBRIC)


def test_nothing_is_said_of_an_answer_that_cannot_be_read() -> None:
    (one,) = make_siblings("It is 42")
    lost = Sibling(row=one.row, recorded=None, report=None, critiques=[], problems=["it is damaged"])
    with pytest.raises(ValueError, match="isn't there: it is damaged"):
        make_label({"right": "true"}, [lost], 0, None, ())


@pytest.mark.parametrize("name", ["", "  ", "x" * 65, "a\u202eb", "a\0b"])
def test_a_rater_has_a_name_that_can_be_read(name: str) -> None:
    assert parse_rater("  Anna  Ek ") == "Anna Ek"
    with pytest.raises(ValueError, match="rater: expected a name"):
        parse_rater(name)
