"""The console: a line per step, and texts of models that do no harm."""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from configs import run_config
from rich.console import Console

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.tracking import TrackingConfig
from grmpipe.models.types import Message
from grmpipe.observe.console import (
    ONE_REWARD,
    SEVERAL_JUDGES,
    ConsoleSink,
    RunConsole,
    describe_run_signal,
    failures_by_cause,
)
from grmpipe.observe.logs import setup_logging
from grmpipe.run.observers import Observers, list_files
from grmpipe.trackers.tracker import SampleRow
from grmpipe.types import Prompt, Rollout

METRICS = {
    "time/step_s": 1.26,
    "time/train_s": 0.51,
    "train/true_accuracy": 0.456,
    "train/grm_score": 6.04,
    "rollout/tokens_per_s": 3410.0,
    "judge/failed_timeout": 2.0,
    "judge/failed_died": 0.0,
    "staleness/max": 1.0,
    "stall/groups_s": 0.25,
    "stall/engines_idle_s": 12.5,
    "sync/push_s": 0.031,
}


def recorded(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None, highlight=False)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(**changes: str | float | None) -> SampleRow:
    known = {"group_id": "g0", "sibling": 2, "question": "1 + 1?", "answer": "Answer: 2", "critique": "Score: 10"}
    return SampleRow(**{"score": 10.0, "truth": 1.0, **known, **changes})  # type: ignore[arg-type]


def test_elsewhere_a_step_is_one_aligned_line() -> None:
    console = recorded(terminal=False)
    sink = ConsoleSink(num_steps=80, console=console)
    sink.log(1, METRICS)
    sink.log(12, {**METRICS, "rollout/tokens_per_s": 12_345.0})
    sink.log(13, {**METRICS, "train/grm_score": math.nan})
    sink.log(14, {"staleness/max": 2.0})
    first, second, third, bare = text_of(console).splitlines()
    assert first == (
        "step  1/80  took   1.3s  true 0.46  score  6.0  tok/s   3,410  stale  1  learner waits   0.2s  "
        "engines wait  12.5s  sync  0.03s  failed 2 timeout"
    )
    assert second.startswith("step 12/80  took   1.3s  true 0.46  score  6.0  tok/s  12,345  stale")
    assert first.index("failed") == second.index("failed") == third.index("failed")
    assert "score    -" in third
    assert bare == "step 14/80  stale  2  failed none", "what a run doesn't measure isn't told"


def test_a_step_shows_the_learners_speed_and_on_a_known_gpu_its_mfu() -> None:
    console = recorded(terminal=False)
    sink = ConsoleSink(num_steps=2, console=console)
    sink.log(1, {**METRICS, "learner/tokens_per_s": 40123.4, "perf/mfu": 0.3149})
    assert "learner tok/s  40,123  mfu 0.31  stale" in text_of(console)


def test_evaluation_has_its_own_line() -> None:
    console = recorded(terminal=False)
    sink = ConsoleSink(num_steps=80, console=console)
    sink.log(0, {"eval/true_accuracy": 0.29, "eval/true_accuracy_greedy": 0.31, "eval/grm_score": 4.3})
    sink.log(20, {**METRICS, "eval/true_accuracy": 0.45})
    sink.log(21, {"time/other_s": 1.0})
    first, second, third = text_of(console).splitlines()
    assert first == "step  0/80  held-out:  true 0.29  greedy 0.31  score  4.3"
    assert second.startswith("step 20/80  took   1.3s  true 0.46")
    assert third == "step 20/80  held-out:  true 0.45"


BY_JUDGE = {
    **METRICS,
    "train/reward": 0.561,
    "judge/judge/score_mean": 6.25,
    "judge/judge/tokens": 900.0,
    "judge/judge/tokens_per_s": 1310.0,
    "judge/judge/failed_timeout": 2.0,
    "judge/failed_soon/score_mean": 1.0,
    "judge/failed_soon/tokens": 0.0,
    "cascade/reward/escalated_share": 0.25,
    "cascade/reward/audit_error": 0.041,
}


def test_several_judges_have_one_more_line_and_a_reward_in_the_place_of_a_score() -> None:
    console = recorded(terminal=False)
    ConsoleSink(num_steps=2, console=console, shown=SEVERAL_JUDGES).log(1, {**BY_JUDGE, "eval/reward": 0.5})
    step, judges, held_out = text_of(console).splitlines()
    assert "true 0.46  reward 0.56  tok/s" in step
    assert step.endswith("failed 2 timeout"), "the judge failed_soon is no cause"
    assert judges == (
        "step 1/2  judges:  judge score  6.2  tok/s 1,310  failed 2 timeout | failed_soon score  1.0 | "
        "cascade reward escalated 0.25  audit error 0.04"
    )
    assert held_out == "step 1/2  held-out:  reward 0.50"


def test_the_trained_grms_of_a_run_are_listed_by_name() -> None:
    pointwise = JudgeConfig()
    asked = SimpleNamespace(judges={"judge": pointwise})
    config = SimpleNamespace(trained_grms={"grm": None, "safety": None}, main_judge=pointwise, asked=asked)
    files = list(list_files(config))  # type: ignore[arg-type]
    assert {"grm/", "safety/", "policy/"} <= set(files)
    assert files[-1] == "run.log"


def test_the_trained_policy_is_listed_with_the_key_that_takes_it() -> None:
    asked = SimpleNamespace(judges={"judge": JudgeConfig()})
    config = SimpleNamespace(trained_grms={}, main_judge=JudgeConfig(), asked=asked)
    assert list_files(config)["policy/"] == "policy.path"  # type: ignore[arg-type]


def test_a_judge_that_learned_as_the_policy_is_listed_as_a_judge() -> None:
    label = JudgeConfig(kind="label")
    config = SimpleNamespace(trained_grms={}, main_judge=label, asked=SimpleNamespace(judges={"judge": label}))
    assert list_files(config)["policy/"] == "grm.path"  # type: ignore[arg-type]


def test_the_number_of_a_reward_function_is_called_reward() -> None:
    console = recorded(terminal=False)
    sink = ConsoleSink(num_steps=2, console=console, shown=ONE_REWARD)
    sink.log(1, {"train/reward": 1.83, "train/grm_score": 1.83, "eval/reward": 1.47, "eval/grm_score": 1.47})
    sink.print_samples([row(score=2), row(score=None)])
    text = text_of(console)
    assert "reward 1.83" in text and "held-out:  reward 1.47" in text
    assert "reward 2 · truly right" in text and "no reward" in text
    assert "score" not in text


@pytest.mark.parametrize("terminal", [True, False])
def test_notes_and_alarms_are_seen_in_a_terminal_and_in_a_file(terminal: bool) -> None:
    console = recorded(terminal=terminal)
    sink = ConsoleSink(num_steps=2, console=console)
    sink.log(1, METRICS)
    sink.note("policy-0 was replaced")
    sink.alarm("scores rise, agreement falls")
    sink.close()
    assert "policy-0 was replaced" in text_of(console)
    assert "ALARM  scores rise, agreement falls" in text_of(console)


def test_samples_show_question_answer_critique_score_and_truth() -> None:
    console = recorded(terminal=False)
    sink = ConsoleSink(num_steps=2, console=console)
    sink.print_samples([row(), row(score=None, truth=0.0, critique="[judge failed: timeout]"), row(truth=None), row()])
    text = text_of(console)
    assert text.count("1 + 1?") == 3
    assert "score 10 · truly right" in text
    assert "no score · truly wrong" in text
    assert "score 10 · truth unknown" in text
    assert "[judge failed: timeout]" in text


def test_an_answer_that_a_rule_judged_has_no_critique() -> None:
    console = recorded(terminal=False)
    ConsoleSink(num_steps=2, console=console).print_samples([row(critique="")])
    assert "answer" in text_of(console) and "critique" not in text_of(console)


def test_text_of_a_model_can_not_be_markup_or_an_escape_sequence() -> None:
    console = recorded(terminal=False)
    sink = ConsoleSink(num_steps=2, console=console)
    sink.print_samples([row(answer="[red]2[/nonsense]", critique="\x1b]0;owned\x07\x1b[2J")])
    sink.note("\x1b[2J[/]")
    assert "[red]2[/nonsense]" in text_of(console)
    assert "\x1b" not in text_of(console)


def end_of(run_dir: Path, **files: str) -> list[str]:
    """What the end of a run prints of its files; `_` stands for the dot in their names."""
    console = recorded(terminal=False)
    ConsoleSink(num_steps=2, console=console).print_files(
        run_dir, {name.replace("_", "."): key for name, key in files.items()}
    )
    return text_of(console).splitlines()


def test_a_run_ends_with_its_files_and_what_shows_them_in_two_lines() -> None:
    run_dir = Path("runs") / ("long" * 40)
    files, shown = end_of(run_dir, report_html="", judged_jsonl="", metrics_jsonl="")
    assert files == f"{run_dir}  report.html, judged.jsonl, metrics.jsonl", "in one piece, so that it can be copied"
    assert shown == f"to look into it: open report.html in a browser, or grmpipe task=view run_dir={run_dir}"


def test_the_viewers_command_is_the_one_that_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["launch.py", "+experiment=quickstart"])
    monkeypatch.setattr(sys, "orig_argv", [".venv/bin/python", "launch.py", "+experiment=quickstart"])
    assert end_of(Path("x"), rollouts_jsonl="")[-1] == "to look into it: .venv/bin/python launch.py task=view run_dir=x"


def test_the_viewer_is_named_only_where_it_has_more_than_the_report() -> None:
    assert end_of(Path("x"), report_html="", run_log="")[1:] == ["to look into it: open report.html in a browser"]
    assert end_of(Path("x"), run_log="") == ["x  run.log"]


def test_what_a_further_command_takes_is_printed_as_it_is_typed() -> None:
    lines = end_of(Path("runs/x"), calibration_json="judge.calibration", run_log="")
    assert lines[-1] == "for a further command: judge.calibration=runs/x/calibration.json"


def test_a_console_that_is_gone_fails_no_note(tmp_path: Path) -> None:
    with (tmp_path / "closed").open("w") as file:
        sink = ConsoleSink(num_steps=2, console=Console(file=file))
    sink.note("anyone there?")
    sink.print_samples([row()])


def test_run_continues_after_its_reader_closed_the_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1, closefd=False) as pipe:
        sink = ConsoleSink(num_steps=2, console=RunConsole(file=pipe))
        sink.log(1, METRICS)
        sink.note("still here")
        sink.close()
        assert sink.console.quiet
    os.close(writer)


def test_failures_are_named_by_cause_and_only_those_that_happened() -> None:
    assert failures_by_cause(METRICS) == {"timeout": 2}


@pytest.mark.usefixtures("restored_logging")
def test_noise_goes_to_run_log_and_our_warnings_to_the_console_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    noisy = logging.getLogger("transformers")
    noisy.addHandler(logging.StreamHandler())
    noisy.propagate = False
    console = recorded(terminal=False)
    setup_logging(tmp_path, console, ["wandb"])
    setup_logging(tmp_path, console, ["wandb"])  # a second call duplicates nothing
    noisy.warning("a model of noise")
    logging.getLogger("somelibrary.worker").warning("noise of a worker")
    logging.getLogger("grmpipe.pipeline.interfaces").info("an inner matter")
    logging.getLogger("wandb").info("config: all of it")
    logging.getLogger("wandb").warning("a warning of a tracker")
    try:
        raise OSError("disk full")
    except OSError:
        logging.getLogger("grmpipe.pipeline.interfaces").warning("metrics failed", exc_info=True)
    warnings.warn("a python warning", stacklevel=1)
    lines = (tmp_path / "run.log").read_text()
    for text in ("a model of noise", "noise of a worker", "an inner matter", "metrics failed", "a python warning"):
        assert lines.count(text) >= 1
    assert lines.count("a model of noise") == 1
    assert "a warning of a tracker" in lines and "config: all of it" not in lines
    assert "Traceback" in lines
    assert text_of(console).split() == ["WARNING", "metrics", "failed"]
    assert capfd.readouterr().err == ""


def test_full_disk_is_reported_once_in_one_line(
    tmp_path: Path, restored_logging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.log").symlink_to("/dev/full")
    setup_logging(tmp_path)
    for _ in range(3):
        logging.getLogger("grmpipe").info("a line")
    setup_logging(tmp_path)  # closes the file
    assert capsys.readouterr().err == f"grmpipe: {tmp_path}/run.log can't be written: No space left on device\n"


def test_lines_missing_from_journals_are_counted_and_reported_at_the_end(
    tmp_path: Path, restored_logging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("rollouts.jsonl", "metrics.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    observers = Observers.open(run_config(tracking=TrackingConfig(trackers=[])), tmp_path, gauges=False)
    rollout = Rollout(group_id="g", sibling=0, turns=(), status="finished")
    prompt = Prompt(prompt_id="p", messages=(Message(role="user", content="?"),))
    for step in range(2):
        observers.recorder.rollout(0, prompt, rollout)
        observers.trackers.log(step, {})
    observers.close()
    assert observers.journal_failures == {"rollouts.jsonl": 2, "metrics.jsonl": 2}
    for name in ("rollouts.jsonl", "metrics.jsonl"):
        (tmp_path / name).unlink()  # reading it would never end
    observers.show_end(tmp_path, [], None)
    assert (
        "ALARM  2 lines of rollouts.jsonl could not be written: a resume or a replay will miss them. The first one: "
    ) in capsys.readouterr().out


def test_a_step_with_episodes_says_their_turns_and_what_their_environments_failed() -> None:
    console = recorded(terminal=False)
    sink = ConsoleSink(num_steps=2, console=console)
    sink.log(1, {**METRICS, "env/turns_mean": 3.25, "env/faults_died": 2.0, "env/faults_timeout": 0.0})
    (line,) = text_of(console).splitlines()
    assert "score  6.0  turns  3.2  tok/s" in line
    assert line.endswith("failed 2 timeout  env failed 2 died")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_step_whose_groups_teach_nothing_says_so(terminal: bool) -> None:
    console = recorded(terminal=terminal)
    sink = ConsoleSink(num_steps=3, console=console)
    sink.log(1, {**METRICS, "train/zero_advantage_share": 0.5})
    assert "differ" not in text_of(console)
    sink.log(2, {**METRICS, "train/zero_advantage_share": 0.625})
    sink.log(3, {**METRICS, "train/zero_advantage_share": 1.0})
    sink.close()
    assert "in 62% of groups rewards don't differ" in text_of(console)
    assert "in no group rewards differ" in text_of(console)


def test_a_run_whose_groups_teach_nothing_says_so_at_its_end(
    tmp_path: Path, restored_logging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    observers = Observers.open(run_config(tracking=TrackingConfig(trackers=[])), tmp_path, gauges=False)
    for step in (1, 2):
        observers.trackers.log(step, {"train/zero_advantage_share": step / 2})
    observers.close()
    (tmp_path / "canaries.jsonl").touch()
    observers.show_end(tmp_path, [], None)
    shown = capsys.readouterr().out
    assert (
        "no signal  in 75% of the groups the rewards of all siblings were equal, and 1 of 2 steps had no other" in shown
    )
    assert "canaries.jsonl" not in shown, "an empty file holds nothing"
    assert "in 75% of the groups the rewards" in (tmp_path / "run.log").read_text()


def test_a_few_groups_without_a_signal_are_no_news() -> None:
    assert describe_run_signal([{"train/zero_advantage_share": 0.4}, {"eval/true_accuracy": 0.5}]) is None
    assert describe_run_signal([]) is None


def test_steps_without_any_signal_are_counted_where_there_are_some() -> None:
    told = describe_run_signal([{"train/zero_advantage_share": 0.75}] * 2)
    assert told is not None and told.startswith("in 75% of the groups") and "steps" not in told
