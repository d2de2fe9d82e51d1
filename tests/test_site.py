"""The documentation as a site: it is built strictly, offline, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import grmpipe
from grmpipe.config.io.key_errors import list_keys, nearest

ROOT = Path(__file__).parents[1]
LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]*)|<link\b(?![^>]*canonical)[^>]*\bhref=\"([^\"]*)"
)


MOST_WORDS = 2_500


def read_nav(entries: list) -> list[str]:
    """The pages of the navigation, in its order."""
    pages = []
    for entry in entries:
        inner = next(iter(entry.values())) if isinstance(entry, dict) else entry
        pages += read_nav(inner) if isinstance(inner, list) else [inner]
    return pages


def test_every_page_is_once_in_the_navigation_which_begins_as_a_reader_does() -> None:
    pages = read_nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    there = [page.name for page in (ROOT / "docs").glob("*.md")]
    there += [page.relative_to(ROOT).as_posix() for page in (ROOT / "benchmarks").rglob("*.md")]
    assert sorted(pages) == sorted(there)
    assert pages[:3] == ["index.md", "first_run.md", "real_model.md"]


def test_no_page_but_that_of_all_keys_is_too_long() -> None:
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md")}
    assert {name for name, count in words.items() if count > MOST_WORDS} == {"configuration.md"}


def test_that_nothing_has_run_on_gpus_stands_at_the_top() -> None:
    top = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:15]
    assert "Nothing here has run on GPUs" in " ".join(top)


def test_keys_of_other_trainers_lead_to_those_of_their_rows() -> None:
    text, known, read = (ROOT / "docs" / "keys_elsewhere.md").read_text(encoding="utf-8"), list_keys(), 0
    for ours, theirs in re.findall(r"^\| `([\w.]+)` \|(.*)$", text, re.MULTILINE):
        assert ours in known
        for key in re.findall(r"`([\w.]+)`", theirs):
            assert ours in nearest(key, known), key
            read += 1
    assert read > 120


def test_the_page_of_names_has_every_name_that_users_import() -> None:
    named = re.findall(r"^::: grmpipe\.(\w+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(grmpipe.__all__)


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs grmpipe[docs]")
def test_the_site_is_built_strictly_in_half_a_minute_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    offline = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    began = time.process_time() + sum(os.times()[2:4])
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | offline | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.process_time() + sum(os.times()[2:4]) - began < 30
    pages = {page.relative_to(tmp_path).as_posix(): page.read_text("utf-8") for page in tmp_path.rglob("*.html")}
    loaded = {address for text in pages.values() for found in LOADED.findall(text) for address in found if address}
    assert loaded
    assert not [address for address in loaded if address.startswith(("http:", "https:", "//"))]
    assert "Run the task to its end" in pages["api.html"], "a docstring"
    assert "benchmarks/quickstart.html" in pages
    named = {name for text in pages.values() for name in re.findall(r"<a href=[^>]*>((?:\w+/)*\w+\.md)</a>", text)}
    assert not named, "links that are named after files of the tree"
    assert 'data-md-color-scheme="slate"' in pages["judging.html"]
    assert "<td><code>judge=pointwise</code>" in pages["judging.html"], "a table"
    assert (tmp_path / "search" / "search_index.json").exists()
