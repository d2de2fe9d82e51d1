"""The running batch: rows join, make steps together and leave. One thread owns it.

A row samples once it has keys and values for all its tokens except the last, which the next step feeds. So joining,
copying from a sibling, continuing a parked row and prefilling again after a push are the same, and sampling happens in
one place.

A step takes one piece of the tokens to prefill, no more than the machine does in a second or two: between steps the
engine answers. A prompt that is longer takes several; its row runs meanwhile, and what is sampled of it is ignored.
"""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from grmpipe.models.engines.embedded.decoder import Decoder
from grmpipe.models.engines.embedded.grammar import Grammar, Matcher
from grmpipe.models.engines.embedded.kv_slots import CachedPrefix, KvSlots, ParkedRow, SlotPlaces
from grmpipe.models.engines.embedded.ngrams import MAX_FED_TOKENS, NgramTable, RowDraft
from grmpipe.models.engines.embedded.prompt_packing import PrefillPace, bin_by_length, whole_blocks
from grmpipe.models.engines.embedded.sampling import draw, uniforms
from grmpipe.models.engines.stop_conditions import StopConditions
from grmpipe.models.lm.score import ScoredPass, ScoredText
from grmpipe.models.types import Completion, FinishReason, SamplingParams, TokenScores, TopLogprobs, join_spans

# Sequences, how many tokens the next forward pass may take, and the model's name -> what each pass gave: see
# `score_in_passes`.
ScorePasses = Callable[[Sequence[ScoredText], Callable[[], int], str], Iterator[ScoredPass]]


def refuse_to_score(sequences: Sequence[ScoredText], pass_tokens: Callable[[], int], name: str) -> Iterator[ScoredPass]:
    """The default for `score`, of a batch that only samples."""
    raise AssertionError("this batch only samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelyTokens:
    """The likeliest tokens in one place: ids, and their log-probs."""

    ids_K: np.ndarray
    logprobs_K: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """A token that a row may take. top: None if the row doesn't ask for likely tokens."""

    token_id: int
    logprob: float
    top: LikelyTokens | None = None


@dataclass(slots=True, eq=False)
class SiblingPrompt:
    """Requests with one prompt, to one model: the base, or an adapter by name. Running members can give new ones the
    prompt's keys and values.
    """

    prompt_ids: tuple[int, ...]
    model: str = ""
    num_members: int = 0
    running: list[Row] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Row:
    """A request and its sampled tokens. `index` is its place in the batch while it runs.

    trajectory_id: if it may be parked. num_cached: tokens of its prompt that it has from a parked row or a sibling.
    unfed: tokens before its last one that aren't prefilled so far; until there are none, it samples nothing.
    """

    siblings: SiblingPrompt
    params: SamplingParams
    priority: int
    arrival: int
    trajectory_id: str = ""
    group_id: str = ""
    num_cached: int = 0
    unfed: int = 0
    index: int = -1
    prompt_epoch: int = -1  # epoch of the weights that computed the prompt's keys and values
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_starts: list[tuple[int, int]] = field(default_factory=list)  # (version, first token)
    finish_reason: FinishReason | None = None
    matcher: Matcher | None = None  # for the pattern that constrains it
    draft: RowDraft | None = None
    experts_TLK: np.ndarray | None = None  # for all fed tokens, once it has left; None if not recorded
    scores: TokenScores | None = None  # its prompt's
    top: list[LikelyTokens] = field(default_factory=list)  # of each token, if they are asked for

    @property
    def model(self) -> str:
        return self.siblings.model

    @property
    def last_position(self) -> int:
        """The position of the last token."""
        return len(self.siblings.prompt_ids) + len(self.token_ids) - 1

    @property
    def position(self) -> int:
        """The position of the pending token, the first that isn't fed: the last one, unless some before it are left."""
        return len(self.siblings.prompt_ids) + len(self.token_ids) - 1 - self.unfed

    @property
    def cached_ids(self) -> Sequence[int]:
        return [*self.siblings.prompt_ids, *self.token_ids][: self.position]

    @property
    def pending_id(self) -> int:
        if self.unfed:
            return [*self.siblings.prompt_ids, *self.token_ids][self.position]
        return self.token_ids[-1] if self.token_ids else self.siblings.prompt_ids[-1]

    def take_unfed(self, most: int) -> Part:
        """The next tokens to prefill, at most this many. They count as fed from now on."""
        start = self.position
        self.unfed -= min(self.unfed, most)
        return Part(row=self, start=start, token_ids=self.cached_ids[start:])

    def park(self) -> ParkedRow:
        """What stays of it in its slot."""
        return ParkedRow(
            model=self.model,
            trajectory_id=self.trajectory_id,
            group_id=self.group_id,
            token_ids=tuple(self.cached_ids),
            index=self.index,
        )

    def __lt__(self, other: Row) -> bool:
        return (self.priority, self.arrival) < (other.priority, other.arrival)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens of a row that a step prefills. start: the position of the first one."""

    row: Row
    start: int
    token_ids: Sequence[int]


@dataclass(slots=True, kw_only=True)
class Columns:
    """The running rows as tensors, rebuilt when the rows change.

    num_attended: positions up to the furthest pending token.
    limits_B3: see keep_likely; None if no row has any.
    """

    num_attended: int
    pending_B: Tensor
    positions_B: Tensor
    seeds_B: Tensor
    temperature_B: Tensor
    limits_B3: Tensor | None

    @staticmethod
    def of(rows: Sequence[Row], device: torch.device) -> Columns:
        limits = [(row.params.top_p, row.params.top_k, row.params.min_p) for row in rows]
        are_limited = any(row.params.is_truncated for row in rows)
        positions = [row.position for row in rows]
        return Columns(
            num_attended=1 + max(positions),
            pending_B=torch.tensor([row.pending_id for row in rows], device=device),
            positions_B=torch.tensor(positions, device=device),
            seeds_B=torch.tensor([row.params.seed for row in rows], device=device),
            temperature_B=torch.tensor([row.params.temperature for row in rows], device=device),
            limits_B3=torch.tensor(limits, dtype=torch.float64, device=device) if are_limited else None,
        )

    def append_drafts(self, drafts: Sequence[Sequence[int]], width: int) -> Columns:
        """Rows of `width` tokens, flattened: the pending token, its draft, and the last of them again as padding."""
        device = self.pending_B.device
        ends_B1 = torch.tensor([[len(draft)] for draft in drafts], device=device)
        index_BQ = torch.arange(width, device=device).minimum(ends_B1)
        drafted = torch.tensor([[*draft, *[0] * (width - 1 - len(draft))] for draft in drafts], device=device)
        fed_BQ = torch.cat([self.pending_B[:, None], drafted], 1).gather(1, index_BQ)
        return Columns(
            num_attended=self.num_attended + width - 1,
            pending_B=fed_BQ.flatten(),
            positions_B=(self.positions_B[:, None] + index_BQ).flatten(),
            seeds_B=self.seeds_B.repeat_interleave(width),
            temperature_B=self.temperature_B.repeat_interleave(width),
            limits_B3=None if self.limits_B3 is None else self.limits_B3.repeat_interleave(width, 0),
        )

    def advance(self, token_ids_B: Tensor) -> Columns:
        """After one more token of each row."""
        return replace(
            self, num_attended=self.num_attended + 1, pending_B=token_ids_B, positions_B=self.positions_B + 1
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The results of a step. A row may be in both."""

    begun: tuple[Row, ...]  # sampled their first token in it
    finished: tuple[Row, ...]


class RunningBatch:
    """Rows by (priority, arrival): at most `max_rows` at once. A step prefills the tokens of one piece."""

    def __init__(
        self,
        decoder: Decoder,
        slots: KvSlots,
        endings: StopConditions,
        seed: int,
        max_rows: int,
        pace: PrefillPace,
        score_pace: PrefillPace,
        grammar: Grammar | None = None,
        ngrams: NgramTable | None = None,
        score: ScorePasses = refuse_to_score,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """pace, score_pace: the tokens of a pass that prefills, or scores. ngrams: for drafts, which make no difference
        to the tokens; None: there are none. clock: in seconds, for durations.
        """
        self.paused: set[str] = set()  # models that sample, prefill and score nothing
        self.versions: Counter[str] = Counter()  # model -> version of its weights
        self.num_sampled_tokens = 0
        self.num_prefilled_tokens = 0
        self.num_cached_tokens = 0  # tokens of prompts that weren't prefilled, because a slot had them
        self._decoder, self._slots, self._endings = decoder, slots, endings
        self._seed = seed
        self._grammar, self._ngrams = grammar, ngrams
        self._max_rows, self._clock = max_rows, clock
        self._pace, self._score_pace = pace, score_pace
        self._arrivals = itertools.count()
        self._siblings_by_prompt: dict[tuple[str, tuple[int, ...]], SiblingPrompt] = {}
        self._waiting: list[Row] = []  # sorted
        self._to_score: list[Row] = []  # sorted, those that are being scored included
        self._score_passes = score
        self._scoring: tuple[list[Row], Iterator[ScoredPass]] | None = None
        self._running: list[Row] = []
        self._incomplete: list[Row] = []  # running rows with unfed tokens, and some that had any
        self._places = SlotPlaces(slots, decoder.row_block)
        self.parked = self._places.parked
        self._columns: Columns | None = None
        self._weights_epochs: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        """Whether a row may go on: its model isn't paused."""
        return any(
            row.model not in self.paused for rows in (self._running, self._waiting, self._to_score) for row in rows
        )

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._to_score)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        priority: int,
        trajectory_id: str = "",
        group_id: str = "",
        model: str = "",
    ) -> Row:
        """trajectory_id: of what further turns may follow; empty: the row isn't parked. model: see SiblingPrompt."""
        siblings = self._siblings_by_prompt.setdefault((model, prompt_ids), SiblingPrompt(prompt_ids, model))
        siblings.num_members += 1
        row = Row(siblings, params, priority, next(self._arrivals), trajectory_id, group_id)
        if params.pattern is not None:
            assert self._grammar is not None
            row.matcher = self._grammar.start(params.pattern)
        insort(self._waiting if params.scoring is None else self._to_score, row)
        return row

    def abort(self, row: Row) -> None:
        """End a row now, with its tokens so far."""
        if row.index >= 0:
            self._drop_running([row])
        else:
            (self._waiting if row.params.scoring is None else self._to_score).remove(row)
        self._finish(row, "abort")

    def step(self) -> Changes:
        """Score, prefill, let rows join, sample a token for every row that has its prompt, remove finished rows."""
        scored = self._score()
        if self._incomplete:
            self._incomplete = [row for row in self._running if row.unfed]
        if again := [row for row in self._incomplete if row.token_ids and row.model not in self.paused]:
            with self._slots.experts_kept():
                self._prefill(self._take_parts(again))
        elif self._waiting or self._incomplete:
            self._join()
        if again or all(row.unfed or row.model in self.paused for row in self._running):
            return Changes(begun=(), finished=tuple(scored))
        rows = self._put_paused_last()
        drafts = self._draft(rows)
        begun, finished = [], []
        for row, draft, sampled in zip(rows, drafts, self._sample(rows, drafts), strict=True):
            if row.model in self.paused:  # it fills up a block: its pending token was fed in vain, and will be again
                self._columns = None
                continue
            if row.unfed:  # its next token was fed like any pending one
                row.unfed -= 1
                self.num_prefilled_tokens += 1
                self._columns = None
                continue
            if not row.token_ids:
                begun.append(row)
            self._extend(row, draft, sampled)
            if row.finish_reason is not None:
                finished.append(row)
        if finished:
            self._drop_running(finished)
            for row in finished:
                self._finish(row, row.finish_reason)
        return Changes(begun=tuple(begun), finished=(*scored, *finished))

    def weights_changed(self, model: str = "") -> None:
        """Mark cached keys and values of a model's running rows as those of older weights: new rows must not copy them.
        A row whose prompt isn't complete begins again, and so do scores.
        """
        self._weights_epochs[model] += 1
        self.parked.drop_model(model)
        self._scoring = None
        incomplete = [row for row in self._running if row.model == model and row.unfed and not row.token_ids]
        self._drop_running(incomplete)
        for row in incomplete:
            row.unfed = row.num_cached = 0
            row.version_starts.clear()
            insort(self._waiting, row)

    def adopt(self, version: int, recompute: bool, model: str = "") -> None:
        """Assign a model's tokens sampled from now on to this version. `recompute` prefills its running rows again."""
        self.versions[model] = version
        self.parked.drop_model(model)
        for row in (row for row in self._running if row.model == model):
            row.version_starts.append((version, len(row.token_ids)))
            if recompute:
                row.unfed, row.prompt_epoch = row.last_position, self._weights_epochs[model]
        if recompute:
            self._incomplete, self._columns = [row for row in self._running if row.unfed], None

    def completion(self, row: Row) -> Completion:
        assert row.finish_reason is not None
        text, stop_text = self._endings.cut_text(row.token_ids, row.params.stop)
        ends = [start for _, start in row.version_starts[1:]] + [len(row.token_ids)]
        stretches = ((version, start, end) for (version, start), end in zip(row.version_starts, ends, strict=False))
        latest = row.version_starts[-1][0] if row.version_starts else self.versions[row.model]
        return Completion(
            token_ids=tuple(row.token_ids),
            logprobs=tuple(row.logprobs),
            text=text,
            stop_text=stop_text,
            finish_reason=row.finish_reason,
            versions=join_spans(row.model, stretches, latest),
            experts_TLK=row.experts_TLK,
            cached_tokens=row.num_cached,
            drafted_tokens=row.draft.num_drafted if row.draft else 0,
            accepted_tokens=row.draft.num_accepted if row.draft else 0,
            scores=row.scores,
            top=join_likely(row),
        )

    def _score(self) -> list[Row]:
        """One forward pass of scoring: of the prompts that the last one left, else of the next ones of like length, as
        many as a pass may take. Returns rows that have their scores.
        """
        under_way = [] if self._scoring is None else self._scoring[0]
        if all(row.finish_reason or row.model in self.paused for row in under_way):
            able = [row for row in self._to_score if row.model not in self.paused]
            if not able:
                return []
            able = [row for row in able if row.model == able[0].model]
            rows = able[: first_alike([len(row.siblings.prompt_ids) for row in able], self._score_pace.tokens)]
            asked = [ScoredText(row.siblings.prompt_ids, scoring) for row in rows if (scoring := row.params.scoring)]
            self._scoring = rows, self._score_passes(asked, lambda: self._score_pace.tokens, rows[0].model)
        assert self._scoring is not None
        rows, passes = self._scoring
        begun_s = self._clock()
        scored = next(passes)
        self._score_pace.note(scored.num_tokens, self._clock() - begun_s)
        if scored.scores is None:
            return []
        self._scoring = None
        self.num_prefilled_tokens += sum(len(row.siblings.prompt_ids) for row in rows)
        answered = []
        for row, scores in zip(rows, scored.scores, strict=True):
            if row.finish_reason is None:  # it wasn't aborted meanwhile
                self._to_score.remove(row)
                row.scores = scores
                row.version_starts.append((self.versions[row.model], 0))
                self._finish(row, "stop")
                answered.append(row)
        return answered

    def _put_paused_last(self) -> list[Row]:
        """Move the rows of paused models behind the others. Returns the rows of a pass: those others, in whole blocks,
        whose last one may hold paused rows. A decoder's own padding would overwrite them.
        """
        ordered = sorted(self._running, key=lambda row: row.model in self.paused) if self.paused else self._running
        if ordered != self._running:
            moves = [(row.index, place, row.last_position) for place, row in enumerate(ordered)]
            self._places.move(moves, len(ordered))
            for row, (_, place, _) in zip(ordered, moves, strict=True):
                row.index = place
            self._running, self._columns = ordered, None
        num_able = sum(row.model not in self.paused for row in ordered)
        rows = ordered[: whole_blocks(num_able, self._decoder.row_block)]
        if self._columns is not None and len(self._columns.pending_B) != len(rows):
            self._columns = None
        return rows

    def _draft(self, rows: Sequence[Row]) -> list[list[int]]:
        """What each row may sample next, where a pass over a few more tokens costs little more."""
        longest = MAX_FED_TOKENS // len(rows) - 1
        if self._ngrams is None or longest < 1:
            return [[]] * len(rows)
        return [
            row.draft.propose(min(longest, row.params.max_new_tokens - len(row.token_ids) - 1))
            if row.draft and not row.unfed and row.model not in self.paused
            else []
            for row in rows
        ]

    def _sample(self, rows: Sequence[Row], drafts: Sequence[Sequence[int]]) -> list[list[SampledToken]]:
        """Each row's next token, and what would follow it if the draft came true. Every position has its own random
        number, the same without a draft.
        """
        if self._columns is None:
            self._columns = Columns.of(rows, self._slots.shape.device)
        columns, width = self._columns, 1 + max(map(len, drafts))
        if width > 1:
            columns = columns.append_drafts(drafts, width)
        by_row = (len(drafts), width)
        fed_BQ, positions_BQ = columns.pending_B.view(by_row), columns.positions_B.view(by_row)
        models = [row.model for row in rows]
        logits_BQV = self._decoder.verify(fed_BQ, positions_BQ, columns.num_attended, models)
        self._hold_to_patterns(rows, logits_BQV[:, 0])
        uniforms_P = uniforms(columns.seeds_B ^ self._seed, columns.positions_B)
        token_ids_P, logprobs_P, logprobs_PV = draw(
            logits_BQV.flatten(0, 1), columns.temperature_B, columns.limits_B3, uniforms_P
        )
        self._columns = columns.advance(token_ids_P) if width == 1 else None
        top = find_likely(rows, logprobs_PV, width)
        sampled = [
            SampledToken(token_id=token_id, logprob=logprob, top=top.get(place))
            for place, (token_id, logprob) in enumerate(zip(token_ids_P.tolist(), logprobs_P.tolist(), strict=True))
        ]
        return [sampled[start : start + width] for start in range(0, len(sampled), width)]

    def _hold_to_patterns(self, rows: Sequence[Row], logits_BV: Tensor) -> None:
        """Tokens that would leave a row's pattern get -inf, in place: log-probs are those of what is left."""
        matchers = {index: row.matcher for index, row in enumerate(rows) if row.matcher is not None}
        if matchers:
            assert self._grammar is not None
            forbidden_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
            forbidden_BV[[*matchers]] = ~self._grammar.mask_next_tokens([*matchers.values()]).to(logits_BV.device)
            logits_BV.masked_fill_(forbidden_BV, -torch.inf)

    def _extend(self, row: Row, draft: Sequence[int], sampled: Sequence[SampledToken]) -> None:
        """Append the first sampled token, and each further one while those before it are the draft's, up to an end."""
        num_new = 0
        for token in sampled:
            token_id = token.token_id
            row.token_ids.append(token_id)
            row.logprobs.append(token.logprob)
            if token.top is not None:
                row.top.append(token.top)
            num_new += 1
            if row.matcher is not None:
                row.matcher.consume_token(token_id)
            row.finish_reason = self._endings.finish_reason(row.token_ids, row.params)
            if row.finish_reason is not None or num_new > len(draft) or token_id != draft[num_new - 1]:
                break
        self.num_sampled_tokens += num_new
        if row.draft is not None:
            row.draft.settle(len(draft), row.token_ids[-num_new:])

    def _join(self) -> None:
        """Prefill a piece: first what is left of running rows, then new rows in their order, while there are rows and
        they fit. A prompt that is longer than a piece begins with one.
        """
        parts = self._take_parts(self._incomplete)
        left = self._pace.tokens - sum(len(part.token_ids) for part in parts)
        joining: list[Row] = []
        copying: list[Row] = []
        continued: list[tuple[CachedPrefix, int]] = []
        for row in [row for row in self._waiting if row.model not in self.paused]:
            index = len(self._running) + len(joining)
            if index >= self._max_rows:
                break
            if self._donor(row) is None:
                cacheable = row.siblings.prompt_ids[:-1]
                prefix = self.parked.prefix_for(row.model, row.trajectory_id, row.group_id, cacheable)
                num_cached = prefix.num_tokens if prefix else 0
                if parts and row.last_position - num_cached > left:
                    break
                if prefix is not None:
                    continued.append((prefix, index))
                    if prefix.taken:
                        self.parked.drop(prefix.row)
                row.num_cached, row.unfed = num_cached, row.last_position - num_cached
                if row.unfed:
                    parts.append(row.take_unfed(left))
                    left -= len(parts[-1].token_ids)
                    self._incomplete += [row] if row.unfed else []
            else:
                row.num_cached = row.last_position
                copying.append(row)
            row.index = index
            row.prompt_epoch = self._weights_epochs[row.model]
            row.version_starts.append((self.versions[row.model], 0))
            row.siblings.running.append(row)
            if self._ngrams is not None and row.matcher is None:
                row.draft = self._ngrams.follow(row.siblings.prompt_ids)
            self._waiting.remove(row)
            joining.append(row)
        if joining:
            longest = max(len(row.siblings.prompt_ids) + row.params.max_new_tokens for row in joining)
            self._places.open(len(self._running) + len(joining), longest, continued)
        self._prefill(parts)
        self._copy_from_siblings(copying)
        self.num_cached_tokens += sum(row.num_cached for row in joining)
        if joining:
            self._running += joining
            self._columns = None

    def _donor(self, row: Row) -> Row | None:
        """A sibling whose whole prompt was cached with the present weights, or will be in this step."""
        return next(
            (
                other
                for other in row.siblings.running
                if other.prompt_epoch == self._weights_epochs[row.model] and other.position >= row.last_position
            ),
            None,
        )

    def _take_parts(self, rows: Sequence[Row]) -> list[Part]:
        """The next piece of what is left to prefill of rows, in their order."""
        parts: list[Part] = []
        left = self._pace.tokens
        for row in rows:
            if row.unfed and left and row.model not in self.paused:
                parts.append(row.take_unfed(left))
                left -= len(parts[-1].token_ids)
        return parts

    def _prefill(self, parts: Sequence[Part]) -> None:
        """One forward pass for parts of similar length: a long prompt must not pad the short ones."""
        if not parts:
            return
        begun_s = self._clock()
        ends = [part.start + len(part.token_ids) for part in parts]
        for together in _prefilled_together(ends, [part.start for part in parts]):
            some = sorted((parts[i] for i in together), key=lambda part: part.row.model)
            from_N = [part.start for part in some]
            rows = [part.row.index for part in some]
            models = [part.row.model for part in some]
            self._decoder.prefill([part.token_ids for part in some], rows, from_N if any(from_N) else (), models)
        num_tokens = sum(len(part.token_ids) for part in parts)
        self._pace.note(num_tokens, self._clock() - begun_s)
        self.num_prefilled_tokens += num_tokens
        self._columns = None

    def _copy_from_siblings(self, rows: Sequence[Row]) -> None:
        if rows:
            donors = [self._donor(row) for row in rows]
            sources = [donor.index for donor in donors if donor is not None]
            self._slots.copy(sources, [row.index for row in rows], max(row.position for row in rows))

    def _drop_running(self, leaving: Sequence[Row]) -> None:
        """Remove rows, or park them. Rows at the end move into the free places, so that the rest stays compact."""
        num_left = len(self._running) - len(leaving)
        for row in leaving:
            row.experts_TLK = self._slots.read_experts(row.index, row.last_position) if row.token_ids else None
            row.siblings.running.remove(row)
            is_current = row.prompt_epoch == self._weights_epochs[row.model]
            if row.trajectory_id and row.finish_reason is not None and is_current:
                self.parked.park(row.park())  # keys and values are all of the present weights
            row.index = -1
        movers = [row for row in self._running[num_left:] if row.index >= 0]
        holes = [index for index, row in enumerate(self._running[:num_left]) if row.index < 0]
        moves = [(row.index, hole, row.last_position) for row, hole in zip(movers, holes, strict=True)]
        self._places.move(moves, num_left)
        for row, hole in zip(movers, holes, strict=True):
            row.index = hole
            self._running[hole] = row
        del self._running[num_left:]
        self._columns = None

    def _finish(self, row: Row, reason: FinishReason | None) -> None:
        row.finish_reason = reason
        row.siblings.num_members -= 1
        if row.siblings.num_members == 0:
            del self._siblings_by_prompt[row.model, row.siblings.prompt_ids]


def find_likely(rows: Sequence[Row], logprobs_PV: Tensor, width: int) -> dict[int, LikelyTokens]:
    """The likeliest tokens for the places of the rows that ask for them; each row has `width` places."""
    asked = {
        place: row.params.top_logprobs
        for index, row in enumerate(rows)
        if row.params.top_logprobs
        for place in range(index * width, (index + 1) * width)
    }
    if not asked:
        return {}
    most = min(max(asked.values()), logprobs_PV.shape[1])
    top = logprobs_PV[[*asked]].topk(most)
    ids_NK, logprobs_NK = top.indices.cpu().numpy(), top.values.cpu().numpy()
    return {
        place: LikelyTokens(ids_K=ids_K[:k], logprobs_K=logprobs_K[:k])
        for (place, k), ids_K, logprobs_K in zip(asked.items(), ids_NK, logprobs_NK, strict=True)
    }


def join_likely(row: Row) -> TopLogprobs | None:
    if not row.top:
        return None
    ids_T1, logprobs_T1 = np.array(row.token_ids)[:, None], np.array(row.logprobs)[:, None]
    return TopLogprobs(
        ids_TK=np.hstack([ids_T1, [one.ids_K for one in row.top]]).astype(np.int32),
        logprobs_TK=np.hstack([logprobs_T1, [one.logprobs_K for one in row.top]]).astype(np.float32),
    )


def _prefilled_together(ends: Sequence[int], starts: Sequence[int]) -> list[list[int]]:
    """Indices by what goes through the model together: of like length, and of like length with what is cached."""
    together: list[list[int]] = []
    for continued in (False, True):
        some = [i for i, start in enumerate(starts) if (start > 0) == continued]
        for whole in bin_by_length([ends[i] for i in some]):
            alike = [some[i] for i in whole]
            together += [[alike[i] for i in some] for some in bin_by_length([ends[i] - starts[i] for i in alike])]
    return together


def first_alike(lengths: Sequence[int], budget: int) -> int:
    """How many of the first sequences go through the model together: padded to the longest within the budget, and none
    shorter than half of it. At least one.
    """
    longest = shortest = lengths[0]
    for num_before, length in enumerate(lengths):
        longest, shortest = max(longest, length), min(shortest, length)
        if num_before and (longest * (num_before + 1) > budget or 2 * shortest < longest):
            return num_before
    return len(lengths)
