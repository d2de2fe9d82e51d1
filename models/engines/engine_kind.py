"""What a run asks of a kind of engine, and how one is made. Starts nothing; imports no engine's library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

from models.settings import EngineConfig, LoraConfig, ModelConfig
from models.types import ChatEngine, Engine, SendLimits

UNBOUNDED_ROWS = 1 << 30
OptionKey = Callable[[str], str]  # an option of a role's engine -> the key that a user sets


class EngineOptions(Protocol):
    """What the options of every kind have. They are a frozen dataclass that checks itself."""

    @property
    def max_context_tokens(self) -> int: ...  # prompt and new tokens together; 0: the model's own window


Options = TypeVar("Options", bound=EngineOptions, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What an engine is made of, beside its options; it travels to the process where the engine will live.

    num_gpus:      that share the model; 1 on a CPU.
    takes_weights: somebody pushes weights to it.
    return_routed_experts: its completions carry the experts of their tokens.
    """

    path: str
    role: str
    dtype: str
    device: str  # cuda or cpu
    num_gpus: int
    seed: int
    chat_template: str | None
    lora: LoraConfig
    takes_weights: bool
    return_routed_experts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRoom:
    """Bytes that an engine reserves for keys and values on one device, and in words what decides them."""

    num_bytes: float
    decided_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a model of somebody else's answers. A limit of 0 is none."""

    url: str
    requests_per_minute: int
    tokens_per_minute: int
    chat_markup: tuple[str, ...]  # regular expressions: what must not reach it as text

    @property
    def is_limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute)


@dataclass(frozen=True)
class EngineKind(ABC, Generic[Options]):
    """A kind of engine, with the options of one role. Its class attributes say what the kind can do, its methods what
    follows from the options. The defaults are those of an engine that serves, takes no weights, and keeps its memory.

    section:           of `engine` that holds the kind's shared options; a kind of a user's own has none.
    outside:           it is an endpoint of somebody else's, without a place here; it has `connect` instead of `make`.
    transports:        of weights that it takes, the best first. Without one it can't serve a model that learns.
    any_transport:     it takes every other one too, by the receiving end in the transport's own file.
    in_process:        its model lies, and computes, in the process that made it.
    tensor_parallel:   it can lay one model over several GPUs.
    grammar:           it can hold a text to a regular expression.
    applies_adapters:  it takes adapters by themselves (LoRA), and applies them.
    checkpoint_names:  it takes weights under the names of checkpoints; else under those of the learner's own modules.
    seeds_by_position: it draws by the position in the text; else by the order of its draws.
    frees_gpu:         it can give a GPU's memory back while others need it.
    frees_cache:       it can give its keys and values back, on any device.
    swaps_weights:     it can serve several models of one shape by turns.
    grows_cache:       keys and values grow with its rows, by copying; else it reserves a fixed room for them.
    share_option:      the option that holds its share of a GPU's memory.
    memory_remedy:     what to type where it has a slot for itself that is too small.
    """

    section: ClassVar[str] = ""
    outside: ClassVar[bool] = False
    transports: ClassVar[tuple[str, ...]] = ()
    any_transport: ClassVar[bool] = False
    in_process: ClassVar[bool] = False
    tensor_parallel: ClassVar[bool] = False
    grammar: ClassVar[bool] = False
    applies_adapters: ClassVar[bool] = False
    checkpoint_names: ClassVar[bool] = True
    seeds_by_position: ClassVar[bool] = False
    frees_gpu: ClassVar[bool] = False
    frees_cache: ClassVar[bool] = False
    swaps_weights: ClassVar[bool] = False
    grows_cache: ClassVar[bool] = False
    share_option: ClassVar[str] = ""
    memory_remedy: ClassVar[str] = "take larger slots, or raise slots_per_replica"

    options: Options

    @classmethod
    @abstractmethod
    def shared_options(cls, sections: EngineConfig) -> Options:
        """Those of `engine.<section>`, or the defaults. A role's `engine_options` go over them."""

    # -- making ----------------------------------------------------------------------------------------------------

    def make(self, spec: EngineSpec, rank: int) -> Engine:
        """In the process where it will live: here the kind's library is imported. rank: of the replica, from 0."""
        raise NotImplementedError(f"{type(self).__name__} makes no engine here")

    def connect(self, role: str, model: ModelConfig, limits: SendLimits) -> ChatEngine:
        """The client of an endpoint. limits: asked before each try."""
        raise NotImplementedError(f"{type(self).__name__} is no endpoint")

    def check_installed(self, role: str, model: ModelConfig, key: OptionKey) -> None:
        """Is here what it needs? Asked where it will run. Raises ValueError, which begins with the key to change."""

    # -- what follows from the options -----------------------------------------------------------------------------

    @property
    def max_rows(self) -> int:
        """Requests that one engine decodes at once."""
        return UNBOUNDED_ROWS

    @property
    def endpoint(self) -> Endpoint | None:
        return None

    @property
    def joined(self) -> int:
        """Servers that run already, by the option `urls`: one for each replica. 0: engines are started here."""
        return 0

    @property
    def sleep_mode(self) -> bool:
        """Is it started so that it can give a GPU's memory back?"""
        return True

    @property
    def quantizes(self) -> bool:
        """Do its options make weights or cache coarser than what it is sent?"""
        return False

    # -- memory ----------------------------------------------------------------------------------------------------

    def frees_device(self, device: str) -> bool:
        """Can it give a device's memory back, the weights too?"""
        return self.frees_gpu and device == "cuda"

    def sleeps(self, device: str) -> bool:
        """Can it give any memory back while others need it?"""
        return self.frees_cache or self.frees_device(device)

    @property
    def memory_share(self) -> float | None:
        """Of a whole GPU that its options ask for; None: they don't say, or it has no such option."""
        return None

    @property
    def shares_leftover(self) -> bool:
        """On a GPU that it shares, is its part what the others leave?"""
        return False

    @property
    def set_cache_bytes(self) -> float | None:
        """For keys and values, where the options set them."""
        return None

    def cache_room(self, weight_bytes: float, device: str, device_bytes: float | None) -> CacheRoom | None:
        """What it reserves for keys and values on a device that holds `weight_bytes` of weights; None: not known."""
        return None

    # -- routed experts, engines of several roles ------------------------------------------------------------------

    def why_no_experts(self, device: str) -> str:
        """Why it can't tell which experts it chose for a token; empty: it can."""
        return f"engine={self.section or type(self).__name__} doesn't report them"

    def check_experts(self, key: OptionKey) -> None:
        """Raises ValueError, which begins with the key, for an option that keeps it from telling them."""

    def wider(self, other: EngineKind[EngineOptions]) -> EngineKind[Options]:
        """The kind with options that serve both roles, where it swaps weights."""
        raise NotImplementedError(f"{type(self).__name__} swaps no weights")

    def different_options(self, other: EngineKind[EngineOptions]) -> list[str]:
        """Options of which no value serves both roles, where it swaps weights."""
        raise NotImplementedError(f"{type(self).__name__} swaps no weights")

    def different_models(self, path: str, other: str) -> list[str]:
        """What an engine made for the one model lacks for the other, where it swaps weights."""
        raise NotImplementedError(f"{type(self).__name__} swaps no weights")


AnyEngine = EngineKind[EngineOptions]
