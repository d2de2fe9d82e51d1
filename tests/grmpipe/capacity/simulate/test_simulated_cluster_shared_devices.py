"""Which processes share a device, and what switching costs them."""

from __future__ import annotations

from grmpipe.capacity.simulate.simulated_cluster import find_shared_devices
from grmpipe.scheduler.placement import Placement, PlacementConfig, PoolConfig, RoleConfig, place


def laptop(resource: str) -> Placement:
    pools = {name: PoolConfig(resource=resource) for name in ("train", "judging")}
    roles = {"policy": RoleConfig(pool="train"), "learner": RoleConfig(pool="train"), "grm": RoleConfig(pool="judging")}
    return place(PlacementConfig(pools=pools, roles=roles), ("policy", "learner", "grm"))


def test_a_gpu_is_shared_by_those_on_it_and_the_cores_of_a_machine_by_all_that_run_there() -> None:
    gpu = find_shared_devices(laptop("gpu"), cores=0)
    assert gpu.keys() == {"policy-0", "learner-0"} and len(set(gpu.values())) == 1
    cores = find_shared_devices(laptop("cpu"), cores=2)
    assert cores.keys() == {"policy-0", "learner-0", "grm-0", "driver"} and len(set(cores.values())) == 1
    both = find_shared_devices(laptop("gpu"), cores=8)
    assert both["driver"] is not both["policy-0"], "the driver has cores, too"
    assert find_shared_devices(laptop("cpu"), cores=0).keys() == {"policy-0", "learner-0"}
