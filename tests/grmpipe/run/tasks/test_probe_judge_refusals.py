"""What can't be probed is refused by its key, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from configs import run_config

from grmpipe.config.data import DataConfig
from grmpipe.config.env import EnvConfig
from grmpipe.config.judge import JudgeConfig, LabelConfig
from grmpipe.config.task_settings import EvaluateConfig, ProbeConfig
from grmpipe.run.tasks.probe_judge import prepare_probe
from grmpipe.scheduler.placement import PlacementConfig, PoolConfig, RoleConfig

ROLES = ("policy", "grm")
PLACEMENT = PlacementConfig(pools={"all": PoolConfig(slots=2)}, roles=dict.fromkeys(ROLES, RoleConfig(pool="all")))
FUNCTION = JudgeConfig(kind="function", function="os.path.commonprefix")
PAIRWISE = JudgeConfig(protocol="pairwise", template="pairwise", parser="boxed", vote="majority", num_judgements=2)


def by_policy(**probe: Any) -> dict[str, Any]:
    return {"evaluate": EvaluateConfig(what="policy"), "probe": ProbeConfig(**probe)}


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"probe": ProbeConfig(tricks=["told"])}, "probe.tricks: told is the policy's, and with evaluate.what=judge"),
        ({"probe": ProbeConfig(truth="b")}, "probe.truth: b judges answers, and with evaluate.what=judge"),
        (by_policy(truth="b"), "probe.truth: 'b' is no judge in judges beside those that are probed; type"),
        (by_policy(truth="judge"), "probe.truth: 'judge' is no judge in judges beside those that are probed; type"),
        (
            by_policy(truth="c") | {"judges": {"b": JudgeConfig()}},
            "probe.truth: 'c' is no judge in judges beside those that are probed; known: b;",
        ),
        (by_policy(truth="b") | {"judges": {"b": PAIRWISE}}, "probe.truth: b must score one response"),
        ({"judge": PAIRWISE}, "judge.protocol: pairwise compares responses"),
        ({"judge": FUNCTION}, "data.labels.pass_score: 8 isn't on the scale of judge"),
        (
            {"data": DataConfig(labels=LabelConfig(pass_score=11))},
            "data.labels.pass_score: 11 isn't on the scale of judge",
        ),
        (
            by_policy() | {"env": EnvConfig(kind="custom", target="a.B")},
            "env.kind: tricks are done to one answer, and custom has several turns",
        ),
        (
            {"evaluate": EvaluateConfig(what="policy", prompts={"a": "unknown.jsonl"})},
            "probe.truth: is null, and for no prompt",
        ),
        (by_policy() | {"data": DataConfig(path="unknown.jsonl", eval_path=None)}, "evaluate.prompts: is null, and"),
        (
            {"evaluate": EvaluateConfig(path="right.jsonl")},
            "evaluate.path: no response of right.jsonl is labelled as wrong",
        ),
    ],
)
def test_what_cant_be_probed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("unknown.jsonl").write_text(json.dumps({"prompt": "Why?"}) + "\n")
    Path("right.jsonl").write_text(json.dumps({"prompt": "6 x 7?", "response": "42", "right": True}) + "\n")
    with pytest.raises(ValueError) as raised:
        prepare_probe(run_config(task="probe_judge", placement=PLACEMENT, **sections))
    assert str(raised.value).startswith(told)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"tricks": ["flattery"]}, "tricks: unknown trick 'flattery'; known: longer, praise"),
        ({"tricks": []}, "tricks: is empty; known: longer, praise"),
        ({"truth": ""}, "truth: is empty; give the name of a judge"),
        ({"margin": 2}, "margin: must be from 0 to 1"),
    ],
)
def test_values_that_mean_nothing_are_refused(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as raised:
        ProbeConfig(**keys)
    assert str(raised.value).startswith(told)
