"""Labels by another judge, and by people: a file that grows, and what the run wants labelled."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from grmpipe.config.data import DataConfig
from grmpipe.config.grm import GrmTrainConfig
from grmpipe.config.judge import JudgeConfig, LabelConfig, SplitConfig
from grmpipe.judge.kinds.labels import JudgingTasks
from grmpipe.judge.pointwise_adapter import rollout_of_text
from grmpipe.judge.verdict import make_failure, outcome
from grmpipe.models.types import Completion, Message
from grmpipe.observe.guard import Guard
from grmpipe.run.features.cotrain.judging_tasks import JudgingTaskStream
from grmpipe.run.features.cotrain.label_source import LabelSource
from grmpipe.run.prepare import Prepared
from grmpipe.types import Criterion, Failed, JudgedGroup, Prompt, Rollout, Turn, Verdict

PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="6 x 7?"),), reference="42")


def open_source(
    tmp_path: Path, judge: JudgeConfig | None = None, labels_from: str = ""
) -> tuple[LabelSource, JudgingTaskStream]:
    judge = judge or JudgeConfig()
    tasks = JudgingTaskStream(
        JudgingTasks.under(judge, LabelConfig()), None, None, rollout_share=1, window=8, seed=0, pass_reward=0.7
    )
    labels = labels_from or str(tmp_path / "labels.jsonl")
    own = GrmTrainConfig(enabled=True, labels_from=labels, warmup_steps=0, rollout_share=1)
    judging = SimpleNamespace(
        find_training_judge=lambda role: judge, select_asking=lambda role: {}, judges={"cheap": judge, "good": judge}
    )
    config = SimpleNamespace(
        trained_grms={"cheap": own}, models={"cheap": SimpleNamespace(key="models.cheap")}, judging=judging,
        data=DataConfig(),
    )  # fmt: skip
    policy = SimpleNamespace(renderer=SimpleNamespace(decode=lambda ids: "".join(map(chr, ids))))
    prepared = cast(Prepared, SimpleNamespace(config=config, held_out=(), policy=policy))
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "r", "inputs": {}}))
    return LabelSource(prepared, "cheap", tmp_path, tasks, Guard()), tasks


def judged_group(group_id: str, by_good: Sequence[float | None]) -> JudgedGroup:
    """A group whose siblings have these rewards by `good`; None: its verdict failed."""
    rollouts = tuple(rollout_of_text(group_id, sibling, f"number {sibling}") for sibling in range(len(by_good)))
    verdicts: list[Verdict | Failed] = [
        make_failure("died", "it did")
        if good is None
        else Verdict(
            rewards=outcome(one, good),
            score=good,
            breakdown={"cheap": 0.9, "good": good},
            score_std=0,
            num_judgements=1,
        )
        for one, good in zip(rollouts, by_good, strict=True)
    ]
    return JudgedGroup(group_id=group_id, prompt=PROMPT, rollouts=rollouts, verdicts=tuple(verdicts))


@pytest.mark.parametrize(
    ("protocol", "tasks"),
    [("pairwise", {"g/0": {"0", "1"}, "g/2": {"1", "3"}}), ("listwise", {"g": {"0", "1", "3"}})],
)
def test_a_judge_that_compares_learns_from_siblings_that_another_judge_ranks(
    tmp_path: Path, protocol: str, tasks: dict[str, set[str]]
) -> None:
    judge = JudgeConfig(protocol=protocol, template=protocol, parser="boxed", num_judgements=2)
    source, stream = open_source(tmp_path, judge, "good")
    source.take(judged_group("ties", (0.5, 0.5, None)))
    source.take(judged_group("alone", (0.5, None)))
    assert source.are_missing, "no sibling is known to be better"
    source.take(judged_group("g", (0.2, 0.8, None, 0.6)))
    assert not source.are_missing
    asked = {task.prompt_id: task for task in map(stream.at, range(16))}
    assert asked.keys() == tasks.keys()
    for name, task in asked.items():
        shown = re.findall(r"number (\d)", task.messages[-1].content)
        assert set(shown) == tasks[name], "the failed sibling is in no task"
        assert task.reference == f"best {shown.index('1') + 1} of {len(shown)}"


def test_a_file_is_read_again_when_it_grows_and_one_that_cant_be_read_changes_nothing(tmp_path: Path) -> None:
    source, tasks = open_source(tmp_path)
    source.read_file()
    assert source.are_missing, "it doesn't exist so far"
    file = tmp_path / "labels.jsonl"
    rows = [json.dumps({"item_id": name, "prompt": "?", "response": name, "score": 3}) + "\n" for name in "ab"]
    for known in (rows[:1], rows):
        file.write_text("".join(known))
        source.read_file()
        assert not source.are_missing
        assert {tasks.at(index).prompt_id for index in range(8)} == {"a", "b"} - ({"b"} if len(known) == 1 else set())
    file.write_text(rows[0] + json.dumps({"prompt": "?", "response": "c", "score": "much"}) + "\n")
    source.read_file()
    assert {tasks.at(index).prompt_id for index in range(8)} == {"a", "b"}


def test_what_the_judges_dont_agree_on_is_written_as_rows_that_lack_their_label(tmp_path: Path) -> None:
    source, _ = open_source(tmp_path)
    source.take(judged_group("g", (0.2, 0.8, None)))
    source.close()
    (row,) = [json.loads(line) for line in (tmp_path / "to_label.jsonl").read_text().splitlines()]
    assert (row["item_id"], row["response"], row["reference"]) == ("g/0", "number 0", "42")
    assert row["rewards"] == {"cheap": 0.9, "good": 0.2} and "score" not in row


# -- steps and criteria ------------------------------------------------------------------------------------------------

SHORT, EXACT = Criterion(text="Is short."), Criterion(text="Names the product.", kind="yes_no")
BY_RUBRIC = JudgeConfig(protocol="rubric", template="rubric", parser="boxed")
BY_STEPS = JudgeConfig(protocol="steps", template="steps", parser="boxed", split=SplitConfig(step_end="; "))


def written(text: str) -> Rollout:
    """A rollout with a token for each character."""
    ids = tuple(map(ord, text))
    completion = Completion(token_ids=ids, logprobs=(-1.0,) * len(ids), text=text, finish_reason="stop", versions=())
    return Rollout(group_id="g", sibling=0, turns=(Turn(new_ids=(0,), completion=completion),), status="finished")


def judged_in_parts(rollout: Rollout, parts: Mapping[str, float]) -> JudgedGroup:
    """A group of one, of whose parts `good` says this; as wholes the judges part."""
    breakdown = {"cheap": 0.9, "good": 0.2}
    verdict = Verdict(rewards=outcome(rollout, 0.2), score=2, breakdown=breakdown, score_std=0, num_judgements=1)
    prompt = dataclasses.replace(PROMPT, rubric=(SHORT, EXACT))
    return JudgedGroup(
        group_id="g", prompt=prompt, rollouts=(rollout,), verdicts=(verdict,), by_part=({"good": parts},)
    )


def test_a_judge_by_a_rubric_learns_from_what_another_says_of_each_criterion(tmp_path: Path) -> None:
    source, stream = open_source(tmp_path, BY_RUBRIC, "good")
    source.take(judged_in_parts(written("Nobody says anything of it."), {}))
    source.take(judged_in_parts(written("It is 42."), {"Is short": 0.6, "Names the product": 0.7, "its own": 1.0}))
    source.take(judged_in_parts(written("It is 41."), {"Is short": 1.0, "Names the product": 0.2}))
    assert not source.are_missing
    labels = {task.messages[-1].content.partition("It is ")[2][:2]: task.reference for task in map(stream.at, range(9))}
    assert labels == {"42": "exactly 6; exactly 10", "41": "exactly 10; exactly 1"}


def test_a_criterion_of_which_nothing_is_known_is_not_asked_about(tmp_path: Path) -> None:
    source, stream = open_source(tmp_path, BY_RUBRIC, "good")
    source.take(judged_in_parts(written("It is 41."), {"Is short": 1.0}))
    source.take(judged_in_parts(written("It is 40."), {"Is short": 0.0}))
    for task in map(stream.at, range(8)):
        assert task.rubric == (SHORT,) and "Names the product" not in task.messages[-1].content


def test_a_judge_of_steps_learns_from_what_another_says_of_each_step(tmp_path: Path) -> None:
    source, stream = open_source(tmp_path, BY_STEPS, "good")
    source.take(judged_in_parts(written("one; two; three"), {"0:0-5": 1.0, "0:5-10": 0.0}))
    source.take(judged_in_parts(written("one; two"), {"0:0-5": 1.0, "0:5-8": 0.8}))
    source.take(judged_in_parts(written("one"), {"0:0-9": 1.0}))
    labels = {task.reference for task in map(stream.at, range(8))}
    assert labels == {"exactly 10; exactly 1; any", "exactly 10; exactly 8"}, "a step that it cut otherwise has none"


@pytest.mark.parametrize(
    ("judge", "rows"),
    [
        (BY_STEPS, [{"steps": ["one; ", "two"]}]),
        (
            BY_RUBRIC,
            [
                {"response": "one; two", "criterion": "Is short."},
                {
                    "response": "one; two",
                    "criterion": {"text": "Names the product.", "kind": "yes_no", "evidence": False},
                },
            ],
        ),
    ],
)
def test_people_are_asked_about_the_parts_that_the_judge_learns_from_and_their_file_is_read(
    tmp_path: Path, judge: JudgeConfig, rows: list[dict[str, object]]
) -> None:
    source, stream = open_source(tmp_path, judge)
    source.take(judged_in_parts(written("one; two"), {}))
    source.close()
    asked = [json.loads(line) for line in (tmp_path / "to_label.jsonl").read_text().splitlines()]
    assert [{name: row[name] for name in row.keys() & {"steps", "response", "criterion"}} for row in asked] == rows
    answers = [
        {"labels": [True, False]} if "steps" in row else {"right": number == 0} for number, row in enumerate(asked)
    ]
    answered = [
        {**row, "item_id": f"{number}", **answer}
        for number, (row, answer) in enumerate(zip(asked, answers, strict=True))
    ]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answered))
    source.read_file()
    labels = {task.reference for task in map(stream.at, range(8))}
    assert labels == ({"at least 8; below 8"} if judge is BY_STEPS else {"at least 5.5; exactly 1"})
