"""The report of a simulated run: lines for a person, a record for simulation.json. Pure."""

import statistics

from grmpipe.capacity.plan.plan_report import seconds
from grmpipe.capacity.simulate.simulated_cluster import SimulatedRun
from grmpipe.capacity.simulate.workload import Workload
from grmpipe.config.run_judges import Judging
from grmpipe.scheduler.placement import Placement
from grmpipe.scheduler.placement import describe as describe_placement

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
