"""The place of a run's files: never in another run's directory, and never continued with another configuration."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from configs import run_config, with_sections

from grmpipe.config.data import DataConfig
from grmpipe.config.io.yaml_io import build_config, read_yaml, to_yaml
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.run_sections import RunSections
from grmpipe.config.train import TrainConfig
from grmpipe.observe.changes import read_changes
from grmpipe.pipeline.interfaces import PipelineState
from grmpipe.run_dir.checkpoints import Checkpoints
from grmpipe.run_dir.directory import RunLocation, RunLock, locate_run, point_latest
from grmpipe.run_dir.identity import check_is_there, read_identity, read_run_id
from grmpipe.run_dir.run_state import RunState
from grmpipe.tasks import anywhere, run_task

CONFIG = run_config(experiment_name="x")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def auto(config: RunConfig = CONFIG) -> RunConfig:
    return dataclasses.replace(config, resume="auto")


def leave_run(
    run_dir: Path, status: str | None = None, objective: float | None = 0.5, config: RunConfig = CONFIG
) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    if status is not None:
        (run_dir / "summary.json").write_text(json.dumps({"status": status, "objective": objective}))


def test_two_runs_of_one_second_have_a_directory_each() -> None:
    first = locate_run(CONFIG).run_dir
    first.mkdir(parents=True)
    second = locate_run(CONFIG).run_dir
    assert first != second
    assert first.parent == second.parent == Path("runs/x")


def test_runs_that_chose_the_same_name_before_they_began_have_a_directory_each() -> None:
    with RunLock(CONFIG) as first, RunLock(CONFIG) as second:
        assert first.place == second.place, "both looked before either began"
        assert first.open() != second.open()
        assert all((lock.place.run_dir / "config.yaml").exists() for lock in (first, second))


def test_second_run_in_one_named_directory_is_refused() -> None:
    named = dataclasses.replace(CONFIG, run_dir="mine")
    with RunLock(named) as first, RunLock(named) as second:
        first.open()
        with pytest.raises(ConfigError, match=rf"^run_dir: mine is in use by process {os.getpid()} on "):
            second.open()
    with RunLock(auto(named)) as later:
        assert later.place.resumed, "the end of a lock gives the directory back"


def test_run_that_is_active_in_another_process_is_not_resumed_and_the_process_is_named() -> None:
    leave_run(Path("mine"))
    config = dataclasses.replace(auto(), run_dir="mine")
    with RunLock(config), pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on \S+, since "):
        RunLock(config)
    with RunLock(config) as again:
        assert again.open() == Path("mine")


def test_what_another_process_began_meanwhile_is_not_written_over() -> None:
    named = dataclasses.replace(CONFIG, run_dir="mine")
    with RunLock(named) as late:
        leave_run(Path("mine"))
        before = Path("mine/config.yaml").read_bytes()
        with pytest.raises(ConfigError, match=r"^run_dir: mine already holds a run"):
            late.open()
    assert Path("mine/config.yaml").read_bytes() == before


def test_a_directory_that_holds_a_run_is_refused_with_the_way_out() -> None:
    leave_run(Path("mine"))
    with pytest.raises(ConfigError, match=r"^run_dir: mine already holds a run; type resume=auto"):
        locate_run(dataclasses.replace(CONFIG, run_dir="mine"))


def test_a_resume_with_nothing_to_resume_is_a_new_run_and_says_so() -> None:
    named, unnamed = locate_run(dataclasses.replace(auto(), run_dir="mine")), locate_run(auto())
    assert (named.run_dir, named.resumed) == (Path("mine"), False)
    assert named.notes == ("resume: mine holds no run with task=train; a new one starts",)
    assert unnamed.run_dir.parent == Path("runs/x")
    assert unnamed.notes == ("resume: runs/x holds no run with task=train; a new one starts",)
    assert locate_run(CONFIG).notes == ()


def test_the_way_out_of_a_refused_resume_is_one_that_works() -> None:
    leave_run(Path("mine"))
    with pytest.raises(ConfigError, match=r"start a new run with resume=never and another run_dir$"):
        locate_run(dataclasses.replace(auto(), run_dir="mine", seed=CONFIG.seed + 1))
    assert not locate_run(dataclasses.replace(CONFIG, run_dir="other", seed=CONFIG.seed + 1)).resumed


def test_a_resume_follows_latest_and_names_what_changed() -> None:
    leave_run(Path("runs/x/1"), "interrupted")
    point_latest(Path("runs/x/1"), CONFIG)
    assert locate_run(auto()).run_dir == Path("runs/x/1"), "as the run itself called it"
    changed = build_config({"experiment_name": "x", "resume": "auto", "rollout": {"temperature": 0.5}})
    with pytest.raises(ConfigError, match=r"^resume: .*rollout\.temperature: 1\.0 -> 0\.5; undo it, or start"):
        locate_run(changed)
    Path("runs/x/1/policy").mkdir()
    with pytest.raises(ConfigError, match=r"another run_dir \(policy\.path=runs/x/1/policy goes on from its policy\)$"):
        locate_run(changed)


EVALUATION = dataclasses.replace(CONFIG, task="evaluate")
REPLAY = dataclasses.replace(CONFIG, data=DataConfig(retrain_from="runs/x/1/rollouts.jsonl"))


@pytest.mark.parametrize("other", [EVALUATION, REPLAY], ids=["evaluation", "replay"])
def test_resume_continues_the_training_run_after_later_tasks_used_it(other: RunConfig) -> None:
    leave_run(Path("runs/x/1"), "interrupted")
    point_latest(Path("runs/x/1"), CONFIG)
    leave_run(Path("runs/x/2"), "completed", config=other)
    point_latest(Path("runs/x/2"), other)
    assert Path("runs/x/latest").resolve().name == "1", "whose model later commands name"
    place = locate_run(auto())
    assert (place.run_dir, place.complete) == (Path("runs/x/1"), False)
    assert locate_run(auto(REPLAY)).resumed == (other is REPLAY)


def test_a_resume_passes_over_newer_runs_of_other_tasks() -> None:
    leave_run(Path("runs/x/1"), "interrupted")
    leave_run(Path("runs/x/2"), "interrupted")
    leave_run(Path("runs/x/3"), "completed", config=EVALUATION)
    Path("runs/x/latest").symlink_to("3")
    assert locate_run(auto()).run_dir == Path("runs/x/2")


def test_an_evaluation_is_never_continued_as_a_training_run() -> None:
    leave_run(Path("mine"), "completed", config=EVALUATION)
    with pytest.raises(ConfigError, match=r"^resume: .*differs from that of mine: task: evaluate -> train; "):
        locate_run(dataclasses.replace(auto(), run_dir="mine"))


def test_a_configuration_that_cannot_be_read_back_is_named() -> None:
    leave_run(Path("mine"))
    Path("mine/config.yaml").write_text("train: [")
    with pytest.raises(ConfigError, match=r"mine/config\.yaml can't be read"):
        locate_run(dataclasses.replace(auto(), run_dir="mine"))


@pytest.mark.parametrize("share", [0, 0.03, 0.5, 0.9, 0.997])
def test_torn_configuration_is_reported(share: float) -> None:
    leave_run(Path("mine"))
    whole = Path("mine/config.yaml").read_text()
    pipeline_state = whole[: int(share * len(whole))]
    Path("mine/config.yaml").write_text(pipeline_state[: pipeline_state.rfind("\n") + 1])
    with pytest.raises(
        ConfigError, match=r"^resume: mine/config\.yaml is incomplete.* it lacks .*resume=never and another run_dir$"
    ):
        locate_run(dataclasses.replace(auto(), run_dir="mine"))


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("grms: {}\ncotrain: {enabled: false}\n", "'cotrain.enabled'; type grm.train.enabled"),
        ("grms: {weak: {path: x}}\n", "'grms.weak.path'; type models.weak.path"),
    ],
)
def test_a_run_with_keys_of_an_earlier_version_is_not_continued_and_the_first_one_is_named(
    written: str, told: str
) -> None:
    leave_run(Path("mine"))
    Path("mine/config.yaml").write_text(written)
    with pytest.raises(ConfigError, match=rf"^resume: mine/config\.yaml is from another version.* {re.escape(told)}; "):
        locate_run(dataclasses.replace(auto(), run_dir="mine"))


def test_every_cut_of_a_configuration_is_refused_in_words() -> None:
    leave_run(Path("mine"))
    whole = Path("mine/config.yaml").read_bytes()
    for length in [*range(0, 60, 3), *range(len(whole) - 30, len(whole) - 2, 3)]:
        Path("mine/config.yaml").write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"mine/config\.yaml (is incomplete|can't be read)"):
            locate_run(dataclasses.replace(auto(), run_dir="mine"))


@pytest.mark.parametrize("text", ["", '{"stat', "[]", "{}", "\0\0"])
def test_torn_summary_is_reported_and_written_again(text: str) -> None:
    leave_run(Path("mine"))
    Path("mine/summary.json").write_text(text)
    place = locate_run(dataclasses.replace(auto(), run_dir="mine"))
    assert not place.complete
    assert place.notes == ("mine/summary.json can't be read; the run finishes again from its last checkpoint",)


def leave_checkpoint(run_dir: Path, step: int, run_id: str = "") -> Path:
    checkpoints = Checkpoints(directory=run_dir / "checkpoints", keep=9)
    state = RunState(pipeline_state=PipelineState(version=step), wall_s=1.0, totals={}, busy_s={}, run_id=run_id)
    return checkpoints.publish(checkpoints.draft(step), state, ())


def test_run_never_resumes_from_another_runs_checkpoint() -> None:
    with RunLock(dataclasses.replace(CONFIG, run_dir="mine")) as claim:
        run_dir = claim.open()
    resume = dataclasses.replace(auto(), run_dir="mine")
    leave_checkpoint(run_dir, 2, read_run_id(run_dir))
    assert RunLock(resume).place.checkpoint == Path("mine/checkpoints/step_2")
    leave_checkpoint(run_dir, 4, "another")
    with pytest.raises(
        ConfigError, match=r"^resume: mine/checkpoints/step_4 is a checkpoint of run another, and mine "
    ):
        RunLock(resume)


def test_run_does_not_begin_next_to_checkpoints_of_a_run_whose_files_are_gone() -> None:
    leave_checkpoint(Path("mine"), 2)
    with RunLock(dataclasses.replace(CONFIG, run_dir="mine")) as lock, pytest.raises(ConfigError) as refused:
        lock.open()
    assert "run_dir: mine holds checkpoints without their config.yaml" in str(refused.value)


@pytest.mark.parametrize("name", [".lock", "run.json", "metrics.jsonl", "summary.json"])
def test_a_folder_in_the_place_of_a_file_is_refused_before_the_start(name: str) -> None:
    (Path("mine") / name).mkdir(parents=True)
    with RunLock(dataclasses.replace(CONFIG, run_dir="mine")) as lock, pytest.raises(ConfigError) as refused:
        lock.open()
    assert str(refused.value).startswith("run_dir: mine ") and name in str(refused.value)
    assert str(refused.value).endswith("type another run_dir")


def test_a_directory_that_was_deleted_or_replaced_is_noticed() -> None:
    with RunLock(dataclasses.replace(CONFIG, run_dir="mine")) as lock:
        run_dir = lock.open()
    run_id = read_run_id(run_dir)
    check_is_there(run_dir, run_id)
    shutil.rmtree(run_dir)
    with pytest.raises(FileNotFoundError, match="mine was deleted or replaced during the run"):
        check_is_there(run_dir, run_id)


def test_a_resume_takes_the_newest_whole_checkpoint_and_tells_what_it_passed_over() -> None:
    leave_run(Path("mine"))
    for step in (2, 4):
        leave_checkpoint(Path("mine"), step)
    resume = dataclasses.replace(auto(), run_dir="mine")
    assert locate_run(resume).checkpoint == Path("mine/checkpoints/step_4")
    Path("mine/checkpoints/step_4/run_state.json").write_text("")
    place = locate_run(resume)
    assert place.checkpoint == Path("mine/checkpoints/step_2")
    assert place.notes[0].startswith("damaged in mine/checkpoints: step_4: run_state.json has 0 bytes instead of ")
    assert place.notes[0].endswith("; continuing from step_2")


def test_ranks_that_stand_elsewhere_get_absolute_paths() -> None:
    new, old = (
        RunLocation(run_dir=Path("mine")),
        RunLocation(run_dir=Path("mine"), checkpoint=Path("mine/checkpoints/step_2")),
    )
    assert anywhere(new.run_dir, new) == (Path.cwd() / "mine", None)
    assert anywhere(old.run_dir, old) == (Path.cwd() / "mine", Path.cwd() / "mine/checkpoints/step_2")


def test_a_resume_without_any_whole_checkpoint_is_refused() -> None:
    """It would silently start over."""
    leave_run(Path("mine"))
    (leave_checkpoint(Path("mine"), 4) / "manifest.json").unlink()
    with pytest.raises(
        ConfigError, match=r"^resume: no checkpoint in mine/.* is complete \(step_4: manifest\.json is mis"
    ):
        locate_run(dataclasses.replace(auto(), run_dir="mine"))


def test_a_resume_may_change_how_the_run_learns_and_waits_and_the_change_is_written_down_once() -> None:
    leave_run(Path("mine"), "failed")
    values = {
        "train": {"lr": 1e-4, "num_steps": 160},
        "judge": {"limits": {"timeout_s": 600.0}, "max_failure_rate": 0.5},
    }
    config = build_config({"experiment_name": "x", "run_dir": "mine", "resume": "auto", **values})
    for _ in range(2):
        with RunLock(config) as lock:
            lock.open()
    assert read_changes(Path("mine")) == (
        "after step 0: judge.limits.timeout_s: 120.0 -> 600.0",
        "after step 0: judge.max_failure_rate: 0.2 -> 0.5",
        "after step 0: train.lr: 0.0003 -> 0.0001",
        "after step 0: train.num_steps: 80 -> 160",
    )
    assert read_yaml(Path("mine/config.yaml")).train.lr == 1e-4


def test_a_run_may_be_made_longer_and_not_shorter_than_it_is() -> None:
    leave_run(Path("mine"), "completed")
    leave_checkpoint(Path("mine"), 80)
    config = dataclasses.replace(auto(), run_dir="mine")
    longer, shorter = (with_sections(config, train=TrainConfig(num_steps=n)) for n in (81, 79))
    assert locate_run(config).complete
    assert not locate_run(longer).complete
    leave_checkpoint(Path("mine"), 80)
    with RunLock(longer) as lock:
        lock.open()
    assert read_changes(Path("mine")) == ("after step 80: train.num_steps: 80 -> 81",)
    Path("mine/summary.json").unlink()
    with pytest.raises(ConfigError, match=r"^train\.num_steps: 79, but mine has completed 80; type 80 or more"):
        RunLock(shorter)


def rows(*prompts: str) -> str:
    return "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)


@pytest.mark.parametrize(
    ("section", "key", "was", "now"),
    [
        ("data", "path", rows("2 + 2?"), rows("2 + 3?")),
        ("data", "eval_path", rows("4?"), rows("5?")),
        ("judge", "template", "{{ question }} {{ response }}", "{{ question }}: {{ response }}"),
        ("policy", "chat_template", "{{ messages }}", "{{ messages }}!"),
        ("grm", "chat_template", "{{ messages }}", "{{ messages }}!"),
    ],
)
def test_a_resume_over_other_data_or_another_template_is_refused_by_its_key(
    section: str, key: str, was: str, now: str
) -> None:
    owner = dataclasses.replace(getattr(RunSections(), section), **{key: "file.jsonl"})
    config = with_sections(CONFIG, run_dir="mine", **{section: owner})
    Path("file.jsonl").write_text(was)
    with RunLock(config) as lock:
        lock.open()
    with RunLock(auto(config)) as lock:
        assert lock.place.resumed, "the same content goes on"
    Path("file.jsonl").write_text(now)
    with pytest.raises(
        ConfigError, match=rf"^resume: {section}\.{key}: file.jsonl: not the content .* and another run_dir$"
    ):
        RunLock(auto(config))
    Path("file.jsonl").write_text(was)
    with RunLock(auto(config)) as lock:
        assert lock.open() == Path("mine"), "a refusal gives the directory back"


def test_a_run_of_a_version_without_checksums_gets_them_on_its_resume() -> None:
    leave_run(Path("mine"))
    with RunLock(dataclasses.replace(auto(), run_dir="mine")) as lock:
        lock.open()
    identity = read_identity(Path("mine"))
    assert identity is not None
    assert identity.run_id
    with RunLock(dataclasses.replace(auto(), run_dir="mine")) as lock:
        lock.open()
    assert read_identity(Path("mine")) == identity


def test_a_complete_run_says_so_and_gives_its_objective_again(capsys: pytest.CaptureFixture[str]) -> None:
    leave_run(Path("mine"), "completed", objective=0.75)
    before = {path: path.read_bytes() for path in Path("mine").iterdir()}
    assert run_task(dataclasses.replace(auto(), run_dir="mine")) == 0.75
    assert "mine is complete" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in Path("mine").iterdir()} == before


def test_only_runs_of_the_experiments_own_directory_are_its_latest() -> None:
    for run_dir in (Path("runs/x/1"), Path("runs/x/2"), Path("elsewhere/1")):
        run_dir.mkdir(parents=True)
        point_latest(run_dir, CONFIG)
    assert Path("runs/x/latest").resolve() == Path("runs/x/2").resolve()
    assert not Path("elsewhere/latest").exists()
