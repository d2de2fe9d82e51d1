"""Credit at the evidence: a policy learns to use a calculator, its rubric's points on the whole answer or on turns.

    OMP_NUM_THREADS=1 python benchmarks/evidence_credit.py runs/evidence_credit [--only whole episode] [--seeds 21 22]

The judge is a rule behind an endpoint: it knows the call of each sentence, and quotes the call that it means, so that
only the credit is measured. Both runs of a seed have the same start, prompts and rule for their verdicts. Each goes
into runs/evidence_credit/<variant>_<seed>; finished runs are reused, interrupted ones continued. Writes
benchmarks/evidence_credit.md.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from math import exp, log, sqrt
from pathlib import Path

import numpy as np
from several_judges import T_QUANTILES, launch

from grmpipe.algorithm.advantages import standardize
from grmpipe.observe.journal import read_journal
from grmpipe.tiny.calculator import NAMES
from grmpipe.tiny.problems import Problem
from grmpipe.tiny.tasks import CALLS

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "evidence_credit.md"
PORT = 8741
GOAL = 0.70
BAR = 0.85
GROUPS, SIBLINGS, STEPS = 4, 8, 56
WINDOW = 16  # steps over which the true accuracy is averaged
NUM_PROMPTS = 4096
NUM_GROUPS = 100  # whose advantages are compared
COMMON = (
    "+experiment=tools", f"train.groups_per_batch={GROUPS}", f"train.num_steps={STEPS}", "cluster=inprocess",
    "judge=rubric", "judge.num_judgements=1",
    "judge.limits.max_concurrency=32", "data=file", "data.eval_path=null", "grm=path", "grm.path=rule",
    "grm.engine=openai", f"engine.openai.base_url=http://127.0.0.1:{PORT}/v1", "engine.openai.api_key_env=''",
)  # fmt: skip
EVIDENCE = ("judge.rubric.credit=evidence", "algorithm=mt_grpo")


VARIANTS = {
    "whole": ("the whole answer (GRPO)", ()),
    "episode": (
        "the turn of the evidence (MT-GRPO, `outcome=episode`, coefficient 2)",
        (*EVIDENCE, "algorithm.mt_grpo.outcome=episode", "algorithm.mt_grpo.turn_advantage_coef=2"),
    ),
    "last_turn": (
        "the turn of the evidence (MT-GRPO, `outcome=last_turn`, coefficient 4)",
        (*EVIDENCE, "algorithm.mt_grpo.turn_advantage_coef=4"),
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
    run_dir = folder / f"{name}_{seed}"
    if not (run_dir / "policy").exists():
        prompts = f"data.path={folder / 'prompts.jsonl'}"
        own = (prompts, f"seed={seed}")
        launch(run_dir, [*COMMON, *VARIANTS[name][1], *own, *overrides])
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


def report(folder: Path, curves: Mapping[str, Mapping[int, Sequence[float]]]) -> str:
    seeds = sorted({seed for some in curves.values() for seed in some})
    needed = {name: {seed: count_rollouts(curve) for seed, curve in some.items()} for name, some in curves.items()}
    lines = [
        "# Credit at the evidence",
        "",
        "Written by `benchmarks/evidence_credit.py`.",
        f"Rollouts until a true accuracy of {GOAL:.2f}: the mean over {WINDOW} steps of {GROUPS} groups of {SIBLINGS},",
        "on problems that the policy hasn't seen. Runs of a seed have the same problems. Ratio to the whole answer:",
        "the geometric mean over the pairs, with its 95 % interval (t). The rubric has a criterion for each call, one",
        "for the answer, which is essential (a wrong answer earns nothing), and the fault of any other call.",
        "",
        f"| points go to | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | ratio |",
        "|---" * (len(seeds) + 3) + "|",
    ]
    for name, counts in needed.items():
        reached = [count for count in counts.values() if count is not None]
        mean = f"{statistics.fmean(reached):.0f}" if len(reached) == len(counts) else ""
        ratio = describe_ratio(counts, needed["whole"]) if name != "whole" and "whole" in needed else ""
        cells = ["never" if counts[seed] is None else f"{counts[seed]:.0f}" for seed in seeds]
        lines.append(f"| {' | '.join([VARIANTS[name][0], *cells, mean, ratio])} |")
    lines += [
        "",
        f"True accuracy over {WINDOW} steps, means over the seeds, by the rollouts until the last of them:",
        "",
    ]
    for name, some in curves.items():
        columns = enumerate(zip(*map(smooth, some.values()), strict=True), WINDOW)
        means = [f"{step * GROUPS * SIBLINGS}: {statistics.fmean(column):.2f}" for step, column in columns]
        lines.append(f"- {VARIANTS[name][0]}: {', '.join(means[:: WINDOW // 2])}")
    if "episode" in curves:
        found = [separate(folder / f"episode_{seed}") for seed in seeds]
        shown = [f"{name} {statistics.fmean(one[name] for one in found):.2f}" for name in found[0]]
        lines += [
            "",
            "How far the advantage of right calls is above that of others, in standard deviations, in the first",
            f"{NUM_GROUPS} groups of the second row: by {'; '.join(shown)}.",
            "The settings of the second row were chosen by that on runs of other seeds.",
            "Batches are smaller than the 16 groups of `+experiment=tools`, so that rollouts limit the runs more than",
            "steps do.",
        ]
    return "\n".join(lines) + "\n"


def separate(run_dir: Path) -> dict[str, float]:
    """How well an advantage tells right calls from others, in the first groups of a run with credit at the evidence:
    the difference of both means, in standard deviations over the calls.
    """
    groups: dict[str, list[np.ndarray]] = {}
    for line in read_journal(run_dir / "judgements.jsonl"):
        if (spans := line["verdict"].get("rewards")) and (len(groups) < NUM_GROUPS or line["group_id"] in groups):
            earned_U = np.zeros(1 + max(span["turn"] for span in spans))
            np.add.at(earned_U, [span["turn"] for span in spans], [span["value"] for span in spans])
            groups.setdefault(line["group_id"], []).append(earned_U)
    rows: list[tuple[bool, float, float, float]] = []  # of each call: whether it is right, and three advantages
    for siblings in groups.values():
        whole_G, last_G = (
            standardize(np.array([of(one) for one in siblings]), "sample") for of in (np.sum, lambda u: u[-1])
        )
        for turn in range(max(map(len, siblings)) - 1):
            there = [place for place, one in enumerate(siblings) if len(one) > turn + 1]
            own = np.array([siblings[place][turn] for place in there])
            turn_G = standardize(own, "sample") if len(there) > 1 else np.zeros(1)
            rows += [
                (value > 0, whole_G[place], last_G[place], advantage)
                for place, value, advantage in zip(there, own, turn_G, strict=True)
            ]
    right, whole, last, turn_own = (np.array(column) for column in zip(*rows, strict=True))
    tried = {"the whole answer": whole, "the last turn": last, "the turn": turn_own} | {
        "MT-GRPO, episode, 1": whole + turn_own,
        "MT-GRPO, episode, 2": whole + 2 * turn_own,
        "MT-GRPO, last turn, 1": last + turn_own,
        "MT-GRPO, last turn, 4": last + 4 * turn_own,
    }
    return {name: float((one[right].mean() - one[~right].mean()) / one.std()) for name, one in tried.items()}


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
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[21, 22, 23, 24, 25])
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_prompts(folder / "prompts.jsonl", CALLS.draw("train", NUM_PROMPTS, 0))
    with serve_judge():
        curves = {name: dict[int, list[float]]() for name in given.only}
        for seed in given.seeds:
            for name in given.only:
                curves[name][seed] = measure(folder, name, seed, given.overrides)
    REPORT.write_text(report(folder, curves), encoding="utf-8")
    print(REPORT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
