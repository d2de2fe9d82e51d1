"""The heap chooses like `min`, whatever changes; and it stays small."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.routing.expected_load import IndexedHeap

NAMES = st.sampled_from("abcdef")
CHANGES = st.one_of(
    st.tuples(st.just("add"), NAMES, st.integers(0, 3)),
    st.tuples(st.just("set"), NAMES, st.integers(0, 3)),
    st.tuples(st.just("discard"), NAMES, st.just(0)),
    st.tuples(st.just("choose"), st.just(""), st.just(0)),
)


@given(st.lists(CHANGES, max_size=60))
def test_it_chooses_as_a_look_at_all_would(changes: list[tuple[str, str, int]]) -> None:
    least, amounts = IndexedHeap(), dict[str, int]()  # a dict keeps the order of arrival
    for what, name, amount in changes:
        if what == "add":
            least.add(name, amount)
            amounts.setdefault(name, amount)
        elif what == "set":
            least.set(name, amount)
            amounts.update({name: amount} if name in amounts else {})
        elif what == "discard":
            least.discard(name)
            amounts.pop(name, None)
        elif amounts:
            assert least.first() == min(amounts, key=amounts.__getitem__)
        assert list(least) == list(amounts)
    assert (least.first() if amounts else None) == min(amounts, key=amounts.__getitem__, default=None)


def test_what_is_out_of_date_is_cleared_away() -> None:
    least = IndexedHeap()
    for name in "abcd":
        least.add(name, 1e9)
    for amount in range(100_000, 0, -1):
        least.set("abcd"[amount % 4], amount)
    assert least.first() == "b"
    assert len(least._entries) <= 2 * 4 + 16
