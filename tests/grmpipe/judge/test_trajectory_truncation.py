"""A long episode loses the middle of its observations first, then turns, then text; the notes are ours alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grmpipe.judge.grm import GrmPrompt
from grmpipe.judge.prompt_injection import in_fences
from grmpipe.judge.trajectory import OBSERVATION_CHARS, Passage, Trajectory, of_text, truncate_to_fit


def episode(*turns: tuple[str, str]) -> Trajectory:
    """Turns of what the policy wrote and what the environment answered."""
    return Trajectory(
        passages=tuple(
            Passage(voice="policy" if place == 0 else "environment", text=text, turn=turn)
            for turn, texts in enumerate(turns)
            for place, text in enumerate(texts)
        )
    )


def as_prompt(responses: Sequence[Trajectory]) -> GrmPrompt:
    """One token per character."""
    text = "\n\n\n".join(map(in_fences, responses))
    return GrmPrompt(messages=(), token_ids=tuple(map(ord, text)), num_tokens=len(text))


def shown(room: int, *responses: Trajectory, truncation: str = "middle") -> str:
    made = truncate_to_fit(as_prompt, responses, room, truncation)
    assert isinstance(made, GrmPrompt), made
    assert made.num_tokens <= room
    return "".join(map(chr, made.token_ids))


LONG = episode(("look " * 20, "a" * 900 + "b" * 900), ("take", "c" * 300), ("Answer: 12", "bye"))


def test_long_observations_lose_their_middle_first() -> None:
    lines = shown(1000, LONG).splitlines()
    assert lines[0] == f"> {'look ' * 20}"
    assert lines[1].startswith("| aaaa") and lines[3].startswith("| bbbb")
    kept = len(lines[1]) + len(lines[3]) - 4
    assert kept > 300 and lines[2] == f"[... {1800 - kept} characters of the environment left out ...]"
    assert lines[4:] == ["> take", f"| {'c' * 300}", "> Answer: 12", "| bye"], "the shorter ones are whole"


def test_turns_in_the_middle_are_left_out_if_short_observations_dont_fit() -> None:
    many = episode(*((f"step {turn}", "x" * 150) for turn in range(20)))
    text = shown(1000, many)
    assert "characters" not in text
    assert text.count("> step") + int(text.split("[... ")[1].split(" turns left out ...]")[0]) == 20
    assert text.startswith("> step 0\n") and "> step 19\n" in text


def test_observations_are_short_before_a_turn_is_left_out() -> None:
    many = episode(*((f"step {turn}", "x" * 400) for turn in range(20)))
    text = shown(2000, many)
    assert f"[... {400 - OBSERVATION_CHARS} characters of the environment left out ...]" in text
    assert " turns left out ...]" in text


def test_at_last_every_text_is_cut() -> None:
    text = shown(400, episode(("p" * 500, "e" * 50), ("q" * 500, "")))
    assert "characters of the policy left out ...]" in text


def test_single_text_is_cut_within_its_fence() -> None:
    text = shown(200, of_text("a" * 500))
    assert all(line.startswith("> ") for line in text.splitlines()) and "characters cut ...]" in text


def test_siblings_are_cut_alike() -> None:
    other = replace(LONG, passages=LONG.passages[:2])
    first, second = shown(1500, LONG, other).split("\n\n\n")
    assert first.splitlines()[:4] == second.splitlines()[:4]


def test_without_truncation_it_does_not_fit() -> None:
    assert isinstance(truncate_to_fit(as_prompt, [LONG], 1000, "error"), str)
    assert isinstance(truncate_to_fit(as_prompt, [LONG], 10, "middle"), str)


@settings(max_examples=60)
@given(
    turns=st.lists(st.tuples(st.text("a\n>|[.]", max_size=300), st.text("b\n>|[.]", max_size=600)), min_size=1),
    room=st.integers(150, 2000),
)
def test_what_is_cut_fits_and_only_notes_are_without_a_fence(turns: list[tuple[str, str]], room: int) -> None:
    made = truncate_to_fit(as_prompt, [episode(*turns)], room, "middle")
    if isinstance(made, str):
        return
    assert made.num_tokens <= room
    bare = [line for line in "".join(map(chr, made.token_ids)).split("\n") if not line.startswith(("> ", "| "))]
    assert all(line == "" or line.endswith(" left out ...]") for line in bare)
    assert len(bare) <= 1 + 2 * 2 * len(turns)


@pytest.mark.parametrize("room", [300, 400, 1000, 3000])
def test_more_room_shows_more(room: int) -> None:
    assert len(shown(room + 200, LONG)) >= len(shown(room, LONG))
