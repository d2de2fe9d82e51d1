"""Judging tasks made of labelled work: the question, and the rule that says whether a judge in training answers right.

The prompt is the same as in judging; the label is its `reference` (label_format.py). Asks no model.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grmpipe.config.judge import JudgeConfig, LabelConfig, Scale
from grmpipe.config.judge_protocols import PROTOCOLS, protocol_named
from grmpipe.data.labelled_parts import LabelledParts
from grmpipe.data.trained_prompts import LABELLED, digest_prompt
from grmpipe.judge.evidence import find_fault, read_quotes
from grmpipe.judge.kinds.label_format import (
    RIGHT,
    WRONG,
    PartLabel,
    describe_label,
    join_parts,
    judged_right,
    measure_agreement,
    num_scores,
    round_score,
)
from grmpipe.judge.kinds.rule import Rule, rule_named
from grmpipe.judge.parse import Parser, parser_named
from grmpipe.judge.prompt import JudgePrompt
from grmpipe.judge.trajectory import Trajectory
from grmpipe.judge.verdict import outcome, report_score
from grmpipe.judge.votes import MET
from grmpipe.models.types import Message
from grmpipe.types import Criterion, JudgeReport, Labelled, Prompt, Rollout, ScoredResponse

WORK = "judged_text"  # column of a judging task whose criteria need evidence: what the policy wrote


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingTasks:
    """Makes judging tasks of labelled work, as the judge's protocol asks: about one response, its steps, its criteria,
    all responses at once, or two.

    criteria_per_call: most criteria in one task, as in judging; 0: all.
    """

    template: JudgePrompt
    protocol: str
    labels: LabelConfig
    scale: Scale
    show_thoughts: bool = False
    criteria_per_call: int = 0

    @staticmethod
    def under(judge: JudgeConfig, labels: LabelConfig) -> JudgingTasks:
        """Judging tasks as `judge` asks in a run. Raises ValueError for an unusable protocol or template."""
        if judge.protocol_kind.scores == "turns":
            known = [name for name, protocol in PROTOCOLS.items() if protocol.scores != "turns"]
            raise ValueError(
                f"protocol: labels are of responses, their steps or their criteria, and {judge.protocol} judges turns; "
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
            scale=judge.scale,
            show_thoughts=judge.format.show_thoughts,
            criteria_per_call=judge.rubric.criteria_per_call,
        )

    def of(self, items: Sequence[Labelled | LabelledParts]) -> tuple[Prompt, ...]:
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

    def ask(self, task_id: str, prompt: Prompt, response: Trajectory | str, label: PartLabel) -> Prompt:
        """The task to judge a response that has a label."""
        return self._asked(task_id, prompt, [response], str(label))

    def ask_steps(
        self,
        task_id: str,
        prompt: Prompt,
        steps: Sequence[Trajectory | str],
        labels: Sequence[PartLabel | None],
        source: str = "",
    ) -> Prompt:
        """The task to judge the steps of a response. labels: one for each; None: it has none."""
        return self._asked(task_id, prompt, steps, join_parts(labels), source)

    def ask_criteria(
        self,
        task_id: str,
        prompt: Prompt,
        response: Trajectory | str,
        labels: Sequence[tuple[Criterion, PartLabel]],
        source: str = "",
    ) -> list[Prompt]:
        """The tasks to judge a response by the criteria that have labels, as many in each as in a call of the judge."""
        size = self.criteria_per_call or max(1, len(labels))
        chunks = [labels[start : start + size] for start in range(0, len(labels), size)]
        return [
            self._asked(
                task_id if len(chunks) == 1 else f"{task_id}/c{number * size}",
                prompt,
                [response],
                join_parts([label for _, label in some]),
                source,
                [criterion for criterion, _ in some],
            )
            for number, some in enumerate(chunks)
        ]

    def label_side(self, right: bool) -> PartLabel:
        """The label of a response, or a step, of which only right or wrong is known: the judge has to pass it or to
        fail it.
        """
        return PartLabel("at least" if right else "below", self.labels.pass_score)

    def label_score(self, score: float, *, only_side: bool = False) -> PartLabel:
        """only_side: whether only right or wrong is known, which says nothing of the score but its side."""
        score = round(score, 9)  # it may have been a reward in between
        if self.labels.rule == "same_side" or (only_side and self.labels.rule == "exact"):
            return self.label_side(score >= self.labels.pass_score)
        return PartLabel("graded", score) if self.labels.rule == "graded" else PartLabel("exactly", round_score(score))

    def label_criterion(self, criterion: Criterion, share: float, *, only_side: bool = False) -> PartLabel:
        """The label of a criterion in the scores by which the judge answers. share: how far it is met, from 0 to 1.
        only_side: whether only met or not is known.
        """
        is_met = share >= MET
        if criterion.kind == "yes_no":
            return PartLabel("exactly", self.scale.high if is_met else self.scale.low)
        scores = list_scores(criterion, self.scale)
        low, high = scores[0], scores[-1]
        bounds = (low, high) if criterion.levels else None
        if only_side or self.labels.rule == "same_side":
            return PartLabel("at least" if is_met else "below", low + MET * (high - low), bounds)
        wanted = low + share * (high - low)
        if self.labels.rule == "graded":
            return PartLabel("graded", wanted, bounds)
        nearest = min(scores, key=lambda one: abs(one - wanted)) if criterion.levels else round_score(wanted)
        return PartLabel("exactly", nearest, bounds)

    def _of(self, item: Labelled | LabelledParts) -> list[Prompt]:
        if isinstance(item, LabelledParts):
            return self._parted(item)
        if isinstance(item, ScoredResponse):
            return [] if self._about == "pair" else [self._scored(item)]
        return self.rank(item.item_id, item.prompt, item.responses, item.grades, item.subset)

    def _parted(self, item: LabelledParts) -> list[Prompt]:
        if not item.criteria:
            labels = [
                None if share is None else self.label_score(self.scale.to_score(share), only_side=item.is_yes_no)
                for share in item.shares
            ]
            return [self.ask_steps(item.item_id, item.prompt, item.texts, labels, item.subset)]
        known = {one.text: one for one in self.template.find_rubric(item.prompt)}
        criteria = [known.get(one.text, one) for one in item.criteria]
        labelled = [
            (one, self.label_criterion(one, share, only_side=item.is_yes_no))
            for one, share in zip(criteria, item.shares, strict=True)
            if share is not None
        ]
        (response,) = item.texts
        return self.ask_criteria(item.item_id, item.prompt, response, labelled, item.subset)

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
        label = self.label_score(item.score, only_side=item.is_yes_no)
        return self._asked(item.item_id, item.prompt, [item.response], str(label), item.subset)

    def _asked(
        self,
        task_id: str,
        prompt: Prompt,
        shown: Sequence[Trajectory | str],
        label: str,
        source: str = "",
        criteria: Sequence[Criterion] = (),
    ) -> Prompt:
        columns: dict[str, object] = {LABELLED: digest_prompt(prompt)}
        if any(one.evidence for one in criteria):
            columns[WORK] = "\n".join(one if isinstance(one, str) else one.policy_text for one in shown)
        return Prompt(
            prompt_id=task_id,
            messages=self.template.render(prompt, *shown, criteria=criteria or None),
            source=source,
            reference=label,
            rubric=tuple(criteria),
            columns=columns,
        )


def list_scores(criterion: Criterion, scale: Scale) -> list[int]:
    """Its levels, or the ends of the judge's scale."""
    return [score for score, _ in criterion.levels] or [scale.low, scale.high]


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
            if not isinstance(scores, str):
                usable = self._drop_unproved(prompt, scores, rollout.answer)
                reward = measure_agreement(usable, label, self._scale)
        share = (reward - WRONG) / (RIGHT - WRONG)
        return report_score(outcome(rollout, reward), shown.to_score(share), {"label": reward})

    def _drop_unproved(self, task: Prompt, scores: Sequence[float], answer: str) -> list[float | None]:
        """The scores, with None for a criterion that is called met without a quote of the response, where it needs one:
        in a run its judgement would fail.
        """
        work = task.columns.get(WORK)
        if not isinstance(work, str):
            return list(scores)
        quotes, usable = read_quotes(answer, len(scores)), list[float | None]()
        for number, (criterion, score) in enumerate(zip(task.rubric, scores, strict=True), 1):
            low, *_, high = list_scores(criterion, self._scale)
            claims = criterion.evidence and score >= low + MET * (high - low)
            usable.append(None if claims and find_fault(quotes.get(number, ()), work) else score)
        return usable


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


def without_hint(rollout: Rollout, prompt_ids: tuple[int, ...]) -> Rollout:
    """A critique with the prompt of the plain judging task, as if written without the hint."""
    (turn,) = rollout.turns
    return dataclasses.replace(rollout, turns=(dataclasses.replace(turn, new_ids=prompt_ids),))
