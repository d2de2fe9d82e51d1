"""An SGLang server as an engine of ours, one of our own or one that runs already: async calls over HTTP.

    generate, abort    -> a ticket per request_id -> a stream of /generate -> Completion
    pause .. commit    -> /pause_generation (in_place or retract), the server's weight calls, its version of each token
    a server that is gone -> EngineDied, for whoever waits and whoever comes

Weights under kept requests: with `recompute_kv_on_sync` the server takes its requests back and drops all cached keys
and values. Without it kept requests go on with theirs, and a new namespace of the prefix cache keeps newcomers from
ever taking them; requests that have not begun are taken back and asked again under it.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from models.causal_lm import outline_causal_lm
from models.engines.endings import Endings
from models.engines.in_flight import InFlight, Sluice
from models.engines.sglang_http import Json, SglangHttp, message_of
from models.engines.sglang_join import check_joined, key_of
from models.engines.sglang_memory import used_gpu_bytes
from models.engines.sglang_requests import Ticket, body_of, completion_of, scores_of, scoring_body
from models.engines.sglang_server import SglangServer, SglangStart
from models.engines.sglang_weights import SglangWeights
from models.renderer import Renderer
from models.settings import SglangConfig
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

ABORT_GRACE_S = 2.0  # for the server's own answer to an abort: it has all tokens


class SglangEngine:
    """Any model that SGLang serves. Bound to the event loop that first asks it; see `start` and `join`.

    Needs SGLang 0.5.23 or later: version spans, sessions of weights.
    """

    def __init__(
        self,
        http: SglangHttp,
        model_path: str,
        model_name: str,
        config: SglangConfig,
        *,
        renderer: Renderer,
        server_version: str,
        device: str = "cpu",
        seed: int = 0,
        version: int = 0,
        incremental: bool = True,
        server: SglangServer | None = None,
    ) -> None:
        """server_version: how the server names its weights, which are our `version`. incremental: see `body_of`."""
        self.model_name = model_name
        self.version = version
        self.prefilled_tokens = 0  # of finished requests: prompt tokens that no prefix cache held
        self._http, self._server = http, server
        self._config, self._device, self._seed, self._incremental = config, device, seed, incremental
        self._vocab_size = renderer.vocab_size
        self._context_tokens = window_of(config, renderer)
        self._stop_token_ids = renderer.stop_token_ids
        self._endings = Endings(renderer.decode, renderer.stop_token_ids)
        self._weights = SglangWeights(http, outline_causal_lm(model_path), same_machine=server is not None)
        self._versions = {server_version: version}
        self._namespace = uuid.uuid4().hex  # of the prefix cache; another one after each push
        self._tickets: dict[str, Ticket] = {}
        self._in_flight: InFlight[Completion] = InFlight()
        self._errands: set[asyncio.Task[Any]] = set()
        self._going = Sluice()
        self._death: EngineDied | None = None

    @classmethod
    def start(
        cls,
        model_path: str,
        model_name: str,
        config: SglangConfig,
        dtype: str = "float32",
        device: str = "cpu",
        seed: int = 0,
        chat_template: str | None = None,
        version: int = 0,
        tensor_parallel: int = 1,
    ) -> SglangEngine:
        """A server of our own, which dies with us. Blocks until it answers (tens of seconds).

        Raises ValueError for a model or option that can't be had, RuntimeError with the server's last words.
        """
        renderer = Renderer.load(model_path, chat_template)
        server = SglangServer(
            SglangStart(
                model_path=model_path,
                config=config,
                context_tokens=window_of(config, renderer),
                dtype=dtype,
                device=device,
                seed=seed,
                version=version,
                tensor_parallel=tensor_parallel,
            )
        )
        return cls(
            SglangHttp(server.url, server.key, server.post_mortem),
            model_path,
            model_name,
            config,
            renderer=renderer,
            server_version=str(version),
            device=device,
            seed=seed,
            version=version,
            incremental=bool(config.options.get("incremental-streaming-output", True)),
            server=server,
        )

    @classmethod
    def join(
        cls,
        url: str,
        model_path: str,
        model_name: str,
        config: SglangConfig,
        seed: int = 0,
        chat_template: str | None = None,
        version: int = 0,
    ) -> SglangEngine:
        """A server that runs already, for this run alone: it goes on, with the weights that it was started with.

        Raises ValueError naming engine.sglang.urls where it isn't the one that `model_path` is for.
        """
        renderer = Renderer.load(model_path, chat_template)
        key = key_of(config)
        joined = check_joined(url, key, model_path, window_of(config, renderer), config.api_key_env)
        return cls(
            SglangHttp(url, key),
            model_path,
            model_name,
            config,
            renderer=renderer,
            server_version=joined.version,
            device="elsewhere",
            seed=seed,
            version=version,
            incremental=joined.incremental,
        )

    def process_ids(self) -> list[int]:
        """Of the server, if it is ours: the head of a process group."""
        return [self._server.process_id] if self._server is not None else []

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        """Sample one completion. A request_id that is in flight already gets that request's answer."""
        self._refuse_the_dead()
        ids, request_id = tuple(prompt_ids), context.request_id
        self._refuse_what_cannot_run(ids, params)
        if request_id not in self._in_flight:
            self._tickets[request_id] = Ticket(ids, params, context.priority)
        ticket = self._tickets[request_id]
        if ticket.begun:
            on_first_token()
        ticket.listeners.append(on_first_token)
        try:
            return await self._in_flight.join(request_id, lambda: self._answer(request_id, ticket))
        finally:
            ticket.listeners.remove(on_first_token)

    async def abort(self, request_id: str) -> None:
        ticket = self._tickets.get(request_id)
        if ticket is None:
            await self._call(self._http.get("/model_info"))  # is it there at all?
            return
        if ticket.aborted:
            return
        ticket.aborted = True
        if ticket.rid and self._going.is_open:
            self._run_errand(self._interrupt_later(ticket))
            await self._call(self._http.post("/abort_request", {"rid": ticket.rid}))
        else:
            ticket.interrupted.set()  # a paused server answers no abort

    async def pause(self) -> None:
        self._going.close()
        mode = "retract" if self._config.recompute_kv_on_sync else "in_place"
        await self._call(self._http.post("/pause_generation", {"mode": mode}))
        # The answer came before the scheduler had it; what the scheduler answers comes after.
        await self._call(self._http.get("/server_info"))

    async def resume(self) -> None:
        """Weights of a push that wasn't committed are as far as it came."""
        await self._call(self._http.post("/continue_generation", {}))
        self._going.open()

    async def begin_weights(self, link: GroupLink | None = None) -> None:
        """Raises RuntimeError where not paused, ConnectionError where the group doesn't come together."""
        if self._going.is_open:
            raise RuntimeError("weights may only be sent to a paused engine")
        await self._call(self._weights.begin(link))

    async def load_bucket(self, bucket: WeightBucket) -> None:
        """Raises ValueError naming a tensor that doesn't fit, ConnectionError where a broadcast broke off."""
        if self._going.is_open:
            raise RuntimeError("weights may only be sent to a paused engine")
        await self._call(self._weights.load(bucket))

    async def commit_weights(self, version: int) -> WeightReceipt:
        """Raises RuntimeError where the server then says another version."""
        checksums = await self._call(self._weights.commit(version))
        self._versions.pop(str(version), None)  # the newest is the last
        self._versions[str(version)] = self.version = version
        if self._config.recompute_kv_on_sync:
            await self._call(self._http.post("/flush_cache", {}))
        else:
            self._namespace = uuid.uuid4().hex
            for ticket in self._tickets.values():
                if ticket.rid and not ticket.begun:
                    ticket.interrupted.set()
        return WeightReceipt(version=version, checksums=checksums)

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        ids = tuple(token_ids)
        self._refuse_unknown_ids(ids)
        if len(ids) > self._context_tokens:
            raise EngineRefused(f"{len(ids)} tokens exceed the window of {self._context_tokens} of {self.model_name}")
        return scores_of(await self._call(self._http.post("/generate", scoring_body(ids))))

    async def sleep(self) -> int:
        """Raises RuntimeError where not paused, or with requests in flight: the server would crash on it."""
        if self._going.is_open or self._tickets:
            raise RuntimeError("only a paused engine without requests can sleep")
        before = await used_gpu_bytes() if self._device == "cuda" else 0
        await self._call(self._http.post("/release_memory_occupation", {}))
        return max(0, before - await used_gpu_bytes()) if self._device == "cuda" else 0

    async def wake(self) -> None:
        await self._call(self._http.post("/resume_memory_occupation", {}))

    def close(self) -> None:
        """End a server of ours; leave another one alone. Who still waits gets EngineDied."""
        self._die(EngineDied(f"the engine of {self.model_name} was closed"))
        if self._server is not None:
            self._server.forget()

    # -- one request -----------------------------------------------------------------------------------------------

    async def _answer(self, request_id: str, ticket: Ticket) -> Completion:
        try:
            while not ticket.aborted:
                ticket.interrupted.clear()
                await _either(self._going.pass_through(ticket.priority), ticket.interrupted.wait())
                self._refuse_the_dead()
                if self._going.is_open and not ticket.aborted and await self._sample(ticket):
                    break
        finally:
            if self._tickets.get(request_id) is ticket:
                del self._tickets[request_id]
        self.prefilled_tokens += ticket.sampled.num_prefilled
        text = self._endings.text(ticket.sampled.token_ids, ticket.params.stop)
        return completion_of(ticket, text, self.model_name, self._versions)

    async def _sample(self, ticket: Ticket) -> bool:
        """One try; whether it is the answer. It isn't where the request was taken back before it had begun."""
        ticket.renew()
        reading = asyncio.create_task(self._read(ticket))
        interrupted = asyncio.create_task(ticket.interrupted.wait())
        try:
            await asyncio.wait({reading, interrupted}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
                return True
            return ticket.aborted or ticket.begun
        finally:
            rid, ticket.rid = ticket.rid, ""
            interrupted.cancel()
            if not reading.done():
                reading.cancel()
                self._run_errand(self._http.post("/abort_request", {"rid": rid}))

    async def _read(self, ticket: Ticket) -> None:
        body = body_of(
            ticket,
            seed=self._seed,
            stop_token_ids=self._stop_token_ids,
            vocab_size=self._vocab_size,
            namespace=self._namespace,
            whole=not self._incremental,
        )
        async for event in self._events(body):
            if "error" in event:
                raise EngineRefused(f"SGLang at {self._http.url} refused: {message_of(event)}")
            ticket.add(event)
        if ticket.sampled.finish is None:
            raise EngineDied(f"SGLang at {self._http.url} broke off an answer")

    async def _events(self, body: Json) -> Any:
        try:
            async for event in self._http.stream("/generate", body):
                yield event
        except EngineDied as error:
            self._die(error)
            raise

    async def _interrupt_later(self, ticket: Ticket) -> None:
        await asyncio.sleep(ABORT_GRACE_S)
        ticket.interrupted.set()

    # -- calls -----------------------------------------------------------------------------------------------------

    async def _call(self, call: Coroutine[Any, Any, Any]) -> Any:
        if self._death is not None:
            call.close()
            self._refuse_the_dead()
        try:
            return await call
        except EngineDied as error:
            self._die(error)
            raise

    def _run_errand(self, errand: Coroutine[Any, Any, Any]) -> None:
        """Something that nobody waits for."""

        async def run() -> None:
            with contextlib.suppress(EngineDied, EngineRefused):
                await errand

        task = asyncio.create_task(run())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def _die(self, death: EngineDied) -> None:
        if self._death is None:
            self._death = death
        self._going.open()  # who waits for the end of a pause

    def _refuse_the_dead(self) -> None:
        if self._death is not None:
            raise EngineDied(str(self._death))

    def _refuse_what_cannot_run(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> None:
        needed = len(prompt_ids) + params.max_new_tokens
        if needed > self._context_tokens:
            raise EngineRefused(
                f"a prompt of {len(prompt_ids)} tokens and {params.max_new_tokens} new ones exceed the window of "
                f"{self._context_tokens} tokens of {self.model_name}"
            )
        self._refuse_unknown_ids(prompt_ids)
        if params.max_new_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1 or "" in params.stop:
            raise EngineRefused(f"these sampling parameters can't be served: {params}")

    def _refuse_unknown_ids(self, token_ids: tuple[int, ...]) -> None:
        """SGLang takes ids beyond the vocabulary, and crashes on them or not."""
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise EngineRefused(f"one or more ids from 0 to {self._vocab_size - 1} are needed")


def window_of(config: SglangConfig, renderer: Renderer) -> int:
    if config.max_context_tokens > renderer.context_tokens:
        raise ValueError(
            f"max_context_tokens: {config.max_context_tokens} exceeds the model's window of "
            f"{renderer.context_tokens} tokens; give that or less (0: all of it)"
        )
    return config.max_context_tokens or renderer.context_tokens


async def _either(*waits: Coroutine[Any, Any, Any]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
