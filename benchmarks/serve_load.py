"""CPU of a judge's service beside that of a bare proxy: an endpoint that takes 5 s, one judgement a question.

The client, the endpoint, and what is measured are processes of their own. Writes serve_load.md.
"""

import argparse
import asyncio
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

HERE = Path(__file__).parent
PROMPT = "Natalia sold 48 clips in April and half as many in May. How many did she sell in all?"
RESPONSE = "In May she sold 48 / 2 = {number} clips, so she sold 72 in all. " * 6
JUDGED = "The sum is right. It was checked step by step. " * 8 + "\nScore: 7"
LATE_S = 60.0  # for the last verdicts


async def serve_endpoint(port: int, takes_s: float) -> None:
    """A chat endpoint whose answers take a while."""

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(takes_s)
        message = {"role": "assistant", "content": JUDGED}
        return web.json_response({
            "id": "x", "object": "chat.completion", "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 400, "completion_tokens": 100, "total_tokens": 500},
        })  # fmt: skip

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    await serve(app, port)


async def serve_proxy(port: int, endpoint: int) -> None:
    """What the service is compared with: it sends a body on and returns the answer."""
    async with ClientSession(connector=TCPConnector(limit=0)) as session:

        async def send_on(request: web.Request) -> web.Response:
            body = {"model": "judge", "messages": [{"role": "user", "content": (await request.read()).decode()}]}
            async with session.post(f"http://127.0.0.1:{endpoint}/v1/chat/completions", json=body) as found:
                return web.Response(body=await found.read(), content_type="application/json")

        app = web.Application()
        app.router.add_post("/v1/judge", send_on)
        await serve(app, port)


async def serve(app: web.Application, port: int) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    print(f"http://127.0.0.1:{port}/", flush=True)
    await asyncio.Event().wait()


async def ask(url: str, count: int, per_s: float) -> tuple[int, float]:
    """How many of `count` questions, sent `per_s` a second, got a verdict, and in how many seconds."""
    connector = TCPConnector(limit=0)
    async with ClientSession(connector=connector, timeout=ClientTimeout(total=LATE_S)) as session:

        async def ask_one(number: int) -> bool:
            row = {"prompt": PROMPT, "response": RESPONSE.format(number=number)}
            async with session.post(f"{url}v1/judge", json=row) as answer:
                return answer.status == 200 and b'"failed"' not in await answer.read()

        began, tasks = time.monotonic(), []
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / per_s - time.monotonic()))
            tasks.append(asyncio.create_task(ask_one(number)))
        found = await asyncio.gather(*tasks)
        return sum(found), time.monotonic() - began


def cpu_s(process: subprocess.Popen[str]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(process: subprocess.Popen[str]) -> float:
    return int(Path(f"/proc/{process.pid}/statm").read_text(encoding="utf-8").split()[1]) * 4096 / 1e6


def start(command: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A process and the address that it prints."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
            return process, found[0]
    raise RuntimeError(f"{command} ended")


def measure(command: list[str], count: int, per_s: float, rounds: int) -> list[dict[str, float]]:
    """Of each round: CPU ms and seconds of a question, verdicts a second, memory afterwards. The first isn't told: it
    warms up.
    """
    process, url = start(command)
    try:
        rows = []
        for _ in range(rounds + 1):
            before = cpu_s(process)
            judged, took_s = asyncio.run(ask(url, count, per_s))
            rows.append({
                "judged": judged, "cpu_ms": (cpu_s(process) - before) / count * 1e3, "per_s": judged / took_s,
                "memory_mb": memory_mb(process),
            })  # fmt: skip
            print(command[-1], rows[-1], flush=True)
        return rows[1:]
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path, nargs="?", default=Path("runs/serve_load"))
    parser.add_argument("--count", type=int, default=3000, help="questions of a round")
    parser.add_argument("--per-s", type=float, default=100, help="arrivals a second")
    parser.add_argument("--takes-s", type=float, default=5, help="what the endpoint takes for each")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--process", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process:
        name, *numbers = args.process
        served = (
            serve_endpoint(int(numbers[0]), float(numbers[1]))
            if name == "endpoint"
            else serve_proxy(*map(int, numbers))
        )
        asyncio.run(served)
        return
    own = str(HERE / "serve_load.py")
    endpoint, _ = start([own, "--process", "endpoint", "8731", str(args.takes_s)])
    service = [
        str(HERE.parent / "launch.py"), "task=serve", "serve.port=0", "judge=pointwise", "grm.engine=openai",
        "grm.path=judge", "engine.openai.base_url=http://127.0.0.1:8731/v1", "engine.openai.api_key_env=''",
        "engine.openai.max_connections=2048", "judge.limits.max_concurrency=2048", "judge.num_judgements=1",
        "tracking=none", f"run_dir={args.run_dir}/{time.time():.0f}",
    ]  # fmt: skip
    try:
        proxy = measure([own, "--process", "proxy", "8732", "8731"], args.count, args.per_s, args.rounds)
        ours = measure(service, args.count, args.per_s, args.rounds)
    finally:
        endpoint.terminate()
    (HERE / "serve_load.md").write_text(report(args, proxy, ours), encoding="utf-8")


def report(args: argparse.Namespace, proxy: list[dict[str, float]], ours: list[dict[str, float]]) -> str:
    """The page."""
    rows = [
        f"| {name} | {number} | {row['judged']:.0f} of {args.count} | {row['per_s']:.0f} | {row['cpu_ms']:.2f} | "
        f"{row['memory_mb']:.0f} |"
        for name, found in (("bare proxy", proxy), ("service", ours))
        for number, row in enumerate(found, start=1)
    ]
    times = statistics.median(row["cpu_ms"] for row in ours) / statistics.median(row["cpu_ms"] for row in proxy)
    sizes = f"--count {args.count} --per-s {args.per_s:g} --takes-s {args.takes_s:g} --rounds {args.rounds}"
    return f"""# The load of a judge's service

`python benchmarks/serve_load.py {sizes}`,
commit {commit()}, {os.cpu_count()} cores ({platform.machine()}). Client, endpoint and what is measured are processes of
their own on the same cores. The endpoint takes {args.takes_s:g} s, so {args.per_s * args.takes_s:.0f} questions are in
flight; a question is one response and one judgement. The proxy only sends the same bodies on (aiohttp).

| who answers | round | got a verdict | verdicts/s, until the last one | CPU ms a question | memory, MB |
|---|---|---|---|---|---|
{chr(10).join(rows)}

The service uses {times:.1f} times the proxy's CPU.
"""


def commit() -> str:
    command = ["git", "-C", str(HERE), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
