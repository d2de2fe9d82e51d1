"""The seats of roles, and what is refused before anything starts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.scheduler.placement import (
    NodeCapacity,
    PlacementConfig,
    PoolConfig,
    RoleConfig,
    bundles_by_node,
    check_capacity,
    describe,
    place,
)

ROLES = ("policy", "learner", "grm")
SERVED = ("policy", "grm")
LEARNERS = {"policy": "learner", "grm": "grm_learner", "safety": "safety_learner"}
LAPTOP = PlacementConfig(
    pools={"train": PoolConfig(), "judging": PoolConfig()},
    roles={"policy": RoleConfig(pool="train"), "learner": RoleConfig(pool="train"), "grm": RoleConfig(pool="judging")},
)


def test_an_elastic_pool_has_an_engine_of_each_role_on_each_slot() -> None:
    pools = {"engines": PoolConfig(slots=3, elastic=True)}
    roles = {role: RoleConfig(pool="engines") for role in ("policy", "learner", "grm")}
    placement = place(PlacementConfig(pools=pools, roles=roles), ["policy", "learner", "grm"], SERVED)
    assert placement.elastic_slots("engines") == {
        str(slot): {"policy": f"policy-{slot}", "grm": f"grm-{slot}"} for slot in range(3)
    }
    assert [seat.slots for seat in placement.seats["learner"]] == [(0,)]
    assert [seat.share for seat in placement.seats["grm"]] == [1 / 3, 1 / 2, 1 / 2]
    assert placement.bundles("engines") == ((0,), (1,), (2,))


def test_only_a_learner_and_engines_have_turns() -> None:
    def seated(**pools: str) -> tuple[str, ...]:
        slots = {"all": PoolConfig(slots=2, time_shared=True), "apart": PoolConfig()}
        roles = {role: RoleConfig(pool=pool) for role, pool in pools.items()}
        config = PlacementConfig(pools=slots, roles=roles)
        return place(config, list(roles), (*SERVED, "safety"), LEARNERS).time_sharing_roles

    assert seated(learner="all", policy="all", grm="all", critic="apart") == ("policy", "grm")
    assert seated(learner="all", policy="all", grm="apart", grm_learner="apart") == ("policy",)
    assert seated(learner="all", policy="all", safety="all") == ("policy", "safety")
    assert seated(learner="apart", policy="apart") == ()
    with pytest.raises(ValueError, match=r"placement\.roles\.critic\.pool: only learner .*time-shared pool all"):
        seated(learner="all", policy="all", critic="all")
    for judge in ("grm", "safety"):
        with pytest.raises(
            ValueError, match=rf"placement\.roles\.{judge}\.pool: .* weights from {judge}_learner at any"
        ):
            seated(**{"learner": "all", "policy": "all", judge: "all", f"{judge}_learner": "apart"})
    with pytest.raises(ValueError, match=r"placement\.pools\.all\.time_shared: .*only learner uses it; set \S*learner"):
        seated(learner="all", policy="apart")


def test_a_pool_with_one_engine_role_or_without_elastic_has_no_slots_that_move() -> None:
    roles = {role: RoleConfig(pool="engines") for role in ("policy", "grm")}
    lone = place(PlacementConfig(pools={"engines": PoolConfig(elastic=True)}, roles=roles), ["policy"], SERVED)
    still = place(PlacementConfig(pools={"engines": PoolConfig()}, roles=roles), ["policy", "grm"], SERVED)
    assert (lone.elastic_slots("engines"), still.elastic_slots("engines")) == ({}, {})


@pytest.mark.parametrize(("key", "wrong"), [("replicas", 2), ("slots_per_replica", 2)])
def test_roles_that_an_elastic_pool_cant_seat_are_refused_by_key(key: str, wrong: int) -> None:
    pools = {"engines": PoolConfig(slots=3, elastic=True)}
    roles = {"policy": RoleConfig(pool="engines", **{key: wrong}), "grm": RoleConfig(pool="engines")}
    with pytest.raises(ValueError, match=rf"placement\.roles\.policy\.{key}: .*elastic"):
        place(PlacementConfig(pools=pools, roles=roles), ["policy", "grm"], SERVED)


def machine(cpus: int = 2, gpus: int = 0, name: str = "this machine") -> NodeCapacity:
    return NodeCapacity(name=name, cpus=cpus, gpus=gpus)


def pools(**slots: PoolConfig) -> PlacementConfig:
    """One role per pool, on all of its slots."""
    return PlacementConfig(
        pools=slots, roles={name: RoleConfig(pool=name, replicas=pool.slots) for name, pool in slots.items()}
    )


def test_roles_of_one_pool_share_its_slots() -> None:
    placement = place(LAPTOP, ROLES)
    assert [(s.name, s.slots, s.share) for s in placement.seats["policy"]] == [("policy-0", (0,), 0.5)]
    assert placement.seats["learner"][0].slots == (0,)
    assert placement.seats["grm"][0].share == 1.0


def test_a_role_the_run_does_not_need_takes_nothing() -> None:
    placement = place(LAPTOP, ("policy", "learner"))
    assert set(placement.pools) == {"train"}
    assert set(placement.seats) == {"policy", "learner"}


def test_replicas_go_to_the_emptiest_slots() -> None:
    config = PlacementConfig(
        pools={"all": PoolConfig(slots=2)},
        roles={
            "policy": RoleConfig(pool="all"),
            "grm": RoleConfig(pool="all"),
            "learner": RoleConfig(pool="all", replicas=2),
        },
    )
    seats = place(config, ("policy", "grm", "learner")).seats
    assert seats["policy"][0].slots == (0,)
    assert seats["grm"][0].slots == (1,)
    assert [seat.slots for seat in seats["learner"]] == [(0,), (1,)]


def test_a_replica_of_several_cores_has_them_alone() -> None:
    config = PlacementConfig(
        pools={"all": PoolConfig(slots=4)},
        roles={"policy": RoleConfig(pool="all", replicas=2, slots_per_replica=2), "grm": RoleConfig(pool="all")},
    )
    assert place(config, ("policy",)).bundles("all") == ((0, 1), (2, 3))
    with pytest.raises(ValueError, match=r"placement\.roles\.policy\.slots_per_replica: .* a separate pool"):
        place(config, ("policy", "grm"), served=("policy", "grm"))


def test_an_engine_may_share_several_gpus_which_are_reserved_one_by_one() -> None:
    config = PlacementConfig(
        pools={"all": PoolConfig(slots=4, resource="gpu")},
        roles={
            "learner": RoleConfig(pool="all", replicas=2),
            "policy": RoleConfig(pool="all", replicas=2, slots_per_replica=2),
        },
    )
    placement = place(config, ("learner", "policy"), served=("policy",))
    assert placement.bundles("all") == ((0,), (1,), (2, 3)), "a pair of its own stays one piece"
    assert [seat.is_spread for seat in placement.seats["policy"]] == [True, False]
    with pytest.raises(ValueError, match=r"placement\.roles\.policy\.slots_per_replica: .* a separate pool"):
        place(config, ("learner", "policy"))


def test_error_of_a_role_without_a_place_names_the_pools() -> None:
    with pytest.raises(ValueError, match=r"type '\+placement\.roles=\{meta_rm: \{pool: train\}\}' \(or judging\)"):
        place(LAPTOP, (*ROLES, "meta_rm"))


def test_an_unknown_pool_is_named() -> None:
    config = PlacementConfig(pools=LAPTOP.pools, roles={"grm": RoleConfig(pool="judgin")})
    with pytest.raises(ValueError, match=r"placement\.roles\.grm\.pool: unknown pool 'judgin'"):
        place(config, ("grm",))


def test_more_replicas_than_slots_says_how_many_slots_to_set() -> None:
    config = PlacementConfig(pools=LAPTOP.pools, roles={"grm": RoleConfig(pool="judging", replicas=3)})
    with pytest.raises(ValueError, match=r"set placement\.pools\.judging\.slots=3"):
        place(config, ("grm",))


def test_more_slots_than_cores_says_what_there_is_and_what_to_type() -> None:
    placement = place(pools(train=PoolConfig(slots=4)), ("train",))
    with pytest.raises(ValueError, match=r"needs 4 cpu slots .* has 2 cores; set placement\.pools\.train\.slots=2"):
        check_capacity(placement, [machine(cpus=2)])


def test_every_shortage_names_node_resource_and_role() -> None:
    two = [machine(gpus=1, name="node-a"), machine(gpus=1, name="node-b")]
    demands = (
        pools(learner=PoolConfig(slots=4, resource="gpu")),  # too many in all
        pools(learner=PoolConfig(slots=2, resource="gpu", strategy="STRICT_PACK")),  # not on one node
        pools(learner=PoolConfig(slots=3, resource="gpu", strategy="STRICT_SPREAD")),  # too few nodes
    )
    for config in demands:
        with pytest.raises(ValueError, match=r"gpu slots \(\w+\) for learner; node-a has 1 GPUs; node-b has 1 GPUs"):
            check_capacity(place(config, ("learner",)), two)
    with pytest.raises(
        ValueError, match=r"needs 1 cpu slots \(PACK\) for grm; this machine has 1 cores, 1 of them used"
    ):
        check_capacity(place(LAPTOP, ROLES), [machine(cpus=1)])


def test_gpus_that_are_not_there_are_refused() -> None:
    placement = place(pools(train=PoolConfig(slots=8, resource="gpu")), ("train",))
    with pytest.raises(ValueError, match=r"has no GPUs; set placement\.pools\.train\.resource=cpu"):
        check_capacity(placement, [machine()])


def test_a_pool_that_others_left_nothing_for_is_pointed_to_them() -> None:
    with pytest.raises(ValueError, match=r"1 of them used by train; set placement\.roles\.grm\.pool=train"):
        check_capacity(place(LAPTOP, ROLES), [machine(cpus=1)])


def test_a_strict_pack_does_not_spread_over_nodes() -> None:
    nodes = [machine(gpus=4, name="a"), machine(gpus=4, name="b")]
    loose = place(pools(train=PoolConfig(slots=8, resource="gpu")), ("train",))
    check_capacity(loose, nodes)
    strict = place(pools(train=PoolConfig(slots=8, resource="gpu", strategy="STRICT_PACK")), ("train",))
    with pytest.raises(ValueError, match=r"a has 4 GPUs; b has 4 GPUs, but no arrangement .*strategy=PACK"):
        check_capacity(strict, nodes)


def test_a_strict_spread_wants_a_node_per_slot() -> None:
    config = pools(train=PoolConfig(slots=2, strategy="STRICT_SPREAD"))
    with pytest.raises(ValueError, match="no arrangement of them fits"):
        check_capacity(place(config, ("train",)), [machine(cpus=8)])
    check_capacity(place(config, ("train",)), [machine(name="a"), machine(name="b")])


def test_a_replica_of_two_gpus_needs_both_on_one_node() -> None:
    config = PlacementConfig(
        pools={"rollout": PoolConfig(slots=2, resource="gpu")},
        roles={"policy": RoleConfig(pool="rollout", slots_per_replica=2)},
    )
    with pytest.raises(ValueError, match="no arrangement of them fits"):
        check_capacity(place(config, ("policy",)), [machine(gpus=1, name="a"), machine(gpus=1, name="b")])


def test_the_table_shows_who_is_on_a_slot() -> None:
    assert describe(place(LAPTOP, ROLES)).splitlines() == [
        "slot       resource  processes",
        "train 0    cpu       policy-0 (50%), learner-0 (50%)",
        "judging 0  cpu       grm-0",
    ]


def test_a_row_of_slots_with_the_same_roles_has_one_line_of_the_table() -> None:
    pools = {"hosts": PoolConfig(slots=66), "few": PoolConfig(slots=2, resource="gpu")}
    roles = {"env": RoleConfig(pool="hosts", replicas=64), "policy": RoleConfig(pool="few", slots_per_replica=2)}
    assert describe(place(PlacementConfig(pools=pools, roles=roles), ("env", "policy"))).splitlines() == [
        "slot         resource  processes",
        "hosts 0..63  cpu       env-0..63",
        "hosts 64     cpu       (empty)",
        "hosts 65     cpu       (empty)",
        "few 0        gpu       policy-0",
        "few 1        gpu       policy-0",
    ]


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: PoolConfig(slots=0), "slots"),
        (lambda: PoolConfig(resource="tpu"), "resource"),
        (lambda: PoolConfig(strategy="pack"), "strategy"),
        (lambda: RoleConfig(pool="x", replicas=0), "replicas"),
        (lambda: RoleConfig(pool="x", slots_per_replica=0), "slots_per_replica"),
    ],
)
def test_a_bad_value_names_its_key(make, key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        make()


@given(st.integers(1, 6), st.dictionaries(st.sampled_from("abcd"), st.integers(1, 6), min_size=1))
def test_no_slot_is_promised_more_than_once(slots: int, replicas: dict[str, int]) -> None:
    config = PlacementConfig(
        pools={"all": PoolConfig(slots=slots)},
        roles={role: RoleConfig(pool="all", replicas=min(n, slots)) for role, n in replicas.items()},
    )
    placement = place(config, tuple(replicas))
    shares = [0.0] * slots
    for seat in (seat for seats in placement.seats.values() for seat in seats):
        shares[seat.slots[0]] += seat.share
    assert all(share <= 1 + 1e-9 for share in shares)
    for role, seats in placement.seats.items():
        assert len({seat.slots for seat in seats}) == config.roles[role].replicas


def test_nodes_of_one_machine_s_name_are_several() -> None:
    apart = PoolConfig(slots=2, strategy="STRICT_SPREAD")
    config = PlacementConfig(pools={"tools": apart}, roles={"env": RoleConfig(pool="tools", replicas=2)})
    check_capacity(place(config, ("env",)), [machine(1, name="vm"), machine(3, name="vm")])
    with pytest.raises(ValueError, match="no arrangement of them fits"):
        check_capacity(place(config, ("env",)), [machine(4, name="vm")])


def test_slots_that_follow_each_other_are_on_one_node_however_ray_permutes_them() -> None:
    nodes = "ABBBBBBBBAAAAAAACDDDDDDDDCCCCCCC"  # of 32 bundles of one GPU on four nodes of eight, by Ray 2.60
    served = bundles_by_node([1] * 32, nodes)
    assert sorted(served) == list(range(32))
    assert "".join(nodes[bundle] for bundle in served) == "A" * 8 + "B" * 8 + "C" * 8 + "D" * 8


def test_a_bundle_is_served_by_one_of_its_size() -> None:
    sizes, nodes = [1, 2, 1, 2, 1, 1], "BABBAA"
    served = bundles_by_node(sizes, nodes)
    assert [sizes[bundle] for bundle in served] == sizes and sorted(served) == list(range(6))
    assert [nodes[bundle] for bundle in served if sizes[bundle] == 1] == ["B", "B", "A", "A"]
