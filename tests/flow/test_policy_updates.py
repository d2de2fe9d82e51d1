"""Whole runs whose judge is the policy: as it is, as it began, and as it was after some steps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from grmpipe.config.run_config import ConfigError
from grmpipe.observe.recorder import load_verdicts
from grmpipe.types import Verdict

ITSELF = ("policy.path=tiny://policy_judge", "train.num_steps=6", "train.checkpoint_every=1")
UPDATED = (*ITSELF, "grm=policy", "grm.policy_updates=[1, 3]")


@pytest.fixture(scope="module")
def updated(run_once: Callable) -> Any:
    return run_once(*UPDATED)


def versions_of_groups(files: Any) -> list[set[int]]:
    """The versions of the judge whose verdicts each group has, as it was recorded last."""
    found: dict[str, dict[int, int]] = {}
    for (group_id, sibling), report in load_verdicts(files.run_dir / "judgements.jsonl"):
        if isinstance(report.verdict, Verdict):
            found.setdefault(group_id, {})[sibling] = report.verdict.grm_version
    return [set(by_sibling.values()) for by_sibling in found.values()]


def test_the_judge_becomes_the_policy_of_each_listed_step(updated: Any) -> None:
    assert updated.summary["status"] == "completed", updated.summary["failure"]
    assert updated.summary["versions"] == {"policy": 6, "grm": 3}
    assert [line["grm/version"] for line in updated.steps()] == [1, 1, 3, 3, 3, 3]
    assert sorted(path.name for path in (updated.run_dir / "policy_versions").iterdir()) == ["1", "3"]


def test_no_group_is_judged_by_two_versions_of_it(updated: Any) -> None:
    versions = versions_of_groups(updated)
    assert all(len(of_group) == 1 for of_group in versions)
    assert set.union(*versions) == {0, 1, 2}, "none, one and two updates"


def test_its_weights_are_the_policys_of_that_step(updated: Any) -> None:
    """The last update is not the last policy, which has learned since."""
    first, third, last = (
        load_file(updated.run_dir / folder / "model.safetensors")
        for folder in ("policy_versions/1", "policy_versions/3", "policy")
    )
    assert first.keys() == third.keys() == last.keys()
    assert any(not first[name].equal(third[name]) for name in first)
    assert any(not third[name].equal(last[name]) for name in last)


@pytest.mark.long
def test_a_resume_judges_as_the_policy_was_and_needs_its_folder(
    small_run: Callable, updated: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(updated.run_dir, run_dir)
    (run_dir / "summary.json").unlink()
    again = small_run(*UPDATED, "train.num_steps=7", "resume=auto")
    assert again.summary["versions"] == {"policy": 7, "grm": 3}
    assert [line["grm/version"] for line in again.steps()] == [1, 1, 3, 3, 3, 3, 3]
    shutil.rmtree(run_dir / "policy_versions" / "3")
    (run_dir / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"policy_versions/3 is missing, the weights of grm after step 3"):
        small_run(*UPDATED, "train.num_steps=8", "resume=auto")


AVERAGED = (
    *ITSELF, "+grm@models.teacher=policy", "algorithm.distill.teachers={default: teacher}",
    'algorithm.distill.context="\\n{critique}"', "models.teacher.policy_updates=2",
    "models.teacher.policy_update_rate=0.25", "train.export_dtype=float32",
)  # fmt: skip


@pytest.mark.long
def test_a_teacher_follows_the_policy_as_a_moving_average_across_a_resume(small_run: Callable) -> None:
    files = small_run(*AVERAGED)
    assert files.summary["status"] == "completed", files.summary["failure"]
    assert files.summary["versions"] == {"policy": 6, "grm": 0, "teacher": 4}
    assert [line["teacher/version"] for line in files.steps()] == [0, 2, 2, 4, 4, 4]
    versions = files.run_dir / "policy_versions"
    assert sorted(path.name for path in versions.iterdir()) == ["teacher_2", "teacher_4"]
    second, fourth = (load_file(versions / f"teacher_{step}" / "model.safetensors") for step in (2, 4))
    last = load_file(files.run_dir / "policy" / "model.safetensors")
    moved = [
        (fourth[name] - second[name]).norm() / (last[name].float() - second[name]).norm()
        for name in last
        if not last[name].float().equal(second[name])
    ]
    assert moved and all(0 < share < 0.5 for share in moved)
    (files.run_dir / "checkpoints" / "latest").write_text("step_4")
    (files.run_dir / "summary.json").unlink()
    again = small_run(*AVERAGED, "resume=auto")
    assert again.summary["versions"] == {"policy": 6, "grm": 0, "teacher": 4}


def test_a_policy_that_judges_itself_is_asked_under_its_newest_version(small_run: Callable) -> None:
    files = small_run(*ITSELF, "judge.model=policy", "train.num_steps=3")
    assert files.summary["status"] == "completed" and files.summary["versions"] == {"policy": 3}
    versions = versions_of_groups(files)
    assert all(len(of_group) == 1 for of_group in versions) and len(set.union(*versions)) > 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["grm.policy_updates=[2]"], r"^grm\.policy_updates: tiny://grm is another model than .*type grm\.path='\$"),
        (["grm=policy", "grm.policy_updates=6"], r"^grm\.policy_updates: 6 is not before the last step, .* = 5"),
        (["grm=policy", "grm.policy_update_rate=0.5"], r"^grm\.policy_update_rate: 0\.5 of .* type policy_updates=5"),
        (["grm=policy", "grm.policy_updates=often"], r"^grm\.policy_updates: expected rising steps .* got often"),
        (["grm=policy", "grm.policy_updates=[4, 2]"], r"^grm\.policy_updates: expected rising steps of 1 or more"),
        (["grm=policy", "grm.policy_updates=[0]"], r"^grm\.policy_updates: expected rising steps of 1 or more"),
        (["grm=policy", "grm.policy_updates=[5]"], r"^grm\.policy_updates: 5 is not before the last step, .* = 5"),
        (
            ["grm=policy", "grm.policy_updates=[2]", "grm.train.enabled=true"],
            r"grm learns itself; type grm\.train\.enabled",
        ),
        (["grm=policy", "grm.policy_updates=[2]", "grm.engine=sglang"], r"sglang can't read .*embedded or vllm"),
        (
            ["grm=policy", "grm.policy_updates=[2]", "placement=elastic"],
            r"the pool engines is elastic, .*elastic=false",
        ),
        (
            ["grm=policy", "grm.policy_updates=[2]", "train.deterministic=true"],
            r"type grm\.policy_updates=\[\], or train",
        ),
    ],
)
def test_a_judge_that_cant_take_over_the_policys_weights_is_refused(
    small_run: Callable, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        small_run("policy.path=tiny://policy_judge", "train.num_steps=5", *overrides)
