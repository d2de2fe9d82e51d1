"""Bounds and choices of a section's keys."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from grmpipe.models.bounds import Bounded, above, at_least, not_empty, one_of


@dataclass(frozen=True)
class Section(Bounded):
    rate: float = above(0)
    count: int | None = at_least(2, None, "at least 2 (they are compared)")
    kind: str | None = one_of(("a", "b"), None, "kind", also="null (none)")
    path: str = not_empty("here", "give a file")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": 0.0}, "rate: must be above 0, got 0.0"),
        ({"rate": float("nan")}, "rate: must be above 0, got nan"),
        ({"rate": 1.0, "count": 1}, "count: must be at least 2 (they are compared), got 1"),
        ({"rate": 1.0, "kind": "c"}, "kind: unknown kind 'c'; known: a, b, null (none)"),
        ({"rate": 1.0, "path": ""}, "path: is empty; give a file"),
    ],
)
def test_a_value_out_of_bounds_is_named_with_its_key(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        Section(**values)  # type: ignore[arg-type]
    assert str(refused.value) == message


def test_a_key_that_is_not_set_is_within_all_bounds_and_one_without_a_default_is_required() -> None:
    assert Section(rate=0.5).count is None
    with pytest.raises(TypeError, match="rate"):
        Section()
