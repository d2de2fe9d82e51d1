"""The command's own output, and composing in a user's own process: beside another Hydra application, in threads."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir, version
from hydra.core.global_hydra import GlobalHydra
from rich.panel import Panel

import grmpipe
from grmpipe import cli
from grmpipe.cli import complain, escape_what_stdout_lacks
from grmpipe.observe.console import RunConsole
from grmpipe.run.tasks.sweep import SweepRun, sweep_table

ROOT = Path(__file__).parents[2]
APPLICATION = """
import sys
import hydra
import grmpipe
from hydra import version
from hydra.core.hydra_config import HydraConfig

@hydra.main(version_base="1.2", config_path=sys.argv.pop(1), config_name="config")
def app(config):
    print(config.mine, grmpipe.compose("quickstart", ["train.num_steps=7"]).train.num_steps)
    assert HydraConfig.get().job.name == "app" and str(version.getbase()) == "1.2"
    assert not [one for one in HydraConfig.get().runtime.config_sources if one.provider == "project"]

app()
"""


@pytest.fixture
def users_conf(tmp_path: Path) -> Path:
    """The configurations of a user's application, whose store has a `schema` too, within a project of ours."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/config.yaml").write_text("mine: 5\n")
    (tmp_path / "ours").mkdir()
    (tmp_path / "grmpipe.yaml").write_text("conf: ours\n")
    return tmp_path / "conf"


def test_one_composes_within_an_application_of_hydra_and_changes_none_of_its_state(users_conf: Path) -> None:
    (users_conf.parent / "app.py").write_text(APPLICATION)
    command = [sys.executable, "app.py", str(users_conf), "hydra.run.dir=.", "hydra.output_subdir=null"]
    ended = subprocess.run(
        command, cwd=users_conf.parent, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert ended.stdout.split() == ["5", "7"], ended.stderr


def test_one_composes_within_a_users_initialize(users_conf: Path) -> None:
    with initialize_config_dir(str(users_conf), version_base="1.2"):
        before = GlobalHydra.instance().hydra
        assert grmpipe.compose("quickstart", ["train.num_steps=7"]).train.num_steps == 7
        assert GlobalHydra.instance().hydra is before and str(version.getbase()) == "1.2"
        assert compose("config") == {"mine": 5}
    with pytest.raises(grmpipe.ConfigError, match="unknown key"):
        grmpipe.compose("quickstart", ["train.num_step=7"])
    assert not GlobalHydra.instance().is_initialized()


def test_threads_compose_at_the_same_time() -> None:
    found: list[object] = []

    def work(number: int) -> None:
        try:
            found.append(grmpipe.compose("quickstart", [f"train.num_steps={number}"]).train.num_steps)
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found, key=str) == [1, 2, 3]


@pytest.mark.parametrize(("written", "is_run"), [("", True), ("hydra: {mode: MULTIRUN}", False)])
def test_a_command_is_composed_once_unless_its_experiment_is_a_sweep(
    users_conf: Path, monkeypatch: pytest.MonkeyPatch, written: str, is_run: bool
) -> None:
    ran, composed = list[object](), list[Sequence[str]]()
    (users_conf.parent / "ours/experiment").mkdir()
    text = f"# @package _global_\n{written}\nrun_dir: ${{hydra:runtime.output_dir}}/mine"
    (users_conf.parent / "ours/experiment/mine.yaml").write_text(text)
    compose_one = cli.compose_with_hydra

    def count(typed: Sequence[str], *, from_shell: bool) -> cli.DictConfig:
        composed.append(typed)
        return compose_one(typed, from_shell=from_shell)

    monkeypatch.chdir(users_conf.parent)
    monkeypatch.setattr(cli, "compose_with_hydra", count)
    monkeypatch.setattr(cli, "run_task", lambda config: ran.append(config.run_dir))
    typed = ["+experiment=mine", "train.num_steps=7"]
    assert cli.run_composed_once(typed) == is_run
    assert composed == [typed] and ran == [str(users_conf.parent / "mine")] * is_run
    assert not cli.run_composed_once([*typed, "-m"]) and not cli.run_composed_once([*typed, "hydra.job.name=x"])


def test_an_error_that_repeats_control_characters_is_printed_without_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert complain("judge.model: the endpoint said \x1b[2J\x1b]0;owned\x07\nSee run.log", 2) == 2
    assert capsys.readouterr().err == "grmpipe: judge.model: the endpoint said �[2J�]0;owned�\nSee run.log\n"


def test_an_ascii_console_gets_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    escape_what_stdout_lacks()
    print(sweep_table([SweepRun(number=0, overrides=["experiment_name=für"], error="größer")]))
    RunConsole().print(Panel("Größe", title="a · b"))
    shown = written.getvalue().decode("ascii")
    assert "f\\xfcr" in shown and "Gr\\xf6\\xdfe" in shown and "a \\xb7 b" in shown


@pytest.mark.parametrize("is_caught", [False, True])
def test_a_library_that_answers_a_signal_with_an_error_of_its_own_is_an_interruption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_caught: bool
) -> None:
    """OmegaConf does, in the end of a context of its own."""
    codes: list[int] = []

    def struck() -> int:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        if is_caught:
            return complain("engine.openai: 'NoneType' object has no attribute", 2)
        raise AttributeError("'NoneType' object has no attribute")

    monkeypatch.setattr(cli, "main", struck)
    monkeypatch.setattr(cli, "leave", codes.append)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    try:
        cli.command()
    finally:
        signal.signal(signal.SIGINT, before)
    assert codes == [130] and ("grmpipe: interrupted" in capsys.readouterr().err) != is_caught
