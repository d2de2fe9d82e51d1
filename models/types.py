"""What every floor may know about models: messages, sampling, completions, weights, engines. No behaviour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import msgspec
import numpy as np

FinishReason = Literal["stop", "length", "abort"]
ANY_EXPERT = -1  # in place of an expert: it isn't known where the token went, its router chooses


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation. `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one completion is drawn. `temperature` 0 is greedy; a seed makes the draw repeatable in any batch."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    pattern: str | None = None  # a regular expression that the whole text must match; not every engine can


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) of a completion were sampled by `version` of `model`."""

    model: str
    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled.

    token_ids: the sampled ids, the end-of-turn token included where it was sampled.
    logprobs:  natural log, of the distribution really sampled from (after temperature and top-p); as long as token_ids.
    text:      the decoded ids without special tokens. For reading and judging; never tokenized again.
    versions:  spans that cover token_ids without gaps.
    unseen_tokens: sampled by a model that shows no ids (an outside judge); token_ids and logprobs are empty then.
    experts_TLK: uint8 or int16, of a mixture of experts whose engine notes them: where each of the first T tokens of
        prompt and answer went, by layer with experts, as it was first fed. The last token sampled never was.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    unseen_tokens: int = 0
    experts_TLK: np.ndarray | None = field(default=None, compare=False)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) or self.unseen_tokens

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Who asks, and how urgently. `request_id` is idempotent: the first answer wins, a retry reuses its seed."""

    request_id: str
    group_id: str
    role: str
    priority: int = 0  # lower goes first
    deadline_s: float | None = None  # from submission; None: the caller holds the deadline
    num_sampled: int = 0  # tokens of the answer that the prompt ends with: another engine began it


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTensor:
    """One unsharded tensor under its Hugging Face name: what is said of it; its bytes are the payload's.

    checksum: of its raw little-endian bytes: xxh3-64 hex, or the sum of a device that they never leave.
    """

    name: str
    dtype: str  # "float32", "bfloat16", "float16"
    shape: tuple[int, ...]
    checksum: str


class Payload:
    """Where the bytes of a bucket are: a subclass per way that weights travel, a tagged Struct of plain data."""

    __slots__ = ()


class InlineBytes(Payload, msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The bytes themselves, as they cross process and node borders through the object store."""

    data: tuple[np.ndarray, ...]  # uint8, 1-D (numpy has no bfloat16), one per tensor


class SharedMemory(Payload, msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A file in this machine's memory: the tensors in order, each at the next multiple of 64 bytes."""

    path: str


class SafetensorsFile(Payload, msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A file that every receiver can open."""

    path: str


class Broadcast(Payload, msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank 0 of the group that the engines joined sends the tensors in order, while they load the bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaHandle:
    """A contiguous tensor in a GPU's memory, as another process on that GPU opens it (CUDA IPC).

    offset:             of the tensor in its storage, in elements.
    memory:             the handle of the allocation that holds the storage; empty where the storage is.
    storage_bytes, storage_offset_bytes: the storage within the allocation.
    ref_counter, event: torch's own, by which the allocation outlives its readers.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    memory: bytes
    storage_bytes: int
    storage_offset_bytes: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    event_sync_required: bool


class CudaHandles(Payload, msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Memory of the sender's GPUs, the same on each: by a GPU's uuid one handle per tensor. A receiver opens those of
    its own GPU."""

    handles: Mapping[str, tuple[CudaHandle, ...]]


class ModelFiles(Payload, msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A whole model in its own folder, read there by the engine's own loader. The bucket names no tensors."""

    path: str


# A few words in a form that every process knows: these cross as they are, any other through the object store.
SmallPayload = SharedMemory | SafetensorsFile | Broadcast | CudaHandles | ModelFiles
GroupBackend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportKind:
    """A way for weights from a learner to engines: its sending end, and what it needs of the places of both.

    sender:        dotted path of a subclass of models.weights.sending.WeightTransport; the receiving end of its payload
                   is registered in the same file (models.weights.opening.opened).
    needs:         the needs below in words, for whoever asks for it where they aren't met.
    same_machine:  learner and engines on one machine.
    own_processes: the engines' weights in other processes than the learner's.
    gpus:          learner and engines on GPUs. "apart": the sending rank's has no engine; "shared": every engine is on
                   the GPU of some rank.
    group:         of the process group that carries the tensors: the learner delivers while the engines load.
    every_rank:    each rank sends, to the engines on its own GPU: each has every tensor whole anyway. By itself rank 0
                   sends to all.
    folder:        a folder that learner and engines can open.
    inline:        the bucket holds the bytes: best where learner and engines share a process.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """Some of a model's tensors, and where their bytes are: the unit that travels."""

    tensors: tuple[WeightTensor, ...]
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLink:
    """How to join the process group that carries broadcasts. Rank 0 is the sender."""

    name: str  # new for every new membership
    backend: GroupBackend
    address: str
    port: int
    rank: int  # the first one of whoever gets this; an engine of several GPUs takes as many
    world_size: int
    timeout_s: float  # of one tensor's broadcast
    join_timeout_s: float = 0.0  # until all have met, and for the first broadcast, which connects them; 0: timeout_s

    @property
    def meeting_timeout_s(self) -> float:
        return self.join_timeout_s or self.timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReceipt:
    """An engine's echo after a sync: the tensors it was sent since `begin_weights`.

    checksums: name -> as the sender's, or empty where the engine has no way to hash what came.
    unapplied: tensors that came, and that the engine's own parameters don't show: nothing took them, or they changed
        since the last push and what they went into did not.
    """

    version: int
    checksums: dict[str, str]
    unapplied: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """How fast one engine is, measured or reckoned; what a simulated one keeps to.

    A decoding step of B rows that hold K cached tokens in all takes step_s + B * row_s + K * cached_token_s; one that
    takes requests in also prefill_token_s for each prompt token that no cache holds, and request_s for each of them.
    """

    step_s: float
    row_s: float
    cached_token_s: float
    prefill_token_s: float
    max_rows: int
    kv_tokens: int = 0  # room for cached tokens; 0: no bound
    request_s: float = 0.0  # whatever its length: to take it in and hand its answer out


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """How an engine stands that can tell."""

    num_running: int  # requests that decode
    num_waiting: int  # requests that it holds besides
    kv_share: float  # of the room for cached tokens, taken
    num_preempted: int  # times that a running request had to make room, since the engine started


class EngineRefused(Exception):
    """The engine can't ever serve this request (a prompt longer than its window, say): don't retry elsewhere."""


class EngineDied(Exception):
    """The engine went away with requests in flight. Retrying elsewhere is right."""


def ignore_first_token() -> None:
    """The default for `on_first_token`: nobody listens."""


class Engine(Protocol):
    """Generates. Embedded, vLLM, SGLang, simulated, remote and a router of several all look like this."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        """Sample one completion. Raises EngineRefused or EngineDied. Cancelling the call aborts the request."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request now; its `generate` returns what it has, finish_reason "abort". Unknown ids are ignored.

        Raises EngineDied where that is known, or cheap to find out: an abort of nothing is a look at the engine."""
        ...

    async def pause(self) -> None:
        """Return once no token is being sampled. Requests are kept; new ones are accepted and wait."""
        ...

    async def resume(self) -> None:
        """Go on with all kept requests."""
        ...

    async def begin_weights(self, link: GroupLink | None = None) -> None:
        """A push begins: forget what an earlier one left unfinished; join the group, if it comes by broadcast.

        Paused engines only."""
        ...

    async def load_bucket(self, bucket: WeightBucket) -> None:
        """Take some of the next version's tensors. ValueError names a tensor that doesn't fit."""
        ...

    async def commit_weights(self, version: int) -> WeightReceipt:
        """All buckets were sent: adopt `version`, echo what came. Tensors that weren't sent stay as they are."""
        ...

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probs (temperature 1) of all tokens but the first under the loaded weights: len(token_ids) - 1 values.

        Asked of an engine that isn't paused."""
        ...


# How much of a learner's state lies on its device; the rest waits on the host. Weights alone suffice for a push.
OnDevice = Literal["everything", "weights", "nothing"]


class ChatEngine(Protocol):
    """A judge outside: it takes messages, shows no token ids and has no weights of ours."""

    async def chat(self, messages: Sequence[Message], params: SamplingParams, context: RequestContext) -> Completion:
        """Sample one completion. Raises EngineRefused, or EngineDied once its own retries are used up."""
        ...

    async def close(self) -> None: ...


class SendLimits(Protocol):
    """Holds requests back before they are sent."""

    async def admit(self, num_tokens: int, priority: int) -> None: ...

    def settle(self, num_expected: int, num_used: int) -> None:
        """What an admitted request really used."""
        ...


class Scorer(Protocol):
    """A model with a scalar head: it reads sequences, and writes none."""

    async def score(self, token_ids: Sequence[int], priority: int = 0) -> float:
        """The head's number at the last token. The lowest priority goes first. Raises EngineDied."""
        ...


class Sleeper(Protocol):
    """An engine that can lend its device's memory to somebody else."""

    async def sleep(self) -> int:
        """Give back the memory of weights and KV; a paused engine without requests only. Returns the bytes that
        really became free on the device: 0 where none did, whatever the backend says."""
        ...

    async def wake(self) -> None:
        """Take it again. The weights are as they were; the KV cache is empty."""
        ...


@runtime_checkable
class ReportsPressure(Protocol):
    """An engine, or the way to one, that may tell its pressure."""

    async def pressure(self) -> Pressure | None: ...
