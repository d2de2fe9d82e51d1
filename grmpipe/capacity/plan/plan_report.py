"""The text of a plan: placement, memory, the arithmetic of a batch, the time of a step. Reads a facts."""

from dataclasses import dataclass

from grmpipe.capacity.cost import ENGINE_SPREAD, LEARNER_SPREAD, Costs, LearnerSpeed, slower_costs
from grmpipe.capacity.lower_bound import DRIVER, LEARNER, RoleWork, StepWork, busiest_slot_s, busy_s, chain_s, learner_s
from grmpipe.capacity.notes import device_notes, hyperparameter_notes
from grmpipe.capacity.plan.costs import CostUnknown, estimate_costs
from grmpipe.capacity.plan.machine import describe_shortage, explain_refusal, list_last_pushes, measure_machine
from grmpipe.capacity.plan.memory import column_width, list_memory, memory, overfull_slots, size, slot_memory
from grmpipe.capacity.plan.memory_check import compute_shares, with_shares
from grmpipe.capacity.plan.run_facts import RunFacts, collect_facts
from grmpipe.capacity.plan.work import (
    Lengths,
    assume_tool_use,
    assumptions,
    compute_answer_share,
    count_calls,
    count_judgements,
    judge_lengths,
    judge_work,
    learner_flops,
    policy_lengths,
    shares_asked,
    step_work,
    teacher_work,
    writer_work,
)
from grmpipe.config.journals import ALL
from grmpipe.config.run_config import RunConfig
from grmpipe.models.engines.engine_kind import EngineOptions
from grmpipe.models.model_files import read_json
from grmpipe.models.settings import EngineConfig, PriceConfig
from grmpipe.roles.roles import ServedRole
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
    if copies := list_last_pushes(facts):
        by_role = ", ".join(f"{role} {size(held)}" for role, held in copies.items())
        blocks[-1] += f"\nhost memory, copies of the last push for sync.delta: {by_role}"
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
        if suggestion := suggest_fp8(role, facts):
            lines.append(f"  {'':<{wide}} {suggestion}")
    return "\n".join(lines)


def suggest_fp8(role: ServedRole, facts: RunFacts) -> str:
    """What fp8 would save a judge whose weights never change, where its device multiplies in fp8; else empty. It is
    not chosen by itself: rounded weights judge otherwise.
    """
    device, sized = facts.devices.get(role.pool), facts.models.get(role.name)
    if sized is None or role.takes_weights or role.is_shared or role.engine.quantizes or not role.engine.fp8_option:
        return ""
    if device is None or "fp8" not in device.tflops or sized.footprint is None:
        return ""
    if sized.model is not None and "quantization_config" in read_json(sized.model.path, "config.json"):
        return ""
    before, after = sized.footprint.weight_bytes(role.dtype), sized.footprint.weight_bytes(role.dtype, 1)
    return (
        f"it doesn't learn: in fp8 its weights take {size(after)} instead of {size(before)}, and it decodes faster; "
        f"compare its verdicts by task=evaluate, then type +{role.key}.engine_options.{role.engine.fp8_option}=fp8"
    )


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
    use = assume_tool_use(judge, facts.config.plan)
    calls_s = "" if use is None else f", each with {use.turns:g} calls of tools of {use.seconds:g} s (plan.tool_s)"
    return f"{product}{by}, at most {judgements * judge.max_new_tokens} tokens{calls_s}"


def format_block(title: str, lines: list[str] | tuple[str, ...]) -> list[str]:
    """A block of text; empty without lines."""
    return ["\n".join([title, *(f"  {line}" for line in lines)])] if lines else []


# -- the disk that journals take, at mean lengths of one turn per rollout ----------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesPerToken:
    """What a journal's line takes for a token: its id, its log-prob, its text."""

    id: float
    logprob: float
    text: float = 4.0


# Measured on lines of long answers; numbers of the first one are JSON.
PLAIN, PACKED = BytesPerToken(id=6.0, logprob=14.0), BytesPerToken(id=3.0, logprob=5.0)
ONLY_TEXT, NO_TEXT = BytesPerToken(id=0.0, logprob=0.0), BytesPerToken(id=0.0, logprob=0.0, text=0.0)
LINE_BYTES = 450.0  # a rollout's or a verdict's, without tokens and texts
JUDGEMENT_BYTES = 150.0


def journal_line(facts: RunFacts) -> str:
    """The journals of the whole run, in words."""
    key = "journals.compact"
    config = facts.config.journals
    now, other = (journal_gb(facts, PACKED if config.compact is own else PLAIN) for own in (True, False))
    left = estimate_kept_gb(facts, now)
    outside = (
        "" if len(list_journalled_judges(facts)) == len(facts.config.judging.generative) else ", without judges outside"
    )
    turns = "" if facts.config.env.env_kind.is_single else ", at one turn per rollout"
    limit = config.max_gb
    over = f"; journals.max_gb={limit:g} stops the run" if limit is not None and left > limit else ""
    without = "false" if config.compact else "true"
    kept = "" if config.keep == ALL else f"; journals.keep={config.keep} leaves {left:.2g} GB, up to twice in between"
    return f"  journals: about {now:.2g} GB, {other:.2g} GB with {key}={without}{turns}{outside}{kept}{over}"


def estimate_kept_gb(facts: RunFacts, whole_gb: float) -> float:
    """What journals.keep leaves; what a resume may need, and evaluations, stay whole besides."""
    if (keep := facts.config.journals).keep == ALL:
        return whole_gb
    if (share := keep.kept_share) is None:
        return journal_gb(facts, ONLY_TEXT)
    return share * whole_gb + (1 - share) * journal_gb(facts, NO_TEXT)


def list_journalled_judges(facts: RunFacts) -> list[str]:
    """Judges whose lengths are known: an endpoint's tokenizer isn't here."""
    return [name for name, judge in facts.config.judging.generative.items() if judge.model in facts.models]


def journal_gb(facts: RunFacts, per_token: BytesPerToken) -> float:
    """Rollouts and judgements of all steps, and of the held-out evaluations."""
    config = facts.config
    train, monitored = config.train, config.judge_monitor
    per_step = train.groups_per_batch * train.group_size
    held_out = len(facts.data.held_out)
    looks = train.num_steps // config.evaluate.every
    questions = 2 * held_out + looks * min(monitored.anchors, held_out)
    judged = train.num_steps * per_step + questions * config.evaluate.samples(1)
    rollout = rollout_bytes(policy_lengths(facts), per_token)
    found = judged * (rollout + LINE_BYTES) + questions * config.evaluate.greedy * rollout
    for name in list_journalled_judges(facts):
        per_rollout = count_judgements(name, facts) / per_step
        # Judgements of one line pack their prompt once.
        shared_by = max(1.0, per_rollout) if per_token is PACKED else 1.0
        found += judged * per_rollout * judgement_bytes(judge_lengths(name, facts), per_token, shared_by)
    return found / 1e9


def rollout_bytes(lengths: Lengths, per_token: BytesPerToken) -> float:
    prompt = lengths.prompt_tokens * (per_token.id + per_token.text)
    return LINE_BYTES + prompt + lengths.new_tokens * (per_token.id + per_token.logprob + per_token.text)


def judgement_bytes(lengths: Lengths, per_token: BytesPerToken, shared_by: float) -> float:
    """A judgement keeps the ids of its prompt, not the text."""
    prompt = lengths.prompt_tokens * per_token.id / shared_by
    return JUDGEMENT_BYTES + prompt + lengths.new_tokens * (per_token.id + per_token.logprob + per_token.text)


# -- what is asked of endpoints, at the mean lengths, with its cost ----------------------------------------------------


NOT_COUNTED = "without retries, preflight judgements and checks of the judge"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRequests:
    """The requests to a model behind an endpoint. judged: of rollouts in training; held_out: of evaluations."""

    model: str
    price: PriceConfig
    judged: float
    held_out: float
    prompt_tokens: float
    sampled_tokens: float

    @property
    def requests(self) -> float:
        return self.judged + self.held_out

    @property
    def cost_usd(self) -> float:
        return self.price.cost_usd(self.prompt_tokens, 0, self.sampled_tokens)

    @property
    def text(self) -> str:
        cost = f"; about {self.cost_usd:,.3g} USD" if self.price.is_known else ""
        return (
            f"{self.model}: {self.judged:,.0f} requests of the steps and {self.held_out:,.0f} of evaluations, "
            f"{self.prompt_tokens:,.0f} prompt tokens, {self.sampled_tokens:,.0f} sampled{cost}"
        )


def expect_requests(facts: RunFacts) -> list[ExpectedRequests]:
    """For each model behind an endpoint."""
    config = facts.config
    per_step = config.train.groups_per_batch * config.train.group_size
    evaluated = count_evaluated(facts) / per_step
    found = []
    for role, price in config.prices.items():
        works = [judge_work(name, facts) for name in config.asked.select_asking(role)]
        for name, judge in config.asked.scalar.items():
            if judge.model == role:
                played = policy_lengths(facts)
                read = Lengths(prompt_tokens=played.prompt_tokens + played.new_tokens, new_tokens=0)
                works.append(read.work(round(per_step * shares_asked(facts)[name]), 1))
        taught = [teacher_work(role, facts)] if role in config.teachers else []  # an evaluation has no teachers
        taught += [writer_work(role, facts)] if role in config.writers else []
        steps = config.train.num_steps
        found.append(
            ExpectedRequests(
                model=role,
                price=price,
                judged=steps * sum(work.requests for work in (*works, *taught)),
                held_out=evaluated * sum(work.requests for work in works),
                prompt_tokens=(steps + evaluated) * sum_prompts(works) + steps * sum_prompts(taught),
                sampled_tokens=(steps + evaluated) * sum_sampled(works) + steps * sum_sampled(taught),
            )
        )
    return found


def sum_prompts(works: list[RoleWork]) -> float:
    return sum(work.requests * work.prompt_tokens for work in works)


def sum_sampled(works: list[RoleWork]) -> float:
    return sum(work.requests * work.new_tokens for work in works)


def count_evaluated(facts: RunFacts) -> float:
    """The answers that held-out evaluations let judge: the first and the last all prompts', the others the anchors'."""
    config, held_out = facts.config, len(facts.data.held_out)
    between = (config.train.num_steps - 1) // config.evaluate.every
    return (2 * held_out + between * min(config.judge_monitor.anchors, held_out)) * config.evaluate.samples(1)


def warn_of_bounds(facts: RunFacts, expected: list[ExpectedRequests]) -> list[str]:
    """A warning for each bound of the budget that is below what is expected."""
    sums = {
        "max_requests": sum(one.requests for one in expected),
        "max_tokens": sum(one.prompt_tokens + one.sampled_tokens for one in expected),
        "max_cost": sum(one.cost_usd for one in expected),
    }
    shown = {"max_requests": "{:,.0f} requests", "max_tokens": "{:,.0f} tokens", "max_cost": "{:,.3g} USD"}
    return [
        f"budget.{key}={bound:g}: the run is expected to take {shown[key].format(sums[key])} and would stop before its "
        "end, with a checkpoint; type a higher bound, or fewer train.num_steps"
        for key, bound in facts.config.budget.bounds.items()
        if sums[key] > bound
    ]
