"""plan.search: ranks other placements of the configured slots, and writes the best as a file that runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from grmpipe.capacity.cost import Costs
from grmpipe.capacity.lower_bound import POLICY, StepWork, is_learning
from grmpipe.capacity.plan.candidates import (
    Candidate,
    Predicted,
    Ranked,
    Ranking,
    SearchProblem,
    Seating,
    placement_of,
    search,
)
from grmpipe.capacity.plan.costs import Seated, costs_of, kv_bytes_of, kv_bytes_per_token
from grmpipe.capacity.plan.memory import parts_of
from grmpipe.capacity.plan.survey import Survey, pool_with_memory
from grmpipe.capacity.plan.work import step_work
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.yaml_io import placement_yaml
from grmpipe.run_dir.directory import HOME
from grmpipe.validate.places import seat_roles
from models.lm.footprint import Heads, heads_of
from models.types import EngineSpeed
from scheduler.placement import Placement, PoolConfig, place

WIDTHS = (1, 2, 4, 8)  # GPUs over which one model is sharded, within a node
SHOWN = 10
NAME = "planned"

Simulate = Callable[[Placement, Costs], Predicted]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """The result of a search."""

    ranking: Ranking
    kinds: Mapping[str, PoolConfig]
    simulated: int


def find_plans(survey: Survey, simulate: Simulate | None) -> Plans:
    """Search placements. Raises ConfigError if none fits, or costs are unknown."""
    plan, kinds = survey.config.plan, slot_kinds(survey)
    until = time.monotonic() + plan.search_s
    question = make_search_problem(survey, kinds)

    def try_out(candidate: Candidate) -> Predicted:
        assert simulate is not None
        run = survey.config
        placement = place(placement_of(candidate, kinds), run.roles, run.served, run.learners)
        return simulate(placement, question.costs(candidate))

    try:
        ranking = search(
            question,
            try_out if simulate else None,
            plan.max_candidates,
            time_is_up=lambda: time.monotonic() > until,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Plans(ranking=ranking, kinds=kinds, simulated=sum(entry.predicted is not None for entry in ranking.ranked))


def slot_kinds(survey: Survey) -> dict[str, PoolConfig]:
    """Kinds of slots: pools with the same kind of slot are combined."""
    kinds: dict[str, PoolConfig] = {}
    for name, configured in survey.config.placement.pools.items():
        if name not in survey.placement.pools:
            continue
        pool = pool_with_memory(configured, survey.devices[name])
        alike = [
            kind
            for kind, other in kinds.items()
            if (other.resource, other.memory_gb, other.device) == (pool.resource, pool.memory_gb, pool.device)
        ]
        if alike:
            kinds[alike[0]] = replace(kinds[alike[0]], slots=kinds[alike[0]].slots + pool.slots)
        else:
            kinds[name] = replace(pool, strategy="PACK", elastic=False, time_shared=False)
    return kinds


def make_search_problem(survey: Survey, kinds: Mapping[str, PoolConfig]) -> SearchProblem:
    known: dict[tuple[tuple[str, int, int, str], ...], Costs] = {}
    speeds: dict[tuple[str, int, str], EngineSpeed] = {}
    held: dict[tuple[str, int, int, str], float | None] = {}

    def memory(role: str, seating: Seating, kind: str) -> float | None:
        # Like speeds: an engine's width counts, not the number of engines. Thousands of candidates share these values.
        key = (role, seating.replicas if is_learning(role) else 0, seating.width, kind)
        if key not in held:
            held[key] = memory_of(role, seating, kind, survey, kinds)
        return held[key]

    def costs(candidate: Candidate) -> Costs:
        seated = {
            role: Seated(seating=seating, pool=one_pool.kind)
            for one_pool in candidate.candidate_pools
            for role, seating in one_pool.seats.items()
        }
        # An engine's speed doesn't depend on the number of engines; a learner's depends on its ranks.
        key = tuple(
            (role, where.seating.replicas if is_learning(role) else 0, where.seating.width, where.pool)
            for role, where in sorted(seated.items())
        )
        if key not in known:
            known[key] = costs_of(survey, seated, speeds)
        return known[key]

    work = step_work(survey)
    return SearchProblem(
        kinds=kinds,
        work=work,
        widths={role: widths_of(role, survey) for role in work.engines},
        costs=costs,
        memory=memory,
        elastic=frozenset(work.engines) if len(work.engines) > 1 else frozenset(),
        replicas=replicas_allowed(survey, work),
    )


def replicas_allowed(survey: Survey, work: StepWork) -> dict[str, range]:
    """Allowed numbers of processes for roles that don't take any: ranks in groups or in this process, servers that
    already run.
    """
    config, allowed = survey.config, dict[str, range]()
    slots = sum(pool.slots for pool in config.placement.pools.values())
    for learner, parallel in config.parallel.items():
        if (multiple := parallel.rank_multiple) > 1:
            allowed[learner] = range(multiple, slots + 1, multiple)
    if config.cluster.kind == "inprocess":
        allowed |= dict.fromkeys(filter(is_learning, work.roles), range(1, 2))
    for role in work.engines:
        if joined := survey.roles.served[role].engine.joined:
            allowed[role] = range(joined, joined + 1)
    return allowed


def widths_of(role: str, survey: Survey) -> tuple[int, ...]:
    """Numbers of GPUs over which the role's model can be sharded: its heads divide evenly, and its engine supports
    it.
    """
    if not survey.roles.served[role].engine.tensor_parallel:
        return (1,)
    heads = heads_known(role, survey)
    if heads is None:
        return (1,)
    return tuple(n for n in WIDTHS if heads.query % n == 0 and (heads.key % n == 0 or n % heads.key == 0))


def heads_known(role: str, survey: Survey) -> Heads | None:
    shape, model = survey.roles.served[role].model.shape, survey.models[role].model
    if model is not None:
        return heads_of(model.path)
    return Heads(query=shape.num_heads, key=shape.num_kv_heads) if shape.declared else None


def memory_of(role: str, seating: Seating, kind: str, survey: Survey, kinds: Mapping[str, PoolConfig]) -> float | None:
    """Bytes on each slot; infinite if weights leave no memory for a single row."""
    pool = kinds[kind]
    if seating.width > 1 and pool.resource == "cpu":
        return math.inf
    parts = parts_of(survey, role, seating, pool)
    if not parts:
        return None
    if role in survey.roles.served and (reserved := row_room(role, seating, kind, survey)) is not None and reserved < 1:
        return math.inf
    return sum(part.num_bytes for part in parts)


def row_room(role: str, seating: Seating, kind: str, survey: Survey) -> float | None:
    """Rows of full length that an engine's cache holds; None if it isn't limited or unknown."""
    engine, config = survey.roles.served[role].engine, survey.config
    pool = pool_with_memory(config.placement.pools[kind], survey.devices[kind])
    per_token = kv_bytes_per_token(role, survey, seating.width)
    if engine.grows_cache or engine.joined or not per_token or pool.resource == "cpu" or pool.memory_gb is None:
        return None
    own = [config.rollout.max_new_tokens] if role == POLICY else []
    most = max(own + [judge.max_new_tokens for judge in config.judging.asking(role).values()])
    return kv_bytes_of(role, survey, Seated(seating=seating, pool=kind), seating.width) / (per_token * most)


# -- output --------------------------------------------------------------------------------------------------------


def table(plans: Plans) -> str:
    """A block of text: the first ten placements, with busy shares and reasons."""
    ranking, roles = plans.ranking, list(plans.ranking.ranked[0].weighed.loads)
    rows = [("", "step", *(f"{role} busy" for role in roles), "placement", "why")]
    for place_, entry in enumerate(ranking.ranked[:SHOWN], start=1):
        shares = [f"{share:.0%}" for share in busy_of(entry, roles)]
        step = seconds(entry.step_s) if entry.predicted else f">= {seconds(entry.step_s)}"
        rows.append((str(place_), step, *shares, entry.weighed.candidate.describe(), entry.weighed.reason))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(wide) for text, wide in zip(row, widths, strict=True)).rstrip() for row in rows]
    counted = (
        f"placements: {ranking.num_candidates} candidates, {ranking.num_too_large} too large for their slots, "
        f"{plans.simulated} simulated (>=: only the bound)"
    )
    return "\n".join([counted, *(f"  {line}" for line in lines)])


def busy_of(entry: Ranked, roles: list[str]) -> list[float]:
    if entry.predicted is not None:
        return [entry.predicted.busy.get(role, 0.0) for role in roles]
    return [entry.weighed.loads[role] / entry.weighed.bound_s for role in roles]


def seconds(value: float) -> str:
    return f"{value:.3g} s"


# -- writing -------------------------------------------------------------------------------------------------------


def write_best(plans: Plans, config: RunConfig) -> str:
    """A block of text: the file with the best placement, and how to run it. Raises ConfigError if it can't be
    written.
    """
    best = plans.ranking.ranked[0]
    directory = plan_directory(config)
    path = directory / "placement" / f"{NAME}.yaml"
    placement = placement_of(best.weighed.candidate, plans.kinds)
    seat_roles(replace(config, placement=placement))  # a placement that a run would refuse isn't written
    said = f"# {best.weighed.candidate.describe()}: {seconds(best.step_s)} per step, {best.weighed.reason}.\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(said + placement_yaml(placement), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"plan.write: {path} can't be written ({error}); type plan.write=<a directory>") from error
    return "\n".join([
        f"the best is in {path}; to run it, add to the command of the run",
        f"  --config-dir {directory} placement={NAME}",
    ])  # fmt: skip


def plan_directory(config: RunConfig) -> Path:
    if config.plan.write:
        return Path(config.plan.write)
    return Path(config.run_dir) / "plan" if config.run_dir else HOME / config.experiment_name / "plan"
