"""Labels by people: a file that grows, and what the run wants labelled."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from grmpipe.config.data import DataConfig
from grmpipe.config.grm import GrmTrainConfig
from grmpipe.config.judge import JudgeConfig, LabelConfig
from grmpipe.judge.kinds.labels import JudgingTasks
from grmpipe.judge.pointwise_adapter import rollout_of_text
from grmpipe.judge.verdict import make_failure, outcome
from grmpipe.models.types import Message
from grmpipe.observe.guard import Guard
from grmpipe.run.features.cotrain.judging_tasks import JudgingTaskStream
from grmpipe.run.features.cotrain.label_source import LabelSource
from grmpipe.run.prepare import Prepared
from grmpipe.types import Failed, JudgedGroup, Prompt, Verdict

PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="6 x 7?"),), reference="42")


def open_source(tmp_path: Path) -> tuple[LabelSource, JudgingTaskStream]:
    judge = JudgeConfig()
    tasks = JudgingTaskStream(
        JudgingTasks.under(judge, LabelConfig()), None, None, rollout_share=1, window=8, seed=0, pass_reward=0.7
    )
    own = GrmTrainConfig(enabled=True, labels_from=str(tmp_path / "labels.jsonl"), warmup_steps=0, rollout_share=1)
    judging = SimpleNamespace(
        find_training_judge=lambda role: judge, select_asking=lambda role: {}, judges={"cheap": judge, "good": judge}
    )
    config = SimpleNamespace(
        trained_grms={"cheap": own}, models={"cheap": SimpleNamespace(key="models.cheap")}, judging=judging,
        data=DataConfig(),
    )  # fmt: skip
    prepared = cast(Prepared, SimpleNamespace(config=config, held_out=()))
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "r", "inputs": {}}))
    return LabelSource(prepared, "cheap", tmp_path, tasks, Guard()), tasks


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
    rollouts = tuple(rollout_of_text("g", sibling, str(sibling)) for sibling in range(3))
    verdicts: list[Verdict | Failed] = [
        Verdict(
            rewards=outcome(one, good),
            score=good,
            breakdown={"cheap": 0.9, "good": good},
            score_std=0,
            num_judgements=1,
        )
        for one, good in zip(rollouts, (0.2, 0.8), strict=False)
    ]
    verdicts.append(make_failure("died", "it did"))
    source.take(JudgedGroup(group_id="g", prompt=PROMPT, rollouts=rollouts, verdicts=tuple(verdicts)))
    source.close()
    (row,) = [json.loads(line) for line in (tmp_path / "to_label.jsonl").read_text().splitlines()]
    assert (row["item_id"], row["response"], row["reference"]) == ("g/0", "0", "42")
    assert row["rewards"] == {"cheap": 0.9, "good": 0.2} and "score" not in row
