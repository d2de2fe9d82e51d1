"""The interface of an engine kind: what a run asks of it, and how an engine is made. Starts nothing; imports no
engine's library.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Protocol, TypeVar

from grmpipe.models.engines.endpoint_use import EndpointUse
from grmpipe.models.engines.engine_memory import EngineMemory
from grmpipe.models.settings import EngineConfig, LoraConfig, ModelConfig
from grmpipe.models.types import ChatEngine, Engine, RemoteScorer, RemoteTeacher

UNBOUNDED_ROWS = UNBOUNDED_RANK = 1 << 30
OptionKey = Callable[[str], str]  # an option of a role's engine -> the key that a user sets


class EngineOptions(Protocol):
    """The options of every kind. They are a frozen dataclass that checks itself."""

    @property
    def max_context_tokens(self) -> int: ...  # prompt and new tokens together; 0: the model's window


Options = TypeVar("Options", bound=EngineOptions, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The specification of an engine, besides its options. It is sent to the engine's process.

    role:          the model's name in version spans; the weights in `path` are its version 0.
    num_gpus:      GPUs over which the model is sharded; 1 on a CPU.
    seed:          part of all seeds. Engines of one role share it, so that a retry samples the same tokens.
    adapters:      those that it applies itself, by the name of their model, which may be that of `role`. Pushes that
                   name one carry it alone; others carry weights.
    takes_weights: whether weights are pushed to it; False leaves out what only pushes need.
    return_routed_experts: whether its completions have the experts of their tokens; for mixtures of experts only.
    speculation:   where drafts of tokens come from that it verifies together: none or ngram.
    sleeps:        whether it frees its GPU's memory at times, for a learner or another engine.
    batch_invariant: whether a request's tokens and log-probs must be the same to the last bit, whatever other requests
                   decode; only for kinds that can.
    """

    path: str
    role: str
    dtype: str = "float32"
    device: str = "cpu"  # or cuda
    num_gpus: int = 1
    seed: int = 0
    chat_template: str | None = None
    adapters: Mapping[str, LoraConfig] = field(default_factory=dict)
    takes_weights: bool = True
    return_routed_experts: bool = False
    speculation: str = "none"
    sleeps: bool = False
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(ABC):
    """A remote endpoint of a model, and its clients. A limit of 0 is none.

    continues: whether it goes on with an assistant's message that comes last, instead of answering.
    """

    url: str
    requests_per_minute: int
    tokens_per_minute: int
    chat_markup: tuple[str, ...]  # regular expressions of what must not reach it as text
    continues: bool = False

    @property
    def is_limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute)

    @abstractmethod
    def connect(self, role: str, model: ModelConfig, use: EndpointUse) -> ChatEngine:
        """Make the client of a model that chats."""

    def connect_scorer(self, model: ModelConfig, use: EndpointUse) -> RemoteScorer:
        """Make the client of a model that scores."""
        key = f"{use.model_key}.engine"
        raise ValueError(
            f"{key}: {model.engine} serves no scores; leave it as embedded for a scorer here, or type "
            f"{key}=openai for a pooling endpoint"
        )

    def connect_teacher(self, role: str, model: ModelConfig, use: EndpointUse) -> RemoteTeacher:
        """Make the client of a model that scores the tokens of prompts. Only called where the kind `scores`."""
        raise NotImplementedError(f"{type(self).__name__} connects no teachers")

    def scorer_tokenizer(self, model: ModelConfig) -> str:
        """Where the tokenizer of a model is that is sent token ids: a Hugging Face directory or hub name."""
        return model.path


@dataclass(frozen=True)
class EngineKind(ABC, Generic[Options]):
    """A kind of engine, with the options of one role. Class attributes say what the kind can do, methods what follows
    from the options. The defaults are those of an engine that serves, takes no weights, and keeps its memory.

    section:           section of `engine` with the kind's shared options; a user's own kind has none.
    outside:           whether it is a remote endpoint without a place here; it has an `endpoint` instead of `make`.
    transports:        transports of weights that it supports, the best first. Without one it can't serve a trained
                       model.
    any_transport:     it supports every other transport too, by the receiving end in the transport's file.
    in_process:        its model is in the process that made it.
    tensor_parallel:   it can shard one model over several GPUs.
    grammar:           it can restrict a text to a regular expression.
    applies_adapters:  it can receive LoRA adapters alone, and apply them, up to `max_adapter_rank`.
    adapter_transports: transports of adapters alone, if they aren't those of weights.
    reads_model_files: it takes the weights of a model's folder (ModelFiles).
    checkpoint_names:  it takes weights under the names of checkpoints; otherwise under those of the learner's modules.
    seeds_by_position: its random numbers depend on the position in the text; otherwise on their order.
    batch_invariant:   it can make a request's tokens independent of those beside it, where EngineSpec asks for that.
    scores:            it can score tokens that it is sent (SamplingParams.scoring), so that its model can teach.
    fp8_option:        the option that rounds weights to fp8 at its start by the value `fp8`; empty: it has none.
    top_logprobs:      it can return the likeliest tokens for each sampled one (SamplingParams.top_logprobs).
    """

    section: ClassVar[str] = ""
    outside: ClassVar[bool] = False
    transports: ClassVar[tuple[str, ...]] = ()
    any_transport: ClassVar[bool] = False
    in_process: ClassVar[bool] = False
    tensor_parallel: ClassVar[bool] = False
    grammar: ClassVar[bool] = False
    applies_adapters: ClassVar[bool] = False
    max_adapter_rank: ClassVar[int] = UNBOUNDED_RANK
    adapter_transports: ClassVar[tuple[str, ...]] = ()
    reads_model_files: ClassVar[bool] = False
    checkpoint_names: ClassVar[bool] = True
    seeds_by_position: ClassVar[bool] = False
    batch_invariant: ClassVar[bool] = False
    scores: ClassVar[bool] = False
    fp8_option: ClassVar[str] = ""
    top_logprobs: ClassVar[bool] = False

    options: Options

    @property
    def most_likely_tokens(self) -> int:
        """The most likely tokens that it gives beside each scored one."""
        return UNBOUNDED_ROWS if self.scores else 0

    @property
    def caches_prompts(self) -> bool:
        """Whether requests with the same prompt compute it once."""
        return True

    @classmethod
    @abstractmethod
    def read_options(cls, sections: EngineConfig) -> Options:
        """The options of `engine.<section>`, or the defaults. A role's `engine_options` override them."""

    # -- construction ----------------------------------------------------------------------------------------------

    def make(self, spec: EngineSpec, rank: int) -> Engine:
        """Make an engine, in its own process: here the kind's library is imported. rank: the replica's, from 0."""
        raise NotImplementedError(f"{type(self).__name__} makes no engine here")

    def check_installed(self, role: str, model: ModelConfig, key: OptionKey) -> None:
        """Check that what it needs is installed, where it will run. Raises ValueError, which begins with the key to
        change.
        """

    def nccl_version(self) -> str:
        """The version of NCCL in an environment of its own, as far as it is known here; empty: it uses this one."""
        return ""

    @property
    def nccl_variables(self) -> Mapping[str, str]:
        """Variables of NCCL that its processes set unless they are set: a learner that sends to them needs the same, as
        NCCL may hang between processes of which only some have them.
        """
        return {}

    # -- what follows from the options -----------------------------------------------------------------------------

    def joins_experts(self, num_gpus: int) -> bool:
        """Whether an engine on so many GPUs that takes the names of checkpoints loads the experts of a layer at once;
        otherwise one after the other.
        """
        return False

    @property
    def max_rows(self) -> int:
        """Requests that one engine decodes at once."""
        return UNBOUNDED_ROWS

    @property
    def endpoint(self) -> Endpoint | None:
        return None

    @property
    def joined(self) -> int:
        """The number of running servers to join, from the option `urls`: one per replica. 0: engines are started
        here.
        """
        return 0

    @property
    def quantizes(self) -> bool:
        """Whether its options make weights or cache coarser than what it is sent."""
        return False

    @property
    def memory(self) -> EngineMemory:
        return EngineMemory()

    # -- adapters, routed experts, drafts -------------------------------------------------------------

    def why_no_adapters(self, device: str) -> str:
        """Why it can't apply adapters with these options; empty: it can, if its kind does."""
        return ""

    def why_no_experts(self, device: str) -> str:
        """Why it can't return the experts of a token; empty: it can."""
        return f"engine={self.section or type(self).__name__} doesn't report them"

    def why_no_drafts(self, device: str) -> str:
        """Why it can't draft tokens by `engine.speculation`; empty: it can."""
        return f"engine={self.section or type(self).__name__} has no drafts"

    def check_experts(self, key: OptionKey) -> None:
        """Raises ValueError, which begins with the key, for an option that prevents it from returning experts."""


AnyEngine = EngineKind[EngineOptions]
