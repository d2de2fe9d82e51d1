"""The viewer on a large run: makes a run of n rollouts, and measures index, pages and memory. Needs no engine.

    python benchmarks/view_scale.py --rollouts 100000 --dir /tmp/view-scale
    python benchmarks/view_scale.py --rollouts 5000 --dir /tmp/view-scale --requests 10000    # its memory over so many
    python benchmarks/view_scale.py --rollouts 100000 --dir /tmp/view-scale --annotations 1000    # answers annotated

The lines have the fields and the sizes of a run with journals.compact whose answers have about 280 tokens, and four
judgements of 50 each. A million rollouts need 10.7 GB, and 2 GB for the index. The pages are opened in Chromium if
there is one.
"""

import argparse
import asyncio
import contextlib
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Self

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "tests")]

from browser import CHROMIUM, open_page  # noqa: E402

from grmpipe.observe.journal import encode_line  # noqa: E402
from grmpipe.observe.records import pack_numbers  # noqa: E402

GROUP_SIZE, GROUPS_PER_STEP, VOTES = 8, 16, 4
ANSWER_TOKENS, CRITIQUE_TOKENS, PROMPT_TOKENS = 280, 50, 60
WORDS_PER_TOKEN = 0.75
NUM_TEMPLATES = 256  # lines differ in their words; ids, log-probs and scores repeat
Line = dict[str, object]

# -- words, by their rank: the first ones are the most frequent --------------------------------------------------------

SYLLABLES = np.array([*product(b"bdfghklmnprstvxz", b"aeiou")], np.uint8)
NUM_WORDS = len(SYLLABLES) ** 3
DRAWN_WORDS = 1_000_000


def words(ranks: np.ndarray) -> bytes:
    """The words of these ranks, each with a space after it."""
    spelt = np.full((len(ranks), 7), ord(" "), np.uint8)
    for place in range(3):
        spelt[:, 2 * place : 2 * place + 2] = SYLLABLES[ranks // len(SYLLABLES) ** place % len(SYLLABLES)]
    return spelt.tobytes()


def word(rank: int) -> str:
    return words(np.array([rank])).decode().strip()


class Texts:
    """Texts whose words are as frequent as in a language: inversely to their rank (Zipf)."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._drawn, self._begin = b"", 0

    def take(self, num_words: int) -> bytes:
        if self._begin + 7 * num_words > len(self._drawn):
            ranks = (NUM_WORDS ** self._random.random(DRAWN_WORDS)).astype(np.int64) - 1
            self._drawn, self._begin = words(ranks), 0
        text = self._drawn[self._begin : self._begin + 7 * num_words - 1]
        self._begin += 7 * num_words
        return text


# -- a run -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A line in which `%` fills group, sibling and other fields. num_words: of its texts, the fields text0, text1 .."""

    line: bytes
    num_words: Sequence[int]
    reward: float = 0.0
    truth: float = 0.0

    def fill(self, texts: Texts, fields: Mapping[bytes, object]) -> bytes:
        drawn = {b"text%d" % number: texts.take(length) for number, length in enumerate(self.num_words)}
        return self.line % {**fields, **drawn}


def template(record: Line, num_words: Sequence[int], reward: float = 0.0, truth: float = 0.0) -> Template:
    """The template of a record with packed numbers, as `journals.compact` writes it."""
    line = encode_line(pack_numbers({"group_id": "%(group_id)s", "sibling": "%(sibling)d", **record}), checked=False)
    return Template(
        line=line.replace(b'"%(sibling)d"', b"%(sibling)d"), num_words=num_words, reward=reward, truth=truth
    )


def completion(random_: random.Random, text: int, num_tokens: int, model: str) -> Line:
    return {
        "text": f"%(text{text})s",
        "finish_reason": "stop",
        "token_ids": random_.choices(range(150_000), k=num_tokens),
        "logprobs": [-round(random_.expovariate(3), 9) for _ in range(num_tokens)],
        "versions": [{"model": model, "version": 0, "start": 0, "end": num_tokens}],
    }


def rollout_template(random_: random.Random) -> Template:
    length = max(20, int(random_.gauss(ANSWER_TOKENS, 100)))
    turn = {**completion(random_, 0, length, "policy"), "new_ids": random_.choices(range(150_000), k=PROMPT_TOKENS)}
    messages = [{"role": "user", "content": "%(question)s"}]
    prompt = {"prompt_id": "%(prompt_id)s", "messages": messages, "source": "%(source)s", "reference": "42"}
    record = {"status": "finished", "turns": [{**turn, "replies": []}], "prompt_index": 0, "prompt": prompt}
    return template(record, [int(length * WORDS_PER_TOKEN)])


def judgement_template(random_: random.Random) -> Template:
    truth = float(random_.random() < 0.5)
    scores = [min(10, max(1, round(random_.gauss(4 + 3 * truth, 2)))) for _ in range(VOTES)]
    mean = sum(scores) / VOTES
    reward = (mean - 1) / 9
    prompt_ids = random_.choices(range(150_000), k=PROMPT_TOKENS + ANSWER_TOKENS)
    judgements = [
        {"group_id": "%(group_id)s", "siblings": ["%(sibling)d"], "scores": [score], "grm": "grm", "version": 0,
         "prompt_ids": prompt_ids, "completion": completion(random_, number, CRITIQUE_TOKENS, "grm")}
        for number, score in enumerate(scores)
    ]  # fmt: skip
    spread = (sum((score - mean) ** 2 for score in scores) / VOTES) ** 0.5
    verdict = {
        "rewards": [{"turn": 0, "start": 0, "end": 1, "value": reward, "share": None}],
        "score": mean, "breakdown": {}, "score_std": spread, "num_judgements": VOTES, "grm_version": 0,
    }  # fmt: skip
    failures = [{"stage": "judge", "cause": "timeout", "attempts": 3}] if random_.random() < 0.05 else []
    record = {"verdict": verdict, "judgements": judgements, "failures": failures}
    return template(record, [int(CRITIQUE_TOKENS * WORDS_PER_TOKEN)] * VOTES, reward, truth)


def make_run(run_dir: Path, num_rollouts: int) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("experiment_name: scale\n")
    random_, texts, names = random.Random(0), Texts(0), ("rollouts", "judgements", "groups", "trained", "metrics")
    answers = [rollout_template(random_) for _ in range(NUM_TEMPLATES)]
    verdicts = [judgement_template(random_) for _ in range(NUM_TEMPLATES)]
    with contextlib.ExitStack() as stack:
        out = {name: stack.enter_context((run_dir / f"{name}.jsonl").open("wb")) for name in names}
        for group in range(num_rollouts // GROUP_SIZE):
            step, who = group // GROUPS_PER_STEP + 1, {"group_id": f"g{group:06d}"}
            prompt = {"prompt_id": f"p{group % 5000}", "source": f"source{group % 5}"}
            fields = {name.encode(): value.encode() for name, value in {**who, **prompt}.items()}
            fields[b"question"] = texts.take(PROMPT_TOKENS)
            for sibling in range(GROUP_SIZE):
                verdict = random_.choice(verdicts)
                fields[b"sibling"] = sibling
                out["rollouts"].write(random_.choice(answers).fill(texts, fields))
                out["judgements"].write(verdict.fill(texts, fields))
                known = {"reward": verdict.reward, "advantage": verdict.reward - 0.5, "right": verdict.truth}
                out["trained"].write(json_line({**who, "sibling": sibling, "step": step, **known}))
            end = {"prompt_index": group, "prompt_id": prompt["prompt_id"], "outcome": "trained"}
            out["groups"].write(json_line({**who, **end, "step": step, "version": step - 1}))
            if group % GROUPS_PER_STEP == 0:
                means = {"train/reward": random_.random(), "train/true_accuracy": random_.random()}
                out["metrics"].write(json_line({"step": step, **means}))


def json_line(record: Line) -> bytes:
    return encode_line(record, checked=False)


# -- measurement -------------------------------------------------------------------------------------------------------

SERVE = """
import sys; from pathlib import Path
from grmpipe.config.task_settings import AnnotateConfig
from grmpipe.viewer.server import view
view(Path(sys.argv[1]), 0, settings=AnnotateConfig(select="split", num_items=int(sys.argv[2])))
"""
REPEATS = 5
COMMON, FREQUENT, SELDOM = word(0), word(100), word(10_000)
PAGES = {
    "run": "the page of the run",
    "rollouts": "the table, newest first",
    "rollouts?sort=score%2C+highest": "the table, by score",
    "rollouts?truth=fooled&sort=judge+above+truth": "judge high, truth low, by their difference",
    "rollouts?source=source3&score_from=8&spread_from=1&step_from=10": "by source, score, spread and step",
    "rollouts?step_from=20&step_to=20": "the rollouts of a step",
    "rollouts?cause=timeout": "by a failed judgement",
    f"rollouts?words={COMMON}": "the most frequent word, in nearly every answer",
    f"rollouts?words={COMMON}&sort=score%2C+highest": "the same, by score",
    f"rollouts?words={FREQUENT}": "a frequent word",
    f"rollouts?words={SELDOM}": "a seldom word",
    f"rollouts?words={FREQUENT}+{word(200)}&score_to=3": "two words and a score",
    f"rollouts?words=%22{COMMON}+{word(1)}%22": "a phrase",
    "group?group=g000100": "a group with all critiques",
    "failures": "failed judgements",
    "group?group=g000100&sibling=3&in=sort%3Dscore%252C%2Bhighest": "an answer that the table by score led to",
    "diff?group=g000100": "the differences of two answers",
    "annotations": "the annotations",
}


class Served:
    """The viewer of a run in a process of its own."""

    def __init__(self, run_dir: Path, cache: Path, num_items: int = 100) -> None:
        environ = os.environ | {"XDG_CACHE_HOME": str(cache)}
        command = [sys.executable, "-c", SERVE, str(run_dir), str(num_items)]
        self.process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        address = re.search(r"(http://\S+)/\?token=(\S+)", self.process.stdout.readline())
        assert address, "the viewer didn't start"
        self.address, self.token = address[1], address[2]
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        self._opener.open(f"{self.address}/static/style.css?token={address[2]}").read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait()

    def get(self, path: str) -> bytes:
        return self._opener.open(f"{self.address}/{path}", timeout=600).read()

    def send(self, path: str, **form: str) -> str:
        """Send a form, or ask without one, and follow it; the address of the page that it leads to."""
        data = urllib.parse.urlencode(form).encode() if form else None
        with self._opener.open(f"{self.address}/{path}", data, timeout=600) as answer:
            answer.read()
            return str(answer.url).removeprefix(f"{self.address}/")

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

    async def time_pages(self, run: str, profile: Path) -> AsyncIterator[tuple[str, float, float]]:
        """Title, seconds and CPU seconds of the server per page, the medians of several; in Chromium where there is
        one: until the page is complete. The first page is opened once.
        """
        async with open_page(profile, width=1280) if CHROMIUM else contextlib.nullcontext() as tab:
            if tab is not None:
                await tab.open(f"{self.address}/static/style.css?token={self.token}")
            for number, (path, title) in enumerate([("run", "the first page after the start"), *PAGES.items()]):
                page, _, query = path.partition("?")
                took, cpu = [], []
                for _ in range(REPEATS if number else 1):
                    began, cpu_began = time.perf_counter(), self.cpu_s()
                    if tab is None:
                        self.get(f"{page}/{run}?{query}")
                        took.append(time.perf_counter() - began)
                    else:
                        await tab.open(f"{self.address}/{page}/{run}?{query}")
                        took.append(await tab.value("performance.getEntriesByType('navigation')[0].duration") / 1000)
                    cpu.append(self.cpu_s() - cpu_began)
                yield title, statistics.median(took), statistics.median(cpu)


def measure_index(run_dir: Path, cache: Path) -> None:
    """Make the index, and print what that took."""
    shutil.rmtree(cache, ignore_errors=True)
    size_mb = sum(path.stat().st_size for path in run_dir.iterdir()) / 1e6
    began = time.perf_counter()
    with Served(run_dir, cache) as served:
        ready_s, ready_cpu_s = time.perf_counter() - began, served.cpu_s()
        served.wait_for_index(run_dir.name)
        index_s, cpu_s = time.perf_counter() - began - ready_s, served.cpu_s() - ready_cpu_s
        print(f"| journals | {size_mb:,.0f} MB |")
        print(f"| until the address is printed | {ready_s:.1f} s |")
        print(f"| index made | {index_s:.1f} s, {size_mb / index_s:.0f} MB/s |")
        print(f"| CPU time of that | {cpu_s:.1f} s, {size_mb / cpu_s:.0f} MB/s |")
        print(f"| memory meanwhile, at most | {served.memory_mb('VmHWM'):.0f} MB |")


async def measure_pages(run_dir: Path, cache: Path) -> None:
    """Open the pages of a run whose index is made."""
    began = time.perf_counter()
    with Served(run_dir, cache) as served:
        served.wait_for_index(run_dir.name)
        print(f"| opened again, until the index is known to be whole | {time.perf_counter() - began:.1f} s |")
        with tempfile.TemporaryDirectory() as profile:
            async for title, seconds, cpu_s in served.time_pages(run_dir.name, Path(profile)):
                print(f"| {title} | {seconds * 1000:,.0f} ms, {cpu_s * 1000:,.0f} ms of CPU |", flush=True)
        now_mb, most_mb = (served.memory_mb(name) for name in ("VmRSS", "VmHWM"))
        print(f"| memory of the server | {now_mb:.0f} MB, {most_mb:.0f} MB at most |")
    where = "Chromium" if CHROMIUM else "HTTP, without a browser"
    print(f"\nPages through {where}; load of the machine: {os.getloadavg()[0]:.0f}")


def measure_requests(run_dir: Path, cache: Path, num_requests: int) -> None:
    """Ask for all pages in turn, and print the server's memory as it goes."""
    with Served(run_dir, cache) as served:
        served.wait_for_index(run_dir.name)
        began, urls = time.perf_counter(), [path.partition("?") for path in PAGES]
        for number in range(num_requests):
            page, _, query = urls[number % len(urls)]
            served.get(f"{page}/{run_dir.name}?{query}")
            if (number + 1) % (num_requests // 10) == 0:
                asked_s = time.perf_counter() - began
                print(f"| {number + 1:,} requests | {served.memory_mb('VmRSS'):.0f} MB, {asked_s:.0f} s |", flush=True)


def measure_annotations(run_dir: Path, cache: Path, number: int) -> None:
    """Annotate so many answers of the queue, and open all pages beside so many annotations."""
    name = run_dir.name
    (run_dir / "annotations.jsonl").unlink(missing_ok=True)
    with Served(run_dir, cache, 2 * number) as served:
        served.wait_for_index(name)
        found = re.search(rb'name="form_token" value="([^"]+)"', served.get(f"annotations/{name}"))
        assert found, "a page without a form"
        token = {"form_token": found[1].decode()}
        served.send(f"annotate/{name}", rater="bench", **token)
        began = time.perf_counter()
        served.send(f"annotate/{name}?group=g000100&about=0", right="true", **token)
        first_ms = 1000 * (time.perf_counter() - began)
        began = time.perf_counter()
        at = served.send(f"next/{name}")
        queue_ms, took_ms = 1000 * (time.perf_counter() - began), []
        for _ in range(number):
            query = at.partition("?")[2]
            sibling = urllib.parse.parse_qs(query)["sibling"][0]
            began = time.perf_counter()
            at = served.send(f"annotate/{name}?{query}&about={sibling}", right="true", **token)
            took_ms.append(1000 * (time.perf_counter() - began))
        took_ms.sort()
        print(f"| the first annotation, and its page | {first_ms:,.0f} ms |")
        print(f"| the first answer of the queue | {queue_ms:,.0f} ms |")
        shown = ", ".join(f"{took_ms[int(share * (number - 1))]:,.0f} ms" for share in (0.5, 0.95, 1))
        print(f"| {number:,} annotations of the queue, each with the next page: median, 95 %, longest | {shown} |")
        for path, title in PAGES.items():
            page, _, query = path.partition("?")
            took_ms = []
            for _ in range(REPEATS):
                began = time.perf_counter()
                served.get(f"{page}/{name}?{query}")
                took_ms.append(1000 * (time.perf_counter() - began))
            print(f"| {title} | {statistics.median(took_ms):,.0f} ms |", flush=True)
    print(f"\nBy HTTP, without a browser; load of the machine: {os.getloadavg()[0]:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--dir", type=Path, required=True, help="a folder for the run and the index; made if missing")
    parser.add_argument(
        "--keep-index", action="store_true", help="measure the pages only, with the index that is there"
    )
    parser.add_argument("--requests", type=int, default=0, help="ask for so many pages instead")
    parser.add_argument("--annotations", type=int, default=0, help="annotate so many answers, then open the pages")
    options = parser.parse_args()
    run_dir, cache = options.dir / f"scale_{options.rollouts}", options.dir / "cache"
    if not run_dir.exists():
        make_run(run_dir, options.rollouts)
    if not options.keep_index:
        measure_index(run_dir, cache)
    if options.annotations:
        return measure_annotations(run_dir, cache, options.annotations)
    if options.requests:
        return measure_requests(run_dir, cache, options.requests)
    index_mb = sum(path.stat().st_size for path in cache.rglob("*.sqlite*")) / 1e6
    print(f"| size of the index | {index_mb:,.0f} MB |")
    return asyncio.run(measure_pages(run_dir, cache))


if __name__ == "__main__":
    main()
