"""Truncates a prompt to a context window by the configured rule, or says that it doesn't fit. Pure; sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grmpipe.judge.grm import GrmPrompt

Rendered = Callable[[Sequence[str]], GrmPrompt]  # texts -> the prompt that shows them


def truncated_to_fit(render: Rendered, texts: Sequence[str], room: int | None, truncation: str) -> GrmPrompt | str:
    """The prompt in at most `room` tokens, or the reason in words why there is none.

    truncation: `error`, or `middle`: the longest texts lose their middle, down to the same length.
    """
    whole = render(texts)
    if room is None or whole.num_tokens <= room:
        return whole
    if truncation == "middle" and (cut := longest_that_fits(render, texts, room)) is not None:
        return cut
    return f"{whole.num_tokens} tokens; the limit is {room}"


def longest_that_fits(render: Rendered, texts: Sequence[str], room: int) -> GrmPrompt | None:
    """The longest prompt that fits, by bisection over the characters kept of a text. None if none fits."""
    fits, best = 0, None
    too_many = max(map(len, texts))
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        prompt = render([without_middle(text, middle) for text in texts])
        if prompt.num_tokens <= room:
            fits, best = middle, prompt
        else:
            too_many = middle
    return best


def without_middle(text: str, num_kept: int) -> str:
    """The first and last characters of a text, and between them a line that says how many are left out."""
    if len(text) <= num_kept:
        return text
    head = (num_kept + 1) // 2
    tail = num_kept - head
    return f"{text[:head]}\n[... {len(text) - num_kept} characters cut ...]\n{text[len(text) - tail :]}"
