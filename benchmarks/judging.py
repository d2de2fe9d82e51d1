"""The cost of judging, and what reduces it: one table per section, printed as Markdown.

    OMP_NUM_THREADS=1 python benchmarks/judging.py early_stop          # the real tiny models; a minute
    OMP_NUM_THREADS=1 python benchmarks/judging.py principles          # on a virtual clock; seconds

The judge, its templates, votes and stops are the real ones.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduling import PATIENCE_S, seats, workload

from grmpipe.capacity.cost import Costs, LearnerSpeed
from grmpipe.capacity.simulate.scripts import lognormal
from grmpipe.capacity.simulate.simulated_cluster import PRINCIPLES, simulate
from grmpipe.config.judge import EarlyStopConfig, JudgeConfig, LimitsConfig, PrinciplesConfig
from grmpipe.config.resolve_config import resolve_config, typed_sections
from grmpipe.data.prompts import load_prompts
from grmpipe.envs.play import RolloutRequest
from grmpipe.envs.single_turn import play_single_turn
from grmpipe.judge.grm import LocalGrm
from grmpipe.judge.protocols.generative import GenerativeJudge
from grmpipe.judge.rule import is_right
from grmpipe.types import JudgeReport, Prompt, Rollout, Verdict
from models.chat.renderer import Renderer
from models.engines.embedded.embedded_engine import EmbeddedEngine
from models.engines.engine_kind import EngineSpec
from models.seeds import derive_seed
from models.settings import EmbeddedConfig
from models.tiny.resolve import resolve_model
from models.types import EngineSpeed, SamplingParams, ignore_first_token

SIBLINGS = 8
NUM_JUDGEMENTS = 8
SWING = 9  # of a score from 1 to 10
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The siblings of a prompt and their judgements, in sibling order."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    reports: tuple[JudgeReport, ...] = ()

    @property
    def scores(self) -> list[float]:
        return [report.verdict.score for report in self.reports if isinstance(report.verdict, Verdict)]


# -- early stop ----------------------------------------------------------------------------------------------------


async def rollouts_of_the_quickstart(num_groups: int) -> list[Group]:
    """The rollouts of the quickstart's policy before its first step."""
    path = resolve_model("tiny://policy")
    engine, renderer = EmbeddedEngine(EngineSpec(path=path, role="policy"), EmbeddedConfig()), Renderer.load(path)
    params = SamplingParams(max_new_tokens=64)

    async def played(prompt: Prompt, sibling: int) -> Rollout:
        group_id = prompt.prompt_id
        request = RolloutRequest(group_id=group_id, sibling=sibling, seed=derive_seed(SEED, f"{group_id}/{sibling}"))
        return await play_single_turn(request, prompt, engine, renderer, params, ignore_first_token)

    groups = []
    for prompt in load_prompts("tiny://train", num_tiny_prompts=num_groups, seed=SEED):
        rollouts = await asyncio.gather(*(played(prompt, sibling) for sibling in range(SIBLINGS)))
        groups.append(Group(prompt=prompt, rollouts=tuple(rollouts)))
    engine.close()
    return groups


async def judged(groups: Sequence[Group], early_stop: EarlyStopConfig, grm: str) -> list[Group]:
    """Judged by the tiny GRM, group by group, the siblings of a group concurrently."""
    path = resolve_model(grm)
    engine, renderer = EmbeddedEngine(EngineSpec(path=path, role="grm"), EmbeddedConfig()), Renderer.load(path)
    config = JudgeConfig(num_judgements=NUM_JUDGEMENTS, max_new_tokens=128, early_stop=early_stop)
    judge = GenerativeJudge(LocalGrm("grm", engine, renderer, renderer.context_tokens), config, SEED)
    done = []
    for group in groups:
        session = judge.open(group.prompt, group.prompt.prompt_id, SIBLINGS)
        judge_tasks = [one for rollout in group.rollouts for one in session.add(rollout)]
        reports: dict[int, JudgeReport] = {}
        for some in await asyncio.gather(*(session.judge(judge_task) for judge_task in judge_tasks)):
            reports |= some
        done.append(replace(group, reports=tuple(reports[sibling] for sibling in range(SIBLINGS))))
    engine.close()
    return done


def tokens(groups: Sequence[Group]) -> int:
    """The tokens of returned judgements, without those that a stop cancelled."""
    return sum(
        judgement.completion.num_tokens
        for group in groups
        for report in group.reports
        for judgement in report.judgements
    )


def ranked_right(groups: Sequence[Group]) -> str:
    """The share of pairs, one sibling right and one wrong by the rule, in which the right one scores higher."""
    points = []
    for group in groups:
        right = [is_right(rollout.text, group.prompt.reference or "") for rollout in group.rollouts]
        scores = [report.verdict.score if isinstance(report.verdict, Verdict) else 0.0 for report in group.reports]
        points += [
            (scores[a] > scores[b]) + (scores[a] == scores[b]) / 2
            for a in range(SIBLINGS)
            for b in range(SIBLINGS)
            if right[a] and not right[b]
        ]
    return f"{statistics.fmean(points):.3f} of {len(points)} pairs"


def moved(full: Sequence[Group], stopped: Sequence[Group]) -> float:
    """The mean change of a score by a stop, compared with all judgements, in score units, over all rollouts."""
    return statistics.fmean(
        abs(one - other)
        for whole, some in zip(full, stopped, strict=True)
        for one, other in zip(whole.scores, some.scores, strict=True)
    )


def exact_stop(groups: Sequence[Group]) -> tuple[float, int, int]:
    """Best of n by the sum of the judgements: share of judgements left out, winners changed, groups counted.

    Group-wise: the j-th judgement of every sibling at once. Groups with a failed judgement are left out.
    """
    asked = changed = counted = 0
    for group in groups:
        rows = [[judgement.scores[0] for judgement in report.judgements] for report in group.reports]
        if any(len(row) < NUM_JUDGEMENTS for row in rows):
            continue
        counted += 1
        sums = [[sum(row[:count]) for row in rows] for count in range(1, NUM_JUDGEMENTS + 1)]
        stops = (
            count
            for count in range(1, NUM_JUDGEMENTS)
            if winner_is_fixed(sums[count - 1], NUM_JUDGEMENTS - count, SWING)
        )
        stop = next(stops, NUM_JUDGEMENTS)
        asked += stop
        changed += stop < NUM_JUDGEMENTS and sums[stop - 1].index(max(sums[stop - 1])) != sums[-1].index(max(sums[-1]))
    return 1 - asked / (counted * NUM_JUDGEMENTS), changed, counted


def winner_is_fixed(totals: Sequence[float], num_left: int, swing: float) -> bool:
    """Whether the lead exceeds what the remaining judgements, each of which moves it by at most `swing`, can make up
    for.
    """
    first, second = sorted(totals, reverse=True)[:2]
    return first - second > swing * num_left


async def early_stop(num_groups: int) -> None:
    print(
        "| GRM | stop | judge tokens | saved | right ranked above wrong | scores moved by | error by the audit |\n"
        "|---|---|---|---|---|---|---|"
    )
    groups = await rollouts_of_the_quickstart(num_groups)
    for grm in ("tiny://grm", "tiny://weak_grm"):
        full = await judged(groups, EarlyStopConfig(), grm)
        spent = tokens(full)
        print(f"| {grm} | none | {spent} | | {ranked_right(full)} | | |", flush=True)
        for max_error in (0.15, 0.25, 0.4):
            some = await judged(groups, EarlyStopConfig(kind="relaxed", max_error=max_error), grm)
            audits = [report.audit for group in some for report in group.reports if report.audit is not None]
            error = statistics.fmean(abs(audit.stopped_score - audit.full_score) for audit in audits)
            print(
                f"| {grm} | relaxed, max_error={max_error:g} | {tokens(some)} | {1 - tokens(some) / spent:.0%} | "
                f"{ranked_right(some)} | {moved(full, some):.2f} | {error:.2f} ({len(audits)} audited) |",
                flush=True,
            )
        saved, changed, counted = exact_stop(full)
        print(f"| {grm} | exact, best of {SIBLINGS} | | {saved:.0%} | winners changed: {changed} of {counted} | | |")


# -- shared principles ---------------------------------------------------------------------------------------------

COSTS = Costs(
    engines={
        "policy": EngineSpeed(step_s=2e-2, row_s=0.0, cached_token_s=0.0, prefill_token_s=5e-5, max_rows=64),
        "grm": EngineSpeed(step_s=2e-2, row_s=0.0, cached_token_s=0.0, prefill_token_s=5e-5, max_rows=64),
    },
    learner=LearnerSpeed(token_s=2e-5, step_s=1.0),
    sync_s=0.5,
)
PRINCIPLE_TOKENS, CRITIQUE_TOKENS = 150, 250


def principles(num_steps: int, num_judges: int) -> None:
    """Rollouts of 500 tokens, critiques of 250; principles of 150: in each judgement, or once per prompt."""
    print("| GRM engines | principles | max_staleness | s per step | GRM busy |\n|---|---|---|---|---|")
    for staleness in (0, 1):
        for ahead in (False, True):
            tokens = CRITIQUE_TOKENS if ahead else CRITIQUE_TOKENS + PRINCIPLE_TOKENS
            load = workload(
                groups=16, staleness=staleness, rollouts=lognormal(500, 0.6), judgements=lognormal(tokens, 0.3)
            )
            judge = JudgeConfig(
                template="shared_principles" if ahead else "boxed",
                parser="boxed",
                principles=PrinciplesConfig(kind="shared" if ahead else "inline"),
                num_judgements=2,
                max_new_tokens=2048,
                limits=LimitsConfig(min_tokens_per_s=1, timeout_s=PATIENCE_S),
            )
            lengths = {**load.lengths, PRINCIPLES: lognormal(PRINCIPLE_TOKENS, 0.3)}
            load = replace(
                load, config=resolve_config(replace(typed_sections(load.config), judge=judge)), lengths=lengths
            )
            run = simulate(load, seats(policy=2, grm=num_judges, learner=1), COSTS, num_steps)
            print(
                f"| {num_judges} | {'ahead, shared by 8' if ahead else 'inline'} | {staleness} | {run.step_s:.2f} | "
                f"{run.busy['grm']:.0%} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=["early_stop", "principles"])
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--judges", type=int, default=2, help="engines of the GRM, on the virtual clock")
    options = parser.parse_args()
    if options.section == "early_stop":
        asyncio.run(early_stop(options.groups))
    else:
        principles(options.steps, options.judges)


if __name__ == "__main__":
    main()
