"""Begins a run again at its newest checkpoint, within the same process, after a process that trains has died."""

import logging
from collections.abc import Iterator
from pathlib import Path

from grmpipe.run_dir.checkpoints import Checkpoints
from grmpipe.scheduler.processes.actors import ActorDied
from grmpipe.scheduler.slots.replacement_tries import ReplacementTries

log = logging.getLogger(__name__)
RUN = "run"  # what is tried again, as a whole


class Restart(Exception):
    """The run begins again. checkpoint: where it continues; None: at its beginning. cause: in one line."""

    def __init__(self, checkpoint: Path | None, cause: str) -> None:
        super().__init__(cause)
        self.checkpoint = checkpoint
        self.cause = cause


class Restarts:
    """Decides whether a failed run begins again: at most `most` times within an hour, and not where the same process
    has died at the same step before.
    """

    def __init__(self, checkpoints: Checkpoints, most: int) -> None:
        self._checkpoints = checkpoints
        self._tries = ReplacementTries(most)
        self._deaths: set[tuple[int, str]] = set()  # (step, process)
        self.were_made = False

    def plan(self, error: Exception, step: int | None) -> Restart | None:
        """The restart after this error; None if the run ends with it.

        step: at which the run was; None where it can't begin again.
        """
        died = next((one for one in walk_causes(error) if isinstance(one, ActorDied)), None)
        if died is None or step is None:
            return None
        if (death := (step, died.name)) in self._deaths:
            log.warning("no restart: %s died twice at step %d", died.name, step)
            return None
        self._deaths.add(death)
        found = self._checkpoints.find()
        if found.checkpoint is None and found.damaged:
            log.warning("no restart: no checkpoint is complete (%s)", "; ".join(found.damaged))
            return None
        if not self._tries.may_try(RUN):
            log.warning("no restart: slots.health.max_replacements are used up")
            return None
        self.were_made = True
        cause = str(died).splitlines()[0].partition(" Last lines:")[0]  # run.log has those of its process
        return Restart(found.checkpoint, f"step {step}: {cause}")


def walk_causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what caused it, and what a group of errors holds."""
    yield error
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from walk_causes(one)
    if error.__cause__ is not None:
        yield from walk_causes(error.__cause__)
