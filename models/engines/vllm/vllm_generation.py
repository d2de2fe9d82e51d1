"""Requests in flight at one AsyncLLM: sent, withdrawn, aborted, scored. Knows weights only by version."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.shared_requests import SharedRequests
from grmpipe.models.engines.stop_conditions import StopConditions
from grmpipe.models.engines.vllm.options import Adapter
from grmpipe.models.engines.vllm.process import VllmProcess
from grmpipe.models.engines.vllm.vllm_requests import (
    VllmRequest,
    VllmSample,
    adapter_request,
    make_sampling,
    make_scoring,
    read_experts,
    read_finish_reason,
    read_prompt_scores,
    read_scores,
    read_spans,
    read_top,
)
from grmpipe.models.types import Completion, EngineDied, EngineRefused, PromptScoring, RequestContext, SamplingParams

if TYPE_CHECKING:
    from vllm import RequestOutput

FIRST_OF_ALL = -(1 << 62)  # a priority before all others


class VllmGeneration:
    """The requests of one AsyncLLM.

    versions:      of each model's weights, for tokens of which vLLM doesn't say it.
    window:        the most tokens of a request.
    expert_layers: layers whose experts completions have.
    """

    def __init__(
        self,
        process: VllmProcess,
        model_name: str,
        renderer: Renderer,
        *,
        seed: int,
        window: int,
        expert_layers: Sequence[int],
        adapters: Mapping[str, Adapter],
    ) -> None:
        self.versions = dict.fromkeys([model_name, *adapters], 0)
        self.num_prefilled = 0  # prompt tokens of finished requests that no prefix cache had
        self._process, self._model_name = process, model_name
        self._endings = StopConditions(renderer.decode, renderer.stop_token_ids, renderer.special)
        self._seed = seed
        self._window, self._expert_layers = window, expert_layers
        self._adapters = {
            name: adapter_request(name, number, adapter.path)
            for number, (name, adapter) in enumerate(adapters.items(), 1)
        }
        self._held: set[str] = set()  # models whose requests aren't sent
        self._release = asyncio.Event()
        self._requests: SharedRequests[VllmRequest] = SharedRequests()
        self._scores = itertools.count()
        self._prefix_salts: Counter[str] = Counter()

    @property
    def idle(self) -> bool:
        return not self._requests

    async def generate(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None],
    ) -> Completion:
        """Sample one completion. A request_id that is already in flight gets that request's answer."""
        model = context.adapter or self._model_name
        make = partial(VllmRequest, prompt_ids, params, context.priority, request_id=context.request_id, model=model)
        return await self._requests.join(context.request_id, make, self._answer, on_first_token)

    async def abort(self, request_id: str) -> None:
        if (ticket := self._requests.get(request_id)) is not None:
            ticket.aborted = True
            self._look_again()
            with contextlib.suppress(EngineDied):  # its waiters then get the death
                await self._process.call(self._process.llm.abort(request_id))

    def hold(self, model: str) -> None:
        """Send no more requests to a model, until `release`; those that have begun go on."""
        self._held.add(model)

    def release(self, model: str) -> None:
        self._held.discard(model)
        self._look_again()

    def _look_again(self) -> None:
        """Let requests that aren't sent see what changed."""
        self._release.set()
        self._release = asyncio.Event()

    async def score(self, ids: tuple[int, ...], model: str) -> tuple[float, ...]:
        await self._process.ready()
        output, last = await self._scored(ids, model, f"score-{next(self._scores)}", FIRST_OF_ALL)
        return read_scores(output, last)

    async def _scored(
        self, ids: tuple[int, ...], model: str, name: str, priority: int, top_k: int = 0
    ) -> tuple[RequestOutput, tuple[int, ...]]:
        """vLLM's output for scored tokens, and the last one if it isn't in the prompt. It computes scored prompts
        completely: it reads no cached prefix.
        """
        from vllm.inputs.engine import tokens_input

        # vLLM reserves a place for a new token: a prompt that fills the window is scored without its last token.
        prompt, last = (ids, ()) if len(ids) < self._window else (ids[:-1], ids[-1:])
        tokens = tokens_input(list(prompt), cache_salt=str(self._prefix_salts[model]))
        async for output in self._process.llm.generate(
            tokens, make_scoring(last, top_k), name, lora_request=self._adapters.get(model), priority=priority
        ):
            return output, last
        raise AssertionError("vLLM ended a request without an output")

    async def forget_cached_prompts(self, recompute: bool, model: str) -> None:
        """Keep requests from reading keys and values of a model's present weights, which are about to change.
        recompute: also those that have begun, to whatever model.

        The new salt comes after the reset, so nothing that vLLM or its connector (a store on the host, on disk, on
        other machines) still holds is found under it. Raises RuntimeError if they keep some.
        """
        process = self._process
        if recompute:
            dropped = await process.call(
                process.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            )
            if not dropped:
                raise RuntimeError(
                    "vLLM's KV connector keeps keys and values of the old weights; leave out "
                    "engine.vllm.options.kv_transfer_config, or type engine.vllm.recompute_kv_on_sync=false"
                )
            self._prefix_salts[model] += 1
            return
        self._prefix_salts[model] += 1
        waiting = [one for one in self._requests if one.model == model and not (one.begun or one.aborted)]
        for ticket in waiting:
            ticket.renewed = True
        await process.call(process.llm.abort([ticket.request_id for ticket in waiting]))

    async def _answer(self, ticket: VllmRequest) -> Completion:
        from vllm.exceptions import VLLMClientError, VLLMServerError

        try:
            await self._process.ready()
            while True:
                while ticket.model in self._held and not ticket.aborted:
                    await self._release.wait()
                sampled = await self._sample(ticket)
                if not ticket.renewed or sampled.finish_reason != "abort" or ticket.aborted:
                    break
        except VLLMServerError as error:
            raise self._process.death() from error
        except (VLLMClientError, ValueError) as error:
            raise EngineRefused(f"vLLM refuses the request: {error}") from error
        self.num_prefilled += len(ticket.prompt_ids) - sampled.num_cached_tokens
        return self._completion(ticket, sampled)

    async def _sample(self, ticket: VllmRequest) -> VllmSample:
        """One try. Its first step, up to vLLM's list of requests, doesn't wait, so no abort can come before it."""
        from vllm.inputs.engine import tokens_input

        if ticket.aborted:
            return VllmSample(finish_reason="abort")
        ticket.renewed = False
        if ticket.params.scoring is not None:
            return await self._score_prompt(ticket, ticket.params.scoring)
        sampled = VllmSample()
        prompt = tokens_input(list(ticket.prompt_ids), cache_salt=str(self._prefix_salts[ticket.model]))
        stop, stop_token_ids = self._endings.split(ticket.params.stop)
        sampling = make_sampling(replace(ticket.params, stop=stop), self._seed, stop_token_ids)
        async for output in self._process.llm.generate(
            prompt,
            sampling,
            ticket.request_id,
            lora_request=self._adapters.get(ticket.model),
            priority=ticket.priority,
        ):
            sampled.add(output)
            if sampled.token_ids:
                ticket.begin()
        return sampled

    async def _score_prompt(self, ticket: VllmRequest, scoring: PromptScoring) -> VllmSample:
        ids, window = ticket.prompt_ids, self._window
        if len(ids) == window and scoring.top_k:
            raise EngineRefused(f"vLLM gives likely tokens for prompts of at most {window - 1} tokens, got {len(ids)}")
        output, last = await self._scored(ids, ticket.model, ticket.request_id, ticket.priority, scoring.top_k)
        if output.outputs[0].finish_reason == "abort":
            return VllmSample(finish_reason="abort")
        return VllmSample(finish_reason="stop", scores=read_prompt_scores(output, last, scoring))

    def _completion(self, ticket: VllmRequest, sampled: VllmSample) -> Completion:
        text, stop_text = self._endings.cut_text(sampled.token_ids, ticket.params.stop)
        top_k = ticket.params.top_logprobs
        return Completion(
            token_ids=tuple(sampled.token_ids),
            logprobs=tuple(sampled.likely_logprobs[:: 1 + top_k]),
            text=text,
            stop_text=stop_text,
            finish_reason=read_finish_reason(sampled),
            versions=read_spans(sampled, ticket.model, self.versions[ticket.model]),
            experts_TLK=read_experts(sampled, self._expert_layers),
            cached_tokens=sampled.num_cached_tokens,
            scores=sampled.scores,
            top=read_top(sampled, top_k),
        )
