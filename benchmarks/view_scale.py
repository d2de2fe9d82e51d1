"""The viewer on a large run: makes a run of n rollouts, and measures index, pages and memory. Needs no engine.

    python benchmarks/view_scale.py --rollouts 100000 --dir /tmp/view-scale

The lines have the fields and the sizes of a run whose answers have about 400 tokens, and four judgements of 100 each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from itertools import product
from pathlib import Path

GROUP_SIZE, GROUPS_PER_STEP, VOTES = 8, 16, 4
ANSWER_TOKENS, CRITIQUE_TOKENS, PROMPT_TOKENS = 400, 100, 60
SYLLABLES = ("ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "xu", "za")
WORDS = ["".join(syllables) for syllables in product(SYLLABLES, repeat=3)]


def text(random_: random.Random, num_words: int) -> str:
    return " ".join(random_.choices(WORDS, k=num_words))


def completion(random_: random.Random, num_tokens: int, version: int, model: str) -> dict[str, object]:
    return {
        "text": text(random_, num_tokens * 3 // 4),
        "finish_reason": "stop",
        "token_ids": random_.choices(range(150_000), k=num_tokens),
        "logprobs": [-round(random_.expovariate(3), 9) for _ in range(num_tokens)],
        "versions": [{"model": model, "version": version, "start": 0, "end": num_tokens}],
    }


def rollout_line(
    random_: random.Random, who: dict[str, object], step: int, prompt: dict[str, object]
) -> dict[str, object]:
    length = max(20, int(random_.gauss(ANSWER_TOKENS, 150)))
    turn = {
        **completion(random_, length, step - 1, "policy"),
        "new_ids": random_.choices(range(150_000), k=PROMPT_TOKENS),
    }
    return {**who, "status": "finished", "turns": [{**turn, "replies": []}], "prompt_index": 0, "prompt": prompt}


def judgement_line(random_: random.Random, who: dict[str, object]) -> tuple[dict[str, object], float, float]:
    truth = float(random_.random() < 0.5)
    scores = [min(10, max(1, round(random_.gauss(4 + 3 * truth, 2)))) for _ in range(VOTES)]
    mean = sum(scores) / VOTES
    reward = (mean - 1) / 9
    judgements = [
        {"group_id": who["group_id"], "siblings": [who["sibling"]], "scores": [score], "grm": "grm", "version": 0,
         "prompt_ids": random_.choices(range(150_000), k=PROMPT_TOKENS + ANSWER_TOKENS),
         "completion": completion(random_, CRITIQUE_TOKENS, 0, "grm")}
        for score in scores
    ]  # fmt: skip
    spread = (sum((score - mean) ** 2 for score in scores) / VOTES) ** 0.5
    verdict = {
        "rewards": [{"turn": 0, "start": 0, "end": 1, "value": reward, "share": None}],
        "score": mean, "breakdown": {}, "score_std": spread, "num_judgements": VOTES, "grm_version": 0,
    }  # fmt: skip
    return {**who, "verdict": verdict, "judgements": judgements, "failures": []}, reward, truth


def make_run(run_dir: Path, num_rollouts: int) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("experiment_name: scale\n")
    random_, names = random.Random(0), ("rollouts", "judgements", "groups", "trained", "metrics")
    out = {name: (run_dir / f"{name}.jsonl").open("w") for name in names}

    def write(name: str, line: dict[str, object]) -> None:
        out[name].write(json.dumps(line, separators=(",", ":")) + "\n")

    for group in range(num_rollouts // GROUP_SIZE):
        step, group_id = group // GROUPS_PER_STEP + 1, f"g{group:06d}"
        messages = [{"role": "user", "content": text(random_, PROMPT_TOKENS)}]
        prompt = {"prompt_id": f"p{group % 5000}", "messages": messages, "source": f"source{group % 5}"}
        for sibling in range(GROUP_SIZE):
            who = {"group_id": group_id, "sibling": sibling}
            write("rollouts", rollout_line(random_, who, step, {**prompt, "reference": "42"}))
            judged, reward, truth = judgement_line(random_, who)
            write("judgements", judged)
            write("trained", {**who, "step": step, "reward": reward, "advantage": reward - 0.5, "right": truth})
        end = {"group_id": group_id, "prompt_index": group, "prompt_id": prompt["prompt_id"], "outcome": "trained"}
        write("groups", {**end, "step": step, "version": step - 1})
        if group % GROUPS_PER_STEP == 0:
            write("metrics", {"step": step, "train/reward": random_.random(), "train/true_accuracy": random_.random()})
    for file in out.values():
        file.close()


# -- measurement -------------------------------------------------------------------------------------------------------

SERVE = "import sys; from pathlib import Path; from grmpipe.viewer.server import view; view(Path(sys.argv[1]), 0)"
REPEATS = 5
PAGES = {
    "run": "the page of the run",
    "rollouts": "the table, newest first",
    "rollouts?truth=fooled&sort=judge+above+truth": "judge high, truth low, by their difference",
    "rollouts?source=source3&score_from=8&spread_from=1&step_from=10": "by source, score, spread and step",
    "rollouts?words=balefi": "a word",
    "rollouts?words=balefi+gohuka&score_to=3": "two words and a score",
    "group?group=g000100": "a group with all critiques",
    "failures": "failed judgements",
}


class Served:
    """The viewer of a run in a process of its own."""

    def __init__(self, run_dir: Path, cache: Path) -> None:
        environ = os.environ | {"XDG_CACHE_HOME": str(cache)}
        command = [sys.executable, "-c", SERVE, str(run_dir)]
        self.process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        address = re.search(r"(http://\S+)/\?token=(\S+)", self.process.stdout.readline())
        assert address, "the viewer didn't start"
        self.address = address[1]
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        self._opener.open(f"{self.address}/static/style.css?token={address[2]}").read()

    def get(self, path: str) -> bytes:
        return self._opener.open(f"{self.address}/{path}", timeout=600).read()

    def memory_mb(self, name: str) -> float:
        """VmRSS: now; VmHWM: at most."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) / 1024

    def cpu_s(self) -> float:
        """CPU seconds so far: on a machine that others use, what it would take alone."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait_for_index(self, name: str) -> None:
        while b"100%" not in self.get(f"state/{name}"):
            time.sleep(0.2)

    def seconds(self, path: str) -> float:
        """The median of several requests."""
        took = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            self.get(path)
            took.append(time.perf_counter() - began)
        return statistics.median(took)


def measure(run_dir: Path, cache: Path) -> None:
    """Print a table of what was measured."""
    shutil.rmtree(cache, ignore_errors=True)
    size_mb = sum(path.stat().st_size for path in run_dir.iterdir()) / 1e6
    began = time.perf_counter()
    served = Served(run_dir, cache)
    try:
        ready_s, ready_cpu_s = time.perf_counter() - began, served.cpu_s()
        served.wait_for_index(run_dir.name)
        index_s = time.perf_counter() - began - ready_s
        cpu_s = served.cpu_s() - ready_cpu_s
        index_mb = sum(path.stat().st_size for path in cache.rglob("*.sqlite*")) / 1e6
        print(f"| journals | {size_mb:,.0f} MB |")
        print(f"| until the address is printed | {ready_s:.1f} s |")
        print(f"| index made | {index_s:.1f} s, {size_mb / index_s:.0f} MB/s |")
        print(f"| CPU time of that | {cpu_s:.1f} s, {size_mb / cpu_s:.0f} MB/s |")
        print(f"| size of the index | {index_mb:,.0f} MB, {index_mb / size_mb:.0%} of the journals |")
        for path, title in PAGES.items():
            page, _, query = path.partition("?")
            print(f"| {title} | {served.seconds(f'{page}/{run_dir.name}?{query}') * 1000:,.0f} ms |", flush=True)
        print(
            f"| memory of the server | {served.memory_mb('VmRSS'):.0f} MB, {served.memory_mb('VmHWM'):.0f} MB at most |"
        )
    finally:
        served.process.terminate()
        served.process.wait()
    began = time.perf_counter()
    again = Served(run_dir, cache)
    try:
        again.wait_for_index(run_dir.name)
        print(f"| opened again, until the index is known to be whole | {time.perf_counter() - began:.1f} s |")
    finally:
        again.process.terminate()
        again.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--dir", type=Path, required=True, help="a folder for the run and the index; made if missing")
    options = parser.parse_args()
    run_dir = options.dir / f"scale_{options.rollouts}"
    if not run_dir.exists():
        make_run(run_dir, options.rollouts)
    measure(run_dir, options.dir / "cache")


if __name__ == "__main__":
    main()
