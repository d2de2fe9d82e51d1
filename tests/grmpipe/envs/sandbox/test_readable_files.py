"""Which files workers may read: modules, not the folders that they lie in; never the run and its data."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import grmpipe
from grmpipe.config.env import EnvConfig
from grmpipe.config.isolation import IsolationConfig
from grmpipe.envs.sandbox import readable_files
from grmpipe.envs.sandbox.readable_files import ReadableFiles, find_readable_files

Found = Callable[..., ReadableFiles]


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Found:
    """`found(files, target)`: what a worker may read, with these files in a folder on the import path."""

    def find(
        files: dict[str, str],
        target: str = "my_env.MyEnv",
        data: tuple[str, ...] = (),
        options: dict[str, object] | None = None,
        read: tuple[str, ...] = (),
    ) -> ReadableFiles:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text, encoding="utf-8")
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        isolation = IsolationConfig(kind="process", read=[str(tmp_path / path) for path in read])
        config = EnvConfig(kind="custom", target=target, options=options or {}, isolation=isolation)
        return find_readable_files(config, [str(tmp_path / path) for path in data])

    return find


def is_read(found: ReadableFiles, path: Path) -> bool:
    """Whether Landlock would let a worker read a file, which must agree with what bubblewrap shows."""
    real = Path(os.path.realpath(path))
    by_landlock = any(real == Path(one) or Path(one) in real.parents for part in found.parts for one in part.carve())
    shown = any(part.holds(str(real)) for part in found.parts)
    assert by_landlock <= shown
    return by_landlock


def test_modules_are_read_that_the_environment_imports_wherever_the_statement_stands(
    found: Found, tmp_path: Path
) -> None:
    files = {
        "my_env.py": "import os, helper as h; from pack.sub import x\ndef f():\n    if 1: import late\n",
        "helper.py": "import importlib\nimportlib.import_module('by_name')\n",
        "late.py": "",
        "by_name.py": "",
        "by_option.py": "",
        "other.py": "",
        "pack/__init__.py": "",
        "pack/sub/__init__.py": "from beside import y",
        "pack/sub/fast.cpython-311-x86_64-linux-gnu.so": "",
        "pack/not_imported_now.py": "",
        "pack/words.txt": "",
        "pack/notes.py.txt": "",
        "beside/deep.py": "",  # a package without __init__.py
        "beside/run-3/kept.py": "",
    }
    read = found(files, options={"game": "by_option.Game", "size": 3})
    no_modules = {"other.py", "pack/words.txt", "pack/notes.py.txt", "beside/run-3/kept.py"}
    assert {name for name in files if is_read(read, tmp_path / name)} == files.keys() - no_modules


def test_modules_of_an_editable_installation_are_read_without_its_data_and_ours_whole(
    found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source" / "edited").mkdir(parents=True)
    for name in ("__init__.py", "levels.json"):
        (tmp_path / "source" / "edited" / name).touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "source")])
    read = found({"my_env.py": "import edited"})
    assert is_read(read, tmp_path / "source" / "edited" / "__init__.py")
    assert not is_read(read, tmp_path / "source" / "edited" / "levels.json")
    assert is_read(read, Path(grmpipe.__file__).with_name("py.typed"))


def test_what_pip_installed_into_a_folder_is_read_and_what_lies_beside_it_is_not(found: Found, tmp_path: Path) -> None:
    record = "lib/__init__.py,sha256=x,1\nlib/words.txt,,\nsingle.py,,\n../../bin/tool,,\n"
    files = {"lib-1.dist-info/RECORD": record, "lib/words.txt": "", "single.py": "", "my_env.py": "", "a.jsonl": ""}
    read = found(files)
    assert {name for name in files if is_read(read, tmp_path / name)} == files.keys() - {"a.jsonl"}


def test_run_and_data_are_not_read_from_folders_that_are_named_or_installed(
    found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "site-packages/lib/__init__.py": "",
        "site-packages/lib/prompts.jsonl": "",
        "levels/one.json": "",
        "levels/held_out.jsonl": "",
        "levels/runs/now/rollouts.jsonl": "",
        "levels/deep/two.json": "",
        "named.jsonl": "",
        "my_env.py": "",
    }
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "levels").mkdir()
    (tmp_path / "levels" / "alias.json").symlink_to("held_out.jsonl")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site-packages")])
    data = ("site-packages/lib/prompts.jsonl", "levels/held_out.jsonl", "levels/runs", "named.jsonl")
    read = found(files, data=data, read=("levels", "named.jsonl"))
    unread = {"site-packages/lib/prompts.jsonl", "levels/held_out.jsonl", "levels/runs/now/rollouts.jsonl"}
    assert {name for name in files if is_read(read, tmp_path / name)} == files.keys() - unread
    assert str(tmp_path / "levels" / "alias.json") not in [path for part in read.parts for path in part.carve()]


def test_of_the_environments_own_code_only_modules_are_read_also_where_it_is_installed(
    found: Found, tmp_path: Path
) -> None:
    flat = {"site-packages/x/one.py": "", "site-packages/x/two.py": "", "site-packages/x/answers.jsonl": ""}
    deep = {"site-packages/lab/__init__.py": "", "site-packages/lab/answers.jsonl": "", "site-packages/.env": ""}
    for folder in ("x", "lab"):
        (tmp_path / "site-packages" / folder).mkdir(parents=True, exist_ok=True)
    for path, target, read_ones in (
        (tmp_path / "site-packages" / "x", "one.Env", {"site-packages/x/one.py"}),
        (tmp_path / "site-packages", "lab.Env", {*flat, "site-packages/lab/__init__.py"}),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", [*sys.path, str(path)])
            read = found({**flat, **deep}, target)
            assert {name for name in (*flat, *deep) if is_read(read, tmp_path / name)} == read_ones


def test_an_environment_of_python_in_the_projects_folder_makes_no_data_readable(
    found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    files = {"bin/tool": "", "lib/python3.11/site-packages/a.py": "", "pyvenv.cfg": "", "p.jsonl": "", ".env": ""}
    read = found({**files, "my_env.py": ""})
    assert {name for name in files if is_read(read, tmp_path / name)} == files.keys() - {"p.jsonl", ".env"}


def test_names_are_listed_only_in_folders_from_which_something_is_imported(
    found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, "/"])
    listed = found({"my_env.py": "import pack", "pack/__init__.py": ""}).listed
    assert {str(tmp_path), str(tmp_path / "pack")} <= {*listed} and "/" not in listed


def test_folders_in_which_images_keep_projects_are_not_read() -> None:
    read = find_readable_files(EnvConfig(kind="tools", functions="grmpipe.tiny.tools"), ())
    assert not any(part.holds(path) for part in read.parts for path in ("/usr/src/app/.env", "/usr/local/src/a"))
    assert is_read(read, Path("/usr/bin/env"))


def test_folders_of_a_large_package_that_hold_only_modules_are_read_as_folders(
    found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readable_files, "MANY", 3)
    files = {"pack/__init__.py": "", "pack/a/b/one.py": "", "pack/a/two.py": "", "pack/c/x.py": "", "pack/c/x.csv": ""}
    read = found({"my_env.py": "import pack", **files})
    paths = [part.path.removeprefix(f"{tmp_path}/") for part in read.parts if part.path.startswith(f"{tmp_path}/pack")]
    assert sorted(paths) == ["pack/__init__.py", "pack/a", "pack/c/x.py"]
