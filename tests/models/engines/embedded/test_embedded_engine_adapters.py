"""Several adapters of one base in an embedded engine: each as on an engine of its own, pushed one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from grmpipe.models.adapter_view import AdapterView
from grmpipe.models.engines.embedded import fused_decoder
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.lm.lora import ADAPTER, adapters, add_adapters, list_outgoing, merge_state, save_adapters
from grmpipe.models.settings import EmbeddedConfig, LoraConfig
from grmpipe.models.types import Completion, PromptScoring, SamplingParams, WeightBucket
from grmpipe.models.weights.object_store import ObjectStore
from grmpipe.models.weights.weight_stream import WeightStream

NAMES = ("a", "b", "c")
LORA = LoraConfig(rank=4, alpha=8.0, sync="adapters")


def trained(path: str, seed: int) -> PreTrainedModel:
    """A learner's model after some steps."""
    model = add_adapters(load_causal_lm(path), {ADAPTER: LORA}, "float32", seed)
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, low_rank in adapters(model):
            low_rank.b_OR.copy_(torch.randn(low_rank.b_OR.shape, generator=dice) * 0.2)
    return model


def buckets(model: PreTrainedModel) -> list[WeightBucket]:
    stream, store = WeightStream(model, "float32", 8192, list_outgoing(model, LORA, "float32")), ObjectStore("float32")
    return [store.post(index, stream.unshard_bucket(index)) for index in range(stream.num_buckets)]


@pytest.fixture(scope="module")
def stored(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoraConfig]:
    """Adapters in files, by name."""
    found = {}
    for seed, name in enumerate(NAMES, 1):
        model, directory = trained(model_path, seed), str(tmp_path_factory.mktemp(name))
        save_adapters(directory, model, model.state_dict(), LORA)
        found[name] = LoraConfig(rank=4, alpha=8.0, sync="adapters", path=directory)
    return found


Open = Callable[..., EmbeddedEngine]


@pytest.fixture
def open_with(model_path: str) -> Iterator[Open]:
    opened: list[EmbeddedEngine] = []

    def open_one(loras: dict[str, LoraConfig], path: str = model_path, **spec: Any) -> EmbeddedEngine:
        opened.append(EmbeddedEngine(EngineSpec(path=path, role="base", adapters=loras, **spec), EmbeddedConfig()))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


async def ask_all(engine: EmbeddedEngine, names: tuple[str, ...], ask: Any, prompt_of: Any) -> dict[str, Completion]:
    """The same five requests to each model, all at once; by model and number."""
    views = {name: AdapterView(engine, name) for name in names}
    asked = [(i, name) for i in range(5) for name in names]
    found = await asyncio.gather(
        *(ask(views[name], prompt_of(11 + 7 * i), i, max_new_tokens=20 + i) for i, name in asked)
    )
    return {f"{name}{i}": completion for (i, name), completion in zip(asked, found, strict=True)}


@pytest.mark.parametrize("kind", ["fused", "module"])
def test_each_adapter_answers_bit_for_bit_as_on_an_engine_of_its_own(
    kind: str, stored: Any, open_with: Open, ask: Any, prompt_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "module":
        monkeypatch.setattr(fused_decoder, "FAMILY", ())
    together = open_with(stored, batch_invariant=True)
    found = asyncio.run(ask_all(together, (*NAMES, "base"), ask, prompt_of))
    for name in (*NAMES, "base"):
        alone = asyncio.run(
            ask_all(
                open_with({k: v for k, v in stored.items() if k == name}, batch_invariant=True), (name,), ask, prompt_of
            )
        )
        for id, completion in alone.items():
            assert (found[id].token_ids, found[id].logprobs) == (completion.token_ids, completion.logprobs)
            assert {span.model for span in found[id].versions} == {name}
    assert len({found[f"{name}0"].token_ids for name in (*NAMES, "base")}) == 4, "they differ from each other"


def test_log_probs_are_those_of_the_merged_model(
    stored: Any, open_with: Open, ask: Any, prompt_of: Any, model_path: str
) -> None:
    engine = open_with(stored)
    found = asyncio.run(ask_all(engine, NAMES, ask, prompt_of))
    for seed, name in enumerate(NAMES, 1):
        learner, plain = trained(model_path, seed), AutoModelForCausalLM.from_pretrained(model_path)
        plain.load_state_dict(merge_state(learner, learner.state_dict()), strict=False)
        ids = prompt_of(25)
        with torch.no_grad():
            text = (*ids, *found[f"{name}2"].token_ids)
            logprobs_TV = plain(torch.tensor([text])).logits[0].log_softmax(-1)
        expected = [float(logprobs_TV[t, text[t + 1]]) for t in range(len(text) - 1)]
        assert found[f"{name}2"].logprobs == pytest.approx(expected[len(ids) - 1 :], abs=1e-4)
        view = AdapterView(engine, name)
        assert asyncio.run(view.score(text)) == pytest.approx(expected, abs=1e-4)
        scored = asyncio.run(ask(view, text, f"s{name}", max_new_tokens=1, scoring=PromptScoring(start=1)))
        assert scored.scores.logprobs_N.tolist() == pytest.approx(expected, abs=1e-4)


def test_requests_of_other_adapters_go_on_during_a_push_of_one(
    stored: Any, open_with: Open, ask: Any, prompt_of: Any, model_path: str
) -> None:
    engine, pushed = open_with(stored, batch_invariant=True), trained(model_path, 9)
    a, b = AdapterView(engine, "a"), AdapterView(engine, "b")
    ids = prompt_of(12)

    async def push_meanwhile() -> tuple[Completion, Completion, list[float]]:
        for number in range(50):  # one that ended before the pause would show nothing
            begun = asyncio.Event()
            kept = asyncio.create_task(ask(a, ids, f"kept{number}", max_new_tokens=90, on_first_token=begun.set))
            await begun.wait()
            await a.pause()
            await asyncio.sleep(0)
            if not kept.done():
                break
            await a.resume()
        await a.begin_weights()
        for bucket in buckets(pushed):
            await a.load_bucket(bucket)
            await ask(
                b, ids, f"beside {bucket.tensors[0].name}", max_new_tokens=4
            )  # would wait forever if b stood still
        beside = await ask(b, ids, "beside", max_new_tokens=60)
        assert not kept.done()
        await a.commit_weights(3)
        await a.resume()
        return await kept, beside, list(await a.score(ids))

    kept, beside, scores = asyncio.run(push_meanwhile())
    assert [span.version for span in kept.versions] == [0, 3]
    assert [span.version for span in beside.versions] == [0]
    alone = asyncio.run(
        ask(AdapterView(open_with({"b": stored["b"]}, batch_invariant=True), "b"), ids, "beside", max_new_tokens=60)
    )
    assert (beside.token_ids, beside.logprobs) == (alone.token_ids, alone.logprobs)
    with torch.no_grad():
        logprobs_TV = pushed(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert scores == pytest.approx([float(logprobs_TV[t, ids[t + 1]]) for t in range(len(ids) - 1)], abs=1e-4)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_rows_of_a_paused_adapter_are_in_no_pass_and_go_on_as_if_it_had_not_been(
    stored: Any, open_with: Open, prompt_of: Any, batch_invariant: bool
) -> None:
    def run(pause: bool) -> tuple[list[tuple[int, ...]], list[tuple[str, ...]]]:
        """The tokens of each request, and whose rows each pass took while `a` was paused."""
        engine = open_with(stored, batch_invariant=batch_invariant)
        engine.close()  # its thread: this test makes the steps
        batch, passes = engine._worker._batch, []
        verify = batch._decoder.verify

        def watched(*args: Any) -> Any:
            passes.append(tuple(args[3]))
            return verify(*args)

        batch._decoder.verify = watched
        rows = [
            batch.submit(
                prompt_of(5 + 3 * i), SamplingParams(max_new_tokens=25 if i % 3 else 10, seed=i), 0, model=name
            )
            for i, name in enumerate("acabaacabaab")
        ]
        with torch.inference_mode():
            for _ in range(4):
                batch.step()
            passes.clear()
            if pause:
                batch.paused.add("a")
                for _ in range(30):
                    batch.step()
            batch.paused.clear()
            seen = list(passes)
            while batch.has_work:
                batch.step()
        return [tuple(row.token_ids) for row in rows], seen

    found, passes = run(pause=True)
    assert found == run(pause=False)[0] and {len(tokens) for tokens in found} == {10, 25}
    own = [sum(name != "a" for name in names) for names in passes]
    assert own[0] == 5 and own[-1] < 5  # they end one by one
    assert [len(names) for names in passes] == [8 if batch_invariant else number for number in own]


def test_an_adapter_of_another_base_is_refused_by_its_key(
    stored: Any, open_with: Open, tmp_path: Path, model_path: str
) -> None:
    from tests.models.engines.conftest import byte_tokenizer

    LlamaForCausalLM(
        LlamaConfig(vocab_size=272, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
    ).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^path: .* is of another base.*\(4, 32\).*give an adapter of this base"):
        open_with(stored, path=str(tmp_path))
