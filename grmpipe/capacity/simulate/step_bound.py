"""A lower bound on the steps of a simulated run: the work of their busiest slot. Pure.

No overlap beats it: what the processes of a slot did in these steps, they can't do faster one after the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from grmpipe.capacity.cost import Costs
from grmpipe.capacity.lower_bound import DRIVER, LEARNER, POLICY, busiest_slot_s, is_learning, is_on_cpu
from grmpipe.scheduler.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least seconds of a step. `loads_s`: of each process of a role."""

    step_s: float
    loads_s: Mapping[str, float]


def compute_bound(work_s: Mapping[str, float], placement: Placement, costs: Costs) -> Bound:
    """work_s: role -> seconds of work in a step, of all its engines together with their batches full, of each rank, of
    the driver. A push also stops the policy's engines.
    """
    loads = {
        role: seconds if is_learning(role) or role == DRIVER else seconds / len(placement.seats[role])
        for role, seconds in work_s.items()
    }
    paused, pushing = placement.seats[POLICY][0], placement.seats[LEARNER][0]
    on_cores = costs.cores and is_on_cpu(placement, paused)  # a paused process leaves its core to others
    if paused.pool != pushing.pool and not on_cores:  # on one slot a push counts once
        loads[POLICY] += costs.sync_s
    return Bound(step_s=busiest_slot_s(placement, loads, costs.cores), loads_s=loads)
