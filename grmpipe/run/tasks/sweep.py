"""How the runs of a sweep ended, and the table at its end."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

ERROR_CHARS = 120  # shown of an error in the table; all of it stands under the run's own line


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """A run of a sweep that ended. overrides: as typed. objective: None if it has none. error: empty if it is done."""

    number: int
    overrides: Sequence[str]
    objective: float | None = None
    exit_code: int = 0
    error: str = ""

    @property
    def result(self) -> str:
        if self.exit_code:
            return f"exit {self.exit_code}"
        return "none" if self.objective is None else f"{self.objective:g}"


def find_exit_code(runs: Sequence[SweepRun]) -> int:
    """The exit code of the run that ended worst: the highest."""
    return max((run.exit_code for run in runs), default=0)


def sweep_table(runs: Sequence[SweepRun]) -> str:
    """A line per run: its number, objective or exit code, the overrides that tell the runs apart, its error."""
    failed = sum(run.exit_code != 0 for run in runs)
    rows = [("run", "objective", "overrides", "")]
    rows += [(str(run.number), run.result, distinct_overrides(run, runs), shorten(run.error)) for run in runs]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([row[0].rjust(widths[0]), row[1].ljust(widths[1]), row[2].ljust(widths[2]), row[3]]) for row in rows
    ]
    return "\n".join([f"sweep: {len(runs)} runs, {failed} failed", *(f"  {line.rstrip()}" for line in lines)])


def distinct_overrides(run: SweepRun, runs: Sequence[SweepRun]) -> str:
    """The overrides that not all runs have; of an only run all."""
    return " ".join(one for one in run.overrides if len(runs) == 1 or any(one not in each.overrides for each in runs))


def shorten(error: str) -> str:
    return textwrap.shorten(error.partition("\n")[0], ERROR_CHARS, placeholder=" ..")
