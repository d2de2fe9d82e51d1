"""Compares the pipeline with its own stages in sequence: the same running parts, in alternating blocks of steps. Starts
no run.

In sequence, every stage waits for the whole batch of the stage before it. Overlap must beat this baseline;
quickstart.py measures and reports it.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from grmpipe.config.run_config import RunConfig
from grmpipe.envs.play import RolloutRequest
from grmpipe.judge.pointwise_adapter import judge_alone
from grmpipe.models.seeds import derive_seed
from grmpipe.models.types import ignore_first_token
from grmpipe.pipeline.group import Group, GroupState
from grmpipe.pipeline.interfaces import FlowConfig, PipelineComponents, PipelineState, StepReport
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.run.build.compose_pipeline import make_components
from grmpipe.run.build.start import start
from grmpipe.run.features.cotrain.cotraining import CoTrainings
from grmpipe.run.observers import Observers
from grmpipe.run.prepare import prepare
from grmpipe.types import Rollout

STEPS_PER_BLOCK = 6  # counted steps; a block has one more at each end, where the pipeline fills and drains
STAGES = ("rollouts", "judgements", "micro-batches and step", "weight sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step of either way."""

    seconds: float
    num_tokens: int  # sampled by the policy for it
    stages_s: Mapping[str, float] = field(default_factory=dict)  # if they don't overlap


Block = Callable[[PipelineComponents, FlowConfig, PipelineState], Awaitable[tuple[list[Step], PipelineState]]]
Rounds = list[dict[str, list[Step]]]  # per round and way, the counted steps


# -- the two ways --------------------------------------------------------------------------------------------------


async def run_pipeline(
    parts: PipelineComponents, flow: FlowConfig, pipeline_state: PipelineState
) -> tuple[list[Step], PipelineState]:
    """Run from the state to flow.num_steps; nothing is in flight at either end."""
    steps: list[Step] = []

    async def count(report: StepReport) -> None:
        rollouts = [rollout for group in report.groups for rollout in group.rollouts]
        steps.append(Step(seconds=report.stalls.steps_s, num_tokens=num_tokens(rollouts)))

    pipeline = Pipeline(parts, flow, count, pipeline_state)
    await pipeline.run()
    return steps, pipeline.state()


async def run_in_sequence(
    parts: PipelineComponents, flow: FlowConfig, pipeline_state: PipelineState
) -> tuple[list[Step], PipelineState]:
    """Run from the state to flow.num_steps."""
    steps: list[Step] = []
    while pipeline_state.version < flow.num_steps:
        step, pipeline_state = await step_in_sequence(parts, flow, pipeline_state)
        steps.append(step)
    return steps, pipeline_state


async def step_in_sequence(
    parts: PipelineComponents, flow: FlowConfig, pipeline_state: PipelineState
) -> tuple[Step, PipelineState]:
    """All requests of a stage are sent at once, so its engine may batch as well as it can."""
    clock = asyncio.get_running_loop().time
    prompt_indices = range(pipeline_state.next_prompt_index, pipeline_state.next_prompt_index + flow.groups_per_batch)
    moments_s = [clock()]
    groups = [open_group(parts, flow, prompt_index) for prompt_index in prompt_indices]
    rollouts = await asyncio.gather(*(play(parts, flow, g, n) for g in groups for n in range(flow.group_size)))
    moments_s.append(clock())
    await asyncio.gather(*(judge(parts, group, rollout) for group in groups for rollout in group.rollouts))
    moments_s.append(clock())
    batch = [group.to_judged_group() for group in groups if group.state is GroupState.READY]
    for group in batch:
        await parts.trainer.take(group)
    await parts.trainer.step(batch)
    moments_s.append(clock())
    await parts.push_weights(pipeline_state.version + 1)
    moments_s.append(clock())
    step = Step(
        seconds=moments_s[-1] - moments_s[0],
        num_tokens=num_tokens(rollouts),
        stages_s={stage: moments_s[i + 1] - moments_s[i] for i, stage in enumerate(STAGES)},
    )
    return step, PipelineState(
        version=pipeline_state.version + 1, next_prompt_index=prompt_indices.stop, dropped=pipeline_state.dropped
    )


def open_group(parts: PipelineComponents, flow: FlowConfig, prompt_index: int) -> Group:
    return Group(
        group_id=f"g{prompt_index:06d}",
        prompt_index=prompt_index,
        prompt=parts.prompts.at(prompt_index),
        size=flow.group_size,
        min_valid_siblings=flow.min_valid_siblings,
    )


async def play(parts: PipelineComponents, flow: FlowConfig, group: Group, sibling: int) -> Rollout:
    seed = derive_seed(flow.seed, f"{group.group_id}/{sibling}")
    request = RolloutRequest(group_id=group.group_id, sibling=sibling, seed=seed)
    rollout = await parts.play(request, group.prompt, ignore_first_token)
    group.add_rollout(rollout)
    parts.journal.rollout(group.prompt_index, group.prompt, rollout)
    return rollout


async def judge(parts: PipelineComponents, group: Group, rollout: Rollout) -> None:
    report = await judge_alone(parts.judge, group.prompt, rollout)
    group.add_verdict(rollout.sibling, report.verdict)
    parts.journal.record_verdict(rollout, report)


def num_tokens(rollouts: Iterable[Rollout]) -> int:
    return sum(rollout.num_sampled_tokens for rollout in rollouts)


# -- measuring -----------------------------------------------------------------------------------------------------


WAYS: Mapping[str, tuple[Block, int]] = {  # (block, max_staleness); the first is the baseline
    "stages in sequence": (run_in_sequence, 0),
    "pipeline, max_staleness=0": (run_pipeline, 0),
    "pipeline, max_staleness=1": (run_pipeline, 1),
}
BASELINE = next(iter(WAYS))


async def measure(config: RunConfig, directory: Path, num_rounds: int) -> Rounds:
    """Measure alternating blocks of all ways; which one begins changes from round to round."""
    prepared = prepare(config)
    observers = Observers.open(config, directory)
    running = await start(prepared, observers, directory)
    try:
        flow = FlowConfig.of(
            config.train, config.rollout, config.algorithm, config.judging.max_concurrency, config.seed, config.env
        )
        parts, pipeline_state = make_components(prepared, running, observers, CoTrainings()), PipelineState()
        await parts.push_weights(pipeline_state.version)
        rounds: Rounds = []
        for turn in range(num_rounds):
            rounds.append({})
            for way in [*WAYS][turn % len(WAYS) :] + [*WAYS][: turn % len(WAYS)]:
                rounds[-1][way], pipeline_state = await run_block(way, parts, flow, pipeline_state)
                print(f"round {turn}, {way}: {mean_s(rounds[-1][way]):.3f} s per step", flush=True)
        return rounds
    finally:
        await running.close()
        observers.close()


async def run_block(
    way: str, parts: PipelineComponents, flow: FlowConfig, pipeline_state: PipelineState
) -> tuple[list[Step], PipelineState]:
    """The counted steps, and the state to continue from."""
    run, max_staleness = WAYS[way]
    num_steps = pipeline_state.version + STEPS_PER_BLOCK + 2
    steps, pipeline_state = await run(
        parts, replace(flow, num_steps=num_steps, max_staleness=max_staleness), pipeline_state
    )
    # The staleness that one way trained doesn't matter to the next.
    return steps[1:-1], replace(pipeline_state, max_staleness_trained=0)


# -- report --------------------------------------------------------------------------------------------------------


def table_of_ways(rounds: Rounds) -> list[str]:
    """Means over all steps, and the speedup over the sequence: the median and ends of each round's ratio."""
    lines = [
        "| variant | s per step (mean) | times as fast (median of rounds) | lowest, highest round | tokens per step |",
        "|---|---|---|---|---|",
    ]
    for way in WAYS:
        steps = [step for by_way in rounds for step in by_way[way]]
        ratios = [mean_s(by_way[BASELINE]) / mean_s(by_way[way]) for by_way in rounds]
        ratio, ends = f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}, {max(ratios):.2f}"
        tokens = statistics.median(step.num_tokens for step in steps)
        lines.append(f"| {way} | {mean_s(steps):.3f} | {ratio} | {ends} | {tokens:,.0f} |")
    return lines


def stages_in_sequence(rounds: Rounds) -> str:
    """Medians of the baseline's stages."""
    steps = [step for by_way in rounds for step in by_way[BASELINE]]
    return ", ".join(f"{stage} {statistics.median(step.stages_s[stage] for step in steps):.3f} s" for stage in STAGES)


def mean_s(steps: Iterable[Step]) -> float:
    """The mean: steps of a pipeline may alternate between long and short, so a median would leave out half of their
    cost.
    """
    return statistics.fmean(step.seconds for step in steps)
