"""The arguments of vLLM, and those that a user can't set, before anything starts."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.vllm import options as vllm_options
from grmpipe.models.engines.vllm.options import (
    FIXED,
    INSTEAD,
    Adapter,
    VllmStart,
    check_vllm_options,
    describe_start,
    make_arguments,
    make_environment,
    make_socket_folder,
    start_async_llm,
)
from grmpipe.models.engines.vllm.vllm_engine import VllmEngine
from grmpipe.models.settings import VLLM_QUANTIZATIONS, VllmConfig

pytestmark = pytest.mark.vllm


def start_of(
    config: VllmConfig, device: str = "cpu", tensor_parallel: int = 1, adapters: Mapping[str, Adapter] | None = None
) -> VllmStart:
    """It sleeps where it can."""
    spec = EngineSpec(path="m", role="policy", device=device, num_gpus=tensor_parallel, sleeps=True)
    return VllmStart(spec=spec, config=config, context_tokens=128, adapters=adapters or {})


def test_the_arguments_read_from_its_source_are_vllms_own() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    own = {field.name for field in dataclasses.fields(AsyncEngineArgs) if not field.name.startswith("_")}
    assert vllm_options.argument_names() == own
    assert own > {*INSTEAD, *FIXED}
    adapters = {"grm": Adapter(rank=8, alpha=16.0, targets=("q_proj",))}
    assert own > make_arguments(start_of(VllmConfig(), adapters=adapters)).keys() > {"enable_lora"}


def test_speculation_by_ngrams_is_vllms_own() -> None:
    drafting = VllmStart(
        spec=EngineSpec(path="m", role="grm", speculation="ngram"), config=VllmConfig(), context_tokens=128
    )
    assert make_arguments(drafting)["speculative_config"]["method"] == "ngram"
    assert "speculative_config" not in make_arguments(start_of(VllmConfig()))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("max_num_batched_token", "max_num_batched_tokens"),
        ("quantisation", "quantization"),
        ("max_num_seqs", "engine.vllm.max_batch_rows"),
        ("tensor_parallel_size", "slots_per_replica"),
        ("pipeline_parallel_size", "slots_per_replica"),
        ("decode_context_parallel_size", "slots_per_replica"),
        ("nnodes", "an engine is on one machine"),
        ("dtype", "policy.dtype"),
        ("logprobs_mode", "leave it out"),
        ("speculative_config", "engine.speculation"),
        ("max_lora_rank", "policy.lora.rank"),
    ],
)
def test_an_option_that_vllm_lacks_or_that_is_ours_is_named_with_the_way_out(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"engine.vllm.options.{name}: ") as refused:
        check_vllm_options(VllmConfig(options={name: 1}))
    assert told in str(refused.value)


def test_other_options_pass_through_and_win() -> None:
    config = VllmConfig(options={"max_num_batched_tokens": 4096, "block_size": 64})
    check_vllm_options(config)
    arguments = make_arguments(start_of(config))
    assert (arguments["max_num_batched_tokens"], arguments["block_size"]) == (4096, 64)


def test_every_quantization_is_one_that_vllm_does_at_its_start() -> None:
    """vLLM's own `fp8` is only for checkpoints in fp8."""
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    for name in VLLM_QUANTIZATIONS:
        given = make_arguments(start_of(VllmConfig(quantization=name))).get("quantization")
        assert given is None if name == "none" else given in ONLINE_QUANT_SHORTHAND_NAMES


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (4, 8), (8, 8), (9, 16), (257, 320), (512, 512)])
def test_adapters_get_one_place_of_a_rank_that_vllm_has(rank: int, room: int) -> None:
    from vllm.config.lora import LoRAConfig

    arguments = make_arguments(
        start_of(VllmConfig(), adapters={"grm": Adapter(rank=rank, alpha=8.0, targets=("q_proj", "up"))})
    )
    assert (arguments["max_lora_rank"], arguments["lora_target_modules"]) == (room, ["q_proj", "up"])
    assert LoRAConfig(max_lora_rank=arguments["max_lora_rank"], max_loras=arguments["max_loras"]).max_cpu_loras == 1
    assert "enable_lora" not in make_arguments(start_of(VllmConfig()))


def test_a_cpu_gets_256_mb_of_cache_and_a_gpu_what_its_share_leaves() -> None:
    on_cpu, on_gpu = (
        make_arguments(start_of(VllmConfig())),
        make_arguments(start_of(VllmConfig(), "cuda", 2)),
    )
    assert (on_cpu["kv_cache_memory_bytes"], on_cpu["enforce_eager"]) == (256 << 20, True)
    assert (on_gpu["kv_cache_memory_bytes"], on_gpu["enforce_eager"]) == (None, False)
    assert (on_gpu["distributed_executor_backend"], on_gpu["enable_sleep_mode"]) == ("mp", True)


def test_a_gpu_reads_as_many_tokens_of_prompts_in_a_step_as_vllms_own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    class Asked(Exception):
        """Ends the start."""

    def ask(arguments: AsyncEngineArgs, usage: object = None) -> None:
        raise Asked(usage)

    monkeypatch.setattr(AsyncEngineArgs, "create_engine_config", ask)
    monkeypatch.setattr(AsyncEngineArgs, "__post_init__", lambda arguments: None)
    for device, expected in (("cpu", None), ("cuda", "OPENAI_API_SERVER")):
        with pytest.raises(Asked) as found:
            start_async_llm(start_of(VllmConfig(), device), "/sockets")
        assert found.value.args[0] == expected


def test_a_cpu_engine_has_the_threads_of_its_process_and_chooses_no_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    environment = make_environment(start_of(VllmConfig()), "/sockets")
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert "OMP_NUM_THREADS" not in make_environment(start_of(VllmConfig(), "cuda"), "/sockets")


def test_sockets_are_where_their_paths_are_short_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far = tmp_path / ("x" * 80)
    far.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(far))
    with make_socket_folder() as folder:
        assert len(f"{folder}/{uuid4()}") <= 107 and os.access(folder, os.W_OK)
    assert list(far.iterdir()) == [] and not Path(folder).exists()


def test_a_window_above_the_models_is_refused(model_path: str) -> None:
    with pytest.raises(ValueError, match="max_context_tokens: 129 exceeds"):
        VllmEngine(EngineSpec(path=model_path, role="policy"), VllmConfig(max_context_tokens=129))


def test_heads_that_its_cpu_kernel_lacks_are_refused_before_a_process_starts(tmp_path: Path, model_path: str) -> None:
    """vLLM itself would start, and crash at the first request."""
    for file in Path(model_path).iterdir():
        text = file.read_text(encoding="utf-8") if file.suffix == ".json" else None
        if text is None:
            (tmp_path / file.name).write_bytes(file.read_bytes())
        else:
            (tmp_path / file.name).write_text(text.replace('"head_dim": 32', '"head_dim": 8'), encoding="utf-8")
    before = dict(os.environ)
    with pytest.raises(ValueError, match="heads of 32, 64.*have 8.*engine=embedded"):
        VllmEngine(EngineSpec(path=str(tmp_path), role="policy"), VllmConfig())
    assert dict(os.environ) == before  # vLLM changes it


def test_a_start_is_described_by_vllms_own_objects() -> None:
    def described(tokens: int | None, graphs: list[int]) -> str:
        found = SimpleNamespace(
            cache_config=SimpleNamespace(kv_cache_size_tokens=tokens),
            compilation_config=SimpleNamespace(cudagraph_capture_sizes=graphs),
        )
        return describe_start(SimpleNamespace(vllm_config=found), took_s=41.6)

    assert described(1234567, [1, 2, 4, 512]) == (
        "vLLM started in 42 s: keys and values of 1,234,567 tokens, 4 sizes of CUDA graphs, up to 512 rows"
    )
    assert described(None, []) == "vLLM started in 42 s: no CUDA graphs"
