"""Commands that pages, examples, benchmarks and recipes show would be accepted. None is started.

Overrides are composed and checked as by the command, and its roles are placed: this needs none of the models, data and
GPUs that a command names, and finds no fault in them. Arguments of our own scripts are parsed.
"""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from shown_commands import BLOCK, ROOT, SHELLS, pages, shown_commands, split

from grmpipe.cli import compose
from grmpipe.config.io.yaml_io import to_yaml
from grmpipe.models.engines.embedded.embedded_kind import EmbeddedKind
from grmpipe.roles.machines import SEATING_TASKS, place_roles

# First words of commands that are not ours: nothing here checks them.
NOT_CHECKED = {
    "make", "pip", "curl", "ray", "docker", "sbatch", "pytest", "pre-commit", "cd", "export", "sleep", "umask", "head",
    "od", "tr", "[", "break",
}  # fmt: skip
MODULES_NOT_CHECKED = {"pytest", "venv", "llama_cpp.server", "verl.trainer.main_ppo"}
# Scripts and modules of ours without a parser, and how many words they take.
TAKE_WORDS = {
    "benchmarks/recipes.py": range(99), "benchmarks/plan_rates.py": (0,), "benchmarks/hacking_alarm.py": (1,),
    "benchmarks/learner_memory.py": range(99), "benchmarks/process_memory.py": range(1, 99),
    "grmpipe.tiny.upcycle": (1,), "grmpipe.config.io.reference": (0,),
    "grmpipe.scheduler.processes.await_nodes": (2, 3),
}  # fmt: skip
OF_A_USER = ModuleType("my_package.my_module")  # of which a page shows the dotted path
OF_A_USER.MyEngine = EmbeddedKind  # type: ignore[attr-defined]
NOT_INSTALLED = {"trl"}  # what a script needs that this environment need not have
PROJECT = ROOT / "examples" / "project"
COMMANDS = shown_commands()


def overrides_in(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """What is typed after our command, or handed to it by `ray job submit` or a cluster's script."""
    for place, word in enumerate(words):
        if word.endswith(("launch.py", "slurm.sh")) or (place == 0 and word == "grmpipe"):
            return words[place + 1 :]
    return None


LAUNCHES = sorted({typed for command in COMMANDS if (typed := overrides_in(command.words)) is not None})
SCRIPTS = sorted({one.words for one in COMMANDS if one.words[0] == "python" and overrides_in(one.words) is None})


def runs_of(typed: tuple[str, ...]) -> list[list[str]]:
    """The overrides of each run; several for a sweep."""
    words = [word for word in typed if word != "+experiment="]  # a table that completes it has a test of its own
    if "-m" not in words:
        return [words]
    swept = OverridesParser.create().parse_overrides([word for word in words if word != "-m"])
    return [list(run) for batch in BasicSweeper.split_arguments(swept, None) for run in batch]


def of_recorded_run(typed: list[str], run_dir: Path) -> list[str]:
    """The overrides of judging a run again, of a run that is there: its config.yaml is all that they need."""
    (run_dir / "config.yaml").write_text(to_yaml(compose("reward_hacking")), encoding="utf-8")
    return [f"run_dir={run_dir}" if word.startswith("run_dir=") else word for word in typed]


@pytest.mark.parametrize("typed", LAUNCHES, ids=shlex.join)
def test_a_shown_command_composes_and_its_roles_are_placed(
    typed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if {"+experiment=mine", "+experiment=game"} & set(typed):  # of a project that task=new writes
        monkeypatch.chdir(PROJECT)
    monkeypatch.setitem(sys.modules, "my_package.my_module", OF_A_USER)
    for run in runs_of(typed):
        config = compose(None, of_recorded_run(run, tmp_path) if "task=rejudge" in run else run)
        if config.task in SEATING_TASKS and config.data.retrain_from is None:
            place_roles(config)


class ParsedError(BaseException):
    """The arguments were accepted: nothing is to run."""


@pytest.mark.parametrize("words", SCRIPTS, ids=shlex.join)
def test_a_shown_script_is_there_and_takes_its_arguments(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_module = words[1] == "-m"
    name, *arguments = words[2:] if is_module else words[1:]
    if is_module and name in MODULES_NOT_CHECKED:
        return
    if name in TAKE_WORDS:
        assert len(arguments) in TAKE_WORDS[name]
        assert find_spec(name) if is_module else (ROOT / name).exists()
        return
    parse = argparse.ArgumentParser.parse_args

    def only_parse(parser: argparse.ArgumentParser, *given: object, **more: object) -> None:
        parse(parser, *given, **more)  # type: ignore[call-overload]
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    run, where = (runpy.run_module, name) if is_module else (runpy.run_path, str(ROOT / name))
    try:
        with pytest.raises(ParsedError):
            run(where, run_name="__main__")
    except ModuleNotFoundError as error:
        assert error.name in NOT_INSTALLED
        pytest.skip(f"its arguments aren't checked: {error.name} isn't installed")


def test_the_experiments_that_the_readme_lists_are_there() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`(?:, (?:`.*?`|\.\.))*) \|", readme.partition("+experiment=` |")[2], re.MULTILINE)
    names = [cell.split()[0] for row in rows for cell in re.findall("`(.*?)`", row)]
    assert len(names) > 15
    assert not [name for name in names if not (ROOT / "conf" / "experiment" / f"{name}.yaml").exists()]


def test_the_first_word_of_every_shown_command_is_ours_or_listed_as_not_checked() -> None:
    words = {command.words[0] for command in COMMANDS}
    assert words == {"python", "grmpipe"} | NOT_CHECKED


def test_a_block_of_commands_says_that_it_is_for_a_shell() -> None:
    for page in pages():
        for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
            if language not in (*SHELLS, "python"):
                firsts = {line.split()[0] for line in block.splitlines() if line.strip()}
                assert not firsts & {"python", "pip", "make"}, f"{page.name}: {block}"


def test_a_command_is_read_as_by_a_shell() -> None:
    script = """
    $ FOO=1 python launch.py a=1 \\
        'b=[1, 2]' c.{x,y}=2 && ray stop   # a comment
    until grmpipe d=<a name> > out.txt; do sleep 1; done
    """
    assert list(split(script)) == [
        ("python", "launch.py", "a=1", "b=[1, 2]", "c.x=2", "c.y=2"), ("ray", "stop"), ("grmpipe", "d=a_name"),
        ("sleep", "1"),
    ]  # fmt: skip
