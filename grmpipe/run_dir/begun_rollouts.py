"""in_flight/: the turns of rollouts that go on. A killed run loses none from which an environment can continue.

A file for each rollout, with a line after each turn from which it can go on; the rollout's end removes it.
"""

import base64
import itertools
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from grmpipe.envs.play import Play, RolloutRequest
from grmpipe.models.seeds import first_name
from grmpipe.observe.guard import Guard
from grmpipe.observe.journal import Journal, read_records
from grmpipe.observe.records import Record, decode_sampled, encode_rollout, pack_numbers
from grmpipe.pipeline.interfaces import PipelineState, RecoveredGroup
from grmpipe.types import BegunRollout, Prompt, Rollout

log = logging.getLogger(__name__)

IN_FLIGHT = "in_flight"


class BegunRollouts:
    """Writes the turns of a run's rollouts, and holds those from before a resume. I/O errors never surface: `failures`
    counts the lines that are missing.
    """

    def __init__(self, run_dir: Path, run_id: str = "", *, compact: bool = False, guard: Guard | None = None) -> None:
        """compact: pack the numbers. guard: shared by all journals of the run."""
        self._folder = run_dir / IN_FLIGHT
        self._run_id = run_id
        self._compact = compact
        self._kept: dict[str, BegunRollout] = {}
        self._guard = guard or Guard()
        self.failures = self._guard.failures

    def restore(self, state: PipelineState, groups: Mapping[int, RecoveredGroup]) -> dict[int, RecoveredGroup]:
        """Read the rollouts that go on after a checkpoint: turns of versions up to its own. Removes all other files.
        Returns the groups, with those that such rollouts belong to.

        groups: prompt index -> finished work that the resume keeps.
        """
        self._kept.clear()
        restored = dict(groups)
        for path in sorted(self._folder.glob("*.jsonl")):
            name = path.stem.rpartition("-")[0]
            index = find_prompt_index(name)
            group = restored.get(index) or RecoveredGroup(group_id=state.in_flight.get(index, name))
            is_open = index in state.in_flight or index >= state.next_prompt_index
            begun = self._read(path, state.version) if is_open and not group.killed_engines else None
            if begun is None or begun.so_far.sibling in {rollout.sibling for rollout in group.rollouts}:
                with self._guard.watch(IN_FLIGHT):
                    path.unlink()
                continue
            self._kept[path.stem] = begun
            oldest = begun.so_far.oldest_version
            oldest = oldest if group.begun_version is None else min(oldest, group.begun_version)
            restored[index] = replace(group, begun_version=oldest)
        return restored

    def __len__(self) -> int:
        """How many of these have not been asked for."""
        return len(self._kept)

    def resume(self, play: Play) -> Play:
        """A play whose episodes go on where those before a resume were, and are written after each turn."""

        async def played(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
            stem = f"{first_name(request.group_id)}-{request.sibling}"
            path, begun = self._folder / f"{stem}.jsonl", self._kept.pop(stem, None)
            on_file = begun.so_far.turns if begun is not None else ()

            def note(begun: BegunRollout) -> None:
                nonlocal on_file
                turns = begun.so_far.turns
                # An episode that is played again begins with other turns: its lines replace those of the file.
                self._note(path, begun, len(on_file) if turns[: len(on_file)] == on_file else 0)
                on_file = turns

            rollout = await play(replace(request, begun=begun, on_resumable=note), prompt, on_first_token)
            if on_file:
                with self._guard.watch(IN_FLIGHT):
                    path.unlink(missing_ok=True)
            return rollout

        return played

    def end(self) -> None:
        """The run is complete: what is left belongs to groups that were dropped."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _note(self, path: Path, begun: BegunRollout, first: int) -> None:
        """Add the turns from `first` on to the file of their rollout."""
        with self._guard.watch(IN_FLIGHT):
            so_far = begun.so_far
            record: Record = {"first": first, "saved": base64.b64encode(begun.saved).decode()}
            record |= encode_rollout(replace(so_far, turns=so_far.turns[first:]))
            self._folder.mkdir(exist_ok=True)  # not its parents: a run whose directory was deleted writes nothing
            journal = Journal(path, run_id=self._run_id)
            try:
                journal.append(pack_numbers(record) if self._compact else record)
            finally:
                journal.close()

    def _read(self, path: Path, version: int) -> BegunRollout | None:
        """The last place in a file, before the first turn that a later version sampled, from which a rollout can go on;
        None if there is none.
        """
        lines: list[tuple[int, Rollout, bytes]] = []
        try:
            for first, so_far, saved in read_records(path, decode_line, run_id=self._run_id):
                lines = [line for line in lines if line[0] < first]  # the others were played again
                lines.append((first, so_far, saved))
        except (OSError, ValueError) as error:
            log.warning("a rollout is played from its start: %s", error)
            return None
        # Up to the first turn of a later version: what comes after it answers a turn that is void.
        kept = list(itertools.takewhile(lambda line: newest_version(line[1]) <= version, lines))
        if not kept:
            return None
        _, last, saved = kept[-1]
        return BegunRollout(so_far=replace(last, turns=sum((line[1].turns for line in kept), ())), saved=saved)


def decode_line(record: Record) -> tuple[int, Rollout, bytes]:
    return msgspec.convert(record["first"], int), decode_sampled(record), base64.b64decode(record["saved"])


def newest_version(rollout: Rollout) -> int:
    return max(span.version for turn in rollout.turns for span in turn.completion.versions)


def find_prompt_index(group_id: str) -> int:
    """The index of the prompt by which a group was named; -1 for a name that has none."""
    digits = re.search(r"\d+$", first_name(group_id))
    return int(digits.group()) if digits else -1
