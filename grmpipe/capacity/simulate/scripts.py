"""The answers of simulated engines: lengths, scripts, and a tokenizer that only counts. Pure."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist

from grmpipe.config.entry_names import JUDGE, POLICY
from grmpipe.config.judge import Scale
from models.engines.simulated.simulated_engine import Script
from models.seeds import derive_seed
from models.types import FinishReason, Message, ParsedTurn, RequestContext, SamplingParams, ToolSpec

FILLER = 7  # the id of every sampled token except a judgement's last one
FIRST_SCORE = 1000  # a judgement ends with the first id of its writer + its score - the scale's low end
IDS_APART = 1 << 14  # first ids of the writers of one model: a judgement's last id says who wrote it
TURN = re.compile(r"/t\d+$")  # the end of the request ids of a policy's turns
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
    """`policy` -> tokens of the rollouts' turns of a run; judge -> tokens of its judgements. Raises OSError if there
    are no journals.

    The judgements of a run with one judge name none: they are those of the first one.
    """
    found: defaultdict[str, list[int]] = defaultdict(list)
    for record in records(run_dir / "rollouts.jsonl"):
        found[POLICY] += [len(turn["token_ids"]) for turn in record["turns"]]
    if (run_dir / "judgements.jsonl").exists():
        for record in records(run_dir / "judgements.jsonl"):
            asked = record["judgements"] + [failed for failed in record["failures"] if "completion" in failed]
            for judgement in asked:
                found[judgement.get("judge", JUDGE)].append(len(judgement["completion"]["token_ids"]))
    return dict(found)


def records(path: Path) -> list[dict]:
    """A torn last line is ignored."""
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.split("\n") if line]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Writes the answers of one kind: turns of the policy, or judgements of one judge. An answer depends only on the
    request's id: a migrated or retried request gets the same answer.

    scale: of a judge's scores; None for turns.
    first_id: the last id of a judgement with the lowest score.
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
    first_id: int = FIRST_SCORE

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
            token_ids = (*token_ids[:-1], self.first_id + self._score(seed, context.request_id))
        return Script(token_ids=token_ids, text=self.decode(token_ids), finish_reason=ended)

    def decode(self, token_ids: Sequence[int]) -> str:
        if self.scale is None or not token_ids or token_ids[-1] == FILLER:
            return text_of(len(token_ids))
        number = token_ids[-1] - self.first_id
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWriter:
    """Writes the answers of a model: of each judge that asks it, and of the policy's turns.

    turns: None for a model that only judges. judges: by name, with first ids that are IDS_APART.
    """

    turns: Writer | None
    judges: Mapping[str, Writer]

    def __call__(self, prompt_ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
        return self._writer_of(context.request_id)(prompt_ids, params, context)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, by the writer of its last id."""
        last = token_ids[-1] if token_ids else FILLER
        if last == FILLER:
            return text_of(len(token_ids))
        writers = list(self.judges.values())
        return writers[(last - FIRST_SCORE) // IDS_APART].decode(token_ids)

    def _writer_of(self, request_id: str) -> Writer:
        if self.turns is not None and TURN.search(request_id):
            return self.turns
        return self.judges[judge_of(request_id)]


def judge_of(request_id: str) -> str:
    """The judge that sent a request: the ids of all but the first judge's end with `@<name>`."""
    _, marked, judge = request_id.rpartition("@")
    return judge if marked else JUDGE


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

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        assert not tools, "a simulated environment has none"
        text = "\0".join(message.content for message in messages)
        sampled = text.count(TOKEN)
        count = sampled + math.ceil((len(text) - sampled) / self._chars_per_token)
        return (PROMPT_ID + zlib.crc32(text.encode()), *zeros(max(0, count - 1)))

    def extend(
        self, replies: Sequence[Message], tools: Sequence[ToolSpec] = (), *, ended: bool = True
    ) -> tuple[int, ...]:
        return self.render(replies, tools)

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
        return ParsedTurn(content=text)


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
