"""Compares elastic slots with every static split: the real pipeline and balancer, with engines that only take time.

python benchmarks/elastic.py --keep cases.jsonl --minutes 5    # repeat until the table is complete
python benchmarks/elastic.py --keep cases.jsonl > table.md
python benchmarks/elastic.py --mixes drifting --staleness 1 --loads full
python benchmarks/elastic.py --roles 3                         # a policy and two judges of different models
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import logging
import math
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.envs.play import RolloutRequest
from grmpipe.envs.single_turn import play_single_turn
from grmpipe.judge.pointwise_adapter import PointwiseAdapter
from grmpipe.pipeline.interfaces import FlowConfig, PipelineComponents, StepReport
from grmpipe.pipeline.judge_health import JudgeHealth
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.pipeline.service_health import ServiceHealth
from grmpipe.types import JudgedGroup, JudgeReport, Metrics, Prompt, RewardSpan, Rollout, Verdict
from models.checksum import checksum
from models.engines.simulated.simulated_engine import Script, SimulatedEngine
from models.engines.simulated.simulated_rate import SharedDevice
from models.types import (
    Engine,
    EngineSpeed,
    InlineBytes,
    Message,
    RequestContext,
    SamplingParams,
    ToolSpec,
    WeightBucket,
    WeightReceipt,
    WeightTensor,
)
from scheduler.events import NoEvents
from scheduler.routing.migration import Continuation
from scheduler.routing.router import Router
from scheduler.slots.balance import BalanceConfig
from scheduler.slots.elastic import ElasticPool, ElasticRole
from scheduler.slots.health import push_to_living
from scheduler.supervise import run_until
from scheduler.weights.weight_push import SyncConfig, SyncReport
from scheduler.weights.weight_sync import WeightSync

SLOTS = 8
GROUP_SIZE = 8
MAX_TOKENS = 8192
SIGMA = 0.8  # of the logarithm of lengths: the longest of 128 is about nine times the median
PROMPT_TOKENS, JUDGE_PROMPT_TOKENS = 256, 1024
# About an 8 B policy and a 14 B judge on an H100, with a quarter of the rows of such a slot at four times the cost
# each: the same shape with a quarter of the events.
POLICY = EngineSpeed(step_s=0.008, row_s=0.0002, cached_token_s=2.0e-7, prefill_token_s=3.5e-5, max_rows=64)
GRM = EngineSpeed(step_s=0.013, row_s=0.0003, cached_token_s=2.5e-7, prefill_token_s=6e-5, max_rows=64)
SPEEDS = {"policy": POLICY, "grm": GRM, "safety": POLICY}  # the second judge is as large as the policy
PUSH_S, WAKE_S, LEARN_S = 1.0, 0.5, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Median lengths of each role's answers at the beginning and at the end of a run. `judgements`: of each judge."""

    name: str
    medians: Mapping[str, tuple[float, float]]
    judgements: int

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.medians)

    def median(self, role: str, share: float) -> float:
        first, last = self.medians[role]
        return first * (last / first) ** share


def one_judge(name: str, policy: tuple[float, float], grm: tuple[float, float]) -> Mix:
    return Mix(name=name, medians={"policy": policy, "grm": grm}, judgements=4)


def two_judges(name: str, policy: tuple[float, float], grm: tuple[float, float], safety: tuple[float, float]) -> Mix:
    return Mix(name=name, medians={"policy": policy, "grm": grm, "safety": safety}, judgements=2)


MIXES = {
    mix.name: mix
    for mix in (
        one_judge("judge-heavy", (400, 400), (400, 400)),
        one_judge("policy-heavy", (1600, 1600), (100, 100)),
        one_judge("drifting", (1600, 400), (100, 400)),
        two_judges("steady", (800, 800), (400, 400), (200, 200)),
        two_judges("judges drifting", (400, 400), (800, 100), (100, 800)),
        two_judges("all drifting", (1600, 400), (100, 800), (100, 400)),
    )
}
LOADS = {"full": 64, "a quarter": 16, "a sixteenth": 4}  # groups in a batch; full: 64 rollouts a slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    mix: str
    staleness: int
    load: str
    split: tuple[int, ...] | None  # slots of each role; None: elastic
    steps: int = 6
    seed: int = 0
    balance: BalanceConfig = field(default_factory=BalanceConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    step_s: float  # the mean
    moves: int


class Renderer:
    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        return (hash(messages[0].content) % 50_000, *range(PROMPT_TOKENS - 1))

    extend = render


class Prompts:
    def at(self, prompt_index: int) -> Prompt:
        return Prompt(
            prompt_id=f"p{prompt_index}", messages=(Message(role="user", content=f"question {prompt_index}"),)
        )


class NoJournal:
    def rollout(self, *args: object, **kwargs: object) -> None:
        return None

    judged = group_ended = rollout


class SlotEngine(SimulatedEngine):
    """An engine that takes time to wake and to load weights."""

    async def commit_weights(self, version: int) -> WeightReceipt:
        await asyncio.sleep(PUSH_S)
        return await super().commit_weights(version)

    async def sleep(self) -> int:
        return 0

    async def wake(self) -> None:
        await asyncio.sleep(WAKE_S)


class Weights:
    """A learner with one tensor."""

    def __init__(self) -> None:
        self.steps = 0
        self._hold = asyncio.Lock()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[int]:
        async with self._hold:
            yield self.steps

    async def step(self) -> None:
        async with self._hold:
            await asyncio.sleep(LEARN_S)
            self.steps += 1

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        return (-1.0,) * (len(token_ids) - 1)

    async def connect(self, link: object) -> None:
        return None

    async def num_buckets(self) -> int:
        return 1

    async def num_fixed_buckets(self) -> int:
        return 0

    async def bucket(self, index: int) -> WeightBucket:
        data = np.full(8, self.steps % 256, dtype=np.uint8)
        tensor = WeightTensor(name="all", dtype="float32", shape=(2,), checksum=checksum(data))
        return WeightBucket(tensors=(tensor,), payload=InlineBytes(data=(data,)))

    async def deliver(self, index: int) -> None:
        raise AssertionError("nothing is broadcast")


class Trainer:
    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    async def take(self, group: JudgedGroup) -> None:
        return None

    async def while_waiting(self) -> bool:
        return False

    async def step(self, batch: Sequence[JudgedGroup]) -> Metrics:
        await self._weights.step()
        return {}

    async def discard(self) -> None:
        return None


class Judge:
    """Asks each judge for this many judgements, all at once, and gives each sibling the same score."""

    def __init__(self, grms: Mapping[str, Engine], judgements: int) -> None:
        self._grms = grms
        self._judgements = judgements

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        name = f"{rollout.group_id}/{rollout.sibling}"
        ids = (hash(name) % 50_000, *range(JUDGE_PROMPT_TOKENS - 1))
        params = SamplingParams(max_new_tokens=MAX_TOKENS)
        async with asyncio.TaskGroup() as tasks:
            for (role, grm), index in itertools.product(self._grms.items(), range(self._judgements)):
                request_id = f"{name}/j{index}" if role == "grm" else f"{name}/{role}/j{index}"
                context = RequestContext(request_id=request_id, group_id=rollout.group_id, role=role, priority=priority)
                tasks.create_task(grm.generate(ids, params, context))
        span = RewardSpan(turn=0, start=0, end=1, value=0.5)
        verdict = Verdict(rewards=(span,), score=5.0, breakdown={}, score_std=1.0, num_judgements=self._judgements)
        return JudgeReport(verdict=verdict)


@functools.lru_cache(maxsize=1 << 16)
def same_tokens(count: int) -> tuple[int, ...]:
    return (7,) * count


def author_of(case: Case) -> Callable[[Sequence[int], SamplingParams, RequestContext], Script]:
    """An author with lengths by the request's name: the same work on any engine."""
    mix, groups = MIXES[case.mix], LOADS[case.load]

    def write(ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
        step = int(context.group_id[1:].split("-")[0]) // groups
        median = mix.median(context.role, min(step / (case.steps - 1), 1.0))
        drawn = random.Random(f"{case.seed}/{context.request_id}").lognormvariate(math.log(median), SIGMA)
        length = max(1, min(int(drawn), MAX_TOKENS))
        return Script(token_ids=same_tokens(max(1, length - context.num_sampled)), text="x")

    return write


async def simulate(case: Case) -> Outcome:
    author, weights = author_of(case), Weights()
    devices = [SharedDevice() for _ in range(SLOTS)]
    mix = MIXES[case.mix]
    routers = {
        role: Router(
            role,
            {f"{role}-{n}": SlotEngine(role, author, speed=SPEEDS[role], device=devices[n]) for n in seats},
            continuation=Continuation(decode=lambda ids: "x", seed_after=lambda seed, count: seed),
        )
        for role, seats in seats_of(case).items()
    }
    sync = WeightSync(weights, (1, 2, 3), SyncConfig())
    reports: list[StepReport] = []

    async def played(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        params = SamplingParams(max_new_tokens=MAX_TOKENS)
        return await play_single_turn(request, prompt, routers["policy"], Renderer(), params, on_first_token)

    async def push(version: int) -> SyncReport:
        return await push_to_living(sync, routers["policy"], version)

    async def after_step(report: StepReport) -> None:
        reports.append(report)

    parts = PipelineComponents(
        prompts=Prompts(),
        too_long=lambda prompt: False,
        play=played,
        judge=PointwiseAdapter(Judge({role: routers[role] for role in mix.roles[1:]}, mix.judgements)),
        judge_guard=JudgeHealth(
            ServiceHealth(
                "judging",
                max_failure_rate=1.0,
                window=32,
                pause_s=5.0,
                counted="verdicts",
                key="judge.max_failure_rate",
            )
        ),
        trainer=Trainer(weights),
        push_weights=push,
        journal=NoJournal(),
        events=NoEvents(),
    )
    config = FlowConfig(
        num_steps=case.steps,
        groups_per_batch=LOADS[case.load],
        group_size=GROUP_SIZE,
        min_valid_siblings=2,
        max_staleness=case.staleness,
        group_deadline_s=1e6,
        rollout_concurrency=1 << 16,
        judge_concurrency=1 << 16,
        seed=0,
    )
    pipeline = Pipeline(parts, config, after_step)
    pool = elastic_pool(routers, sync, case) if case.split is None else None

    async def run() -> None:
        await push(0)
        await pipeline.run()

    began_s = asyncio.get_running_loop().time()
    await run_until(run(), **({"balance": pool.run()} if pool else {}))
    took_s = asyncio.get_running_loop().time() - began_s
    return Outcome(step_s=took_s / case.steps, moves=sum(pool.moves.values()) if pool else 0)


def seats_of(case: Case) -> dict[str, range]:
    """Role -> its slots; elastic: all of them."""
    roles = MIXES[case.mix].roles
    if case.split is None:
        return dict.fromkeys(roles, range(SLOTS))
    ends = list(itertools.accumulate(case.split))
    return {role: range(end - slots, end) for role, slots, end in zip(roles, case.split, ends, strict=True)}


def splits_among(count: int) -> list[tuple[int, ...]]:
    """Every way to divide the slots among this many roles, each with one or more."""
    cuts = itertools.combinations(range(1, SLOTS), count - 1)
    return [tuple(end - begin for begin, end in itertools.pairwise((0, *inner, SLOTS))) for inner in cuts]


def is_even(split: Sequence[int]) -> bool:
    return max(split) - min(split) <= 1


def elastic_pool(routers: dict[str, Router], sync: WeightSync, case: Case) -> ElasticPool:
    policy = ElasticRole(
        router=routers["policy"],
        bring_current=sync.catch_up,
        max_rows=POLICY.max_rows,
        sleeps=True,
        nothing_pushed=sync.nothing_pushed,
    )
    judging = {
        role: ElasticRole(router=router, max_rows=SPEEDS[role].max_rows, sleeps=True)
        for role, router in routers.items()
        if role != "policy"
    }
    slots = {str(n): {role: f"{role}-{n}" for role in routers} for n in range(SLOTS)}
    return ElasticPool("all", slots, {"policy": policy, **judging}, case.balance)


def measure(case: Case) -> Outcome:
    return run_virtually(lambda: simulate(case))


class Cases:
    """The measurements, stored in a file if one is given: a table may take several sessions."""

    def __init__(self, path: Path | None, until_s: float) -> None:
        self._path, self._until_s = path, until_s
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._known = {line["case"]: Outcome(**line["outcome"]) for line in map(json.loads, lines)}

    def outcome(self, case: Case) -> Outcome:
        name = json.dumps(asdict(case))
        if name not in self._known:
            if time.monotonic() > self._until_s:
                raise TimeoutError
            self._known[name] = outcome = measure(case)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps({"case": name, "outcome": asdict(outcome)}) + "\n")
        return self._known[name]

    def mean(self, case: Case, seeds: Sequence[int]) -> Outcome:
        outcomes = [self.outcome(replace(case, seed=seed)) for seed in seeds]
        return Outcome(
            step_s=statistics.fmean(outcome.step_s for outcome in outcomes),
            moves=round(statistics.fmean(outcome.moves for outcome in outcomes)),
        )


def row(cases: Cases, case: Case, seeds: Sequence[int]) -> str:
    """Seconds per step: elastic, the best split and the even one (of several even ones the fastest). The spread of the
    ratio is over the seeds.
    """
    elastic = cases.mean(case, seeds)
    fixed = {split: replace(case, split=split) for split in splits_among(len(MIXES[case.mix].roles))}
    splits = {split: cases.mean(one, seeds).step_s for split, one in fixed.items()}
    best = min(splits, key=splits.__getitem__)
    even = min(step_s for split, step_s in splits.items() if is_even(split))
    ratios = [
        cases.outcome(replace(fixed[best], seed=seed)).step_s / cases.outcome(replace(case, seed=seed)).step_s
        for seed in seeds
    ]
    return (
        f"| {case.mix} | {case.staleness} | {case.load} | {elastic.step_s:.1f} s | {splits[best]:.1f} s "
        f"({' + '.join(map(str, best))}) | **{splits[best] / elastic.step_s:.3f}** | {min(ratios):.3f} to "
        f"{max(ratios):.3f} | {even:.1f} s | {even / elastic.step_s:.2f} | {elastic.moves / case.steps:.1f} |"
    )


HEAD = """\
{slots} slots, seconds of a step on a virtual clock. The pipeline, the routers, the pushes and the balancer are those of
real runs; the engines only take time (`models/engines/simulated/simulated_engine.py`): a decoding step takes
{steps_ms}, plus rows and cached tokens. A batch is 64 groups of 8 rollouts, which fill the 64 rows of each of 8 slots,
or a quarter or a sixteenth of that; {judgements} judgements per rollout and judge. Lengths are log-normal (sigma
{sigma:g}). Medians in tokens: {medians}. A push of weights takes {push:g} s, waking an engine {wake:g} s, an optimizer
step {learn:g} s. A ratio above 1: elastic is faster. The even split is the fastest of those whose parts differ by one
slot at most.

`{command}`: means over {seeds} draws of the lengths, and the range of the ratio.

| mix | staleness | load | elastic | best split | ratio | by draw | even split | ratio | moves a step |
|---|---|---|---|---|---|---|---|---|---|"""


def head(mixes: Sequence[Mix], options: argparse.Namespace) -> str:
    roles = mixes[0].roles
    command = f"python benchmarks/elastic.py --roles {len(roles)} --steps {options.steps} --seeds {options.seeds}"
    return HEAD.format(
        slots=SLOTS,
        steps_ms=", ".join(f"{SPEEDS[role].step_s * 1e3:g} ms for {role}" for role in roles),
        judgements=mixes[0].judgements,
        sigma=SIGMA,
        medians="; ".join(f"{mix.name}, {medians_of(mix)}" for mix in mixes),
        push=PUSH_S,
        wake=WAKE_S,
        learn=LEARN_S,
        command=f"{command} --first-seed {options.first_seed}",
        seeds=options.seeds,
    )


def medians_of(mix: Mix) -> str:
    return ", ".join(
        f"{role} {first:g}" if first == last else f"{role} from {first:g} to {last:g}"
        for role, (first, last) in mix.medians.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--roles", type=int, choices=(2, 3), default=2, help="a policy and one judge, or two")
    parser.add_argument("--mixes", nargs="*", help="names of mixes; all of this many roles unless given")
    parser.add_argument("--staleness", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--loads", nargs="*", default=list(LOADS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--keep", type=Path, help="a file for the measurements, to continue from")
    parser.add_argument("--minutes", type=float, default=math.inf, help="measure no further case after that")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    cases = Cases(options.keep, time.monotonic() + 60 * options.minutes)
    mixes = options.mixes or [name for name, mix in MIXES.items() if len(mix.roles) == options.roles]
    print(head([MIXES[name] for name in mixes], options), flush=True)
    for staleness, load, mix in itertools.product(options.staleness, options.loads, mixes):
        case = Case(mix=mix, staleness=staleness, load=load, split=None, steps=options.steps)
        try:
            print(row(cases, case, seeds), flush=True)
        except TimeoutError:
            sys.exit("the time is up: run the same command again to continue")


if __name__ == "__main__":
    main()
