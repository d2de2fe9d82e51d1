"""A random model small enough for every test, engines on it, and plain transformers' values for their tokens."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grmpipe.models.engines.embedded import embedded_worker
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.seeds import derive_seed
from grmpipe.models.settings import EmbeddedConfig
from grmpipe.models.types import Completion, RequestContext, SamplingParams, ignore_first_token

VOCAB_SIZE, WINDOW = 272, 128
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(
    scope="session",
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
        ),
    ],
)
def device(request: pytest.FixtureRequest) -> str:
    """Of an engine under a test that means as much on either."""
    return str(request.param)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: any text round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )


def tiny_qwen3(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=WINDOW, tie_word_embeddings=True,
        initializer_range=0.2,  # wide, so that attention and the next token depend on the context
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_qwen3(seed=0).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


OpenEngine = Callable[..., EmbeddedEngine]


@pytest.fixture
def open_engine(model_path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenEngine]:
    """Opens engines by fields of EngineSpec and of EmbeddedConfig; closes them after the test.

    prefill_tokens: of one pass, at most.
    """
    opened: list[EmbeddedEngine] = []

    def open_one(
        path: str | Path = model_path,
        *,
        speculation: str = "none",
        batch_invariant: bool = False,
        prefill_tokens: int = embedded_worker.MOST_PREFILL_TOKENS,
        **options: int,
    ) -> EmbeddedEngine:
        monkeypatch.setattr(embedded_worker, "MOST_PREFILL_TOKENS", prefill_tokens)
        spec = EngineSpec(path=str(path), role="policy", speculation=speculation, batch_invariant=batch_invariant)
        opened.append(EmbeddedEngine(spec, EmbeddedConfig(**options)))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


@pytest.fixture
def engine(open_engine: OpenEngine) -> EmbeddedEngine:
    return open_engine()


Ask = Callable[..., Coroutine[Any, Any, Completion]]


@pytest.fixture
def ask() -> Ask:
    """`await ask(engine, prompt_ids, request_id, max_new_tokens=..)`; the seed is the request's id."""

    def generate(
        engine: EmbeddedEngine,
        prompt_ids: Sequence[int],
        request_id: object = "r",
        priority: int = 0,
        trajectory_id: str = "",
        on_first_token: Callable[[], None] = ignore_first_token,
        **params: Any,
    ) -> Coroutine[Any, Any, Completion]:
        sampling = SamplingParams(**{"max_new_tokens": 8, "seed": derive_seed(0, str(request_id)), **params})
        context = RequestContext(
            request_id=str(request_id), group_id="g", role="policy", priority=priority, trajectory_id=trajectory_id
        )
        return engine.generate(prompt_ids, sampling, context, on_first_token)

    return generate


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    dice = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(0, 256, (length,), generator=dice).tolist())


@pytest.fixture(name="prompt_of")
def _prompt_of() -> Callable[..., tuple[int, ...]]:
    """Random prompts; the same length and seed give the same prompt."""
    return prompt_of


class Plain:
    """A model run by transformers: one text at a time, no cache."""

    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path).eval()

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([token_ids])).logits[0]

    def logprobs(
        self, prompt_ids: Sequence[int], completion: Completion, temperature: float = 1.0, top_p: float = 1.0
    ) -> list[float]:
        """The log-probs of the sampled tokens."""
        logits_TV = self.logits((*prompt_ids, *completion.token_ids))[len(prompt_ids) - 1 : -1] / (temperature or 1)
        return [
            float(nucleus(logits_V, top_p).log_softmax(-1)[token_id])
            for logits_V, token_id in zip(logits_TV, completion.token_ids, strict=True)
        ]


def nucleus(logits_V: Tensor, top_p: float) -> Tensor:
    """Top-p by its definition: tokens one by one, the likeliest first, until their probability is top_p."""
    probs_V, kept_V, held = logits_V.softmax(-1), torch.zeros(len(logits_V), dtype=torch.bool), 0.0
    for candidate in probs_V.argsort(descending=True):
        if held >= top_p < 1:
            break
        kept_V[candidate], held = True, held + float(probs_V[candidate])
    return logits_V.masked_fill(~kept_V, -torch.inf)


@pytest.fixture(scope="session")
def plain(model_path: str) -> Plain:
    return Plain(model_path)


@pytest.fixture(scope="session")
def next_version_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same architecture with other weights."""
    path = tmp_path_factory.mktemp("next_version")
    tiny_qwen3(seed=1).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def next_plain(next_version_path: str) -> Plain:
    return Plain(next_version_path)
