"""Compares long episodes on the embedded engine with and without rows that are parked between turns.

    OMP_NUM_THREADS=1 python benchmarks/parked_rows.py     # two minutes

Several episodes of twenty turns at once on the tiny policy, whose environment answers at once: the same seeds, and so
the same tokens, both ways, alternating. Writes benchmarks/parked_rows.md.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from quickstart import busy_share_of_cores, commit_date, machine

from models.engines.embedded.embedded_engine import EmbeddedEngine
from models.engines.engine_kind import EngineSpec
from models.settings import EmbeddedConfig
from models.tiny.resolve import resolve_model
from models.types import Completion, RequestContext, SamplingParams

REPORT = Path(__file__).with_suffix(".md")
PROMPT, OBSERVATION, NEW_TOKENS = tuple(range(10, 50)), tuple(range(60, 72)), 10
PAIRS = 5
SHAPES = ((1, 20), (16, 20), (64, 20), (64, 4), (64, 1))  # episodes at once, turns
HEADING = """# Rows parked between turns

`OMP_NUM_THREADS=1 python benchmarks/parked_rows.py`: {machine}; code of {date}.
Other work on the cores, right before or after: {busy:.0%}. Episodes at once on one embedded engine of the tiny policy:
a prompt of {prompt} tokens, at most {new_tokens} sampled and {observed} observed tokens per turn. Medians of {pairs} alternating pairs; CPU
seconds of all turns. A single turn is measured as if another might follow, which a run of one turn never says.

| episodes | turns | tokens of an episode | prefilled over tokens: parked | not parked | CPU s: parked | not parked | times as fast (lowest to highest) | turns with the same tokens |
|---|---|---|---|---|---|---|---|---|
"""  # noqa: E501


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Some episodes. `tokens`: of all episodes, each counted once."""

    tokens: int
    prefilled: int
    sampled: tuple[Completion, ...]
    cpu_s: float
    wall_s: float


async def episode(engine: EmbeddedEngine, name: str, turns: int, parks: bool) -> tuple[int, list[Completion]]:
    """The tokens of an episode, and its completions. The first tokens differ: no two episodes share a prompt."""
    ids = (100 + int(name) % 300, 100 + int(name) // 300, *PROMPT)
    completions: list[Completion] = []
    for turn in range(turns):
        request_id = f"{name}/t{turn}"
        trajectory_id = name if parks else ""
        context = RequestContext(request_id=request_id, group_id=name, role="policy", trajectory_id=trajectory_id)
        params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=1.0, seed=1000 * int(name) + turn)
        completions.append(await engine.generate(ids, params, context))
        ids = (*ids, *completions[-1].token_ids, *OBSERVATION)
    return len(ids) - len(OBSERVATION), completions


async def play(engine: EmbeddedEngine, episodes: int, turns: int, parks: bool) -> Played:
    before = engine.stats().prefilled_tokens
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    played = await asyncio.gather(*(episode(engine, str(name), turns, parks) for name in range(episodes)))
    return Played(
        tokens=sum(length for length, _ in played),
        prefilled=engine.stats().prefilled_tokens - before,
        sampled=tuple(one for _, completions in played for one in completions),
        cpu_s=time.process_time() - cpu_s,
        wall_s=time.perf_counter() - wall_s,
    )


async def measure(episodes: int, turns: int) -> dict[bool, list[Played]]:
    """The same episodes with and without parking, each with an engine of its own."""
    path = resolve_model("tiny://policy")
    engines = {parks: EmbeddedEngine(EngineSpec(path=path, role="policy"), EmbeddedConfig()) for parks in (True, False)}
    rounds: dict[bool, list[Played]] = {True: [], False: []}
    for number in range(-1, PAIRS):  # the first round allocates
        for parks in (True, False)[:: 1 if number % 2 else -1]:
            await engines[parks].pause()
            await engines[parks].commit_weights(number + 1)  # a push: what was parked is dropped
            await engines[parks].resume()
            played = await play(engines[parks], episodes, turns, parks)
            if number >= 0:
                rounds[parks].append(played)
    for engine in engines.values():
        engine.close()
    return rounds


def line(episodes: int, turns: int, rounds: dict[bool, list[Played]]) -> str:
    kept, anew = (rounds[parks] for parks in (True, False))
    shares = " | ".join(f"{some[0].prefilled / some[0].tokens:.2f}" for some in (kept, anew))
    seconds = " | ".join(f"{statistics.median(one.cpu_s for one in some):.3f}" for some in (kept, anew))
    ratios = sorted(b.cpu_s / a.cpu_s for a, b in zip(kept, anew, strict=True))
    tokens = kept[0].tokens // episodes
    ends = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    equal = sum(a.token_ids == b.token_ids for a, b in zip(kept[0].sampled, anew[0].sampled, strict=True))
    same = f"{equal} of {len(kept[0].sampled)}"
    gain = f"{statistics.median(ratios):.2f} ({ends})"
    return f"| {episodes} | {turns} | {tokens} | {shares} | {seconds} | {gain} | {same} |"


def main() -> None:
    torch.set_num_threads(1)
    busy_before = busy_share_of_cores()
    lines = [line(*shape, asyncio.run(measure(*shape))) for shape in SHAPES]
    busy = max(busy_before, busy_share_of_cores())
    text = HEADING.format(
        machine=machine(),
        date=commit_date(),
        busy=busy,
        prompt=len(PROMPT) + 2,
        new_tokens=NEW_TOKENS,
        observed=len(OBSERVATION),
        pairs=PAIRS,
    )
    text += "\n".join([*lines, ""])
    REPORT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
