"""Signals to a run, as the benchmark sends them: to its group, and to all its processes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from stopping import Case, find_fault, try_case


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("way", ["group", "all"])
def test_a_run_on_ray_ends_in_order_whoever_of_its_processes_gets_the_signal(way: str, times: int) -> None:
    case = Case(stage="training", number=signal.SIGTERM, way=way, cluster="ray", times=times)
    end = try_case(case)
    assert find_fault(case, end) == "", end


def test_a_signal_before_a_run_has_its_directory_leaves_nothing() -> None:
    case = Case(stage="composing", number=signal.SIGTERM, way="group", cluster="inprocess", times=1)
    end = try_case(case)
    assert find_fault(case, end) == "" and not end.status, end
