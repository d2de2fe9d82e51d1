"""Finding a model's files: directories, the hub's cache, and the error if there is neither."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from grmpipe.models.hub import NotHere, find_files, find_missing_files
from grmpipe.tiny.resolve import SHIPPED


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without network, with the small files of Some/Model in the hub's cache; returns their directory."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub/models--Some--Model/snapshots/abc"
    shutil.copytree(SHIPPED / "policy", snapshot, ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "hub/models--Some--Model/refs").mkdir()
    (tmp_path / "hub/models--Some--Model/refs/main").write_text("abc")
    return snapshot


def test_a_directory_is_where_it_is() -> None:
    assert find_files(str(SHIPPED / "policy"), weights=True) == str(SHIPPED / "policy")


def change(directory: Path, name: str, **values: object) -> None:
    (directory / name).write_text(json.dumps(json.loads((directory / name).read_text()) | values))


def cut(directory: Path, end: int) -> None:
    (directory / "model.safetensors").write_bytes((SHIPPED / "policy/model.safetensors").read_bytes()[:end])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut in the weights": (lambda one: cut(one, 300_000), r"model\.safetensors' is no whole file .*; 300000 bytes\)"),
    "cut in the header": (lambda one: cut(one, 100), r"is no whole file of weights .* fetch it again$"),
    "empty": (lambda one: cut(one, 0), r"is no whole file of weights"),
    "a pointer": (lambda one: (one / "model.safetensors").write_text("version https://git-lfs"), r"is no whole file"),
    "a shard is missing": (
        lambda one: (one / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors"}}'),
        r"lacks 1\.safetensors, 1 of the 1 files of its weights; give a complete model$",
    ),
    "other rows": (lambda one: change(one, "config.json", vocab_size=4000), r"489 rows of 96 .* says 4000 of 96 "),
    "another width": (lambda one: change(one, "config.json", hidden_size=128), r"489 rows of 96 .* says 489 of 128 "),
}


@pytest.mark.parametrize("how", BROKEN)
def test_weights_that_are_not_whole_or_of_another_model_are_refused_in_words(tmp_path: Path, how: str) -> None:
    shutil.copytree(SHIPPED / "policy", tmp_path / "model")
    spoil, said = BROKEN[how]
    spoil(tmp_path / "model")
    with pytest.raises(ValueError, match=rf"^path: .*{said}"):
        find_files(str(tmp_path / "model"), weights=True)
    assert find_files(str(tmp_path / "model"), weights=False)


def test_a_relative_directory_is_found_from_anywhere_and_goes_before_a_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(SHIPPED / "policy", tmp_path / "my/policy")
    monkeypatch.chdir(tmp_path)
    assert find_files("my/policy", weights=True) == str(tmp_path / "my/policy")


def test_a_run_where_a_model_is_expected_is_answered_with_the_model_in_it(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED / "policy", tmp_path / "policy")
    with pytest.raises(ValueError, match=rf"holds no config.json; .* \({tmp_path}/policy is one\)$"):
        find_files(str(tmp_path), weights=True)


def test_another_name_than_that_of_a_runs_model_is_answered_with_it(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("policy", "critic"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotHere, match=r"no directory 'run/grm'.* \(run/critic, run/policy are some\)$"):
        find_files("run/grm", weights=True)
    with pytest.raises(
        ValueError, match=r"no directory '\./run/grm'; .* \(run/critic, run/policy are some\), a GGUF file or a hub"
    ):
        find_files("./run/grm", weights=True)


def test_a_cached_model_is_found_without_network(cached: Path) -> None:
    assert find_files("Some/Model", weights=False) == str(cached)
    shutil.copy(SHIPPED / "policy/model.safetensors", cached)
    assert find_files("Some/Model", weights=True) == str(cached)


def test_a_cached_model_without_its_weights_is_not_here(cached: Path) -> None:
    with pytest.raises(NotHere, match=r"^path: 'Some/Model' has no weights in the cache .* `hf download Some/Model`"):
        find_files("Some/Model", weights=True)


def test_a_name_that_is_nowhere_says_how_to_get_it(cached: Path) -> None:
    with pytest.raises(NotHere, match=r"^path: no directory 'Some/Other', .* `hf download Some/Other`"):
        find_files("Some/Other", weights=False)


def test_a_name_that_the_hub_refuses_is_wrong_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, **options: object) -> str:
        response = httpx.Response(404, request=httpx.Request("GET", "https://hub/api"))
        raise RepositoryNotFoundError("404 Client Error.\n\nRepository Not Found", response=response)

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ValueError, match=r"^path: no directory 'Some/Typo', and the hub refuses it \(404") as told:
        find_files("Some/Typo", weights=False)
    assert not isinstance(told.value, NotHere)


@pytest.mark.parametrize("path", ["./nope", "/nope", "nope", "a/b/c"])
def test_a_path_that_can_be_no_hub_name_is_never_looked_up(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    with pytest.raises(ValueError, match=f"^path: no directory '{path}'; give") as told:
        find_files(path, weights=False)
    assert not isinstance(told.value, NotHere)


def test_nothing_is_missing_of_a_whole_model_and_of_the_projects_own() -> None:
    assert find_missing_files(str(SHIPPED / "policy")) == find_missing_files("tiny://policy") == ""


def test_missing_files_are_named_and_not_fetched(cached: Path) -> None:
    assert find_missing_files("Some/Model").startswith(
        "Some/Model lacks *.safetensors; on a machine with network access type"
    )
    (cached / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    )
    (cached / "model-1.safetensors").touch()
    assert "Some/Model lacks model-2.safetensors;" in find_missing_files("Some/Model")
    (cached / "model-2.safetensors").touch()
    assert find_missing_files("Some/Model") == ""
    assert find_missing_files("Some/Other").startswith("Some/Other isn't in the cache; on a machine")
    assert find_missing_files("/no/such/folder").startswith("no directory '/no/such/folder'")
