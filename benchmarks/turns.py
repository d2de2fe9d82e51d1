"""The cost of context switches: embedded engines on the cores of this machine, each in its own process.

    OMP_NUM_THREADS=1 python benchmarks/turns.py     # a minute, on a machine that does nothing else

The figures behind grmpipe.capacity.shared_cores.CONTEXT_SWITCH_COST. Writes benchmarks/turns.md.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import torch

from grmpipe.capacity.shared_cores import CONTEXT_SWITCH_COST, shares
from models.engines.embedded.embedded_engine import EmbeddedEngine
from models.engines.engine_kind import EngineSpec
from models.settings import EmbeddedConfig
from models.tiny.resolve import resolve_model
from models.types import RequestContext, SamplingParams

ROWS, NEW_TOKENS, PROMPT = 128, 48, tuple(range(10, 60))
SECONDS = 5.0


REPORT = Path(__file__).with_suffix(".md")
HEADING = """# Processes that share cores

`OMP_NUM_THREADS=1 python benchmarks/turns.py`: embedded engines of the tiny GRM, each in a separate process, on
{cores} cores: batches of {rows} rows x {new_tokens} tokens, per second, of all engines together. The last columns
compare that with as many engines as cores, and with the value that simulations and profiles use
(`grmpipe.capacity.shared_cores.CONTEXT_SWITCH_COST` = {context_switch_cost}).

| engines | batches per second | over {cores} engines | model |
|---|---|---|---|
"""


def main() -> None:
    cores = os.cpu_count() or 1
    rates = {count: together(count) for count in range(1, cores + 4)}
    text = HEADING.format(cores=cores, rows=ROWS, new_tokens=NEW_TOKENS, context_switch_cost=CONTEXT_SWITCH_COST)
    for count, rate in rates.items():
        reckoned = float(count * shares(np.array(count), cores, CONTEXT_SWITCH_COST) / cores)
        text += f"| {count} | {rate:.2f} | {rate / rates[cores]:.2f} | {reckoned:.2f} |\n"
    REPORT.write_text(text, encoding="utf-8")
    print(text)


def together(count: int) -> float:
    """Batches per second of this many engines at once."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(count)
    with context.Pool(count, initializer=share, initargs=(start,)) as pool:
        return sum(pool.map(batches_a_second, range(count), chunksize=1))


BARRIER: list = []  # per process: workers of a pool can only inherit it


def share(start: object) -> None:
    BARRIER.append(start)


def batches_a_second(rank: int) -> float:
    torch.set_num_threads(1)
    return asyncio.run(decode(rank))


async def decode(rank: int) -> float:
    engine = EmbeddedEngine(EngineSpec(path=resolve_model("tiny://grm"), role="grm", seed=rank), EmbeddedConfig())
    await batch(engine, -1)  # compiles and allocates
    BARRIER[0].wait()
    began_s, done = time.perf_counter(), 0
    while (taken_s := time.perf_counter() - began_s) < SECONDS:
        await batch(engine, done)
        done += 1
    engine.close()
    return done / taken_s


async def batch(engine: EmbeddedEngine, number: int) -> None:
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=1.0)
    await asyncio.gather(
        *(
            engine.generate(PROMPT, params, RequestContext(request_id=f"{number}/{row}", group_id=f"{row}", role="grm"))
            for row in range(ROWS)
        )
    )


if __name__ == "__main__":
    main()
