"""The effect of router replay on log-probs: `OMP_NUM_THREADS=1 python benchmarks/router_replay.py`.

Two mixtures of eight experts, two per token: the tiny policy split into experts (Qwen3-MoE), and a Mixtral with random
weights. Each answers the tiny prompts, and a learner scores the same tokens, once with its own routers, once with the
sampler's choice. The dense tiny policy shows the effect of rounding alone. Writes benchmarks/router_replay.md.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

from grmpipe.algorithm.corrections import mismatch
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.data.prompts import load_prompts
from grmpipe.train.batching.packer import pack
from grmpipe.train.batching.samples import count, split_rollout
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.types import MicroBatch, Rollout, TrainingSample, Turn
from models.chat.renderer import Renderer
from models.engines.embedded.embedded_engine import EmbeddedEngine
from models.engines.engine_kind import EngineSpec
from models.settings import EmbeddedConfig
from models.tiny.mixture import upcycle
from models.tiny.resolve import resolve_model
from models.tiny.tokenizer import build_tokenizer
from models.types import Completion, RequestContext, SamplingParams

OUTPUT = Path(__file__).with_suffix(".md")
NUM_PROMPTS, MAX_NEW_TOKENS = 256, 48
ROUTER_NOISE = 0.01  # of each router weight: the drift after some optimizer steps
LR, NUM_UPDATES = 1e-3, 4


@dataclass(frozen=True)
class Agreement:
    """|log p - log q| of the trained tokens, and the share of (token, layer) for which the router would choose other
    experts.
    """

    apart_N: np.ndarray
    rerouted: float = 0.0


@dataclass(frozen=True)
class Line:
    """A row of the table: one situation, with the routers' own choice and with the replayed one."""

    model: str
    what: str
    own: Agreement
    replayed: Agreement | None = None  # a dense model has nothing to replay


def random_mixtral(directory: Path) -> None:
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    shape = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=96, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, num_local_experts=8, num_experts_per_tok=2,
        initializer_range=0.1, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    MixtralForCausalLM(shape).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def with_moved_routers(path: Path, directory: Path) -> Path:
    """A copy whose router weights differ by ROUTER_NOISE, relatively."""
    draw = torch.Generator().manual_seed(0)
    directory.mkdir()
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
            continue
        weights = load_file(file)
        for name, weight in weights.items():
            if name.endswith("gate.weight"):
                weight.mul_(1 + ROUTER_NOISE * torch.randn(weight.shape, generator=draw))
        save_file(weights, directory / file.name, metadata={"format": "pt"})
    return directory


def sample(path: Path, dtype: str, *, return_routed_experts: bool = True) -> list[TrainingSample]:
    """Answers to the tiny prompts, with the engine's log-probs and experts."""
    engine = EmbeddedEngine(
        EngineSpec(path=str(path), role="policy", dtype=dtype, return_routed_experts=return_routed_experts),
        EmbeddedConfig(),
    )
    renderer = Renderer.load(str(path), None)
    prompts = [renderer.render(p.messages) for p in load_prompts("tiny://train", num_tiny_prompts=NUM_PROMPTS)]

    async def one(index: int) -> Completion:
        context = RequestContext(request_id=str(index), group_id="g", role="policy")
        return await engine.generate(prompts[index], SamplingParams(max_new_tokens=MAX_NEW_TOKENS, seed=index), context)

    async def every() -> list[Completion]:
        return list(await asyncio.gather(*map(one, range(len(prompts)))))

    completions = asyncio.run(every())
    engine.close()
    advantages = np.random.default_rng(0).normal(size=len(prompts))
    samples: list[TrainingSample] = []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        turn = Turn(new_ids=prompt, completion=completion)
        rollout = Rollout(group_id=str(index), sibling=0, turns=(turn,), status="finished")
        samples += split_rollout(rollout, np.full(len(completion.token_ids), advantages[index]))
    return samples


def make_learner(path: Path, algorithm: AlgorithmConfig) -> Learner:
    spec = LearnerSpec(
        model_path=str(path),
        train=TrainConfig(lr=LR, warmup_steps=0),
        algorithm=algorithm,
        max_new_tokens=MAX_NEW_TOKENS,
        device="cpu",
    )
    return Learner(spec)


def apart(learner: Learner, batch: MicroBatch, others_T: np.ndarray) -> Agreement:
    """The differences of the learner's log-probs from others."""
    apart_N = np.abs(learner.old_pass(batch).logprobs_T - others_T)[batch.loss_mask_E > 0]
    sums = learner.accumulate(batch)
    learner.discard()
    return Agreement(apart_N, sums.get("train/rerouted_share_sum", 0.0) / sums["train/tokens_sum"])


def against_sampler(model: str, what: str, samples: list[TrainingSample], path: Path) -> Line:
    """R3: the learner compared with the sampler."""
    batch = pack(samples)
    own = apart(make_learner(path, AlgorithmConfig()), batch, batch.sampler_logprobs_E)
    if batch.experts_TLK is None:
        return Line(model, what, own)
    learner = make_learner(path, AlgorithmConfig(router_replay="rollout"))
    return Line(model, what, own, apart(learner, batch, batch.sampler_logprobs_E))


def against_itself(model: str, what: str, samples: list[TrainingSample], path: Path) -> Line:
    """R2: the learner after some updates compared with itself before them, the ratio of the loss."""
    batch, totals = pack([replace(one, experts_TLK=None) for one in samples]), count(samples, 0)
    learner = make_learner(path, AlgorithmConfig(router_replay="old_logprobs", updates_per_batch=NUM_UPDATES))
    old = learner.old_pass(batch)
    for _ in range(NUM_UPDATES):
        learner.accumulate(batch, old)
        learner.step(totals)
    own = apart(learner, batch, old.logprobs_T)
    return Line(model, what, own, apart(learner, replace(batch, experts_TLK=old.experts_TLK), old.logprobs_T))


def measure(root: Path) -> list[Line]:
    dense, qwen, mixtral = Path(resolve_model("tiny://policy")), root / "qwen", root / "mixtral"
    upcycle(dense, qwen)
    random_mixtral(mixtral)
    both = "sampler bfloat16, learner float32"
    lines = [against_sampler("dense Qwen3", both, sample(dense, "bfloat16", return_routed_experts=False), dense)]
    for name, path in (("Qwen3-MoE", qwen), ("Mixtral", mixtral)):
        rounded, exact = sample(path, "bfloat16"), sample(path, "float32")
        moved = with_moved_routers(path, root / f"{path.name}_moved")
        lines += [
            against_sampler(name, both, rounded, path),
            against_sampler(name, f"both float32, routers moved by {ROUTER_NOISE:.0%}", exact, moved),
            against_itself(name, f"learner before and after {NUM_UPDATES} updates (R2)", exact, path),
        ]
    return lines


def report(lines: list[Line], num_tokens: float) -> str:
    def cells(found: Agreement) -> str:
        figures = mismatch(torch.from_numpy(found.apart_N), "of")
        shown = [f"{figures[f'of/{name}_nats']:.4f}" for name in ("mean", "p95", "max")]
        return " | ".join([*shown, f"{figures['of/out_of_band_share']:.2%}"])

    table = [
        "| model | situation | experts | mean, nats | p95 | max | beyond 10 % | rerouted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        if line.replayed is None:
            table.append(f"| {line.model} | {line.what} | it has none | {cells(line.own)} | |")
            continue
        table.append(f"| {line.model} | {line.what} | chosen again | {cells(line.own)} | |")
        table.append(f"| | | replayed | {cells(line.replayed)} | {line.replayed.rerouted:.2%} |")
    text = [
        "# Routing replay",
        "",
        f"`OMP_NUM_THREADS=1 python benchmarks/router_replay.py`: {NUM_PROMPTS} answers of up to {MAX_NEW_TOKENS} "
        f"tokens by each sampler, about {num_tokens:,.0f} trained tokens per row; 8 experts per layer, 2 per token.",
        "",
        "Difference of two log-probs of the same token. Rows without R2: learner and sampler (R3 replays the "
        "sampler's experts). Rerouted: share of tokens and layers for which the router would choose other experts.",
        "",
        *table,
        "",
        "Few tokens are rerouted, and those determine the maximum: a ratio of the loss, or a weight that corrects "
        "for the sampler, then compares outputs of two functions. With the sampler's experts replayed "
        "(R3) the maximum is of the order of the dense model's, whose difference is rounding alone, or below "
        "it; in bfloat16 the mean stays above the dense model's. After updates as large as these most of the "
        "difference comes from the updates: R2 removes an eighth to a quarter of the mean, and hardly lowers "
        "the maximum.",
    ]
    return "\n".join(text) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        lines = measure(Path(root))
    text = report(lines, round(sum(len(line.own.apart_N) for line in lines) / len(lines), -2))
    OUTPUT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
