"""vLLM's AsyncLLM as an Engine: async calls on one event loop; vLLM's core has its own process with the model.

    generate, abort    -> a ticket per request_id -> AsyncLLM.generate, first and last output -> Completion
    pause .. commit    -> pause_generation(keep), the weight-transfer calls, the version of every token from vLLM
    a dead core        -> EngineDied, for waiting and later calls

New weights during requests: with `recompute_kv_on_sync` all cached keys and values are dropped when a push begins.
Without it kept requests continue with theirs, and a new salt of the prefix cache keeps new requests from using them;
requests that have not begun are withdrawn and sent again with that salt.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from models.engines.context_limit import ContextLimit
from models.engines.stop_conditions import StopConditions
from models.engines.vllm.options import Adapters, VllmStart, check_vllm_options
from models.engines.vllm.process import VllmProcess
from models.engines.vllm.vllm_requests import (
    VllmRequest,
    VllmSample,
    adapter_request,
    experts_of,
    finish_reason_of,
    refuse_what_cannot_run,
    sampling_of,
    scores_of,
    scoring_of,
    spans_of,
)
from models.engines.vllm.vllm_weights import as_plain, reading_error, unapplied
from models.lm.causal_lm import outline_causal_lm
from models.lm.expert_routing import Routers
from models.lm.lora import targets_of
from models.renderer import Renderer
from models.settings import LoraConfig, VllmConfig
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
from models.weights.weight_files import SharedArena

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["VllmEngine", "check_vllm_options"]

FIRST_OF_ALL = -(1 << 62)  # a priority before all others


class VllmEngine:
    """An engine for any model that vLLM runs, on a CPU or the GPUs of a slot. Bound to the event loop that first calls
    it.

    Blocks while vLLM starts (seconds to minutes). Raises ValueError for unusable options and models.

    seed: part of all seeds. Engines of one role share it, so that a retry samples the same tokens.
    version: of the weights in `model_path`.
    takes_weights: False leaves out what only pushes need.
    return_routed_experts: whether completions have the experts of their tokens; for mixtures of experts on a GPU only.
    lora: adapters that pushes update, if they aren't merged into the weights.
    """

    def __init__(
        self,
        model_path: str,
        model_name: str,
        config: VllmConfig,
        dtype: str = "float32",
        device: str = "cpu",
        seed: int = 0,
        chat_template: str | None = None,
        version: int = 0,
        tensor_parallel: int = 1,
        takes_weights: bool = True,
        return_routed_experts: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        renderer = Renderer.load(model_path, chat_template)
        self.model_name = model_name
        self.version = version
        self.prefilled_tokens = 0  # prompt tokens of finished requests that no prefix cache had
        self._config, self._seed, self._takes_weights = config, seed, takes_weights
        self._window = ContextLimit.of(model_name, renderer, config.max_context_tokens)
        self._stop_token_ids = renderer.stop_token_ids
        self._endings = StopConditions(renderer.decode, renderer.stop_token_ids)
        self._expert_layers = Routers.of(outline_causal_lm(model_path)).shape.layers if return_routed_experts else ()
        self._tickets: dict[str, VllmRequest] = {}
        self._answers: set[asyncio.Task[Completion]] = set()
        self._scores = itertools.count()
        self._prefix_salt = 0
        self._paused = self._updating = False
        self._awake = asyncio.Event()
        self._awake.set()
        self._ready: asyncio.Task[None] | None = None
        self._arena = SharedArena()  # for bytes that come within a bucket
        self._adapters = adapters_of(model_path, lora) if takes_weights and lora is not None else None
        start = VllmStart(
            model_path=model_path,
            config=config,
            context_tokens=self._window.tokens,
            dtype=dtype,
            device=device,
            tensor_parallel=tensor_parallel,
            takes_weights=takes_weights,
            return_routed_experts=return_routed_experts,
            adapters=self._adapters,
        )
        self._process = VllmProcess(start, model_name)
        self._adapter = adapter_request() if self._adapters else None
        self._call, self._ask_workers = self._process.call, self._process.ask_workers
        self._refuse_the_dead = self._process.refuse_the_dead

    @property
    def _llm(self) -> AsyncLLM:
        return self._process.llm

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
        self._refuse_the_dead()
        ids = tuple(prompt_ids)
        self._window.check_request(ids, params)
        refuse_what_cannot_run(params)
        ticket = self._tickets.get(context.request_id)
        if ticket is None:
            ticket = VllmRequest(context.request_id, ids, params, context.priority)
            self._tickets[ticket.request_id] = ticket
            ticket.answer = asyncio.create_task(self._answer(ticket))
            self._answers.add(ticket.answer)  # an event loop holds tasks only weakly
            ticket.answer.add_done_callback(self._let_go)
        elif ticket.begun:
            on_first_token()
        assert ticket.answer is not None
        ticket.listeners.append(on_first_token)
        ticket.num_waiters += 1
        try:
            return await asyncio.shield(ticket.answer)
        except asyncio.CancelledError:
            if ticket.num_waiters == 1 and not ticket.answer.done():
                await self._abort(ticket)
            raise
        finally:
            ticket.num_waiters -= 1
            ticket.listeners.remove(on_first_token)

    async def abort(self, request_id: str) -> None:
        self._refuse_the_dead()
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            await self._abort(ticket)

    async def pause(self) -> None:
        await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
        self._paused = True

    async def resume(self) -> None:
        """Resume. After an uncommitted push the weights are mixed."""
        if self._updating:
            await self._drop_update()
        await self._call(self._llm.resume_generation())
        self._paused = False

    async def begin_weights(self, link: GroupLink | None = None) -> None:
        """Raises RuntimeError if not paused, or for an engine without `takes_weights`."""
        self._refuse_the_dead()
        if not (self._paused and self._takes_weights):
            raise RuntimeError("weights may only be sent to a paused engine that takes weights")
        await self._introduced()
        await self._drop_update()
        await self._forget_cached_prompts()
        await self._join(link)
        await self._call(self._llm.start_weight_update())
        self._updating = True

    async def load_bucket(self, bucket: WeightBucket) -> None:
        """Raises ValueError that names a tensor that doesn't fit: nothing of its bucket is loaded, and the push
        ends.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._refuse_the_dead()
        if not self._updating:
            raise RuntimeError("begin_weights comes before load_bucket")
        with self._worker_drops_what_fails():
            request = WeightTransferUpdateRequest(update_info=as_plain(bucket, self._arena))
            await self._call(self._llm.update_weights(request))

    async def commit_weights(self, version: int) -> WeightReceipt:
        checksums: dict[str, str] = {}
        missing: tuple[str, ...] = ()
        if self._updating:
            with self._worker_drops_what_fails():
                await self._call(self._llm.finish_weight_update(weight_version=str(version)))
                if self._adapters is not None:
                    await self._ask_workers("install_adapters")
            self._updating = False
            reports = await self._ask_workers("take_report")
            checksums = reports[0][0]  # from tensor rank 0; all ranks get the same tensors
            missing = unapplied(checksums, (applied for _, applied in reports))
        else:
            await self._call(self._llm.update_weight_version(str(version)))
        self.version = version
        return WeightReceipt(version=version, checksums=checksums, unapplied=missing)

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        self._refuse_the_dead()
        ids = tuple(token_ids)
        self._window.check_text(ids)
        if self._paused:
            raise RuntimeError("a paused engine can't score")
        return await self._call(self._score(ids)) if len(ids) > 1 else ()

    async def sleep(self) -> int:
        self._refuse_the_dead()
        if self._tickets or not self._paused:
            raise RuntimeError("only a paused engine without requests may sleep")
        before = await self._ask_workers("free_device_bytes")
        self._awake.clear()
        await self._call(self._llm.sleep(level=1, mode="keep"))
        after = await self._ask_workers("free_device_bytes")
        return max(0, sum(after) - sum(before))

    async def wake(self) -> None:
        await self._call(self._llm.wake_up())
        await self.pause()  # waking vLLM also resumes it
        self._awake.set()

    def close(self) -> None:
        """End vLLM's processes; waiters get EngineDied. Blocks for a few seconds at most."""
        self._process.close()
        self._arena.close()

    # -- requests --------------------------------------------------------------------------------------------------

    async def _answer(self, ticket: VllmRequest) -> Completion:
        from vllm.exceptions import VLLMClientError, VLLMServerError

        try:
            await self._prepare()
            sampled = await self._sample(ticket)
            while ticket.renewed and sampled.finish_reason == "abort" and not ticket.aborted:
                sampled = await self._sample(ticket)
        except VLLMServerError as error:
            raise self._process.death() from error
        except (VLLMClientError, ValueError) as error:
            raise EngineRefused(f"vLLM refuses the request: {error}") from error
        finally:
            self._forget(ticket)
        self.prefilled_tokens += len(ticket.prompt_ids) - sampled.num_cached_tokens
        return self._completion(ticket, sampled)

    def _let_go(self, answer: asyncio.Task[Completion]) -> None:
        self._answers.discard(answer)
        if not answer.cancelled():
            answer.exception()  # an error that no caller waits for is ignored

    async def _sample(self, ticket: VllmRequest) -> VllmSample:
        """One try. Its first step, up to vLLM's list of requests, doesn't wait, so no abort can come before it."""
        from vllm.inputs.engine import tokens_input

        if ticket.aborted:
            return VllmSample(finish_reason="abort")
        ticket.renewed = False
        sampled = VllmSample()
        prompt = tokens_input(list(ticket.prompt_ids), cache_salt=str(self._prefix_salt))
        sampling = sampling_of(ticket.params, self._seed, self._stop_token_ids)
        async for output in self._llm.generate(
            prompt, sampling, ticket.request_id, lora_request=self._adapter, priority=ticket.priority
        ):
            sampled.add(output)
            if sampled.token_ids:
                ticket.begin()
        return sampled

    def _completion(self, ticket: VllmRequest, sampled: VllmSample) -> Completion:
        text, stop_text = self._endings.cut_text(sampled.token_ids, ticket.params.stop)
        return Completion(
            token_ids=tuple(sampled.token_ids),
            logprobs=tuple(sampled.logprobs),
            text=text,
            stop_text=stop_text,
            finish_reason=finish_reason_of(sampled),
            versions=spans_of(sampled, self.model_name, self.version),
            experts_TLK=experts_of(sampled, self._expert_layers),
            cached_tokens=sampled.num_cached_tokens,
        )

    async def _abort(self, ticket: VllmRequest) -> None:
        ticket.aborted = True
        self._forget(ticket)  # later calls with its id begin again
        with contextlib.suppress(EngineDied):  # its waiters then get the death
            await self._call(self._llm.abort(ticket.request_id))

    def _forget(self, ticket: VllmRequest) -> None:
        if self._tickets.get(ticket.request_id) is ticket:
            del self._tickets[ticket.request_id]

    async def _score(self, ids: tuple[int, ...]) -> tuple[float, ...]:
        """vLLM computes scored prompts completely: it reads no cached prefix."""
        from vllm.inputs.engine import tokens_input

        await self._prepare()
        # vLLM reserves a place for a new token: a prompt that fills the window is scored without its last token.
        prompt, last = (ids, ()) if len(ids) < self._window.tokens else (ids[:-1], ids[-1:])
        tokens = tokens_input(list(prompt), cache_salt=str(self._prefix_salt))
        name = f"score-{next(self._scores)}"
        async for output in self._llm.generate(
            tokens, scoring_of(last), name, lora_request=self._adapter, priority=FIRST_OF_ALL
        ):
            return scores_of(output, last)
        raise AssertionError("vLLM ended a request without an output")

    async def _forget_cached_prompts(self) -> None:
        """Keep requests from reading keys and values of the present weights, which are about to change.

        The new salt comes after the reset, so nothing that vLLM or its connector (a store on the host, on disk, on
        other machines) still holds is found under it. Raises RuntimeError if they keep some.
        """
        if self._config.recompute_kv_on_sync:
            dropped = await self._call(self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True))
            if not dropped:
                raise RuntimeError(
                    "vLLM's KV connector keeps keys and values of the old weights; leave out "
                    "engine.vllm.options.kv_transfer_config, or type engine.vllm.recompute_kv_on_sync=false"
                )
            self._prefix_salt += 1
            return
        self._prefix_salt += 1
        waiting = [ticket for ticket in self._tickets.values() if not (ticket.begun or ticket.aborted)]
        for ticket in waiting:
            ticket.renewed = True
        await self._call(self._llm.abort([ticket.request_id for ticket in waiting]))

    # -- vLLM's processes ------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        await self._introduced()
        if not self._awake.is_set():
            await self._call(self._awake.wait())

    async def _introduced(self) -> None:
        """Once the loop runs: what vLLM asks its core before a first request, the name of its weights, and an adapter
        that changes nothing.
        """
        if self._ready is None:
            self._ready = asyncio.create_task(self._introduce())
        await asyncio.shield(self._ready)

    async def _introduce(self) -> None:
        await self._call(self._llm.get_supported_tasks())
        if self._adapters is not None:
            await self._ask_workers("begin_adapters", self._adapters.rank, self._adapters.alpha)
        if await self._call(self._llm.get_weight_version()) == "default":
            await self._call(self._llm.update_weight_version(str(self.version)))

    async def _join(self, link: GroupLink | None) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        if link is None:
            await self._call(self._llm.shutdown_weight_transfer_engine())
            return
        with reading_error():
            await self._call(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(asdict(link))))

    @contextlib.contextmanager
    def _worker_drops_what_fails(self) -> Iterator[None]:
        try:
            with reading_error():
                yield
        except Exception:
            self._updating = False
            raise

    async def _drop_update(self) -> None:
        await self._ask_workers("drop_update")
        self._updating = False


def adapters_of(model_path: str, lora: LoraConfig) -> Adapters | None:
    """The adapters that the engine applies itself. None: there are none, or pushes merge them."""
    if not lora.in_engines:
        return None
    return Adapters(rank=lora.rank, alpha=lora.alpha, targets=tuple(targets_of(outline_causal_lm(model_path), lora)))
