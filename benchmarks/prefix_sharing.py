"""Compares a learner with shared prompts and one with a copy per sibling, on the rollouts of a finished run.

    OMP_NUM_THREADS=1 python benchmarks/prefix_sharing.py runs/quickstart

Both start from the run's policy and train its batches in its order, in this process, alternating: which one begins
changes from step to step. A step is all that the driver and the learner do with judged groups: advantages, packing,
forward, backward, optimizer. Writes benchmarks/prefix_sharing.md.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from quickstart import busy_share_of_cores, commit_date, machine

from grmpipe.config.run_config import RunConfig
from grmpipe.config.yaml_io import read_yaml
from grmpipe.train.batching.packer import num_tokens
from grmpipe.train.batching.prefix_tree import trees_of
from grmpipe.train.batching.samples import judged_siblings, split_rollout
from grmpipe.train.learner.batch_trainer import BatchTrainer
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_group import LearnerGroup
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.types import JudgedGroup, Metrics
from grmpipe.validate.retraining import PreparedRetraining, prepare_retraining
from scheduler.placement import Seat
from scheduler.processes.actors import InProcessGroup

REPORT = Path(__file__).with_suffix(".md")
WAYS = {"shared": True, "a copy with each": False}
WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step of one way."""

    seconds: float
    num_tokens: int  # passed through the learner
    metrics: Metrics


def prepared_for(run_dir: Path, way: bool) -> PreparedRetraining:
    config: RunConfig = read_yaml(run_dir / "config.yaml")
    config = replace(config, train=replace(config.train, prefix_sharing=way))
    config = replace(
        config, data=replace(config.data, retrain_from=str(run_dir)), cluster=replace(config.cluster, kind="inprocess")
    )
    return prepare_retraining(config, lambda what, share: None)


async def trainer_of(prepared: PreparedRetraining) -> BatchTrainer:
    config = prepared.config
    spec = LearnerSpec(
        model_path=prepared.policy.path,
        train=config.train,
        algorithm=config.algorithm,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
    )
    seat = Seat(role="learner", rank=0, pool="all", slots=(0,), share=1)
    ranks = await InProcessGroup.start([seat], functools.partial(Learner, spec))
    return BatchTrainer(LearnerGroup(ranks), config.train, config.algorithm, config.rollout.max_new_tokens)


async def step(trainer: BatchTrainer, groups: Sequence[JudgedGroup], way: bool) -> Step:
    began_s = time.perf_counter()
    for group in groups:
        await trainer.take(group)
    metrics = await trainer.step(groups)
    return Step(seconds=time.perf_counter() - began_s, num_tokens=packed_tokens(groups, way), metrics=metrics)


def packed_tokens(groups: Sequence[JudgedGroup], way: bool) -> int:
    rollouts = [rollout for group in groups for rollout, _ in judged_siblings(group)]
    samples = [one for played in rollouts for one in split_rollout(played, np.zeros(played.num_sampled_tokens))]
    return num_tokens(trees_of(samples, way))


async def measure(run_dir: Path, num_steps: int) -> dict[str, list[Step]]:
    """The counted steps."""
    prepared = {name: prepared_for(run_dir, way) for name, way in WAYS.items()}
    steps: dict[str, list[Step]] = {name: [] for name in WAYS}
    trainers = {name: await trainer_of(prepared[name]) for name in WAYS}
    recorded = next(iter(prepared.values())).recorded
    for number in range(1, min(num_steps, len(recorded.steps)) + 1):
        groups = recorded.batch(number)
        for name in [*WAYS][:: 1 if number % 2 else -1]:
            steps[name].append(await step(trainers[name], groups, WAYS[name]))
    return steps


def report(steps: dict[str, list[Step]], busy_share: float) -> list[str]:
    counted = {name: some[WARM_UP_STEPS:] for name, some in steps.items()}
    base = median_s(counted["a copy with each"])
    lines = [
        "# Shared prompts",
        "",
        "`OMP_NUM_THREADS=1 python benchmarks/prefix_sharing.py <run>`: the learner of a finished quickstart, with",
        "`train.prefix_sharing=true` and with `false`: the same judged groups in one process, alternating, over",
        f"{len(steps['shared'])} steps ({WARM_UP_STEPS} not counted). {machine()}; code of {commit_date()}.",
        f"Other work on the cores, right before or after: {busy_share:.0%}.",
        "",
        "| prompt of siblings | tokens per step (median) | s per step (median) | lowest, highest | times as fast |",
        "|---|---|---|---|---|",
    ]
    for name, some in counted.items():
        seconds = [one.seconds for one in some]
        tokens = statistics.median(one.num_tokens for one in some)
        ends = f"{min(seconds):.3f}, {max(seconds):.3f}"
        lines.append(f"| {name} | {tokens:,.0f} | {median_s(some):.3f} | {ends} | {base / median_s(some):.2f} |")
    return [*lines, "", *sameness(steps)]


def sameness(steps: dict[str, list[Step]]) -> list[str]:
    """The relative differences of gradient norms. Both begin with the same weights; later these differ by rounding."""
    norms = [[some.metrics["train/grad_norm"] for some in pair] for pair in zip(*steps.values(), strict=True)]
    apart = [abs(shared / copied - 1) for shared, copied in norms]
    return [
        f"Gradient norms differ by {apart[0]:.1e} in the first step, relatively, and by at most {max(apart):.1e} in "
        "all:",
        "float32 rounds in another order, which affects the weights of later steps.",
    ]


def median_s(steps: Sequence[Step]) -> float:
    return statistics.median(one.seconds for one in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="of a finished quickstart")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    busy_before = busy_share_of_cores()
    steps = asyncio.run(measure(args.run_dir, args.steps))
    lines = report(steps, max(busy_before, busy_share_of_cores()))
    REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
