"""Compares the pipeline's overlap with that of one queue for all judges. The table is in scheduling.md.

    python benchmarks/central_queue.py 4,0 6,1     # engines of the GRM, max_staleness; a minute

It serves the rollouts and judgements of `scheduling.py overlap --virtual --steps 30` again: a free row on any engine
takes the most urgent request at once. Real engines can't do that: a request must be sent before the row is free, or the
row waits.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import scheduling

from grmpipe.capacity.simulate.simulated_cluster import simulate

NUM_STEPS = 30
GROUPS = scheduling.overlap_workload(0).config.train.groups_per_batch
SPEEDS = scheduling.OVERLAP_COSTS.engines
POLICY_ROWS = 2 * SPEEDS["policy"].max_rows
Sibling = tuple[str, int]


@dataclass(slots=True)
class Served:
    """An EventSink: seconds of each rollout and of its judgements, by the step that trained them."""

    played_s: dict[Sibling, float] = field(default_factory=dict)
    judged_s: defaultdict[Sibling, list[float]] = field(default_factory=lambda: defaultdict(list))
    steps: defaultdict[int, list[Sibling]] = field(default_factory=lambda: defaultdict(list))

    def span(self, lane: str, name: str, start_s: float, end_s: float, **args: str | int | float) -> None:
        if name not in SPEEDS:
            return
        group, number, _ = str(args["request"]).split("/")
        sibling, seconds = (group, int(number)), int(args["num_tokens"]) * SPEEDS[name].step_s
        if name == "grm":
            self.judged_s[sibling].append(seconds)
            return
        self.played_s[sibling] = seconds
        # At a staleness of 0 or 1 there is no choice: a batch is the groups that were opened together.
        self.steps[int(group.lstrip("g")) // GROUPS + 1].append(sibling)


def from_one_queue(served: Served, staleness: int, judge_rows: int, tail_s: float, longest_first: bool) -> list[float]:
    """The end of each step. tail_s: from the last verdict to the end of the push."""
    order, now_s, ends = itertools.count(), 0.0, [0.0]
    rows = {"play": POLICY_ROWS, "judge": judge_rows}
    queues: dict[str, list[tuple[int, float, int, Sibling, float]]] = {"play": [], "judge": []}
    busy: list[tuple[float, int, str, int, Sibling]] = []
    left = {step: sum(len(served.judged_s[one]) for one in ones) for step, ones in served.steps.items()}
    finished: set[int] = set()
    admitted = 0

    def wait(stage: str, step: int, sibling: Sibling, seconds: float, whole_s: float) -> None:
        urgent = -whole_s if longest_first else 0.0
        heapq.heappush(queues[stage], (step, urgent, next(order), sibling, seconds))

    while len(ends) <= NUM_STEPS:
        while admitted < min(NUM_STEPS, len(ends) + staleness):
            admitted += 1
            for one in served.steps[admitted]:
                wait("play", admitted, one, served.played_s[one], served.played_s[one] + max(served.judged_s[one]))
        for stage, queue in queues.items():
            while queue and rows[stage]:
                step, _, _, sibling, seconds = heapq.heappop(queue)
                rows[stage] -= 1
                heapq.heappush(busy, (now_s + seconds, next(order), stage, step, sibling))
        now_s, _, stage, step, sibling = heapq.heappop(busy)
        if stage == "push":
            finished.add(step)
            while len(ends) in finished:
                ends.append(now_s)
            continue
        rows[stage] += 1
        if stage == "play":
            for seconds in served.judged_s[sibling]:
                wait("judge", step, sibling, seconds, seconds)
            continue
        left[step] -= 1
        if not left[step]:
            heapq.heappush(busy, (now_s + tail_s, next(order), "push", step, sibling))
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", help="engines of the GRM, max_staleness (0 or 1)")
    args = parser.parse_args()
    costs = scheduling.OVERLAP_COSTS
    micro_batch_s = costs.learner.token_s * scheduling.overlap_workload(0).config.train.micro_batch_tokens
    tail_s = micro_batch_s / 2 + costs.learner.step_s + costs.sync_s
    print("| judges | max_staleness | the pipeline | one queue | one queue, lengths known |\n|---|---|---|---|---|")
    for judges, staleness in (map(int, case.split(",")) for case in args.cases):
        served = Served()
        placement = scheduling.seats(policy=2, grm=judges, learner=1)
        run = simulate(scheduling.overlap_workload(staleness), placement, costs, NUM_STEPS, served)
        rows = judges * SPEEDS["grm"].max_rows
        first, last = run.settled.start, run.settled.stop
        cells = [f"{run.times_bound:.3f}"]
        for longest_first in (False, True):
            ends = from_one_queue(served, staleness, rows, tail_s, longest_first)
            cells.append(f"{(ends[last] - ends[first]) / (last - first) / run.bound.step_s:.3f}")
        print(f"| {judges} | {staleness} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
