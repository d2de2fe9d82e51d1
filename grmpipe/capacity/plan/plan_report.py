"""The text of a plan: placement, memory, the arithmetic of a batch, the time of a step. Reads a facts."""

from dataclasses import dataclass

from grmpipe.capacity.cost import ENGINE_SPREAD, LEARNER_SPREAD, Costs, LearnerSpeed, slower_costs
from grmpipe.capacity.lower_bound import DRIVER, LEARNER, StepWork, busiest_slot_s, busy_s, chain_s, learner_s
from grmpipe.capacity.notes import device_notes, hyperparameter_notes
from grmpipe.capacity.plan.costs import CostUnknown, estimate_costs
from grmpipe.capacity.plan.disk import journal_line
from grmpipe.capacity.plan.expected_cost import NOT_COUNTED, expect_requests, warn_of_bounds
from grmpipe.capacity.plan.gpu_shares import compute_shares, with_shares
from grmpipe.capacity.plan.machine import describe_shortage, explain_refusal, measure_machine
from grmpipe.capacity.plan.memory import column_width, list_memory, memory, overfull_slots, size, slot_memory
from grmpipe.capacity.plan.run_facts import RunFacts, collect_facts
from grmpipe.capacity.plan.work import (
    assumptions,
    compute_answer_share,
    count_calls,
    count_judgements,
    learner_flops,
    shares_asked,
    step_work,
)
from grmpipe.config.run_config import RunConfig
from grmpipe.models.engines.engine_kind import EngineOptions
from grmpipe.models.settings import EngineConfig
from grmpipe.scheduler.placement import describe

CROWDED = 0.7  # share of the shortest step that the driver may work before it is likely to be waited for
# Judges that ask no model, or one with a scalar head.
KIND_IN_WORDS = {
    "scalar": "a scalar reward model",
    "rule": "a rule",
    "function": "a reward function",
    "env": "an environment's reward",
    "label": "a label",
    "custom": "a judge of your own",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Blocks of text: placement, memory, arithmetic, times, warnings, what could not be checked.

    refusal: why the run can't start on this machine; empty if it may.
    """

    text: str
    refusal: str


def plan(config: RunConfig) -> Plan:
    """Raises ConfigError."""
    facts = collect_facts(config)
    config = with_shares(facts, compute_shares(facts))
    facts = facts.under(config)
    uses = {role: list_memory(facts, role) for role in facts.placement.seats}
    blocks = [
        describe(facts.placement),
        engines(facts),
        memory(uses),
        slot_memory(facts, uses),
    ]
    machine = measure_machine(facts, uses)
    if machine is not None:
        blocks[-1] += f"\nthis machine: {size(machine.held)} of {size(machine.limit)} ({machine.sums})"
    blocks.append(arithmetic(facts))
    expected = expect_requests(facts)
    blocks += format_block(f"endpoints, over the run ({NOT_COUNTED})", [one.text for one in expected])
    unchecked = list(facts.unchecked)
    if not config.env.env_kind.is_single:
        unchecked.append("the time of a step: it counts one turn of each rollout, and no time of its environment")
    try:
        blocks.append(times(facts))
    except CostUnknown as error:
        unchecked.append(f"the time of a step: {error}")
    footprints = {role: sized.footprint for role, sized in facts.models.items()}
    noted = [*device_notes(config.train, facts.roles, footprints), *hyperparameter_notes(config)]
    refusal = explain_refusal(machine, facts) if machine is not None else ""
    too_small = describe_shortage(machine, facts) if machine is not None and not refusal else []
    blocks += format_block(
        "warnings", [*overfull_slots(facts, uses), *too_small, *warn_of_bounds(facts, expected), *noted]
    )
    blocks += format_block("not checked here", unchecked)
    return Plan(text="\n\n".join(blocks), refusal=refusal)


# -- engines -------------------------------------------------------------------------------------------------------


def engines(facts: RunFacts) -> str:
    """Role -> engine, with the options that differ from the engine's defaults."""
    lines, wide = ["engines"], column_width(facts.roles.served)
    for role in facts.roles.served.values():
        where = f", tensor parallel over {role.num_gpus} GPUs" if role.num_gpus > 1 else ""
        if role.model.adapter_of:
            lines.append(f"  {role.name:<{wide}} an adapter on the engines of {role.model.adapter_of}")
            continue
        if role.engine.endpoint is not None:
            where = f": {role.model.path} at {role.engine.endpoint.url}"
        options = format_changed_options(role.engine.options, role.engine.read_options(EngineConfig()))
        lines.append(f"  {role.name:<{wide}} {role.model.engine}{where}; {options}")
    return "\n".join(lines)


def format_changed_options(options: EngineOptions, defaults: EngineOptions) -> str:
    plain, values = vars(defaults), vars(options)
    changed = [f"{name}={value}" for name, value in values.items() if value != plain[name]]
    return ", ".join(changed) or "default options"


# -- times -----------------------------------------------------------------------------------------------------------


def times(facts: RunFacts) -> str:
    """A block of text: the time of a step with the present placement. Raises CostUnknown."""
    work, placement = step_work(facts), facts.placement
    costs = estimate_costs(facts)
    loads, chain = compute_loads(work, costs, facts), 0.0 if work.max_staleness else chain_s(work, costs)
    wide = column_width(placement.seats)
    lines = [f"time of a step ({assumptions(facts)})"]
    pace = {LEARNER: f"; {learner_pace(facts, work, costs.learner)}"}
    lines += [
        f"  {role:<{wide}} {seconds(load)} of work for each of {len(placement.seats[role])}{pace.get(role, '')}"
        for role, load in loads.items()
        if role != DRIVER
    ]
    busiest = busiest_slot_s(placement, loads, costs.cores)
    if costs.driver_request_s:
        shared = f"on {costs.cores} cores, shared with all processes on CPUs"
        crowded = describe_crowded_driver(loads[DRIVER], max(busiest, chain))
        lines.append(f"  {DRIVER:<{wide}} {seconds(loads[DRIVER])} of work, {shared}{crowded}")
    why = (
        "the busiest slot's work"
        if busiest >= chain
        else "one rollout, its judgements, its update, one after the other"
    )
    lines.append(f"  at least {seconds(max(busiest, chain))}: {why}")
    if all(pool.resource == "gpu" for pool in placement.pools.values()):
        lines.append(f"  {bounds_range(facts, work, costs)}")
    return "\n".join(lines)


def describe_crowded_driver(driver_s: float, least_s: float) -> str:
    """A warning if the driver, whose one event loop answers all engines, may set the pace of a step. Else empty."""
    if driver_s <= CROWDED * least_s:
        return ""
    return f"; WARNING: {driver_s / least_s:.0%} of the shortest step, in which engines wait for it (docs/clusters.md)"


def compute_loads(work: StepWork, costs: Costs, facts: RunFacts) -> dict[str, float]:
    """Role -> seconds of a step that each of its processes works; of the driver, if its time counts."""
    placed = facts.placement.seats
    loads = {role: busy_s(role, work, costs, len(seats)) for role, seats in placed.items() if role in work.roles}
    return loads | ({DRIVER: busy_s(DRIVER, work, costs, 1)} if costs.driver_request_s else {})


def bounds_range(facts: RunFacts, work: StepWork, costs: Costs) -> str:
    """The bound of a step with the fastest and the slowest costs that published rates make likely, in words."""
    bounds = []
    for way in (-1, 1):
        tried = slower_costs(costs, LEARNER_SPREAD**way, ENGINE_SPREAD**way)
        busiest = busiest_slot_s(facts.placement, compute_loads(work, tried, facts), costs.cores)
        bounds.append(max(busiest, 0.0 if work.max_staleness else chain_s(work, tried)))
    fast, slow = map(seconds, bounds)
    return (
        f"likely {fast} to {slow}: 9 of 10 published rates are within {LEARNER_SPREAD:g} of a learner's and "
        f"{ENGINE_SPREAD:g} of an engine's"
    )


def learner_pace(facts: RunFacts, work: StepWork, learner: LearnerSpeed) -> str:
    """Tokens per second and MFU (see learner_pace.py of a run) while the learner works."""
    busy = learner_s(work, learner)
    pace = f"{work.learner_tokens / busy:,.0f} packed tokens/s"
    seats, pool = facts.placement.seats[LEARNER], facts.pool(LEARNER)
    device, flops = facts.devices[seats[0].pool], learner_flops(facts)
    if device is None or flops is None or pool.resource != "gpu":
        return pace
    return f"{pace}, MFU {flops / (busy * len(seats) * device.flops(facts.config.train.dtype)):.2f}"


def seconds(value: float) -> str:
    """A time in words: of more than two minutes in minutes, from an hour on in hours."""
    if value >= 3600:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value > 120 else f"{value:.3g} s"


# -- arithmetic ----------------------------------------------------------------------------------------------------


def arithmetic(facts: RunFacts) -> str:
    config, num_prompts = facts.config, len(facts.data.train)
    train = config.train
    rollouts = train.groups_per_batch * train.group_size
    in_flight = (train.max_staleness + 1) * train.groups_per_batch
    wanted = round(train.num_steps * train.groups_per_batch * compute_answer_share(config))
    share = config.self_judging_share
    return "\n".join([
        "a step",
        f"  {train.groups_per_batch} groups x {train.group_size} siblings = {rollouts} rollouts, "
        f"at most {rollouts * config.rollout.max_turns * config.rollout.max_new_tokens} tokens",
        *([f"  {share:.0%} of the groups are judging tasks, in which the policy judges"] if share else []),
        *format_judgements(facts),
        f"  in flight: at most {in_flight} groups, {in_flight * train.group_size} rollouts "
        f"(max_staleness {train.max_staleness})",
        f"the run: {train.num_steps} steps, {wanted} prompts ({wanted / num_prompts:.2f} epochs of {num_prompts}), "
        f"{len(facts.data.held_out)} held out",
        journal_line(facts),
    ])  # fmt: skip


def format_judgements(facts: RunFacts) -> list[str]:
    """A line for each judge that asks a model: its judgements of a step, and of which share of the rollouts."""
    judging, shares = facts.config.judging, shares_asked(facts)
    if not judging.generative:
        return ["  judged by a rule"]
    if len(judging.judges) == 1:
        return [f"  {describe_requests(name, facts)}" for name in judging.generative]
    wide = column_width(judging.judges)
    lines = []
    for name, judge in judging.judges.items():
        work = describe_requests(name, facts) if name in judging.generative else KIND_IN_WORDS[judge.kind]
        share = "" if shares[name] > 0.9995 else f", of {shares[name]:.0%} of the rollouts"
        lines.append(f"    {name:<{wide}} {work}{share}")
    return [f"  judged by {len(judging.judges)} judges, at most:", *lines]


def describe_requests(name: str, facts: RunFacts) -> str:
    """The judgements of a judge in words."""
    train, judge = facts.config.train, facts.config.judging.judges[name]
    judgements = count_judgements(name, facts)
    groups = train.groups_per_batch * compute_answer_share(facts.config)
    rollouts = round(groups * train.group_size * shares_asked(facts)[name])
    product = f"{rollouts} rollouts x {judge.num_judgements} judgements = {judgements} judgements"
    if (calls := count_calls(name, facts)) != 1:
        product = f"{rollouts} rollouts x {judge.num_judgements} judgements x {calls:.3g} calls = {judgements} calls"
    if judge.protocol_kind.compares:
        product = f"{judgements} {judge.protocol} judgements"
    by = f" by {judge.model}" if len(facts.config.judging.judges) > 1 else ""
    return f"{product}{by}, at most {judgements * judge.max_new_tokens} tokens"


def format_block(title: str, lines: list[str] | tuple[str, ...]) -> list[str]:
    """A block of text; empty without lines."""
    return ["\n".join([title, *(f"  {line}" for line in lines)])] if lines else []
