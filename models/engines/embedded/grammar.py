r"""Structured output by regular expressions: which tokens may come next. Knows no model.

The part of the syntax that structured output needs: characters, escapes, classes, groups `(?:...)`, alternatives, and
`*`, `+`, `?`. A pattern becomes an automaton (Thompson's construction, made deterministic lazily). For each state the
vocabulary is checked once, and the tokens that stay within the pattern are kept (Willard and Louf, arXiv 2307.09702).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "d": "0123456789"}
REPEATS = "*+?"


@dataclass(frozen=True, slots=True)
class Characters:
    """One character: one of these, or any except these."""

    members: frozenset[str]
    negated: bool = False

    def take(self, character: str) -> bool:
        return (character in self.members) != self.negated


@dataclass(slots=True)
class Automaton:
    """The transitions of numbered states: without a character, and with one. State 1 is the end."""

    free: list[list[int]] = field(default_factory=lambda: [[], []])
    moves: list[tuple[Characters, int] | None] = field(default_factory=lambda: [None, None])

    def new_state(self) -> int:
        self.free.append([])
        self.moves.append(None)
        return len(self.free) - 1

    def closure(self, states: Sequence[int]) -> frozenset[int]:
        found, to_do = set(states), list(states)
        while to_do:
            for state in self.free[to_do.pop()]:
                if state not in found:
                    found.add(state)
                    to_do.append(state)
        return frozenset(found)

    def after(self, states: frozenset[int], character: str) -> frozenset[int]:
        moves = (self.moves[state] for state in states)
        return self.closure([move[1] for move in moves if move is not None and move[0].take(character)])


class Pattern:
    """A pattern as an automaton. Raises ValueError for unsupported syntax."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._place = 0
        self._automaton = Automaton()
        start, end = self._alternatives()
        if self._place != len(pattern):
            raise self._unknown()
        self._automaton.free[end].append(1)
        self.start = self._automaton.closure([start])
        self._after: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def after(self, states: frozenset[int], text: str) -> frozenset[int]:
        """The states after a text; empty if the text leaves the pattern."""
        for character in text:
            step = (states, character)
            if step not in self._after:
                self._after[step] = self._automaton.after(states, character)
            states = self._after[step]
            if not states:
                break
        return states

    def is_end(self, states: frozenset[int]) -> bool:
        return 1 in states

    # Each parser returns the (first, last) state of what it read.

    def _alternatives(self) -> tuple[int, int]:
        first, last = self._automaton.new_state(), self._automaton.new_state()
        while True:
            start, end = self._sequence()
            self._automaton.free[first].append(start)
            self._automaton.free[end].append(last)
            if not self._skip("|"):
                return first, last

    def _sequence(self) -> tuple[int, int]:
        first = last = self._automaton.new_state()
        while self._place < len(self._text) and self._text[self._place] not in "|)":
            start, end = self._repeated()
            self._automaton.free[last].append(start)
            last = end
        return first, last

    def _repeated(self) -> tuple[int, int]:
        start, end = self._single()
        mark = self._text[self._place : self._place + 1]
        if mark and mark in REPEATS:
            self._place += 1
            first, last = self._automaton.new_state(), self._automaton.new_state()
            self._automaton.free[first].append(start)
            self._automaton.free[end].append(last)
            if mark in "*+":
                self._automaton.free[end].append(start)
            if mark in "*?":
                self._automaton.free[first].append(last)
            return first, last
        return start, end

    def _single(self) -> tuple[int, int]:
        if self._skip("(?:"):
            inside = self._alternatives()
            if not self._skip(")"):
                raise self._unknown()
            return inside
        first, last = self._automaton.new_state(), self._automaton.new_state()
        self._automaton.moves[first] = (self._characters(), last)
        return first, last

    def _characters(self) -> Characters:
        if self._skip("["):
            negated = self._skip("^")
            members: set[str] = set()
            while not self._skip("]"):
                members |= set(self._character(in_class=True))
            return Characters(frozenset(members), negated)
        return Characters(frozenset(self._character(in_class=False)))

    def _character(self, *, in_class: bool) -> str:
        character = self._text[self._place : self._place + 1]
        unknown = "[" if in_class else "(){}[]*+?^$."
        if not character or character in unknown:
            raise self._unknown()
        self._place += 1
        if character != "\\":
            return character
        escaped = self._text[self._place : self._place + 1]
        self._place += 1
        if not escaped or (escaped.isalnum() and escaped not in ESCAPES):
            raise self._unknown()
        return ESCAPES.get(escaped, escaped)

    def _skip(self, expected: str) -> bool:
        found = self._text.startswith(expected, self._place)
        self._place += len(expected) * found
        return found

    def _unknown(self) -> ValueError:
        return ValueError(f"pattern: the embedded engine can't read it at character {self._place}: {self._text!r}")


parsed = lru_cache(maxsize=256)(Pattern)


class Grammar:
    """Patterns over one vocabulary. The allowed tokens of a state are computed once for all requests.

    decode: ids to text; a single token must give its own text. Half a character counts as any other.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        num_token_ids: int,
        stop_token_ids: Sequence[int],
        vocab_size: int = 0,
    ) -> None:
        """vocab_size: rows of the model's head, if more than the tokenizer's ids."""
        self._decode = decode
        self._num_token_ids = num_token_ids
        self._num_padding = max(0, vocab_size - num_token_ids)
        self._stop_token_ids = list(stop_token_ids)
        self._pieces: list[str] | None = None
        self._allowed: dict[tuple[str, frozenset[int]], Tensor] = {}

    def allowed_V(self, pattern: Pattern, name: str, states: frozenset[int]) -> Tensor:
        """The tokens that may come next, bool [V]. Tokens that end a text are allowed only if the pattern may end, or
        if the vocabulary has no other way.
        """
        key = (name, states)
        if key not in self._allowed:
            pieces = self._all_pieces()
            allowed = [bool(piece) and bool(pattern.after(states, piece)) for piece in pieces]
            for token_id in self._stop_token_ids:
                allowed[token_id] = pattern.is_end(states)
            if not any(allowed):
                for token_id in self._stop_token_ids:
                    allowed[token_id] = True
            self._allowed[key] = torch.tensor(allowed)
        return self._allowed[key]

    def piece(self, token_id: int) -> str:
        return "" if token_id in self._stop_token_ids else self._all_pieces()[token_id]

    def _all_pieces(self) -> list[str]:
        if self._pieces is None:
            pieces = [self._decode([token_id]) for token_id in range(self._num_token_ids)]
            self._pieces = pieces + [""] * self._num_padding
        return self._pieces


@dataclass(slots=True)
class Held:
    """The state of a request in its pattern."""

    grammar: Grammar
    name: str
    pattern: Pattern
    states: frozenset[int]

    @staticmethod
    def to(name: str, grammar: Grammar) -> Held:
        pattern = parsed(name)
        return Held(grammar, name, pattern, pattern.start)

    def allowed_V(self) -> Tensor:
        return self.grammar.allowed_V(self.pattern, self.name, self.states)

    def advance(self, token_id: int) -> None:
        self.states = self.pattern.after(self.states, self.grammar.piece(token_id))
