"""The tasks of the command: a sweep, the doctor, and their exit codes."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import Forked

from grmpipe import cli as entry
from grmpipe.config.run_config import RunConfig
from grmpipe.observe.summary import Summary
from grmpipe.run.doctor.doctor import cuda_mismatch, doctor, driver_version, format_package
from grmpipe.run.errors import RunFailed, RunInterrupted
from grmpipe.tiny.resolve import SHIPPED

ROOT = Path(__file__).parents[2]
TINY_RUN = (
    "+experiment=quickstart", "cluster=inprocess", "tracking=none", "train.num_steps=1", "train.groups_per_batch=2",
    "train.group_size=2", "data.num_eval_prompts=4", "data.num_prompts=32",
)  # fmt: skip


def test_a_sweep_runs_each_point_in_a_directory_of_its_own_and_has_their_objectives(
    tmp_path: Path, forked: type[Forked]
) -> None:
    process = forked(ROOT / "launch.py", "-m", *TINY_RUN, "train.lr=1e-4,2e-4", cwd=tmp_path)
    assert process.wait() == 0, process.output
    runs = [path for path in (tmp_path / "runs/quickstart").iterdir() if not path.is_symlink()]
    assert len(runs) == 2
    assert sorted("lr: 0.0001" in (run / "config.yaml").read_text() for run in runs) == [False, True]
    assert all(json.loads((run / "summary.json").read_text())["objective"] is not None for run in runs)
    assert re.findall(r"^sweep, run (\d): .* train\.lr=(\S+)$", process.output, re.MULTILINE) == [
        ("0", "0.0001"),
        ("1", "0.0002"),
    ]
    assert len(re.findall(r"^sweep, run \d: eval\.final\.\w+ = [\d.]+$", process.output, re.MULTILINE)) == 2
    (sweep,) = (tmp_path / "runs/sweeps").iterdir()
    assert "train.lr=1e-4,2e-4" in (sweep / "multirun.yaml").read_text()
    assert (sweep / "multirun.yaml").stat().st_mode & 0o077 == 0
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def swept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, override: str, result: Callable[[RunConfig], float | None]
) -> tuple[int, list[int]]:
    """The exit code of a sweep over group sizes, and those that ran. result: what stands for the work of a run."""
    ran = []

    def run(config: RunConfig) -> float | None:
        ran.append(config.train.group_size)
        return result(config)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(entry, "run_task", run)
    arguments = ["-m", f"--config-path={ROOT / 'conf'}", "+experiment=quickstart", override]
    monkeypatch.setattr("sys.argv", ["launch.py", *arguments])
    return entry.main(), ran


def test_a_run_that_fails_leaves_the_rest_of_its_sweep_to_run_and_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails_at_4(config: RunConfig) -> float:
        if config.train.group_size == 4:
            raise RunFailed("no engine is left\nSee run.log")
        return 0.5

    assert swept(monkeypatch, tmp_path, "train.group_size=1,4,8", fails_at_4) == (2, [4, 8])
    out, err = capsys.readouterr()
    header = "sweep, run 0: +experiment=quickstart train.group_size=1"
    assert header in out.splitlines(), "before the error, also of a configuration that isn't built"
    assert re.findall(r"^grmpipe: (.*)$", err, re.MULTILINE) == [
        "train.group_size: must be at least 2 (a baseline needs siblings), got 1",
        "no engine is left",
    ]
    assert [" ".join(line.split()) for line in out.partition("sweep: 3 runs, 2 failed\n")[2].splitlines()][1:] == [
        "0 exit 2 train.group_size=1 train.group_size: must be at least 2 (a baseline needs siblings), got 1",
        "1 exit 1 train.group_size=4 no engine is left",
        "2 0.5 train.group_size=8",
    ]


def test_an_interrupt_ends_the_whole_sweep_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(config: RunConfig) -> float:
        raise RunInterrupted("interrupted at step 3")

    assert swept(monkeypatch, tmp_path, "train.group_size=8,4", interrupted) == (130, [8])
    assert "sweep: 1 runs, 1 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("serve", "^interrupted; type the same command with resume=auto$"),
        ("train", "^interrupted at step 0; continue with resume=auto run_dir="),
    ],
)
def test_only_a_task_with_steps_is_interrupted_at_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task: str, words: str
) -> None:
    async def end(*_: object) -> Summary:
        return Summary(status="interrupted", steps=0, versions={})

    monkeypatch.setattr("grmpipe.tasks.run_in_directory", end)
    config = entry.compose(
        "quickstart",
        [f"task={task}", "judge=rule", "cluster=inprocess", "tracking=none", f"run_dir={tmp_path / 'run'}"],
    )
    with pytest.raises(RunInterrupted, match=words):
        entry.run_task(config)


def test_an_error_that_is_no_users_has_its_line_in_the_table_and_its_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(config: RunConfig) -> float:
        return 1 / (config.train.group_size - 8)

    with pytest.raises(ZeroDivisionError):
        swept(monkeypatch, tmp_path, "train.group_size=8,4", broken)
    assert "sweep: 2 runs, 1 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "refused"),
    [
        (("policy.path=mine", "data=file", "data.eval_path=x.jsonl"), True),
        (("+experiment=quickstart", "grm=policy", "policy.path=mine"), False),  # the judge is the policy's model
    ],
)
def test_an_evaluation_of_a_judge_refuses_typed_keys_of_a_policy(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    typed: tuple[str, ...],
    refused: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(entry, "run_task", lambda config: None)
    monkeypatch.setattr("sys.argv", ["launch.py", f"--config-path={ROOT / 'conf'}", "task=evaluate", *typed])
    assert entry.main() == (2 if refused else 0)
    told = re.search(r"^grmpipe: policy\.path: .*type evaluate\.what=policy", capsys.readouterr().err, re.MULTILINE)
    assert (told is not None) == refused


def test_the_doctor_names_packages_cores_gpus_tracking_and_the_memory_of_chosen_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    entry.run_task(entry.compose(overrides=["task=doctor"]))
    said = capsys.readouterr().out
    for part in ("torch", "transformers", "ray", "cores", "GPUs", "wandb", "tensorboard"):
        assert any(line.startswith(part) for line in said.splitlines()), part
    assert "\nthis run" not in said
    entry.run_task(entry.compose(overrides=["task=doctor", f"policy.path={SHIPPED / 'policy'}"]))
    assert re.search(r"\nthis run        about 2\.\d+ GB of .* \(policy ", capsys.readouterr().out)
    assert not list(tmp_path.iterdir())


def test_the_doctor_examines_where_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "GPUs            unknown without torch" in doctor()


@pytest.mark.parametrize(
    ("torch_version", "built_for", "driver", "told"),
    [
        ("2.13.0", "13.0", "580.95.05", "torch 2.13.0 for CUDA 13.0; driver 580.95.05"),
        ("2.13.0", "13.0", "570.86.15", "CUDA 13.0 needs driver 580 or newer: "),
        ("2.13.0+cu126", "12.6", "570.86.15", "torch 2.13.0+cu126 for CUDA 12.6; driver 570.86.15"),
        ("2.11.0", "12.8", "570.86.15", "; the learner on GPUs needs torch 2.13 or newer"),
        ("2.13.0+cpu", None, "580.95.05", "this torch can't use the GPU of this machine"),
        ("2.13.0+cpu", None, None, "torch 2.13.0+cpu for CPUs; no NVIDIA driver"),
    ],
)
def test_the_doctor_tells_a_driver_that_is_too_old_for_torch(
    torch_version: str, built_for: str | None, driver: str | None, told: str
) -> None:
    found = cuda_mismatch(torch_version, built_for, driver)
    assert told in found
    assert ("needs" in found or "can't" in found) == ("needs" in told or "can't" in told)


def test_the_doctor_reads_the_drivers_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr("grmpipe.run.doctor.doctor.DRIVER_FILE", file)
    assert driver_version() is None
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n")
    assert driver_version() == "580.95.05"


def test_the_doctor_says_what_to_type_for_what_is_missing() -> None:
    assert format_package("no-such-package") == "no-such-package missing; type: pip install grmpipe"


def test_the_doctor_says_how_to_get_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"peft            {importlib.metadata.version('peft')}\n" in doctor()
    monkeypatch.setattr("grmpipe.run.doctor.doctor.find_version", lambda package: None)
    assert 'peft            not installed; for adapters (LoRA) type `pip install "grmpipe[lora]"`\n' in doctor()
