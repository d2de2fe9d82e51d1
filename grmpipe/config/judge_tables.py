"""Votes, parsers and rules by name, with their dotted paths. Imports none of them.

A new one is a function, or for a parser a Form, a row here and a test.
"""

from __future__ import annotations

from grmpipe.config.path_table import PathTable

VOTES_WITH_META_RM = ("weighted", "best")
# `sum` is computed as the mean, which gives the same order, and shown as k times it: a failed judgement lowers no
# score.
VOTES = PathTable(
    "judge.vote", ("scores",), "grmpipe.judge.verdict",
    {"mean": "mean", "sum": "mean", "median": "median", "majority": "majority"}, VOTES_WITH_META_RM,
)  # fmt: skip
PARSERS = PathTable("judge.parser", (), "grmpipe.judge.forms", {"score_line": "SCORE_LINE", "boxed": "BOXED"})
RULES = PathTable(
    "judge.rule", ("text", "reference"), "grmpipe.judge.rule",
    {"exact_answer": "is_right", "contains_reference": "contains_reference", "math_verify": "means_the_same"},
)  # fmt: skip
