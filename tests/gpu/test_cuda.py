"""Engine and learner on one GPU. Marked gpu: `make test` leaves them out, `pytest -m gpu` runs them."""

from __future__ import annotations

import asyncio

import pytest
import torch

from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.lm.causal_lm import compute_packed_logprobs, load_causal_lm
from grmpipe.models.settings import EmbeddedConfig
from grmpipe.models.types import Completion, Message, RequestContext, SamplingParams, VersionSpan
from grmpipe.tiny.resolve import resolve_model
from grmpipe.train.batching.packer import pack, pack_trees
from grmpipe.train.batching.prefix_tree import PrefixTree
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.types import BatchTotals, TrainingSample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

POLICY = resolve_model("tiny://policy")
QUESTION = Message(role="user", content="Ida has 6 coins. She gives 4 to Max. How many coins does Ida have?")
TOLERANCE_NATS = {"float32": 1e-3, "bfloat16": 0.25}


def sampled(dtype: str) -> tuple[tuple[int, ...], list[Completion]]:
    """The prompt and eight completions, sampled on the GPU."""

    async def go() -> tuple[tuple[int, ...], list[Completion]]:
        engine = EmbeddedEngine(EngineSpec(path=POLICY, role="policy", dtype=dtype, device="cuda"), EmbeddedConfig())
        prompt_ids = Renderer.load(POLICY).render((QUESTION,))
        try:
            return prompt_ids, list(
                await asyncio.gather(
                    *(
                        engine.generate(
                            prompt_ids,
                            SamplingParams(max_new_tokens=32, seed=seed),
                            RequestContext(request_id=str(seed), group_id="g", role="policy"),
                        )
                        for seed in range(8)
                    )
                )
            )
        finally:
            engine.close()

    return asyncio.run(go())


def packed(prompt_ids: tuple[int, ...], completions: list[Completion]) -> list[TrainingSample]:
    return [
        TrainingSample(
            group_id="g",
            sibling=sibling,
            segment=0,
            token_ids=prompt_ids + completion.token_ids,
            loss_mask=(0,) * len(prompt_ids) + (1,) * len(completion.token_ids),
            sampler_logprobs=(0.0,) * len(prompt_ids) + completion.logprobs,
            advantages=(0.0,) * len(prompt_ids) + (1.0 - sibling % 2 * 2,) * len(completion.token_ids),
            versions=(
                VersionSpan(
                    model="policy", version=0, start=len(prompt_ids), end=len(prompt_ids) + len(completion.token_ids)
                ),
            ),
        )
        for sibling, completion in enumerate(completions)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampled_log_probs_equal_a_plain_forward_pass(dtype: str) -> None:
    prompt_ids, completions = sampled(dtype)
    model = load_causal_lm(POLICY, dtype, "cuda")
    micro_batch = pack(packed(prompt_ids, completions))
    with torch.no_grad():
        logprobs_T = compute_packed_logprobs(
            model,
            torch.tensor(micro_batch.token_ids_T, device="cuda"),
            torch.tensor(micro_batch.position_ids_T, device="cuda"),
            torch.tensor(micro_batch.sample_lengths_S),
        ).logprobs_T.float().cpu()  # fmt: skip
    trained_T = torch.tensor(micro_batch.loss_mask_E) > 0
    error_T = (logprobs_T - torch.tensor(micro_batch.sampler_logprobs_E))[trained_T].abs()
    assert error_T.max() < TOLERANCE_NATS[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_that_siblings_share_says_what_its_copies_say(dtype: str) -> None:
    """Log-probs and gradients; bfloat16 is flash attention with more keys than queries."""
    samples = packed(*sampled("float32"))
    shared, alone = pack_trees([PrefixTree.of(samples)]), pack(samples)
    assert len(shared.token_ids_T) < len(alone.token_ids_T) / 2
    found = []
    for batch in (shared, alone):
        spec = LearnerSpec(
            model_path=POLICY, train=TrainConfig(dtype=dtype), algorithm=AlgorithmConfig(), max_new_tokens=32,
            device="cuda",
        )  # fmt: skip
        learner = Learner(spec)
        trained_T = batch.loss_mask_E > 0
        logprobs_N = torch.tensor(learner.old_pass(batch).logprobs_T[trained_T])
        learner.accumulate(batch)
        gradients = [parameter.grad.full_tensor() for parameter in learner._model.parameters()]
        found.append((logprobs_N, torch.cat([gradient.flatten() for gradient in gradients]).float().cpu()))
    (shared_N, shared_gradient), (alone_N, alone_gradient) = found
    assert (shared_N - alone_N).abs().max() < TOLERANCE_NATS[dtype]
    likeness = torch.nn.functional.cosine_similarity(shared_gradient, alone_gradient, dim=0)
    assert likeness > (0.9999 if dtype == "float32" else 0.99)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_learner_steps_on_the_gpu_and_the_engine_takes_its_weights(dtype: str) -> None:
    prompt_ids, completions = sampled("float32")
    train = TrainConfig(lr=1e-3, warmup_steps=0, dtype=dtype)
    spec = LearnerSpec(
        model_path=POLICY,
        train=train,
        algorithm=AlgorithmConfig(),
        max_new_tokens=32,
        device="cuda",
        sync_dtype="float32",
    )
    learner = Learner(spec)
    before = learner.score(prompt_ids)
    learner.accumulate(pack(packed(prompt_ids, completions)))
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    metrics = learner.step(BatchTotals(num_loss_tokens=num_tokens, num_sequences=8, num_groups=1, oldest_version=0))
    assert metrics["train/grad_norm"] > 0
    assert learner.score(prompt_ids) != before

    async def take_weights() -> tuple[float, ...]:
        engine = EmbeddedEngine(
            EngineSpec(path=POLICY, role="policy", dtype="float32", device="cuda"), EmbeddedConfig()
        )
        await engine.pause()
        await engine.begin_weights()
        for index in range(learner.sender.num_buckets()):
            bucket = learner.sender.bucket(index)
            assert bucket is not None
            await engine.load_bucket(bucket)
        await engine.commit_weights(1)
        await engine.resume()
        scores = await engine.score(prompt_ids)
        engine.close()
        return scores

    assert asyncio.run(take_weights()) == pytest.approx(learner.score(prompt_ids), abs=TOLERANCE_NATS[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_layers_on_the_gpu_say_what_plain_ones_say(dtype: str) -> None:
    batch = pack(packed(*sampled("float32")))
    found = []
    for how in ("none", "layers"):
        train = TrainConfig(dtype=dtype, activation_checkpointing="full", compile=how)
        spec = LearnerSpec(
            model_path=POLICY, train=train, algorithm=AlgorithmConfig(), max_new_tokens=32, device="cuda"
        )
        learner = Learner(spec)
        assert learner.list_uncompiled() == ""
        learner.accumulate(batch)
        gradients = [parameter.grad.full_tensor().flatten() for parameter in learner._model.parameters()]
        found.append((torch.tensor(learner.old_pass(batch).logprobs_T), torch.cat(gradients).float().cpu()))
    (plain_T, plain_gradient), (compiled_T, compiled_gradient) = found
    assert (plain_T - compiled_T).abs().max() < TOLERANCE_NATS[dtype]
    likeness = torch.nn.functional.cosine_similarity(plain_gradient, compiled_gradient, dim=0)
    assert likeness > (0.9999 if dtype == "float32" else 0.99)
