"""The answers of simulated engines: lengths, scripts, and a tokenizer that only counts."""

import math
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist, fmean, variance

from grmpipe.capacity.plan.work import ToolUse
from grmpipe.config.judge import Scale
from grmpipe.config.keys.entry_names import JUDGE, POLICY
from grmpipe.models.engines.simulated.simulated_engine import Script
from grmpipe.models.seeds import derive_seed, is_drawn
from grmpipe.models.types import Message, ParsedTurn, RequestContext, SamplingParams, ToolSpec
from grmpipe.observe.journal import read_records
from grmpipe.observe.records import Record, unpack_numbers

FILLER = 7  # the id of every sampled token except a judgement's last one
VERDICT_ID = 1 << 40  # this and above: the last token of a judgement, by its text
TURN = re.compile(r"/t\d+$")  # the end of the request ids of a policy's turns
TURN_OF_JUDGE = re.compile(r"(/j\d+\.\d+(?:@.*)?)/t\d+$")  # the same of a judge with tools
PROMPT_ID = 1 << 20  # this and above: the first token of a prompt, by its text
TOKEN = "\x1a"  # the text of FILLER: one token, whatever the tokenizer
UNREADABLE = "no score at all"

NORMAL = NormalDist()

Lengths = Callable[[float], float]  # a quantile in (0, 1) -> tokens


def lognormal(median: float, sigma: float) -> Lengths:
    """Long-tailed, as rollouts are: the mean is median * exp(sigma**2 / 2)."""
    return lambda quantile: median * math.exp(sigma * NORMAL.inv_cdf(quantile))


def fit_lengths(lengths: Sequence[int]) -> Lengths:
    """The distribution of measured lengths."""
    ordered = sorted(lengths)
    return lambda quantile: ordered[min(int(quantile * len(ordered)), len(ordered) - 1)]


def lengths_in(run_dir: Path) -> dict[str, list[int]]:
    """`policy` -> tokens of the rollouts' turns of a run; judge -> tokens of its judgements. Raises OSError if there
    are no journals.

    The judgements of a run with one judge name none: they are those of the first one.
    """
    found: defaultdict[str, list[int]] = defaultdict(list)
    for _, lengths in read_records(run_dir / "rollouts.jsonl", find_turn_lengths):
        found[POLICY] += lengths
    if (run_dir / "judgements.jsonl").exists():
        for judgements in read_records(run_dir / "judgements.jsonl", find_judgement_lengths):
            for judge, length in judgements:
                found[judge].append(length)
    return dict(found)


def find_turn_lengths(record: Record) -> tuple[str, list[int]]:
    """The group of a rollout, and the tokens of its turns."""
    return str(record.get("group_id")), [len(turn["token_ids"]) for turn in unpack_numbers(record)["turns"]]


def find_judgements(record: Record) -> list[tuple[str, Record]]:
    """The judge and the completion of each judgement."""
    record = unpack_numbers(record)
    asked = record["judgements"] + [failed for failed in record["failures"] if "completion" in failed]
    return [(str(one.get("judge", JUDGE)), one["completion"]) for one in asked]


def find_judgement_lengths(record: Record) -> list[tuple[str, int]]:
    """The judge and the tokens of each judgement, without what tools returned."""
    return [
        (judge, len(one["token_ids"]) - sum(map(count_results, one.get("tool_results", ()))))
        for judge, one in find_judgements(record)
    ]


def count_results(results: Record) -> int:
    return int(results["end"] - results["start"])


def measure_tool_use(run_dir: Path, judge: str) -> ToolUse:
    """How a judge called tools in a run. Raises OSError if there are no journals."""
    lines = read_records(run_dir / "judgements.jsonl", find_judgements)
    asked = [one.get("tool_results", ()) for line in lines for name, one in line if name == judge]
    results = [one for some in asked for one in some if count_results(one)]
    if not results:
        return ToolUse(turns=0, seconds=0, tokens=0)
    return ToolUse(
        turns=len(results) / len(asked),
        seconds=fmean(one.get("took_s", 0.0) for one in results),
        tokens=fmean(map(count_results, results)),
    )


def correlation_in(run_dir: Path) -> float:
    """The intraclass correlation of the lengths of siblings of a run, in logarithms: ICC(1) of Shrout & Fleiss 1979,
    doi:10.1037/0033-2909.86.2.420, between 0 and 1.
    """
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for group_id, lengths in read_records(run_dir / "rollouts.jsonl", find_turn_lengths):
        groups[group_id] += [math.log(1 + length) for length in lengths[:1]]
    several = [group for group in groups.values() if len(group) > 1]
    if len(several) < 2:
        return 0.0
    size = fmean(map(len, several))
    between = size * variance(map(fmean, several))
    within = fmean(map(variance, several))
    return min(max((between - within) / ((between + (size - 1) * within) or 1.0), 0.0), 1.0)


def to_quantile(seed: int) -> float:
    """In (0, 1), of a seed of 63 bits."""
    return (seed + 0.5) / 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Writes the answers of one kind: turns of the policy, or judgements of one judge. An answer depends only on the
    request's id: a migrated or retried request gets the same answer.

    scale: a judge's, for its scores; None for turns.
    sibling_correlation: how far the lengths of answers to the same prompt correlate, as normal scores.
    boxed: format of the scores; num_scores: number of equal scores.
    """

    lengths: Lengths
    seed: int
    scale: Scale | None = None
    sibling_correlation: float = 0.0
    boxed: bool = False
    num_scores: int = 1
    unparseable_share: float = 0.0

    def __call__(self, prompt_ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
        seed = derive_seed(self.seed, context.request_id)
        wanted = max(1, round(self.lengths(self._quantile(prompt_ids, seed))))
        left = max(1, wanted - count_sampled_before(prompt_ids))
        if left > params.max_new_tokens:
            cut = params.max_new_tokens
            return Script(token_ids=filler(cut), text=make_text(cut), finish_reason="length")
        if self.scale is None:
            return Script(token_ids=filler(left), text=make_text(left))
        verdict = self._verdict(self.scale, seed, context.request_id)
        return Script(token_ids=(*filler(left - 1), VERDICT_ID + zlib.crc32(verdict.encode())), text=verdict)

    def _quantile(self, prompt_ids: Sequence[int], seed: int) -> float:
        own, shared = to_quantile(seed), self.sibling_correlation
        if not shared:
            return own
        common = to_quantile(derive_seed(self.seed, str(prompt_ids[0])))
        return NORMAL.cdf(math.sqrt(shared) * NORMAL.inv_cdf(common) + math.sqrt(1 - shared) * NORMAL.inv_cdf(own))

    def _verdict(self, scale: Scale, seed: int, request_id: str) -> str:
        failing = self.unparseable_share
        if failing and is_drawn(self.seed, f"unreadable {request_id}", failing):
            return UNREADABLE
        score = scale.low + seed % (scale.high - scale.low + 1)
        scores = ", ".join([str(score)] * self.num_scores)
        return f"\\boxed{{{scores}}}" if self.boxed else f"Score: {score}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWriter:
    """Writes the answers of a model: of each judge that asks it, and of the policy's turns.

    turns: None for a model that only judges. judges: by name. verdicts: last id of a judgement -> its text.
    """

    turns: Writer | None
    judges: Mapping[str, Writer] = field(default_factory=dict)
    verdicts: dict[int, str] = field(default_factory=dict)

    def __call__(self, prompt_ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
        context = replace(context, request_id=TURN_OF_JUDGE.sub(r"\1", context.request_id))
        is_turn = self.turns is not None and TURN.search(context.request_id)
        writer = self.turns if self.turns is not None and is_turn else self.judges[find_judge(context.request_id)]
        script = writer(prompt_ids, params, context)
        if (last := script.token_ids[-1]) != FILLER:
            self.verdicts[last] = script.text
        return script

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, also of one that was continued on another engine."""
        return self.verdicts.get(token_ids[-1] if token_ids else FILLER) or make_text(len(token_ids))


def find_judge(request_id: str) -> str:
    """The judge that sent a request: the ids of all but the first judge's end with `@<name>`."""
    _, marked, judge = request_id.rpartition("@")
    return judge if marked else JUDGE


def count_sampled_before(prompt_ids: Sequence[int]) -> int:
    """The tokens of an answer that began on another engine: they are the end of the prompt."""
    count = 0
    while count < len(prompt_ids) and prompt_ids[-1 - count] == FILLER:
        count += 1
    return count


class CountingRenderer:
    """A tokenizer that makes token ids by the number of characters. Equal texts get equal ids, others don't. Sampled
    text keeps its number of tokens.

    chars_per_token: the mean in prose, with the model's tokenizer and chat template.
    """

    def __init__(self, chars_per_token: float) -> None:
        self._chars_per_token = chars_per_token

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        assert not tools, "a simulated environment has none"
        text = "\0".join(message.content for message in messages)
        sampled = text.count(TOKEN)
        count = sampled + math.ceil((len(text) - sampled) / self._chars_per_token)
        return (PROMPT_ID + zlib.crc32(text.encode()), *zeros(max(0, count - 1)))

    def encode_inserted(self, text: str) -> tuple[int, ...]:
        return zeros(math.ceil(len(text) / self._chars_per_token))

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
def make_text(count: int) -> str:
    return TOKEN * count


@lru_cache(maxsize=1 << 10)
def zeros(count: int) -> tuple[int, ...]:
    return (0,) * count
