"""What a policy is evaluated on is checked before anything starts; what can't be judged is left out and counted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from configs import run_config

from grmpipe.config.data import DataConfig
from grmpipe.config.grm import GrmConfig
from grmpipe.config.judge import JudgeConfig, LabelConfig
from grmpipe.config.reward import RewardConfig
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.task_settings import EvaluateConfig
from grmpipe.data.labelled import load_labelled
from grmpipe.data.trained_prompts import FILE, write_trained_prompts
from grmpipe.judge.kinds.labels import JudgingTasks
from grmpipe.run.tasks.prepare_evaluation import check_scoring, find_prompts, leave_out_trained, load_items
from grmpipe.types import Prompt

RULE = JudgeConfig(kind="rule")


def evaluation(prompts: Mapping[str, str] | None = None, **sections: Any) -> RunConfig:
    evaluate = EvaluateConfig(what="policy", prompts=prompts)
    return run_config(**{"task": "evaluate", "judge": RULE, "evaluate": evaluate, **sections})


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_prompt_without_a_reference_is_left_out_where_a_rule_judges_it(tmp_path: Path) -> None:
    path = written(
        tmp_path / "mine.jsonl",
        {"prompt": "6 x 7?", "reference": 42, "source": "math"},
        {"prompt": "7 x 7?", "source": "math"},
        {"prompt": "A poem?", "source": "chat"},
    )
    found = find_prompts(evaluation({"x": path}))["x"]
    assert (len(found.prompts), found.num_left_out) == (1, 2)
    route = {
        "reward": RewardConfig(kind="route", route={"math": "judge", "chat": "grm_judge"}),
        "judges": {"grm_judge": JudgeConfig()},
    }
    found = find_prompts(evaluation({"x": path}, **route))["x"]
    assert ([prompt.source for prompt in found.prompts], found.num_left_out) == (["math", "chat"], 1)


def test_without_prompts_the_held_out_ones_are_answered(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.jsonl", {"prompt": "6 x 7?", "reference": 42})
    assert list(find_prompts(evaluation(data=DataConfig(path="", eval_path=path)))) == ["held_out"]
    with pytest.raises(ConfigError, match=r"^evaluate\.prompts: is null, .*'evaluate\.prompts=\{mine: file\.jsonl\}'"):
        find_prompts(evaluation(data=DataConfig(path="")))
    with pytest.raises(ValueError, match=r"^data\.path: missing"):
        evaluation(data=DataConfig(path=""), task="train")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (None, r"^evaluate\.prompts\.x: .*mine\.jsonl: no such file"),
        ({"prompt": "?"}, r"^evaluate\.prompts\.x: no prompt has a reference"),
        ({"prompt": "?", "reference": "a poem"}, r"^evaluate\.prompts\.x: .*mine\.jsonl, line 1: reference"),
    ],
)
def test_prompts_that_cannot_be_judged_are_refused_by_their_key(
    tmp_path: Path, row: dict[str, Any] | None, told: str
) -> None:
    path = tmp_path / "mine.jsonl"
    if row is not None:
        written(path, row)
    with pytest.raises(ConfigError, match=told):
        find_prompts(evaluation({"x": str(path)}))


def check(config: RunConfig) -> None:
    check_scoring(config.judging, config.data.labels)


def test_a_judge_that_compares_or_passes_nothing_scores_no_policy() -> None:
    check(evaluation())
    pairs = JudgeConfig(protocol="pairwise", template="pairwise", parser="boxed", num_judgements=2, vote="majority")
    with pytest.raises(ConfigError, match=r"^judge\.protocol: pairwise compares answers .* judge=rule"):
        check(evaluation(judge=pairs))
    with pytest.raises(
        ConfigError, match=r"^data\.labels\.pass_score: pass@k counts .* type data\.labels\.pass_score=10 or less"
    ):
        check(evaluation(data=DataConfig(labels=LabelConfig(pass_score=11))))
    no_scale = JudgeConfig(kind="function", function="mine.reward")
    check(evaluation(judge=no_scale, data=DataConfig(labels=LabelConfig(pass_score=11))))


def test_items_that_are_not_read_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} x 7?", "responses": ["1", "2"], "best": 0} for n in range(5)]
    config = evaluation()
    evaluate = replace(config.evaluate, path=written(tmp_path / "mine.jsonl", *rows), num_items=3)
    items, num_unread = load_items(replace(config, evaluate=evaluate))
    assert (len(items), num_unread) == (3, 2)


def test_items_on_which_the_judge_was_trained_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": f"{n} x 7?", "responses": ["1", "2"], "best": 0} for n in range(5)]
    config, labelled = under_path(tmp_path), load_labelled(written(tmp_path / "mine.jsonl", *rows))
    assert leave_out_trained(config, labelled) == labelled, "nothing is known of this model"
    trained = JudgingTasks.under(
        JudgeConfig(kind="label", protocol="listwise", template="listwise", parser="boxed"), LabelConfig()
    ).of(labelled[1:3])
    write_trained_prompts(tmp_path, trained)
    spelled_otherwise = [replace(one, prompt=shout(one.prompt)) for one in labelled]
    kept = leave_out_trained(config, tuple(spelled_otherwise))
    assert [one.item_id for one in kept] == [labelled[0].item_id, labelled[3].item_id, labelled[4].item_id]
    assert "2 of 5 items are left out" in caplog.text
    with pytest.raises(ConfigError, match=r"evaluate\.path: .* was trained on every prompt"):
        leave_out_trained(config, labelled[1:3])
    (tmp_path / FILE).write_text("7", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"grm\.path: .*trained_prompts\.json: expected a JSON list"):
        leave_out_trained(config, labelled)


def under_path(folder: Path) -> RunConfig:
    return run_config(task="evaluate", grm=GrmConfig(path=str(folder)))


def shout(prompt: Prompt) -> Prompt:
    return replace(prompt, messages=tuple(replace(one, content=one.content.upper()) for one in prompt.messages))
