"""Credit at the evidence: a policy learns to use a calculator, its rubric's points on the whole answer or on turns.

    OMP_NUM_THREADS=1 python benchmarks/evidence_credit.py runs/evidence_credit [--only whole turns] [--seeds 21 22]

The judge is a rule behind an endpoint: it knows the call of each sentence, and quotes the call that it means, so that
only the credit is measured. Problems are of any length, or long. Runs of a seed and a length have the same start,
prompts and rule for their verdicts. Each goes into runs/evidence_credit/<variant>_<seed>; finished runs are reused,
interrupted ones continued. Writes benchmarks/evidence_credit.md.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from math import exp, log, sqrt
from pathlib import Path

from several_judges import T_QUANTILES, launch

from grmpipe.observe.journal import read_journal
from grmpipe.tiny.calculator import NAMES
from grmpipe.tiny.problems import Problem
from grmpipe.tiny.tasks import CALLS

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "evidence_credit.md"
PORT = 8741
GOAL = 0.70
GROUPS, SIBLINGS = 4, 8
WINDOW = 16  # steps over which the true accuracy is averaged
NUM_PROMPTS = 4096
COMMON = (
    "+experiment=tools", f"train.groups_per_batch={GROUPS}", "cluster=inprocess",
    "judge=rubric", "judge.num_judgements=1",
    "judge.limits.max_concurrency=32", "data=file", "data.eval_path=null", "grm=path", "grm.path=rule",
    "grm.engine=openai", f"engine.openai.base_url=http://127.0.0.1:{PORT}/v1", "engine.openai.api_key_env=''",
)  # fmt: skip
EVIDENCE = ("judge.rubric.credit=evidence", "algorithm=mt_grpo")
EPISODE = (*EVIDENCE, "algorithm.mt_grpo.outcome=episode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """Problems of at least so many sentences, each of which asks for a call, and the steps of their runs."""

    name: str
    min_calls: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A run. base: the variant that it is compared with."""

    points: str
    overrides: tuple[str, ...] = ()
    length: Length
    base: str = ""


ANY = Length(name="any", min_calls=1, num_steps=56)
LONG = Length(name="long", min_calls=4, num_steps=88)
WHOLE = "the whole answer (GRPO)"
TURN = "the turn of the evidence (MT-GRPO, `outcome={}`, coefficient {})"
VARIANTS = {
    "whole": Variant(points=WHOLE, length=ANY),
    "turns": Variant(
        points=TURN.format("episode", 2),
        overrides=(*EPISODE, "algorithm.mt_grpo.turn_advantage_coef=2"),
        length=ANY,
        base="whole",
    ),
    "whole_long": Variant(points=WHOLE, length=LONG),
    "turns_long": Variant(
        points=TURN.format("episode", 4),
        overrides=(*EPISODE, "algorithm.mt_grpo.turn_advantage_coef=4"),
        length=LONG,
        base="whole_long",
    ),
    "last_turn": Variant(
        points=TURN.format("last_turn", 4),
        overrides=(*EVIDENCE, "algorithm.mt_grpo.turn_advantage_coef=4"),
        length=ANY,
        base="whole",
    ),
}


# -- the data and the judge ------------------------------------------------------------------------------------------

ASKED = re.compile(r"calls (add|sub) for (-?\d+)")
CALL = re.compile(r"> (add|sub)\( (-?\d+), (-?\d+)\)\n\| = (-?\d+)")
ANSWER = re.compile(r"> (Answer: (-?\d+))\s*\Z")


def write_prompts(path: Path, problems: Sequence[Problem]) -> None:
    rows = ({"prompt": one.question, "reference": str(one.answer), "rubric": list_criteria(one)} for one in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def list_criteria(problem: Problem) -> list[dict[str, object]]:
    """A criterion for each sentence, one for the answer, without which nothing is earned, and the fault of any other
    call.
    """
    calls: list[dict[str, object]] = [
        {"name": f"step {number}", "text": f"Step {number}: it calls {NAMES[step.sign]} for {step.right}."}
        for number, step in enumerate(problem.steps, 1)
    ]
    answer = {"name": "answer", "text": f"The answer is {problem.answer}.", "weight": 2, "essential": True}
    fault = {"name": "other call", "text": "It makes a call that no step asks for.", "weight": -1}
    return [{**one, "kind": "yes_no", "evidence": True} for one in (*calls, answer, fault)]


def judge(prompt: str) -> str:
    """What the rule says of the criteria in a prompt, with the quotes."""
    question, rest = prompt.split("# Question", 1)[1].split("# Response", 1)
    response, criteria = rest.rsplit("# Criteria", 1)
    total = int(re.findall(r"\d+", question)[0])
    calls = [(name, int(left), int(right), int(result)) for name, left, right, result in CALL.findall(response)]
    ends = ANSWER.search(response.split("# ")[0].rstrip().removesuffix("```").rstrip())
    numbered = re.findall(r"^(\d+)\. (.+)", criteria.split("# Your judgement")[0], re.MULTILINE)
    asked = [(found[1], int(found[2])) for _, text in numbered if (found := ASKED.search(text))]
    quotes, at = dict[int, str](), 0
    taken = set[int]()
    for number, (name, right) in enumerate(asked, 1):
        before = [total, *(result for *_, result in calls)]
        found_at = next(
            (
                i
                for i in range(at, len(calls))
                if calls[i][0] == name and calls[i][2] == right and calls[i][1] == before[i]
            ),
            None,
        )
        if found_at is not None:
            taken.add(found_at)
            quotes[number], at = show(calls[found_at]), found_at + 1
    truth = re.search(r"The answer is (-?\d+)\.", criteria)
    if ends is not None and truth is not None and ends[2] == truth[1]:
        quotes[len(asked) + 1] = ends[1]
    other = next((call for i, call in enumerate(calls) if i not in taken), None)
    if other is not None:
        quotes[len(asked) + 2] = show(other)
    lines = [f'Evidence {number}: "{quote}"' for number, quote in quotes.items()]
    scores = ", ".join("10" if number in quotes else "1" for number in range(1, len(numbered) + 1))
    return "\n".join([*lines, f"\\boxed{{{scores}}}"])


def show(call: tuple[str, int, int, int]) -> str:
    return f"{call[0]}( {call[1]}, {call[2]})"


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = {
            "message": {"role": "assistant", "content": judge(asked["messages"][-1]["content"])},
            "finish_reason": "stop",
        }
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        body = json.dumps({"model": "rule", "choices": [answer], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def serve_judge() -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", PORT), _Request)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


# -- runs and figures ------------------------------------------------------------------------------------------------


def measure(folder: Path, name: str, seed: int, overrides: Sequence[str]) -> list[float]:
    """The true accuracy of a run's rollouts by step: each problem is drawn once, so the policy hasn't seen it."""
    run_dir, variant = folder / f"{name}_{seed}", VARIANTS[name]
    if not (run_dir / "policy").exists():
        prompts = f"data.path={folder / variant.length.name}.jsonl"
        own = (prompts, f"train.num_steps={variant.length.num_steps}", f"seed={seed}")
        launch(run_dir, [*COMMON, *variant.overrides, *own, *overrides])
    records = read_journal(run_dir / "metrics.jsonl")
    return [one["train/true_accuracy"] for one in records if "train/true_accuracy" in one]


def smooth(curve: Sequence[float]) -> list[float]:
    """Means over windows of steps, the first of which ends at step WINDOW."""
    return [statistics.fmean(curve[start : start + WINDOW]) for start in range(len(curve) - WINDOW + 1)]


def count_rollouts(curve: Sequence[float]) -> float | None:
    """Rollouts until the middle of the first window that reaches the goal, by the line from the window before; None:
    no window does.
    """
    for start, (low, high) in enumerate(pairwise(smooth(curve))):
        if high >= GOAL:
            return (start + (WINDOW + 1) / 2 + (GOAL - low) / (high - low)) * GROUPS * SIBLINGS
    return None


def report(curves: Mapping[str, Mapping[int, Sequence[float]]]) -> str:
    seeds = sorted({seed for some in curves.values() for seed in some})
    needed = {name: {seed: count_rollouts(curve) for seed, curve in some.items()} for name, some in curves.items()}
    lines = [
        "# Credit at the evidence",
        "",
        "Written by `benchmarks/evidence_credit.py`.",
        f"Rollouts until a true accuracy of {GOAL:.2f}: the mean over {WINDOW} steps of {GROUPS} groups of {SIBLINGS},",
        f"on problems that the policy hasn't seen: of 1 to 6 calls, or long ones, of {LONG.min_calls} to 6. Runs",
        "of a seed and a length have the same problems. Ratio to the whole answer: the geometric mean over the pairs,",
        "with its 95 % interval (t). The rubric has a criterion for each call, one for the answer, which is essential",
        "(a wrong answer earns nothing), and the fault of any other call. Coefficients were chosen on runs of other",
        "seeds. Batches are smaller than the 16 groups of `+experiment=tools`, so that rollouts limit the runs more",
        "than steps do.",
        "",
        f"| problems | points go to | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | ratio |",
        "|---" * (len(seeds) + 4) + "|",
    ]
    for name, counts in needed.items():
        reached = [count for count in counts.values() if count is not None]
        mean = f"{statistics.fmean(reached):.0f}" if len(reached) == len(counts) else ""
        variant = VARIANTS[name]
        ratio = describe_ratio(counts, needed[variant.base]) if variant.base in needed else ""
        cells = ["never" if counts[seed] is None else f"{counts[seed]:.0f}" for seed in seeds]
        lines.append(f"| {' | '.join([variant.length.name, variant.points, *cells, mean, ratio])} |")
    lines += [
        "",
        f"True accuracy over {WINDOW} steps, means over the seeds, by the rollouts until the last of them:",
        "",
    ]
    for name, some in curves.items():
        columns = enumerate(zip(*map(smooth, some.values()), strict=True), WINDOW)
        means = [f"{step * GROUPS * SIBLINGS}: {statistics.fmean(column):.2f}" for step, column in columns]
        variant = VARIANTS[name]
        lines.append(f"- {variant.length.name}, {variant.points}: {', '.join(means[:: WINDOW // 2])}")
    return "\n".join(lines) + "\n"


def describe_ratio(counts: Mapping[int, float | None], base: Mapping[int, float | None]) -> str:
    both = [(count, base[seed]) for seed, count in counts.items()]
    ratios = [log(count / whole) for count, whole in both if count is not None and whole is not None]
    if len(ratios) < len(both):
        return "not all runs have it"
    middle, num = statistics.fmean(ratios), len(ratios)
    if num == 1:
        return f"{exp(middle):.2f}"
    half = T_QUANTILES[num - 2] * statistics.stdev(ratios) / sqrt(num)
    return f"{exp(middle):.2f} ({exp(middle - half):.2f} to {exp(middle + half):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS)[:4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[21, 22, 23, 24, 25])
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    problems = CALLS.draw("train", 3 * NUM_PROMPTS, 0)
    for length in (ANY, LONG):
        some = [one for one in problems if len(one.steps) >= length.min_calls]
        write_prompts(folder / f"{length.name}.jsonl", some[:NUM_PROMPTS])
    with serve_judge():
        curves = {name: dict[int, list[float]]() for name in given.only}
        for seed in given.seeds:
            for name in given.only:
                curves[name][seed] = measure(folder, name, seed, given.overrides)
    REPORT.write_text(report(curves), encoding="utf-8")
    print(REPORT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
