"""Settings of isolation: what is refused, and with which words."""

from __future__ import annotations

import math

import pytest

from grmpipe.config.isolation import IsolationConfig


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "jail"}, "kind: unknown isolation 'jail'; known: inprocess, process, container"),
        ({"kind": "container"}, "image: is empty"),
        ({"image": "shop:1"}, "image: is for kind=container"),
        ({"runtime": "rocket"}, "runtime: unknown runtime"),
        ({"memory_mb": 0}, "memory_mb: must be above 0 and finite"),
        ({"cpu_s": math.inf}, "cpu_s: must be above 0 and finite"),
    ],
)
def test_senseless_limit_is_refused_by_its_key(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        IsolationConfig(**values)  # type: ignore[arg-type]
    assert str(refused.value).startswith(words)


def test_the_default_isolates_nothing_and_all_limits_are_finite() -> None:
    config = IsolationConfig()
    assert config.kind == "inprocess"
    assert all(math.isfinite(each) for each in (config.memory_mb, config.cpu_s, config.max_processes, config.file_mb))
