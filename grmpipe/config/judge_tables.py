"""Votes, parsers and rules by name: where each is. Imports none of them.

A new one is a function, or for a parser a Form, a row here and a test.
"""

from __future__ import annotations

from grmpipe.config.path_table import PathTable

VOTES_WITH_META_RM = ("weighted", "best")
# `sum` ranks as its mean does, and is shown as k times it: so a judgement that failed makes no score smaller.
VOTES = PathTable(
    "judge.vote", ("scores",), "grmpipe.judge.verdict",
    {"mean": "mean", "sum": "mean", "median": "median", "majority": "majority"}, VOTES_WITH_META_RM,
)  # fmt: skip
PARSERS = PathTable("judge.parser", (), "grmpipe.judge.forms", {"score_line": "SCORE_LINE", "boxed": "BOXED"})
RULES = PathTable(
    "judge.rule", ("text", "reference"), "grmpipe.judge.rule",
    {"exact_answer": "is_right", "contains_reference": "contains_reference", "math_verify": "means_the_same"},
)  # fmt: skip
