"""Costs and savings of swapping an engine's weights: `OMP_NUM_THREADS=1 python benchmarks/swapping.py`. Needs vLLM.

Two random models of one architecture (Qwen3, float32) on vLLM for CPUs: `policy` and `grm`.

- started: a separate engine, from the first import to the first token; and its memory (proportional share).
- read: the other model's files by vLLM's loader, as for a frozen GRM; they are in the page cache.
- pushed: the other model's tensors from shared memory in buckets of 64 MB, hashed on both ends, as for a policy.
- copied: the same bytes, host to host, by one thread: the least cost of waking a sleeping engine if its bus is as
  fast as this memory. vLLM for CPUs can't sleep.

Each is the median of --repeats, paused to resumed. Writes benchmarks/swapping.md.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from models.engines.engine_kind import EngineSpec
from models.engines.vllm.vllm_engine import VllmEngine
from models.lm.causal_lm import load_causal_lm
from models.settings import VllmConfig
from models.tiny.resolve import resolve_model
from models.types import ModelFiles, RequestContext, SamplingParams, WeightBucket
from models.weights.sending import open_transport
from models.weights.weight_stream import WeightStream

OUTPUT = Path(__file__).with_suffix(".md")
BUCKET_BYTES = 64 << 20
KV_CACHE_MB = 128
ABOUT = """# One engine that swaps weights

Two random Qwen3 models of one architecture, float32, on vLLM for CPUs, one thread. Medians, from paused to resumed.
The machine was shared: compare within a row.

`OMP_NUM_THREADS=1 python benchmarks/swapping.py`"""
HEAD = """| parameters | weights | started | its memory | read | pushed | copied | read at |
|---|---|---|---|---|---|---|---|"""
READING = """- started, its memory: a separate engine, from its first import to its first token. One engine for both
  roles saves that on every slot.
- read: the other model's files by vLLM's own loader, from the page cache: the way a frozen GRM's weights return.
- pushed: its tensors from shared memory, hashed on both ends: the way a policy's weights return.
- copied: the same bytes, host to host: the lower bound of waking a sleeping engine if its bus is as fast as this
  memory. vLLM for CPUs can't sleep, so waking itself was not measured."""


@dataclass(frozen=True)
class Measured:
    """The measurements of one size: seconds, and GB of an engine's processes."""

    num_parameters: int
    started_s: float
    engine_gb: float
    read_s: float
    pushed_s: float
    copied_s: float

    def row(self) -> str:
        gb = self.num_parameters * 4 / 1e9
        cells = [f"{self.num_parameters / 1e6:.0f} M", f"{gb:.2f} GB"]
        cells += [f"{self.started_s:.1f} s", f"{self.engine_gb:.2f} GB"]
        cells += [f"{seconds:.2f} s" for seconds in (self.read_s, self.pushed_s, self.copied_s)]
        return f"| {' | '.join(cells)} | {gb / self.read_s:.2f} GB/s |"


def make_model(path: Path, seed: int, layers: int, hidden: int) -> int:
    """Write a checkpoint. Returns its number of parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=32_000, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, head_dim=64,
        max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(resolve_model("tiny://policy")).save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


async def measure(folder: Path, layers: int, hidden: int, repeats: int) -> Measured:
    paths = {name: folder / name for name in ("policy", "grm")}
    num_parameters = make_model(paths["policy"], 0, layers, hidden)
    make_model(paths["grm"], 1, layers, hidden)
    began_s = time.perf_counter()
    engine = VllmEngine(EngineSpec(path=str(paths["grm"]), role="grm"), VllmConfig(kv_cache_mb=KV_CACHE_MB))
    context = RequestContext(request_id="first", group_id="g", role="grm")
    await engine.generate((5, 6, 7), SamplingParams(max_new_tokens=1), context)
    started_s = time.perf_counter() - began_s
    engine_gb = memory_gb(engine.process_ids())
    learner = load_causal_lm(str(paths["policy"]))
    stream = WeightStream(learner, "float32", BUCKET_BYTES)
    sender = open_transport("shared_memory", "float32", torch.device("cpu"), "")

    async def read() -> None:
        await engine.load_bucket(WeightBucket(tensors=(), payload=ModelFiles(path=str(paths["grm"]))))

    async def push() -> None:
        for index in range(stream.num_buckets):
            await engine.load_bucket(sender.post(index, stream.unsharded(index)))

    copies = [torch.empty_like(parameter) for parameter in learner.parameters()]

    async def copy() -> None:
        for target, source in zip(copies, learner.parameters(), strict=True):
            target.copy_(source.detach())

    try:
        pushed_s = await timed(lambda: swapped(engine, push), repeats)
        read_s = await timed(lambda: swapped(engine, read), repeats)
        copied_s = await timed(copy, repeats)
    finally:
        engine.close()
        sender.close()
    return Measured(num_parameters, started_s, engine_gb, read_s, pushed_s, copied_s)


async def swapped(engine: VllmEngine, load: Callable[[], Awaitable[None]]) -> None:
    await engine.pause()
    await engine.begin_weights()
    await load()
    await engine.commit_weights(0)
    await engine.resume()


async def timed(work: Callable[[], Awaitable[None]], repeats: int) -> float:
    """Median seconds; the first time touches new memory and isn't counted."""
    seconds = []
    for _ in range(repeats + 1):
        began_s = time.perf_counter()
        await work()
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds[1:])


def memory_gb(process_ids: list[int]) -> float:
    """The memory of processes, shared parts divided evenly."""
    return sum(psutil.Process(process_id).memory_full_info().pss for process_id in process_ids) / 1e9


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    options.add_argument("--shapes", nargs="+", default=["8x512", "16x1024"], help="layers x hidden size")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--out", type=Path, default=OUTPUT)
    asked = options.parse_args()
    rows = []
    for shape in asked.shapes:
        layers, hidden = map(int, shape.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            rows.append(asyncio.run(measure(Path(folder), layers, hidden, asked.repeats)).row())
        print(rows[-1], flush=True)
    asked.out.write_text(f"{ABOUT}\n\n{HEAD}\n" + "\n".join(rows) + f"\n\n{READING}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
