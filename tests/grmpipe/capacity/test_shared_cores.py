"""Which processes share what, and how much work they get done."""

from __future__ import annotations

import pytest

from grmpipe.capacity.shared_cores import CONTEXT_SWITCH_COST, shared_by, union, work_clock
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


def test_three_on_two_cores_get_two_thirds_each_and_two_get_all() -> None:
    clock = work_clock([[(0.0, 9.0)], [(0.0, 6.0)], [(3.0, 6.0)]], capacity=2)
    assert [clock.at(moment) for moment in (0.0, 3.0, 6.0, 9.0)] == pytest.approx([0.0, 3.0, 5.0, 8.0])
    assert clock.at(10.0) - clock.at(9.0) == pytest.approx(1.0)
    assert clock.at(-1.0) == -1.0


def test_somebody_in_the_background_takes_his_share_where_there_is_too_little() -> None:
    alone, crowded = ([[(0.0, 4.0)]] * count for count in (1, 2))
    assert work_clock(alone, capacity=2, background=0.5).at(4.0) == pytest.approx(4.0)
    assert work_clock(crowded, capacity=2, background=0.5).at(4.0) == pytest.approx(4.0 * (0.5 + 0.5 * 2 / 3))


def test_those_that_take_turns_lose_by_it_the_more_the_more_they_are() -> None:
    alone, crowd = ([[(0.0, 1.0)]] * count for count in (2, 4))
    assert work_clock(alone, capacity=2, context_switch_cost=0.5).at(1.0) == pytest.approx(1.0)
    assert work_clock(crowd, capacity=2, context_switch_cost=0.5).at(1.0) == pytest.approx(0.5 / 1.5)
    assert [shared.context_switch_cost for shared in shared_by(laptop("gpu"), cores=8)] == [0.0, CONTEXT_SWITCH_COST]


def test_a_process_that_got_less_than_its_share_has_a_slower_clock() -> None:
    clock = work_clock([[(2.0, 4.0)]], capacity=1).slowed(0.5)
    assert [clock.at(moment) for moment in (2.0, 3.0, 4.0)] == pytest.approx([2.0, 2.5, 3.0])


def test_time_that_nobody_used_is_no_contention_and_requests_of_one_engine_are_one_process() -> None:
    clock = work_clock([[(0.0, 2.0), (1.0, 2.0), (8.0, 9.0)], [(5.0, 6.0)]], capacity=1)
    assert clock.at(9.0) == pytest.approx(9.0)
    assert union([(1.0, 2.0), (0.0, 1.5), (3.0, 4.0)]) == [(0.0, 2.0), (3.0, 4.0)]
