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
from grmpipe.config.judge import JudgeConfig, LabelConfig
from grmpipe.config.reward import RewardConfig
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.task_settings import EvaluateConfig
from grmpipe.run.tasks.prepare_evaluation import check_scoring, find_prompts, load_items

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
