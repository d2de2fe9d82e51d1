"""The cost of a call to an engine, over Ray and over the socket: `python benchmarks/calls.py`. Takes a minute.

The engine answers at once, in its own actor. Calls are sequential and alternate between both ways: seconds from call to
answer, and CPU seconds of the driver's and the engine's process with all threads. Writes benchmarks/calls.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from models.engines.simulated.simulated_engine import Script, SimulatedEngine
from models.types import Engine
from scheduler.placement import ClusterConfig, PlacementConfig, PoolConfig, RoleConfig, place
from scheduler.processes.cpu_time import cpu_seconds
from scheduler.processes.ray_cluster import RayCluster
from scheduler.processes.unix_rpc import RpcClient

OUTPUT = Path(__file__).with_suffix(".md")
ABOUT = """# Cost of a call to an engine

`python benchmarks/calls.py`: an engine that answers at once, {tokens} token ids in and as many log-probs out;
medians of {rounds} rounds of {calls} calls, both transports alternating. CPU counts all threads of a process.

| | call to answer, ms | CPU of the driver, ms | CPU of the engine's process, ms |
|---|---|---|---|"""
AFTER = """
Through the socket a call takes {latency:.0%} of the time and {cpu:.0%} of the CPU. Requests and answers of a step of
the quickstart are about 70 calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one call, in seconds."""

    latency_s: float
    driver_cpu_s: float
    engine_cpu_s: float

    @property
    def cpu_s(self) -> float:
        return self.driver_cpu_s + self.engine_cpu_s

    @staticmethod
    def median(costs: Sequence[Cost]) -> Cost:
        return Cost(
            latency_s=statistics.median(cost.latency_s for cost in costs),
            driver_cpu_s=statistics.median(cost.driver_cpu_s for cost in costs),
            engine_cpu_s=statistics.median(cost.engine_cpu_s for cost in costs),
        )

    def row(self, name: str) -> str:
        cells = (self.latency_s, self.driver_cpu_s, self.engine_cpu_s)
        return f"| {name} | " + " | ".join(f"{1e3 * cell:.2f}" for cell in cells) + " |"


def make_engine(rank: int) -> Engine:
    return SimulatedEngine("policy", lambda ids, params, context: Script(token_ids=(1,), text=""))


async def cost(engine: Engine, process_id: int, token_ids: Sequence[int], num_calls: int) -> Cost:
    def cpu_s() -> tuple[float, float]:
        return cpu_seconds({os.getpid()}), cpu_seconds({process_id})

    before, began_s = cpu_s(), time.perf_counter()
    for _ in range(num_calls):
        await engine.score(token_ids)
    latency_s = time.perf_counter() - began_s
    driver_s, engine_s = (after - then for after, then in zip(cpu_s(), before, strict=True))
    return Cost(latency_s=latency_s / num_calls, driver_cpu_s=driver_s / num_calls, engine_cpu_s=engine_s / num_calls)


async def measure(rounds: int, num_calls: int, num_tokens: int) -> dict[str, Cost]:
    config = PlacementConfig(pools={"all": PoolConfig(slots=1)}, roles={"policy": RoleConfig(pool="all")})
    cluster = await RayCluster.start(ClusterConfig(), place(config, ("policy",)))
    try:
        (engine,) = (await cluster.start_engines("policy", make_engine)).values()
        (process_id,) = cluster.process_ids("policy")
        actor = engine._host  # type: ignore[attr-defined]  # a user has no choice between the two
        ways: dict[str, RpcClient | None] = {"Ray": None, "socket": actor._line}
        found: dict[str, list[Cost]] = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, line in ways.items():
                actor._line = line
                found[name].append(await cost(engine, process_id, range(num_tokens), num_calls))
        return {name: Cost.median(costs[1:]) for name, costs in found.items()}
    finally:
        await cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    costs = asyncio.run(measure(args.rounds, args.calls, args.tokens))
    by_ray, by_socket = costs["Ray"], costs["socket"]
    after = AFTER.format(latency=by_socket.latency_s / by_ray.latency_s, cpu=by_socket.cpu_s / by_ray.cpu_s)
    about = ABOUT.format(tokens=args.tokens, rounds=args.rounds, calls=args.calls)
    text = "\n".join([about, *(found.row(name) for name, found in costs.items()), after]) + "\n"
    OUTPUT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
