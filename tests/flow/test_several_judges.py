"""Whole runs with several judges and models that judge, in one process with the tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grmpipe.config.keys.entry_names import LEARNER, check_names
from grmpipe.judge.composition.combine_verdicts import MeasuredSkill
from grmpipe.observe.journal import read_journal, replace_journal
from grmpipe.observe.recorder import load_verdicts
from grmpipe.run_dir.run_state import RunState
from grmpipe.types import Verdict

# A jury of two models, of which the second learns, mixed with a rule.
JUDGES = (
    "+grm@models.weak=tiny_weak", "+judge@judges.second=generative", "judges.second.model=weak",
    "+judge@judges.short=rule", "+reward@rewards.panel=jury", "rewards.panel.members=[judge,second]",
    "rewards.panel.quorum=1", "reward=mix", "reward.mix={panel: 0.75, short: 0.25}",
    "models.weak.train={enabled: true, warmup_steps: 1, prompts_per_batch: 4, group_size: 4, num_items: 32, "
    "data_path: 'tiny://judgements'}",
)  # fmt: skip


@pytest.fixture(scope="module")
def judged_by_several(run_once: Callable) -> Any:
    return run_once(*JUDGES, "train.checkpoint_every=2")


def test_every_rollout_is_judged_by_every_judge_and_each_is_counted_by_its_name(judged_by_several: Any) -> None:
    files, summary = judged_by_several, judged_by_several.summary
    assert summary["status"] == "completed", summary["failure"]
    judging = summary["judging"]
    assert list(judging["by_judge"]) == ["judge", "second", "short"]
    assert judging["asked"] == sum(one["asked"] for one in judging["by_judge"].values())
    assert judging["tokens"] == sum(one["tokens"] for one in judging["by_judge"].values())
    assert {"grm", "weak"} <= summary["busy_s"].keys()
    shown = {name for step in files.steps() for name in step}  # a step in which no verdict came has no scores
    assert {f"judge/{name}/score_mean" for name in judging["by_judge"]} <= shown
    assert {f"reward/{name}_mean" for name in ("panel", "judge", "second", "short")} <= shown


def test_no_model_that_judges_can_be_called_like_an_area_of_the_metrics(judged_by_several: Any) -> None:
    """Its own metrics are `<name>/...`."""
    areas = {name.split("/")[0] for line in judged_by_several.lines("metrics") for name in line if "/" in name}
    own = {role for role in areas if role in ("grm", "weak") or role.endswith(LEARNER)}
    assert {"train", "driver", "weak"} <= areas
    for area in areas - own:
        with pytest.raises(ValueError, match="the name is taken"):
            check_names("models", [area])


def test_the_reward_is_what_the_composition_says(judged_by_several: Any) -> None:
    verdicts = [report.verdict for _, report in load_verdicts(judged_by_several.run_dir / "judgements.jsonl")]
    given = [verdict for verdict in verdicts if isinstance(verdict, Verdict)]
    assert given
    for verdict in given:
        parts = verdict.breakdown
        assert parts["panel"] == pytest.approx((parts["judge"] + parts["second"]) / 2)
        assert verdict.outcome == pytest.approx(0.75 * parts["panel"] + 0.25 * parts["short"])


def test_only_the_model_that_learns_has_a_version_a_checkpoint_and_an_export(judged_by_several: Any) -> None:
    files = judged_by_several
    versions = files.summary["versions"]
    assert (versions["policy"], versions["grm"]) == (3, 0)
    assert versions["weak"] >= 1 + 2
    newest = files.run_dir / "checkpoints" / "step_3"
    assert (newest / "weak_learner").is_dir() and not (newest / "grm_learner").exists()
    assert (files.run_dir / "weak" / "config.json").exists() and not (files.run_dir / "grm").exists()
    state = RunState.from_json((newest / "run_state.json").read_text())
    assert list(state.grm_pipeline_states) == ["weak"]


def test_a_checkpoint_has_the_accuracy_that_an_evaluation_measured_of_each_judge(judged_by_several: Any) -> None:
    newest = judged_by_several.run_dir / "checkpoints" / "step_3" / "run_state.json"
    measured = RunState.from_json(newest.read_text()).features["evaluation"]["judge_accuracy"]
    assert list(measured) == ["judge", "second", "short"]
    assert all(0 <= accuracy <= 1 for accuracy in measured.values())


def test_no_group_is_judged_by_two_versions_of_a_model_that_learns(judged_by_several: Any) -> None:
    by_group: dict[str, set[int]] = {}
    trained = {line["group_id"] for line in judged_by_several.lines("groups") if line["outcome"] == "trained"}
    last = dict(load_verdicts(judged_by_several.run_dir / "judgements.jsonl"))  # without verdicts that were voided
    for (group_id, _), report in last.items():
        for judgement in report.judgements:
            if judgement.grm == "weak" and group_id in trained:
                by_group.setdefault(group_id, set()).add(judgement.version)
    assert by_group and all(len(versions) == 1 for versions in by_group.values())


SILENT = """
from grmpipe.types import Failed, JudgeReport


class Silent:
    async def judge(self, prompt, rollout, priority=0):
        failed = Failed(stage="judge", cause="died", attempts=1, detail="no answer")
        return JudgeReport(verdict=failed, failures=(failed,))
"""


def test_a_member_that_a_jury_does_without_raises_an_alarm_by_its_name(
    small_run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "silent_judges.py").write_text(SILENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("grmpipe.run.features.judge_alarms.VERDICTS_WINDOW", 16)
    files = small_run(
        "judge=rule", "+judge@judges.far=rule", "judges.far.kind=custom",
        "judges.far.custom.target=silent_judges.Silent",
        "reward=jury", "reward.members=[judge,far]", "reward.quorum=1",
        "train.num_steps=1", "data.num_eval_prompts=1",
    )  # fmt: skip
    assert files.summary["status"] == "completed"
    (alarm,) = files.summary["alarms"]
    assert alarm.startswith("The judge far fails: 16 of its last 16 verdicts (100%; judges.far.max_failure_rate=0.2)")
    assert files.steps()[-1]["alarm/failing_judge"] == 1


@pytest.mark.long
def test_resume_restores_every_model_and_the_measured_skill(
    small_run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = small_run(*JUDGES, "train.checkpoint_every=2", "train.num_steps=2")
    first = files.summary
    (files.run_dir / "summary.json").unlink()
    taken: list[dict[str, float]] = []
    monkeypatch.setattr(MeasuredSkill, "take_accuracies", lambda skill, accuracy: taken.append(dict(accuracy)))
    again = small_run(*JUDGES, "train.checkpoint_every=2", "train.num_steps=4", "resume=auto")
    assert again.summary["steps"] == 4
    assert again.summary["versions"]["weak"] > first["versions"]["weak"]
    asked = [one["judging"]["by_judge"]["second"]["asked"] for one in (first, again.summary)]
    assert asked[1] > asked[0]
    saved = (files.run_dir / "checkpoints" / "step_2" / "run_state.json").read_text()
    assert taken[0] == RunState.from_json(saved).features["evaluation"]["judge_accuracy"]


@pytest.mark.long
def test_after_a_kill_within_a_group_that_was_escalated_all_siblings_have_verdicts_by_the_same_judges(
    small_run: Callable,
) -> None:
    run = ("train.num_steps=2", "train.checkpoint_every=1", "train.groups_per_batch=4", "train.group_size=4")
    files = small_run(*run, experiment="cascade")
    (files.run_dir / "summary.json").unlink()
    checkpoints = files.run_dir / "checkpoints"
    (checkpoints / "latest").write_text("step_1")
    saved = RunState.from_json((checkpoints / "step_1" / "run_state.json").read_text())
    in_flight = set(saved.pipeline_state.in_flight.values())
    path = files.run_dir / "judgements.jsonl"
    lines = [line for line in read_journal(path) if line["group_id"] not in in_flight or line["sibling"] == 0]
    for line in lines:
        if line["group_id"] in in_flight:  # a verdict by both judges, whatever the cascade decides after the resume
            line["by_judge"].setdefault("judge", line["by_judge"]["cheap"])
    replace_journal(path, lines)
    small_run(*run, "resume=auto", experiment="cascade")
    by_group: dict[str, set[tuple[str, ...]]] = {}
    for (group_id, _), report in dict(load_verdicts(path)).items():
        by_group.setdefault(group_id, set()).add(tuple(report.by_judge))
    assert in_flight <= by_group.keys()
    assert all(len(judges) == 1 for judges in by_group.values()), by_group
