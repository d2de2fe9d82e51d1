"""Judges by a rule: whether, or how well, a text gives the reference answer."""

import logging
import re
from collections.abc import Callable
from typing import cast

from grmpipe.config.judge import Scale
from grmpipe.config.judge_tables import RULES
from grmpipe.config.keys.entry_names import JUDGE
from grmpipe.config.keys.user_code import UserCodeError, call_guarded, describe_code, format_value, to_number
from grmpipe.judge.kinds.answer import find_answer, reference_answer
from grmpipe.judge.kinds.math_rule import means_the_same as means_the_same
from grmpipe.judge.verdict import make_failure, outcome, report_failures, report_score
from grmpipe.types import JudgeReport, Prompt, Rollout

log = logging.getLogger(__name__)

Rule = Callable[[str, str], float]  # text, reference -> how right the text is, from 0 to 1


def is_right(text: str, reference: str) -> bool:
    """Whether the text's answer is the same number as the reference, however they are written.

    Raises ValueError for a reference that isn't one number.
    """
    return find_answer(text) == reference_answer(reference)


def contains_reference(text: str, reference: str) -> bool:
    """Whether the reference occurs in the text as whole words, ignoring case and spacing: no "no" in "nothing"."""
    words = normalise_words(reference)
    if not words:
        raise ValueError("reference is empty")
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", normalise_words(text)) is not None


def normalise_words(text: str) -> str:
    return " ".join(text.casefold().split())


class RuleBrokenError(ValueError):
    """A rule raised, or returned no number from 0 to 1. The text names its key, the function and the line."""


def rule_named(name: str, key: str = JUDGE) -> Rule:
    """What `judge.rule` names, behind its door: it returns a float from 0 to 1, and raises RuleBrokenError, or another
    ValueError for what it can't decide.

    key: the configuration's section of the judge.
    """
    rule = cast(Callable[[str, str], object], RULES.find_object(name))
    owner = f"{key}.rule: {describe_code(rule)}"

    def graded(text: str, reference: str) -> float:
        try:
            with call_guarded(owner, (ValueError,)):
                given = rule(text, reference)
        except UserCodeError as error:
            raise RuleBrokenError(str(error)) from error.__cause__
        grade = to_number(given)
        if grade is None or not 0 <= grade <= 1:
            raise RuleBrokenError(
                f"{owner} returned {format_value(given)}; return True or False, or a number from 0 to 1"
            )
        return grade

    return graded


class RuleJudge:
    """The rule's grade is the reward: right answers get the highest score and reward 1, wrong ones the lowest and 0. A
    prompt that the rule can't decide is Failed, and so is an answer on which the rule breaks.

    key: the configuration's section of the judge.
    """

    def __init__(self, rule: str, scale: Scale | None = None, key: str = JUDGE) -> None:
        self._rule = rule_named(rule, key)
        self._scale = scale or Scale()
        self._has_broken = False

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        if prompt.reference is None:
            return report_failures(make_failure("refused", f"prompt {prompt.prompt_id} has no reference"))
        try:
            grade = self._rule(rollout.answer, prompt.reference)
        except RuleBrokenError as error:
            # The first one is for the console, the others are for run.log.
            log.log(logging.INFO if self._has_broken else logging.WARNING, "no verdict: %s", error)
            self._has_broken = True
            return report_failures(make_failure("broken", f"prompt {prompt.prompt_id}: {error}"))
        except ValueError as error:
            return report_failures(make_failure("refused", f"prompt {prompt.prompt_id}: {error}"))
        return report_score(outcome(rollout, grade), self._scale.to_score(grade), {"rule": grade})
