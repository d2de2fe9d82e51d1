"""The experts of sampled tokens, as the engine records them: those that the model itself chooses for the same text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.lm.moe.expert_routing import Routers
from grmpipe.models.settings import EmbeddedConfig
from grmpipe.models.types import Completion, SamplingParams, WeightReceipt, WeightTensor
from grmpipe.models.weights import receive_tensors as weight_loading
from grmpipe.models.weights.object_store import ObjectStore
from grmpipe.models.weights.weight_stream import WeightStream
from grmpipe.scheduler.routing.router import Continuation, PartialRequest
from grmpipe.scheduler.weights.weight_push import WeightMismatch, check_receipt

SHAPE = {
    "vocab_size": 272, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 128, "num_experts_per_tok": 2, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MIXTURES = {
    "qwen 3": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, num_experts=8, moe_intermediate_size=16, intermediate_size=64, mlp_only_layers=[1])
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=8, intermediate_size=16)),
}
OpenMixture = Callable[..., EmbeddedEngine]


@pytest.fixture(scope="session")
def mixtures(tmp_path_factory: pytest.TempPathFactory, model_path: str) -> Callable[[str, int], str]:
    """The directory of a mixture with random weights."""
    made: dict[tuple[str, int], str] = {}

    def path_of(family: str, seed: int = 0) -> str:
        if (family, seed) not in made:
            path = tmp_path_factory.mktemp("mixture")
            torch.manual_seed(seed)
            MIXTURES[family]().save_pretrained(path)
            AutoTokenizer.from_pretrained(model_path).save_pretrained(path)
            made[family, seed] = str(path)
        return made[family, seed]

    return path_of


@pytest.fixture
def open_mixture(mixtures: Callable[[str, int], str]) -> Iterator[OpenMixture]:
    opened: list[EmbeddedEngine] = []

    def open_one(
        family: str = "qwen 3", *, return_routed_experts: bool = True, **options: int | bool
    ) -> EmbeddedEngine:
        config = EmbeddedConfig(**options)  # type: ignore[arg-type]
        opened.append(
            EmbeddedEngine(
                EngineSpec(path=mixtures(family, 0), role="policy", return_routed_experts=return_routed_experts), config
            )
        )
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


async def push(engine: EmbeddedEngine, path: str, version: int) -> None:
    stream, store = WeightStream(load_causal_lm(path), "float32", 1 << 20), ObjectStore("float32")
    await engine.pause()
    await engine.begin_weights()
    for index in range(stream.num_buckets):
        await engine.load_bucket(store.post(index, stream.unshard_bucket(index)))
    await engine.commit_weights(version)
    await engine.resume()


def chosen(path: str, token_ids: Sequence[int]) -> np.ndarray:
    """[T, L, K], each token's experts in ascending order, by the model without a cache."""
    model = load_causal_lm(path)
    with torch.no_grad(), Routers.of(model).record_routing() as recording:
        model(torch.tensor([token_ids]))
    return np.sort(recording.experts_TLK.numpy(), -1)


def noted(completion: Completion) -> np.ndarray:
    assert completion.experts_TLK is not None
    return np.sort(completion.experts_TLK, -1)


@pytest.mark.parametrize("family", MIXTURES)
def test_each_token_that_was_fed_has_its_experts(family: str, open_mixture, mixtures, ask, prompt_of) -> None:
    """Siblings that copy a prompt, rows that move to free places, prompts of several lengths: six requests in three
    rows.
    """
    engine = open_mixture(family, max_batch_rows=3)
    prompts = [prompt_of(7), prompt_of(7), prompt_of(7), prompt_of(12), prompt_of(1), prompt_of(12)]

    async def all_at_once() -> list[Completion]:
        asks = [ask(engine, prompt, index, max_new_tokens=4 + 3 * index) for index, prompt in enumerate(prompts)]
        return list(await asyncio.gather(*asks))

    for prompt, completion in zip(prompts, asyncio.run(all_at_once()), strict=True):
        fed = (*prompt, *completion.token_ids)[:-1]
        assert completion.experts_TLK is not None and completion.experts_TLK.dtype == np.uint8
        np.testing.assert_array_equal(noted(completion), chosen(mixtures(family, 0), fed))


def test_engine_without_the_option_returns_no_experts(open_mixture, ask, prompt_of) -> None:
    assert asyncio.run(ask(open_mixture(return_routed_experts=False), prompt_of(5))).experts_TLK is None


def test_a_dense_model_has_none_to_note(model_path: str) -> None:
    with pytest.raises(ValueError, match="router_replay: Qwen3ForCausalLM has no router"):
        EmbeddedEngine(EngineSpec(path=model_path, role="policy", return_routed_experts=True), EmbeddedConfig())


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_that_change_under_a_request_change_no_token_that_was_fed(
    recompute: bool, open_mixture, mixtures, ask, prompt_of, monkeypatch
) -> None:
    """Prefilled again or not: a token's experts are those with which its successor was sampled. One request is
    prefilled again before the other.
    """
    monkeypatch.setattr("grmpipe.models.engines.embedded.embedded_worker.MOST_PREFILL_TOKENS", 4)
    engine = open_mixture(recompute_kv_on_sync=recompute)
    prompts, next_path = [prompt_of(4), prompt_of(12)], mixtures("qwen 3", 1)

    async def push_in_the_middle() -> list[Completion]:
        begun = asyncio.Event()
        first = asyncio.create_task(ask(engine, prompts[0], 0, max_new_tokens=100))
        second = asyncio.create_task(ask(engine, prompts[1], 1, max_new_tokens=100, on_first_token=begun.set))
        await begun.wait()
        await push(engine, next_path, 1)
        return [await first, await second]

    for prompt, completion in zip(prompts, asyncio.run(push_in_the_middle()), strict=True):
        (first, second) = completion.versions
        fed = (*prompt, *completion.token_ids)[:-1]
        assert len(noted(completion)) == len(fed) and 0 < first.end < second.end  # the length depends on the push
        num_old = len(prompt) + first.end - 1
        np.testing.assert_array_equal(noted(completion)[:num_old], chosen(mixtures("qwen 3", 0), fed)[:num_old])
        if recompute:
            np.testing.assert_array_equal(noted(completion)[num_old:], chosen(next_path, fed)[num_old:])


def test_migrated_request_keeps_its_first_experts(open_mixture, mixtures, ask, prompt_of) -> None:
    engine, other, prompt = open_mixture(), open_mixture(), prompt_of(6)
    continuation = Continuation(decode=lambda token_ids: "", seed_after=lambda seed, num_sampled: seed)

    async def moved() -> Completion:
        begun = asyncio.Event()
        asked = asyncio.create_task(ask(engine, prompt, max_new_tokens=100, on_first_token=begun.set))
        await begun.wait()
        await engine.abort("r")
        request = PartialRequest(prompt, SamplingParams(max_new_tokens=100))
        request.go_on(await asked, continuation)
        rest = await ask(other, request.prompt_ids, max_new_tokens=request.params.max_new_tokens)
        return request.whole(rest, continuation)

    completion = asyncio.run(moved())
    assert len(completion.token_ids) == 100
    fed = (*prompt, *completion.token_ids)[:-1]
    np.testing.assert_array_equal(noted(completion), chosen(mixtures("qwen 3", 0), fed))


def test_a_part_whose_experts_are_not_known_leaves_the_whole_without(open_mixture, ask, prompt_of) -> None:
    engine, silent = open_mixture(), open_mixture(return_routed_experts=False)
    first, second = (asyncio.run(ask(one, prompt_of(4))) for one in (engine, silent))
    continuation = Continuation(decode=lambda token_ids: "", seed_after=lambda seed, num_sampled: seed)
    assert continuation.join((first, second)).experts_TLK is None


def test_a_continued_trajectory_keeps_the_experts_of_the_first_time(
    open_mixture: OpenMixture, ask: Callable[..., Coroutine[object, object, Completion]]
) -> None:
    """Each turn's prompt begins with the whole turn before it."""

    async def turns(trajectory_id: str, engine: EmbeddedEngine) -> list[Completion]:
        ids: tuple[int, ...] = tuple(range(40, 70))
        completions = []
        for turn in range(4):
            completions.append(await ask(engine, ids, turn, trajectory_id=trajectory_id))
            ids = (*ids, *completions[-1].token_ids, 7, 8)
        return completions

    engine = open_mixture("mixtral")
    continued = asyncio.run(turns("g/0", engine))
    assert engine.stats().cached_tokens > 0
    for one, other in zip(continued, asyncio.run(turns("", open_mixture("mixtral"))), strict=True):
        assert one.token_ids == other.token_ids
        assert one.experts_TLK is not None and other.experts_TLK is not None
        assert np.array_equal(one.experts_TLK, other.experts_TLK)


class Dropping(torch.Tensor):
    """A tensor that keeps its values, whatever is loaded."""

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return self


@pytest.mark.parametrize("drops", [False, True])
def test_unapplied_experts_fail_their_own_push_even_if_no_probe_moved(
    mixtures: Callable[[str, int], str], monkeypatch: pytest.MonkeyPatch, drops: bool
) -> None:
    """In bfloat16, after one step with a learning rate of 1e-6."""
    path = mixtures("qwen 3", 0)
    model = load_causal_lm(path, "bfloat16")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.float() + 1e-6 * torch.randn(parameter.shape).sign())
    stream, store, held = WeightStream(model, "bfloat16", 1 << 20), ObjectStore("bfloat16"), weight_loading._held_tensor

    def held_tensor(state: dict[str, torch.Tensor], tensor: WeightTensor, own_name: str) -> torch.Tensor:
        target = held(state, tensor, own_name)
        return target.as_subclass(Dropping) if drops and ".experts." in tensor.name else target

    monkeypatch.setattr(weight_loading, "_held_tensor", held_tensor)
    engine = EmbeddedEngine(EngineSpec(path=path, role="policy", dtype="bfloat16"), EmbeddedConfig())
    buckets = [store.post(index, stream.unshard_bucket(index)) for index in range(stream.num_buckets)]
    sent = {tensor.name: tensor.checksum for bucket in buckets for tensor in bucket.tensors}

    async def push() -> WeightReceipt:
        await engine.pause()
        await engine.begin_weights()
        for bucket in buckets:
            await engine.load_bucket(bucket)
        return await engine.commit_weights(1)

    try:
        receipt = asyncio.run(push())
    finally:
        engine.close()
    if drops:
        with pytest.raises(WeightMismatch, match=r"policy-0 received other weights than version 1 in .*experts"):
            check_receipt("policy-0", 1, sent, receipt)
    else:
        check_receipt("policy-0", 1, sent, receipt)
