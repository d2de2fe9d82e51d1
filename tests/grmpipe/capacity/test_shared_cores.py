"""Which processes share what, and what switching costs them."""

from __future__ import annotations

from grmpipe.capacity.shared_cores import CONTEXT_SWITCH_COST, shared_by
from scheduler.placement import Placement, PlacementConfig, PoolConfig, RoleConfig, place


def laptop(resource: str) -> Placement:
    pools = {name: PoolConfig(resource=resource) for name in ("train", "judging")}
    roles = {"policy": RoleConfig(pool="train"), "learner": RoleConfig(pool="train"), "grm": RoleConfig(pool="judging")}
    return place(PlacementConfig(pools=pools, roles=roles), ("policy", "learner", "grm"))


def test_a_gpu_is_shared_by_those_on_it_and_the_cores_of_a_machine_by_all_that_run_there() -> None:
    (gpu,) = shared_by(laptop("gpu"), cores=0)
    assert (gpu.capacity, {seat.name for seat in gpu.seats}) == (1, {"policy-0", "learner-0"})
    (cores,) = shared_by(laptop("cpu"), cores=2)
    assert (cores.capacity, cores.is_host) == (2, True)
    assert {seat.name for seat in cores.seats} == {"policy-0", "learner-0", "grm-0"}
    assert [shared.is_host for shared in shared_by(laptop("gpu"), cores=8)] == [False, True], (
        "the driver has cores, too"
    )
    assert {seat.name for seat in shared_by(laptop("cpu"), cores=0)[0].seats} == {"policy-0", "learner-0"}
    assert [shared.context_switch_cost for shared in shared_by(laptop("gpu"), cores=8)] == [0.0, CONTEXT_SWITCH_COST]
