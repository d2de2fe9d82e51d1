"""Measures what a teacher's most likely tokens leave out: the divergence and its gradient by k, against all tokens.

    OMP_NUM_THREADS=1 python benchmarks/top_k_bias.py

The tiny policy answers; it and the tiny teacher score its tokens on the embedded engine, with every token of the
vocabulary. Writes benchmarks/top_k_bias.md. Trains nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from grmpipe.algorithm.distillation import divergence
from grmpipe.data.prompts import load_prompts
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.settings import EmbeddedConfig
from grmpipe.models.types import RequestContext, SamplingParams, TokenScores, make_scoring_params
from grmpipe.tiny.resolve import resolve_model

REPORT = Path(__file__).with_suffix(".md")
POLICY, TEACHER = "tiny://policy", "tiny://teacher_arithmetic"
NUM_PROMPTS = 256
KS = (1, 2, 4, 8, 16, 32, 64)
BETAS = {"reverse KL": 1.0, "JSD, beta 0.5": 0.5, "forward KL": 0.0}
NUMBERS = itertools.count()


def next_request() -> RequestContext:
    return RequestContext(request_id=str(next(NUMBERS)), group_id="", role="policy")


async def score_answers() -> tuple[Tensor, Tensor]:
    """[N, V] float64 each: log-probs by the policy and by the teacher in the place of each token of its answers."""
    renderer = Renderer.load(path := resolve_model(POLICY))
    engines = [
        EmbeddedEngine(EngineSpec(path=one, role="policy"), EmbeddedConfig()) for one in (path, resolve_model(TEACHER))
    ]

    async def score(prompt_ids: tuple[int, ...], seed: int) -> list[TokenScores]:
        params = SamplingParams(max_new_tokens=64, seed=seed)
        answer = await engines[0].generate(prompt_ids, params, next_request())
        scoring = make_scoring_params(len(prompt_ids), top_k=renderer.vocab_size)
        whole = (*prompt_ids, *answer.token_ids)
        scores = [(await engine.generate(whole, scoring, next_request())).scores for engine in engines]
        return [one for one in scores if one is not None]

    prompts = load_prompts("tiny://held_out", num_tiny_prompts=NUM_PROMPTS)
    try:
        found = [await score(renderer.render(prompt.messages), seed) for seed, prompt in enumerate(prompts)]
    finally:
        for engine in engines:
            engine.close()
    policy, teacher = zip(*found, strict=True)
    return by_token_id(policy), by_token_id(teacher)


def by_token_id(scores: tuple[TokenScores, ...]) -> Tensor:
    """[N, V]: the log-probs of all tokens, in the order of their ids."""
    rows = []
    for one in scores:
        assert one.top_ids_NK is not None and one.top_logprobs_NK is not None
        ids_NV, logprobs_NV = torch.tensor(one.top_ids_NK).long(), torch.tensor(one.top_logprobs_NK).double()
        rows.append(torch.empty_like(logprobs_NV).scatter_(1, ids_NV, logprobs_NV))
    return torch.cat(rows).log_softmax(-1)  # float32 rounds the sum


def diverge(policy_NV: Tensor, teacher_NV: Tensor, beta: float, k: int) -> tuple[Tensor, Tensor]:
    """[N] and [N, V]: the divergence of each token, and its gradient by the policy's logits."""
    logits_NV = policy_NV.clone().requires_grad_()
    own_NV = logits_NV.log_softmax(-1)
    ids_NK = teacher_NV.topk(k, dim=-1).indices
    value_N = divergence(own_NV.gather(1, ids_NK), teacher_NV.gather(1, ids_NK), beta)
    value_N.sum().backward()
    assert logits_NV.grad is not None
    return value_N.detach(), logits_NV.grad


def make_rows(policy_NV: Tensor, teacher_NV: Tensor) -> Iterator[str]:
    yield "| k | probability of the teacher's k | " + " | ".join(f"{name}: value, gradient" for name in BETAS) + " |"
    yield "|---|---|" + "---|" * len(BETAS)
    whole = {beta: diverge(policy_NV, teacher_NV, beta, policy_NV.shape[1]) for beta in BETAS.values()}
    for k in KS:
        cells = []
        for beta, (value_N, gradient_NV) in whole.items():
            some_N, part_NV = diverge(policy_NV, teacher_NV, beta, k)
            off = float((part_NV - gradient_NV).norm() / gradient_NV.norm())
            cells.append(f"{float(some_N.mean() / value_N.mean()):.3f}, {off:.3f}")
        share = float(teacher_NV.exp().topk(k, dim=-1).values.sum(-1).mean())
        yield f"| {k} | {share:.4f} | " + " | ".join(cells) + " |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    policy_NV, teacher_NV = asyncio.run(score_answers())
    rows = "\n".join(make_rows(policy_NV, teacher_NV))
    REPORT.write_text(f"""# What a teacher's most likely tokens leave out

`OMP_NUM_THREADS=1 python benchmarks/top_k_bias.py`: {len(policy_NV)} tokens of answers of `{POLICY}` to {NUM_PROMPTS}
held-out problems, taught by `{TEACHER}`; {policy_NV.shape[1]} tokens in the vocabulary. All tokens but the k likeliest
are one outcome. Value: the mean divergence, as a share of that over the whole vocabulary. Gradient: by the policy's
logits, the norm of its difference as a share of the whole one's norm.

{rows}
""")
    print(rows)


if __name__ == "__main__":
    main()
