"""Groups of a batch in parts: all of them, by seed, independent of the order of arrival."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from grmpipe.train.batching.samples import shuffle_into_updates

IDS = [f"g{number:03}" for number in range(64)]


@given(ids=st.permutations(IDS[:9]), parts=st.integers(1, 12), seed=st.integers(0, 5))
def test_parts_hold_every_group_once_and_know_no_order_of_arrival(ids: list[str], parts: int, seed: int) -> None:
    found = shuffle_into_updates(ids, parts, seed, 3)
    assert sorted(one for part in found for one in part) == IDS[:9]
    assert len(found) == parts and max(map(len, found)) - min(map(len, found)) <= 1
    assert found == shuffle_into_updates(IDS[:9], parts, seed, 3)


def test_the_longest_groups_are_not_always_in_the_last_update() -> None:
    """Groups arrive by length; each update gets its share of the longest eight over the batches of a run."""
    longest = set(IDS[-8:])
    share = Counter[int]()
    for version in range(100):
        for update, part in enumerate(shuffle_into_updates(IDS, 4, 0, version)):
            share[update] += len(part & longest)
    assert all(120 < share[update] < 280 for update in range(4))  # 200 each
