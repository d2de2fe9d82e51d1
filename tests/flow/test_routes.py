"""The routes of the pages, followed from an empty folder: files are written, scripts and commands run as pasted.

Two things differ: `...` of a key and the address of an endpoint are those of a server of the test, and a service has a
free port. What needs a model of the user's (`/models/..`), a browser or a package index is left out. A command in a
checkout, `python launch.py`, is `grmpipe`.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(py|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.py)\n")
LEFT_OUT = re.compile(r"/models/|task=view|pip install|make ")

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]


class Endpoint(BaseHTTPRequestHandler):
    """Scores every answer, a digit of its prompt's length."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = f"It is fine.\nScore: {1 + len(asked['messages'][-1]['content']) % 10}"
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 200, "completion_tokens": 10, "total_tokens": 210}
        body = json.dumps({"model": asked["model"], "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()


class Route:
    """A page in a user's empty folder."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.env = os.environ | {"PATH": commands, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "k"}
        self.said = ""
        self.services: list[subprocess.Popen[str]] = []

    def follow(self, page: str) -> None:
        for language, block in BLOCK.findall((DOCS / page).read_text(encoding="utf-8")):
            if language == "bash":
                for command in re.sub(r"\\\n\s*", "", block).splitlines():
                    self.type(command.partition("   #")[0].strip())
            elif name := FILE.match(block):
                (self.folder / name[1]).write_text(block, encoding="utf-8")
            else:
                self.run([sys.executable, "-c", block.replace(":8710", f":{self.port}")])

    def type(self, command: str) -> None:
        if "annotate.select=" in command:
            self.annotate("labels.csv", Path("runs/weak/annotations.jsonl"))
        if not command or LEFT_OUT.search(command) or command.startswith("export "):
            return
        command = command.replace("https://api.openai.com/v1", self.address).replace("python launch.py", "grmpipe")
        if "task=serve" in command:
            self.serve(f"{command} serve.port={self.port}")
        else:
            self.run(["bash", "-c", command])

    def annotate(self, labels: str, path: Path) -> None:
        """What a person would say of the answers on the viewer's pages."""
        with (self.folder / labels).open(newline="") as file:
            rows = [
                {"prompt": row["question"], "response": row["answer"], "right": row["ok"] == "yes"}
                for row in csv.DictReader(file)
            ]
        (self.folder / path).write_text("".join(json.dumps(row) + "\n" for row in rows[:60]), encoding="utf-8")

    def run(self, words: list[str]) -> None:
        done = subprocess.run(
            words, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=1500, check=False
        )
        assert done.returncode == 0, f"{words[-1]}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        self.said += done.stdout

    def serve(self, command: str) -> None:
        service = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=self.folder, env=self.env, text=True)
        self.services.append(service)
        ends_s = time.monotonic() + 240
        while time.monotonic() < ends_s and service.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health") as answer:
                assert answer.status == 200
                return
            time.sleep(0.5)
        pytest.fail("the service didn't start")

    def summary(self, run_dir: str) -> dict:
        return json.loads((self.folder / run_dir / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture
def route(tmp_path: Path) -> Iterator[Route]:
    folder = tmp_path / "empty"
    folder.mkdir()
    with endpoint() as address:
        followed = Route(folder, address)
        yield followed
        for service in followed.services:
            service.terminate()
            service.wait(60)


def test_a_user_of_trl_trains_with_their_reward_function_and_asks_a_judge(route: Route) -> None:
    route.follow("from_trl.md")
    assert route.summary("runs/quickstart/latest")["status"] == "completed"
    assert re.search(r"^\[1\.0, 0(?:\.\d+)?\]$", route.said, re.MULTILINE), "the right answer is the better one"


def test_a_user_of_verl_trains_with_their_files_judges_rollouts_again_and_asks_a_judge(route: Route) -> None:
    route.follow("from_verl.md")
    assert route.summary("runs/quickstart/latest")["status"] == "completed"
    (found,) = (route.folder / "runs/verl/rejudged").glob("*/summary.json")
    assert json.loads(found.read_text())["status"] == "completed"
    assert "'reward': 1.0" in route.said


def test_an_outside_judge_is_priced_measured_and_trained_with_within_its_budget(route: Route) -> None:
    route.follow("outside_judge.md")
    assert (route.folder / "runs/judge/figures.txt").exists()
    summary = route.summary("runs/bounded")
    assert summary["status"] == "completed" and summary["steps"] == 6
    assert 0 < summary["judging"]["spending"]["cost_usd"] <= 1


def test_a_judge_is_measured_compared_calibrated_trained_and_measured_again(route: Route) -> None:
    route.follow("judge_workbench.md")
    again = route.summary("runs/again")["eval"]["final"]
    assert "difference" in again and again["accuracy"] > 0.5
    assert json.loads((route.folder / "runs/calibrated/calibration.json").read_text(encoding="utf-8"))
    assert (route.folder / "runs/probed/probes_held_out.jsonl").exists()
