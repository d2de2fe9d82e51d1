"""vLLM's AsyncLLM as an Engine: async calls on one event loop; vLLM's core has its own process with the model.

    generate, abort    -> vllm_generation: a request per request_id -> AsyncLLM.generate, first and last output
    begin .. commit    -> vllm_push: the weight-transfer calls; vLLM knows the version of every token
    a dead core        -> EngineDied, for waiting and later calls

New weights during requests: with `recompute_kv_on_sync` all cached keys and values are dropped when a push begins.
Without it kept requests continue with theirs, and a new salt of the prefix cache keeps new requests from using them;
requests that have not begun are withdrawn and sent again with that salt.
"""

import asyncio
from collections.abc import Callable, Sequence

from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.context_limit import ContextLimit
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.vllm.options import Adapter, VllmStart
from grmpipe.models.engines.vllm.process import VllmProcess
from grmpipe.models.engines.vllm.vllm_generation import VllmGeneration
from grmpipe.models.engines.vllm.vllm_push import VllmPushes
from grmpipe.models.engines.vllm.vllm_requests import encode_versions, refuse_what_cannot_run
from grmpipe.models.lm.causal_lm import outline_causal_lm
from grmpipe.models.lm.lora import find_targets
from grmpipe.models.lm.moe.expert_routing import Routers
from grmpipe.models.settings import LoraConfig, VllmConfig
from grmpipe.models.types import (
    Completion,
    GroupLink,
    RequestContext,
    SamplingParams,
    WeightBucket,
    WeightReceipt,
    ignore_first_token,
)


class VllmEngine:
    """An engine for any model that vLLM runs, on a CPU or the GPUs of a slot. Bound to the event loop that first calls
    it.

    Blocks while vLLM starts (seconds to minutes). Raises ValueError for unusable options and models.
    """

    def __init__(self, spec: EngineSpec, config: VllmConfig) -> None:
        renderer = Renderer.load(spec.path, spec.chat_template)
        self.model_name = spec.role
        self._config, self._takes_weights = config, spec.takes_weights
        self._window = ContextLimit.of(spec.role, renderer, config.max_context_tokens)
        experts = Routers.of(outline_causal_lm(spec.path)).shape.layers if spec.return_routed_experts else ()
        adapters, window = find_adapters(spec), self._window.tokens
        start = VllmStart(spec=spec, config=config, context_tokens=window, adapters=adapters)
        models = dict.fromkeys((spec.role, *adapters))
        self._process = VllmProcess(start, encode_versions(dict.fromkeys(models, 0)))
        self._pushes = {model: VllmPushes(self._process, model if model in adapters else "") for model in models}
        self._is_shared = len(models) > 1
        self._generation = VllmGeneration(
            self._process,
            spec.role,
            renderer,
            seed=spec.seed,
            window=self._window.tokens,
            expert_layers=experts,
            adapters=adapters,
        )
        self._paused: set[str] = set()  # models
        self._committing = asyncio.Lock()

    @property
    def version(self) -> int:
        return self._generation.versions[self.model_name]

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens of finished requests that no prefix cache had."""
        return self._generation.num_prefilled

    def process_ids(self) -> list[int]:
        """The process of vLLM's engine core, which holds the model or starts the workers that do."""
        return self._process.ids

    def describe_start(self) -> str:
        """Its room for keys and values, its CUDA graphs, the seconds of the start."""
        return self._process.started

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        """Sample one completion. A request_id that is already in flight gets that request's answer."""
        self._process.refuse_the_dead()
        ids = tuple(prompt_ids)
        self._window.check_request(ids, params)
        refuse_what_cannot_run(params)
        return await self._generation.generate(ids, params, context, on_first_token)

    async def abort(self, request_id: str) -> None:
        self._process.refuse_the_dead()
        await self._generation.abort(request_id)

    async def pause(self, adapter: str = "") -> None:
        """Of several models one is paused: no request to it is sent, and those that have begun go on with its present
        weights until others are committed. vLLM pauses all of its requests or none.
        """
        model = adapter or self.model_name
        if self._is_shared:
            self._process.refuse_the_dead()
            self._generation.hold(model)
        else:
            await self._process.pause()
        self._paused.add(model)

    async def resume(self, adapter: str = "") -> None:
        """Resume. After an uncommitted push the weights are mixed."""
        model = adapter or self.model_name
        if self._pushes[model].is_open:
            await self._pushes[model].drop()
        if not self._is_shared:
            await self._process.resume()
        self._generation.release(model)
        self._paused.discard(model)

    async def begin_weights(self, link: GroupLink | None = None, adapter: str = "") -> None:
        """Raises RuntimeError if not paused, or for an engine without `takes_weights`."""
        self._process.refuse_the_dead()
        if not ((model := adapter or self.model_name) in self._paused and self._takes_weights):
            raise RuntimeError("weights may only be sent to a paused engine that takes weights")
        await self._process.wait_until_ready()
        await self._pushes[model].drop()
        await self._generation.forget_cached_prompts(self._config.recompute_kv_on_sync, model)
        await self._pushes[model].begin(link)

    async def load_bucket(self, bucket: WeightBucket, adapter: str = "") -> None:
        await self._pushes[adapter or self.model_name].load(bucket)

    async def commit_weights(self, version: int, adapter: str = "") -> WeightReceipt:
        """Of several models: all requests are kept for the moment in which the adapter and its version change."""
        model = adapter or self.model_name
        async with self._committing:
            versions = self._generation.versions | {model: version}
            if self._is_shared:
                await self._process.pause()
            try:
                receipt = await self._pushes[model].commit(version, encode_versions(versions))
            finally:
                if self._is_shared:
                    await self._process.resume()
            self._generation.versions = versions
        return receipt

    async def score(self, token_ids: Sequence[int], adapter: str = "") -> tuple[float, ...]:
        self._process.refuse_the_dead()
        ids = tuple(token_ids)
        self._window.check_text(ids)
        if (model := adapter or self.model_name) in self._paused:
            raise RuntimeError("a paused engine can't score")
        if len(ids) == 1:
            return ()
        return await self._process.call(self._generation.score(ids, model))

    async def sleep(self) -> int:
        self._process.refuse_the_dead()
        if not (self._generation.idle and self._paused):
            raise RuntimeError("only a paused engine without requests may sleep")
        return await self._process.sleep()

    async def wake(self) -> None:
        await self._process.wake()
        self._paused.add(self.model_name)

    def close(self) -> None:
        """End vLLM's processes; waiters get EngineDied. Blocks for a few seconds at most."""
        self._process.close()
        for pushes in self._pushes.values():
            pushes.close()


def find_adapters(spec: EngineSpec) -> dict[str, Adapter]:
    """The adapters that the engine applies itself, by the name of their model."""

    def describe(lora: LoraConfig) -> Adapter:
        targets = tuple(find_targets(outline_causal_lm(spec.path), lora))
        return Adapter(rank=lora.rank, alpha=lora.alpha, targets=targets, path=lora.path)

    return {name: describe(lora) for name, lora in spec.adapters.items()}
