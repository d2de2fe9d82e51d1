"""task=simulate: from a configuration to a simulation, its files and its report."""

import json
import math
import re
import statistics
from pathlib import Path

from grmpipe.capacity.lower_bound import POLICY
from grmpipe.capacity.plan.costs import estimate_costs
from grmpipe.capacity.plan.plan_report import seconds
from grmpipe.capacity.plan.run_facts import RunFacts, collect_facts
from grmpipe.capacity.plan.work import (
    SAMPLED_PROMPTS,
    assume_tool_use,
    judge_lengths,
    judge_questions,
    policy_lengths,
    prompts_judged,
)
from grmpipe.capacity.simulate.simulated_answers import (
    Lengths,
    correlation_in,
    fit_lengths,
    lengths_in,
    lognormal,
    measure_tool_use,
)
from grmpipe.capacity.simulate.simulated_cluster import SimulatedRun, simulate
from grmpipe.capacity.simulate.workload import Workload
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.run_judges import Judging
from grmpipe.data.stream import PromptStream
from grmpipe.judge.grm import BYTES_PER_TOKEN
from grmpipe.models.types import Message
from grmpipe.observe.plain_json import plain
from grmpipe.observe.timeline import Timeline
from grmpipe.pipeline.health import Unfit
from grmpipe.run_dir.directory import HOME, holds_run, new_run_dir
from grmpipe.scheduler.placement import Placement
from grmpipe.scheduler.placement import describe as describe_placement

# Standard deviation of the logarithm of a rollout's length, and twice that of a judgement's: the longest of 100 is 4
# times the median, as of models that reason.
LENGTH_SIGMA = 0.6


def run_simulation(config: RunConfig) -> tuple[str, float]:
    """Simulate as placed, write simulation.json and timeline.json. Returns what to print, and the seconds of a step.
    Raises ConfigError.
    """
    facts = collect_facts(config)
    workload, costs = make_workload(facts), estimate_costs(facts)
    directory = open_directory(config.run_dir, config.experiment_name)
    timeline = Timeline(directory / "timeline.json")
    try:
        run = simulate(workload, facts.placement, costs, config.simulate.steps, timeline)
    except Unfit as error:  # so would the real one, from its first steps
        way_out = (
            "type a longer rollout.group_deadline_s (and judge.limits.timeout_s), fewer judgements "
            "(judge.num_judgements), or more engines for the judge (placement)"
            if re.search(r"\d timeout", str(error))
            else "type judges that decide more of its rollouts, or another composition of them"
        )
        raise ConfigError(f"reward: the simulated run stops, as a real one would: {error}; {way_out}") from error
    timeline.close()
    record = json.dumps(plain(make_record(run)), indent=2, ensure_ascii=False)
    (directory / "simulation.json").write_text(record + "\n", encoding="utf-8")
    text = f"{describe(run, workload, facts.placement)}\n\nfiles in {directory}: simulation.json, timeline.json"
    return text, run.step_s


def make_workload(facts: RunFacts) -> Workload:
    """The workload of a run. Raises ConfigError for a model elsewhere, whose speed is unknown."""
    config = facts.config
    for role in config.judging.remote_roles:
        key = config.models[role].key
        raise ConfigError(f"{key}.engine: a model behind an endpoint can't be simulated; type {key}.engine=vllm")
    settings = config.simulate
    means = {name: judge_lengths(name, facts).new_tokens for name in config.judging.generative}
    lengths = {name: choose_lengths(name, mean, LENGTH_SIGMA / 2, settings.lengths) for name, mean in means.items()}
    tools = {
        name: use if settings.lengths is None else measure_tool_use(Path(settings.lengths), name)
        for name, judge in config.judging.generative.items()
        if (use := assume_tool_use(judge, config.plan)) is not None
    }
    played = choose_lengths(POLICY, policy_lengths(facts).new_tokens, LENGTH_SIGMA, settings.lengths)
    return Workload(
        config=config,
        prompts=PromptStream(facts.data.train, seed=config.seed, shuffle=config.data.shuffle),
        chars_per_token={role: chars_per_token(role, facts) for role in config.served},
        lengths={POLICY: played} | lengths,
        sibling_correlation=correlation_in(Path(settings.lengths)) if settings.lengths else 0.0,
        tools=tools,
    )


def chars_per_token(role: str, facts: RunFacts) -> float:
    """Characters per token of the run's prompts under its tokenizer, if that is here."""
    model = facts.models[role].model
    if model is None:
        return BYTES_PER_TOKEN
    asked = list(sample_conversations(role, facts))
    num_tokens = sum(len(model.renderer.render(messages)) for messages in asked)
    return max(1, sum(len(message.content) for messages in asked for message in messages)) / num_tokens


def sample_conversations(role: str, facts: RunFacts) -> list[tuple[Message, ...]]:
    judges = facts.config.asked.select_asking(role)
    if facts.config.models[role].plays or not judges:  # a teacher reads what the policy reads
        return [prompt.messages for prompt in facts.data.train[:SAMPLED_PROMPTS]]
    return [asked for name, judge in judges.items() for asked in judge_questions(judge, prompts_judged(name, facts))]


def choose_lengths(whose: str, mean: float, sigma: float, run_dir: str | None) -> Lengths:
    """Lengths of an earlier run, of the policy or a judge; without one lognormal with the mean of task=plan."""
    if run_dir is None:
        return lognormal(mean / math.exp(sigma**2 / 2), sigma)
    try:
        found = lengths_in(Path(run_dir)).get(whose, [])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"simulate.lengths: the journals of {run_dir} can't be read ({error})") from error
    if not found:
        what = "rollouts" if whose == POLICY else f"judgements of {whose}"
        raise ConfigError(f"simulate.lengths: {run_dir} holds no {what}; give another run, or simulate.lengths=null")
    return fit_lengths(found)


def open_directory(run_dir: str | None, experiment_name: str) -> Path:
    """The directory of a simulation, which never writes into a run's files; an earlier simulation there is replaced."""
    if run_dir is not None and holds_run(Path(run_dir)):
        raise ConfigError(f"run_dir: {run_dir} holds a run; type another run_dir for its simulation")
    directory = Path(run_dir) if run_dir else new_run_dir(HOME / experiment_name / "simulations")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("timeline.json", "simulation.json"):
            (directory / name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir: {directory} can't be written to ({error}); type another") from error
    return directory


FULLY_BUSY = 0.95


def describe(run: SimulatedRun, workload: Workload, placement: Placement) -> str:
    config = workload.config
    rollouts = config.train.groups_per_batch * config.train.group_size
    wide = max(8, *map(len, run.busy))
    times = [run.steps[index].step_s for index in run.settled]
    loads = ", ".join(f"{role} {seconds(load)}" for role, load in run.bound.loads_s.items())
    lines = [
        f"{len(run.steps)} steps of {rollouts} rollouts{format_judgements(config.judging)}, simulated",
        f"  a step    {seconds(run.step_s)} ({seconds(min(times))} to {seconds(max(times))}), "
        f"{run.times_bound:.2f} times the bound",
        f"  bound     {seconds(run.bound.step_s)}: the work of the busiest slot ({loads})",
        *(f"  busy      {role:<{wide}} {share:>4.0%}" for role, share in run.busy.items()),
        f"  staleness at most {run.max_staleness} (train.max_staleness={config.train.max_staleness})",
        f"  {bottleneck(run)}",
    ]
    for what, counts in (
        ("groups dropped", run.dropped),
        ("judgements failed", run.failed_judgements),
        ("slots moved", run.moves),
    ):
        if counts:
            lines.append(f"  {what}: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    return f"{describe_placement(placement)}\n\n" + "\n".join(lines)


def format_judgements(judging: Judging) -> str:
    """The judgements of a rollout, by judge if there are several."""
    judges = judging.generative
    if len(judging.judges) == 1:
        return "".join(f" x {judge.num_judgements} judgements" for judge in judges.values())
    each = ", ".join(f"{name} {judge.num_judgements}" for name, judge in judges.items())
    return f", judgements by {each}" if each else ""


def bottleneck(run: SimulatedRun) -> str:
    """The busiest role, or if none is always busy, the learner's longest wait."""
    role = max(run.busy, key=lambda role: run.busy[role])
    stalls, total_s = run.stalls, run.stalls.steps_s
    waited = {
        "rollouts": stalls.rollouts_s,
        "verdicts": stalls.verdicts_s,
        "the learner (admission held the engines)": stalls.training_s,
        "weights": stalls.weight_sync_s,
    }
    what, longest_s = max(waited.items(), key=lambda item: item[1])
    if run.busy[role] >= FULLY_BUSY or not longest_s:
        return f"bottleneck: {role}, busy {run.busy[role]:.0%} of the time"
    return f"bottleneck: {longest_s / total_s:.0%} of the time was spent waiting for {what}"


def make_record(run: SimulatedRun) -> dict[str, object]:
    """The record of simulation.json."""
    times = [run.steps[index].step_s for index in run.settled]
    return {
        "step_s": run.step_s,
        "step_s_median": statistics.median(times),
        "steps_s": [step.step_s for step in run.steps],
        "steps_counted": [run.settled.start + 1, run.settled.stop],
        "busy": dict(run.busy),
        "bound_s": run.bound.step_s,
        "loads_s": dict(run.bound.loads_s),
        "max_staleness": run.max_staleness,
        "waits_s": {
            "policy": run.stalls.rollouts_s,
            "judge": run.stalls.verdicts_s,
            "batch": run.stalls.training_s,
            "weights": run.stalls.weight_sync_s,
        },
        "groups_dropped": dict(run.dropped),
        "judgements_failed": dict(run.failed_judgements),
        "moves": dict(run.moves),
        "bottleneck": bottleneck(run),
    }
