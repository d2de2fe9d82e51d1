"""Compares the quickstart with TRL's GRPOTrainer: the same policy, prompts, judge and group size, on this machine.

    python benchmarks/against_trl.py runs/against_trl --trl .trl/bin/python           # all that is missing
    python benchmarks/against_trl.py runs/against_trl --trl .trl/bin/python --only settings grmpipe-0 trl-0
    python benchmarks/against_trl.py runs/against_trl --trl .trl/bin/python --only    # only the report
    python benchmarks/against_trl.py runs/against_trl_smollm2 --trl .trl/bin/python --model smollm2 --weights FILE.gguf

trl_run.py is the other side and says how to make its environment. First a few steps of TRL with each setting, to choose
the fastest; then alternating runs of both, and grmpipe's stages in sequence. Writes benchmarks/against_trl.md,
up to its part by hand.

`--model smollm2` compares `+experiment=smollm2` with TRL in the same way, three times by turns, and writes the section
of SmolLM2 in that file. `make smollm2` fetches its weights. CPU seconds are those of driver, engine and learner
here, of the one process there; memory is that of all processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmark_page import BY_HAND, write_page
from in_sequence import BASELINE, STAGES, mean_s, measure
from quickstart import busy_share_of_cores, commit_date, machine, quiet

from grmpipe.config.io.yaml_io import read_yaml
from grmpipe.data.prompts import load_prompts
from grmpipe.data.stream import PromptStream
from grmpipe.models.hub import find_files
from grmpipe.tiny.quality import policy_quality
from grmpipe.tiny.recipes import RECIPES
from grmpipe.tiny.resolve import resolve_directory
from grmpipe.tiny.tiny_sampler import TinySampler

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "against_trl.md"
SEEDS = (0, 1)
STEPS, GROUPS, GROUP_SIZE = 80, 16, 8
LOOK_EVERY, HELD_OUT = 10, 256
TARGETS = (0.5, 0.6, 0.7)
SETTLED = 5  # first steps, which no mean or median includes
ROUNDS = 2
SETTINGS = {"1 thread": 1, "2 threads": 2}
SETTINGS_STEPS = 8
SMOLLM2 = "## SmolLM2-135M"
SMOLLM2_SEEDS, SMOLLM2_STEPS, SMOLLM2_SETTINGS_STEPS, SMOLLM2_SETTLED = (0, 1, 2), 12, 3, 2
SMOLLM2_GROUPS, SMOLLM2_HELD_OUT = 8, 128
MEMORY = re.compile(r"([0-9.]+) GB together")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The run of one side with one seed. No step's time includes held-out evaluations."""

    step_s: list[float]
    looks: dict[int, float]  # step -> true accuracy, sampled at T = 1
    final: float  # of the trained policy, sampled, measured by the same code on both sides
    final_greedy: float
    stages_s: dict[str, float]  # per step: medians if stages are sequential, shares of the run if they overlap
    busy_share: float  # of the cores by other processes, just before or after

    @property
    def mean_s(self) -> float:
        """The mean step: steps of grmpipe alternate between long and short, so their median is no step's cost."""
        return statistics.fmean(self.step_s[SETTLED:])

    def seconds_to(self, accuracy: float) -> float | None:
        """Seconds of steps up to the first evaluation with this accuracy. None if there was none."""
        reached = [step for step, found in sorted(self.looks.items()) if found >= accuracy]
        return sum(self.step_s[: reached[0]]) if reached else None


def tiny(name: str) -> str:
    return str(resolve_directory(RECIPES[name]))


# -- ours ----------------------------------------------------------------------------------------------------------


def run_ours(folder: Path, seed: int) -> Run:
    run_dir = folder / f"grmpipe-{seed}"
    command = [
        sys.executable, "launch.py", "+experiment=quickstart", "tracking=none", "judge_monitor.every=0", f"seed={seed}",
        f"train.num_steps={STEPS}", f"train.groups_per_batch={GROUPS}", f"train.group_size={GROUP_SIZE}",
        f"data.num_eval_prompts={HELD_OUT}", f"judge_monitor.anchors={HELD_OUT}",
        f"evaluate.every={LOOK_EVERY}",
        "train.checkpoint_every=0", f"run_dir={run_dir}",
    ]  # fmt: skip
    busy = measured_alone(command, os.environ | {"OMP_NUM_THREADS": "1"})
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "time/step_s" in line]
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    step_s = [step["time/step_s"] for step in steps]
    return Run(
        step_s=step_s,
        looks={line["step"]: line["eval/true_accuracy"] for line in lines if "eval/true_accuracy" in line},
        **finals(run_dir / "policy"),
        stages_s={
            **{role: seconds / len(step_s) for role, seconds in summary["busy_s"].items()},
            "learner waits": statistics.fmean(step["stall/groups_s"] for step in steps),
            "sync": statistics.fmean(step["sync/push_s"] for step in steps),
        },
        busy_share=busy,
    )


def measured_alone(command: Sequence[str], env: Mapping[str, str]) -> float:
    """Run a command to its end. Returns how busy others kept the cores. Exits if it fails; its output is on the
    screen.
    """
    before = busy_share_of_cores()
    if subprocess.run(command, cwd=ROOT, env=env, check=False).returncode != 0:
        sys.exit(f"failed: {' '.join(command)}")
    return max(before, busy_share_of_cores())


def finals(policy: Path) -> dict[str, float]:
    quality = policy_quality("policy", TinySampler(policy))
    return {"final": quality["true_accuracy"], "final_greedy": quality["true_accuracy_greedy"]}


def run_stages(folder: Path) -> dict[str, float]:
    """The stages of grmpipe one after another, in one process on one core: medians of a step."""
    with tempfile.TemporaryDirectory() as directory:
        config = quiet(read_yaml(folder / "grmpipe-0" / "config.yaml"))
        rounds = asyncio.run(measure(config, Path(directory), ROUNDS))
    steps = [step for by_way in rounds for step in by_way[BASELINE]]
    stages_s = {stage: statistics.median(step.stages_s[stage] for step in steps) for stage in STAGES}
    return {"step": mean_s(steps), **stages_s}


# -- TRL's ---------------------------------------------------------------------------------------------------------


def run_trl(folder: Path, python: str, seed: int, setting: str) -> Run:
    out = folder / f"trl-{seed}"
    busy = trl(out, python, seed, setting, STEPS)
    found = json.loads((out / "trl.json").read_text(encoding="utf-8"))
    return Run(
        step_s=[step["step"] for step in found["steps"]],
        looks={int(step): accuracy for step, accuracy in found["looks"].items()},
        **finals(out / "policy"),
        stages_s=stages_of_trl(found["steps"][SETTLED:]),
        busy_share=busy,
    )


def trl(out: Path, python: str, seed: int, setting: str, steps: int) -> float:
    """Run TRL with the prompts in the order of grmpipe's run with this seed."""
    command = [
        python, "benchmarks/trl_run.py", str(out), f"--policy={tiny('policy')}", f"--grm={tiny('grm')}",
        f"--questions={write_questions(out, seed, steps)}", f"--steps={steps}", f"--groups={GROUPS}", f"--seed={seed}",
        f"--look-every={LOOK_EVERY}", f"--held-out={HELD_OUT}",
        f"--threads={SETTINGS[setting]}",
    ]  # fmt: skip
    return measured_alone(command, os.environ | {"OMP_NUM_THREADS": str(SETTINGS[setting]), "HF_HUB_OFFLINE": "1"})


def write_questions(out: Path, seed: int, steps: int) -> Path:
    """The prompts of grmpipe's run with this seed, one per line, in their order."""
    out.mkdir(parents=True, exist_ok=True)
    stream = PromptStream(load_prompts("tiny://train"), seed=seed)
    drawn = [stream.at(draw).messages[0].content for draw in range(steps * GROUPS)]
    questions = out / "questions.txt"
    questions.write_text("\n".join(drawn) + "\n", encoding="utf-8")
    return questions


def stages_of_trl(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians of a step; `other` is the optimizer, the data and the trainer around the stages."""

    def median(seconds: Callable[[Mapping[str, float]], float]) -> float:
        return statistics.median(seconds(step) for step in steps)

    def inside(step: Mapping[str, float]) -> float:
        return step["generate"] + step["reward"] + step["forward"]

    return {
        "generate": median(lambda step: step["generate"]),
        "reward": median(lambda step: step["reward"]),
        "forward": median(lambda step: step["forward"]),
        "backward": median(lambda step: step["training_step"] - inside(step)),
        "other": median(lambda step: step["step"] - step["training_step"]),
    }


def try_settings(folder: Path, python: str) -> dict[str, float]:
    """Seconds per step with each setting."""
    found = {}
    for setting in SETTINGS:
        out = folder / f"settings-{setting.replace(' ', '_')}"
        trl(out, python, 0, setting, SETTINGS_STEPS)
        steps = json.loads((out / "trl.json").read_text(encoding="utf-8"))["steps"]
        found[setting] = statistics.median(step["step"] for step in steps[SETTLED - 2 :])
    return found


# -- SmolLM2 -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    """The run of one side on SmolLM2. right: share of held-out answers, by ("first" or "last") + ("sampled" or
    "greedy").
    """

    step_s: list[float]
    cpu_s: list[float]
    peak_gb: float
    right: dict[str, float]
    busy_share: float  # of the cores by other processes, just before or after

    def median(self, values: Sequence[float]) -> float:
        return statistics.median(values[SMOLLM2_SETTLED:])


def measured_with_memory(command: Sequence[str], env: Mapping[str, str], output: Path) -> tuple[float, float]:
    """Run a command to its end. Returns how busy others kept the cores, and the peak memory of all its processes."""
    wrapped = [sys.executable, "benchmarks/process_memory.py", *command]
    before = busy_share_of_cores()
    with output.open("w", encoding="utf-8") as file:
        if subprocess.run(wrapped, cwd=ROOT, env=env, stdout=file, check=False).returncode != 0:
            sys.exit(f"failed: {' '.join(command)}; see {output}")
    busy = max(before, busy_share_of_cores())
    found = MEMORY.search(output.read_text(encoding="utf-8"))
    assert found is not None, f"{output} has no line about memory"
    return busy, float(found[1])


def run_ours_smollm2(folder: Path, weights: str, seed: int) -> RealRun:
    run_dir = folder / f"grmpipe-{seed}-run"
    command = [
        sys.executable, "launch.py", "+experiment=smollm2", "tracking=none", f"policy.path={weights}", f"seed={seed}",
        f"train.num_steps={SMOLLM2_STEPS}", f"evaluate.every={SMOLLM2_STEPS}", "train.checkpoint_every=0",
        f"run_dir={run_dir}",
    ]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    busy, peak_gb = measured_with_memory(command, env, folder / f"grmpipe-{seed}.txt")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "time/step_s" in line]
    return RealRun(
        step_s=[step["time/step_s"] for step in steps],
        cpu_s=[sum(value for key, value in step.items() if key.endswith("/cpu_s")) for step in steps],
        peak_gb=peak_gb,
        right=right_answers(run_dir),
        busy_share=busy,
    )


def right_answers(run_dir: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in (run_dir / "eval_rollouts.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = {"first": 0, "last": max(row["step"] for row in rows)}
    return {
        f"{when} {how}": statistics.fmean(
            row["right"] for row in rows if row["step"] == step and (row["sample"] is None) == (how == "greedy")
        )
        for when, step in steps.items()
        for how in ("sampled", "greedy")
    }


def run_trl_smollm2(folder: Path, python: str, weights: str, seed: int, setting: str, steps: int) -> RealRun:
    out = folder / f"trl-{seed}-run-{setting.replace(' ', '_')}-{steps}"
    out.mkdir(parents=True, exist_ok=True)
    stream = PromptStream(load_prompts("tiny://short_answers/train"), seed=seed)
    questions = out / "questions.txt"
    drawn = [stream.at(draw).messages[0].content for draw in range(steps * SMOLLM2_GROUPS)]
    questions.write_text("\n".join(drawn) + "\n", encoding="utf-8")
    command = [
        python, "benchmarks/trl_run.py", str(out), "--task=smollm2", f"--policy={weights}", f"--questions={questions}",
        f"--steps={steps}", f"--groups={SMOLLM2_GROUPS}", f"--seed={seed}", f"--look-every={steps}",
        f"--held-out={SMOLLM2_HELD_OUT if steps == SMOLLM2_STEPS else 1}", f"--threads={SETTINGS[setting]}",
    ]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": str(SETTINGS[setting]), "HF_HUB_OFFLINE": "1"}
    busy, peak_gb = measured_with_memory(command, env, out / "output.txt")
    found = json.loads((out / "trl.json").read_text(encoding="utf-8"))
    sampled = {"first": found["looks"]["0"], "last": found["looks"][str(steps)]}
    return RealRun(
        step_s=[step["step"] for step in found["steps"]],
        cpu_s=[step["cpu"] for step in found["steps"]],
        peak_gb=peak_gb,
        right={f"{w} sampled": v for w, v in sampled.items()} | {f"{w} greedy": v for w, v in found["greedy"].items()},
        busy_share=busy,
    )


def parts_of_smollm2(folder: Path, python: str, file: str) -> dict[str, Callable[[], object]]:
    """Name -> part. Both sides load the same converted files."""
    weights = find_files(file, weights=True)

    def fastest() -> str:
        settings = read(folder, "settings")
        return min(settings, key=settings.__getitem__)

    def try_setting(setting: str) -> float:
        run = run_trl_smollm2(folder, python, weights, 0, setting, SMOLLM2_SETTINGS_STEPS)
        return run.median(run.step_s)

    def side(name: str, seed: int) -> Callable[[], object]:
        if name == "grmpipe":
            return lambda: asdict(run_ours_smollm2(folder, weights, seed))
        return lambda: asdict(run_trl_smollm2(folder, python, weights, seed, fastest(), SMOLLM2_STEPS))

    found: dict[str, Callable[[], object]] = {
        "settings": lambda: {setting: try_setting(setting) for setting in SETTINGS}
    }
    for seed in SMOLLM2_SEEDS:
        names = ("grmpipe", "trl") if seed % 2 == 0 else ("trl", "grmpipe")
        found |= {f"{name}-{seed}": side(name, seed) for name in names}
    return found


def pairs_of_smollm2(folder: Path) -> list[tuple[RealRun, RealRun]]:
    """The runs of grmpipe and TRL for each seed that both have run."""
    names = [(f"grmpipe-{seed}", f"trl-{seed}") for seed in SMOLLM2_SEEDS]
    return [
        (RealRun(**read(folder, ours)), RealRun(**read(folder, trls)))  # type: ignore[arg-type]
        for ours, trls in names
        if (folder / f"{ours}.json").exists() and (folder / f"{trls}.json").exists()
    ]


def report_smollm2(both: Sequence[tuple[RealRun, RealRun]], settings: Mapping[str, float]) -> list[str]:
    ratios = [other.median(other.step_s) / one.median(one.step_s) for one, other in both]
    cpu = [other.median(other.cpu_s) / one.median(one.cpu_s) for one, other in both]
    tried = ", ".join(f"{name} ({seconds:.1f} s per step)" for name, seconds in settings.items())
    runs = [(f"grmpipe, seed {seed}", one) for seed, (one, _) in enumerate(both)]
    runs += [(f"TRL, seed {seed}", other) for seed, (_, other) in enumerate(both)]

    def change(run: RealRun, how: str) -> str:
        return f"{run.right[f'first {how}']:.2f} -> {run.right[f'last {how}']:.2f}"

    rows = (
        ("one step (median), s", lambda run: f"{run.median(run.step_s):.1f}"),
        ("CPU seconds of a step (median)", lambda run: f"{run.median(run.cpu_s):.1f}"),
        ("peak memory, GB", lambda run: f"{run.peak_gb:.1f}"),
        ("right, sampled", lambda run: change(run, "sampled")),
        ("right, greedy", lambda run: change(run, "greedy")),
        ("other work on the cores, right before or after", lambda run: f"{run.busy_share:.0%}"),
    )
    return [
        SMOLLM2,
        "",
        *paragraph(f"""
            `python benchmarks/against_trl.py runs/against_trl_smollm2 --trl .trl/bin/python --model smollm2 --weights
            .smollm2/SmolLM2-135M-Instruct.Q4_1.gguf`: `+experiment=smollm2` and TRL 1.16.0's `GRPOTrainer` by turns, on
            {machine()}; code of {commit_date()}.
        """),
        "",
        f"**grmpipe makes {statistics.median(ratios):.1f} times TRL's steps per second** (median of {len(ratios)}: "
        f"{', '.join(f'{ratio:.1f}' for ratio in ratios)}),",
        f"and TRL takes {statistics.median(cpu):.1f} times its CPU seconds.",
        "",
        *paragraph(f"""
            The same on both sides: converted files of the model in float32; the same training questions in the same
            order; the reward function `right_and_brief`; LoRA of rank 16 and alpha 32 on all linear layers of the
            blocks; {SMOLLM2_GROUPS} groups of 4, at most 12 new tokens at temperature 1; AdamW, lr 5e-4, 5 steps of
            warm-up, then linearly to 0 in {SMOLLM2_STEPS} steps; token mean, clip 0.2, no KL. TRL has the faster of
            these settings: {tried}; it has no gradient checkpointing, no bf16, one batch per step. Accuracy is that of
            {SMOLLM2_HELD_OUT} held-out questions by the same rule, which no step's time includes. The first
            {SMOLLM2_SETTLED} steps are in no median. Memory is the peak of all processes of a side together (PSS).
        """),
        "",
        f"| | {' | '.join(name for name, _ in runs)} |",
        "|---" * (len(runs) + 1) + "|",
        *(f"| {label} | {' | '.join(figure(run) for _, run in runs)} |" for label, figure in rows),
    ]


# -- what is run ---------------------------------------------------------------------------------------------------


def parts(folder: Path, python: str) -> dict[str, Callable[[], object]]:
    """Name -> part, in the order in which they run: the sides alternate, and which one begins changes with the seed."""

    def fastest() -> str:
        settings = read(folder, "settings")
        return min(settings, key=settings.__getitem__)

    def side(name: str, seed: int) -> Callable[[], object]:
        return lambda: asdict(run_ours(folder, seed) if name == "grmpipe" else run_trl(folder, python, seed, fastest()))

    found: dict[str, Callable[[], object]] = {"settings": lambda: try_settings(folder, python)}
    for seed in SEEDS:
        names = ("grmpipe", "trl") if seed % 2 == 0 else ("trl", "grmpipe")
        found |= {f"{name}-{seed}": side(name, seed) for name in names}
    return found | {"stages": lambda: run_stages(folder)}


def read(folder: Path, part: str) -> dict[str, float]:
    return json.loads((folder / f"{part}.json").read_text(encoding="utf-8"))


def read_run(folder: Path, part: str) -> Run | None:
    path = folder / f"{part}.json"
    if not path.exists():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    return Run(**values | {"looks": {int(step): accuracy for step, accuracy in values["looks"].items()}})


def pairs(folder: Path) -> list[tuple[Run, Run]]:
    """The runs of grmpipe and TRL for each seed that both have run."""
    found = [(read_run(folder, f"grmpipe-{seed}"), read_run(folder, f"trl-{seed}")) for seed in SEEDS]
    return [(ours, trls) for ours, trls in found if ours is not None and trls is not None]


# -- report --------------------------------------------------------------------------------------------------------


Row = tuple[str, Callable[[Run], str]]

ROWS: tuple[Row, ...] = (
    ("one step (mean), s", lambda run: f"{run.mean_s:.3f}"),
    ("one step (median), s", lambda run: f"{statistics.median(run.step_s[SETTLED:]):.3f}"),
    ("all steps, s", lambda run: f"{sum(run.step_s):.1f}"),
    *(
        (f"steps' seconds to true accuracy {target}", lambda run, target=target: seconds_text(run.seconds_to(target)))
        for target in TARGETS
    ),
    ("true accuracy at T = 1, after", lambda run: f"{run.final:.3f}"),
    ("true accuracy, greedy, after", lambda run: f"{run.final_greedy:.3f}"),
    ("other work on the cores, right before or after", lambda run: f"{run.busy_share:.0%}"),
)


def seconds_text(seconds: float | None) -> str:
    return "not reached" if seconds is None else f"{seconds:.1f}"


def table(ours: Sequence[Run], trls: Sequence[Run]) -> list[str]:
    names = [f"{side}, seed {seed}" for side in ("grmpipe", "TRL") for seed in range(len(ours))]
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    return [*lines, *(f"| {label} | {' | '.join(map(figure, (*ours, *trls)))} |" for label, figure in ROWS)]


def curve(ours: Sequence[Run], trls: Sequence[Run]) -> list[str]:
    runs = {
        f"{side}, seed {seed}": run for side, of in (("grmpipe", ours), ("TRL", trls)) for seed, run in enumerate(of)
    }
    lines = [f"| step | {' | '.join(runs)} |", "|---" * (len(runs) + 1) + "|"]
    for step in range(0, STEPS + 1, LOOK_EVERY):
        lines.append(f"| {step} | {' | '.join(f'{run.looks[step]:.3f}' for run in runs.values())} |")
    return lines


def means(runs: Sequence[Run], stage: str) -> str:
    return f"{statistics.fmean(run.stages_s[stage] for run in runs):.3f}"


def stages(ours: Sequence[Run], trls: Sequence[Run], alone: Mapping[str, float] | None) -> list[str]:
    """TRL's stages next to grmpipe's in the pipeline, and in sequence if that was measured."""
    learning = sum(statistics.fmean(run.stages_s[stage] for run in trls) for stage in ("forward", "backward", "other"))
    step = [f"{statistics.fmean(run.mean_s for run in runs):.3f}" for runs in (trls, ours)]
    rows = (
        ("rollouts", means(trls, "generate"), means(ours, "policy"), "rollouts"),
        ("judgements", means(trls, "reward"), means(ours, "grm"), "judgements"),
        ("forward, backward, optimizer", f"{learning:.3f}", means(ours, "learner"), "micro-batches and step"),
        ("weight sync", "none needed", means(ours, "sync"), "weight sync"),
        ("the step", *step, "step"),
    )
    lines = ["| of a step, s | TRL | grmpipe, in flight |", "|---|---|---|"]
    lines += [f"| {label} | {theirs} | {own} |" for label, theirs, own, _ in rows]
    if alone is None:
        return lines
    more = ["grmpipe, its stages in sequence on one core |", "---|", *(f"{alone[row[-1]]:.3f} |" for row in rows)]
    return [f"{line} {cell}" if cell != "---|" else line + cell for line, cell in zip(lines, more, strict=True)]


def report(folder: Path) -> list[str]:
    both = pairs(folder)
    ours, trls = [one for one, _ in both], [other for _, other in both]
    settings = read(folder, "settings")
    ratios = " and ".join(f"{other.mean_s / one.mean_s:.1f}" for one, other in both)
    tried = ", ".join(f"{name} ({seconds:.2f} s per step)" for name, seconds in settings.items())
    return [
        "# Comparison with TRL",
        "",
        *paragraph(f"""
            `python benchmarks/against_trl.py runs/against_trl --trl .trl/bin/python`: the quickstart and TRL
            1.16.0's `GRPOTrainer`, alternating on the same machine: {machine()}; code of {commit_date()}.
        """),
        "",
        f"**A step of TRL takes {ratios} times as long as ours** (by seed; means, since ours alternate",
        "between long and short).",
        "",
        "## The same on both sides",
        "",
        *paragraph(f"""
            `tiny://policy` and `tiny://grm` in float32; the same training problems in the same order; {GROUPS} groups
            of {GROUP_SIZE}; AdamW, lr 3e-4, 5 steps of warm-up, gradients clipped at 1; token mean, clip 0.2, no KL;
            at most 64 new tokens at temperature 1; one judgement per rollout, of at most 128 tokens at temperature 1.
            Evaluations on the same {HELD_OUT} held-out problems every {LOOK_EVERY} steps, by the hidden rule, aren't
            counted. The trained policies are measured again at the end, by one program for both (512
            problems).
        """),
        "",
        *paragraph(f"""
            Both use both cores: ours is three processes of one thread each, on Ray; TRL is one process, with the
            fastest of these settings: {tried}. TRL's judge is a reward function that writes all judgements
            of a step in one batched `generate`. Gradient checkpointing and bf16 are off, all rollouts of a step go
            through forward and backward as one batch, and there is no old or reference policy to compute. Its vLLM
            mode is for GPUs and was not used; its continuous batching (`--continuous-batching` of trl_run.py) took
            12 GB on this CPU and had not finished {SETTINGS_STEPS} steps after 100 s.
        """),
        "",
        *paragraph("""
            Differences: ours is at most one version behind and corrects for it (TIS), TRL is on-policy. TRL divides
            by the sample's standard deviation, ours by the population's. An unparseable judgement is worth 0 in
            TRL; ours asks once more, and then leaves the rollout out.
        """),
        "",
        "## Time and accuracy",
        "",
        *table(ours, trls),
        "",
        f"True accuracy at T = 1 over the steps ({HELD_OUT} problems: good to 3 points):",
        "",
        *curve(ours, trls),
        "",
        "## Time by stage",
        "",
        *stages(ours, trls, read(folder, "stages") if (folder / "stages.json").exists() else None),
        "",
        "`In flight` is not compute time: the pipeline's stages overlap and share the cores, so that column doesn't "
        "add up.",
    ]


def paragraph(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the runs; finished runs there aren't repeated")
    parser.add_argument("--trl", required=True, help="the interpreter of TRL's environment: see trl_run.py")
    parser.add_argument(
        "--only", nargs="*", help="settings, grmpipe-0, trl-0, trl-1, grmpipe-1, stages; all by default"
    )
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--weights", help="of SmolLM2: a GGUF file or a directory")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    python = str(Path(args.trl).absolute())
    if args.model == "smollm2" and args.weights is None:
        parser.error("--model smollm2 needs --weights: a GGUF file or a directory of the model; see `make smollm2`")
    todo = parts(folder, python) if args.model == "tiny" else parts_of_smollm2(folder, python, args.weights)
    for name, measured in todo.items():
        path = folder / f"{name}.json"
        if not path.exists() and (args.only is None or name in args.only):
            path.write_text(json.dumps(measured()), encoding="utf-8")
    if not (folder / "settings.json").exists():
        return
    before = REPORT.read_text(encoding="utf-8").partition(BY_HAND)[0] if REPORT.exists() else ""
    tiny_part, heading, smollm2_part = before.partition(SMOLLM2)
    if args.model == "tiny" and pairs(folder):
        write_page(REPORT, "\n".join([*report(folder), ""]) + ("\n" + heading + smollm2_part) * bool(heading))
    if args.model == "smollm2" and (both := pairs_of_smollm2(folder)):
        section = report_smollm2(both, read(folder, "settings"))
        write_page(REPORT, tiny_part.rstrip("\n") + "\n\n" + "\n".join(section))


if __name__ == "__main__":
    main()
