"""The arguments and environment of a vLLM engine. Imports vLLM only to start one."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.installed import vllm_missing
from grmpipe.models.settings import VLLM_QUANTIZATIONS, VllmConfig

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

WORKER_EXTENSION = "grmpipe.models.engines.vllm.vllm_worker.WeightReceiver"
WEIGHT_BACKEND = "grmpipe"
OWNER_PID = "GRMPIPE_VLLM_OWNER_PID"  # vLLM's processes end with this process, which owns their engine
SOCKETS = "VLLM_RPC_BASE_PATH"
SOCKET_NAME_BYTES = 37  # a slash and a UUID
MAX_PATH_BYTES = 107  # the kernel's limit for a socket
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's choices of max_lora_rank
CPU_KV_CACHE_MB = 256
NGRAMS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 6}
CPU_STEP_TOKENS = 4096
CPU_BLOCK_SIZE = 32  # in tokens; vLLM's default of 128 on CPUs shares no shorter prompt
FIRST_AND_LAST = 1 << 30  # tokens per output: the first at once, the rest at the end

# Arguments of vLLM that are set here, and the key to use instead.
INSTEAD = {
    "model": "policy.path or grm.path",
    "dtype": "policy.dtype or grm.dtype",
    "seed": "seed",
    "max_num_seqs": "engine.vllm.max_batch_rows",
    "max_model_len": "engine.vllm.max_context_tokens",
    "kv_cache_memory_bytes": "engine.vllm.kv_cache_mb",
    "gpu_memory_utilization": "engine.vllm.gpu_memory_utilization",
    "enable_sleep_mode": "placement.pools.<pool>.time_shared or placement.pools.<pool>.elastic",
    "enable_return_routed_experts": "algorithm.router_replay",
    "enable_lora": "policy.lora.sync or grm.lora.sync",
    "speculative_config": "engine.speculation",
    "max_lora_rank": "policy.lora.rank or grm.lora.rank",
    "lora_target_modules": "policy.lora.target_modules or grm.lora.target_modules",
    "tensor_parallel_size": "placement.roles.<role>.slots_per_replica",
    **dict.fromkeys(
        ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"),
        "placement.roles.<role>.slots_per_replica",
    ),
    "data_parallel_size": "placement.roles.<role>.replicas",
    **dict.fromkeys(
        ("nnodes", "node_rank", "master_addr", "master_port", "data_parallel_size_local", "data_parallel_rank"),
        "the placement (an engine is on one machine; placement.roles.<role>.replicas has more of them)",
    ),
}
# Arguments that this engine depends on: other values would break it.
FIXED = (
    "tokenizer", "served_model_name", "skip_tokenizer_init", "distributed_executor_backend", "logprobs_mode",
    "scheduling_policy", "scheduler_cls", "stream_interval", "generation_config", "worker_cls",
    "worker_extension_cls", "weight_transfer_config", "disable_log_stats", "enable_log_requests", "max_loras",
    "max_cpu_loras", "lora_dtype",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter that an engine applies, by the name of its model. targets: the last parts of the names of its linear
    layers. path: where vLLM reads it before its first push; null: it changes nothing until then.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmStart:
    """What follows for vLLM from the specification of an engine.

    context_tokens: its window, for prompt and new tokens together.
    adapters:       by the name of their model, if it has some; pushes to these models carry them alone.
    """

    spec: EngineSpec
    config: VllmConfig
    context_tokens: int
    adapters: Mapping[str, Adapter] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        return self.spec.device == "cpu"


def check_vllm_options(config: VllmConfig) -> None:
    """Raises ValueError that names the key, for an option that vLLM doesn't have or that is set here. Takes no
    seconds.
    """
    known = argument_names()
    for name in config.options:
        key = f"engine.vllm.options.{name}"
        if name in INSTEAD:
            raise ValueError(f"{key}: is set by {INSTEAD[name]}; use that key instead")
        if name in FIXED:
            raise ValueError(f"{key}: this engine sets it itself; leave it out")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)
            raise ValueError(f"{key}: vLLM has no such argument; the closest one is {nearest[0]!r} (AsyncEngineArgs)")


@cache
def argument_names() -> frozenset[str]:
    """The fields of vLLM's AsyncEngineArgs, read from its source: importing it takes six seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ValueError(f"engine: {vllm_missing()}")
    source = (Path(spec.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    return frozenset(
        field.target.id
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_"
    )


def make_arguments(start: VllmStart) -> dict[str, Any]:
    """The arguments for AsyncEngineArgs; the user's own come last."""
    config, spec = start.config, start.spec
    kv_cache_mb = config.kv_cache_mb or (CPU_KV_CACHE_MB if start.on_cpu else 0)
    arguments: dict[str, Any] = {
        "model": spec.path,
        "dtype": spec.dtype,
        "max_model_len": start.context_tokens,
        "max_num_seqs": config.max_batch_rows,
        "kv_cache_memory_bytes": kv_cache_mb << 20 or None,
        "gpu_memory_utilization": config.memory_share,
        "enforce_eager": start.on_cpu,
        "enable_sleep_mode": spec.sleeps and not start.on_cpu,  # not supported on a CPU
        "tensor_parallel_size": spec.num_gpus,
        # Not Ray: this actor already has the slot's devices.
        "distributed_executor_backend": "mp" if spec.num_gpus > 1 else "uni",
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "scheduling_policy": "priority",
        "stream_interval": FIRST_AND_LAST,
        "generation_config": "vllm",  # without the model's sampling defaults
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if spec.speculation == "ngram":
        arguments["speculative_config"] = dict(NGRAMS)
    if config.quantization != "none":
        arguments["quantization"] = VLLM_QUANTIZATIONS[config.quantization]
    if spec.takes_weights or start.adapters:
        arguments["weight_transfer_config"] = {"backend": WEIGHT_BACKEND}
    if adapters := start.adapters.values():
        largest = max(adapter.rank for adapter in adapters)
        arguments |= {
            "enable_lora": True,
            "max_loras": len(adapters),  # all of them may be in one batch
            "max_lora_rank": next(rank for rank in ADAPTER_RANKS if rank >= largest),
            "lora_target_modules": sorted({target for adapter in adapters for target in adapter.targets}),
        }
    if spec.return_routed_experts:  # needs vLLM's Model Runner V2, which needs a GPU
        arguments["enable_return_routed_experts"] = True
    if start.on_cpu:
        arguments["block_size"] = CPU_BLOCK_SIZE
        # A seeded request with a chunked prompt crashes vLLM's core: a CPU generator has no offset to reset.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(CPU_STEP_TOKENS, start.context_tokens)
    return arguments | config.options


def make_environment(start: VllmStart, sockets: str) -> dict[str, str]:
    """The environment of vLLM's processes. sockets: a folder for them."""
    environment = {
        OWNER_PID: str(os.getpid()),
        SOCKETS: sockets,
        # On a CPU vLLM warns about settings that are chosen here.
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR" if start.on_cpu else "WARNING"),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore::FutureWarning"),  # from vLLM's own imports
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # forking a process with threads may hang
    }
    if start.on_cpu:
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the scheduler assigns cores
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # Ray sets it to the slots of this process
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less: the engine core itself holds the model
        }
    return environment


def make_socket_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for vLLM's sockets: in /tmp where the path of the temporary folder is too long for one."""
    folder = tempfile.TemporaryDirectory(prefix="grmpipe-")
    if len(os.fsencode(folder.name)) + SOCKET_NAME_BYTES <= MAX_PATH_BYTES:
        return folder
    folder.cleanup()
    return tempfile.TemporaryDirectory(prefix="grmpipe-", dir="/tmp")


def start_async_llm(start: VllmStart, sockets: str) -> AsyncLLM:
    """Start vLLM; blocks for seconds. This process's environment isn't changed.

    sockets: a folder for the sockets between vLLM's processes, which it leaves on the disk. The core may connect the
    one for answers after it has said that it is ready: keep the folder until the first answer.
    """
    if missing := vllm_missing():
        raise ValueError(f"engine: {missing}")
    check_vllm_options(start.config)
    with _environment(make_environment(start, sockets)):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        # As `vllm serve`: an H100 reads 8,192 tokens of prompts a step, without a context 2,048; judges read much.
        usage = None if start.on_cpu else UsageContext.OPENAI_API_SERVER
        vllm_config = AsyncEngineArgs(**make_arguments(start)).create_engine_config(usage)
        if start.on_cpu and start.adapters and vllm_config.model_config.is_moe:
            raise ValueError(
                "lora.sync: vLLM on a CPU can't run a mixture of experts with adapters (it takes kernels for GPUs); "
                "type lora.sync=merged, or engine=embedded"
            )
        if start.on_cpu:
            _check_heads(vllm_config.model_config.get_head_size(), start.spec.path)
        return AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)


def describe_start(llm: AsyncLLM, took_s: float) -> str:
    """What a start found, by vLLM's own objects: it logs the same. Its core reports the room for keys and values when
    it is ready (EngineCoreReadyResponse, vllm/v1/engine/__init__.py of 0.32.0).
    """
    found = llm.vllm_config
    tokens, graphs = found.cache_config.kv_cache_size_tokens, found.compilation_config.cudagraph_capture_sizes
    captured = f"{len(graphs)} sizes of CUDA graphs, up to {max(graphs)} rows" if graphs else "no CUDA graphs"
    room = f"keys and values of {tokens:,} tokens, " if tokens else ""
    return f"vLLM started in {took_s:.0f} s: {room}{captured}"


def _check_heads(head_size: int, model_path: str) -> None:
    """Raises ValueError for a head size with which vLLM would crash at the first request."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if head_size not in sizes:
        raise ValueError(
            f"engine: vLLM on a CPU runs attention heads of {', '.join(map(str, sizes))} only; the heads of "
            f"{model_path!r} have {head_size}; use engine=embedded"
        )


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Context: vLLM also changes the environment for its children (for example LD_PRELOAD), which is undone here."""
    kept = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
