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

import grmpipe

ROOT = Path(__file__).parents[1]
LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]*)|<link\b(?![^>]*canonical)[^>]*\bhref=\"([^\"]*)"
)


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
    assert 'data-md-color-scheme="slate"' in pages["judging.html"]
    assert "<td><code>judge=pointwise</code>" in pages["judging.html"], "a table"
    assert (tmp_path / "search" / "search_index.json").exists()
