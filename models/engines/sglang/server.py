"""Starts an SGLang server: a process group that ends with this process."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.sglang.http_client import as_json, make_headers
from grmpipe.models.engines.sglang.sglang_adapters import make_lora_flags
from grmpipe.models.settings import SglangConfig

LAST_LINES = 15
POLL_S, ANSWER_S = 0.2, 10.0
START_S = 1800.0  # for a server to load the largest models from a slow disk; one that ends is noticed at once
KV_TOKENS_ON_A_CPU = 65_536  # otherwise SGLang takes a share of the machine's memory
DRAFT_TOKENS = 5  # verified in one pass, the next token included
SPARE_TOKENS = 8  # SGLang keeps a few of its window
FIRST_VERSION = "0"  # name of the weights that a server is started with

# The key that sets a flag, or empty: the run sets these flags itself.
FLAGS_OF_OURS = {
    "model-path": "policy.path (or grm.path)",
    "tokenizer-path": "policy.path (or grm.path)",
    "dtype": "policy.dtype (or grm.dtype)",
    "random-seed": "seed",
    "context-length": "engine.sglang.max_context_tokens",
    "max-running-requests": "engine.sglang.max_batch_rows",
    "mem-fraction-static": "engine.sglang.mem_fraction",
    "enable-memory-saver": "the placement",
    "tp-size": "the placement",
    "tensor-parallel-size": "the placement",
    **dict.fromkeys(("pp-size", "pipeline-parallel-size", "dp-size", "data-parallel-size"), "the placement"),
    **dict.fromkeys(("nnodes", "node-rank", "dist-init-addr"), "the placement: a server is on one machine"),
    "device": "the placement",
    "base-gpu-id": "the placement",
    **dict.fromkeys(("enable-lora", "max-lora-rank", "lora-target-modules"), "the models' lora blocks"),
    **dict.fromkeys(("lora-paths", "max-loaded-loras", "lora-strict-loading"), "the models' lora blocks"),
    **dict.fromkeys(("host", "port", "api-key", "admin-api-key", "config", "weight-version", "skip-tokenizer-init")),
}

# Dies when its parent dies in any way; a parent that is gone already is detected by its id.
BOOT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, "-m", "sglang.launch_server", *sys.argv[2:]])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangStart:
    """What follows for a server from the specification of an engine. context_tokens: prompt and new ones together."""

    spec: EngineSpec
    config: SglangConfig
    context_tokens: int


class SglangServer:
    """A server process. Blocks until it answers. Raises ValueError for flags that it doesn't know, RuntimeError
    otherwise. started: what its start found.

    The key is in a file that only this user can read, deleted once it was read: a command line is visible to all.
    """

    def __init__(self, start: SglangStart) -> None:
        self.started, self.url = "", f"http://127.0.0.1:{_free_port()}"
        self.key = secrets.token_hex(16)
        self._folder = Path(tempfile.mkdtemp(prefix="grmpipe-sglang-"))  # 0700
        self.log_path = self._folder / "server.log"
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(start,), name="sglang-log", daemon=True)
        config_file = self._folder / "key.yaml"
        config_file.write_text(f"api-key: {self.key}\n", encoding="utf-8")
        began_s = time.monotonic()
        self._thread.start()
        self._started.wait()
        try:
            if self._process is None:
                raise ValueError(f"engine.sglang.python: {_python(start.config)!r} can't be run")
            self._end = weakref.finalize(self, _kill, self._process)  # also at exit
            self._await_health()
            self.started = self._describe_start(time.monotonic() - began_s)
        except BaseException:
            self.close()
            if not self.log_path.exists() or not self.log_path.stat().st_size:  # the log is empty
                config_file.unlink(missing_ok=True)
                shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            config_file.unlink(missing_ok=True)

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    def post_mortem(self) -> str:
        """How it ended, if it did, and its last lines."""
        code = self._process.poll() if self._process is not None else None
        ended = f"; its process ended with {code}" if code is not None else ""
        return f"{ended}. Its log is {self.log_path}, and ends with:\n" + "\n".join(self._last_lines)

    def close(self) -> None:
        """End all its processes; the log is kept if it has an error."""
        if self._process is not None:
            _kill(self._process)
            self._thread.join(timeout=5)

    def forget(self) -> None:
        """Close, and delete the log too."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, start: SglangStart) -> None:
        """The thread that starts the process, which dies with its thread, and keeps its log."""
        command = [_python(start.config), "-c", BOOT, str(os.getpid()), "--config", str(self._folder / "key.yaml")]
        command += [*make_arguments(start), "--host", "127.0.0.1", "--port", self.url.rsplit(":", 1)[1]]
        try:
            self._process = subprocess.Popen(
                command,
                env=make_environment(start, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is handled here, and its children end with it
            )
        except OSError:
            return
        finally:
            self._started.set()
        assert self._process.stdout is not None
        with self.log_path.open("w", encoding="utf-8") as log:
            for line in self._process.stdout:
                text = line.decode(errors="replace").rstrip().replace(self.key, "***")
                self._last_lines.append(text[:400])
                print(text, file=log, flush=True)

    def _await_health(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_S
        with httpx.Client(timeout=ANSWER_S, trust_env=False) as client:
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    self._thread.join(timeout=5)
                    raise self._failure()
                try:
                    if client.get(f"{self.url}/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(POLL_S)
        raise RuntimeError(f"SGLang didn't answer within {START_S:g} s of its start{self.post_mortem()}")

    def _describe_start(self, took_s: float) -> str:
        """In a line; /server_info has what the scheduler found (get_init_info in managers/scheduler.py of 0.5.23)."""
        try:
            with httpx.Client(timeout=ANSWER_S, trust_env=False, headers=make_headers(self.key)) as client:
                tokens = as_json(client.get(f"{self.url}/server_info")).get("max_total_num_tokens")
        except httpx.HTTPError:  # whatever comes next finds out why
            tokens = None
        room = f": keys and values of {tokens:,} tokens" if isinstance(tokens, int) else ""
        return f"SGLang started in {took_s:.0f} s{room}"

    def _failure(self) -> Exception:
        """The failure; argparse names a wrong flag on its own line."""
        wrong = [line.partition("error: ")[2] for line in self._last_lines if ": error: " in line]
        if wrong:
            return ValueError(f"engine.sglang.options: SGLang refuses: {wrong[-1]}")
        return RuntimeError(f"SGLang didn't start{self.post_mortem()}")


def make_arguments(start: SglangStart) -> list[str]:
    """The command line without address and key. Raises ValueError for an option that the user may not set here."""
    config, spec = start.config, start.spec
    flags: dict[str, Any] = _defaults(start)
    for name, value in config.options.items():
        flag = name.lstrip("-").replace("_", "-")
        if flag in FLAGS_OF_OURS:
            instead = FLAGS_OF_OURS[flag]
            raise ValueError(
                f"engine.sglang.options: {name!r} is set by the run itself; "
                + (f"it follows from {instead}" if instead else "remove it")
            )
        flags[flag] = value
    flags |= {
        "model-path": spec.path,
        "dtype": spec.dtype,
        "device": spec.device,
        "random-seed": spec.seed % 2**31,
        "context-length": start.context_tokens + SPARE_TOKENS,
        "max-running-requests": config.max_batch_rows,
        "mem-fraction-static": config.mem_fraction,
        "tp-size": spec.num_gpus,
        "weight-version": FIRST_VERSION,
        "enable-memory-saver": spec.sleeps,
        "enable-weights-cpu-backup": spec.sleeps,  # without it they are lost after a sleep
    } | make_lora_flags(spec.path, spec.adapters)
    return [part for name, value in flags.items() for part in _argument(name, value)]


def make_environment(start: SglangStart, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the server: this one, without what would lead another interpreter to our packages."""
    result = dict(environment)
    if start.config.python and Path(start.config.python) != Path(sys.executable):
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            result.pop(name, None)
    result["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # for the spare tokens
    if start.spec.device == "cpu":
        result |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        result.setdefault("OMP_NUM_THREADS", "1")
    return result


def _defaults(start: SglangStart) -> dict[str, Any]:
    """Flags that we rely on, and a user may still change."""
    flags: dict[str, Any] = {
        # Without it SGLang ignores a request's seed; on GPUs it costs 25 to 45 % of the speed.
        "enable-deterministic-inference": start.spec.device == "cpu",
        "incremental-streaming-output": True,
        "enable-priority-scheduling": True,
        "schedule-low-priority-values-first": True,
        "disable-priority-preemption": True,
    }
    if start.spec.speculation == "ngram":
        flags |= {"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": DRAFT_TOKENS}
    if start.spec.adapters:  # the last version and the next one of each, and the base: more wait for a free place
        flags["max-loras-per-batch"] = 2 * len(start.spec.adapters) + 1
    if start.spec.device == "cpu":
        rows = start.config.max_batch_rows * (start.context_tokens + SPARE_TOKENS)
        flags |= {
            "attention-backend": "torch_native",
            "sampling-backend": "pytorch",
            "disable-overlap-schedule": True,
            "cuda-graph-backend-decode": "disabled",
            "cuda-graph-backend-prefill": "disabled",
            "max-total-tokens": max(min(rows, KV_TOKENS_ON_A_CPU), start.context_tokens + SPARE_TOKENS),
        }
    return flags


def _argument(name: str, value: Any) -> Iterator[str]:
    if value is False or value is None:
        return
    yield f"--{name}"
    if isinstance(value, dict):
        yield json.dumps(value)
    elif isinstance(value, (list, tuple)):
        yield from (str(item) for item in value)
    elif value is not True:
        yield str(value)


def _python(config: SglangConfig) -> str:
    return config.python or sys.executable


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
