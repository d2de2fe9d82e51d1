"""The scheduler on the virtual clock: overlap against its lower bound, how even steps are, long rollouts first, and
requests that move to engines with room.

    python benchmarks/scheduling.py     # minutes; prints the first tables of benchmarks/scheduling.md

Real parts throughout: pipeline, admission, groups, routers, judge with its parser, packer, weight sync. Only engines
and learner take time instead of working.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("", "tests")]
from configs import judge_config, run_config
from simulated_workload import always, seats, workload

from grmpipe.capacity.cost import Costs, LearnerSpeed
from grmpipe.capacity.simulate import simulated_cluster
from grmpipe.capacity.simulate.simulated_answers import Lengths, lognormal
from grmpipe.capacity.simulate.simulated_cluster import SimulatedRun, simulate
from grmpipe.capacity.simulate.workload import Workload
from grmpipe.config.data import RolloutConfig
from grmpipe.config.train import TrainConfig
from grmpipe.data.stream import PromptStream
from grmpipe.models.engines.simulated.simulated_engine import Author, SimulatedEngine
from grmpipe.models.types import EngineSpeed, Message
from grmpipe.pipeline.producer import ExpectedLengths
from grmpipe.scheduler.placement import Placement
from grmpipe.scheduler.routing.router import Router
from grmpipe.types import Prompt

# A row's time doesn't depend on the rest of its batch.
APART = EngineSpeed(step_s=2e-3, row_s=0.0, cached_token_s=0.0, prefill_token_s=5e-6, max_rows=32)
OVERLAP = Costs(
    engines={"policy": APART, "grm": replace(APART, step_s=5e-3, max_rows=16)},
    learner=LearnerSpeed(token_s=3e-5, step_s=0.1),
    sync_s=0.05,
)
OVERLAP_LENGTHS = lognormal(250, 0.6), lognormal(120, 0.3)  # of rollouts, of judgements
# Weights are read in every decoding step, so that twice the rows cost far less than twice the time.
BATCHED = EngineSpeed(step_s=0.012, row_s=4e-5, cached_token_s=4e-8, prefill_token_s=1.6e-5, max_rows=256)
# Four engines of 16 rows: of 128 rollouts half wait, of 256 three quarters.
QUEUED = {"policy": replace(BATCHED, max_rows=16), "grm": replace(BATCHED, max_rows=64)}
JUDGES_FULL = {"policy": replace(BATCHED, max_rows=64), "grm": replace(BATCHED, max_rows=16)}
SHORT, LONG = lognormal(200, 0.6), lognormal(300, 0.5)
LINEAR = replace(BATCHED, step_s=5.8e-4, row_s=6.8e-5)
# name -> engines, seconds of the learner for a token, lengths of rollouts and of judgements
EVEN: Mapping[str, tuple[EngineSpeed, float, Lengths, Lengths]] = {
    "balanced": (BATCHED, 1.6e-5, always(40), always(40)),
    "bound by the policy": (BATCHED, 1.6e-5, always(120), always(20)),
    "bound by the judge": (BATCHED, 1.6e-5, always(20), always(120)),
    "bound by the learner": (BATCHED, 8e-5, always(40), always(40)),
    "balanced, time linear in rows": (LINEAR, 1.6e-5, always(40), always(40)),
    "balanced, log-normal": (BATCHED, 1.6e-5, lognormal(33, 0.6), lognormal(38, 0.3)),
    "bound by the policy, log-normal": (BATCHED, 1.6e-5, lognormal(100, 0.8), lognormal(20, 0.3)),
    "bound by the judge, log-normal": (BATCHED, 1.6e-5, lognormal(20, 0.6), lognormal(100, 0.5)),
}


def make_load(
    groups: int, size: int, judgements: int, staleness: int, rollout: Lengths, judgement: Lengths
) -> Workload:
    config = run_config(
        train=TrainConfig(groups_per_batch=groups, group_size=size, max_staleness=staleness, micro_batch_tokens=4096),
        rollout=RolloutConfig(max_new_tokens=4096, min_tokens_per_s=1, group_deadline_s=1e5, max_concurrency=1 << 20),
        judge=judge_config(num_judgements=judgements, max_new_tokens=4096, min_tokens_per_s=1, timeout_s=1e5),
    )
    return replace(workload(lengths=rollout, critiques=judgement), config=config)


def make_queue(groups: int, staleness: int, sigma: float, sibling_correlation: float) -> Workload:
    """Rollouts of 64 prompts that differ in length, in groups of 8."""
    load = make_load(groups, 8, 1, staleness, lognormal(400, sigma), lognormal(100, 0.3))
    questions = [Message(role="user", content=f"How many apples are left in basket {n}? " * 4) for n in range(64)]
    prompts = [Prompt(prompt_id=f"p{n}", messages=(question,)) for n, question in enumerate(questions)]
    return replace(load, prompts=PromptStream(prompts), sibling_correlation=sibling_correlation)


def run(load: Workload, placement: Placement, costs: Costs, *, paced: bool, num_steps: int) -> SimulatedRun:
    held = nullcontext() if paced else patch("grmpipe.scheduler.admission.AdmissionPace.step_ended", lambda *_: None)
    with held:
        return simulate(load, placement, costs, num_steps)


def show_overlap() -> None:
    print("| judges | staleness | times the bound | without the pace |\n|---|---|---|---|")
    for judges in (5, 6):
        load = make_load(8, 8, 4, 1, *OVERLAP_LENGTHS)
        placement = seats(policy=2, grm=judges)
        on, off = (run(load, placement, OVERLAP, paced=paced, num_steps=30) for paced in (True, False))
        print(f"| {judges} | 1 | {on.times_bound:.3f} | {off.times_bound:.3f} |", flush=True)


def show_evenness() -> None:
    print("| load | s per step | spread | s without the pace | spread |\n|---|---|---|---|---|")
    for name, (speed, token_s, rollout, judgement) in EVEN.items():
        learner = LearnerSpeed(token_s=token_s, step_s=0.02)
        costs = Costs(engines={"policy": speed, "grm": speed}, learner=learner, sync_s=0.05)
        cells = []
        for paced in (True, False):
            done = run(
                make_load(8, 4, 1, 1, rollout, judgement), seats(policy=1, grm=1), costs, paced=paced, num_steps=120
            )
            times_s = [step.step_s for step in done.steps[16:118]]
            mean_s = statistics.fmean(times_s)
            cells.append(f"{mean_s:.3f} | {statistics.pstdev(times_s) / mean_s:.2f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def show_long_first() -> None:
    print("| rollouts | staleness | sigma | correlation | s per step | in order of arrival | ratio |")
    print("|---|---|---|---|---|---|---|")
    costs = Costs(engines=QUEUED, learner=LearnerSpeed(token_s=1.5e-5, step_s=0.1), sync_s=0.05)
    for groups, staleness, sigma, correlation in itertools.product((16, 32), (0, 1, 2), (0.8, 1.2), (0.25, 0.5)):
        steps_s = []
        for known in (nullcontext(), patch.object(ExpectedLengths, "__getitem__", return_value=0.0)):
            with known:
                load = make_queue(groups, staleness, sigma, correlation)
                steps_s.append(simulate(load, seats(policy=4, grm=2), costs, 40).step_s)
        first, arrival = steps_s
        row = (groups * 8, staleness, sigma, correlation, f"{first:.2f}", f"{arrival:.2f}", f"{first / arrival:.3f}")
        print(f"| {' | '.join(map(str, row))} |", flush=True)


# name -> groups, judgements of a rollout, lengths, engines, their speeds, (role, how much slower its first engine is)
MOVES: Mapping[
    str, tuple[int, int, Lengths, Lengths, Mapping[str, int], Mapping[str, EngineSpeed], tuple[str, float]]
] = {
    "six equal judges": (16, 4, SHORT, LONG, {"policy": 2, "grm": 6}, JUDGES_FULL, ("grm", 1.0)),
    "a judge at half speed": (16, 4, SHORT, LONG, {"policy": 2, "grm": 6}, JUDGES_FULL, ("grm", 2.0)),
    "a judge at 0.8 of the speed": (16, 4, SHORT, LONG, {"policy": 2, "grm": 6}, JUDGES_FULL, ("grm", 1.25)),
    "a policy engine at half speed": (
        32, 1, lognormal(400, 0.8), lognormal(100, 0.3), {"policy": 4, "grm": 2}, QUEUED, ("policy", 2.0),
    ),
    "overlap, 5 judges": (8, 4, *OVERLAP_LENGTHS, {"policy": 2, "grm": 5}, OVERLAP.engines, ("grm", 1.0)),
    "overlap, 6 judges": (8, 4, *OVERLAP_LENGTHS, {"policy": 2, "grm": 6}, OVERLAP.engines, ("grm", 1.0)),
}  # fmt: skip


def show_moves() -> None:
    print("| load | staleness | s | s if requests stay | ratio |\n|---|---|---|---|---|")
    for (name, load), staleness in itertools.product(MOVES.items(), (0, 1)):
        groups, judgements, rollout, judgement, engines, speeds, slow = load
        costs = Costs(engines=speeds, learner=LearnerSpeed(token_s=1.5e-5, step_s=0.1), sync_s=0.05)
        took_s = []
        for moves in (nullcontext(), patch.object(Router, "_fill", lambda *_: None)):
            with moves, patch.object(simulated_cluster, "SimulatedEngine", SlowFirst(*slow)):
                done = simulate(
                    make_load(groups, 8, judgements, staleness, rollout, judgement), seats(**engines), costs, 24
                )
            took_s.append(done.steps[-1].ended_s)
        print(f"| {name} | {staleness} | {took_s[0]:.1f} | {took_s[1]:.1f} | {took_s[0] / took_s[1]:.3f} |", flush=True)


class SlowFirst:
    """Makes engines; a role's first one is slower."""

    def __init__(self, role: str, times: float) -> None:
        self._role, self._times = role, times

    def __call__(self, role: str, author: Author, *, speed: EngineSpeed, **options: Any) -> SimulatedEngine:
        if role == self._role:
            speed = replace(speed, step_s=speed.step_s * self._times, row_s=speed.row_s * self._times)
            self._times = 1.0
        return SimulatedEngine(role, author, speed=speed, **options)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    show_evenness()
    show_overlap()
    show_long_first()
    show_moves()
