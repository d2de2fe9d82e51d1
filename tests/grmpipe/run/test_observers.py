"""The observers of a run: trackers that the configuration names get its steps and keep their state, and no secret."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from configs import run_config

from grmpipe.config.tracking import TrackingConfig
from grmpipe.models.settings import EngineConfig, OpenAIConfig
from grmpipe.pipeline.interfaces import PipelineState
from grmpipe.run.observers import FILES, Observers
from grmpipe.run_dir.run_state import RunState
from grmpipe.trackers.tracker import SampleRow
from grmpipe.trackers.wandb_tracker import WandbConfig

PLANTED = "planted0123456789planted0123456789planted"
OWN = """
from grmpipe.trackers.tracker import Tracker

class Mine(Tracker):
    def __init__(self, run):
        self.path, self.seen = run.run_dir / "mine.txt", run.state.get("seen", "")
        steps = run.config["train"]["num_steps"]
        self.write(f"from step {run.first_step}, seen {self.seen or 'nothing'}, {steps} steps")

    def write(self, line):
        with self.path.open("a") as file:
            print(line, file=file)

    def log(self, step, metrics):
        self.seen = str(step)
        self.write(f"step {step}: {metrics['x']}")

    def resume_state(self):
        return {"seen": self.seen}

    def close(self):
        self.write("closed")

class Raises:
    def __init__(self, run):
        pass

    log = table = resume_state = close = property(lambda self: 1 / 0)
"""


def test_the_page_on_a_run_says_what_each_of_its_files_holds() -> None:
    page = (Path(__file__).parents[3] / "docs/reading_a_run.md").read_text(encoding="utf-8")
    table = page.partition("## Files of a run")[2].partition("**`summary.json`**")[0]
    assert [name for name in FILES if f"`{name}" not in table] == []


@pytest.mark.usefixtures("restored_logging")
def test_custom_tracker_gets_each_step_although_another_tracker_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_trackers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    run_dir, raises, mine = tmp_path / "run", "my_trackers.Raises", "my_trackers.Mine"
    config = run_config(tracking=TrackingConfig(trackers=[raises, mine]))
    states = {"other": {"id": "o"}}
    begun = RunState(pipeline_state=PipelineState(version=6), wall_s=1.0, totals={}, busy_s={}, trackers=states)
    for state in (None, begun):
        observers = Observers.open(config, run_dir, state)
        observers.trackers.log(7, {"x": 0.5})
        states |= observers.trackers.resume_states()
        observers.close()
    assert states == {"other": {"id": "o"}, mine: {"seen": "7"}}, "one that this run doesn't have keeps its state"
    steps = config.train.num_steps
    assert (run_dir / "mine.txt").read_text().splitlines() == [
        f"from step 0, seen nothing, {steps} steps", "step 7: 0.5", "closed",
        f"from step 7, seen 7, {steps} steps", "step 7: 0.5", "closed",
    ]  # fmt: skip
    assert (run_dir / "run.log").read_text().count(f"{raises} failed, the run continues without it") == 2  # once a run
    observers.show_end(run_dir, [], None)
    assert f"3 calls of the tracker {raises} failed" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("restored_logging")
def test_the_planted_secret_is_in_no_file_of_a_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no netrc
    monkeypatch.setenv("WANDB_API_KEY", PLANTED)
    monkeypatch.setenv("JUDGE_API_KEY", PLANTED[::-1])
    monkeypatch.setattr(sys, "argv", ["launch.py", f"grm.api_key={PLANTED}"])
    openai = OpenAIConfig(extra_body={"api_key": "in the config only", "url": f"http://{PLANTED[::-1]}@judge"})
    shipped = TrackingConfig().shipped
    to_files = shipped.keys() - {"mlflow", "opentelemetry", "trackio", "swanlab", "prometheus", "webhook"}
    names = [name for name in sorted(to_files) if not shipped[name].find_missing()]
    tracking = TrackingConfig(trackers=names, wandb=WandbConfig(mode="offline"), console=False)
    config = run_config(experiment_name=PLANTED, engine=EngineConfig(openai=openai), tracking=tracking)
    observers = Observers.open(config, tmp_path)
    observers.trackers.log(10, {"x": 1.0})
    leaky = SampleRow(
        group_id="g", sibling=0, question="q", answer=PLANTED, critique=PLANTED[::-1], score=None, truth=None
    )
    observers.trackers.table(10, [leaky])
    observers.close()
    logging.getLogger("grmpipe").warning("refused by http://%s@judge", PLANTED[::-1])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.log", "metrics.jsonl", "debug.log"} <= {path.name for path in files}
    printed = "".join(capfd.readouterr()).encode()
    for content in [printed, *(path.read_bytes() for path in files)]:
        for secret in (PLANTED, PLANTED[::-1], "in the config only"):
            assert secret.encode() not in content
    sent = [path for path in files if path.suffix == ".wandb" or "tfevents" in path.name]
    assert len(sent) == len(names)
    assert all(b"<redacted>" in path.read_bytes() for path in sent)  # the config is in it
    assert not any(b"<sha256" in path.read_bytes() for path in sent), "not even a hash leaves the run's directory"
