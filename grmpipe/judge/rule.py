"""Judges by a rule: whether a text gives the reference answer. Asks no model, reads no critique."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import cast

from grmpipe.config.judge import Scale
from grmpipe.config.judge_tables import RULES
from grmpipe.judge.answer import answer_of, reference_answer
from grmpipe.judge.math_rule import means_the_same as means_the_same
from grmpipe.judge.pointwise_adapter import refused
from grmpipe.judge.verdict import mean, voted
from grmpipe.types import JudgeReport, Prompt, Rollout

Rule = Callable[[str, str], bool]


def is_right(text: str, reference: str) -> bool:
    """Whether the text's answer is the same number as the reference, however they are written.

    Raises ValueError for a reference that isn't one number.
    """
    return answer_of(text) == reference_answer(reference)


def contains_reference(text: str, reference: str) -> bool:
    """Whether the reference occurs in the text as whole words, ignoring case and spacing: no "no" in "nothing"."""
    words = words_of(reference)
    if not words:
        raise ValueError("reference is empty")
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", words_of(text)) is not None


def words_of(text: str) -> str:
    return " ".join(text.casefold().split())


def rule_named(name: str) -> Rule:
    """What `judge.rule` names."""
    return cast(Rule, RULES.found(name))


class RuleJudge:
    """Gives right answers the highest score and reward 1, wrong ones the lowest and reward 0. A prompt that the rule
    can't decide is Failed.
    """

    def __init__(self, rule: str, scale: Scale | None = None) -> None:
        self._rule = rule_named(rule)
        self._scale = scale or Scale()

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        if prompt.reference is None:
            return refused(f"prompt {prompt.prompt_id} has no reference")
        try:
            right = self._rule(rollout.answer, prompt.reference)
        except ValueError as error:
            return refused(f"prompt {prompt.prompt_id}: {error}")
        scale = self._scale
        return JudgeReport(verdict=voted("rule", rollout, (scale.high if right else scale.low,), mean, scale))
