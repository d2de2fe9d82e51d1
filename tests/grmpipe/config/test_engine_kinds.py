"""Engines by their kind: a user's own by its dotted path, and no module compares the names of engines."""

from __future__ import annotations

import ast
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grmpipe.config.engine_kinds import ENGINE_KINDS
from grmpipe.config.io.yaml_io import build_config
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.roles.find_models import find_model
from grmpipe.roles.role_placement import seat_roles
from grmpipe.run.build.start_models import engine_factory

ROOT = Path(__file__).parents[3]
MINE = """
from dataclasses import dataclass

from grmpipe.models.engines.embedded.embedded_kind import EmbeddedKind
from grmpipe.models.engines.engine_kind import EngineKind
from grmpipe.models.settings import EmbeddedConfig


@dataclass(frozen=True)
class MyOptions:
    max_context_tokens: int = 0
    rows: int = 3


class MyEngine(EngineKind[MyOptions]):
    transports = ("shared_memory", "disk")

    @classmethod
    def read_options(cls, sections):
        return MyOptions()

    @property
    def max_rows(self):
        return self.options.rows

    def make(self, spec, rank):
        return EmbeddedKind(EmbeddedConfig(max_batch_rows=self.options.rows)).make(spec, rank)


class Abstract(EngineKind[MyOptions]):
    pass
"""
PLACEMENT = {
    "pools": {"all": {"slots": 1}},
    "roles": {role: {"pool": "all"} for role in ("policy", "learner", "grm")},
}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A user's module on PYTHONPATH."""
    (tmp_path / "engine_of_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "engine_of_mine"
    sys.modules.pop("engine_of_mine", None)


def config(engine: str, **policy: object) -> RunConfig:
    return build_config({"placement": PLACEMENT, "policy": {"engine": engine, **policy}})


def test_an_engine_of_a_users_own_serves_a_role_and_takes_its_weights(mine: str) -> None:
    run = config(f"{mine}.MyEngine", engine_options={"rows": 5})
    _, roles = seat_roles(run)
    policy = roles.served["policy"]
    assert (roles.served["policy"].engine.max_rows, policy.engine.transports[0]) == (5, "shared_memory")
    assert policy.option_key("rows") == policy.option_key("rows") == "policy.engine_options.rows"
    model = find_model(policy, run.cluster)
    engine = pickle.loads(pickle.dumps(engine_factory(model, roles, run.seed)))(0)
    assert isinstance(engine, EmbeddedEngine)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("vlm", r"^policy\.engine: unknown engine 'vlm'; known: embedded, vllm, sglang, openai, or the dotted path"),
        ("nowhere.Engine", r"^policy\.engine: nowhere can't be imported"),
        ("engine_of_mine.Other", r"^policy\.engine: the module engine_of_mine has no Other"),
        ("engine_of_mine.MyOptions", r"^policy\.engine: engine_of_mine\.MyOptions is no engine"),
        ("engine_of_mine.Abstract", r"^policy\.engine: engine_of_mine\.Abstract is no engine"),
    ],
)
def test_an_object_that_is_no_engine_kind_is_refused_by_its_key(mine: str, engine: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(engine)


def test_an_engine_that_returns_no_likely_tokens_serves_no_scores_by_tokens(mine: str) -> None:
    sections = {"grm": {"engine": f"{mine}.MyEngine"}, "placement": PLACEMENT}
    build_config(sections | {"judge": {"score_from": "text"}})
    able = r"type judge\.score_from=text, or grm\.engine=embedded or vllm or sglang or openai"
    with pytest.raises(
        ConfigError, match=rf"^judge\.score_from: engine_of_mine\.MyEngine returns no log-probs .*{able}"
    ):
        build_config(sections | {"judge": {"score_from": "expectation"}})


def test_options_of_an_own_engine_are_checked_like_any_other(mine: str) -> None:
    with pytest.raises(ConfigError, match=r"^unknown key 'policy\.engine_options\.row'; did you mean .*\.rows"):
        seat_roles(config(f"{mine}.MyEngine", engine_options={"row": 5}))


# -- no module compares the names of engines -------------------------------------------------------------------------

# Where a kind's name or options may be: its own files, the sections of its options, the table.
OWN_FILES = ("models/engines/", "models/settings.py", "grmpipe/config/engine_kinds.py")
OPTIONS = {"EmbeddedConfig", "VllmConfig", "SglangConfig", "OpenAIConfig"}
# Of grmpipe/: may know a whole RunConfig.
ABOVE = ("config/", "roles/", "capacity/", "run/", "run_dir/", "tasks.py", "cli.py", "launching.py")


def sources() -> dict[str, ast.Module]:
    files = [path for package in ("grmpipe", "models", "scheduler") for path in (ROOT / package).rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def engine_names(tree: ast.AST) -> Iterator[str]:
    """Comparisons with an engine's name, tables keyed by it, and its class of options."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.Dict):
            compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else node.keys
            flat = [each for one in compared if one is not None for each in getattr(one, "elts", [one])]
            yield from (str(one.value) for one in flat if isinstance(one, ast.Constant) and one.value in ENGINE_KINDS)
        if isinstance(node, ast.Name) and node.id in OPTIONS:
            yield node.id


def test_only_its_own_files_and_the_table_know_an_engine_by_name() -> None:
    known = {file: set(engine_names(tree)) for file, tree in sources().items() if not file.startswith(OWN_FILES)}
    assert {file: names for file, names in known.items() if names} == {}


def takes_run_config(tree: ast.AST) -> list[str]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    arguments = [(f.name, a) for f in functions for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
    typed = [(name, ast.unparse(one.annotation)) for name, one in arguments if one.annotation is not None]
    return [name for name, annotation in typed if "RunConfig" in annotation]


def test_only_what_puts_a_run_together_takes_its_whole_configuration() -> None:
    above = tuple(f"grmpipe/{place}" for place in ABOVE)
    found = {file: takes_run_config(tree) for file, tree in sources().items() if not file.startswith(above)}
    assert {file: names for file, names in found.items() if names} == {}
