"""A dead engine is replaced, and what replaces it never serves on old weights."""

from __future__ import annotations

import pytest

from scheduler.health import HealthConfig


@pytest.mark.parametrize(("key", "value"), [("max_replacements", -1), ("check_every_s", 0), ("start_deadline_s", 0)])
def test_a_bad_value_names_its_key(key: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        HealthConfig(**{key: value})
