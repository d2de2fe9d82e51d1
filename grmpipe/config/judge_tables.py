"""Votes, parsers and rules by name, with their dotted paths. Imports none of them.

A new one is a function, or for a parser a Form, a row here and a test.
"""

from grmpipe.config.keys.path_table import PathTable

VOTES_WITH_META_RM = ("weighted", "best")
# `sum` is computed as the mean, which gives the same order, and shown as k times it: a failed judgement lowers no
# score.
VOTES = PathTable(
    "judge.vote", ("scores",), "grmpipe.judge.votes",
    {"mean": "mean", "sum": "mean", "median": "median", "majority": "majority"}, VOTES_WITH_META_RM,
)  # fmt: skip
PARSERS = PathTable(
    "judge.parser", (), "grmpipe.judge.parse",
    {
        "score_line": "SCORE_LINE", "score": "SCORE", "boxed": "BOXED", "yes_no": "YES_NO",
        "rating": "RATING", "letter": "LETTER", "letter_or_tie": "LETTER_OR_TIE",
        "answer_letter": "ANSWER_LETTER", "answer_scores": "ANSWER_SCORES",
        "result": "RESULT", "result_letter": "RESULT_LETTER",
        "bold_result": "BOLD_RESULT", "bold_result_letter": "BOLD_RESULT_LETTER",
        "winner_letter": "WINNER_LETTER", "margin": "MARGIN", "which_box": "WHICH_BOX", "scores_field": "SCORES_FIELD",
        "verdict_letter": "VERDICT_LETTER",
        "correct": "CORRECT", "grade": "GRADE", "grade_box": "GRADE_BOX", "is_correct": "IS_CORRECT",
        "choice_field": "CHOICE_FIELD", "ranking_field": "RANKING_FIELD", "ranking_box": "RANKING_BOX",
        "overall_boxed": "OVERALL_BOXED",
    },
)  # fmt: skip
ONE_SCORE = (
    "score_line",
    "score",
    "yes_no",
    "rating",
    "result",
    "bold_result",
    "overall_boxed",
    "correct",
    "grade",
    "grade_box",
    "is_correct",
)  # parsers of one score
TWO_SCORES = (  # parsers of the better one of two responses
    "letter", "letter_or_tie", "answer_letter", "result_letter", "bold_result_letter",
    "choice_field", "ranking_field", "ranking_box", "winner_letter", "verdict_letter", "margin", "which_box",
)  # fmt: skip
RULES = PathTable(
    "judge.rule", ("text", "reference"), "grmpipe.judge.kinds.rule",
    {"exact_answer": "is_right", "contains_reference": "contains_reference", "math_verify": "means_the_same"},
)  # fmt: skip
