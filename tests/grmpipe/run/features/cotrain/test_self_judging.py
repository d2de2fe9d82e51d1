"""Judging tasks among a run's prompts: their share, their places, and no prompt left out for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grmpipe.config.judge import JudgeConfig, LabelConfig, Scale
from grmpipe.data.stream import EndOfData, NothingToJudge, PromptStream
from grmpipe.judge.kinds.labels import JudgingTasks
from grmpipe.judge.kinds.rule import rule_named
from grmpipe.judge.pointwise_adapter import rollout_of_text
from grmpipe.models.types import Message
from grmpipe.run.features.cotrain.judging_tasks import JudgingTaskStream
from grmpipe.run.features.cotrain.self_judging import JudgeOrLabels, MixedPrompts
from grmpipe.types import Criterion, JudgeSession, Prompt

OWN = [Prompt(prompt_id=f"p{n}", messages=(Message(role="user", content=f"{n}?"),)) for n in range(9)]
QUESTION = Prompt(prompt_id="q", messages=(Message(role="user", content="6 x 7?"),), reference="42")
STORED = Prompt(prompt_id="stored", messages=(Message(role="user", content="judge!"),), reference="below 8")


def stream(*stored: Prompt) -> JudgingTaskStream:
    judging_tasks = JudgingTasks.under(JudgeConfig(), LabelConfig())
    kept = PromptStream(stored) if stored else None
    return JudgingTaskStream(judging_tasks, rule_named("exact_answer"), kept, rollout_share=0, window=8, seed=0)


def mixed(*, share: float = 0.25) -> MixedPrompts:
    return MixedPrompts(PromptStream(OWN, shuffle=False, max_epochs=1), stream(STORED), share)


@pytest.mark.parametrize("share", [0.1, 0.25, 1 / 3, 0.5, 0.9])
def test_judging_tasks_have_their_share_and_no_prompt_is_left_out(share: float) -> None:
    prompts, found = mixed(share=share), []
    with pytest.raises(EndOfData):
        for place in range(1000):
            found.append(prompts.at(place))
    assert [prompt for prompt in found if not prompt.self_judging] == OWN
    assert sum(prompt.self_judging for prompt in found) == int(len(found) * share)


def test_a_judging_task_says_what_it_is() -> None:
    task = mixed().at(3)
    assert task.self_judging and task.source == "self_judging"
    assert (task.messages, task.reference) == (STORED.messages, STORED.reference)


def test_the_place_of_a_judging_task_stays_empty_until_rollouts_of_both_kinds_are_known() -> None:
    judging_tasks = stream()
    prompts = MixedPrompts(PromptStream(OWN, shuffle=False), judging_tasks, 0.25)
    judging_tasks.add(QUESTION, rollout_of_text("g", 0, "41"))
    with pytest.raises(NothingToJudge):
        prompts.at(3)
    assert prompts.at(4).prompt_id == "p3", "the place is nobody else's"
    judging_tasks.add(QUESTION, rollout_of_text("g", 1, "42"))
    assert [prompts.at(place).reference for place in (3, 7, 11)] == ["at least 8", "below 8", "at least 8"]


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        return f"{self.name} of {group_id}"  # type: ignore[return-value]


def test_labels_judge_judging_tasks_and_the_judge_all_others() -> None:
    judge = JudgeOrLabels(Named("judge"), Named("labels"))
    assert [judge.open(mixed().at(place), "g", 4) for place in (2, 3)] == ["judge of g", "labels of g"]


def test_a_judging_task_shows_the_rubric_of_its_prompt_where_the_judges_template_does() -> None:
    judge = JudgeConfig(template="prometheus2", parser="result", scale=Scale(low=1, high=5))
    guided = JudgingTasks.under(judge, LabelConfig(pass_score=4))
    prompt = replace(QUESTION, rubric=(Criterion(text="It names its source."),))
    (asked,) = guided.ask("g/0", prompt, "42", guided.label_side(True)).messages[-1:]
    assert "It names its source." in asked.content
