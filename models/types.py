"""The shared types of models: messages, sampling, completions, weights, engines."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import msgspec
import numpy as np

FinishReason = Literal["stop", "length", "abort"]
UNKNOWN_ID = -1  # stands for a token id that is no longer kept: no model takes it
ANY_EXPERT = -1  # stands for an expert: the choice is unknown, so the router chooses


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool that a model may call. `parameters`: JSON Schema of an object with its arguments."""

    name: str
    description: str
    parameters: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool. `call_id` is what its result refers to; few chat templates show it."""

    name: str
    arguments: Mapping[str, object]
    call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """A completion in the model's own format for tool calls, taken apart.

    content: the text around the calls.
    errors:  what is wrong with calls that couldn't be read, in words for the model.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation. `role` is system, user, assistant or tool.

    tool_calls: an assistant's.
    name, tool_call_id: the tool, and the call that it answers, in a tool's result.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """How long a model may think before it must answer. It counts towards `max_new_tokens`.

    num_tokens:   tokens of the completion after which a thought that still goes on is ended.
    answer_start: text inserted after the closing marker, with which the answer begins.
    pattern:      a regular expression that the rest must match; None: free.
    """

    num_tokens: int
    answer_start: str = ""
    pattern: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScoring:
    """Which tokens of a prompt to score: those from `start` on (1 or more), and for each place the `top_k` most likely
    ones.
    """

    start: int
    top_k: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The parameters of one completion. `temperature` 0 is greedy; a seed makes it repeatable in any batch.

    top_k, min_p: tokens that may be sampled: the k likeliest (0: all), and those with at least this share of the
        likeliest one's probability. They come before top_p.
    begun: what the prompt already has of the completion, for a ReasoningEngine: it may open a thought.
    scoring: the prompt is scored instead, and no completion is kept; see `make_scoring_params`.
    top_logprobs: how many likely tokens to return for each sampled one (`Completion.top`); not every engine can.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    pattern: str | None = None  # a regular expression that the whole text must match; not every engine can
    thinking: ThinkingBudget | None = None  # for a ReasoningEngine; others ignore it
    begun: str = ""
    scoring: PromptScoring | None = None
    top_logprobs: int = 0

    @property
    def is_truncated(self) -> bool:
        """Whether it samples from a part of the distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


def make_scoring_params(start: int, top_k: int = 0) -> SamplingParams:
    """The parameters of a request that scores its prompt from token `start` on. Its completion has no tokens; its
    `scores` are by the weights of its only version.
    """
    return SamplingParams(max_new_tokens=1, scoring=PromptScoring(start=start, top_k=top_k))


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) of a completion were sampled by `version` of `model`."""

    model: str
    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """A model's scores of the last N tokens of a sequence, at temperature 1. Natural logs.

    logprobs_N:      float32, each token's, given all tokens before it.
    top_ids_NK:      int32, the K most likely tokens for each place, the likeliest first; None: not asked for.
    top_logprobs_NK: float32, their log-probs.
    """

    logprobs_N: np.ndarray
    top_ids_NK: np.ndarray | None = None
    top_logprobs_NK: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAnswer:
    """The end of a completion that was asked for: a judge's verdict, because the judgement had ended without it, or its
    second turn.

    start, end: tokens [start, end) that weren't sampled: they ask for it. From `end` on it is the answer.
    text_start: where its text begins.
    is_turn: whether every judgement has it: a second turn.
    """

    start: int
    end: int
    text_start: int
    is_turn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResults:
    """What answered a turn with calls within a completion: a judge's that uses tools.

    start, end: tokens [start, end) that weren't sampled: the end of the turn if it has none, the results, and the start
        of the next turn.
    text_start, text_end: where they stand in the text.
    calls: the tools that the turn called, by name; their arguments stand in the text.
    faults: what was wrong with them, by kind.
    took_s: [seconds] of the tools.
    """

    start: int
    end: int
    text_start: int
    text_end: int
    calls: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """The likeliest tokens for each of the last T places of a completion, in the distribution that was sampled from, as
    `logprobs` are. The sampled token comes first, then the likeliest ones, which may have it again.

    logprobs_TK: float32; -inf where an engine returned fewer than others.
    ids_TK: int32; None from an engine that returns no ids, but the tokens' UTF-8 in `bytes_TK`.
    """

    logprobs_TK: np.ndarray
    ids_TK: np.ndarray | None = None
    bytes_TK: tuple[tuple[bytes, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A completion sampled by an engine.

    token_ids: the sampled ids, including the end-of-turn token if it was sampled; and the inserted ones.
    logprobs:  natural log, of the distribution that was sampled from (after temperature, top-p and the like); one per
        token id; 0 for inserted ones.
    text:      the decoded ids without special tokens. For reading and judging; never tokenized again.
    versions:  spans that cover token_ids without gaps.
    unseen_tokens: number of tokens sampled by a model that returns no ids (a remote judge); token_ids and logprobs are
        then empty.
    experts_TLK: uint8 or int16, for a mixture of experts whose engine records them: the experts of each of the first T
        tokens of prompt and answer, per layer with experts, when it was first fed. The last sampled token never is.
    thought_tokens, thought_chars: the length of the model's thought, markers included: it comes first in token_ids and
        text. 0 if there is none, or nobody looked for one.
    cached_tokens: tokens of the prompt that the engine had cached and didn't compute; the first engine's count, if the
        request migrated.
    drafted_tokens, accepted_tokens: by speculative decoding, as far as the engine says; accepted ones are in token_ids.
    inserted:  tokens [start, end) that weren't sampled: a thinking budget ended the thought with them. Never trained.
    asked:     its answer, if that had to be asked for. None: it came unasked, or never.
    tool_results: what answered its calls, where it holds several turns of a judge. Never trained.
    stop_text: the stop string that ended it; its tokens are kept, and the text ends before it. Empty: none did.
    scores:    the prompt's, for a request that asked for them and wasn't aborted.
    top:       the likeliest tokens of its last places, for a request that asked for them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    unseen_tokens: int = 0
    experts_TLK: np.ndarray | None = field(default=None, compare=False)
    thought_tokens: int = 0
    thought_chars: int = 0
    cached_tokens: int = field(default=0, compare=False)
    drafted_tokens: int = field(default=0, compare=False)
    accepted_tokens: int = field(default=0, compare=False)
    inserted: tuple[int, int] | None = None
    asked: AskedAnswer | None = None
    tool_results: tuple[ToolResults, ...] = ()
    stop_text: str = ""
    scores: TokenScores | None = field(default=None, compare=False)
    top: TopLogprobs | None = field(default=None, compare=False)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) or self.unseen_tokens

    @property
    def answer(self) -> str:
        """The text without the thought; after calls the last turn's. Empty if the thought never ended."""
        if self.tool_results:
            last = self.tool_results[-1].text_end
            return self.text[max(last, self.thought_chars) :].lstrip("\n")
        return self.text[self.thought_chars :].lstrip("\n") if self.thought_chars else self.text

    @property
    def num_generated(self) -> int:
        """Its tokens without the results of tools."""
        return self.num_tokens - sum(one.end - one.start for one in self.tool_results)

    @property
    def num_calls(self) -> int:
        """Calls of tools, with those that couldn't be read."""
        return sum(len(one.calls) or 1 for one in self.tool_results)

    @property
    def unsampled(self) -> tuple[tuple[int, int], ...]:
        """All tokens [start, end) that weren't sampled. Never trained."""
        asked = None if self.asked is None else (self.asked.start, self.asked.end)
        results = ((one.start, one.end) for one in self.tool_results)
        return tuple(tokens for tokens in (*results, self.inserted, asked) if tokens is not None)

    @property
    def has_asked_verdict(self) -> bool:
        """Whether its verdict had to be asked for."""
        return self.asked is not None and not self.asked.is_turn

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """The caller's context of a request. `request_id` is idempotent: the first answer counts, a retry reuses its
    seed.

    trajectory_id: names an episode of several turns, each of whose prompts begins with the turn before: its requests go
        to one engine, which keeps their keys and values in between. Set in all of its turns; empty for a single turn.
    """

    request_id: str
    group_id: str
    role: str
    priority: int = 0  # lower goes first
    deadline_s: float | None = None  # from submission; None: the caller enforces it
    num_sampled: int = 0  # tokens of the answer, sampled by another engine, that the prompt ends with
    trajectory_id: str = ""
    is_retry: bool = False  # an earlier answer to the same question couldn't be used
    adapter: str = ""  # of the engine's adapters, the one that answers; empty: the model in whose name the engine runs


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTensor:
    """The description of one unsharded tensor under its Hugging Face name; its bytes are in the payload.

    checksum: xxh3-64 (hex) of its raw little-endian bytes, or a sum computed on the device.
    """

    name: str
    dtype: str  # "float32", "bfloat16", "float16"; "uint8": packed bytes
    shape: tuple[int, ...]
    checksum: str


class Payload:
    """The place of a bucket's bytes: one subclass per transport, a tagged Struct of plain data."""

    __slots__ = ()


class InlineBytes(Payload, msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The bytes themselves, sent between processes and nodes through the object store."""

    data: tuple[np.ndarray, ...]  # uint8, 1-D (numpy has no bfloat16), one per tensor


class SharedMemory(Payload, msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A file in this machine's memory: the tensors in order, each at the next multiple of 64 bytes."""

    path: str


class SafetensorsFile(Payload, msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A file that every receiver can open."""

    path: str


class Broadcast(Payload, msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank 0 of the group that the engines joined sends all tensors in one broadcast, while they load the bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaHandle:
    """Memory of a GPU, in a form that another process on that GPU can open (CUDA IPC).

    memory:             handle of the allocation with the storage; empty if the storage is empty.
    storage_bytes, storage_offset_bytes: the storage within the allocation.
    ref_counter, event: torch's own, which keep the allocation alive for its readers.
    """

    memory: bytes
    storage_bytes: int
    storage_offset_bytes: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    event_sync_required: bool


class CudaHandles(Payload, msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Memory of the sender's GPUs, with the same tensors on each: GPU uuid -> handle. The tensors lie there in order,
    each at the next multiple of 64 bytes. A receiver opens the memory of its GPU.
    """

    handles: Mapping[str, CudaHandle]


class ModelFiles(Payload, msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A whole model in its own folder, read there by the engine's own loader. The bucket names no tensors."""

    path: str


# Small payloads, sent to every process as they are; any other is sent through the object store.
SmallPayload = SharedMemory | SafetensorsFile | Broadcast | CudaHandles | ModelFiles
GroupBackend = Literal["gloo", "nccl"]
MIN_BYTES_PER_S = 1e8  # slowest acceptable speed of weights, below any disk or network that a model is trained over


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportKind:
    """A transport of weights from a learner to engines: its sending end, and its requirements on the placement.

    sender:        dotted path of a subclass of WeightTransport; the receiving end of its payload is registered in the
                   same file by open_bucket (both of grmpipe.models.weights.transport_ends).
    needs:         the requirements below in words, for errors.
    same_machine:  learner and engines on one machine.
    own_processes: the engines' weights in other processes than the learner's.
    gpus:          learner and engines on GPUs. "apart": the sending rank's GPU has no engine; "shared": every engine is
                   on the GPU of some rank.
    group:         backend of the process group that sends the tensors while the engines load.
    every_rank:    each rank sends to the engines on its own GPU, because each gathers every tensor anyway. Otherwise
                   rank 0 sends to all.
    folder:        a folder that learner and engines can open.
    inline:        the bucket holds the bytes: best if learner and engines share a process.
    delta:         its bytes go over a network or a shared folder, so that sending only changes (sync.delta) saves time.
    """

    name: str
    sender: str
    needs: str = ""
    same_machine: bool = False
    own_processes: bool = False
    gpus: Literal["", "apart", "shared"] = ""
    group: GroupBackend | None = None
    every_rank: bool = False
    folder: bool = False
    inline: bool = False
    delta: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """Some of a model's tensors, and the place of their bytes: the unit of a push."""

    tensors: tuple[WeightTensor, ...]
    payload: Payload


class WeightDelta(Payload, msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A bucket for an engine that keeps the bytes of the last push (sync.delta).

    index:  the bucket's place in a push.
    base:   the identity of the bytes that the changes apply to; empty: these are all bytes.
    packed: carries them, as one tensor of uint8, by any transport.
    """

    index: int
    base: str
    packed: WeightBucket


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLink:
    """How to join the process group of broadcasts. Rank 0 is the sender."""

    name: str  # another name for every new membership
    backend: GroupBackend
    address: str
    port: int
    rank: int  # first rank of the receiver; an engine on several GPUs takes as many
    world_size: int
    timeout_s: float  # for one bucket's broadcast, besides the time for its bytes
    join_timeout_s: float = 0.0  # for all to join, and for the first broadcast, which connects them; 0: timeout_s

    @property
    def meeting_timeout_s(self) -> float:
        return self.join_timeout_s or self.timeout_s

    def time_for_bytes_s(self, num_bytes: int) -> float:
        """What a broadcast of so many bytes may take in addition."""
        return num_bytes / MIN_BYTES_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPush:
    """A whole push by broadcasts, as one engine is told of it.

    headers: the tensors of all buckets, without checksums, encoded once for all engines.
    """

    version: int
    link: GroupLink
    headers: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReceipt:
    """An engine's receipt after a push: the tensors it got since `begin_weights`.

    checksums: name -> checksum like the sender's, or empty if the engine can't hash what it got.
    unapplied: received tensors that don't show in the engine's parameters: no parameter took them, or they changed
               since the last push and their parameters did not.
    """

    version: int
    checksums: dict[str, str]
    unapplied: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """The speed of one engine, measured or estimated; also that of a simulated engine.

    A decoding step of B rows with K cached tokens in all takes step_s + B * row_s + K * cached_token_s. A step that
    admits requests also takes prefill_token_s per uncached prompt token, and request_s per request.
    """

    step_s: float
    row_s: float
    cached_token_s: float
    prefill_token_s: float
    max_rows: int
    kv_tokens: int = 0  # capacity for cached tokens; 0: no limit
    request_s: float = 0.0  # independent of its length: to receive it and return its answer


class EngineRefused(Exception):
    """The engine can never serve this request (for example a prompt longer than its window): don't retry elsewhere."""


class EngineDenied(ValueError):
    """An endpoint serves nothing until its user changes something: a wrong key, an empty account, an unknown model. The
    words name the key to change. has_served: whether it served something before.
    """

    def __init__(self, words: str, *, has_served: bool = False) -> None:
        super().__init__(words)
        self.has_served = has_served


class BudgetSpent(EngineDenied):
    """What a request may cost doesn't fit into the budget of the run any more. Nothing was sent."""

    def __init__(self, words: str) -> None:
        super().__init__(words, has_served=True)


class EngineDied(Exception):
    """The engine died with requests in flight: retry elsewhere."""


def ignore_first_token() -> None:
    """The default for `on_first_token`."""


class Generates(Protocol):
    """What samples completions: an engine, or a wrapper of one."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        """Sample one completion. Raises EngineRefused or EngineDied. Cancelling the call aborts the request."""
        ...


class Engine(Generates, Protocol):
    """An inference engine: embedded, vLLM, SGLang, simulated, remote, or a router of several."""

    async def abort(self, request_id: str) -> None:
        """End a request now; its `generate` returns its tokens so far, with finish_reason "abort". Unknown ids are
        ignored.

        Raises EngineDied if that is known or cheap to find out, so aborting an unknown id checks the engine.
        """
        ...

    async def pause(self) -> None:
        """Return once no token is being sampled. Requests are kept; new ones are accepted and wait."""
        ...

    async def resume(self) -> None:
        """Continue all kept requests."""
        ...

    async def begin_weights(self, link: GroupLink | None = None) -> None:
        """Begin a push: drop an earlier unfinished one; join the group, if there are broadcasts.

        Only for paused engines.
        """
        ...

    async def load_bucket(self, bucket: WeightBucket) -> None:
        """Load some of the next version's tensors. ValueError names a tensor that doesn't fit."""
        ...

    async def commit_weights(self, version: int) -> WeightReceipt:
        """Adopt `version` after all buckets were sent, and return the receipt. Tensors that weren't sent stay as they
        are.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probs (temperature 1) of all tokens but the first under the loaded weights: len(token_ids) - 1 values.

        Only for engines that aren't paused.
        """
        ...


class ServesAdapters(Generates, Protocol):
    """An engine of one base with adapters, each a model of its own: requests name theirs (RequestContext.adapter), and
    a push goes to one, while the requests of the others go on. Empty: the model in whose name the engine runs.
    """

    async def abort(self, request_id: str) -> None: ...

    async def pause(self, adapter: str = "") -> None: ...

    async def resume(self, adapter: str = "") -> None: ...

    async def begin_weights(self, link: GroupLink | None = None, adapter: str = "") -> None: ...

    async def load_bucket(self, bucket: WeightBucket, adapter: str = "") -> None: ...

    async def commit_weights(self, version: int, adapter: str = "") -> WeightReceipt: ...

    async def score(self, token_ids: Sequence[int], adapter: str = "") -> tuple[float, ...]: ...


@runtime_checkable
class KeepsTrajectories(Protocol):
    """An engine that keeps a trajectory's keys and values between its turns."""

    def end_trajectory(self, trajectory_id: str) -> None:
        """Free them: no further turn comes. Returns at once; unknown ids are ignored."""
        ...


@runtime_checkable
class DescribesStart(Protocol):
    """An engine that says what its start found."""

    def describe_start(self) -> str:
        """In a line, such as its room for keys and values. Empty: nothing."""
        ...


# The part of a learner's state on its device; the rest is on the host. A push needs only the weights.
OnDevice = Literal["everything", "weights", "nothing"]


class ChatEngine(Protocol):
    """A remote judge: takes messages, returns no token ids and has no weights here."""

    async def chat(self, messages: Sequence[Message], params: SamplingParams, context: RequestContext) -> Completion:
        """Sample one completion. Raises EngineRefused, or EngineDied once its own retries are used up."""
        ...

    async def close(self) -> None: ...


class RemoteTeacher(Generates, Protocol):
    """A model behind an endpoint that scores prompts: `generate` takes params with `scoring` only."""

    async def close(self) -> None: ...


class SendLimits(Protocol):
    """Holds requests back before they are sent."""

    async def admit(self, num_tokens: int, priority: int) -> None: ...

    def settle(self, num_expected: int, num_used: int) -> None:
        """Report the tokens that an admitted request really used."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The tokens of one request, as its server counts them.

    cached:  prompt tokens that the server had from before.
    sampled: thoughts included.
    """

    prompt: int = 0
    cached: int = 0
    sampled: int = 0


class RequestLog(Protocol):
    """Counts the requests to one model."""

    async def until_affordable(self, most: Usage) -> None:
        """Return when a request fits into the budget. Raises BudgetSpent if it doesn't, with no request in flight.

        most: what it can use at most.
        """
        ...

    def begin_request(self, *, retry: bool, most: Usage | None = None) -> int:
        """Note a request before it is sent; returns its number. retry: an earlier answer couldn't be used. most: of a
        request to an endpoint, what it can use at most; nothing may be awaited since `until_affordable`.
        """
        ...

    def end_request(self, number: int, usage: Usage) -> None:
        """Note the tokens of a request. Those of a request that was never answered stay unknown."""
        ...

    def unsent(self, number: int) -> None:
        """Withdraw a request that never left: there was no connection."""
        ...

    def close_request(self, number: int) -> None:
        """Note that a request to an endpoint is in flight no more, however it ended."""
        ...


class AnswerStore(Protocol):
    """The answers of endpoints that are kept for a resume, by their Idempotency-Key: no question is paid twice."""

    def take(self, key: str) -> bytes | None:
        """The answer that an earlier process got, once. None: there is none."""
        ...

    def keep(self, key: str, answer: str) -> None: ...


class Scorer(Protocol):
    """A model with a scalar head: reads sequences and generates none."""

    async def score(self, token_ids: Sequence[int], priority: int = 0) -> float:
        """The head's number at the last token. The lowest priority goes first. Raises EngineDied."""
        ...


class RemoteScorer(Scorer, Protocol):
    """A reward model behind an endpoint. `score` also raises EngineRefused for what the endpoint won't serve."""

    async def close(self) -> None: ...


class Sleeper(Protocol):
    """An engine that can free its device's memory."""

    async def sleep(self) -> int:
        """Free the memory of weights and KV; only for a paused engine without requests. Returns the bytes that really
        became free on the device, 0 if none did.
        """
        ...

    async def wake(self) -> None:
        """Take the memory again. The weights are unchanged; the KV cache is empty."""
        ...


def join_spans(model: str, stretches: Iterable[tuple[int, int, int]], latest: int) -> tuple[VersionSpan, ...]:
    """The spans of stretches (version, start, end), which follow each other: neighbours of one version become one, and
    those without a token none. Without any token: an empty span of the version `latest`.
    """
    spans: list[VersionSpan] = []
    for version, start, end in stretches:
        if start >= end:
            continue
        if spans and spans[-1].version == version:
            start = spans.pop().start
        spans.append(VersionSpan(model=model, version=version, start=start, end=end))
    return tuple(spans) or (VersionSpan(model=model, version=latest, start=0, end=0),)
