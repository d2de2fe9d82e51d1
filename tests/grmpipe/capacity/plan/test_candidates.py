"""The planner: every way to seat the roles, pruned by memory and by the bound, ranked by simulation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grmpipe.capacity.cost import Costs, LearnerSpeed
from grmpipe.capacity.lower_bound import RoleWork, StepWork
from grmpipe.capacity.plan.candidates import (
    Candidate,
    Predicted,
    SearchProblem,
    Seating,
    enumerate_candidates,
    partitions,
    placement_of,
    search,
    splits,
    weigh,
)
from models.types import EngineSpeed
from scheduler.placement import PoolConfig, RoleConfig, place

GPUS = {"gpus": PoolConfig(slots=8, resource="gpu", memory_gb=80)}
# A row decodes 1000 tokens/s in any batch: work is tokens.
LINEAR = EngineSpeed(step_s=0.0, row_s=0.001, cached_token_s=0.0, prefill_token_s=0.0, max_rows=1024)


def linear_costs(candidate: Candidate) -> Costs:
    """A learner of 10 000 tokens/s per rank; engines that don't gain from width."""
    ranks = candidate.seats["learner"].replicas
    return Costs(
        engines={"policy": LINEAR, "grm": LINEAR},
        learner=LearnerSpeed(token_s=1e-4 / ranks, step_s=0.0),
        sync_s=0.0,
    )


def question(
    rollout_tokens: float = 100.0,
    judgement_tokens: float = 100.0,
    learner_tokens: float = 1000.0,
    kinds: dict[str, PoolConfig] = GPUS,
    memory: Callable[[str, Seating, str], float | None] = lambda role, seating, kind: None,
    costs: Callable[[Candidate], Costs] = linear_costs,
    widths: dict[str, tuple[int, ...]] | None = None,
    elastic: frozenset[str] = frozenset(),
    max_staleness: int = 1,
) -> SearchProblem:
    """100 rollouts, 100 judgements a step."""
    return SearchProblem(
        kinds=kinds,
        work=StepWork(
            engines={
                "policy": RoleWork(requests=100, prompt_tokens=0, new_tokens=rollout_tokens),
                "grm": RoleWork(requests=100, prompt_tokens=0, new_tokens=judgement_tokens),
            },
            learner_tokens=learner_tokens,
            groups=10,
            max_staleness=max_staleness,
        ),
        widths=widths or {"policy": (1,), "grm": (1,)},
        costs=costs,
        memory=memory,
        elastic=elastic,
    )


def apart(role: str, seating: Seating, kind: str) -> float:
    """Every role needs more than half of a slot: none can share."""
    return 45e9


def best_seats(asked: SearchProblem) -> dict[str, int]:
    best = search(asked, None, max_simulated=1).ranked[0]
    return {role: seating.replicas for role, seating in best.weighed.candidate.seats.items()}


def test_slots_are_split_as_the_work_is() -> None:
    # 10 s of rollouts, 10 s of judging, 10 s of learning: as even as possible on 8 slots.
    even = best_seats(question(learner_tokens=100_000, memory=apart))
    assert sorted(even.values()) == [2, 3, 3]
    # 60 s of judging, 10 s of rollouts, 10 s of learning.
    assert best_seats(question(judgement_tokens=600, rollout_tokens=100, learner_tokens=100_000, memory=apart)) == {
        "policy": 1, "learner": 1, "grm": 6
    }  # fmt: skip
    assert best_seats(question(judgement_tokens=100, rollout_tokens=600, learner_tokens=100_000, memory=apart)) == {
        "policy": 6, "learner": 1, "grm": 1
    }  # fmt: skip


def test_sharing_wins_where_memory_allows_and_work_divides_badly() -> None:
    best = search(question(judgement_tokens=500, learner_tokens=100_000), None, max_simulated=1).ranked[0]
    # 70 s of work on 8 slots: no placement beats all roles on all of them.
    assert best.weighed.bound_s == pytest.approx((10 + 50 + 10) / 8)
    assert best.weighed.candidate.describe() == "policy+grm+learner 8"


def test_what_exceeds_memory_is_left_out_and_counted() -> None:
    ranking = search(question(memory=apart), None, max_simulated=1)
    assert ranking.num_candidates > ranking.num_too_large > 0
    assert all(
        len(one_pool.seats) == 1 for entry in ranking.ranked for one_pool in entry.weighed.candidate.candidate_pools
    )


def test_a_learner_that_fits_only_in_shards_gets_ranks_enough() -> None:
    def memory(role: str, seating: Seating, kind: str) -> float:
        return 240e9 / seating.replicas if role == "learner" else 50e9

    seats = best_seats(question(judgement_tokens=500, learner_tokens=0, memory=memory))
    assert seats["learner"] == 3  # 80 GB each, though it has no work


def test_a_model_too_large_for_one_slot_is_laid_over_two() -> None:
    def memory(role: str, seating: Seating, kind: str) -> float:
        return (140e9 if role == "grm" else 45e9) / seating.width

    best = search(question(memory=memory, widths={"policy": (1, 2), "grm": (1, 2, 4)}), None, max_simulated=1).ranked[0]
    assert best.weighed.candidate.seats["grm"].width == 2


def test_nothing_fits_names_the_pool_the_role_and_its_memory() -> None:
    def memory(role: str, seating: Seating, kind: str) -> float:
        return 900e9 / seating.replicas if role == "learner" else 45e9

    with pytest.raises(ValueError, match=r"^placement\.pools\.gpus: .* learner needs 129 of 80 GB per slot"):
        search(question(memory=memory), None, max_simulated=1)


def test_too_few_slots_for_roles_that_cannot_share_is_a_sentence() -> None:
    lone = {"gpus": PoolConfig(slots=1, resource="gpu", memory_gb=80)}
    with pytest.raises(ValueError, match="policy, grm, learner can't be placed on the available slots"):
        search(question(kinds=lone, widths={"policy": (2,), "grm": (2,)}), None, max_simulated=1)


def test_the_simulation_has_the_last_word_and_hopeless_candidates_are_not_simulated() -> None:
    asked: list[str] = []

    def simulate(candidate: Candidate) -> Predicted:
        asked.append(candidate.describe())
        shared = len(candidate.candidate_pools) < 3
        return Predicted(step_s=100.0 if shared else 21.0, busy={})

    ranking = search(question(learner_tokens=100_000), simulate, max_simulated=6)
    assert len(ranking.ranked[0].weighed.candidate.candidate_pools) == 3
    assert ranking.ranked[0].step_s == 21.0
    assert 2 <= len(asked) <= 6
    # With a perfect first one no other is tried.
    asked.clear()
    # type: ignore[func-returns-value]
    search(question(), lambda candidate: asked.append("x") or Predicted(step_s=0.0, busy={}), max_simulated=6)
    assert len(asked) == 1


def test_every_layout_is_simulated_before_any_twice() -> None:
    layouts = []

    def simulate(candidate: Candidate) -> Predicted:
        layouts.append(candidate.layout)
        return Predicted(step_s=1e9, busy={})

    search(question(learner_tokens=100_000), simulate, max_simulated=5)
    assert len(set(layouts)) == 5  # three apart; three pairs; all together


def test_time_that_is_up_leaves_the_rest_to_the_bound() -> None:
    ticks = itertools.count()
    ranking = search(
        question(),
        lambda candidate: Predicted(step_s=1e9, busy={}),
        max_simulated=9,
        time_is_up=lambda: next(ticks) > 1,
    )
    assert [entry.predicted is not None for entry in ranking.ranked].count(True) == 2


def test_roles_that_may_swap_get_an_elastic_pool_of_their_own() -> None:
    found = [
        c for c in enumerate_candidates(question(elastic=frozenset({"policy", "grm"}))) if c.candidate_pools[0].elastic
    ]
    assert {
        tuple(one_pool.seats) for candidate in found for one_pool in candidate.candidate_pools if one_pool.elastic
    } == {("policy", "grm")}


def test_a_synchronous_step_is_bound_by_its_chain() -> None:
    best = search(question(max_staleness=0, learner_tokens=0), None, max_simulated=1).ranked[0]
    # 100 tokens played, 100 judged, at 1 ms each; the work of 100 of these on eight slots is 2.5 s.
    assert best.weighed.bound_s == pytest.approx(2.5)
    lone = search(question(max_staleness=0, learner_tokens=0, rollout_tokens=100_000), None, max_simulated=1)
    assert lone.ranked[0].weighed.bound_s >= 100.1


def test_kinds_of_slots_are_not_mixed_in_a_pool() -> None:
    kinds = {
        "fast": PoolConfig(slots=2, resource="gpu", memory_gb=80),
        "slow": PoolConfig(slots=3, resource="gpu", memory_gb=40),
    }
    for candidate in enumerate_candidates(question(kinds=kinds)):
        for kind, pool in kinds.items():
            assert sum(one_pool.slots for one_pool in candidate.candidate_pools if one_pool.kind == kind) in (
                0,
                pool.slots,
            )


def test_a_candidate_becomes_a_placement_that_seats_it() -> None:
    for candidate in enumerate_candidates(question(widths={"policy": (1, 2), "grm": (1, 2, 4)})):
        config = placement_of(candidate, GPUS)
        placement = place(config, ("policy", "learner", "grm"))
        assert sum(pool.slots for pool in placement.pools.values()) == 8
        for role, seating in candidate.seats.items():
            assert [len(seat.slots) for seat in placement.seats[role]] == [seating.width] * seating.replicas


def test_a_number_of_processes_that_is_given_is_kept() -> None:
    asked = dataclasses.replace(question(learner_tokens=100_000), replicas={"learner": range(1, 2), "grm": range(3, 4)})
    for candidate in enumerate_candidates(asked):
        assert (candidate.seats["learner"].replicas, candidate.seats["grm"].replicas) == (1, 3)


def with_critic(candidate: Candidate) -> Costs:
    return dataclasses.replace(
        linear_costs(candidate), critic=LearnerSpeed(token_s=1e-4 / candidate.seats["critic"].replicas, step_s=0.0)
    )


def test_a_critic_gets_slots_by_its_work_or_shares_the_learners() -> None:
    """Also a value per token: a third more work than the learner's."""
    asked = question(rollout_tokens=10, judgement_tokens=10, learner_tokens=200_000, costs=with_critic)
    asked = dataclasses.replace(asked, work=dataclasses.replace(asked.work, critic_tokens=200_000))
    ranking = search(asked, None, max_simulated=1)
    ranks = {entry.weighed.candidate.describe(): entry.weighed for entry in ranking.ranked}
    apart_, together = ranks["policy 1 | grm 1 | learner 2 | critic 4"], ranks["policy 1 | grm 1 | learner+critic 6"]
    assert apart_.loads["critic"] == pytest.approx(200_000 * 4 / 3 * 1e-4 / 4)
    assert together.bound_s == pytest.approx(200_000 * (1 + 4 / 3) * 1e-4 / 6)
    assert ranking.ranked[0].weighed.bound_s <= together.bound_s < apart_.bound_s
    config = placement_of(together.candidate, GPUS)
    assert config.roles["critic"] == config.roles["learner"] == RoleConfig(pool="learner_and_critic", replicas=6)


def test_on_cores_that_all_run_on_the_work_of_a_slot_breaks_ties_and_is_no_reason() -> None:
    """5 s of rollouts, 5 s of judgements, 10 s of a learner of one rank."""

    def on_two_cores(candidate: Candidate) -> Costs:
        return dataclasses.replace(linear_costs(candidate), cores=2)

    asked = question(50, 50, 100_000, kinds={"cores": PoolConfig(slots=2)}, costs=on_two_cores)
    ranking = search(dataclasses.replace(asked, replicas={"learner": range(1, 2)}), None, max_simulated=1)
    first, second, _ = [entry.weighed for entry in ranking.ranked]
    assert (first.bound_s, second.bound_s) == (pytest.approx(10.0),) * 2
    assert (first.candidate.describe(), first.slots_s) == ("policy+grm 1 | learner 1", pytest.approx((10.0, 10.0)))
    assert second.slots_s == pytest.approx((15.0, 5.0)) and second.reason == "bound by learner 10 s"
    quick = dataclasses.replace(asked, work=dataclasses.replace(asked.work, learner_tokens=40_000))
    weighed = search(quick, None, max_simulated=1).ranked[-1].weighed
    assert weighed.bound_s == pytest.approx(7.0) and weighed.reason == "bound by the cores, which all roles share"


def test_partitions_are_all_of_them() -> None:
    assert len(list(partitions(("a", "b", "c")))) == 5
    assert len(list(partitions(("a", "b", "c", "d")))) == 15


@given(st.integers(1, 4096), st.integers(1, 4))
def test_splits_use_all_slots_and_stay_few(slots: int, parts: int) -> None:
    found = list(splits(slots, parts))
    assert all(sum(split) == slots and min(split) >= 1 for split in found)
    assert len(found) <= (1800 if parts == 4 else 1200)


def many_roles(slots: int, judges: int, elastic: bool = False) -> SearchProblem:
    """A policy, its learner, a critic, and so many models that judge, with as much work as their number says."""
    names = [f"judge{n}" for n in range(1, judges + 1)]
    work = {name: RoleWork(requests=100 * n, prompt_tokens=0, new_tokens=100) for n, name in enumerate(names, 1)}
    engines = {"policy": RoleWork(requests=100, prompt_tokens=0, new_tokens=100), **work}
    speed = LearnerSpeed(token_s=1e-6, step_s=0.0)
    return SearchProblem(
        kinds={"gpus": PoolConfig(slots=slots, resource="gpu", memory_gb=80)},
        work=StepWork(engines=engines, learner_tokens=1e3, groups=10, max_staleness=1, critic_tokens=1e3),
        widths=dict.fromkeys(engines, (1,)),
        costs=lambda candidate: Costs(engines=dict.fromkeys(engines, LINEAR), learner=speed, critic=speed, sync_s=0.0),
        memory=apart,
        elastic=frozenset(engines) if elastic else frozenset(),
    )


def test_slots_go_to_several_judging_models_by_their_work() -> None:
    # 10 s of rollouts, 10 and 20 s of judging on 6 slots; one slot each for learner and critic.
    assert best_seats(many_roles(6, 2)) == {"policy": 1, "judge1": 1, "judge2": 2, "learner": 1, "critic": 1}


@pytest.mark.parametrize(("judges", "most"), [(1, 40_000), (2, 60_000), (3, 80_000), (4, 100_000)])
def test_a_search_stays_short_with_any_number_of_judging_models(judges: int, most: int) -> None:
    candidates = enumerate_candidates(many_roles(4096, judges))
    assert sum(1 for _ in candidates) <= most


def test_models_that_judge_may_swap_slots_with_each_other_and_not_with_the_policy() -> None:
    pools = [
        one_pool for one in enumerate_candidates(many_roles(4, 2, elastic=True)) for one_pool in one.candidate_pools
    ]
    assert {tuple(one_pool.seats) for one_pool in pools if one_pool.elastic} >= {
        ("judge1", "judge2"), ("policy", "judge1", "judge2"),
    }  # fmt: skip


@settings(max_examples=25)
@given(st.integers(1, 12), st.floats(1, 1000), st.floats(1, 1000), st.floats(0, 1e6))
def test_more_slots_never_predict_a_slower_bound(slots: int, rollout: float, judgement: float, learned: float) -> None:
    def best(n: int) -> float:
        kinds = {"gpus": PoolConfig(slots=n, resource="gpu")}
        asked = question(rollout, judgement, learned, kinds=kinds)
        return search(asked, None, max_simulated=1).ranked[0].weighed.bound_s

    assert best(slots + 1) <= best(slots) * (1 + 1e-9)


@settings(max_examples=25)
@given(st.floats(1, 1000), st.floats(1, 1000), st.floats(0, 1e6))
def test_the_first_is_the_least_of_all_bounds(rollout: float, judgement: float, learned: float) -> None:
    asked = question(rollout, judgement, learned, memory=apart)
    bounds = [weigh(c, asked).bound_s for c in enumerate_candidates(asked) if len(c.candidate_pools) == 3]
    assert search(asked, None, max_simulated=1).ranked[0].weighed.bound_s == min(bounds)
