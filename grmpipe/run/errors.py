"""The errors that end a run, in words for its user. launch.py sets the exit codes."""


class RunFailed(Exception):
    """The first cause in plain words, and which file has more. Exit code 1."""


class RunInterrupted(Exception):
    """Stopped on request, with a checkpoint. Exit code 130."""
