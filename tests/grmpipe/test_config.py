"""Configuration as a user meets it: every mistake is found before anything starts, and names its key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grmpipe.config import ConfigError, RunConfig
from grmpipe.config_files import from_values, read_yaml, to_yaml
from grmpipe.config_words import known_keys, unknown_key
from grmpipe.resumption import changed_keys

ROOT = Path(__file__).parents[2]


def launch(*overrides: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *overrides],
        cwd=cwd, capture_output=True, text=True, timeout=120, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lrr=3", "unknown key 'train.lrr'; did you mean train.lr"),
        ("group_size=4", "did you mean train.group_size?"),
        ("+train.extra=1", "unknown key 'train.extra'"),
        ("+watch.limits.x={above: 1}", "watch.limits has no x yet; to add one type '+watch.limits={x: {...}}'"),
        ("train.lr=fast", "train.lr: Value 'fast' of type 'str' could not be converted to Float"),
        ("train.lr=-1", "train.lr"),
        ("train.group_size=1", "train.group_size: must be at least 2"),
        ("+experiment=quikstart", "quickstart"),
        ("judge=strict", "generative"),
        ("train.lr=[", "no viable alternative"),
        ("rollout.group_deadline_s=1", "rollout.group_deadline_s: 1 s is less than"),
        ("rollout.top_p=0.9", "rollout.top_p: must be 1 to train"),
        ("policy.engine=vllmm", "policy.engine: unknown engine 'vllmm'; known: embedded"),
        ("task=trian", "task: unknown task 'trian'"),
        ("placement.pools.train.slots=0", "placement.pools.train.slots: must be at least 1"),
    ],
)
def test_a_mistake_exits_2_with_one_message_and_no_traceback(override: str, message: str, tmp_path: Path) -> None:
    result = launch(override, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir()), "nothing may be written before the configuration is right"


def test_the_nearest_key_is_named_across_sections() -> None:
    assert "train.group_size" in unknown_key("rollout.group_size", known_keys())
    assert "did you mean" not in unknown_key("qqqqqqq", known_keys())


def test_an_error_of_a_section_gets_the_sections_key() -> None:
    with pytest.raises(ConfigError, match=r"^train\.schedule: unknown value 'step'"):
        from_values(RunConfig, {"train": {"schedule": "step"}})
    with pytest.raises(ConfigError, match=r"^placement\.pools\.a\.slots: must be at least 1"):
        from_values(RunConfig, {"placement": {"pools": {"a": {"slots": 0}}}})


def test_a_configuration_survives_its_file(tmp_path: Path) -> None:
    config = from_values(
        RunConfig,
        {"train": {"lr": 1e-5, "adam_betas": [0.8, 0.9]}, "placement": {"pools": {"a": {"slots": 2}}}, "seed": 3},
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_yaml(tmp_path / "config.yaml") == config


def test_only_keys_that_change_the_training_forbid_a_resume() -> None:
    old = RunConfig()
    assert changed_keys(old, from_values(RunConfig, {"resume": "auto", "cluster": {"kind": "inprocess"}})) == []
    assert changed_keys(old, from_values(RunConfig, {"train": {"lr": 0.5}})) == ["train.lr: 0.0003 -> 0.5"]
