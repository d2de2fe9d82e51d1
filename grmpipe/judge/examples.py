"""Labelled examples before the question of a judge: each is asked as the judge asks, and answered by its label."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from grmpipe.config.io.key_errors import section
from grmpipe.config.judge import JudgeConfig, Scale
from grmpipe.data.labelled import load_labelled
from grmpipe.data.prompts import identify_prompt
from grmpipe.judge.parse import parser_named
from grmpipe.types import Prompt, ScoredResponse

LIMIT = 2000  # examples that are looked through for each question


class JudgeExamples:
    """Examples to choose from. verdicts: what a judge would write for each score of its scale."""

    def __init__(self, items: Sequence[ScoredResponse], count: int, verdicts: dict[float, str], step: float) -> None:
        self._items = [(item, identify_prompt(item.prompt), _words(item.prompt)) for item in items[:LIMIT]]
        self._count = count
        self._verdicts = verdicts
        self._step = step

    def select(self, prompt: Prompt) -> list[tuple[Prompt, str, str]]:
        """The examples that share most words with a prompt, the nearest last: prompt, response, verdict. Never one on
        this very prompt, so that labels which are evaluated may be the examples too.
        """
        own, words = identify_prompt(prompt), _words(prompt)
        near = sorted(
            (item for item in self._items if item[1] != own),
            key=lambda item: len(words & item[2]) / max(1, len(words | item[2])),
            reverse=True,
        )[: self._count]
        return [(item.prompt, item.response, self._verdicts[self._nearest(item.score)]) for item, *_ in reversed(near)]

    def _nearest(self, score: float) -> float:
        return math.floor(score / self._step + 0.5) * self._step


def load_examples(judge: JudgeConfig, example: str) -> JudgeExamples | None:
    """Those of judge.examples.path; None without one. example: a verdict as the template asks for it, with the highest
    score. Raises ValueError.
    """
    if judge.examples.path is None:
        return None
    with section("examples.path: "):
        items = _read(judge.examples.path, judge.scale.low, judge.scale.high)
        verdicts = {score: write_verdict(judge, score, example) for score in _scores(judge.scale)}
    return JudgeExamples(items, judge.examples.count, verdicts, judge.scale.step)


def write_verdict(judge: JudgeConfig, score: float, example: str) -> str:
    """The shortest text that the judge's parser reads as a score; for a verdict in words that of its side of the scale.
    Raises ValueError if it isn't known.
    """
    parse, scale, shown = parser_named(judge.parser, judge.pattern), judge.scale, f"{score:g}"
    before, _, after = example.rpartition(f"{scale.high:g}")
    for text in (f"{before}{shown}{after}", shown, f"Score: {shown}"):
        if parse(text, 1, scale) == (score,):
            return text
    word, end = ("Yes", scale.high) if score > (scale.low + scale.high) / 2 else ("No", scale.low)
    if parse(word, 1, scale) == (end,):
        return word
    raise ValueError(f"no verdict is known that {judge.parser} reads as {shown}; type judge.examples.path=null")


def _scores(scale: Scale) -> list[float]:
    return [scale.low + index * scale.step for index in range(round((scale.high - scale.low) / scale.step) + 1)]


@functools.lru_cache(4)
def _read(path: str, low: int, high: int) -> tuple[ScoredResponse, ...]:
    items = tuple(item for item in load_labelled(path, scale=(low, high)) if isinstance(item, ScoredResponse))
    if not items:
        raise ValueError(f"{path} holds rankings only; examples are single responses with a score, or right and wrong")
    return items


def _words(prompt: Prompt) -> frozenset[str]:
    return frozenset(word for message in prompt.messages for word in message.content.casefold().split())
