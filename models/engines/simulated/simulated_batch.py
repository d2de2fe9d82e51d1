"""Continuous batching in closed form: which rows decode, and until when nothing changes. Pure; time is in seconds of
work.

A decoding step of B rows with K cached tokens takes step_s + B * row_s + K * cached_token_s, and gives each row a
token. A step in which rows join also takes request_s for each, and prefill_token_s for each of their uncached prompt
tokens. Rows join and leave between steps. Between two changes the durations are an arithmetic series: no event per
token.
"""

import heapq
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from grmpipe.models.types import EngineSpeed

K = TypeVar("K")
V = TypeVar("V")
PROMPTS_REMEMBERED = 256  # whose keys and values are still in the cache; and as many trajectories
PREFILL_TOKENS_PER_STEP = 8192
WHOLE = 1e-9  # tolerance for rounding, in steps


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedRow:
    """One request. `prompt` identifies its tokens: rows of one prompt share its keys and values.

    trajectory_id: its prompt begins with the last turn of this trajectory; empty: with none.
    """

    prompt: int
    prompt_tokens: int
    num_tokens: int  # that it will sample, at least 1
    priority: int = 0
    trajectory_id: str = ""
    epoch: int = 0  # the weights' when it joined
    cached_tokens: int = 0  # prompt tokens from the cache, when it joined for the first time
    listens: bool = False  # whether it is listed in `SimulatedChange.begun`
    arrival: int = 0
    sampled: int = 0  # before it joined the batch for the last time
    joined_step: int = 0
    finish_step: int = 0
    gone: bool = False
    stays: list[tuple[int, int]] = field(default_factory=list)  # in the batch: from after a step up to a step


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedChange:
    """The events at the end of a step."""

    begun: list[SimulatedRow]  # got their first token
    finished: list[SimulatedRow]


class SimulatedPrefixCache:
    """Prompts, and last turns of trajectories, whose keys and values are cached: those of the present weights."""

    def __init__(self, *, enabled: bool) -> None:
        self.epoch = 0
        self._enabled = enabled
        self._prompts: OrderedDict[int, None] = OrderedDict()
        self._turns: OrderedDict[str, int] = OrderedDict()  # trajectory -> tokens

    def count_uncached(self, row: SimulatedRow) -> int:
        """The tokens of its prompt that must be prefilled."""
        if row.prompt in self._prompts:
            return 0
        return max(0, row.prompt_tokens - self._turns.get(row.trajectory_id, 0))

    def remember_prompt(self, row: SimulatedRow) -> None:
        if self._enabled:
            _remember(self._prompts, row.prompt, None)

    def remember_turn(self, row: SimulatedRow) -> None:
        """A finished turn stays in the cache, if all of it is of the present weights. Its last token was never fed."""
        if self._enabled and row.trajectory_id and row.epoch == self.epoch:
            _remember(self._turns, row.trajectory_id, row.prompt_tokens + row.num_tokens - 1)

    def forget(self) -> None:
        """Forget all: the weights changed."""
        self._prompts.clear()
        self._turns.clear()
        self.epoch += 1


class SimulatedBatch:
    """The rows of one engine, and those that wait for memory: the most urgent first, then in order of arrival.

    If speed.kv_tokens is too small for the next step, the youngest row is preempted and computed again later, as in
    vLLM (preemption by recomputation).
    """

    def __init__(self, speed: EngineSpeed, *, prefix_cache: bool = True) -> None:
        self._speed = speed
        self.num_prefilled_tokens = 0
        self._num_prefilled_again = 0  # those of preempted requests
        self.cache = SimulatedPrefixCache(enabled=prefix_cache)
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, SimulatedRow]] = []
        self._rows: dict[SimulatedRow, None] = {}  # the youngest last
        self._finishing: list[tuple[int, int, SimulatedRow]] = []  # by step; rows that left earlier are skipped
        self._begun: list[SimulatedRow] = []  # joined at the beginning of the stretch
        self._ghosts: list[SimulatedRow] = []  # aborted: they decode to the end of the step
        self._readers: Counter[int] = Counter()  # prompt -> number of its rows
        self._read_tokens = 0  # K
        self._held_tokens = 0  # K, a shared prompt counted once
        # The stretch: a number of steps in which nothing changes.
        self._steps_before = 0
        self._tokens_before = 0  # sampled in these steps
        self._began_s = 0.0
        self._prefill_s = 0.0  # its first step's
        self._num_steps = 0

    @property
    def empty(self) -> bool:
        return not self._rows and not self._waiting

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def next_change_s(self) -> float:
        """The time at which `change` is due; infinity without work."""
        if self._rows:
            return self._began_s + self._lasts_s(self._num_steps)
        return self._began_s if self._waiting else math.inf

    def add(self, row: SimulatedRow, work_s: float) -> None:
        row.arrival = next(self._arrivals)
        heapq.heappush(self._waiting, (row.priority, row.arrival, row))
        done = self.steps_by(work_s) - self._steps_before
        if self._rows and self._has_room(self._waiting[0][2], self._held_tokens + done * len(self._rows)):
            self._end_stretch_after(done + 1)

    def remove(self, row: SimulatedRow, work_s: float) -> int:
        """End a request now; returns its tokens. In the batch it still takes time until the end of the step."""
        row.gone = True
        if row not in self._rows:
            self._waiting = [entry for entry in self._waiting if entry[2] is not row]
            heapq.heapify(self._waiting)
            return row.sampled
        done = self.steps_by(work_s)
        row.stays.append((row.joined_step, done))
        self._ghosts.append(row)
        self._end_stretch_after(done - self._steps_before + 1)
        return row.sampled + done - row.joined_step

    def steps_by(self, work_s: float) -> int:
        """Whole steps since the beginning."""
        return self._steps_before + min(self._num_steps, self._whole_steps(work_s - self._began_s))

    def estimate_saved_s(self, work_s: float, num_rows: int) -> float:
        """The seconds of the work so far that batches of `num_rows` would have saved, without any preemption."""
        steps = self.steps_by(work_s)
        num_tokens = self._tokens_before + (steps - self._steps_before) * len(self._rows)
        again_s = self._num_prefilled_again * self._speed.prefill_token_s
        return (steps - num_tokens / num_rows) * self._speed.step_s + again_s

    def change(self) -> SimulatedChange:
        """End the stretch: rows leave and join, and the next stretch begins."""
        begun, self._begun = self._begun, []
        self._advance()
        finished = list(self._pop_finished())
        for row in finished:
            row.stays.append((row.joined_step, self._steps_before))
            self.cache.remember_turn(row)
        ghosts, self._ghosts = self._ghosts, []
        for row in (*finished, *ghosts):
            if row in self._rows:
                self._leave(row)
        self._make_room()
        more = self._admit()
        self._num_steps = self._steps_to_change(more) if self._rows else 0
        return SimulatedChange(begun=[row for row in begun if not row.gone], finished=finished)

    def can_ever_hold(self, row: SimulatedRow) -> bool:
        return not self._speed.kv_tokens or row.prompt_tokens + row.num_tokens <= self._speed.kv_tokens

    # -- time ----------------------------------------------------------------------------------------------------------

    def _lasts_s(self, steps: int) -> float:
        """The duration of the first steps of the stretch: step i reads K + i * B tokens."""
        rows, speed = len(self._rows), self._speed
        read = steps * self._read_tokens + rows * (steps * (steps - 1) // 2)
        return self._prefill_s + steps * (speed.step_s + rows * speed.row_s) + read * speed.cached_token_s

    def _whole_steps(self, elapsed_s: float) -> int:
        """The inverse of `_lasts_s`, rounded down."""
        rows, speed = len(self._rows), self._speed
        left_s = elapsed_s - self._prefill_s
        first_s = speed.step_s + rows * speed.row_s + self._read_tokens * speed.cached_token_s
        if left_s < 0:
            return 0
        if not first_s:
            return self._num_steps
        growth_s = rows * speed.cached_token_s  # by this each step takes longer than the one before
        linear_s = first_s - growth_s / 2
        # The form of a quadratic's root that is exact for small growth.
        steps = 2 * left_s / (linear_s + math.sqrt(linear_s * linear_s + 2 * growth_s * left_s))
        return math.floor(steps + WHOLE)

    def _advance(self) -> None:
        self._began_s += self._lasts_s(self._num_steps)
        self._prefill_s = 0.0
        self._steps_before += self._num_steps
        self._tokens_before += self._num_steps * len(self._rows)
        self._read_tokens += self._num_steps * len(self._rows)
        self._held_tokens += self._num_steps * len(self._rows)
        self._num_steps = 0

    def _end_stretch_after(self, steps: int) -> None:
        self._num_steps = min(self._num_steps, steps)

    def _steps_to_change(self, more: bool) -> int:
        if more or any(row.listens for row in self._begun):
            return 1
        while self._is_stale(self._finishing[0]):
            heapq.heappop(self._finishing)
        steps = self._finishing[0][0] - self._steps_before
        if self._speed.kv_tokens:
            steps = min(steps, max(1, (self._speed.kv_tokens - self._held_tokens) // len(self._rows)))
        return steps

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _pop_finished(self) -> Iterator[SimulatedRow]:
        while self._finishing and self._finishing[0][0] <= self._steps_before:
            entry = heapq.heappop(self._finishing)
            if not self._is_stale(entry) and not entry[2].gone:
                yield entry[2]

    def _is_stale(self, entry: tuple[int, int, SimulatedRow]) -> bool:
        step, _, row = entry
        return row not in self._rows or row.finish_step != step

    def _leave(self, row: SimulatedRow) -> None:
        sampled = row.sampled + self._steps_before - row.joined_step
        del self._rows[row]
        self._readers[row.prompt] -= 1
        self._read_tokens -= row.prompt_tokens + sampled
        self._held_tokens -= sampled
        if not self._readers[row.prompt]:
            del self._readers[row.prompt]
            self._held_tokens -= row.prompt_tokens
        row.sampled = sampled

    def _make_room(self) -> None:
        """Preempt rows until each row has room for one more token."""
        room = self._speed.kv_tokens or math.inf
        while len(self._rows) > 1 and self._held_tokens + len(self._rows) > room:
            row = next(reversed(self._rows))
            row.stays.append((row.joined_step, self._steps_before))
            self._leave(row)
            heapq.heappush(self._waiting, (row.priority, row.arrival, row))

    def _has_room(self, row: SimulatedRow, held_tokens: int) -> bool:
        if len(self._rows) >= self._speed.max_rows:
            return False
        if not self._speed.kv_tokens or not self._rows:
            return True
        needed = row.sampled + (0 if row.prompt in self._readers else row.prompt_tokens)
        return held_tokens + needed + len(self._rows) + 1 <= self._speed.kv_tokens

    def _admit(self) -> bool:
        """Admit waiting rows while there is room. Returns True if the rest waits only for its prefill."""
        prefilled = joined = 0
        while self._waiting and self._has_room(row := self._waiting[0][2], self._held_tokens):
            uncached = self.cache.count_uncached(row)
            tokens = row.sampled + uncached
            if prefilled and prefilled + tokens > PREFILL_TOKENS_PER_STEP:
                break
            heapq.heappop(self._waiting)
            prefilled += tokens
            joined += 1
            self._num_prefilled_again += tokens if row.stays else 0
            row.cached_tokens = row.cached_tokens if row.stays else row.prompt_tokens - uncached
            self._join(row)
        else:
            tokens = 0
        self.num_prefilled_tokens += prefilled
        self._prefill_s = prefilled * self._speed.prefill_token_s + joined * self._speed.request_s
        return tokens > 0

    def _join(self, row: SimulatedRow) -> None:
        self._rows[row] = None
        row.epoch = self.cache.epoch
        row.joined_step = self._steps_before
        row.finish_step = row.joined_step + row.num_tokens - row.sampled
        heapq.heappush(self._finishing, (row.finish_step, row.arrival, row))
        if not row.stays:
            self._begun.append(row)
        self._read_tokens += row.prompt_tokens + row.sampled
        self._held_tokens += row.sampled + (0 if self._readers[row.prompt] else row.prompt_tokens)
        self._readers[row.prompt] += 1
        self.cache.remember_prompt(row)


def _remember(held: OrderedDict[K, V], key: K, value: V) -> None:
    held[key] = value
    held.move_to_end(key)
    if len(held) > PROMPTS_REMEMBERED:
        held.popitem(last=False)
