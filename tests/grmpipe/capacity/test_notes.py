"""Configurations that are allowed but may not be meant, as none of the shipped recipes is."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from configs import run_config
from hydra import compose, initialize_config_dir

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.capacity.notes import device_notes, hyperparameter_notes
from grmpipe.config.io.yaml_io import build, build_config
from grmpipe.config.run_config import RunConfig
from grmpipe.models.lm.footprint import footprint_of_shape
from grmpipe.models.settings import ModelShape
from grmpipe.roles.role_placement import check_deadlines
from grmpipe.roles.roles import resolve_roles
from grmpipe.run.prepare import Prepared
from grmpipe.scheduler.placement import place
from grmpipe.tasks import notes

ROOT = Path(__file__).parents[3]
RECIPES = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
LARGE = footprint_of_shape(
    ModelShape(num_layers=36, hidden_size=4096, intermediate_size=12288, num_heads=32, num_kv_heads=8, head_dim=128,
               vocab_size=151936, context_tokens=40960)
)  # fmt: skip
ON_A_GPU = {
    "pools": {"all": {"resource": "gpu"}},
    "roles": {role: {"pool": "all"} for role in ("policy", "learner", "grm")},
}


def composed(*overrides: str) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(compose("config", list(overrides)))


def types_of(config: RunConfig) -> tuple[str, str, str, bool]:
    return config.policy.dtype, config.models["grm"].dtype, config.train.dtype, config.train.activations.recomputes


def notes_of(config: RunConfig, size: object = LARGE) -> list[str]:
    roles = resolve_roles(config, place(config.placement, config.roles))
    return device_notes(config.train, roles, {"policy": size, "grm": size})  # type: ignore[dict-item]


@cache
def recipe(name: str) -> RunConfig:
    return composed(f"+experiment={name}", *(["data.path=p"] if name.startswith("qwen3") else []))


@pytest.mark.parametrize("name", RECIPES)
def test_a_judgement_of_a_recipe_times_out_before_its_group(name: str) -> None:
    check_deadlines(recipe(name))
    assert recipe(name).main_judge.limits.timeout_s < recipe(name).rollout.group_deadline_s


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_for_gpus_serves_by_vllm_and_computes_in_bfloat16(name: str) -> None:
    config = recipe(name)
    gpus = [role for role in config.roles if config.placement.on_gpu(role)]
    assert bool(gpus) == name.startswith("qwen3")
    for role in {"policy", "grm"} & set(gpus):
        assert (config.models[role].engine, config.models[role].dtype) == ("vllm", "bfloat16")
    if "learner" in gpus:
        assert config.train.dtype == "bfloat16" and config.train.activations.recomputes
        assert notes_of(config) == []


def test_the_readmes_own_command_computes_in_bfloat16_on_gpus() -> None:
    blocks = re.findall(r"```bash\n(python launch.py data=file.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (command,) = blocks
    overrides = shlex.split(command.replace("\\\n", " "))[2:]
    assert types_of(composed(*overrides)) == ("float32", "float32", "float32", False), "on cores"
    assert types_of(composed(*overrides, "placement=one_gpu")) == ("bfloat16", "bfloat16", "bfloat16", True)


def test_types_follow_the_device_of_each_role() -> None:
    assert types_of(run_config()) == ("float32", "float32", "float32", False)
    assert types_of(build_config({"placement": ON_A_GPU})) == ("bfloat16", "bfloat16", "bfloat16", True)
    apart = {
        "pools": {"all": {"resource": "gpu"}, "cores": {}},
        "roles": {**ON_A_GPU["roles"], "grm": {"pool": "cores"}},
    }
    assert types_of(build_config({"placement": apart})) == ("bfloat16", "float32", "bfloat16", True)


def test_dtypes_that_are_set_stay() -> None:
    told = {"policy": {"dtype": "float32"}, "train": {"dtype": "float32", "activation_checkpointing": "none"}}
    config = build_config({"placement": ON_A_GPU, **told})
    assert types_of(config) == ("float32", "bfloat16", "float32", False)


def test_float32_on_a_gpu_is_noted_by_key() -> None:
    told = {"policy": {"engine": "vllm", "dtype": "float32"}, "grm": {"engine": "vllm"}, "train": {"dtype": "float32"}}
    notes = notes_of(build_config({"placement": ON_A_GPU, **told}))
    assert [note.split(":")[0] for note in notes] == ["policy.dtype", "train.dtype"]
    assert all("float32 on a GPU" in note and "type " in note for note in notes)


def test_the_embedded_engine_with_a_large_model_on_a_gpu_is_noted() -> None:
    config = build_config({"placement": ON_A_GPU, "grm": {"engine": "vllm", "path": "tiny://grm"}})
    (note,) = notes_of(config)
    assert note.startswith("policy.engine: the embedded engine serves 8.2 B") and "policy.engine=vllm" in note
    assert notes_of(config, None) == [], "of unknown size"


def test_a_large_model_whose_activations_are_all_held_is_noted() -> None:
    told = {"policy": {"engine": "vllm"}, "grm": {"engine": "vllm"}, "train": {"activation_checkpointing": "none"}}
    (note,) = notes_of(build_config({"placement": ON_A_GPU, **told}))
    assert note.startswith("train.activation_checkpointing: ")


def test_cores_get_no_note() -> None:
    assert notes_of(composed("+experiment=quickstart")) == []


OWN = ("policy=path", "policy.path=/models/mine")


def test_the_readmes_own_command_trains_a_pretrained_model_as_one() -> None:
    (command,) = re.findall(r"```bash\n(python launch.py data=file.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
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
