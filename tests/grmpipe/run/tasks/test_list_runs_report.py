"""task=report: from a run's files to its page, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from configs import run_config

from grmpipe.config.io.yaml_io import to_yaml
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.run.errors import RunFailed
from grmpipe.run.tasks.list_runs import make_report


def run_of(run_dir: Path) -> RunConfig:
    """A killed run: a configuration, steps that mostly waited for verdicts, no summary."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config = run_config(run_dir=str(run_dir), task="report")
    (run_dir / "config.yaml").write_text(to_yaml(config))
    steps = ({"step": step, "time/step_s": 2.0, "stall/verdicts_s": 1.5} for step in (1, 2, 3))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return config


def test_a_killed_run_gets_its_page_with_the_sentence_that_it_did_not_live_to_say(tmp_path: Path) -> None:
    page = Path(make_report(run_of(tmp_path))).read_text()
    assert "the learner waited for judging for 75 % of the step time" in page


def test_a_finished_run_has_said_it_itself(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    (tmp_path / "summary.json").write_text('{"status": "completed", "bottleneck": null}')
    assert "the learner waited for judging" not in Path(make_report(config)).read_text()


def test_a_configuration_of_another_version_leaves_out_only_the_sentence(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    (tmp_path / "config.yaml").write_text("no_such_key: 1\n")
    page = Path(make_report(config)).read_text()
    assert "waits for verdicts" in page
    assert "the learner waited for judging" not in page


def test_without_a_run_dir_it_is_the_latest_of_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_of(Path("runs/mine/latest"))
    assert make_report(run_config(experiment_name="mine", task="report")) == "runs/mine/latest/report.html"


def test_report_of_a_missing_run_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run; type run_dir=runs/<experiment_name>/latest"):
        make_report(run_config(run_dir=str(tmp_path), task="report"))


def test_a_page_that_cannot_be_written_is_a_failure_here(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    (tmp_path / "report.html").mkdir()
    with pytest.raises(RunFailed, match="could not be written"):
        make_report(config)
