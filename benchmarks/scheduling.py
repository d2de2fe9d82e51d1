"""The scheduler in figures: overlap against its lower bound, and the cost of the pipeline itself.

    python benchmarks/scheduling.py overlap     # real time, emulated service times; four minutes
    python benchmarks/scheduling.py overhead    # engines without cost: rollouts per second, bytes in flight
    python benchmarks/scheduling.py simulator   # duration of a simulation: 64 slots, 100 steps; --slots for more

Real parts throughout: pipeline, admission, groups, routers, judge with its parser, packer, weight sync. Only engines
and learner take time instead of working.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import resource
import statistics
import time
from dataclasses import replace

from in_sequence import run_in_sequence

from grmpipe.capacity.cost import Costs, LearnerSpeed
from grmpipe.capacity.simulate.scripts import Lengths, lognormal
from grmpipe.capacity.simulate.simulated_cluster import SimulatedRun, Simulation, simulate
from grmpipe.capacity.simulate.stages import Workload, flow_of
from grmpipe.config.data import RolloutConfig
from grmpipe.config.judge import JudgeConfig, LimitsConfig
from grmpipe.config.resolve_config import resolve_config
from grmpipe.config.run_sections import RunSections
from grmpipe.config.train import TrainConfig
from grmpipe.data.stream import PromptStream
from grmpipe.pipeline.interfaces import PipelineState
from grmpipe.types import Prompt
from models.types import EngineSpeed, Message
from scheduler.events import NoEvents
from scheduler.placement import Placement, PlacementConfig, PoolConfig, RoleConfig, place

ALL = 1 << 20  # requests in flight: no concurrency limit
PATIENCE_S = 1e5


def workload(
    *, groups: int, staleness: int, rollouts: Lengths, judgements: Lengths, num_judgements: int = 4
) -> Workload:
    """Groups of 8."""
    config = resolve_config(
        RunSections(
            train=TrainConfig(groups_per_batch=groups, group_size=8, max_staleness=staleness, micro_batch_tokens=4096),
            rollout=RolloutConfig(
                max_new_tokens=2048, min_tokens_per_s=1, group_deadline_s=PATIENCE_S, max_concurrency=ALL
            ),
            judge=JudgeConfig(
                num_judgements=num_judgements,
                max_new_tokens=1024,
                limits=LimitsConfig(min_tokens_per_s=1, timeout_s=PATIENCE_S, max_concurrency=ALL),
            ),
        )
    )
    question = Message(role="user", content="How many apples are left when she has given away half of them? " * 4)
    return Workload(
        config=config,
        prompts=PromptStream([Prompt(prompt_id=f"p{n}", messages=(question,)) for n in range(4096)]),
        chars_per_token={"policy": 4.0, "grm": 4.0},
        lengths={"policy": rollouts, "judge": judgements},
    )


def seats(policy: int, grm: int, learner: int) -> Placement:
    counts = {"policy": policy, "grm": grm, "learner": learner}
    pools = {role: PoolConfig(slots=count) for role, count in counts.items()}
    roles = {role: RoleConfig(pool=role, replicas=count) for role, count in counts.items()}
    return place(PlacementConfig(pools=pools, roles=roles), ("policy", "learner", "grm"), ("policy", "grm"))


# -- overlap -------------------------------------------------------------------------------------------------------

# Long-tailed rollouts, four judgements of each, a learner. A row's time doesn't depend on the rest of the batch.
OVERLAP_COSTS = Costs(
    engines={
        "policy": EngineSpeed(step_s=2e-3, row_s=0.0, cached_token_s=0.0, prefill_token_s=5e-6, max_rows=32),
        "grm": EngineSpeed(step_s=5e-3, row_s=0.0, cached_token_s=0.0, prefill_token_s=5e-6, max_rows=16),
    },
    learner=LearnerSpeed(token_s=3e-5, step_s=0.1),
    sync_s=0.05,
)


def overlap_workload(staleness: int) -> Workload:
    return workload(groups=8, staleness=staleness, rollouts=lognormal(250, 0.6), judgements=lognormal(120, 0.3))


def overlap(num_steps: int, num_judges: int, virtual: bool) -> None:
    placement = seats(policy=2, grm=num_judges, learner=1)
    print("| variant | s per step | bound | times the bound | busy: policy, grm, learner |\n|---|---|---|---|---|")
    if not virtual:
        sequence = asyncio.run(in_sequence(placement, num_steps))
        print(f"| stages in sequence | {sequence:.3f} | | | |", flush=True)
    for staleness in (0, 1, 2):
        load = overlap_workload(staleness)
        if virtual:
            run = simulate(load, placement, OVERLAP_COSTS, num_steps)
        else:
            run = asyncio.run(Simulation(load, placement, OVERLAP_COSTS, num_steps, NoEvents()).run())
        print(f"| pipeline, max_staleness={staleness} | {row_of(run)} |", flush=True)


def row_of(run: SimulatedRun) -> str:
    busy = ", ".join(f"{run.busy[role]:.0%}" for role in ("policy", "grm", "learner"))
    return f"{run.step_s:.3f} | {run.bound.step_s:.3f} | {run.times_bound:.3f} | {busy}"


async def in_sequence(placement: Placement, num_steps: int) -> float:
    """The same stages, each waiting for the whole batch of the one before. Mean seconds per step."""
    load = overlap_workload(0)
    parts, _ = Simulation(load, placement, OVERLAP_COSTS, num_steps, NoEvents()).assemble()
    await parts.push_weights(0)
    steps, _ = await run_in_sequence(parts, flow_of(load.config, num_steps), PipelineState())
    return statistics.fmean(step.seconds for step in steps)


# -- overhead ------------------------------------------------------------------------------------------------------

FREE = EngineSpeed(step_s=0.0, row_s=0.0, cached_token_s=0.0, prefill_token_s=0.0, max_rows=ALL)
FREE_COSTS = Costs(engines={"policy": FREE, "grm": FREE}, learner=LearnerSpeed(token_s=0.0, step_s=0.0), sync_s=0.0)


def overhead(in_flight: list[int], profiled: bool) -> None:
    """Short answers: this measures the path through the pipeline, not the copying of token ids."""
    print("| rollouts in flight | judgements each | rollouts per CPU second | KB each, at most |\n|---|---|---|---|")
    for num_judgements in (1, 4):
        for rollouts in in_flight:
            few = lognormal(32, 0.3)
            load = workload(
                groups=rollouts // 8, staleness=0, rollouts=few, judgements=few, num_judgements=num_judgements
            )
            num_steps = max(2, 8000 // rollouts)
            before_kb, began_s = peak_kb(), time.process_time()
            simulate(load, seats(4, 4, 1), FREE_COSTS, num_steps)
            rate = rollouts * num_steps / (time.process_time() - began_s)
            each_kb = (peak_kb() - before_kb) / rollouts
            print(f"| {rollouts} | {num_judgements} | {rate:.0f} | {each_kb:.1f} |", flush=True)
    if profiled:
        few = lognormal(32, 0.3)
        load = workload(groups=512, staleness=0, rollouts=few, judgements=few, num_judgements=1)
        profile = cProfile.Profile()
        profile.runcall(simulate, load, seats(4, 4, 1), FREE_COSTS, 2)
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)


def peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# -- duration of a simulation ----------------------------------------------------------------------------------------


def simulator(slots: int, rollouts: int, num_steps: int) -> None:
    load = workload(groups=rollouts // 8, staleness=1, rollouts=lognormal(300, 0.6), judgements=lognormal(150, 0.3))
    load = replace(load, config=replace(load.config, train=replace(load.config.train, micro_batch_tokens=16384)))
    speed = EngineSpeed(step_s=0.012, row_s=1e-4, cached_token_s=1e-7, prefill_token_s=2e-5, max_rows=64)
    learner = LearnerSpeed(token_s=2e-5 * 64 / slots, step_s=0.5)
    costs = Costs(engines={"policy": speed, "grm": speed}, learner=learner, sync_s=0.5)
    began_s = time.process_time()
    run = simulate(load, seats(slots * 3 // 8, slots // 2, slots // 8), costs, num_steps)
    took_s = time.process_time() - began_s
    print(
        f"{slots} slots, {num_steps} steps of {rollouts} rollouts x 4 judgements: "
        f"{took_s:.1f} CPU s, {peak_kb() / 1024:.0f} MB; "
        f"simulated {run.step_s:.2f} s per step, {run.times_bound:.2f} times the bound"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overlap", "overhead", "simulator"))
    parser.add_argument("--steps", type=int, default=0, help="of each way; 0: 16 for overlap, 100 for simulator")
    parser.add_argument("--virtual", action="store_true", help="overlap on the virtual clock")
    parser.add_argument("--in-flight", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--judges", type=int, default=5, help="engines of the GRM, of overlap")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--rollouts", type=int, default=512)
    args = parser.parse_args()
    if args.what == "overlap":
        overlap(args.steps or 16, args.judges, args.virtual)
    elif args.what == "overhead":
        overhead(args.in_flight, args.profile)
    else:
        simulator(args.slots, args.rollouts, args.steps or 100)


if __name__ == "__main__":
    main()
