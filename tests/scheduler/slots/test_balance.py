"""The balancer's guarantees: no role with work and no slot, no move that costs more than it gains, no oscillation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grmpipe.scheduler.routing.load import RoleBacklog
from grmpipe.scheduler.slots.balance import Move, Pool, Slot, decide, together_s

ROLES = ("policy", "grm")
THREE = (*ROLES, "safety")
BOTH = frozenset(ROLES)
COST_S = 1.0


def backlog(role: str, requests: int, each: float = 100.0, longest: float | None = None, idle_s: float = 0.0):
    return RoleBacklog(
        role=role,
        requests=requests,
        tokens=requests * each,
        longest=longest or (each if requests else 0.0),
        step_s=0.01,
        row_s=0.001,
        idle_s=idle_s,
    )


def slots(policy: int, grm: int, idle_s: float = 0.0) -> list[Slot]:
    roles = ["policy"] * policy + ["grm"] * grm
    return [Slot(name=str(n), role=role, able=BOTH, idle_s=idle_s) for n, role in enumerate(roles)]


def pool(policy: RoleBacklog, grm: RoleBacklog, of: Sequence[Slot], hysteresis: float = 1.0) -> Pool:
    return Pool(
        roles={"policy": policy, "grm": grm}, slots=of, cost_s=lambda source, target: COST_S, hysteresis=hysteresis
    )


def after(view: Pool, move: Move) -> Pool:
    """The pool once a move is done: the slot's idle time is 0."""
    moved = [replace(slot, role=move.target, idle_s=0.0) if slot.name == move.slot else slot for slot in view.slots]
    return replace(view, slots=moved)


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    """A pool of two or three roles."""
    roles = draw(st.sampled_from([ROLES, THREE]))
    every = frozenset(roles)

    def one(role: str) -> RoleBacklog:
        requests = draw(st.integers(0, 200))
        each = draw(st.floats(1, 5000))
        return RoleBacklog(
            role=role,
            requests=requests,
            tokens=requests * each,
            longest=each * draw(st.floats(1, 20)) if requests else 0.0,
            step_s=draw(st.floats(0, 0.05)),
            row_s=draw(st.floats(0, 0.01)),
            max_rows=draw(st.sampled_from([4, 64, math.inf])),
            idle_s=0.0 if requests else draw(st.floats(0, 10)),
        )

    some = [
        Slot(
            name=str(n),
            role=draw(st.sampled_from(roles)),
            able=draw(st.sampled_from([every, every, every, *(frozenset({role}) for role in roles)])),
            idle_s=draw(st.sampled_from([0.0, 0.5, 5.0])),
        )
        for n in range(draw(st.integers(1, 8)))
    ]
    return Pool(
        roles={role: one(role) for role in roles},
        slots=some,
        cost_s=lambda source, target: COST_S,
        hysteresis=draw(st.sampled_from([0.0, 1.0, 3.0])),
    )


def norm_s(view: Pool) -> float:
    """The objective of the balancer."""
    return together_s(*(one.finish_s(view.num_serving(role)) for role, one in view.roles.items()))


@given(pools())
def test_a_role_with_work_never_loses_its_last_slot_and_no_slot_goes_where_it_cannot(view: Pool) -> None:
    move = decide(view)
    if move is None:
        return
    (slot,) = (slot for slot in view.slots if slot.name == move.slot)
    assert (slot.role, move.target in slot.able, move.target != move.source) == (move.source, True, True)
    if view.roles[move.source].requests and view.num_serving(move.source):
        assert after(view, move).num_serving(move.source) >= 1


@given(pools())
def test_a_role_with_work_and_no_slot_gets_one_whenever_there_is_one_to_spare(view: Pool) -> None:
    starving = [role for role in view.roles if view.roles[role].requests and not view.num_serving(role)]
    spare = [
        (slot, role) for role in starving for slot in view.slots
        if slot.role != role and role in slot.able and view.can_go(slot)
    ]  # fmt: skip
    if spare:
        move = decide(view)
        assert move is not None
        assert move.target in starving


@given(pools())
def test_where_both_roles_work_and_have_slots_a_move_gains_more_than_it_costs(view: Pool) -> None:
    if not all(view.roles[role].requests and view.num_serving(role) for role in view.roles):
        return
    move = decide(view)
    if move is None or move.reason.startswith("idle"):
        return
    saved_s = norm_s(view) - norm_s(after(view, move))
    assert saved_s > 0
    assert move.gain_s > view.hysteresis * move.cost_s
    assert saved_s > move.gain_s


@settings(max_examples=200)
@given(pools())
def test_on_a_steady_load_slots_come_to_rest_and_none_comes_back(view: Pool) -> None:
    """With three roles a slot may go on, to the third one, once another slot came to the second."""
    had = {(slot.name, slot.role) for slot in view.slots}
    while (move := decide(view)) is not None:
        assert (move.slot, move.target) not in had
        had.add((move.slot, move.target))
        view = after(view, move)


@given(pools())
def test_no_slot_idles_for_longer_than_a_switch_costs_while_there_is_work_for_it(view: Pool) -> None:
    for slot in view.slots:
        for role in slot.able - {slot.role}:
            goal, serving = view.roles[role], view.num_serving(role)
            lasting = goal.requests > serving and goal.finish_s(serving) > 2 * COST_S
            needless = view.roles[slot.role].requests < view.num_serving(slot.role)
            if slot.idle_s >= COST_S and lasting and needless and view.can_go(slot):
                assert decide(view) is not None


def test_requests_that_are_dear_to_take_over_keep_a_slot_where_it_is() -> None:
    view = pool(backlog("policy", 100), backlog("grm", 400), slots(4, 4))
    assert decide(view) is not None
    dear = {role: replace(one, takeover_s=0.2) for role, one in view.roles.items()}
    assert decide(replace(view, roles=dear)) is None


def test_the_thin_tail_of_the_rollouts_needs_one_slot_and_the_rest_goes_to_the_judge() -> None:
    tail = replace(backlog("policy", 6, each=500, longest=2000), row_s=0.0002)
    judging = backlog("grm", 200, each=1000)
    view = pool(tail, judging, slots(8, 0))
    while (move := decide(view)) is not None:
        assert move.target == "grm"
        view = after(view, move)
    assert view.num_serving("policy") <= 2


def test_when_all_slots_roll_out_a_few_judgements_take_one_of_them() -> None:
    view = pool(backlog("policy", 128, each=1000), backlog("grm", 4), slots(8, 0))
    move = decide(view)
    assert move is not None
    assert move.target == "grm"
    assert "no slot serves grm" in move.reason
    assert decide(after(view, move)) is None


def test_a_move_that_gains_less_than_it_costs_isnt_made() -> None:
    view = pool(backlog("policy", 40), backlog("grm", 44), slots(4, 4))
    assert decide(view) is None


def test_the_only_slot_waits_until_its_role_has_no_work() -> None:
    judging = backlog("grm", 10)
    assert decide(pool(backlog("policy", 1), judging, slots(1, 0))) is None
    move = decide(pool(backlog("policy", 0), judging, slots(1, 0)))
    assert move is not None
    assert (move.source, move.target) == ("policy", "grm")


def test_idle_slots_move_to_the_first_stage_once_that_costs_nothing() -> None:
    def at_rest(idle_s: float) -> Pool:
        return pool(backlog("policy", 0, idle_s=idle_s), backlog("grm", 0, idle_s=idle_s), slots(2, 6))

    assert decide(at_rest(COST_S / 2)) is None
    move = decide(at_rest(COST_S))
    assert move is not None
    assert move.target == "policy"


def test_a_slot_whose_engine_is_dead_may_serve_the_other_role() -> None:
    dead = Slot(name="1", role="policy", able=frozenset({"grm"}))
    alive = slots(1, 0)[0]
    view = pool(backlog("policy", 100), backlog("grm", 100), [alive, dead])
    move = decide(view)
    assert move is not None
    assert (move.slot, move.target) == ("1", "grm")


def test_more_rows_than_a_slot_takes_at_once_need_more_slots() -> None:
    load = replace(backlog("grm", 64), row_s=0.0)
    assert load.finish_s(1) == load.finish_s(8)
    queued = replace(load, max_rows=8)
    assert queued.finish_s(1) == pytest.approx(8 * queued.finish_s(8))


def three(*works: RoleBacklog, of: dict[str, int]) -> Pool:
    """A pool with these backlogs and numbers of slots."""
    named = [role for role, count in of.items() for _ in range(count)]
    some = [Slot(name=str(n), role=role, able=frozenset(of)) for n, role in enumerate(named)]
    roles = {one.role: one for one in works}
    return Pool(roles=roles, slots=some, cost_s=lambda source, target: COST_S, hysteresis=1.0)


def test_move_between_two_roles_is_worth_less_if_a_third_role_is_the_bottleneck() -> None:
    """The norm of the two alone would move a slot that shortens no step by as much as the move costs."""
    judging = (backlog("grm", 300, each=100), backlog("safety", 30, each=50))
    of = {"policy": 2, "grm": 2, "safety": 3}
    alone, beside = (three(backlog("policy", n, each=4000), *judging, of=of) for n in (0, 200))
    first = next(slot for slot in alone.slots if slot.role == "safety")
    assert alone.move(first, "grm", "").gain_s > 2 * COST_S
    assert 0 < beside.move(first, "grm", "").gain_s < COST_S
    move = decide(beside)
    assert move is not None
    assert move.target == "policy"


def test_a_third_role_changes_the_size_of_a_gain_and_never_its_sign() -> None:
    for num_grm in range(1, 400, 13):
        judging = (backlog("grm", num_grm), backlog("safety", 200))
        of = {"policy": 2, "grm": 3, "safety": 3}
        gains = [
            three(backlog("policy", n, each=500), *judging, of=of)
            .move(Slot(name="x", role="grm", able=frozenset(of)), "safety", "")
            .gain_s
            for n in (0, 5, 100)
        ]
        assert len({gain_s > 0 for gain_s in gains}) == 1


def test_a_role_that_no_slot_can_serve_does_not_hold_the_others() -> None:
    """Its engines are dead: it would take for ever, and next to that no second counts."""
    able = frozenset(ROLES)
    some = [Slot(name=str(n), role=role, able=able) for n, role in enumerate(("policy",) * 4 + ("grm",))]
    works = {"policy": backlog("policy", 8), "grm": backlog("grm", 400), "safety": backlog("safety", 5)}
    move = decide(Pool(roles=works, slots=some, cost_s=lambda source, target: COST_S, hysteresis=1.0))
    assert move is not None
    assert (move.source, move.target) == ("policy", "grm")


def test_three_roles_with_equal_work_get_equally_many_slots() -> None:
    view = three(*(backlog(role, 300, each=500) for role in THREE), of={"policy": 9, "grm": 0, "safety": 0})
    while (move := decide(view)) is not None:
        view = after(view, move)
    assert [view.num_serving(role) for role in THREE] == [3, 3, 3]
