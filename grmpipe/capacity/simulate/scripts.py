"""The answers of simulated engines: lengths, scripts, and a tokenizer that only counts. Pure."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist

from grmpipe.config.judge import Scale
from models.engines.simulated.simulated_engine import Script
from models.seeds import derive_seed
from models.types import FinishReason, Message, RequestContext, SamplingParams

FILLER = 7  # the id of every sampled token except a judgement's last one
FIRST_SCORE = 1000  # a judgement ends with the id FIRST_SCORE + its score - the scale's low end
PROMPT_ID = 1 << 20  # this and above: the first token of a prompt, by its text
TOKEN = "\x1a"  # the text of FILLER: one token, whatever the tokenizer
UNREADABLE = "no score at all"

Lengths = Callable[[float], float]  # a quantile in (0, 1) -> tokens


def lognormal(median: float, sigma: float) -> Lengths:
    """Long-tailed, as rollouts are: the mean is median * exp(sigma**2 / 2)."""
    normal = NormalDist()
    return lambda quantile: median * math.exp(sigma * normal.inv_cdf(quantile))


def measured(lengths: Sequence[int]) -> Lengths:
    """The distribution of measured lengths."""
    ordered = sorted(lengths)
    return lambda quantile: ordered[min(int(quantile * len(ordered)), len(ordered) - 1)]


def lengths_in(run_dir: Path) -> dict[str, list[int]]:
    """Role -> tokens of the rollouts and judgements of a run. Raises OSError if there are no journals."""
    found: dict[str, list[int]] = {"policy": [], "grm": []}
    for record in records(run_dir / "rollouts.jsonl"):
        found["policy"] += [len(turn["token_ids"]) for turn in record["turns"]]
    if (run_dir / "judgements.jsonl").exists():
        for record in records(run_dir / "judgements.jsonl"):
            asked = record["judgements"] + [failed for failed in record["failures"] if "completion" in failed]
            found["grm"] += [len(judgement["completion"]["token_ids"]) for judgement in asked]
    return found


def records(path: Path) -> list[dict]:
    """A torn last line is ignored."""
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.split("\n") if line]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Writes the answers of a simulated engine. An answer depends only on the request's id: a migrated or retried
    request gets the same answer.

    scale: of a GRM's scores; None for a policy.
    principles: lengths of shared principles; None: the same as judgements.
    boxed: format of the scores; num_scores: number of equal scores.
    """

    lengths: Lengths
    seed: int
    scale: Scale | None = None
    boxed: bool = False
    num_scores: int = 1
    principles: Lengths | None = None
    unparseable_share: float = 0.0

    def __call__(self, prompt_ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
        seed = derive_seed(self.seed, context.request_id)
        lengths = self.lengths
        if self.principles is not None and "/principles/" in context.request_id:
            lengths = self.principles
        wanted = max(1, round(lengths((seed + 0.5) / 2**63)))
        before = sampled_before(prompt_ids)
        left = max(1, wanted - before)
        ended: FinishReason = "stop" if left <= params.max_new_tokens else "length"
        token_ids = filler(min(left, params.max_new_tokens))
        if self.scale is not None and ended == "stop":
            token_ids = (*token_ids[:-1], FIRST_SCORE + self._score(seed, context.request_id))
        return Script(token_ids=token_ids, text=self.decode(token_ids), finish_reason=ended)

    def decode(self, token_ids: Sequence[int]) -> str:
        if self.scale is None or not token_ids or token_ids[-1] == FILLER:
            return text_of(len(token_ids))
        number = token_ids[-1] - FIRST_SCORE
        if number < 0 or self.scale.low + number > self.scale.high:
            return UNREADABLE
        score = self.scale.low + number
        scores = ", ".join([str(score)] * self.num_scores)
        return f"\\boxed{{{scores}}}" if self.boxed else f"Score: {score}"

    def _score(self, seed: int, request_id: str) -> int:
        """The score, as an offset from the low end of the scale; above the high end for an unparseable judgement."""
        assert self.scale is not None
        num_scores = self.scale.high - self.scale.low + 1
        failing = self.unparseable_share
        if failing and derive_seed(self.seed, f"unreadable {request_id}") < failing * 2**63:
            return num_scores
        return seed % num_scores


def sampled_before(prompt_ids: Sequence[int]) -> int:
    """The tokens of an answer that began on another engine: they are the end of the prompt."""
    count = 0
    while count < len(prompt_ids) and prompt_ids[-1 - count] == FILLER:
        count += 1
    return count


class CountingRenderer:
    """A tokenizer that makes token ids by the number of characters. Equal texts get equal ids, others don't. Sampled
    text keeps its number of tokens.

    chars_per_token: of prose with the model's tokenizer and chat template.
    """

    def __init__(self, chars_per_token: float) -> None:
        self._chars_per_token = chars_per_token

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        text = "\0".join(message.content for message in messages)
        sampled = text.count(TOKEN)
        count = sampled + math.ceil((len(text) - sampled) / self._chars_per_token)
        return (PROMPT_ID + zlib.crc32(text.encode()), *zeros(max(0, count - 1)))

    def extend(self, replies: Sequence[Message]) -> tuple[int, ...]:
        return self.render(replies)


# Shared by all answers of a length: otherwise 100 000 in flight would not fit.


@lru_cache(maxsize=1 << 14)
def filler(count: int) -> tuple[int, ...]:
    return (FILLER,) * count


@lru_cache(maxsize=1 << 14)
def text_of(count: int) -> str:
    return TOKEN * count


@lru_cache(maxsize=1 << 10)
def zeros(count: int) -> tuple[int, ...]:
    return (0,) * count
