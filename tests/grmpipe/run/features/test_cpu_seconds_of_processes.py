"""CPU seconds by process id."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from grmpipe.run.features.cpu_seconds import cpu_seconds, list_family


def test_cpu_time_counts_work_and_no_sleep() -> None:
    before_s, began_s = cpu_seconds([os.getpid()]), time.process_time()
    while time.process_time() - began_s < 0.2:
        pass
    time.sleep(0.2)
    assert cpu_seconds([os.getpid()]) - before_s == pytest.approx(time.process_time() - began_s, abs=0.03)


def test_a_process_that_is_gone_counts_nothing() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert cpu_seconds([gone.pid]) == 0.0
    assert cpu_seconds([]) == 0.0


def test_what_a_process_started_belongs_to_its_family(process_tree: list[int]) -> None:
    root, child, grandchild = process_tree
    assert sorted(list_family([root])) == sorted(process_tree)
    assert sorted(list_family([root, child])) == sorted(process_tree)
    assert list_family([grandchild]) == [grandchild]
    assert os.getpid() not in list_family([root])


@pytest.fixture
def process_tree() -> Iterator[list[int]]:
    """A process, its child, and the child of that."""
    say = "import os, subprocess, sys; print(os.getpid(), flush=True); "
    deepest = say + "sys.stdin.read()"
    middle = say + f"subprocess.run([sys.executable, '-c', {deepest!r}])"
    code = say + f"subprocess.run([sys.executable, '-c', {middle!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as root:
        assert root.stdout is not None
        yield [int(root.stdout.readline()) for _ in range(3)]
        root.communicate()
