"""The layout: folders in one order, imports go down it, one place per library, every file says what it holds."""

from __future__ import annotations

import ast
import collections
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("models", "scheduler", "grmpipe")
MOST_FILES = 24  # of a folder, as its reader sees it
# Every folder and every file next to folders. Each imports only from entries above it, and from itself.
ORDER = [
    "models",
    "models/chat",
    "models/settings.py",
    "models/lm/parallel",
    "models/lm/moe",
    "models/lm",
    "models/weights",
    "models/engines",
    "models/engines/embedded",
    "models/engines/vllm",
    "models/engines/sglang",
    "models/engines/openai",
    "models/engines/simulated",
    "scheduler",
    "scheduler/processes",
    "scheduler/routing",
    "scheduler/weights",
    "scheduler/slots",
    "grmpipe/types.py",
    "grmpipe/counts.py",
    "grmpipe/clients",
    "grmpipe/trackers",
    "grmpipe/config/keys",
    "grmpipe/algorithm",
    "grmpipe/config",
    "grmpipe/config/io",
    "grmpipe/data",
    "grmpipe/roles",
    "grmpipe/envs",
    "grmpipe/envs/tools",
    "grmpipe/envs/sandbox",
    "grmpipe/workflows",
    "grmpipe/judge",
    "grmpipe/judge/kinds",
    "grmpipe/judge/composition",
    "grmpipe/judge/monitor",
    "grmpipe/judge/protocols",
    "grmpipe/pipeline",
    "grmpipe/observe",
    "grmpipe/train",
    "grmpipe/train/batching",
    "grmpipe/train/scalar",
    "grmpipe/train/critic",
    "grmpipe/train/learner",
    "grmpipe/run_dir",
    "grmpipe/viewer",
    "grmpipe/evaluation",
    "grmpipe/run",
    "grmpipe/run/features",
    "grmpipe/run/features/cotrain",
    "grmpipe/run/build",
    "grmpipe/run/doctor",
    "grmpipe/serve",
    "grmpipe/run/tasks",
    "grmpipe/capacity",
    "grmpipe/capacity/plan",
    "grmpipe/capacity/simulate",
    "grmpipe/tiny",
    "grmpipe/tasks.py",
    "grmpipe/new_project.py",
    "grmpipe/cli.py",
    "grmpipe/run_reader.py",
    "grmpipe/launching.py",
    "grmpipe/__init__.py",
    "grmpipe/help.py",
    "grmpipe/command.py",
]
# From models: the scheduler moves tokens and weights, releases callers by priority, and knows no model.
SCHEDULER_SEES = {
    "models/types.py",
    "models/adapter_view.py",
    "models/bounds.py",
    "models/request_gates.py",
    "models/import_path.py",
}
LIBRARIES = {
    "ray": "scheduler/processes/",
    "vllm": "models/engines/vllm/",
    "sglang": "models/engines/sglang/",
    "llguidance": "models/engines/embedded/grammar.py",
    "peft": "models/lm/lora.py",
    "math_verify": "grmpipe/judge/kinds/math_rule.py",
    "pydantic_core": "grmpipe/observe/plain_json.py",
    "aiohttp": ("grmpipe/workflows/server.py", "grmpipe/serve/", "grmpipe/run/tasks/serve.py", "grmpipe/viewer/"),
    "openai": "grmpipe/workflows/policy.py",
    "verifiers": "grmpipe/clients/verifiers.py",
    "verl": "grmpipe/clients/verl.py",
    "areal": "grmpipe/clients/areal.py",
    "mcp": "grmpipe/envs/tools/mcp_tools.py",
    "wandb": "grmpipe/trackers/wandb_tracker.py",
    "tensorboard": "grmpipe/trackers/tensorboard_tracker.py",
    "mlflow": "grmpipe/trackers/mlflow_tracker.py",
    "opentelemetry": "grmpipe/trackers/opentelemetry_tracker.py",
    "trackio": "grmpipe/trackers/trackio_tracker.py",
    "swanlab": "grmpipe/trackers/swanlab_tracker.py",
    "omegaconf": "grmpipe/config/io/yaml_io.py",
    "hydra": "grmpipe/cli.py",
}


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def place_of(path: Path) -> str:
    """The entry of ORDER for a file: itself, or its folder."""
    relative = path.relative_to(ROOT)
    is_listed = relative.as_posix() in ORDER or relative.parent.as_posix() == "grmpipe"
    return relative.as_posix() if is_listed else relative.parent.as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imported(path: Path) -> set[str]:
    """The dotted names that a file imports, anywhere in it; `from a import b` gives a.b."""
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def file_of(name: str) -> Path | None:
    """The file of this project for a dotted name, or the file that defines it; by its real path, without links."""
    parts = name.split(".")
    if parts[0] != "grmpipe":
        return None
    parts = parts[1:] if parts[1:2] in (["models"], ["scheduler"]) else parts
    for end in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:end])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
    raise AssertionError(f"{name}: there is no such module")


def imports_up(edges: list[tuple[str, str]], order: list[str]) -> list[tuple[str, str]]:
    """The edges, from an importing place to an imported one, that don't go down the order."""
    rank = {place: index for index, place in enumerate(order)}
    return [(place, other) for place, other in edges if rank[other] > rank[place]]


def edges() -> list[tuple[str, str]]:
    found = ((path, file_of(name)) for path in sources() for name in imported(path))
    return [(place_of(path), place_of(file)) for path, file in found if file is not None]


def test_the_order_holds_every_folder() -> None:
    assert sorted(ORDER) == sorted({place_of(path) for path in sources()})


def test_imports_go_down_the_order_only() -> None:
    assert imports_up(edges(), ORDER) == []


def test_no_file_imports_itself_through_others() -> None:
    below = {
        path: {file for name in imported(path) if (file := file_of(name)) not in (None, path)} for path in sources()
    }
    done: set[Path | None] = set()
    while ready := [path for path in below if path not in done and below[path] <= done]:
        done.update(ready)
    assert sorted(str(path.relative_to(ROOT)) for path in below.keys() - done) == []


@pytest.mark.parametrize(
    ("wrong", "order"), [([("a", "b")], ["a", "b"]), ([("a", "b"), ("b", "a")], ["b", "a"]), ([("a", "c")], ["a", "c"])]
)
def test_an_import_up_or_in_a_circle_is_noticed(wrong: list[tuple[str, str]], order: list[str]) -> None:
    assert imports_up(wrong, order)


def test_no_folder_holds_more_files_than_a_reader_oversees() -> None:
    files = collections.Counter(path.parent.relative_to(ROOT) for path in sources() if path.name != "__init__.py")
    assert {str(folder): count for folder, count in files.items() if count > MOST_FILES} == {}


def test_scheduler_knows_no_model_and_models_import_no_other_package() -> None:
    for path in sources():
        package = path.relative_to(ROOT).parts[0]
        for name in imported(path) if package != "grmpipe" else ():
            file = file_of(name)
            if file is not None and file.relative_to(ROOT).parts[0] != package:
                assert package == "scheduler", f"{path} imports {name}"
                assert file.relative_to(ROOT).as_posix() in SCHEDULER_SEES, f"{path} imports {name}"


def test_models_and_scheduler_are_imported_by_one_name() -> None:
    """As grmpipe.models: by `from models` a class would exist twice, and a user's package of that name may be found."""
    files = [path for folder in ("tests", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    for path in [ROOT / "launch.py", *sources(), *files]:
        found = {name.split(".")[0] for name in imported(path)}
        assert found.isdisjoint({"models", "scheduler"}), path
    for name in ("models", "scheduler"):
        assert (ROOT / "grmpipe" / name).readlink() == Path("..", name)


def test_nothing_imports_the_tiny_models_by_a_statement() -> None:
    """The table of `grmpipe/data/catalogs.py` finds them."""
    assert {place for place, other in edges() if other == "grmpipe/tiny" != place} == set()


def test_each_library_has_one_place() -> None:
    for path in [ROOT / "launch.py", *sources()]:
        for name in imported(path):
            place = LIBRARIES.get(name.split(".")[0])
            assert place is None or path.relative_to(ROOT).as_posix().startswith(place), f"{path} imports {name}"


def test_tests_are_no_packages_and_every_file_says_what_it_holds() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))
    for path in [ROOT / "launch.py", *sources()]:
        if path.name != "__init__.py":
            assert ast.get_docstring(tree_of(path)), f"{path}: no first sentence"
