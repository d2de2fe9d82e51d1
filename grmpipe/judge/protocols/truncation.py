"""Makes a prompt fit a window, by a stated policy, or says that it doesn't. Pure; it sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grmpipe.judge.grm import GrmPrompt

Rendered = Callable[[Sequence[str]], GrmPrompt]  # the prompt that shows these texts


def truncated_to_fit(render: Rendered, texts: Sequence[str], room: int | None, truncation: str) -> GrmPrompt | str:
    """The prompt, in at most `room` tokens; or, in words, why there is none.

    too_long: `error`, or `middle`: the longest texts lose their middle, all down to the same length.
    """
    whole = render(texts)
    if room is None or whole.num_tokens <= room:
        return whole
    if truncation == "middle" and (cut := longest_that_fits(render, texts, room)) is not None:
        return cut
    return f"{whole.num_tokens} tokens; the limit is {room}"


def longest_that_fits(render: Rendered, texts: Sequence[str], room: int) -> GrmPrompt | None:
    """By bisection over the characters that are left of a text: about as many renderings as the length has bits."""
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
    """Its first and last characters, and between them a line that says how many are gone."""
    if len(text) <= num_kept:
        return text
    head = (num_kept + 1) // 2
    tail = num_kept - head
    return f"{text[:head]}\n[... {len(text) - num_kept} characters cut ...]\n{text[len(text) - tail :]}"
