"""The interface of environments, for those who write one: what they get, what they return, how they fail.

    class Shop:                                     one instance plays one episode
        async def open(self, episode) -> Opening    boots; the first messages
        async def step(self, action) -> Observation after each turn of the policy
        async def close(self) -> None               once, whatever happened

Two ways of failing: `PolicyFault` is shown to the policy, `EnvFault` never is, and never becomes a reward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType, Protocol, runtime_checkable

from grmpipe.models.types import Message, ToolCall, ToolSpec
from grmpipe.types import EnvCause, Prompt

MAX_SAVED = 2**20  # bytes of an environment's state; it is written after each turn


# The type of a parameter of a judge's tool (judge.tools.state): filled in by the run, and not shown to the judge.
State = NewType("State", bytes)


class PolicyFault(Exception):
    """The policy did something wrong: it reads the text, and the episode goes on. Raised by `step`.

    kind: what is counted: malformed, unknown_tool, arguments, tool, raised, or a word of your own.
    ends: the episode ends instead, and is judged as it is.
    """

    kind: str = "tool"
    ends: bool = False

    def __init__(self, text: str, kind: str = "tool", *, ends: bool = False) -> None:
        super().__init__(text)
        self.kind = kind
        self.ends = ends


class EnvFault(Exception):
    """The environment failed, through no fault of the policy: the whole episode is played again in a new one.

    Any other exception of an environment is an EnvFault with the cause `broken`, but for those that docs/agents.md
    calls the policy's; of what typed functions raise, it is the rest.
    """

    cause: EnvCause = "broken"

    def __init__(self, detail: str, cause: EnvCause = "broken") -> None:
        super().__init__(detail)
        self.cause = cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The task of an environment.

    prompt:  the row of the data; `prompt.info` holds what the row says to the environment.
    attempt: number of failed episodes of this sibling before. Each has its own seed.
    saved:   what `Observation.saved` said before a resume: open in that state, with the messages and tools of the first
             opening. Empty: from the start. For the tools of a judge: the final state of the rollout that it judges.
    """

    prompt: Prompt
    group_id: str = ""
    sibling: int = 0
    attempt: int = 0
    seed: int = 0
    saved: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The beginning of an episode.

    messages:   what the policy sees first.
    tools:      what it may call.
    state_key:  names the state, as in Observation.
    replayable: the same actions in another environment of the same episode bring the same observations, and may be
                repeated: a resume repeats those of the turns on file, and lets the episode go on from there.
    saved:      the state at the start, as in Observation; only judges whose tools read states need it.
    """

    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    state_key: str = ""
    replayable: bool = False
    saved: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A turn of the policy.

    text:       all that it wrote, without its thoughts.
    content:    the text around tool calls; the same as `text` where there are no tools.
    tool_calls: its calls, as the model's own format has them. Their arguments are not checked.
    errors:     what is wrong with calls that couldn't be read, in words for the policy.
    turn:       number of this turn, from 0.
    is_last:    whether the policy gets no further turn.
    left_s:     seconds that its calls may take: what is left of a budget of the episode.
    """

    text: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()
    turn: int = 0
    is_last: bool = False
    left_s: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The environment's answer to a turn.

    messages:  what the policy reads next; at the end of the episode what the judge and the journal get. None and not
               `done`: it is an error.
    done:      whether the episode is over.
    rewards:   for this turn, by name.
    state_key: names the state after the turn; equal for siblings in the same state.
    faults:    what the policy did wrong in this turn, by kind.
    saved:     the state after this turn, if the environment can open in it again (`Episode.saved`): a resume lets the
               episode go on from there, and a judge's tools read the last one (judge.tools.state). At most MAX_SAVED
               bytes.
    """

    messages: Sequence[Message] = ()
    done: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict)
    state_key: str = ""
    faults: tuple[str, ...] = ()
    saved: bytes = b""


@runtime_checkable
class Env(Protocol):
    """An environment: one episode. An instance is used once, by one task at a time."""

    async def open(self, episode: Episode) -> Opening:
        """Boot. Raises EnvFault."""
        ...

    async def step(self, action: Action) -> Observation:
        """Act on the policy's turn. Raises PolicyFault or EnvFault.

        A turn that was truncated by its number of tokens never comes here: half a call must not be executed.
        """
        ...

    async def close(self) -> None:
        """Free everything. Called once, at any end, also if `open` failed."""
        ...
