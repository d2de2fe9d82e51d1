"""Judges that learn from others' labels while the run goes on, in whole runs with the tiny models."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grmpipe.config.run_config import ConfigError
from grmpipe.observe.recorder import load_verdicts
from grmpipe.types import Verdict

SMALL = (
    "models.cheap.train.prompts_per_batch=2", "models.cheap.train.group_size=2", "train.group_size=4",
    "train.groups_per_batch=4", "train.num_steps=3", "reward.audit_share=1",
)  # fmt: skip
JURY = (
    "+judge@judges.short=rule", "+reward@rewards.panel=jury", "rewards.panel.members=[judge, short]",
    "reward.then=panel",
)  # fmt: skip


def find_labels(files: Any, labeller: str) -> dict[str, float]:
    """Rollout -> the reward by who labels, where there is one."""
    verdicts = dict(load_verdicts(files.run_dir / "judgements.jsonl"))
    known = {f"{group_id}/{sibling}": report.verdict for (group_id, sibling), report in verdicts.items()}
    return {
        key: verdict.breakdown[labeller]
        for key, verdict in known.items()
        if isinstance(verdict, Verdict) and labeller in verdict.breakdown
    }


def check_labels(files: Any, labels: dict[str, float]) -> None:
    """Every judging task is on a rollout that has a label, and has that label."""
    tasks = [line["prompt"] for line in files.lines("cotrain/cheap/rollouts")]
    assert tasks
    for task in tasks:
        assert float(task["reference"].removeprefix("graded ")) == pytest.approx(1 + 9 * labels[task["prompt_id"]])


@pytest.fixture(scope="module")
def learning(run_once: Callable) -> Any:
    return run_once(*SMALL, "train.checkpoint_every=2", experiment="cascade_learning")


def test_a_cheap_judge_learns_from_the_verdicts_that_the_good_one_gives_anyway(learning: Any) -> None:
    summary = learning.summary
    assert summary["status"] == "completed", summary["failure"]
    assert summary["versions"]["cheap"] >= 1 and summary["versions"]["grm"] == 0
    check_labels(learning, find_labels(learning, "judge"))
    cascade = summary["judging"]["cascades"]["reward"]
    asked = summary["judging"]["by_judge"]["judge"]["asked"]
    assert asked <= cascade["rollouts"] + summary["judging"]["aborted_tasks"], "it is asked nothing else"
    errors = [step for step in learning.steps() if "cascade/reward/latest_error" in step]
    assert errors and all(step["cascade/reward/latest_steps"] >= 1 for step in errors)


def test_each_group_has_one_version_of_the_judge_that_learns(learning: Any) -> None:
    by_group: dict[str, set[int]] = {}
    for (group_id, _), report in dict(load_verdicts(learning.run_dir / "judgements.jsonl")).items():
        if isinstance(report.verdict, Verdict):
            by_group.setdefault(group_id, set()).add(report.verdict.grm_version)
    trained = [line["group_id"] for line in learning.lines("groups") if line["outcome"] == "trained"]
    assert all(len(by_group[group_id]) == 1 for group_id in trained)


@pytest.mark.long
def test_a_resume_continues_with_the_labels_of_before(small_run: Callable, learning: Any, tmp_path: Path) -> None:
    shutil.copytree(learning.run_dir, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step_2")
    (tmp_path / "run" / "summary.json").unlink()
    again = small_run(*SMALL, "train.checkpoint_every=2", "resume=auto", experiment="cascade_learning")
    assert again.summary["status"] == "completed", again.summary["failure"]
    assert [step["step"] for step in again.steps()] == [1, 2, 3]
    check_labels(again, find_labels(again, "judge") | find_labels(learning, "judge"))


@pytest.mark.long
@pytest.mark.parametrize("labeller", ["panel", "short"])
def test_a_jury_or_a_rule_labels_too(small_run: Callable, labeller: str) -> None:
    files = small_run(*SMALL, *JURY, f"models.cheap.train.labels_from={labeller}", experiment="cascade_learning")
    assert files.summary["status"] == "completed", files.summary["failure"]
    check_labels(files, find_labels(files, labeller))


@pytest.mark.long
def test_a_judge_learns_from_a_file_of_labels(small_run: Callable, tmp_path: Path) -> None:
    rows = [{"item_id": f"mine {n}", "prompt": f"{n}?", "response": "4", "score": 1 + n % 10} for n in range(20)]
    file = tmp_path / "labels.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = small_run(*SMALL, f"models.cheap.train.labels_from={file}", experiment="cascade_learning")
    assert files.summary["status"] == "completed", files.summary["failure"]
    tasks = {line["prompt"]["prompt_id"]: line["prompt"] for line in files.lines("cotrain/cheap/rollouts")}
    assert tasks and tasks.keys() <= {row["item_id"] for row in rows}


FORM = """from grmpipe.judge.parse import Form

first = Form(
    line=lambda number, scale, num_scores: f"Score: {number}",
    scores_of=lambda found, scale: (float(found[0]), 5.5),
)
"""


@pytest.mark.long
def test_a_judge_of_pairs_learns_from_pairs_that_another_judge_ranks(
    small_run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first_form.py").write_text(FORM)
    (tmp_path / "first.jinja").write_text(
        "Q: {{ question }}\nA:\n{% for response in responses %}{{ response }}{% endfor %}"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    pairs = (
        "judges.cheap.protocol=pairwise", f"judges.cheap.template={tmp_path / 'first.jinja'}",
        "judges.cheap.parser=first_form.first", "judges.cheap.vote=mean",
    )  # fmt: skip
    files = small_run(*SMALL, *pairs, experiment="cascade_learning")
    assert files.summary["status"] == "completed", files.summary["failure"]
    labels = find_labels(files, "judge")
    tasks = [line["prompt"] for line in files.lines("cotrain/cheap/rollouts")]
    assert tasks
    for task in tasks:
        group_id = re.split("[/#]", task["prompt_id"])[0]
        known = [f"{reward:g}" for key, reward in labels.items() if key.startswith(f"{group_id}/")]
        one, other = task["reference"].removeprefix("graded ").split()
        assert one != other and {one, other} <= set(known) and max(known, key=float) in (one, other)


BY_CRITERIA = ("protocol=rubric", "template=tiny_criteria", "parser=score_line", "rubric.criteria_per_call=1")
# "Score: 7" for every step. Patterns have a group for each score.
ALIKE = """from grmpipe.judge.parse import Form

alike = Form(line=lambda number, scale, num_scores: f"(?=Score: {number})" * (num_scores - 1) + f"Score: {number}")
"""


def judge_both(*settings: str) -> list[str]:
    return [f"{judge}.{one}" for judge in ("judge", "judges.cheap") for one in settings]


@pytest.mark.long
def test_a_judge_by_a_rubric_learns_criterion_by_criterion(small_run: Callable) -> None:
    models = ("policy=tiny_phrases", "data=tiny_rubric", "grm=tiny_criteria", "models.cheap.path=tiny://grm_criteria")
    by_criteria = (*models, "judges.cheap.vote=mean", *judge_both(*BY_CRITERIA))
    files = small_run(*SMALL, *by_criteria, experiment="cascade_learning")
    assert files.summary["status"] == "completed", files.summary["failure"]
    assert files.summary["versions"]["cheap"] >= 1
    by_part = read_parts(files)
    tasks = [line["prompt"] for line in files.lines("cotrain/cheap/rollouts")]
    assert tasks
    for task in tasks:
        ((criterion,), label) = task["rubric"], float(task["reference"].removeprefix("graded "))
        share = by_part[task["prompt_id"].partition("/c")[0]][criterion["name"]]
        assert label == pytest.approx(1 + 9 * share, abs=0.01)
        assert task["messages"][-1]["content"].endswith(criterion["text"])


@pytest.mark.long
def test_a_judge_of_steps_learns_step_by_step(
    small_run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alike_form.py").write_text(ALIKE)
    (tmp_path / "by_steps.jinja").write_text("Q: {{ question }}\nA:\n{% for step in steps %}{{ step }}{% endfor %}")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = (
        "protocol=steps", f"template={tmp_path / 'by_steps.jinja'}", "parser=alike_form.alike", "split.step_end=';'",
        "vote=mean",
    )  # fmt: skip
    files = small_run(*SMALL, *judge_both(*settings), experiment="cascade_learning")
    assert files.summary["status"] == "completed", files.summary["failure"]
    by_part = read_parts(files)
    tasks = [line["prompt"] for line in files.lines("cotrain/cheap/rollouts")]
    assert any(";" in task["reference"] for task in tasks), "some have several steps"
    for task in tasks:
        shares = [(float(label.removeprefix("graded ")) - 1) / 9 for label in task["reference"].split("; ")]
        assert shares == pytest.approx([*by_part[task["prompt_id"]].values()], abs=0.01)


def read_parts(files: Any) -> dict[str, dict[str, float]]:
    """Rollout -> what the good judge says of its criteria or steps, where it was asked."""
    found = dict(load_verdicts(files.run_dir / "judgements.jsonl"))
    known = {f"{group}/{sibling}": report.rewards_by_part for (group, sibling), report in found.items()}
    return {key: dict(parts["judge"]) for key, parts in known.items() if "judge" in parts}


@pytest.mark.long
def test_the_map_of_a_calibrated_judge_that_learns_changes_with_its_version(small_run: Callable) -> None:
    like_cheap = ("grm.path=tiny://grm_hasty", "judge.num_judgements=4", "judge.max_new_tokens=72")
    small_run("task=calibrate", *like_cheap, "evaluate.num_items=128", experiment="evaluate_grm", run_dir="map")
    path = "judges.cheap.calibration=map/calibration.json"
    with pytest.raises(ConfigError, match="Only that of a cascade's first judge is refitted"):
        small_run(*SMALL, path, "reward.unsure_above_std=0.2", experiment="cascade_learning")
    files = small_run(*SMALL, path, "train.num_steps=5", experiment="cascade_learning")
    assert files.summary["status"] == "completed", files.summary["failure"]
    maps: dict[int, dict[float, set[float]]] = {}
    for report in dict(load_verdicts(files.run_dir / "judgements.jsonl")).values():
        verdict = report.by_judge["cheap"].verdict
        if isinstance(verdict, Verdict) and isinstance(report.verdict, Verdict):
            said, reward = verdict.breakdown["uncalibrated"], verdict.breakdown["calibrated"]
            maps.setdefault(report.verdict.grm_version, {}).setdefault(said, set()).add(reward)
            assert report.verdict.breakdown["cheap"] == reward
    assert all(len(rewards) == 1 for one in maps.values() for rewards in one.values()), "a version has one map"
    of_zero = {min(one[0.0]) for one in maps.values() if 0.0 in one}
    assert len(of_zero) > 1, "it is refitted"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["labels_from=good"], "'good' is no judge or composition .* one of cheap, judge, reward"),
        (["labels_from=cheap"], r"labels_from: cheap asks cheap itself, .*labels_from=judge"),
        (["labels_from=reward"], "reward asks cheap itself"),
        (["warmup_steps=20"], r"cheap\.train\.warmup_steps: .*warmup_steps=0"),
        (["rollout_share=0", "data_path=tiny://judgements"], r"rollout_share: 0 uses no label"),
    ],
)
def test_labels_that_would_teach_nothing_are_refused_by_key(
    small_run: Callable, overrides: list[str], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        small_run(*(f"models.cheap.train.{one}" for one in overrides), experiment="cascade_learning")


def test_two_judges_that_label_each_other_are_refused(small_run: Callable) -> None:
    train = "{enabled: true, labels_from: cheap, warmup_steps: 0, rollout_share: 1}"
    with pytest.raises(ConfigError, match=r"grm\.train\.labels_from: cheap learns from grm in turn.* models\.cheap\."):
        small_run(f"grm.train={train}", experiment="cascade_learning")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["labels_from=judge"],
            r"judge says nothing of single criteria, .*labels_from=<a \.jsonl file of labels of crit",
        ),
        (["labels_from=null", "data_path=a.jsonl"], r"rollout_share: the rule labels whole rollouts.*rollout_share=0"),
    ],
)
def test_a_judge_by_a_rubric_is_refused_labels_of_whole_responses(
    small_run: Callable, overrides: list[str], told: str
) -> None:
    rubric = [f"judges.cheap.{one}" for one in BY_CRITERIA]
    train = [f"models.cheap.train.{one}" for one in overrides]
    with pytest.raises(ConfigError, match=told):
        small_run("data=tiny_rubric", "judges.cheap.vote=mean", *rubric, *train, experiment="cascade_learning")
