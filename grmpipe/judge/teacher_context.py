"""What a teacher reads after the prompt and the policy doesn't: a critique, the reference, a better answer. Pure.

With the policy's own weights as its teacher this is self-distillation: from feedback (SDPO, arXiv 2601.20802) or from
the reference (OPSD, arXiv 2601.18734).
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from grmpipe.algorithm.distill import BETTER_ANSWER, CRITIQUE, REFERENCE, DistillConfig
from grmpipe.judge.grm import PromptRenderer
from grmpipe.judge.prompt_injection import fence_text
from grmpipe.judge.verdict import get_reward
from grmpipe.models.types import Message
from grmpipe.types import JudgeReport, Prompt, Rollout

Rollouts = Mapping[int, Rollout]  # siblings, by number: those that have ended
Reports = Mapping[int, JudgeReport]  # on them, those that are known


@dataclass(frozen=True, slots=True)
class Insertion:
    """Tokens in the place of those from `start` to `end` of a prompt. It may only be longer than them."""

    start: int
    end: int
    token_ids: tuple[int, ...]

    @property
    def num_more(self) -> int:
        """How much later the tokens after it stand."""
        return len(self.token_ids) - (self.end - self.start)

    def insert(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return token_ids[: self.start] + self.token_ids + token_ids[self.end :]


NO_INSERTION = Insertion(0, 0, ())


class TeacherContext:
    """A text with fields, after the last message of the prompt. Texts of models are fenced: they are no instructions.

    renderer: the policy's, whose prompts these are.
    """

    def __init__(self, distill: DistillConfig, renderer: PromptRenderer) -> None:
        assert distill.context is not None
        self._text, self._fields = distill.context, distill.context_fields
        self._renderer = renderer

    @property
    def waits(self) -> bool:
        """Whether it needs the reports on all siblings."""
        return BETTER_ANSWER in self._fields

    def find(self, prompt: Prompt, sibling: int, rollouts: Rollouts, reports: Reports) -> Insertion | None:
        """What to insert into the prompts of a sibling whose report is known. None: there is nothing to show, so that
        the rollout isn't taught.
        """
        known = {
            CRITIQUE: find_critique(sibling, reports),
            REFERENCE: prompt.reference or "",
            BETTER_ANSWER: find_better_answer(sibling, rollouts, reports),
        }
        if not all(known[field] for field in self._fields):
            return None
        shown = {field: text if field == REFERENCE else fence_text(text) for field, text in known.items()}
        rollout = rollouts[sibling]
        return self._insert(self._text.format(**shown), rollout.opening or prompt.messages, rollout)

    def _insert(self, text: str, messages: Sequence[Message], rollout: Rollout) -> Insertion | None:
        """The text after the last message, in the tokens of the rollout's prompts. A prompt may begin with tools, which
        the messages lack. None if a prompt doesn't have the message in this place: its history was rewritten.
        """
        *before, last = messages
        plain = self._renderer.render(messages)
        told = self._renderer.render((*before, replace(last, content=last.content + text)))
        first = next(iter(rollout.prompts()))
        alike = count_alike(plain, told)
        after = count_alike(plain[alike:][::-1], told[alike:][::-1])
        offset = len(first) - len(plain)
        start, end = offset + alike, len(first) - after
        if offset < 0 or first[start:] != plain[alike:]:
            return None
        if any(prompt_ids[:end] != first[:end] for prompt_ids in rollout.prompts()):
            return None
        return Insertion(start, end, told[alike : len(told) - after])


def count_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of entries until both differ."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def find_critique(sibling: int, reports: Reports) -> str:
    """What a judge wrote about a whole response, without its thoughts: the first judge that wrote anything, and of its
    judgements the one whose score is nearest to their mean. Empty: nothing.
    """
    for report in reports[sibling].own_reports.values():
        about = [one for one in report.judgements if one.siblings == (sibling,) and one.turn is None]
        if about:
            mean = statistics.fmean(one.scores[0] for one in about)
            return min(about, key=lambda one: abs(one.scores[0] - mean)).completion.answer.strip()
    return ""


def find_better_answer(sibling: int, rollouts: Rollouts, reports: Reports) -> str:
    """The answer of the sibling with the highest reward, the first of several. Empty if it is no higher than that of
    this one.
    """
    rewards = {one: get_reward(report.verdict) for one, report in reports.items()}
    known = {one: reward for one, reward in rewards.items() if reward is not None}
    best = max(known, key=lambda one: (known[one], -one), default=sibling)
    return rollouts[best].answer.strip() if known.get(best, 0.0) > known.get(sibling, float("inf")) else ""
