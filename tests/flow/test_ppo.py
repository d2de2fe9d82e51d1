"""PPO with a critic, in whole runs with real engines, learners and tiny models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.config.io.yaml_io import build
from grmpipe.config.run_config import ConfigError

ROOT = Path(__file__).parents[2]
EVALUATE = ["task=evaluate"]
PPO = ("algorithm=ppo", "critic=policy")


def test_run_trains_a_critic_along_with_the_policy(small_run: Callable) -> None:
    files = small_run("critic.warmup_steps=1", experiment="ppo")
    summary, steps = files.summary, files.steps()
    assert (summary["status"], summary["versions"]) == ("completed", {"policy": 3, "grm": 0, "critic": 3})
    assert summary["busy_s"]["critic"] > 0
    assert ["train/loss" in step for step in steps] == [False, True, True]  # the first warms up the critic
    assert all(step["critic/value_loss"] > 0 for step in steps)
    assert steps[0]["critic/value_mean"] == 0 and steps[2]["critic/value_mean"] != 0
    assert {"critic/explained_variance", "critic/clip_share", "critic/return_mean", "critic/wait_s"} <= set(steps[2])
    assert steps[2]["critic/precomputed_share"] > 0
    spans = json.loads((files.run_dir / "timeline.json").read_text())
    lane = {span["tid"] for span in spans if span.get("name") == "thread_name" and span["args"]["name"] == "critic"}
    names = {span["name"] for span in spans if span["tid"] in lane and span.get("ph") == "X"}
    assert names == {"values", "accumulate", "step 1", "step 2", "step 3"}
    used = small_run(
        "train.num_steps=1", "critic=path", f"critic.path={files.run_dir / 'critic'}", experiment="ppo", run_dir="used"
    )
    assert used.steps()[0]["critic/value_mean"] == pytest.approx(steps[2]["critic/value_mean"], abs=1.0)
    assert used.steps()[0]["critic/value_mean"] != 0  # it was trained before


@pytest.mark.long
def test_a_policy_in_warm_up_stays_as_it_is(small_run: Callable) -> None:
    files = small_run("train.num_steps=2", "critic.warmup_steps=1", "train.checkpoint_every=1", experiment="ppo")
    shutil.rmtree(files.run_dir / "policy")
    (files.run_dir / "checkpoints" / "latest").write_text("step_1")
    (files.run_dir / "summary.json").unlink()
    metrics = files.lines("metrics")
    before, warm = metrics[0], next(line for line in metrics if line["step"] == 1)
    assert "train/grad_norm" not in warm and before["step"] == 0
    again = small_run(
        "train.num_steps=2", "critic.warmup_steps=1", "train.checkpoint_every=1", "resume=auto", experiment="ppo"
    )
    assert [step["step"] for step in again.steps()] == [1, 2]
    assert "train/grad_norm" in again.steps()[1]
    assert load_file(again.run_dir / "policy" / "model.safetensors")


@pytest.mark.long
def test_several_updates_and_unwhitened_advantages_train_by_a_dual_clip(small_run: Callable) -> None:
    files = small_run(
        "train.num_steps=2", "algorithm=[ppo_raw,dual_clip]", "algorithm.updates_per_batch=2",
        "algorithm.gae_lambda=0.95", "algorithm.kl_coefficient=0.01", "algorithm.kl_in_reward=true",
        "train.schedule=linear", "train.warmup_steps=0", "critic.lr_warmup_steps=0", "critic.lr=4e-4", "train.lr=4e-4",
        experiment="ppo",
    )  # fmt: skip
    assert files.summary["versions"] == {"policy": 2, "grm": 0, "critic": 2}
    # The last of the four updates has a quarter of the learning rate left.
    assert {files.steps()[-1][f"{who}/lr"] for who in ("train", "critic")} == {1e-4}


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("algorithm=ppo",), r"critic\.enabled: .*critic=policy"),
        (("critic=policy",), r"critic\.enabled: .*algorithm=ppo"),
        ((*PPO, "critic.warmup_steps=3"), r"critic\.warmup_steps"),
        ((*PPO, "critic.lr=0"), r"critic\.lr"),
        ((*PPO, "critic.value_clip=0"), r"critic\.value_clip: .*null"),
        ((*PPO, "critic=path"), r"critic\.path: is empty"),
        ((*PPO, "critic.path=tiny://nothing"), r"critic\.path"),
        ((*PPO, "~placement.roles.critic"), r"placement\.roles\.critic: has no pool"),
        ((*PPO, "placement.roles.critic.pool=nowhere"), r"placement\.roles\.critic\.pool: unknown pool"),
        ((*PPO, "placement=time_shared"), r"placement\.roles\.critic\.pool: only learner"),
        ((*PPO, "placement.roles.critic.replicas=2"), r"placement\.roles\.critic"),
        ((*PPO, "grm.train.enabled=true"), r"grm\.train\.enabled"),
        ((*PPO, "algorithm.gae_lambda=1.1"), r"algorithm\.gae_lambda"),
        ((*PPO, "judge=label", "task=train_judge_rft"), r"task=train_judge_rft uses no critic"),
    ],
)
def test_settings_that_a_critic_cant_train_with_are_refused_by_name(
    small_run: Callable, overrides: tuple[str, ...], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        small_run(*overrides)


def test_an_evaluation_needs_no_critic() -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        trained, evaluated = (build(compose("config", ["+experiment=ppo", *task])).roles for task in ([], EVALUATE))
    assert set(trained) - set(evaluated) == {"critic"}
