"""A GRM in training, in whole runs with the real engine, learners and tiny models: trained alone, and next to the
policy.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grmpipe.config.run_config import ConfigError
from grmpipe.data.trained_prompts import read_trained_prompts
from grmpipe.observe.journal import read_journal, replace_journal
from grmpipe.observe.recorder import load_verdicts
from grmpipe.run.errors import RunFailed
from grmpipe.run_dir.run_state import RunState
from grmpipe.types import Verdict

TRAIN_GRM = ("train.num_steps=2", "rollout.max_new_tokens=96")
RFT = (
    "data.num_prompts=48", "data.num_eval_prompts=16", "data.rft.critiques_per_batch=8", "train.schedule=linear",
    "train.warmup_steps=0", "train.lr=1e-4",
)  # fmt: skip
COTRAIN = (
    "train.num_steps=3", "grm.train.warmup_steps=1", "grm.train.prompts_per_batch=4",
    "grm.train.group_size=4", "grm.train.num_items=32", "data.num_eval_prompts=8", "judge_monitor.anchors=4",
)  # fmt: skip


@pytest.mark.long
def test_a_trained_grm_serves_as_a_judge(small_run: Callable) -> None:
    files = small_run(*TRAIN_GRM, experiment="train_grm")
    summary = files.summary
    assert summary["versions"] == {"policy": 2}
    assert 0 < summary["eval"]["initial"]["true_accuracy"] < 1
    judging_tasks = files.lines("rollouts")
    assert {line["prompt"]["reference"] for line in judging_tasks} == {"at least 8", "below 8"}
    assert all(set(line["verdict"]["breakdown"].values()) <= {1.0, -1.0} for line in files.lines("judgements"))
    assert summary["judging"]["failed"] == {}
    assert read_trained_prompts(str(files.run_dir / "policy")), "an evaluation leaves them out"
    used = small_run("train.num_steps=1", f"grm.path={files.run_dir / 'policy'}", run_dir="used")
    assert used.summary["status"] == "completed"


@pytest.fixture(scope="module")
def fine_tuned(run_once: Callable) -> Any:
    return run_once(*RFT, experiment="rft_grm", run_dir="rft")


def test_fine_tuning_keeps_right_critiques_of_judging_tasks_that_are_not_too_easy(fine_tuned: Any) -> None:
    files = fine_tuned
    assert files.summary["status"] == "completed"
    assert files.summary["steps"] > 0
    assert len(read_trained_prompts(str(files.run_dir / "policy"))) == 24
    assert set(files.summary["eval"]["final"]) >= {"true_accuracy", "true_accuracy_greedy"}
    judging_tasks = {line["prompt_id"]: line for line in files.lines("critiques")}
    assert len(judging_tasks) == 24  # every second item is a ranking
    fates = {line["fate"] for line in judging_tasks.values()}
    assert {"kept", "too_easy"} <= fates
    assert all(0 < len(line["kept"]) < 3 for line in judging_tasks.values() if line["fate"] == "kept")
    assert all(len(line["kept"]) == 1 for line in judging_tasks.values() if line["fate"] == "hinted")
    assert all(line["kept"] == [] for line in judging_tasks.values() if line["fate"] in ("too_easy", "none_right"))
    losses = [line["train/loss"] for line in files.lines("metrics") if "train/loss" in line]
    assert len(losses) == files.summary["steps"]
    assert all(loss > 0 for loss in losses)  # a negative log-likelihood
    rates = [line["train/lr"] for line in files.lines("metrics") if "train/lr" in line]
    assert rates[-1] == pytest.approx(1e-4 / len(rates))  # the decay is over the actual number of steps


def test_after_a_kill_only_what_is_missing_is_sampled_again(
    small_run: Callable, fine_tuned: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "rft"
    shutil.copytree(fine_tuned.run_dir, run_dir)
    before = list(read_journal(run_dir / "critiques.jsonl"))
    marked = [{**line, "fate": "too_long", "kept": []} for line in before[:6]]  # sampling again would not give these
    replace_journal(run_dir / "critiques.jsonl", marked)
    (run_dir / "summary.json").unlink()
    again = small_run(*RFT, "resume=auto", experiment="rft_grm", run_dir="rft")
    assert again.summary["status"] == "completed"
    lines = list(read_journal(again.run_dir / "critiques.jsonl"))
    assert lines[:6] == marked
    assert {line["prompt_id"] for line in lines} == {line["prompt_id"] for line in before}
    assert [line["step"] for line in again.lines("metrics")] == list(range(again.summary["steps"] + 1))


@pytest.fixture(scope="module")
def cotrained(run_once: Callable) -> Any:
    return run_once(*COTRAIN, "train.checkpoint_every=2", experiment="cotrain")


def test_cotrained_grm_judges_each_group_by_one_version(cotrained: Any) -> None:
    files, summary = cotrained, cotrained.summary
    assert summary["status"] == "completed"
    assert summary["versions"]["policy"] == 3
    assert 1 + 2 <= summary["versions"]["grm"] <= 1 + 3
    by_group: dict[str, set[int]] = {}
    for (group_id, _), report in dict(load_verdicts(files.run_dir / "judgements.jsonl")).items():
        if isinstance(report.verdict, Verdict):
            by_group.setdefault(group_id, set()).add(report.verdict.grm_version)
            assert {judgement.version for judgement in report.judgements} == {report.verdict.grm_version}
    trained = {line["group_id"] for line in files.lines("groups") if line["outcome"] == "trained"}
    assert all(len(by_group[group_id]) == 1 for group_id in trained)
    assert min(min(versions) for versions in by_group.values()) >= 1  # nothing is judged before the end of the warm-up
    assert [step["grm/version"] for step in files.steps()] == sorted(step["grm/version"] for step in files.steps())
    judging_tasks = [
        json.loads(line)["prompt"] for line in (files.run_dir / "cotrain" / "grm" / "rollouts.jsonl").open()
    ]
    assert any(judging_task["prompt_id"].startswith("g0") for judging_task in judging_tasks)  # own rollouts
    assert any(judging_task["prompt_id"].startswith("judgements") for judging_task in judging_tasks)
    assert (files.run_dir / "grm" / "config.json").exists()


def test_resumed_run_continues_both_learners(small_run: Callable, cotrained: Any, tmp_path: Path) -> None:
    shutil.copytree(cotrained.run_dir, tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "latest").write_text("step_2")  # as after a kill at the end of the second step
    (tmp_path / "run" / "summary.json").unlink()
    state = RunState.from_json((checkpoints / "step_2" / "run_state.json").read_text())
    before = state.grm_pipeline_states["grm"].version
    again = small_run(*COTRAIN, "train.checkpoint_every=2", "resume=auto", experiment="cotrain")
    assert again.summary["status"] == "completed"
    assert again.summary["versions"]["policy"] == 3
    assert again.summary["versions"]["grm"] >= before
    steps = again.steps()
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert steps[-1]["grm/version"] >= before
    trained = again.lines("cotrain/grm/trained")
    groups = Counter(step for step, _ in {(line["step"], line["group_id"]) for line in trained})
    assert groups == dict.fromkeys(range(1, again.summary["versions"]["grm"] + 1), max(groups.values())), "each once"
    assert {line["reward"] for line in trained if "reward" in line} <= {-1.0, 1.0}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("judge=rule", "no local GRM"),
        ("judge.temperature=0", r"judge\.temperature=1"),
        ("algorithm.estimator=reinforce_pp", r"algorithm\.estimator=grpo"),
        ("placement=elastic", r"grm_learner|elastic=false"),
        ("grm.train.data_path=tiny://nothing", r"grm\.train\.data_path"),
        ("data.labels.pass_score=11", r"data\.labels\.pass_score"),
        ("judge=pairwise", r"grm\.train\.labels_from=.*rollout_share=0"),
        ("task=simulate", r"grm\.train\.enabled=false"),
    ],
)
def test_settings_that_a_grm_cant_learn_with_are_refused_by_name(small_run: Callable, override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        small_run(*COTRAIN, override, experiment="cotrain")


@pytest.mark.long
def test_rollouts_of_one_kind_end_a_run_and_those_of_both_that_a_resume_finds_are_learnt_from(
    small_run: Callable, tmp_path: Path
) -> None:
    only_rollouts = (
        "grm.train.data_path=null", "grm.train.warmup_steps=1", "grm.train.prompts_per_batch=2",
        "grm.train.group_size=4", "train.num_steps=1", "train.groups_per_batch=2",
        "rollout.max_new_tokens=2", "data.num_eval_prompts=1", "grm.train.dynamic_sampling_batches=0",
    )  # fmt: skip
    with pytest.raises(RunFailed, match=r"grm\.train\.data_path: .* 0 of the first responses are right and 8 wrong"):
        small_run(*only_rollouts, experiment="cotrain")  # two tokens hold no answer
    path = tmp_path / "run" / "rollouts.jsonl"
    lines = list(read_journal(path))
    for line in lines[::2]:
        line["turns"][-1]["text"] = line["prompt"]["reference"]
    replace_journal(path, lines)
    again = small_run(*only_rollouts, "resume=auto", experiment="cotrain")
    assert again.summary["status"] == "completed"


@pytest.mark.long
def test_a_judge_behind_a_route_learns_from_the_tasks_that_it_judges(small_run: Callable) -> None:
    files = small_run(
        "models.comparison.train={enabled: true, rollout_share: 1, warmup_steps: 1, prompts_per_batch: 4, "
        "group_size: 2}", "data.labels.rule=same_side", "train.num_steps=1",
        "train.groups_per_batch=8", "train.group_size=8",
        experiment="route",
    )  # fmt: skip
    source = {line["group_id"]: line["prompt"]["source"] for line in files.lines("rollouts")}
    judging_tasks = files.lines("cotrain/comparison/rollouts")
    assert {source[line["prompt"]["prompt_id"].split("/")[0]] for line in judging_tasks} == {"comparison"}


def test_without_labels_and_references_there_is_nothing_to_learn_from(small_run: Callable, tmp_path: Path) -> None:
    (tmp_path / "bare.jsonl").write_text("".join(json.dumps({"prompt": f"What is {n}?"}) + "\n" for n in range(8)))
    with pytest.raises(ConfigError, match=r"grm\.train\.data_path: is null"):
        small_run(*COTRAIN, "grm.train.data_path=null", "data=file", "data.path=bare.jsonl", experiment="cotrain")
