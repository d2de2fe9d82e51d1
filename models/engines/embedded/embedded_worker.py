"""The state of an embedded engine's thread: model, batch, tickets, inbox. Called from that thread only."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.embedded.batch import Row, RunningBatch
from grmpipe.models.engines.embedded.batch_invariance import open_batch_invariant_decoder
from grmpipe.models.engines.embedded.decoder import PROBE_TEXTS, open_decoder
from grmpipe.models.engines.embedded.grammar import Grammar
from grmpipe.models.engines.embedded.ngrams import NgramTable
from grmpipe.models.engines.embedded.prompt_packing import PrefillPace
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.stop_conditions import StopConditions
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.lm.lora import add_adapters, rename_adapter, with_adapter
from grmpipe.models.lm.offloaded_memory import OffloadedMemory, free_bytes
from grmpipe.models.lm.quantize import quantize_matrices
from grmpipe.models.lm.score import ScoredPass, ScoredText, score_in_passes, score_sequences
from grmpipe.models.settings import EmbeddedConfig
from grmpipe.models.types import (
    Completion,
    EngineDied,
    GroupLink,
    ModelFiles,
    PromptScoring,
    RequestContext,
    SamplingParams,
    WeightBucket,
    WeightReceipt,
    ignore_first_token,
)
from grmpipe.models.weights.delta import DeltaReceiver
from grmpipe.models.weights.receive_tensors import WeightInbox

T = TypeVar("T")


class Answer(Generic[T]):
    """A future of the running event loop that another thread settles. Once settled or cancelled, it doesn't change."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    def call(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: no task waits any more
            self._loop.call_soon_threadsafe(function)

    def give(self, result: T) -> None:
        self.call(lambda: None if self.future.done() else self.future.set_result(result))

    def fail(self, error: BaseException) -> None:
        self.call(lambda: None if self.future.done() else self.future.set_exception(error))


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """One call of generate."""

    answer: Answer[Completion]
    on_first_token: Callable[[], None]

    def notify_first_token(self) -> None:
        if self.on_first_token is not ignore_first_token:
            self.answer.call(self.on_first_token)


@dataclass(slots=True, eq=False)
class EmbeddedRequest:
    """A request in flight, and all its waiters."""

    request_id: str
    row: Row
    waiters: list[Waiter] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Command:
    """Work for the thread between two steps. `fail` tells the caller that it won't be done."""

    run: Callable[[], None]
    fail: Callable[[BaseException], None]


def copy_death(death: EngineDied) -> EngineDied:
    """A copy of an exception: each waiter gets its own, because tracebacks grow on it."""
    copy = EngineDied(str(death))
    copy.__cause__ = death.__cause__
    return copy


# In one pass: enough for any processor to be busy, few enough for the activations and logits of a pass to fit. A slow
# machine takes as many as it does in a second or two; a longer prompt takes several, between which others decode.
MOST_PREFILL_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What an engine did since it started. Waiting, running and parked are numbers of the moment.

    cached_tokens: tokens of prompts that weren't prefilled, because a sibling or a parked row had them.
    parked:        ended requests whose keys and values are kept for the next turn.
    """

    busy_s: float  # in steps: prefilling and decoding
    sampled_tokens: int
    prefilled_tokens: int
    cached_tokens: int
    finished: int
    waiting: int
    running: int
    parked: int


class EmbeddedWorker:
    """Batches requests over steps; between two steps it takes weights, scores, sleeps. EmbeddedEngine is its interface.

    Other threads may read only `version` and `stats`, and call `grammar.check`.
    """

    def __init__(self, spec: EngineSpec, config: EmbeddedConfig, renderer: Renderer, context_tokens: int) -> None:
        self._config, self._role = config, spec.role
        self._model = load_causal_lm(spec.path, spec.dtype, spec.device)
        if spec.adapters:
            add_adapters(self._model, spec.adapters, spec.dtype)
        opened = open_batch_invariant_decoder if spec.batch_invariant else open_decoder
        probe = [renderer.encode_markup(text) for text in PROBE_TEXTS]
        decoder, slots = opened(self._model, config.max_batch_rows, context_tokens, spec.return_routed_experts, probe)
        self._decoder = decoder
        self._quantize()
        decoder.weights_changed()
        endings = StopConditions(renderer.decode, renderer.stop_token_ids, renderer.special)
        vocab_size = max(renderer.num_token_ids, renderer.vocab_size)
        self.grammar = Grammar(renderer.tokenizer, renderer.stop_token_ids, vocab_size)
        pace = PrefillPace(MOST_PREFILL_TOKENS)
        # A score's last bits depend on where its sequence is cut, in contrast to those of a batch-invariant decoder.
        score_pace = PrefillPace(MOST_PREFILL_TOKENS, is_fixed=spec.batch_invariant)
        # A batch-invariant decoder has a pass for each token.
        ngrams = NgramTable() if spec.speculation == "ngram" and not spec.batch_invariant else None
        self._batch = RunningBatch(
            decoder, slots, endings, spec.seed, config.max_batch_rows, pace, score_pace, self.grammar, ngrams,
            score=self._score_passes,
        )  # fmt: skip
        self._slots = slots
        names = {spec.role: None} | {name: partial(rename_adapter, name=name) for name in spec.adapters}
        self._adapters = frozenset(spec.adapters)
        self._inboxes = {
            name: WeightInbox(self._model, self._model.device, own_name) for name, own_name in names.items()
        }
        self._deltas = DeltaReceiver()
        self._offloaded_weights = OffloadedMemory()
        self._tickets: dict[str, EmbeddedRequest] = {}
        self._tickets_by_row: dict[Row, EmbeddedRequest] = {}
        self._asleep = False
        self._busy_s = 0.0
        self._num_finished = 0

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self._batch.versions[self._role]

    def stats(self) -> EngineStats:
        batch = self._batch
        return EngineStats(
            busy_s=self._busy_s,
            sampled_tokens=batch.num_sampled_tokens,
            prefilled_tokens=batch.num_prefilled_tokens,
            cached_tokens=batch.num_cached_tokens,
            finished=self._num_finished,
            waiting=batch.num_waiting,
            running=batch.num_running,
            parked=len(batch.parked),
        )

    @property
    def has_work(self) -> bool:
        return self._batch.has_work

    def step(self) -> None:
        started_s = time.perf_counter()  # a duration: there is no event loop's clock in this thread
        changes = self._batch.step()
        self._busy_s += time.perf_counter() - started_s
        for row in changes.begun:
            for waiter in self._tickets_by_row[row].waiters:
                waiter.notify_first_token()
        for row in changes.finished:
            self._answer(self._tickets_by_row[row])

    def submit(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, context: RequestContext, waiter: Waiter
    ) -> None:
        ticket = self._tickets.get(context.request_id)
        if ticket is None:
            trajectory_id, group_id = context.trajectory_id, context.group_id
            model = context.adapter or self._role
            row = self._batch.submit(prompt_ids, params, context.priority, trajectory_id, group_id, model)
            ticket = EmbeddedRequest(context.request_id, row)
            self._tickets[context.request_id] = self._tickets_by_row[row] = ticket
        elif ticket.row.token_ids:
            waiter.notify_first_token()
        ticket.waiters.append(waiter)

    def give_up(self, request_id: str, waiter: Waiter) -> None:
        ticket = self._tickets.get(request_id)
        if ticket is not None and waiter in ticket.waiters:
            ticket.waiters.remove(waiter)
            if not ticket.waiters:
                self.abort(request_id)

    def abort(self, request_id: str) -> None:
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            self._batch.abort(ticket.row)
            self._answer(ticket)

    def end_trajectory(self, trajectory_id: str) -> None:
        self._batch.parked.drop_trajectory(trajectory_id)

    def _answer(self, ticket: EmbeddedRequest) -> None:
        del self._tickets[ticket.request_id], self._tickets_by_row[ticket.row]
        self._num_finished += 1
        completion = self._batch.completion(ticket.row)
        for waiter in ticket.waiters:
            waiter.answer.give(completion)

    def pause(self, adapter: str) -> None:
        self._batch.paused.add(adapter or self._role)

    def resume(self, adapter: str) -> None:
        self._refuse_in_its_sleep()
        self._batch.paused.discard(adapter or self._role)

    def sleep(self) -> int:
        if self._tickets or not self._batch.paused:
            raise RuntimeError("only a paused engine without requests may sleep")
        if self._asleep:
            return 0
        device = self._model.device
        free_before = free_bytes(device)
        self._batch.parked.clear()
        kv_bytes = self._slots.give_up()
        if device.type == "cuda":
            self._offloaded_weights.offload([*self._model.parameters(), *self._model.buffers()])
        self._asleep = True
        return free_bytes(device) - free_before if device.type == "cuda" else kv_bytes

    def wake(self) -> None:
        self._offloaded_weights.load_back()
        self._asleep = False

    def _refuse_in_its_sleep(self) -> None:
        if self._asleep:
            raise RuntimeError("the engine is asleep: wake it first")

    def begin(self, link: GroupLink | None, adapter: str) -> None:
        self._refuse_in_its_sleep()
        if (model := adapter or self._role) not in self._batch.paused:
            raise RuntimeError("a push of weights may only begin on a paused engine")
        self._inboxes[model].begin(link)

    def load(self, bucket: WeightBucket, adapter: str) -> None:
        if (model := adapter or self._role) not in self._batch.paused:
            raise RuntimeError("weights may only be loaded into a paused engine")
        if isinstance(bucket.payload, ModelFiles):
            self._read(bucket.payload.path)
        else:
            self._inboxes[model].load(self._deltas.restore(bucket))
        self._batch.weights_changed(model)
        if model not in self._adapters:
            self._decoder.weights_changed()

    def _read(self, path: str) -> None:
        """Take the weights of the same architecture in a folder. Raises ValueError for another one."""
        dtype = str(self._model.dtype).removeprefix("torch.")
        try:
            self._model.load_state_dict(load_causal_lm(path, dtype).state_dict())
        except RuntimeError as error:
            raise ValueError(f"weights: {path} is another architecture: {error}") from error

    def commit(self, version: int, adapter: str) -> WeightReceipt:
        self._quantize()
        model = adapter or self._role
        self._batch.adopt(version, self._config.recompute_kv_on_sync, model)
        return WeightReceipt(version=version, checksums=self._inboxes[model].collect_checksums())

    def _quantize(self) -> None:
        """Quantize the weights. Checksums are of the received weights: only the probe sees the quantized ones."""
        if self._config.quantize != "none":
            quantize_matrices(self._model, self._config.quantize)

    def score(self, token_ids: tuple[int, ...], adapter: str) -> tuple[float, ...]:
        self._refuse_in_its_sleep()
        with with_adapter(self._model, adapter or self._role):
            (scores,) = score_sequences(self._model, [ScoredText(token_ids, PromptScoring(start=1))])
        return tuple(scores.logprobs_N.tolist())

    def _score_passes(
        self, sequences: Sequence[ScoredText], pass_tokens: Callable[[], int], model: str
    ) -> Iterator[ScoredPass]:
        """Score by one of the models: others may run between two passes."""
        passes = score_in_passes(self._model, sequences, pass_tokens)
        while True:
            with with_adapter(self._model, model):
                scored = next(passes, None)
            if scored is None:
                return
            yield scored

    def fail_all(self, death: EngineDied) -> None:
        """Fail all waiters."""
        for ticket in self._tickets.values():
            for waiter in ticket.waiters:
                waiter.answer.fail(copy_death(death))

    def close(self) -> None:
        for inbox in self._inboxes.values():
            inbox.close()
