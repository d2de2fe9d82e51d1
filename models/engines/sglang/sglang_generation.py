"""Requests in flight at one SGLang server: sent, held back, withdrawn, aborted. Knows weights only by version.

A request waits here, not at the server, while generation is paused (a paused server answers no abort, and would cache a
new prompt under older weights), and while a sibling with the same prompt waits for its first token: after that the
server's prefix cache has the prompt.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.sglang.http_client import SglangHttp, parse_error
from grmpipe.models.engines.sglang.sglang_requests import (
    SglangRequest,
    make_body,
    make_completion,
    make_scoring_body,
    read_prompt_scores,
)
from grmpipe.models.engines.shared_requests import SharedRequests
from grmpipe.models.engines.stop_conditions import StopConditions
from grmpipe.models.request_gates import AdmissionGate
from grmpipe.models.types import (
    Completion,
    EngineDied,
    EngineRefused,
    PromptScoring,
    RequestContext,
    SamplingParams,
    VersionSpan,
)

ABORT_GRACE_S = 2.0  # for the server's answer to an abort: it has all tokens


class SglangGeneration:
    """The requests of one server. going: closed, it sends nothing.

    first_version: the server's name of our version 0. incremental: the server's events hold only new tokens.
    """

    def __init__(
        self,
        http: SglangHttp,
        model_name: str,
        renderer: Renderer,
        *,
        seed: int,
        incremental: bool,
        first_version: str,
    ) -> None:
        self.num_prefilled = 0  # prompt tokens of finished requests that no prefix cache had
        self._http, self._model_name = http, model_name
        self._endings = StopConditions(renderer.decode, renderer.stop_token_ids, renderer.special)
        self._vocab_size = renderer.vocab_size
        self._seed, self._incremental = seed, incremental
        self._versions = {first_version: 0}  # server's name of a version -> ours, the newest last
        self._namespace = uuid.uuid4().hex  # the prefix cache's; under a new one no earlier prompt is found
        self.requests: SharedRequests[SglangRequest] = SharedRequests()
        self._prefilling: dict[tuple[int, ...], asyncio.Event] = {}  # set once the first token came
        self._errands: set[asyncio.Task[None]] = set()
        self.going = AdmissionGate()
        http.on_death = self.going.open  # wakes those who wait for the end of a pause

    @property
    def paused(self) -> bool:
        return not self.going.is_open

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
        return await self.requests.join(
            context.request_id,
            lambda: SglangRequest(prompt_ids, params, context.priority),
            self._answer,
            on_first_token,
        )

    async def score(self, prompt_ids: tuple[int, ...], scoring: PromptScoring, priority: int) -> Completion:
        """Score a prompt, once no pause holds it."""
        await self.going.pass_through(priority)
        self._http.refuse_the_dead()
        version = list(self._versions.values())[-1]
        answer = await self._http.post("/generate", make_scoring_body(prompt_ids, scoring.top_k))
        span = VersionSpan(model=self._model_name, version=version, start=0, end=0)
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
        if ticket.rid and not self.paused:
            self._run_errand(_interrupt_later(ticket))
            await self._http.post("/abort_request", {"rid": ticket.rid})
        else:
            ticket.interrupted.set()

    async def _answer(self, ticket: SglangRequest) -> Completion:
        while not ticket.aborted:
            ticket.interrupted.clear()
            await _either(self._way_clear(ticket), ticket.interrupted.wait())
            self._http.refuse_the_dead()
            clear = not self.paused and ticket.prompt_ids not in self._prefilling
            if clear and not ticket.aborted and await self._sample(ticket):
                break
        self.num_prefilled += ticket.sampled.num_prefilled
        text, stop_text = self._endings.cut_text(ticket.sampled.token_ids, ticket.params.stop)
        with self._http.die_if_unreadable():
            completion = make_completion(ticket, text, self._model_name, self._versions)
        return replace(completion, stop_text=stop_text)

    async def _way_clear(self, ticket: SglangRequest) -> None:
        await self.going.pass_through(ticket.priority)
        while (sibling := self._prefilling.get(ticket.prompt_ids)) is not None:
            await sibling.wait()

    async def _sample(self, ticket: SglangRequest) -> bool:
        """One try. Returns whether it is the answer: not if the request was withdrawn before it began."""
        prefilled = self._prefilling.setdefault(ticket.prompt_ids, asyncio.Event())
        ticket.renew(on_begin=partial(self._prefill_over, ticket.prompt_ids, prefilled))
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
            self._prefill_over(ticket.prompt_ids, prefilled)
            interrupted.cancel()
            if not reading.done():
                reading.cancel()
                self._run_errand(self._http.post("/abort_request", {"rid": rid}))

    def _prefill_over(self, prompt_ids: tuple[int, ...], prefilled: asyncio.Event) -> None:
        prefilled.set()
        if self._prefilling.get(prompt_ids) is prefilled:
            del self._prefilling[prompt_ids]

    async def _read(self, ticket: SglangRequest) -> None:
        stop, stop_token_ids = self._endings.split(ticket.params.stop)
        body = make_body(
            ticket,
            seed=self._seed,
            stop=stop,
            stop_token_ids=stop_token_ids,
            vocab_size=self._vocab_size,
            namespace=self._namespace,
            whole=not self._incremental,
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
