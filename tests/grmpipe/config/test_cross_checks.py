"""What depends on several sections is refused by its key, with the way out: adapters of another model, states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from configs import judge_config, run_config

from grmpipe.config.env import EnvConfig
from grmpipe.config.grm import GrmConfig, GrmTrainConfig
from grmpipe.config.judge_monitor import JudgeMonitorConfig
from grmpipe.config.reward import RewardConfig
from grmpipe.config.run_config import RunConfig
from grmpipe.config.task_settings import EvaluateConfig
from grmpipe.models.settings import LoraConfig, PolicyConfig

LORA, LEARNS = LoraConfig(rank=4, sync="adapters"), GrmTrainConfig(enabled=True)
FROM_FILE = replace(LORA, path="runs/x/adapter")
GRM = GrmConfig(path="tiny://grm", lora=LORA, train=LEARNS)


def jury(grm: GrmConfig = GRM, **second: Any) -> RunConfig:
    """A jury of two: the GRM, and an adapter on its engines."""
    return run_config(
        policy=PolicyConfig(path="tiny://policy"),
        grm=grm,
        models={"second": replace(GRM, **{"adapter_of": "grm", **second})},
        judges={"second": judge_config(model="second")},
        reward=RewardConfig(kind="jury", members=["judge", "second"]),
    )


def test_an_adapter_has_no_place_of_its_own_and_is_served_by_its_host() -> None:
    config = jury()
    assert (config.served, config.find_adapters("grm")) == (("policy", "grm", "second"), {"grm": LORA, "second": LORA})
    assert {"second"}.isdisjoint(config.roles) and "second_learner" in config.roles
    alone = jury(adapter_of="")
    assert "second" in alone.roles and alone.find_adapters("grm") == {"grm": LORA}


def test_a_model_that_nobody_asks_is_served_if_another_is_its_adapter() -> None:
    config = run_config(
        policy=PolicyConfig(path="tiny://policy"),
        grm=GrmConfig(path="tiny://grm"),
        models={"second": replace(GRM, adapter_of="grm")},
        judge=judge_config(model="second"),
    )
    assert config.served == ("policy", "grm", "second") and config.find_adapters("grm") == {"second": LORA}


@pytest.mark.parametrize(
    ("grm", "second", "told"),
    [
        (
            {"lora": LoraConfig()},
            {},
            r"^models\.second\.adapter_of: all weights of grm .*grm\.lora\.rank=4 grm\.lora\.sync=adapters, or leave",
        ),
        ({"lora": LoraConfig(rank=4)}, {}, r"^models\.second\.adapter_of: all weights of grm change"),
        (
            {},
            {"adapter_of": "policy", "path": "tiny://policy"},
            r"^models\.second\.adapter_of: all weights of policy ",
        ),
        ({}, {"path": "tiny://grm_weak"}, r"^models\.second\.path: tiny://grm_weak differs from grm\.path=tiny://grm"),
        ({}, {"dtype": "bfloat16"}, r"^models\.second\.dtype: bfloat16 differs .*type models\.second\.dtype=float32"),
        ({}, {"adapter_of": "third"}, r"^models\.second\.adapter_of: 'third' is no model with .*one of policy, grm"),
        ({}, {"adapter_of": "second"}, r"^models\.second\.adapter_of: 'second' is no model with engines of its own"),
        (
            {},
            {"lora": LoraConfig(rank=4)},
            r"^models\.second\.adapter_of: .*\.rank=4 models\.second\.lora\.sync=adapters",
        ),
        ({}, {"engine_options": {"max_batch_rows": 4}}, r"^models\.second\.engine_options: .*grm\.engine_options"),
        ({}, {"policy_updates": [1], "train": GrmTrainConfig()}, r"^models\.second\.policy_updates: "),
        (
            {},
            {"adapter_of": "", "engine": "openai", "path": "gpt", "train": GrmTrainConfig(), "lora": FROM_FILE},
            r"^models\.second\.lora\.sync: openai can't receive adapters alone.*=embedded or",
        ),
        (
            {"engine": "openai", "lora": LoraConfig(), "train": GrmTrainConfig(), "path": "gpt"},
            {},
            r"^models\.second\.adapter_of: openai serves grm elsewhere; .*--lora-modules",
        ),
        (
            {"engine": "vllm", "lora": replace(LORA, rank=600)},
            {"engine": "vllm"},
            r"^grm\.lora\.rank: vllm applies adapters up to rank 512, got 600",
        ),
        (
            {},
            {"lora": LoraConfig(path="runs/x/adapter")},
            r"^models\.second\.adapter_of: .*models\.second\.lora\.rank=16",
        ),
        (
            {"lora": LoraConfig(rank=4, path="runs/x/adapter")},
            {"adapter_of": ""},
            r"^grm\.lora\.path: needs .*sync=adapters",
        ),
    ],
)
def test_an_adapter_that_can_not_share_engines_is_refused_by_its_key(
    grm: dict[str, Any], second: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        jury(replace(GRM, **grm), **second)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ""),
        ({"env": EnvConfig()}, r"env\.kind=single_turn gives no state; type env=custom .*judge\.tools\.state=false"),
        ({"env": EnvConfig(kind="tools", functions="a")}, r"env\.kind=tools gives no state"),
        ({"task": "serve"}, r"task=serve judges what it serves, without states; type judge\.tools\.state=false"),
        ({"task": "evaluate"}, r"task=evaluate judges a file of labels"),
        ({"task": "evaluate", "evaluate": EvaluateConfig(what="policy")}, ""),
        ({"task": "rejudge"}, ""),
        (
            {"grm": replace(GRM, lora=LoraConfig())},
            r"labelled judgements have no .*type grm\.train\.enabled=false",
        ),
        ({"judge_monitor": JudgeMonitorConfig(every=20)}, r"canaries .*type judge_monitor\.every=0, or judge\.tools"),
    ],
)
def test_a_judge_that_reads_states_is_refused_where_there_are_none(changes: dict[str, Any], told: str) -> None:
    given = {
        "policy": PolicyConfig(path="tiny://policy"),
        "grm": GrmConfig(path="tiny://grm"),
        "judge": judge_config(tools={"functions": "a", "state": True}),
        "env": EnvConfig(kind="custom", target="a.Env"),
        "judge_monitor": JudgeMonitorConfig(every=0),
    }
    if not told:
        run_config(**{**given, **changes})
        return
    with pytest.raises(ValueError, match=rf"^judge\.tools\.state: {told}"):
        run_config(**{**given, **changes})
