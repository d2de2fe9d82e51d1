"""Starting a server, with a substitute for SGLang: real processes, its flags, its key, its end with this process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.sglang.server import SglangServer, SglangStart, make_arguments, make_environment
from grmpipe.models.settings import SglangConfig

# Answers /health, and /server_info to who has its key; shows that key in its log as SGLang does, has a child, and takes
# --crash, --mute and --odd.
STAND_IN = """
import argparse, http.server, subprocess, sys, time
parser = argparse.ArgumentParser()
for flag in ("--config", "--host", "--port", "--model-path"):
    parser.add_argument(flag)
for flag in ("--crash", "--mute"):
    parser.add_argument(flag, action="store_true")
args, rest = parser.parse_known_args()
if "--odd" in rest:
    parser.error("unrecognized arguments: --odd")
key = open(args.config).read()
print("server_args", key, *rest, flush=True)
if args.crash:
    sys.exit("no kernel image is available")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
if args.mute:
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        knows_key = self.headers["Authorization"] == "Bearer " + key.split()[-1]
        self.send_response(200)
        self.end_headers()
        if self.path == "/server_info" and knows_key:
            self.wfile.write(b'{"model_path": "/models/m", "max_total_num_tokens": 81920, "internal_states": [{}]}')
    def log_message(self, *args):
        pass
http.server.HTTPServer((args.host, int(args.port)), Handler).serve_forever()
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter whose sglang is the substitute."""
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(STAND_IN, encoding="utf-8")
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n', encoding="utf-8")
    wrapper.chmod(0o755)
    return str(wrapper)


def start_of(python: str = "", device: str = "cpu", *, sleeps: bool = False, **options: Any) -> SglangStart:
    config = {"python": python, "max_batch_rows": 8, **options}
    spec = EngineSpec(path="/models/m", role="policy", device=device, seed=3, sleeps=sleeps)
    return SglangStart(spec=spec, config=SglangConfig(**config), context_tokens=128)


def flags_of(start: SglangStart) -> dict[str, str]:
    """Flag -> its value."""
    flags: dict[str, str] = {}
    for part in make_arguments(start):
        if part.startswith("--"):
            name = part.removeprefix("--")
            flags[name] = ""
        else:
            flags[name] = f"{flags[name]} {part}".strip()
    return flags


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(done: Any) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def child_in(log: str) -> int:
    return int(log.split("child ")[1].split()[0])


def test_a_server_answers_with_its_key_in_no_command_line_and_no_log(python: str) -> None:
    server = SglangServer(start_of(python))
    try:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.url.startswith("http://127.0.0.1:")
        lines = Path(f"/proc/{server.process_id}/cmdline").read_bytes().split(b"\0")
        assert b"sglang.launch_server" in lines
        assert server.key.encode() not in b" ".join(lines)
        log = server.log_path.read_text()
        assert "api-key: ***" in log and server.key not in log
        assert re.fullmatch(r"SGLang started in \d+ s: keys and values of 81,920 tokens", server.started)
        assert [path.name for path in server.log_path.parent.iterdir()] == ["server.log"]  # the key's file is gone
        assert server.log_path.parent.stat().st_mode & 0o077 == 0
    finally:
        server.forget()
    assert not server.log_path.parent.exists()


def test_a_server_that_cannot_be_started_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ValueError, match="can't be run"):
        SglangServer(start_of("/nowhere/python"))
    assert not list(tmp_path.iterdir())


def test_two_servers_have_two_keys_and_two_ports(python: str) -> None:
    first, second = SglangServer(start_of(python)), SglangServer(start_of(python))
    first.forget()
    second.forget()
    assert first.key != second.key and first.url != second.url


def test_closing_ends_the_servers_children_too(python: str) -> None:
    server = SglangServer(start_of(python))
    child = child_in(server.log_path.read_text())
    assert alive(child)
    server.close()
    wait_until(lambda: not alive(child))
    assert not alive(server.process_id)
    server.forget()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_dies_with_the_process_that_started_it(python: str, how: signal.Signals) -> None:
    program = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[4])!r})
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.sglang.server import SglangServer, SglangStart
from grmpipe.models.settings import SglangConfig
spec = EngineSpec(path="m", role="policy")
server = SglangServer(SglangStart(spec=spec, config=SglangConfig(python={python!r}), context_tokens=128))
print(server.process_id, flush=True)
time.sleep(600)
"""
    ours = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert ours.stdout is not None
    server = int(ours.stdout.readline())
    assert alive(server)
    ours.send_signal(how)
    ours.wait()
    wait_until(lambda: not alive(server))


def test_a_crash_at_the_start_shows_the_last_lines_and_where_the_log_is(python: str) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)ended with 1\. Its log is /.*server\.log.*no kernel image") as caught:
        SglangServer(start_of(python, options={"crash": True}))
    assert "api-key: ***" in str(caught.value)


def test_a_flag_that_sglang_does_not_know_is_shown_in_its_own_words(python: str) -> None:
    with pytest.raises(ValueError, match=r"engine\.sglang\.options: .*unrecognized arguments: --odd"):
        SglangServer(start_of(python, options={"odd": 1}))


def test_a_server_that_never_answers_names_the_limit_and_is_ended(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grmpipe.models.engines.sglang.server.START_S", 2.0)
    with pytest.raises(RuntimeError, match=r"(?s)SGLang didn't answer within 2 s of its start.*child") as caught:
        SglangServer(start_of(python, options={"mute": True}))
    wait_until(lambda: not alive(child_in(str(caught.value))))


def test_an_interpreter_that_is_not_there_names_its_key() -> None:
    with pytest.raises(ValueError, match=r"engine\.sglang\.python: '/nowhere/python'"):
        SglangServer(start_of("/nowhere/python"))


def test_flags_follow_from_the_typed_options() -> None:
    flags = flags_of(start_of(sleeps=True, mem_fraction=0.5))
    expected = {
        "model-path": "/models/m", "dtype": "float32", "device": "cpu", "random-seed": "3", "weight-version": "0",
        "max-running-requests": "8", "mem-fraction-static": "0.5", "tp-size": "1", "enable-memory-saver": "",
        "enable-weights-cpu-backup": "", "enable-deterministic-inference": "", "attention-backend": "torch_native",
    }  # fmt: skip
    assert expected.items() <= flags.items()
    assert int(flags["context-length"]) >= 128
    assert "enable-memory-saver" not in flags_of(start_of())
    assert "attention-backend" not in flags_of(start_of(device="cuda"))


FLAG = "enable-deterministic-inference"


@pytest.mark.parametrize(
    ("device", "typed", "expected"), [("cpu", {}, True), ("cuda", {}, False), ("cuda", {FLAG: True}, True)]
)
def test_sampling_by_the_requests_own_seeds_is_asked_for_on_gpus(
    device: str, typed: dict[str, bool], expected: bool
) -> None:
    assert (FLAG in flags_of(start_of(device=device, options=typed))) == expected


def test_options_pass_through_and_may_change_what_we_only_prefer() -> None:
    options = {
        "enable_deterministic_inference": False, "--page-size": 16, "cuda-graph-bs-decode": [1, 2],
        "json_model_override_args": {"x": 1}, "chunked-prefill-size": None,
    }  # fmt: skip
    flags = flags_of(start_of(options=options))
    assert "enable-deterministic-inference" not in flags and "chunked-prefill-size" not in flags
    passed = (flags["page-size"], flags["cuda-graph-bs-decode"], flags["json-model-override-args"])
    assert passed == ("16", "1 2", '{"x": 1}')


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("port", "remove it"),
        ("pp_size", "it follows from the placement"),
        ("nnodes", "a server is on one machine"),
        ("api_key", "remove it"),
        ("--context-length", r"engine\.sglang\.max_context_tokens"),
        ("tp_size", "the placement"),
    ],
)
def test_server_options_that_the_run_sets_itself_are_refused_with_the_key_to_set(option: str, instead: str) -> None:
    with pytest.raises(ValueError, match=rf"engine\.sglang\.options: '{option}' .*{instead}"):
        make_arguments(start_of(options={option: 1}))


def test_speculation_by_ngrams_is_a_flag_of_a_server_on_a_gpu() -> None:
    spec = EngineSpec(path="m", role="grm", device="cuda", speculation="ngram")
    arguments = make_arguments(SglangStart(spec=spec, config=SglangConfig(), context_tokens=64))
    assert arguments[arguments.index("--speculative-algorithm") + 1] == "NGRAM"


def test_another_interpreter_does_not_find_our_packages() -> None:
    ours = {**os.environ, "PYTHONPATH": "/ours", "PYTHONHOME": "/home", "CUDA_VISIBLE_DEVICES": "1"}
    environment = make_environment(start_of("/theirs/bin/python"), ours)
    assert "PYTHONPATH" not in environment and "PYTHONHOME" not in environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in make_environment(start_of(device="cuda"), ours)
    assert make_environment(start_of(), ours)["PYTHONPATH"] == "/ours"
