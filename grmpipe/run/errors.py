"""How a run ends badly, in words for its user. The exit codes are launch.py's."""

from __future__ import annotations


class RunFailed(Exception):
    """The first cause, in plain words, and where to look. Exit code 1."""


class RunInterrupted(Exception):
    """Stopped on request, with a checkpoint. Exit code 130."""
