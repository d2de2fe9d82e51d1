"""Truncates a prompt to a context window by the configured rule, or says that it doesn't fit. Pure.

Of trajectories the long observations lose their middle first, then their middle turns, then all texts. What is left out
is said in a note, a line that neither the policy nor its environment can write.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from grmpipe.judge.grm import GrmPrompt
from grmpipe.judge.trajectory import Passage, Trajectory

Rendered = Callable[[Sequence[Trajectory]], GrmPrompt]  # responses -> the prompt that shows them

OBSERVATION_CHARS = 200  # what an observation keeps before turns are left out
FEWEST_TURNS = 2  # the first and the last one


def truncate_to_fit(
    render: Rendered, responses: Sequence[Trajectory], room: int | None, truncation: str
) -> GrmPrompt | str:
    """The prompt in at most `room` tokens, or the reason in words why there is none.

    truncation: `error`, or `middle`: the longest texts lose their middle, down to the same length.
    """
    whole = render(responses)
    if room is None or whole.num_tokens <= room:
        return whole
    if truncation == "middle" and (cut := longest_that_fits(render, responses, room)) is not None:
        return cut
    return f"{whole.num_tokens} tokens; the limit is {room}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortening:
    """One way to shorten a response, from `most`, which changes nothing, down to `least`."""

    most: int
    least: int
    to: Callable[[Trajectory, int], Trajectory]


def longest_that_fits(render: Rendered, responses: Sequence[Trajectory], room: int) -> GrmPrompt | None:
    """The longest prompt that fits. Each way to shorten is used up before the next. None if nothing fits."""
    for way in ways_to_shorten(responses):
        shortest = [way.to(response, way.least) for response in responses]
        fits, best = way.least - 1, None
        too_many = way.most
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            prompt = render([way.to(response, middle) for response in responses])
            if prompt.num_tokens <= room:
                fits, best = middle, prompt
            else:
                too_many = middle
        if best is not None:
            return best
        responses = shortest
    return None


def ways_to_shorten(responses: Sequence[Trajectory]) -> Iterator[Shortening]:
    """The ways in their order, without those that would change nothing."""
    passages = [passage for response in responses for passage in response.passages]
    observed = max((len(one.text) for one in passages if one.voice == "environment"), default=0)
    if observed > OBSERVATION_CHARS:
        yield Shortening(most=observed, least=OBSERVATION_CHARS, to=with_short_observations)
    num_turns = max(len({one.turn for one in response.passages}) for response in responses)
    if num_turns > FEWEST_TURNS:
        yield Shortening(most=num_turns, least=FEWEST_TURNS, to=without_middle_turns)
    longest = max((len(one.text) for one in passages if one.voice != "note"), default=0)
    yield Shortening(most=longest, least=1, to=with_short_texts)


def with_short_observations(response: Trajectory, num_kept: int) -> Trajectory:
    """Every text of the environment with at most this many characters."""
    return Trajectory(
        passages=tuple(
            part
            for passage in response.passages
            for part in (shorten_passage(passage, num_kept) if passage.voice == "environment" else (passage,))
        )
    )


def without_middle_turns(response: Trajectory, num_kept: int) -> Trajectory:
    """The first and the last turns, and between them a note that says how many are left out."""
    turns = sorted({passage.turn for passage in response.passages})
    if len(turns) <= num_kept:
        return response
    head, tail = turns[: (num_kept + 1) // 2], turns[len(turns) - num_kept // 2 :]
    note = Passage(voice="note", text=f"[... {len(turns) - num_kept} turns left out ...]", turn=head[-1])
    before = (passage for passage in response.passages if passage.turn <= head[-1])
    after = (passage for passage in response.passages if tail and passage.turn >= tail[0])
    return Trajectory(passages=(*before, note, *after))


def with_short_texts(response: Trajectory, num_kept: int) -> Trajectory:
    """Every text with at most this many characters."""
    if len(response.passages) == 1 and response.is_of_policy:
        return response.change_texts(lambda text: without_middle(text, num_kept))
    parts = (part for passage in response.passages for part in shorten_passage(passage, num_kept))
    return Trajectory(passages=tuple(parts))


def shorten_passage(passage: Passage, num_kept: int) -> tuple[Passage, ...]:
    """A passage without its middle, and in its place a note; the passage itself if the note would be longer."""
    text, voice, turn = passage.text, passage.voice, passage.turn
    left_out = f"[... {len(text) - num_kept} characters of the {voice} left out ...]"
    if voice == "note" or len(text) <= num_kept + len(left_out):
        return (passage,)
    tail = num_kept // 2
    return (
        Passage(voice=voice, text=text[: num_kept - tail], turn=turn),
        Passage(voice="note", text=left_out, turn=turn),
        Passage(voice=voice, text=text[len(text) - tail :], turn=turn),
    )


def without_middle(text: str, num_kept: int) -> str:
    """The first and last characters of a text, and between them a line that says how many are left out."""
    if len(text) <= num_kept:
        return text
    head = (num_kept + 1) // 2
    tail = num_kept - head
    return f"{text[:head]}\n[... {len(text) - num_kept} characters cut ...]\n{text[len(text) - tail :]}"
