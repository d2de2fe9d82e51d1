"""Requests to vLLM and its outputs in our types. Knows one request at a time.

vLLM streams two outputs per request: one with the first token, one with the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from grmpipe.models.engines.shared_requests import SharedRequest
from grmpipe.models.types import (
    EngineRefused,
    FinishReason,
    PromptScoring,
    SamplingParams,
    TokenScores,
    TopLogprobs,
    VersionSpan,
    join_spans,
)

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm import SamplingParams as VllmSampling
    from vllm.lora.request import LoRARequest
    from vllm.outputs import WeightVersionSpan

COLDEST = 0.01  # vLLM raises lower temperatures to this value; 0 is greedy


@dataclass(slots=True, eq=False)
class VllmRequest(SharedRequest):
    """A request in flight, under its name at vLLM."""

    request_id: str = ""
    model: str = ""  # an adapter's, or the engine's own
    renewed: bool = False  # withdrawn before its first token, to be sent again


@dataclass(slots=True)
class VllmSample:
    """The sampled tokens of a request."""

    token_ids: list[int] = field(default_factory=list)
    likely_ids: list[int] = field(default_factory=list)  # for each token: itself, then the likeliest if asked for
    likely_logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    spans: Sequence[WeightVersionSpan] = ()
    num_cached_tokens: int = 0
    scores: TokenScores | None = None
    experts_TLK: np.ndarray | None = None  # by layer of the model, including layers without experts

    def add(self, output: RequestOutput) -> None:
        from vllm.logprobs import FlatLogprobs

        piece = output.outputs[0]
        self.token_ids += piece.token_ids
        if piece.logprobs is not None:
            assert isinstance(piece.logprobs, FlatLogprobs)
            self.likely_ids += piece.logprobs.token_ids
            self.likely_logprobs += piece.logprobs.logprobs
        self.finish_reason = piece.finish_reason
        self.spans = piece.weight_versions or ()
        self.num_cached_tokens = output.num_cached_tokens or 0
        self.experts_TLK = piece.routed_experts  # only in the last piece


def adapter_request(name: str, number: int, path: str | None) -> LoRARequest:
    """An adapter as requests name it, from 1 on. Pushes replace it in memory; `path`: read before the first one."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path or "pushed")


def encode_versions(versions: Mapping[str, int]) -> str:
    """What vLLM calls the weights of all models together: one name for them is all that it has."""
    return json.dumps(versions)


def make_sampling(params: SamplingParams, seed: int, stop_token_ids: Sequence[int]) -> VllmSampling:
    """vLLM's parameters. `seed` is combined with the request's. Raises EngineRefused for a pattern that is no regular
    expression.
    """
    from vllm import SamplingParams as VllmSampling
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    try:
        return VllmSampling(
            max_tokens=params.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=params.seed ^ seed,
            stop=list(params.stop) or None,
            stop_token_ids=list(stop_token_ids),
            structured_outputs=None if params.pattern is None else StructuredOutputsParams(regex=params.pattern),
            logprobs=params.top_logprobs,  # and the sampled token's
            flat_logprobs=True,
            detokenize=bool(params.stop),
            output_kind=RequestOutputKind.DELTA,
        )
    except ValueError as error:
        raise EngineRefused(f"vLLM refuses {params}: {error}") from error


def make_scoring(last: Sequence[int], top_k: int = 0) -> VllmSampling:
    """Parameters for the log-probs of a prompt at temperature 1, with the `top_k` most likely tokens in the place of
    each; and of `last` as the token after it, without any other.
    """
    from vllm import SamplingParams as VllmSampling
    from vllm.sampling_params import RequestOutputKind

    return VllmSampling(
        max_tokens=1,
        temperature=1.0,
        seed=0,  # unseeded requests would use a generator that all of them share
        prompt_logprobs=top_k,
        logprob_token_ids=list(last) or None,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def read_scores(output: RequestOutput, last: Sequence[int]) -> tuple[float, ...]:
    from vllm.logprobs import FlatLogprobs

    prompt, after = output.prompt_logprobs, output.outputs[0].logprobs
    assert isinstance(prompt, FlatLogprobs)
    scores = list(prompt.logprobs)
    if last:
        assert isinstance(after, FlatLogprobs)
        scores.append(after.logprobs[after.token_ids.index(last[0], 1)])  # entry 0 is the sampled token
    return tuple(scores)


def read_prompt_scores(output: RequestOutput, last: Sequence[int], scoring: PromptScoring) -> TokenScores:
    """vLLM gives each prompt token but the first an entry, followed by those of the likeliest in its place."""
    from vllm.logprobs import FlatLogprobs

    if not scoring.top_k:
        return TokenScores(logprobs_N=np.array(read_scores(output, last)[scoring.start - 1 :], np.float32))
    prompt = output.prompt_logprobs
    assert isinstance(prompt, FlatLogprobs)
    by_token = (-1, 1 + scoring.top_k)
    logprobs = np.array(prompt.logprobs, np.float32).reshape(by_token)[scoring.start - 1 :]
    ids = np.array(prompt.token_ids, np.int32).reshape(by_token)[scoring.start - 1 :]
    return TokenScores(logprobs_N=logprobs[:, 0], top_ids_NK=ids[:, 1:], top_logprobs_NK=logprobs[:, 1:])


def refuse_what_cannot_run(params: SamplingParams) -> None:
    """Raises EngineRefused for what vLLM can't sample, in addition to the limits of all engines."""
    cold = 0 < params.temperature < COLDEST
    if cold or params.seed < 0:
        too_cold = f" (temperatures between 0 and {COLDEST} aren't supported)" if cold else ""
        raise EngineRefused(f"these sampling parameters can't be served{too_cold}: {params}")


def read_finish_reason(sampled: VllmSample) -> FinishReason:
    match sampled.finish_reason:
        case "stop":
            return "stop"
        case "length":
            return "length"
        case "abort":
            return "abort"
    raise EngineRefused(f"vLLM could not serve this request (finish reason {sampled.finish_reason!r})")


def read_top(sampled: VllmSample, top_k: int) -> TopLogprobs | None:
    """The `top_k` likely tokens for each sampled one, which vLLM puts first. None if none were asked for."""
    if not top_k or not sampled.token_ids:
        return None
    shape = (len(sampled.token_ids), 1 + top_k)
    return TopLogprobs(
        ids_TK=np.array(sampled.likely_ids, np.int32).reshape(shape),
        logprobs_TK=np.array(sampled.likely_logprobs, np.float32).reshape(shape),
    )


def read_experts(sampled: VllmSample, layers: Sequence[int]) -> np.ndarray | None:
    """The experts of layers that have some. None if vLLM returned none, as for an aborted request."""
    if sampled.experts_TLK is None:
        return None
    experts_TLK = sampled.experts_TLK[:, list(layers)]
    return experts_TLK if experts_TLK.dtype == np.uint8 else experts_TLK.astype(np.int16)  # from uint16


def read_spans(sampled: VllmSample, model_name: str, version: int) -> tuple[VersionSpan, ...]:
    """vLLM's own spans; `version` for tokens without one, and for no tokens at all."""
    stretches = [(json.loads(span.version)[model_name], span.start, span.end) for span in sampled.spans]
    return join_spans(model_name, stretches or [(version, 0, len(sampled.token_ids))], version)
