"""What a driver's requests cost with 4, 64 and 1,024 engines, over both kinds of connection; writes many_engines.md.

    OMP_NUM_THREADS=1 python benchmarks/many_engines.py

The driver's side is the real one: router, remote engines, their channels. The engines only take time, and are spread
over 8 processes at most, with a connection each. Every engine has 4 requests in flight, of 200 tokens, and answers each
with 256 tokens. CPU is that of the driver's process; the kinds of connection take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine
from grmpipe.models.types import RequestContext, SamplingParams, WeightBucket
from grmpipe.scheduler.processes.engine_host import EngineHost
from grmpipe.scheduler.processes.remote_engine import RemoteEngine
from grmpipe.scheduler.processes.rpc import RpcClient
from grmpipe.scheduler.routing.router import Router

PAGE = Path(__file__).with_suffix(".md")
ENGINES = (4, 64, 1024)
KINDS = ("socket", "network")
PROCESSES, IN_FLIGHT, ROUNDS = 8, 4, 3
PROMPT, ANSWER = tuple(range(200)), tuple(range(256))
KEY = b"of this benchmark alone"
HEAD = """# A driver with many engines

`OMP_NUM_THREADS=1 python benchmarks/many_engines.py`, {machine}

Milliseconds of the driver's CPU for a request, medians of {rounds} rounds, and calls to engines for each. Every engine
has {in_flight} requests in flight.

| engines | requests in a round | socket, ms | network, ms | network / socket | calls a request |
|---|---|---|---|---|---|
"""


class Hosts:
    """The engines of one process, each on a socket and a port."""

    def __init__(self, folder: Path, first: int, last: int) -> None:
        self._folder, self._places = folder, range(first, last)

    async def serve(self) -> None:
        author = lambda ids, params, context: Script(token_ids=ANSWER, text="x" * 1000)  # noqa: E731
        kept, ports = [], []
        for place in self._places:
            for kind in KINDS:
                host = EngineHost()
                await host.start(lambda rank: SimulatedEngine("policy", author, tokens_per_s=2560), 0)
                if kind == "socket":
                    await host.open_rpc(str(self._folder / f"{place}"))
                else:
                    ports.append(await host._line.listen_to_network("127.0.0.1", KEY))
                kept.append(host)
        print(*ports, flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the driver is done


@dataclass
class Line:
    """A remote engine's channel, and how often it was used."""

    client: RpcClient
    num_calls: int = 0

    async def call(self, method: str, *args: object) -> object:
        self.num_calls += 1
        return await self.client.call(method, *args)

    def share(self, bucket: WeightBucket) -> object:
        return bucket


@asynccontextmanager
async def open_lines(count: int) -> AsyncIterator[dict[str, list[Line]]]:
    """The channels to so many engines, by kind."""
    dialect, each = EngineHost()._dialect, -(-count // min(PROCESSES, count))
    with tempfile.TemporaryDirectory() as folder:
        processes, lines = [], {kind: list[Line]() for kind in KINDS}
        for first in range(0, count, each):
            command = [sys.executable, __file__, "--hosts", folder, str(first), str(min(first + each, count))]
            start = subprocess.Popen  # before anything else runs here
            processes.append(start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        for first, process in zip(range(0, count, each), processes, strict=True):
            assert process.stdout is not None
            for place, port in enumerate((await asyncio.to_thread(process.stdout.readline)).split(), first):
                path = str(Path(folder) / f"{place}")
                lines["socket"].append(Line(await RpcClient.connect(path, f"e{place}", dialect)))
                lines["network"].append(
                    Line(await RpcClient.connect_over_network("127.0.0.1", int(port), KEY, f"e{place}", dialect))
                )
        yield lines
        for line in [*lines["socket"], *lines["network"]]:
            line.client.close()
        for process in processes:
            process.kill()
            process.wait()


async def measure(lines: list[Line], requests: int) -> tuple[float, float]:
    """Milliseconds of CPU, and calls, for each request."""
    router = Router("policy", {f"policy-{place}": RemoteEngine(line) for place, line in enumerate(lines)})
    params = SamplingParams(max_new_tokens=len(ANSWER))

    async def ask(number: int) -> None:
        context = RequestContext(request_id=str(number), group_id=str(number), role="policy")
        await router.generate(PROMPT, params, context)

    gc.collect()
    before, cpu_s = sum(line.num_calls for line in lines), time.process_time()
    await asyncio.gather(*map(ask, range(requests)))
    cpu_s = time.process_time() - cpu_s
    return 1000 * cpu_s / requests, (sum(line.num_calls for line in lines) - before) / requests


async def compare(count: int) -> str:
    requests = count * IN_FLIGHT
    turns = max(1, 1024 // requests)  # of few engines many, so that a round is long enough
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    calls = 0.0
    async with open_lines(count) as lines:
        for number in range(1 + ROUNDS):
            for kind in KINDS[:: 1 if number % 2 else -1]:
                rounds = [await measure(lines[kind], requests) for _ in range(turns)]
                if number:  # the first one warms up
                    found[kind].append(statistics.fmean(ms for ms, _ in rounds))
                    calls = statistics.fmean(each for _, each in rounds)
    socket, network = (statistics.median(found[kind]) for kind in KINDS)
    return f"| {count:,} | {requests * turns:,} | {socket:.3f} | {network:.3f} | {network / socket:.2f} | {calls:.2f} |"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--hosts", nargs=3, metavar=("FOLDER", "FIRST", "LAST"), help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.hosts is not None:
        asyncio.run(Hosts(Path(args.hosts[0]), int(args.hosts[1]), int(args.hosts[2])).serve())
        return
    rows = []
    for count in ENGINES:
        rows.append(asyncio.run(compare(count)))
        print(rows[-1], flush=True)
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    head = HEAD.format(machine=machine, rounds=ROUNDS, in_flight=IN_FLIGHT)
    PAGE.write_text(head + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
