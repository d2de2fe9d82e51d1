"""The memory of this machine, with the limits of control groups in files of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grmpipe.scheduler.host_memory import read_memory_bytes

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/job/run\n", {"sys/fs/cgroup/job/memory.max": "2000000\n"}, 2_000_000),
        ("0::/job/run\n", {"sys/fs/cgroup/job/run/memory.max": "max\n"}, PHYSICAL),
        ("0::/\n", {"sys/fs/cgroup/unified/memory.max": "3000000\n"}, 3_000_000),
        ("5:cpu,memory:/of/the/host\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "4000000"}, 4_000_000),
        ("4:memory:/\n3:cpuset:/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, PHYSICAL),
    ],
)
def test_the_smallest_limit_of_the_groups_counts(
    groups: str, limits: dict[str, str], expected: int, tmp_path: Path
) -> None:
    for name, text in {"proc/self/cgroup": groups, **limits}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_memory_bytes(tmp_path) == expected


def test_without_control_groups_a_machine_has_its_own_memory(tmp_path: Path) -> None:
    assert read_memory_bytes(tmp_path) == PHYSICAL
