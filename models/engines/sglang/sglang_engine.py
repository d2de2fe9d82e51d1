"""An SGLang server as an Engine, started here or already running: async calls over HTTP.

    generate, abort -> SglangGeneration: a stream of /generate per request -> Completion
    pause .. commit -> /pause_generation (in_place or retract), sglang_weights: the server's own calls
    a server that is gone -> EngineDied, for waiting and later calls

New weights during requests: with `recompute_kv_on_sync` the server retracts its requests and drops all cached keys and
values. Without it kept requests continue with theirs, and a new namespace of the prefix cache keeps new requests from
using them; requests that have not begun are withdrawn and sent again in the new namespace.

With adapters (sglang_adapters.py) a push carries one alone, and a request keeps to its end the version that it was sent
with. Of several models one is paused here: no request to it is sent, and the server goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.context_limit import ContextLimit
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.sglang.http_client import SglangHttp, check_joined, parse_error, read_api_key
from grmpipe.models.engines.sglang.server import FIRST_VERSION, SglangServer, SglangStart
from grmpipe.models.engines.sglang.sglang_adapters import SglangAdapters
from grmpipe.models.engines.sglang.sglang_requests import (
    SglangRequest,
    make_body,
    make_completion,
    make_scoring_body,
    read_prompt_scores,
    read_scores,
)
from grmpipe.models.engines.sglang.sglang_weights import SglangWeights
from grmpipe.models.engines.shared_requests import SharedRequests
from grmpipe.models.engines.stop_conditions import StopConditions
from grmpipe.models.request_gates import AdmissionGate
from grmpipe.models.settings import SglangConfig
from grmpipe.models.types import (
    Completion,
    EngineDied,
    EngineRefused,
    GroupLink,
    PromptScoring,
    RequestContext,
    SamplingParams,
    VersionSpan,
    WeightBucket,
    WeightReceipt,
    ignore_first_token,
)

CONFIRM_EVERY_S = 30.0


class SglangEngine:
    """An engine for any model that SGLang serves. Bound to the event loop that first calls it; see `start` and `join`.

    Needs SGLang 0.5.23 or later: version spans, weight sessions.
    """

    def __init__(
        self,
        http: SglangHttp,
        spec: EngineSpec,
        config: SglangConfig,
        renderer: Renderer,
        *,
        server_version: str = FIRST_VERSION,
        incremental: bool = True,
        served_path: str | None = None,
        server: SglangServer | None = None,
        same_machine: bool = False,
    ) -> None:
        """server_version: the server's name of its first weights. incremental: its events hold only new tokens.
        served_path: the model that it must continue to name (None: no other process can change it). server: ended with
        the engine. same_machine: it can open local files.
        """
        self.model_name = spec.role
        self.version = 0
        self._http, self._server = http, server
        self._config, self._device = config, spec.device
        self._window = ContextLimit.of(spec.role, renderer, config.max_context_tokens)
        # A quantized parameter may not change after a small step, and a CPU has no checksums.
        tells_parameters = spec.device != "cpu" and not config.options.get("quantization")
        self._weights = SglangWeights(http, spec.path, same_machine, tells_parameters)
        self._generation = SglangGeneration(http, spec, renderer, incremental=incremental, first_version=server_version)
        self._adapters = self._generation.adapters
        self._served_path, self._confirmed_at = served_path, -CONFIRM_EVERY_S

    @classmethod
    def start(cls, spec: EngineSpec, config: SglangConfig) -> SglangEngine:
        """Start a server, which ends with this process. Blocks until it answers (tens of seconds).

        Raises ValueError for an unusable model or option, RuntimeError with the server's last lines.
        """
        renderer = Renderer.load(spec.path, spec.chat_template)
        window = ContextLimit.of(spec.role, renderer, config.max_context_tokens)
        server = SglangServer(SglangStart(spec=spec, config=config, context_tokens=window.tokens))
        http = SglangHttp(server.url, server.key, server.post_mortem)
        incremental = bool(config.options.get("incremental-streaming-output", True))
        return cls(http, spec, config, renderer, incremental=incremental, server=server, same_machine=True)

    @classmethod
    def join(cls, url: str, spec: EngineSpec, config: SglangConfig) -> SglangEngine:
        """Join a running server, which only this run may use: it keeps running, with the weights that it was started
        with.

        Raises ValueError that names engine.sglang.urls if it doesn't serve the model.
        """
        renderer = Renderer.load(spec.path, spec.chat_template)
        key = read_api_key()
        window = ContextLimit.of(spec.role, renderer, config.max_context_tokens)
        joined = check_joined(url, key, spec.path, window.tokens)
        return cls(
            SglangHttp(url, key),
            replace(spec, device="elsewhere"),
            config,
            renderer,
            server_version=joined.version,
            incremental=joined.incremental,
            served_path=joined.model_path,
        )

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens of finished requests that no prefix cache had."""
        return self._generation.num_prefilled

    def describe_start(self) -> str:
        """The seconds of the start of a server started here, its room for keys and values."""
        return self._server.started if self._server is not None else ""

    def process_ids(self) -> list[int]:
        """The process id of a server started here: the head of a process group."""
        return [self._server.process_id] if self._server is not None else []

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        """Sample one completion. A request_id that is already in flight gets that request's answer."""
        ids = tuple(prompt_ids)
        self._http.refuse_the_dead()
        self._window.check_request(ids, params)
        await self._confirm_model()
        if params.scoring is not None:
            return await self._generation.score(ids, params.scoring, context)
        return await self._generation.generate(ids, params, context, on_first_token)

    async def abort(self, request_id: str) -> None:
        await self._generation.abort(request_id)

    async def pause(self, adapter: str = "") -> None:
        self._generation.gates[adapter or self.model_name].close()
        if self._generation.is_shared:
            self._http.refuse_the_dead()
            return
        # A request keeps its adapter: there is nothing to compute again.
        mode = "retract" if self._config.recompute_kv_on_sync and not self._adapters.loras else "in_place"
        await self._http.post("/pause_generation", {"mode": mode})
        # The answer came before the scheduler had the abort; the scheduler's answer comes later.
        await self._http.get("/server_info")

    async def resume(self, adapter: str = "") -> None:
        """Resume. After an uncommitted push the weights are mixed; an adapter is the last one."""
        if not self._generation.is_shared:
            await self._http.post("/continue_generation", {})
        self._generation.gates[adapter or self.model_name].open()

    async def begin_weights(self, link: GroupLink | None = None, adapter: str = "") -> None:
        """Raises RuntimeError if not paused, ConnectionError if the group doesn't form."""
        self._refuse_the_unpaused(model := adapter or self.model_name)
        if self._adapters.loras:
            self._adapters.begin(model, link)
        else:
            await self._weights.begin(link)

    async def load_bucket(self, bucket: WeightBucket, adapter: str = "") -> None:
        """Raises ValueError that names a tensor that doesn't fit, ConnectionError if a broadcast broke off."""
        self._refuse_the_unpaused(model := adapter or self.model_name)
        if self._adapters.loras:
            await self._adapters.load(model, bucket)
        else:
            await self._weights.load(bucket)

    async def commit_weights(self, version: int, adapter: str = "") -> WeightReceipt:
        """Raises RuntimeError if the server then reports another version."""
        if self._adapters.loras:
            return await self._adapters.commit(adapter or self.model_name, version)
        receipt = await self._weights.commit(version)
        self.version = version
        self._served_path = None  # now a file's folder; from here on the version identifies it
        recompute = self._config.recompute_kv_on_sync
        self._generation.adopt(version, forget_prompts=not recompute)
        if recompute:
            await self._http.post("/flush_cache", {})
        return receipt

    async def score(self, token_ids: Sequence[int], adapter: str = "") -> tuple[float, ...]:
        ids = tuple(token_ids)
        self._window.check_text(ids)
        with self._adapters.use(adapter or self.model_name) as version:
            answer = await self._http.post("/generate", make_scoring_body(ids, adapter=version.name))
        with self._http.die_if_unreadable():
            return read_scores(answer, len(ids))

    async def sleep(self) -> int:
        """Raises RuntimeError if not paused, or with requests in flight: the server would crash."""
        if self._generation.gates[self.model_name].is_open or self._generation.requests:
            raise RuntimeError("only a paused engine without requests can sleep")
        before = await measure_gpu_bytes() if self._device == "cuda" else 0
        await self._http.post("/release_memory_occupation", {})
        return max(0, before - await measure_gpu_bytes()) if self._device == "cuda" else 0

    async def wake(self) -> None:
        await self._http.post("/resume_memory_occupation", {})

    def close(self) -> None:
        """End a server started here; leave a joined one running. Waiters get EngineDied."""
        self._http.die(f"was closed with the engine of {self.model_name}")
        if self._server is not None:
            self._server.forget()

    async def _confirm_model(self) -> None:
        """Check that a joined server under this URL still has the same model."""
        now = asyncio.get_running_loop().time()
        if self._served_path is None or now - self._confirmed_at < CONFIRM_EVERY_S:
            return
        served = (await self._http.get("/model_info")).get("model_path")
        if served != self._served_path:
            raise RuntimeError(
                f"engine.sglang.urls: the server at {self._http.url} was joined for {self._served_path!r}, but now "
                f"serves {served!r}"
            )
        self._confirmed_at = now

    def _refuse_the_unpaused(self, model: str) -> None:
        if self._generation.gates[model].is_open:
            raise RuntimeError("weights may only be sent to a paused engine")


MIB = 2**20


async def measure_gpu_bytes() -> int:
    """Used bytes of the GPUs visible to this process, by nvidia-smi. 0 if there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if visible:
        command += ["-i", visible]
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        return 0
    output, _ = await process.communicate()
    return sum(int(line) * MIB for line in output.decode().split() if line.isdigit())


# -- requests in flight ------------------------------------------------------------------------------------------------
# A request waits here, not at the server, while generation is paused (a paused server answers no abort, and would cache
# a new prompt under older weights), and while a sibling with the same prompt waits for its first token: after that the
# server's prefix cache has the prompt.


ABORT_GRACE_S = 2.0  # for the server's answer to an abort: it has all tokens


class SglangGeneration:
    """The requests of one server. gates: of each model; while one is closed, no request to it is sent.

    first_version: the server's name of our version 0. incremental: the server's events hold only new tokens.
    """

    def __init__(
        self,
        http: SglangHttp,
        spec: EngineSpec,
        renderer: Renderer,
        *,
        incremental: bool,
        first_version: str,
    ) -> None:
        self.num_prefilled = 0  # prompt tokens of finished requests that no prefix cache had
        self._http, self._model_name = http, spec.role
        self._endings = StopConditions(renderer.decode, renderer.stop_token_ids, renderer.special)
        self._vocab_size = renderer.vocab_size
        self._seed, self._incremental = spec.seed, incremental
        self._versions = {first_version: 0}  # server's name of a version -> ours, the newest last
        self._namespace = uuid.uuid4().hex  # the prefix cache's; under a new one no earlier prompt is found
        self.requests: SharedRequests[SglangRequest] = SharedRequests()
        self._prefilling: dict[tuple[str, tuple[int, ...]], asyncio.Event] = {}  # set once the first token came
        self._errands: set[asyncio.Task[None]] = set()
        self.gates = {model: AdmissionGate() for model in (spec.role, *spec.adapters)}
        self.is_shared = len(self.gates) > 1
        self.adapters = SglangAdapters(http, spec, self._run_errand)
        http.on_death = self._wake  # those who wait for the end of a pause

    def _wake(self) -> None:
        for gate in self.gates.values():
            gate.open()

    def adopt(self, version: int, forget_prompts: bool) -> None:
        """Adopt new weights under the name of `version`. forget_prompts: new requests must not use the server's cache;
        requests that have not begun are sent again.
        """
        self._versions.pop(str(version), None)
        self._versions[str(version)] = version
        if forget_prompts:
            self._namespace = uuid.uuid4().hex
            for ticket in self.requests:
                if ticket.rid and not ticket.begun:
                    ticket.interrupted.set()

    async def generate(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None],
    ) -> Completion:
        """Sample one completion. A request_id that is already in flight gets that request's answer."""
        model = context.adapter or self._model_name
        return await self.requests.join(
            context.request_id,
            lambda: SglangRequest(
                prompt_ids, params, context.priority, model=model, version=self.adapters.find(model).number
            ),
            self._answer,
            on_first_token,
        )

    async def score(self, prompt_ids: tuple[int, ...], scoring: PromptScoring, context: RequestContext) -> Completion:
        """Score a prompt, once no pause holds it."""
        model = context.adapter or self._model_name
        await self.gates[model].pass_through(context.priority)
        self._http.refuse_the_dead()
        version = list(self._versions.values())[-1]
        with self.adapters.use(model) as served:
            version = served.number if self.adapters.loras else version
            answer = await self._http.post("/generate", make_scoring_body(prompt_ids, scoring.top_k, served.name))
        span = VersionSpan(model=model, version=version, start=0, end=0)
        with self._http.die_if_unreadable():
            scores = read_prompt_scores(answer, len(prompt_ids), scoring)
        return Completion(
            token_ids=(),
            logprobs=(),
            text="",
            finish_reason="stop",
            versions=(span,),
            scores=scores,
        )

    async def abort(self, request_id: str) -> None:
        ticket = self.requests.get(request_id)
        if ticket is None or ticket.aborted:
            return
        ticket.aborted = True
        if ticket.rid and (self.is_shared or self.gates[ticket.model].is_open):
            self._run_errand(_interrupt_later(ticket))
            await self._http.post("/abort_request", {"rid": ticket.rid})
        else:
            ticket.interrupted.set()

    async def _answer(self, ticket: SglangRequest) -> Completion:
        while not ticket.aborted:
            ticket.interrupted.clear()
            await _either(self._way_clear(ticket), ticket.interrupted.wait())
            self._http.refuse_the_dead()
            clear = self.gates[ticket.model].is_open and ticket.prompt not in self._prefilling
            if clear and not ticket.aborted and await self._sample(ticket):
                break
        self.num_prefilled += ticket.sampled.num_prefilled
        text, stop_text = self._endings.cut_text(ticket.sampled.token_ids, ticket.params.stop)
        with self._http.die_if_unreadable():
            versions = self._versions
            if self.adapters.loras:  # the server's name of the base -> the adapter's version
                versions = dict.fromkeys(versions, ticket.version)
            completion = make_completion(ticket, text, ticket.model, versions)
        return replace(completion, stop_text=stop_text)

    async def _way_clear(self, ticket: SglangRequest) -> None:
        await self.gates[ticket.model].pass_through(ticket.priority)
        while (sibling := self._prefilling.get(ticket.prompt)) is not None:
            await sibling.wait()

    async def _sample(self, ticket: SglangRequest) -> bool:
        """One try. Returns whether it is the answer: not if the request was withdrawn before it began."""
        prefilled = self._prefilling.setdefault(ticket.prompt, asyncio.Event())
        ticket.renew(on_begin=partial(self._prefill_over, ticket.prompt, prefilled))
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
            self._prefill_over(ticket.prompt, prefilled)
            interrupted.cancel()
            if not reading.done():
                reading.cancel()
                self._run_errand(self._http.post("/abort_request", {"rid": rid}))

    def _prefill_over(self, prompt: tuple[str, tuple[int, ...]], prefilled: asyncio.Event) -> None:
        prefilled.set()
        if self._prefilling.get(prompt) is prefilled:
            del self._prefilling[prompt]

    async def _read(self, ticket: SglangRequest) -> None:
        stop, stop_token_ids = self._endings.split(ticket.params.stop)
        with self.adapters.use(ticket.model) as served:
            ticket.version = served.number
            body = make_body(
                ticket,
                seed=self._seed,
                stop=stop,
                stop_token_ids=stop_token_ids,
                vocab_size=self._vocab_size,
                namespace=self._namespace,
                whole=not self._incremental,
                adapter=served.name,
            )
            async for event in self._http.stream("/generate", body):
                if "error" in event:
                    raise EngineRefused(f"SGLang at {self._http.url} refused: {parse_error(event)}")
                with self._http.die_if_unreadable():
                    ticket.add(event)
        if ticket.sampled.finish is None:
            raise EngineDied(f"SGLang at {self._http.url} aborted an answer")

    def _run_errand(self, errand: Coroutine[Any, Any, Any]) -> None:
        """Run a task that no caller waits for."""

        async def run() -> None:
            with contextlib.suppress(EngineDied, EngineRefused):
                await errand

        task = asyncio.create_task(run())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)


async def _either(*waits: Coroutine[Any, Any, Any]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _interrupt_later(ticket: SglangRequest) -> None:
    await asyncio.sleep(ABORT_GRACE_S)
    ticket.interrupted.set()
