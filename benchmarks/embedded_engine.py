"""Tokens/s of the embedded engine beside transformers: `OMP_NUM_THREADS=1 python benchmarks/embedded_engine.py`.

Every way answers the same requests with the same model: random prompts of 62 to 109 tokens, sampling at temperature 1,
and lengths drawn from a long tail and enforced per request, so that all make the same number of tokens. The ways take
turns, so that a busy machine slows all of them.

- embedded: our engine, through its async face, log-probs included; also with the plain module in place of the fused
  decoder, and with prompts that 8 siblings share.
- generate: transformers' `model.generate` on one left-padded batch, each row stopped at its length; no log-probs.
- continuous batching: transformers' own manager, kept alive between runs (on the CPU it needs psutil); no log-probs.

Writes benchmarks/embedded_engine.md.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from models.engines.embedded import EmbeddedEngine
from models.engines.fused_decoder import FusedDecoder
from models.settings import EmbeddedConfig
from models.tiny.tokenizer import build_tokenizer
from models.types import RequestContext, SamplingParams

OUTPUT = Path(__file__).with_suffix(".md")
NUM_REQUESTS = (1, 8, 32, 128)
VOCAB_SIZE, WINDOW = 512, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked: prompts, and how many tokens each is answered with."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


Way = Callable[[Workload], int]  # answers a workload; how many tokens were made


def draw_workload(num_requests: int, siblings: int, seed: int = 0) -> Workload:
    """Lengths like a tiny judge's critiques: median about 40, one in ten above 75, the tail cut at 160."""
    dice = torch.Generator().manual_seed(seed)
    prompt_lengths = torch.randint(62, 110, (-(-num_requests // siblings),), generator=dice).tolist()
    prompts = [tuple(torch.randint(3, VOCAB_SIZE, (n,), generator=dice).tolist()) for n in prompt_lengths]
    lengths = (torch.randn(num_requests, generator=dice) * 0.5 + 3.7).exp().long().clamp(8, 160).tolist()
    return Workload(prompts=tuple(prompts[i // siblings] for i in range(num_requests)), lengths=tuple(lengths))


def save_model(directory: str) -> None:
    """The tiny models' shape with random weights; a tokenizer without an end, so that only lengths end a row."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=96, intermediate_size=288, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=WINDOW, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(directory)


def embedded(engine: EmbeddedEngine) -> Way:
    async def answer(workload: Workload) -> int:
        completions = await asyncio.gather(
            *(
                engine.generate(
                    prompt_ids,
                    SamplingParams(max_new_tokens=length, seed=index),
                    RequestContext(request_id=str(index), group_id="", role="policy"),
                )
                for index, (prompt_ids, length) in enumerate(zip(workload.prompts, workload.lengths, strict=True))
            )
        )
        return sum(len(completion.token_ids) for completion in completions)

    return lambda workload: asyncio.run(answer(workload))


class RowLengths(StoppingCriteria):
    """Each row of a padded batch stops at its own length."""

    def __init__(self, prompt_length: int, lengths: Sequence[int]) -> None:
        self._ends = prompt_length + torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


def generate(model: PreTrainedModel) -> Way:
    def answer(workload: Workload) -> int:
        longest = max(len(prompt) for prompt in workload.prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in workload.prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
                max_new_tokens=max(workload.lengths),
                stopping_criteria=StoppingCriteriaList([RowLengths(longest, workload.lengths)]),
            )
        return workload.num_tokens

    return answer


def continuous_batching(model: PreTrainedModel) -> Way:
    """Raises what transformers raises where its manager doesn't run."""
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(page_size=256, num_blocks=256, max_batch_tokens=8192),
    )
    manager.start()

    def answer(workload: Workload) -> int:
        for prompt_ids, length in zip(workload.prompts, workload.lengths, strict=True):
            manager.add_request(list(prompt_ids), max_new_tokens=length)
        num_tokens = 0
        for _ in workload.prompts:
            output = manager.get_result(timeout=60)
            if output is None or output.error:
                raise RuntimeError("no answer within 60 s" if output is None else output.error)
            num_tokens += len(output.generated_tokens)
        return num_tokens

    return answer


def tokens_per_s(way: Way, workload: Workload) -> float:
    started_s = time.perf_counter()
    num_tokens = way(workload)
    wall_s = time.perf_counter() - started_s
    assert num_tokens == workload.num_tokens, f"{num_tokens} tokens instead of {workload.num_tokens}"
    return num_tokens / wall_s


def measure(ways: dict[str, Way], workload: Workload, repeats: int) -> list[dict[str, float]]:
    """Tokens/s by way, a round after the other, the ways of a round taking turns; a warm-up each first."""
    for way in ways.values():
        way(workload)
    return [{name: tokens_per_s(way, workload) for name, way in ways.items()} for _ in range(repeats)]


def open_ways(directory: str) -> tuple[dict[str, Way], list[str]]:
    """By name; and a note for each that doesn't run here."""
    config = EmbeddedConfig(max_batch_rows=max(NUM_REQUESTS))
    ways = {"embedded": embedded(EmbeddedEngine(directory, "policy", config))}
    with patch.object(FusedDecoder, "supports", return_value=False):
        ways["embedded, plain module"] = embedded(EmbeddedEngine(directory, "policy", config))
    ways["generate"] = generate(Qwen3ForCausalLM.from_pretrained(directory).eval())
    try:
        way = continuous_batching(Qwen3ForCausalLM.from_pretrained(directory).eval())
        way(draw_workload(2, siblings=1))
        ways["continuous batching"] = way
    except Exception as error:
        return ways, [f"transformers' continuous batching doesn't run here: {type(error).__name__}: {error}"]
    return ways, []


def table(rounds_by_label: dict[str, list[dict[str, float]]]) -> list[str]:
    """Median tokens/s by workload and way; and the median, over rounds, of embedded / generate within a round."""
    names = list(next(iter(rounds_by_label.values()))[0])
    lines = [
        f"| requests | {' | '.join(names)} | embedded / generate |",
        "|---" * (len(names) + 2) + "|",
    ]
    for label, rounds in rounds_by_label.items():
        cells = " | ".join(f"{statistics.median(speeds[name] for speeds in rounds):,.0f}" for name in names)
        ratio = statistics.median(speeds["embedded"] / speeds["generate"] for speeds in rounds)
        lines.append(f"| {label} | {cells} | {ratio:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        save_model(directory)
        ways, notes = open_ways(directory)
        rounds = {}
        for num_requests in NUM_REQUESTS:
            rounds[str(num_requests)] = measure(ways, draw_workload(num_requests, siblings=1), repeats)
        rounds["128 (16 x 8 siblings)"] = measure(ways, draw_workload(128, siblings=8), repeats)
    workload = draw_workload(128, siblings=1)
    lines = [
        "# Embedded engine beside transformers, tokens/s",
        "",
        f"`OMP_NUM_THREADS=1 python benchmarks/embedded_engine.py`, median of {repeats} interleaved runs.",
        f"{platform.processor() or platform.machine()} CPU, 1 thread, torch {torch.__version__}, transformers "
        f"{transformers.__version__}. Random Qwen3 of 372 576 parameters, float32, temperature 1;",
        f"128 answers of {min(workload.lengths)} to {max(workload.lengths)} tokens (median "
        f"{statistics.median(workload.lengths):.0f}), the same for all. Only embedded reports log-probs.",
        "The machine was shared: compare within a row. Continuous batching needs psutil on the CPU.",
        "",
        *table(rounds),
        *(f"\n{note}" for note in notes),
    ]
    OUTPUT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
