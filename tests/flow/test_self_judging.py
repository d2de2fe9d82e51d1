"""Whole runs of a policy that judges itself and learns to, in the same batches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grmpipe.config.run_config import ConfigError
from grmpipe.config.task_settings import RejudgeConfig
from grmpipe.observe.recorder import load_rollouts
from grmpipe.run.tasks.rejudge import open_stored

# Of twelve groups three are judging tasks.
SMALL = (
    "rollout.max_new_tokens=48", "data.num_eval_prompts=8", "train.checkpoint_every=1",
    "algorithm.self_judging.share=0.25",
)  # fmt: skip
WATCHED = "judge_monitor.watch={watcher: 1}"


@pytest.fixture(scope="module")
def judging(run_once: Callable) -> Any:
    return run_once(*SMALL, WATCHED, experiment="self_judging")


def tasks(files: Any) -> dict[str, list[Any]]:
    """group_id -> the recorded judgements of a judging task."""
    found: dict[str, list[Any]] = {}
    for line in load_rollouts(files.run_dir / "rollouts.jsonl"):
        if line.prompt.self_judging:
            found.setdefault(line.rollout.group_id, []).append(line)
    return found


def test_judging_tasks_are_groups_of_their_own_in_the_same_journals(judging: Any) -> None:
    assert judging.summary["status"] == "completed", judging.summary["failure"]
    assert judging.summary["groups"] == {"submitted": 12, "trained": 12, "dropped": {}, "in_flight": 0}
    found = tasks(judging)
    assert sorted(lines[0].prompt_index for lines in found.values()) == [3, 7, 11]
    assert all(len(lines) == 4 for lines in found.values())
    own = {line.prompt.messages for line in load_rollouts(judging.run_dir / "rollouts.jsonl")}
    for lines in found.values():
        question = lines[0].prompt.messages[0].content
        assert not any(len(one) == 1 and one[0].content in question for one in own if one != lines[0].prompt.messages)


def test_a_judgement_earns_by_its_label_and_not_by_the_judge(judging: Any) -> None:
    found = tasks(judging)
    lines = [line for line in judging.lines("judgements") if line["group_id"] in found]
    # A group that is in progress when the policy changes is judged again.
    assert len({(line["group_id"], line["sibling"]) for line in lines}) == 12
    for line in lines:
        assert not line["judgements"] and line["verdict"]["breakdown"].keys() == {"label"}
        assert line["verdict"]["breakdown"]["label"] in (-1.0, 1.0)
    trained = [line for line in judging.lines("trained") if line["group_id"] in found]
    assert {line["reward"] for line in trained} <= {-1.0, 1.0}
    assert not any("right" in line for line in trained), "the rule of answers reads no label"


def test_the_reward_of_answers_and_that_of_judging_are_apart(judging: Any) -> None:
    found, by_step = tasks(judging), {line["step"]: line for line in judging.steps()}
    trained = judging.lines("trained")
    for step, metrics in by_step.items():
        of_step = [line for line in trained if line["step"] == step]
        answers = [line["reward"] for line in of_step if line["group_id"] not in found]
        judged = [line["reward"] for line in of_step if line["group_id"] in found]
        assert metrics["train/reward"] == pytest.approx(sum(answers) / len(answers))
        assert metrics.get("self_judging/share", 0) == len(judged) / len(of_step)
        if judged:
            assert metrics["self_judging/reward"] == pytest.approx(sum(judged) / len(judged))
    assert sum("self_judging/reward" in metrics for metrics in by_step.values()) >= 2
    assert 0 <= judging.steps()[-1]["eval/grm_accuracy"] <= 1


def test_who_watches_or_judges_again_sees_answers_alone(judging: Any) -> None:
    found = tasks(judging)
    assert not {line["group_id"] for line in judging.lines("watched")} & found.keys()
    stored = open_stored(judging.run_dir, RejudgeConfig(), seed=0)
    assert len(stored.steps) == 9 and not stored.steps.keys() & found.keys()
    assert stored.num_without_text == 0


def test_the_report_shows_judging_as_such(judging: Any) -> None:
    page = (judging.run_dir / "report.html").read_text()
    assert "Reward of judging" in page and "a judging task of the policy" in page


def test_a_resume_finds_the_same_judging_tasks(small_run: Callable, judging: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(judging.run_dir, run_dir)
    (run_dir / "checkpoints" / "latest").write_text("step_2")
    (run_dir / "summary.json").unlink()
    again = small_run(*SMALL, WATCHED, "resume=auto", experiment="self_judging")
    assert again.summary["groups"] == {"submitted": 12, "trained": 12, "dropped": {}, "in_flight": 0}
    before = {line[0].prompt_index: line[0].prompt for line in tasks(judging).values()}
    assert {line[0].prompt_index: line[0].prompt for line in tasks(again).values()} == before


@pytest.mark.long
def test_a_replay_trains_judging_too_and_tells_both_rewards(small_run: Callable, judging: Any) -> None:
    source = f"data.retrain_from={judging.run_dir}/rollouts.jsonl"
    again = small_run(*SMALL, source, experiment="self_judging", run_dir="again")
    names = ("train/reward", "self_judging/reward", "self_judging/share")
    assert [[line.get(name) for name in names] for line in again.steps()] == [
        [line.get(name) for name in names] for line in judging.steps()
    ]
    weights = "policy/model.safetensors"
    assert (again.run_dir / weights).read_bytes() == (judging.run_dir / weights).read_bytes()


@pytest.mark.long
def test_own_rollouts_become_judging_tasks_by_the_rule_also_after_a_resume(small_run: Callable) -> None:
    by_rule = ("algorithm.self_judging.data_path=null", "algorithm.self_judging.share=0.5")
    own = (*SMALL, *by_rule)
    files = small_run(*own, experiment="self_judging")
    assert files.summary["status"] == "completed", files.summary["failure"]
    found = tasks(files)
    assert found
    lines = [line for line in load_rollouts(files.run_dir / "rollouts.jsonl") if not line.prompt.self_judging]
    answers = {f"{line.rollout.group_id}/{line.rollout.sibling}" for line in lines}
    assert {lines[0].prompt.prompt_id for lines in found.values()} <= answers
    assert {lines[0].prompt.reference for lines in found.values()} <= {"at least 8", "below 8"}
    (files.run_dir / "checkpoints" / "latest").write_text("step_2")
    (files.run_dir / "summary.json").unlink()
    again = small_run(*own, "resume=auto", experiment="self_judging")
    assert again.summary["status"] == "completed", again.summary["failure"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.self_judging.share=1"], r"^algorithm\.self_judging\.share: must be above 0 and below 1"),
        (["algorithm.self_judging.share=null"], r"self_judging\.share: is null, so that nothing of .*data_path"),
        (["judge.model=grm", "grm=policy"], r"^algorithm\.self_judging\.share: .* type judge\.model=policy, or"),
        (["judge.temperature=0.5"], r"^judge\.temperature: a learner scores .* 0\.5, rollouts at 1; type"),
        (["judge=rubric", "judge.model=policy"], r"^algorithm\.self_judging\.data_path: .* this judge scores criteria"),
        (["algorithm.self_judging.data_path=answers.jsonl"], r"data_path: answers\.jsonl, .* no known kind of labels"),
        (["algorithm.self_judging.data_path=tiny://judgements"],
         r"data_path: every prompt of tiny://judgements is also in data\.path or data\.eval_path; give other prompts"),
        (["algorithm=reinforce_pp"], r"^algorithm\.estimator: reinforce_pp.* two scales; type algorithm\.estimator"),
        (["task=simulate"], r"^algorithm\.self_judging\.share: task=simulate .* type task=plan"),
    ],
)  # fmt: skip
def test_settings_with_which_a_policy_cant_learn_to_judge_are_refused(
    small_run: Callable, tmp_path: Path, overrides: list[str], message: str
) -> None:
    (tmp_path / "answers.jsonl").write_text(json.dumps({"prompt": "What is 6 x 7?", "response": "42"}) + "\n")
    with pytest.raises(ConfigError, match=message):
        small_run(*overrides, experiment="self_judging")
