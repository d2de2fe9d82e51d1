"""Judging tasks made of labelled work: the question, and the rule that says whether a judge in training answers right.

The prompt is the same as in judging; the label is its `reference`, in a format that the rule reads. Asks no model.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from grmpipe.config.judge import JudgeConfig, LabelConfig, Scale
from grmpipe.config.judge_protocols import PROTOCOLS, protocol_named
from grmpipe.data.trained_prompts import LABELLED, digest_prompt
from grmpipe.judge.kinds.rule import Rule, rule_named
from grmpipe.judge.parse import Parser, parser_named
from grmpipe.judge.prompt import JudgePrompt
from grmpipe.judge.trajectory import Trajectory
from grmpipe.judge.verdict import outcome, report_score
from grmpipe.models.types import Message
from grmpipe.types import JudgeReport, Labelled, Prompt, Rollout, ScoredResponse

SCORE_LABEL = re.compile(r"(exactly|at least|below) (-?[0-9]+)")
GRADED_LABEL = re.compile(r"graded((?: -?[0-9.]+)+)")  # a score, or the grades of several responses in the order shown
BEST_LABEL = re.compile(r"best ([0-9]+) of ([0-9]+)")  # response numbers in the order shown, from 1
RIGHT, WRONG = 1.0, -1.0  # SPCT's rewards (arXiv 2504.02495); unparseable is wrong, the format earns nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingTasks:
    """Makes judging tasks of labelled work, as the judge's protocol asks: about one response, all at once, or two."""

    template: JudgePrompt
    protocol: str
    labels: LabelConfig
    show_thoughts: bool = False

    @staticmethod
    def under(judge: JudgeConfig, labels: LabelConfig) -> JudgingTasks:
        """Judging tasks as `judge` asks in a run. Raises ValueError for an unusable protocol or template."""
        if judge.protocol_kind.scores != "responses":
            known = [name for name, protocol in PROTOCOLS.items() if protocol.scores == "responses"]
            raise ValueError(
                f"protocol: labels are of whole responses, and {judge.protocol} judges parts; "
                f"type judge.protocol={' or '.join(known)}"
            )
        if judge.principles.kind == "shared":
            raise ValueError(
                "principles.kind: a judging task is one judgement that includes its principles; type "
                "judge.principles.kind=inline"
            )
        template = JudgePrompt.of(judge)
        if cut := judge.truncated_by:
            raise ValueError(
                f"{cut}: a judge that learns is trained on all that it might have sampled, as the learner scores it; "
                f"type judge.{cut}={1 if cut == 'top_p' else 0}"
            )
        if judge.prefill or template.has_own_turn:
            key, way_out = ("prefill", "judge.prefill=''") if judge.prefill else ("template", "judge.template=pairwise")
            raise ValueError(f"{key}: a judging task is one turn, all of which the judge writes; type {way_out}")
        return JudgingTasks(
            template=template,
            protocol=judge.protocol,
            labels=labels,
            show_thoughts=judge.format.show_thoughts,
        )

    def of(self, items: Sequence[Labelled]) -> tuple[Prompt, ...]:
        """All judging tasks that the items allow. A judge of one response can't use rankings; a judge of pairs can't
        use single responses. Raises ValueError if no task is left.
        """
        judging_tasks = [judging_task for item in items for judging_task in self._of(item)]
        if not judging_tasks:
            wanted, about = ("rankings", "response") if self._about == "pair" else ("scores", "group")
            way_out = next(name for name, protocol in PROTOCOLS.items() if protocol.about == about)
            raise ValueError(
                f"holds no {wanted}, which a {self.protocol} judge learns from; "
                f"type judge.protocol={way_out}, with a template and a parser for it"
            )
        return tuple(judging_tasks)

    @property
    def _about(self) -> str:
        return protocol_named(self.protocol).about

    def ask(self, task_id: str, prompt: Prompt, response: Trajectory | str, label: str) -> Prompt:
        """The task to judge a response that has a label."""
        return self._asked(task_id, prompt, [response], label)

    def label_side(self, right: bool) -> str:
        """The label of a response of which only right or wrong is known: the judge has to pass it or to fail it."""
        return f"{'at least' if right else 'below'} {self.labels.pass_score}"

    def label_score(self, score: float) -> str:
        return {
            "exact": f"exactly {round_score(score)}",
            "same_side": self.label_side(score >= self.labels.pass_score),
            "graded": f"graded {score:g}",
        }[self.labels.rule]

    def _of(self, item: Labelled) -> list[Prompt]:
        if isinstance(item, ScoredResponse):
            return [] if self._about == "pair" else [self._scored(item)]
        return self.rank(item.item_id, item.prompt, item.responses, item.grades, item.subset)

    def rank(
        self,
        item_id: str,
        prompt: Prompt,
        responses: Sequence[Trajectory | str],
        grades: Sequence[float],
        source: str = "",
    ) -> list[Prompt]:
        """The tasks to compare responses whose true order is known: none for a judge of one response, or of ties."""
        highest = max(grades)
        tops = [index for index, grade in enumerate(grades) if grade == highest]
        others = [index for index, grade in enumerate(grades) if grade < highest]
        if self._about == "response" or not others:  # nothing is best among ties
            return []

        def ask_among(task_id: str, shown: Sequence[int]) -> Prompt:
            """In an order derived from the id: the same in every run. shown: the best one first."""
            order = random.Random(task_id).sample(shown, len(shown))
            label = f"best {order.index(shown[0]) + 1} of {len(order)}"
            if self.labels.rule == "graded":
                label = " ".join(("graded", *(f"{grades[index]:g}" for index in order)))
            return self._asked(task_id, prompt, [responses[index] for index in order], label, source)

        names = {top: item_id if len(tops) == 1 else f"{item_id}#{top}" for top in tops}
        if self._about == "group" and self.labels.rule == "graded":
            return [ask_among(item_id, [*tops, *others])]
        if self._about == "group":
            return [ask_among(names[top], [top, *others]) for top in tops]
        return [ask_among(f"{names[top]}/{other}", [top, other]) for top in tops for other in others]

    def _scored(self, item: ScoredResponse) -> Prompt:
        # Right or wrong says nothing of the score but its side.
        only_side = item.is_yes_no and self.labels.rule == "exact"
        right = item.score >= self.labels.pass_score
        label = self.label_side(right) if only_side else self.label_score(item.score)
        return self._asked(item.item_id, item.prompt, [item.response], label, item.subset)

    def _asked(
        self, task_id: str, prompt: Prompt, responses: Sequence[Trajectory | str], label: str, source: str = ""
    ) -> Prompt:
        messages = self.template.render(prompt, *responses)
        return Prompt(
            prompt_id=task_id,
            messages=messages,
            source=source,
            reference=label,
            columns={LABELLED: digest_prompt(prompt)},
        )


def round_score(score: float) -> int:
    """The nearest whole score, upwards from a half."""
    return math.floor(score + 0.5)


def judged_right(scores: Sequence[float], label: str) -> bool:
    """Whether scores, in the order shown, agree with a label. Raises ValueError for a label not made by this module."""
    if grades := read_grades(label):
        if len(grades) == 1:
            return round_score(scores[0]) == round_score(grades[0])
        top = max(grades)
        best, others = (
            [s for s, grade in zip(scores, grades, strict=True) if (grade == top) is is_top] for is_top in (True, False)
        )
        return min(best) > max(others)
    if match := BEST_LABEL.fullmatch(label):
        first, count = int(match[1]) - 1, int(match[2])
        return len(scores) == count and all(scores[first] > s for i, s in enumerate(scores) if i != first)
    if not (match := SCORE_LABEL.fullmatch(label)):
        raise ValueError(f"reference {label[:80]!r} is not a label of a judgement")
    (score,), bound = scores, int(match[2])
    return {"exactly": score == bound, "at least": score >= bound, "below": score < bound}[match[1]]


def measure_agreement(scores: Sequence[float], label: str, scale: Scale) -> float:
    """How far scores agree with a label: RIGHT or WRONG. For a graded label between them: of a score by its distance,
    of several by the pairs that they order as the grades do, less those in opposite order (Kendall's tau over the pairs
    of different grades).
    """
    grades = read_grades(label)
    if not grades:
        return RIGHT if judged_right(scores, label) else WRONG
    if len(grades) == 1:
        return RIGHT - (RIGHT - WRONG) * min(1.0, abs(scores[0] - grades[0]) / (scale.high - scale.low))
    pairs = [(i, j) for i, j in itertools.combinations(range(len(grades)), 2) if grades[i] != grades[j]]
    signs = [np.sign((scores[i] - scores[j]) * (grades[i] - grades[j])) for i, j in pairs]
    return float(sum(signs)) / len(pairs)


def read_grades(label: str) -> tuple[float, ...]:
    """Those of a graded label; none of another."""
    match = GRADED_LABEL.fullmatch(label)
    return tuple(map(float, match[1].split())) if match else ()


def num_scores(label: str) -> int:
    """The number of scores that a judgement gives under this label."""
    if grades := read_grades(label):
        return len(grades)
    return int(match[2]) if (match := BEST_LABEL.fullmatch(label)) else 1


def label_rule(parser: Parser, scale: Scale) -> Rule:
    """A rule: whether a judgement, as written, agrees with its label. An unparseable one doesn't."""

    def is_right(text: str, label: str) -> float:
        scores = parser(text, num_scores(label), scale)
        return float(not isinstance(scores, str) and judged_right(scores, label))

    return is_right


def find_rule(judge: JudgeConfig) -> Rule:
    """The rule that decides right and wrong in a run: of answers, or of judgements if a judge is in training."""
    if judge.kind != "label":
        return rule_named(judge.rule, judge.key)
    return label_rule(parser_named(judge.parser, judge.pattern), judge.scale)


class LabelReward:
    """Judges a judge: +1 if a judgement agrees with its label, -1 if it doesn't, is unparseable or was truncated; where
    the label is graded, between them.
    """

    def __init__(self, judge: JudgeConfig) -> None:
        self._parser, self._scale = parser_named(judge.parser, judge.pattern), judge.scale

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        label = prompt.reference
        assert label is not None, f"{prompt.prompt_id}: judging tasks have labels"
        reward, shown = WRONG, Scale()
        if rollout.status == "finished":
            scores = self._parser(rollout.answer, num_scores(label), self._scale)
            reward = WRONG if isinstance(scores, str) else measure_agreement(scores, label, self._scale)
        share = (reward - WRONG) / (RIGHT - WRONG)
        return report_score(outcome(rollout, reward), shown.to_score(share), {"label": reward})


Fate = Literal["kept", "too_easy", "none_right", "hinted", "too_long"]  # a judging task's, in rejection sampling


def keep_critiques(rollouts: Sequence[Rollout], right: Sequence[bool]) -> tuple[Fate, tuple[Rollout, ...]]:
    """The right critiques of a judging task, unless all of them are right."""
    if all(right):
        return "too_easy", ()
    kept = tuple(rollout for rollout, is_right in zip(rollouts, right, strict=True) if is_right)
    return ("kept", kept) if kept else ("none_right", ())


def add_hint(judging_task: Prompt) -> Prompt:
    """The judging task with its label shown, in SPCT's words."""
    assert judging_task.reference is not None, f"{judging_task.prompt_id}: judging tasks have labels"
    *before, message = judging_task.messages
    hinted_message = Message(
        role=message.role, content=f"{message.content}\n\n{describe_label(judging_task.reference)}"
    )
    return dataclasses.replace(judging_task, messages=(*before, hinted_message))


def describe_label(label: str) -> str:
    if match := BEST_LABEL.fullmatch(label):
        return f"The best response is: Response {match[1]}"
    if len(grades := read_grades(label)) > 1:
        return f"The true grades are: {', '.join(f'{grade:g}' for grade in grades)}"
    return f"The true score is: {label.removeprefix('exactly ').removeprefix('graded ')}"


def without_hint(rollout: Rollout, prompt_ids: tuple[int, ...]) -> Rollout:
    """A critique with the prompt of the plain judging task, as if written without the hint."""
    (turn,) = rollout.turns
    return dataclasses.replace(rollout, turns=(dataclasses.replace(turn, new_ids=prompt_ids),))
