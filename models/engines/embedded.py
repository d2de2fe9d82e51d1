"""The engine in torch, in our own process: async calls from any event loop, one thread that steps the batch.

    generate, abort, pause, load_bucket, ...  -> [commands] -> thread: commands between steps, then a step, again
    completions, receipts, first tokens       <- call_soon_threadsafe <-

Model, batch and inbox belong to the thread alone; callers only ever post commands. So a pause is an ordinary command:
when it runs, no token is being sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from models.causal_lm import load_causal_lm
from models.engines.batch import Batch, Row
from models.engines.calls import Answer, Command, Ticket, Waiter, copy_of
from models.engines.decoder import open_decoder
from models.engines.endings import Endings
from models.engines.grammar import Grammar, parsed
from models.engines.weight_loading import WeightInbox
from models.lent_memory import LentMemory, free_bytes
from models.logprobs import chosen_logprobs
from models.lora import add_adapters
from models.quantize import quantize_matrices
from models.renderer import Renderer
from models.settings import EmbeddedConfig, LoraConfig
from models.types import (
    Completion,
    EngineDied,
    EngineRefused,
    GroupLink,
    RequestContext,
    SamplingParams,
    WeightBucket,
    WeightReceipt,
    ignore_first_token,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What an engine did since it started. Waiting and running are of the moment."""

    busy_s: float  # in steps: prefilling and decoding
    sampled_tokens: int
    prefilled_tokens: int
    finished: int
    waiting: int
    running: int


class EmbeddedEngine:
    """Continuous batching for any causal LM with full attention, on the CPU or one GPU.

    Deadlines are the callers': they cancel. Raises ValueError for a model that it can't run.

    seed: shifts all draws. Engines that stand in for each other share it: a retry then draws the same tokens.
    version: of the weights in `model_path`.
    lora: adapters that pushes bring, where they aren't merged into the weights before.
    note_experts: completions carry the experts of their tokens; for a mixture of experts only.
    """

    def __init__(
        self,
        model_path: str,
        model_name: str,
        config: EmbeddedConfig,
        dtype: str = "float32",
        device: str = "cpu",
        seed: int = 0,
        chat_template: str | None = None,
        version: int = 0,
        lora: LoraConfig | None = None,
        note_experts: bool = False,
    ) -> None:
        renderer = Renderer.load(model_path, chat_template)
        self.model_name = model_name
        self._config = config
        self._vocab_size = renderer.vocab_size
        self._context_tokens = _window(config, renderer)
        self._model = load_causal_lm(model_path, dtype, device)
        if lora is not None and lora.in_engines:
            add_adapters(self._model, lora, dtype)
        decoder, slots = open_decoder(self._model, config.max_batch_rows, self._context_tokens, note_experts)
        self._quantize()
        endings = Endings(renderer.decode, renderer.stop_token_ids)
        grammar = Grammar(renderer.decode, renderer.num_token_ids, renderer.stop_token_ids, renderer.vocab_size)
        self._batch = Batch(
            decoder, slots, endings, model_name, seed, config.max_batch_rows, config.prefill_tokens_per_step, grammar
        )
        self._batch.version = version
        self._slots = slots
        self._inbox = WeightInbox(self._model, self._model.device)
        self._lent_weights = LentMemory()
        self._tickets: dict[str, Ticket] = {}
        self._tickets_by_row: dict[Row, Ticket] = {}
        self._paused = self._asleep = False
        self._closing = False
        self._busy_s = 0.0
        self._num_finished = 0
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._death: EngineDied | None = None
        self._death_lock = threading.Lock()  # no command may slip in after the last ones were failed
        self._thread = threading.Thread(target=self._work, name=f"engine-{model_name}", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        return self._batch.version

    def stats(self) -> EngineStats:
        batch = self._batch
        return EngineStats(
            busy_s=self._busy_s,
            sampled_tokens=batch.num_sampled_tokens,
            prefilled_tokens=batch.num_prefilled_tokens,
            finished=self._num_finished,
            waiting=batch.num_waiting,
            running=batch.num_running,
        )

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        """Sample one completion. A request_id that is in flight already gets that request's answer."""
        ids = tuple(prompt_ids)
        self._refuse_what_cannot_run(ids, params)
        waiter = Waiter(Answer[Completion](), on_first_token)
        self._post(Command(partial(self._submit, ids, params, context, waiter), waiter.answer.fail))
        try:
            return await waiter.answer.future
        except asyncio.CancelledError:
            with contextlib.suppress(EngineDied):
                self._post(Command(partial(self._give_up, context.request_id, waiter), lambda error: None))
            raise

    async def abort(self, request_id: str) -> None:
        await self._do(partial(self._abort, request_id))

    async def pause(self) -> None:
        await self._do(partial(self._set_paused, True))

    async def resume(self) -> None:
        await self._do(partial(self._set_paused, False))

    async def begin_weights(self, link: GroupLink | None = None) -> None:
        """Raises RuntimeError where not paused, ConnectionError where the group doesn't come together in time."""
        await self._do(partial(self._begin, link))

    async def load_bucket(self, bucket: WeightBucket) -> None:
        """Raises ValueError naming a tensor that doesn't fit (nothing is loaded), RuntimeError where not paused."""
        await self._do(partial(self._load, bucket))

    async def commit_weights(self, version: int) -> WeightReceipt:
        return await self._do(partial(self._commit, version))

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        ids = tuple(token_ids)
        self._refuse_unknown_ids(ids)
        if len(ids) > self._context_tokens:
            raise EngineRefused(f"{len(ids)} tokens exceed the window of {self._context_tokens} of {self.model_name}")
        return await self._do(partial(self._score, ids))

    async def sleep(self) -> int:
        """Raises RuntimeError where requests are in flight, or not paused. On a CPU the weights stay: they are on the
        host already."""
        return await self._do(self._sleep)

    async def wake(self) -> None:
        """Paused yet."""
        await self._do(self._wake)

    def close(self) -> None:
        """End the thread; whoever still waits gets EngineDied. Blocks for a step at most."""
        with self._death_lock:
            if self._death is None:
                self._commands.put(Command(self._close, lambda error: None))
        self._thread.join()

    # What follows `_post` runs in the thread.

    async def _do(self, function: Callable[[], T]) -> T:
        answer = Answer[T]()

        def run() -> None:
            try:
                answer.give(function())
            except Exception as error:
                answer.fail(error)  # the caller's mistake; the engine lives on

        self._post(Command(run, answer.fail))
        return await answer.future

    def _post(self, command: Command) -> None:
        with self._death_lock:
            if self._death is not None:
                raise EngineDied(str(self._death)) from self._death.__cause__
            self._commands.put(command)

    def _refuse_what_cannot_run(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> None:
        needed = len(prompt_ids) + params.max_new_tokens
        if needed > self._context_tokens:
            raise EngineRefused(
                f"a prompt of {len(prompt_ids)} tokens and {params.max_new_tokens} new ones exceed the window of "
                f"{self._context_tokens} tokens of {self.model_name}"
            )
        self._refuse_unknown_ids(prompt_ids)
        if params.pattern is not None:
            try:
                parsed(params.pattern)
            except ValueError as error:
                raise EngineRefused(str(error)) from error
        if params.max_new_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1 or "" in params.stop:
            raise EngineRefused(f"these sampling parameters can't be served: {params}")

    def _refuse_unknown_ids(self, token_ids: tuple[int, ...]) -> None:
        """Before they reach the model, where they would end the engine for everybody."""
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise EngineRefused(f"one or more ids from 0 to {self._vocab_size - 1} are needed")

    @torch.inference_mode()
    def _work(self) -> None:
        try:
            while not self._closing:
                self._run_commands()
                if self._has_work():
                    self._step()
        except BaseException as error:
            died = EngineDied(f"the engine of {self.model_name} crashed: {error!r}")
            died.__cause__ = error
            self._die(died)
        else:
            self._die(EngineDied(f"the engine of {self.model_name} was closed"))

    def _has_work(self) -> bool:
        return not (self._paused or self._closing) and self._batch.num_waiting + self._batch.num_running > 0

    def _run_commands(self) -> None:
        """All that have come; waits for one where there is nothing else to do."""
        while not self._closing:
            try:
                command = self._commands.get(block=not self._has_work())
            except queue.Empty:
                return
            command.run()

    def _step(self) -> None:
        started_s = time.perf_counter()  # a duration: no event loop's clock is at hand here
        changes = self._batch.step()
        self._busy_s += time.perf_counter() - started_s
        for row in changes.begun:
            for waiter in self._tickets_by_row[row].waiters:
                waiter.tell_first_token()
        for row in changes.finished:
            self._answer(self._tickets_by_row[row])

    def _submit(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, context: RequestContext, waiter: Waiter
    ) -> None:
        ticket = self._tickets.get(context.request_id)
        if ticket is None:
            row = self._batch.submit(prompt_ids, params, context.priority)
            ticket = Ticket(context.request_id, row)
            self._tickets[context.request_id] = self._tickets_by_row[row] = ticket
        elif ticket.row.token_ids:
            waiter.tell_first_token()
        ticket.waiters.append(waiter)

    def _give_up(self, request_id: str, waiter: Waiter) -> None:
        ticket = self._tickets.get(request_id)
        if ticket is not None and waiter in ticket.waiters:
            ticket.waiters.remove(waiter)
            if not ticket.waiters:
                self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            self._batch.abort(ticket.row)
            self._answer(ticket)

    def _answer(self, ticket: Ticket) -> None:
        del self._tickets[ticket.request_id], self._tickets_by_row[ticket.row]
        self._num_finished += 1
        completion = self._batch.completion(ticket.row)
        for waiter in ticket.waiters:
            waiter.answer.give(completion)

    def _set_paused(self, paused: bool) -> None:
        if not paused:
            self._refuse_in_its_sleep()
        self._paused = paused

    def _sleep(self) -> int:
        if self._tickets or not self._paused:
            raise RuntimeError("only a paused engine without requests may sleep")
        if self._asleep:
            return 0
        device = self._model.device
        free_before = free_bytes(device)
        kv_bytes = self._slots.give_up()
        if device.type == "cuda":
            self._lent_weights.lend([*self._model.parameters(), *self._model.buffers()])
        self._asleep = True
        return free_bytes(device) - free_before if device.type == "cuda" else kv_bytes

    def _wake(self) -> None:
        self._lent_weights.take_back()
        self._asleep = False

    def _refuse_in_its_sleep(self) -> None:
        if self._asleep:
            raise RuntimeError("the engine sleeps: wake it first")

    def _close(self) -> None:
        self._closing = True
        self._inbox.close()

    def _begin(self, link: GroupLink | None) -> None:
        self._refuse_in_its_sleep()
        if not self._paused:
            raise RuntimeError("a push of weights may only begin on a paused engine")
        self._inbox.begin(link)

    def _load(self, bucket: WeightBucket) -> None:
        if not self._paused:
            raise RuntimeError("weights may only be loaded into a paused engine")
        self._inbox.load(bucket)
        self._batch.weights_changed()

    def _commit(self, version: int) -> WeightReceipt:
        self._quantize()
        self._batch.adopt(version, self._config.recompute_kv_on_sync)
        return WeightReceipt(version=version, checksums=self._inbox.collect_checksums())

    def _quantize(self) -> None:
        """Checksums are of what came: only the probe sees what is sampled from."""
        if self._config.quantize != "none":
            quantize_matrices(self._model, self._config.quantize)

    def _score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        self._refuse_in_its_sleep()
        token_ids_1T = torch.tensor([token_ids], device=self._model.device)
        logits_TV = self._model(token_ids_1T, use_cache=False).logits[0]
        logprobs_T, _ = chosen_logprobs(logits_TV[:-1], token_ids_1T[0, 1:])
        return tuple(logprobs_T.tolist())

    def _die(self, death: EngineDied) -> None:
        with self._death_lock:
            self._death = death
        for ticket in self._tickets.values():
            for waiter in ticket.waiters:
                waiter.answer.fail(copy_of(death))
        while not self._commands.empty():
            self._commands.get().fail(copy_of(death))


def _window(config: EmbeddedConfig, renderer: Renderer) -> int:
    if config.max_context_tokens > renderer.context_tokens:
        raise ValueError(
            f"max_context_tokens: {config.max_context_tokens} exceeds the model's window of "
            f"{renderer.context_tokens} tokens; give that or less (0: all of it)"
        )
    return config.max_context_tokens or renderer.context_tokens
