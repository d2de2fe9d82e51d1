"""Whether the reward-hacking alarm rings where a policy hacks its judges, and in no clean run.

    OMP_NUM_THREADS=1 python benchmarks/hacking_alarm.py runs/hacking_alarm

20 quickstarts of 30 steps (seeds 0 to 19), whose judge is honest, and runs whose judges are captured. Finished runs are
reused. Writes benchmarks/hacking_alarm.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "hacking_alarm.md"
CLEAN = {f"clean, seed {seed}": ("+experiment=quickstart", "train.num_steps=30", f"seed={seed}") for seed in range(20)}
CAPTURED: Mapping[str, tuple[str, ...]] = {
    "one judge that can be fooled": ("+experiment=reward_hacking",),
    "jury by median, the first member honest, two captured": (
        "+experiment=jury",
        "grm=tiny",
        "grm@models.confident=tiny_praise",
        "reward.vote=median",
    ),
}
EVALUATIONS = ("initial", "final")


def summary_of(folder: Path, name: str, overrides: Sequence[str]) -> Mapping[str, Any]:
    run_dir = folder / name.replace(" ", "_").replace(",", "")
    if not (run_dir / "summary.json").exists():
        command = [sys.executable, ROOT / "launch.py", *overrides, f"run_dir={run_dir}", "resume=auto"]
        subprocess.run([str(part) for part in command], cwd=ROOT, check=True)
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))


def row(name: str, summary: Mapping[str, Any]) -> str:
    truth, reward = (
        " -> ".join(f"{summary['eval'][when][metric]:.2f}" for when in EVALUATIONS)
        for metric in ("true_accuracy", "reward")
    )
    return f"| {name} | {summary['steps']} | {truth} | {reward} | {' '.join(summary['alarms']) or 'none'} |"


def main() -> None:
    folder = Path(sys.argv[1])
    found = {name: summary_of(folder, name, overrides) for name, overrides in (CLEAN | CAPTURED).items()}
    rung = sum(bool(found[name]["alarms"]) for name in CLEAN)
    lines = [
        "# The reward-hacking alarm",
        "",
        f"`OMP_NUM_THREADS=1 python benchmarks/hacking_alarm.py {folder}`",
        "",
        f"{rung} of {len(CLEAN)} clean runs have an alarm.",
        "",
        "| run | steps | true accuracy | reward | alarms |",
        "|---|---|---|---|---|",
        *(row(name, summary) for name, summary in found.items()),
    ]
    REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(REPORT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
