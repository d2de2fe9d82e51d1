"""The places of a batch's rows in KV slots: running rows first and compact, parked ones behind them.

slots:  [ running rows ][ free and parked rows ]     decoding reads the running rows only
"""

import itertools
from collections.abc import Collection, Sequence

from grmpipe.models.engines.embedded.kv_slots import KvSlots
from grmpipe.models.engines.embedded.parked_rows import CachedPrefix, ParkedRow, ParkedRows
from grmpipe.models.engines.embedded.prompt_packing import whole_blocks

Move = tuple[int, int, int]  # from a place, to a place, tokens


class SlotPlaces:
    """Moves cached tokens between slots. row_block: decoding overwrites as many rows as run, rounded up to it."""

    def __init__(self, slots: KvSlots, row_block: int) -> None:
        self.parked = ParkedRows()
        self._slots, self._row_block = slots, row_block

    def open(self, num_running: int, num_tokens: int, continued: Collection[tuple[CachedPrefix, int]]) -> None:
        """Make room for this many running rows of this many tokens. Parked prefixes are copied to the rows that
        continue them (prefix, place), and parked rows leave the running ones' places.
        """
        self._slots.reserve(num_running, max(num_tokens, self._slots.tokens_per_row))
        if continued or self.parked:
            self.move([(prefix.row.index, place, prefix.num_tokens) for prefix, place in continued], num_running)

    def move(self, running: Sequence[Move], num_running: int) -> None:
        """Move running rows, such as into the places of those that left, and parked rows out of their places."""
        parked = self._new_places(num_running)
        moves = [*running, *((row.index, place, len(row.token_ids)) for row, place in parked.items())]
        if moves := [(source, target, length) for source, target, length in moves if source != target]:
            sources, targets, lengths = zip(*moves, strict=True)
            self._slots.copy(sources, targets, max(lengths))
        for row, place in parked.items():
            row.index = place

    def _new_places(self, num_running: int) -> dict[ParkedRow, int]:
        """Free slots for the parked rows that decoding this many rows would overwrite. Drops rows without a slot, the
        oldest first.
        """
        if not self.parked:
            return {}
        first = whole_blocks(num_running, self._row_block)
        while self.parked and first + len(self.parked) > self._slots.max_rows:
            self.parked.drop_oldest()
        kept = {row.index for row in self.parked if row.index >= first}
        free = (index for index in itertools.count(first) if index not in kept)
        places = {row: next(free) for row in self.parked if row.index < first}
        self._slots.reserve(max([num_running, *(place + 1 for place in places.values())]), self._slots.tokens_per_row)
        return places
