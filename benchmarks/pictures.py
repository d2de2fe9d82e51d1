"""The pictures of docs/viewer.md and docs/reading_a_run.md: pages of the viewer and the report of a run, by Chromium.

    python benchmarks/pictures.py runs/quickstart/latest

Needs `grmpipe[viewer]` and a Chromium on PATH. Writes viewer_run.png, viewer_group.png and report.png of docs/. The
group is the one of the run whose rewards differ most.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from statistics import pstdev
from urllib.parse import urlencode

import grmpipe

DOCS = Path(__file__).parents[1] / "docs"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
WAIT_S = 300.0


def find_group(run_dir: Path) -> str:
    """The trained group whose rewards differ most; of equal ones the first."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for line in grmpipe.read_run(run_dir).judgements:
        if line.reward is not None and re.fullmatch(r"g\d+", line.group_id):
            rewards[line.group_id].append(line.reward)
    return max(rewards, key=lambda group: pstdev(rewards[group]))


def take_picture(browser: str, url: str, path: Path, height: int) -> None:
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
             f"--window-size=1200,{height}", f"--screenshot={path}", url],
            check=True, timeout=WAIT_S, capture_output=True,
        )  # fmt: skip
    print(path)


def await_index(address: str, run: str, token: str) -> None:
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())  # the token becomes a cookie
    ends_s = time.monotonic() + WAIT_S
    while time.monotonic() < ends_s:
        with opener.open(f"{address}/state/{run}?{token}") as answer:
            if "100%" in json.loads(answer.read())["words"]:
                return
        time.sleep(0.5)
    raise TimeoutError(f"no index after {WAIT_S:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args().run_dir.resolve()
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None) or parser.error("no Chromium on PATH")
    take_picture(browser, (run_dir / "report.html").as_uri(), DOCS / "report.png", 1100)
    words = [sys.executable, str(DOCS.parent / "launch.py"), "task=view", f"run_dir={run_dir}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as viewer:
        try:
            assert viewer.stdout is not None
            (address, token), *_ = re.findall(r"(http://\S+)/\?(\S+)", viewer.stdout.readline())
            await_index(address, run_dir.name, token)
            group = urlencode({"group": find_group(run_dir)})
            take_picture(browser, f"{address}/run/{run_dir.name}?{token}", DOCS / "viewer_run.png", 1500)
            take_picture(browser, f"{address}/group/{run_dir.name}?{group}&{token}", DOCS / "viewer_group.png", 1100)
        finally:
            viewer.terminate()


if __name__ == "__main__":
    main()
