"""vLLM's AsyncLLM as an Engine: async calls on one event loop; vLLM's core has its own process with the model.

    generate, abort    -> vllm_generation: a request per request_id -> AsyncLLM.generate, first and last output
    begin .. commit    -> vllm_push: the weight-transfer calls; vLLM knows the version of every token
    a dead core        -> EngineDied, for waiting and later calls

New weights during requests: with `recompute_kv_on_sync` all cached keys and values are dropped when a push begins.
Without it kept requests continue with theirs, and a new salt of the prefix cache keeps new requests from using them;
requests that have not begun are withdrawn and sent again with that salt.
"""

from collections.abc import Callable, Sequence

from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.context_limit import ContextLimit
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.vllm.options import Adapters, VllmStart
from grmpipe.models.engines.vllm.process import VllmProcess
from grmpipe.models.engines.vllm.vllm_generation import VllmGeneration
from grmpipe.models.engines.vllm.vllm_push import VllmPushes
from grmpipe.models.engines.vllm.vllm_requests import refuse_what_cannot_run
from grmpipe.models.lm.causal_lm import outline_causal_lm
from grmpipe.models.lm.lora import find_targets
from grmpipe.models.lm.moe.expert_routing import Routers
from grmpipe.models.settings import VllmConfig
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
        self._process = VllmProcess(VllmStart(spec=spec, config=config, context_tokens=window, adapters=adapters))
        self._pushes = VllmPushes(self._process, has_adapters=adapters is not None)
        self._generation = VllmGeneration(
            self._process,
            spec.role,
            renderer,
            seed=spec.seed,
            window=self._window.tokens,
            expert_layers=experts,
            with_adapter=adapters is not None,
        )
        self._paused = False

    @property
    def version(self) -> int:
        return self._generation.version

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens of finished requests that no prefix cache had."""
        return self._generation.num_prefilled

    def process_ids(self) -> list[int]:
        """The process of vLLM's engine core, which holds the model or starts the workers that do."""
        return self._process.ids

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

    async def pause(self) -> None:
        await self._process.pause()
        self._paused = True

    async def resume(self) -> None:
        """Resume. After an uncommitted push the weights are mixed."""
        if self._pushes.is_open:
            await self._pushes.drop()
        await self._process.call(self._process.llm.resume_generation())
        self._paused = False

    async def begin_weights(self, link: GroupLink | None = None) -> None:
        """Raises RuntimeError if not paused, or for an engine without `takes_weights`."""
        self._process.refuse_the_dead()
        if not (self._paused and self._takes_weights):
            raise RuntimeError("weights may only be sent to a paused engine that takes weights")
        await self._process.wait_until_ready()
        await self._pushes.drop()
        await self._generation.forget_cached_prompts(self._config.recompute_kv_on_sync)
        await self._pushes.begin(link)

    async def load_bucket(self, bucket: WeightBucket) -> None:
        await self._pushes.load(bucket)

    async def commit_weights(self, version: int) -> WeightReceipt:
        receipt = await self._pushes.commit(version)
        self._generation.version = version
        return receipt

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        self._process.refuse_the_dead()
        ids = tuple(token_ids)
        self._window.check_text(ids)
        if self._paused:
            raise RuntimeError("a paused engine can't score")
        if len(ids) == 1:
            return ()
        return await self._process.call(self._generation.score(ids))

    async def sleep(self) -> int:
        self._process.refuse_the_dead()
        if not (self._generation.idle and self._paused):
            raise RuntimeError("only a paused engine without requests may sleep")
        return await self._process.sleep()

    async def wake(self) -> None:
        await self._process.wake()
        self._paused = True

    def close(self) -> None:
        """End vLLM's processes; waiters get EngineDied. Blocks for a few seconds at most."""
        self._process.close()
        self._pushes.close()


def find_adapters(spec: EngineSpec) -> Adapters | None:
    """The adapters that the engine applies itself. None: there are none, or pushes merge them."""
    lora = spec.lora
    if not (spec.takes_weights and lora.in_engines):
        return None
    return Adapters(rank=lora.rank, alpha=lora.alpha, targets=tuple(find_targets(outline_causal_lm(spec.path), lora)))
