"""The memory of this machine that its processes may use together: what it has, or what a control group leaves of it."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# Controllers of a line in /proc/self/cgroup -> folder of the mounted groups, and its file. The second version has none.
GROUP_FILES = {
    "": (("sys/fs/cgroup", "sys/fs/cgroup/unified"), "memory.max"),
    "memory": (("sys/fs/cgroup/memory",), "memory.limit_in_bytes"),
}


def read_memory_bytes(root: Path = Path("/")) -> int:
    """The smaller of the machine's memory and the limits of this process's control groups. root: the files'."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_group_limits(root)])


def _group_limits(root: Path) -> Iterator[int]:
    """The limits of the groups of this process, and of those above them. A container may see its own group as the
    root, under a path of the host, so what isn't there is skipped.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        kind = "memory" if "memory" in controllers.split(",") else controllers
        mounts, file = GROUP_FILES.get(kind, ((), ""))
        for folder in (PurePosixPath(group), *PurePosixPath(group).parents):
            for mount in mounts:
                try:
                    limit = (root / mount / str(folder).lstrip("/") / file).read_text(encoding="utf-8").strip()
                except OSError:
                    continue
                if limit.isdecimal():  # else "max"
                    yield int(limit)
