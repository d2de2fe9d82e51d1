"""A run's directory, claimed by this process: found or made, locked, with the first files in it. Trains nothing."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from grmpipe.config import ConfigError, RunConfig
from grmpipe.config_files import to_yaml
from grmpipe.run_dir import Place, find_place, holds_run, new_run_dirs, point_latest, refusal
from grmpipe.run_identity import RunIdentity, check_inputs, read_identity
from grmpipe.run_lock import locked

OWNER_ONLY = 0o700  # of a run's directory: it holds what was asked and answered


class Claim:
    """Use as a context: what is claimed is this process's alone until the end of the block.

    A run that is gone on with is locked at once, a new one by `open`, once it is known that it may start.
    """

    def __init__(self, config: RunConfig) -> None:
        """Raises ConfigError where the directory can't be had."""
        self._config = config
        self._held = ExitStack()
        self.place = find_place(config)
        if self.place.resumed and not self.place.complete:
            self._held.enter_context(locked(self.place.run_dir))
            try:
                self._check()
            except BaseException:
                self._held.close()
                raise

    def _check(self) -> None:
        """The run that is gone on with, as it is now that nobody else writes there."""
        self.place = find_place(self._config)
        if (identity := read_identity(self.place.run_dir)) is not None:
            check_inputs(identity, self._config, self.place.run_dir)

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.close()

    def open(self) -> Path:
        """The first things on disk. Returns the run's directory."""
        try:
            if not self.place.resumed:
                self._make()
            if read_identity(self.place.run_dir) is None:
                RunIdentity.new(self._config).write(self.place.run_dir)
            point_latest(self.place.run_dir, self._config)
        except OSError as error:
            raise ConfigError(f"run_dir: {self.place.run_dir} can't be written to ({error}); type another") from error
        return self.place.run_dir

    def _make(self) -> None:
        """A directory that no other run has: one without a name of the user's is made under the next free name."""
        run_dir = self.place.run_dir
        if self._config.run_dir is None:
            run_dir = make_first(run_dir)
        else:
            run_dir.mkdir(OWNER_ONLY, parents=True, exist_ok=True)
        self.place = Place(run_dir=run_dir)
        self._held.enter_context(locked(run_dir))
        if holds_run(run_dir):  # it was begun since `find_place` looked
            raise refusal(run_dir)
        (run_dir / "config.yaml").write_text(to_yaml(self._config), encoding="utf-8")


def make_first(wanted: Path) -> Path:
    """The directory of that name, or of the next one that is free."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for path in new_run_dirs(wanted):
        try:
            path.mkdir(OWNER_ONLY)
        except FileExistsError:
            continue
        return path
    raise OSError(f"{wanted} and all names after it are taken")
