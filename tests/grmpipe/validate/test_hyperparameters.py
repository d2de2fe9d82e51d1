"""Learning rates and lengths of answers: a tiny policy's are not those of a pretrained model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hydra import compose, initialize_config_dir

import launch  # noqa: F401  registers the schema
from grmpipe.config.io.yaml_io import build
from grmpipe.config.run_config import RunConfig
from grmpipe.tasks import notes
from grmpipe.validate.hyperparameters import hyperparameter_notes
from grmpipe.validate.prepare import Prepared

ROOT = Path(__file__).parents[3]
OWN = ("policy=path", "policy.path=/models/mine")


def composed(*overrides: str) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(compose("config", list(overrides)))


def test_the_readmes_own_command_trains_a_pretrained_model_as_one() -> None:
    (command,) = re.findall(r"```\n(python launch.py data=file.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    config = composed(*shlex.split(command.replace("\\\n", " "))[2:], "critic=policy", "algorithm=ppo")
    assert (config.train.lr, config.critic.lr, config.rollout.max_new_tokens) == (1e-6, 1e-5, 1024)
    assert hyperparameter_notes(config) == []


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "conf" / "policy").glob("[!t]*.yaml")))
def test_every_policy_that_is_not_tiny_brings_rates_and_answers_of_a_pretrained_one(name: str) -> None:
    config = composed(f"policy={name}", "policy.path=/models/mine")
    assert (config.train.lr, config.rollout.max_new_tokens) == (1e-6, 1024)


def test_a_recipe_and_a_typed_key_come_after_the_values_of_the_policy() -> None:
    assert composed("+experiment=quickstart", *OWN).train.lr == 3e-4
    assert composed(*OWN, "train.lr=5e-6").train.lr == 5e-6


def test_the_toys_hyperparameters_on_a_model_of_the_users_are_noted_with_what_to_type() -> None:
    rate, answers = hyperparameter_notes(composed("+experiment=quickstart", *OWN))
    assert re.match(r"train\.lr: 0\.0003 for all weights of /models/mine .* type train\.lr=1e-6$", rate)
    assert re.match(r"rollout\.max_new_tokens: 64 tokens cut off .* type rollout\.max_new_tokens=1024$", answers)
    assert hyperparameter_notes(composed("+experiment=quickstart")) == []


def test_a_run_begins_with_the_notes() -> None:
    config = composed("+experiment=quickstart", *OWN)
    prepared = SimpleNamespace(config=config, held_out=("a prompt",), placement=SimpleNamespace(pools={}))
    assert notes(cast(Prepared, prepared)) == hyperparameter_notes(config) != []


def test_adapters_may_learn_fast_and_are_noted_if_they_learn_as_slowly_as_all_weights() -> None:
    adapters = (*OWN, "policy.lora.rank=8")
    assert hyperparameter_notes(composed(*adapters, "train.lr=1e-4")) == []
    assert hyperparameter_notes(composed(*adapters)) == [
        "train.lr: 1e-06 is low for adapters; type train.lr=1e-05 or more"
    ]
