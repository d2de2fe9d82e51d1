"""Settings of the environment that the policy acts in, and the tables of environments and of the places of workflows.
Imports none of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from grmpipe.config.isolation import INPROCESS, IsolationConfig
from grmpipe.config.keys.secrets import MIN_SECRET_CHARS, mask, mask_arguments, secrets_in
from grmpipe.models.bounds import Bounded, above_0_to_1, at_least, one_of, positive
from grmpipe.models.urls import check_url


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvKind:
    """What other modules must know of a kind of environment.

    path:      dotted path of its class; "": the user names it (env.target).
    needs:     the keys of this section that must be set, and that only kinds which need them may have.
    is_single: one prompt, one answer: it holds nothing, never fails and takes no time.
    has_tools: the policy calls tools, so its chat template must know them.
    is_workflow: a function or a program of the user that asks the policy; no environment is made.
    """

    path: str = ""
    needs: tuple[str, ...] = ()
    is_single: bool = False
    has_tools: bool = False
    is_workflow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowPlace:
    """Where workflows run.

    path:   dotted path of the class that runs them.
    needs:  the key that names the workflow.
    by_url: the workflow asks the policy at a URL.
    """

    path: str
    needs: str = "target"
    by_url: bool = True


# A new one is a file in grmpipe/envs/, a row here, a YAML in conf/env/ and a test.
DEFAULT_ENV = "single_turn"
ENVS: Mapping[str, EnvKind] = {
    DEFAULT_ENV: EnvKind(path="grmpipe.envs.play.SingleTurn", is_single=True),
    "tools": EnvKind(path="grmpipe.envs.tools.tool_env.ToolEnv", needs=("functions",), has_tools=True),
    "custom": EnvKind(needs=("target",)),
    "workflow": EnvKind(needs=("target",), is_workflow=True),
}
SECONDS = "above 0 and finite, in seconds"
CALLS_SHARE = 0.9  # share of step_s for all calls of a turn
DEFAULT_PLACE = "inprocess"
WORKFLOW_PLACES: Mapping[str, WorkflowPlace] = {
    DEFAULT_PLACE: WorkflowPlace(path="grmpipe.workflows.in_process.InProcess", by_url=False),
    "process": WorkflowPlace(path="grmpipe.workflows.worker_pool.WorkerPool"),
    "command": WorkflowPlace(path="grmpipe.workflows.program.Program", needs="command"),
}
WAYS_OUT = {
    "target": "type env.target=my_package.my_module.MyEnv",
    "functions": "type env.functions=my_package.my_module, a module with typed functions",
    "command": "type env.command=[my_agent,--fast]",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallLimits:
    """Limits on the calls of tools in a turn.

    call_s: [seconds] for each, from its start. turn_s: for all of them together. policy_errors: exceptions that end
    the episode; of others the caller reads.
    """

    call_s: float = 27.0
    turn_s: float = 27.0
    max_parallel_calls: int = 16
    policy_errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServerConfig:
    """A server of tools that speaks the Model Context Protocol: a program, or a URL.

    command: the program, and its arguments; it speaks over stdin and stdout.
    env:     further environment variables of the program.
    shared:  one program, or one session at the URL, for all episodes of the run; false: one for each episode.
    url:     where a server runs already, over HTTP.
    headers: sent with every request to the URL.
    tools:   those that the policy may call, by name; empty: all.
    """

    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    shared: bool = False
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    tools: Sequence[str] = ()

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError(
                "command: give either a command, such as [python,my_server.py], or a url, such as http://host:8000/mcp"
            )
        if self.url:
            way_out = "and give what the server asks for as headers={Authorization: 'Bearer ${oc.env:MY_TOKEN}'}"
            check_url("url", self.url, way_out)
        if self.url and self.env:
            raise ValueError("env: is for a command; a server at a URL is started by someone else")
        if self.headers and not self.url:
            raise ValueError("headers: are for a url; a command gets env")
        if isinstance(self.command, str):
            raise ValueError(f"command: must be a list, such as [python,my_server.py], got {self.command!r}")
        if isinstance(self.tools, str):
            raise ValueError(f"tools: must be a list of names, such as [search], got {self.tools!r}")

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no text about the server may show, longest first: all that it is given."""
        given = {*self.env.values(), *self.headers.values(), *secrets_in(self.command)}
        return tuple(sorted((text for text in given if len(str(text)) >= MIN_SECRET_CHARS), key=len, reverse=True))

    def __str__(self) -> str:
        return mask(self.url or " ".join(mask_arguments(self.command)), self.secrets)


def mcp_server(name: str, values: object) -> McpServerConfig:
    """The settings of one server. Raises ValueError that begins with the key."""
    known = [spec.name for spec in fields(McpServerConfig)]
    if not isinstance(values, Mapping) or not values.keys() <= set(known):
        found = ", ".join(map(str, values)) if isinstance(values, Mapping) else f"a {type(values).__name__}"
        raise ValueError(f"mcp.{name}: must be a block with the keys {', '.join(known)}, got {found}")
    try:
        return McpServerConfig(**values)
    except ValueError as error:
        raise ValueError(f"mcp.{name}.{error}") from error


@dataclass(frozen=True)
class EnvConfig(Bounded):
    """The environment that the policy acts in."""

    # Environment of a rollout; single_turn: one prompt, one answer; tools: typed functions that the policy calls;
    # custom: a class of your own; workflow: a function or a program of your own that asks the policy.
    kind: str = one_of(ENVS, DEFAULT_ENV, "env")
    target: str = ""  # For custom: dotted path of the class; for workflow: of the function.
    functions: str = ""  # For tools: dotted path of a module, whose public functions are the tools.
    # For tools: servers of the Model Context Protocol, by name, each with a command (and env) or a url (and headers),
    # shared by the episodes or not, with all of its tools or those it names; their tools join those of functions.
    mcp: dict[str, Any] = field(default_factory=dict)
    # For workflow: inprocess: in the run itself, must never block; process: in worker processes; command: a program.
    runs_in: str = one_of(WORKFLOW_PLACES, DEFAULT_PLACE, "place")
    command: list[str] = field(default_factory=list)  # For runs_in=command: the program, and its arguments.
    # For custom and workflow: further arguments of the class, or of the function.
    options: dict[str, Any] = field(default_factory=dict)
    isolation: IsolationConfig = field(default_factory=IsolationConfig)
    boot_s: float = positive(60.0, SECONDS)  # Limit on the start of an episode's environment.
    step_s: float = positive(30.0, SECONDS)  # Limit on the environment's answer to a turn.
    # For tools: limit on a call, from its start; the policy reads its end as the call's result. null: nine tenths of
    # step_s, which is also what all calls of a turn have together.
    call_s: float | None = None
    # For tools: most calls of a turn that run at once; 1: one after the other.
    max_parallel_calls: int = at_least(1, 16)
    close_s: float = positive(10.0, SECONDS)  # Limit on the end of an episode's environment.
    # After this time no further turn begins; the rollout is judged as it is.
    episode_s: float = positive(600.0, SECONDS)
    attempts: int = at_least(1, 3)  # [episodes] Most episodes of a sibling; the environment failed in all but the last.
    # [episodes] Most episodes open at the same time. A group waits until there is room for all its siblings.
    capacity: int = at_least(1, 256)
    # [characters] Longest message of the environment; the middle of a longer one is left out.
    max_observation_chars: int = at_least(1, 8000)
    # [share] Share of the last 64 episodes that failed in all their attempts, above which no group is opened for
    # rollout.pause_s; if it is exceeded again, the run stops.
    max_failure_rate: float = above_0_to_1(0.5)
    # Module and name of further exceptions that are the policy's doing, as my_agent.TooManyMoves: one of them, or of
    # their subclasses, ends an episode after the policy's first turn; it is judged as it is. Those of known agent
    # frameworks (docs/agents.md) count by themselves.
    policy_errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.runs_in != DEFAULT_PLACE and not self.env_kind.is_workflow:
            raise ValueError("runs_in: is for env.kind=workflow; type that, or leave it out")
        self._check_needs()
        if self.call_s is not None and not self.env_kind.has_tools:
            raise ValueError("call_s: is for env.kind=tools; an environment of your own limits its calls itself")
        if self.call_s is not None and not 0 < self.call_s < self.step_s:
            raise ValueError(
                f"call_s: must be above 0 and below step_s = {self.step_s:g} (seconds), got {self.call_s}; raise "
                "env.step_s too"
            )
        for name in self.policy_errors:
            if not all(part.isidentifier() for part in name.split(".")) or "." not in name:
                raise ValueError(
                    f"policy_errors: {name!r} is no module and name of an exception; type for example "
                    "env.policy_errors=[my_agent.TooManyMoves], or builtins.ValueError for one of Python's own"
                )

    @property
    def _needs(self) -> tuple[str, ...]:
        """The keys that must be set, and that no other kind may have."""
        if self.env_kind.is_workflow:
            return (self.workflow_place.needs,)
        if self.mcp and not self.functions:
            return tuple(key for key in self.env_kind.needs if key != "functions")
        return self.env_kind.needs

    def _check_needs(self) -> None:
        needs = self._needs
        if self.isolation.kind != INPROCESS and (why_not := self._not_isolated):
            raise ValueError(
                f"isolation.kind: isolates environments, and {why_not}; type env.isolation.kind={INPROCESS}"
            )
        if self.mcp and "functions" not in self.env_kind.needs:
            raise ValueError("mcp: is for env.kind=tools; type that, or leave it out")
        for name, values in self.mcp.items():
            mcp_server(name, values)
        for key, way_out in WAYS_OUT.items():
            if key in needs and not getattr(self, key):
                raise ValueError(f"{key}: is empty; for kind={self.kind} {way_out}")
            if getattr(self, key) and key not in needs:
                raise ValueError(f"{key}: is for {self._where_needed(key)}; type that, or leave it out")
        if self.options and "target" not in needs and not self.env_kind.is_workflow:
            raise ValueError("options: is for code of your own; type env.kind=custom or workflow, or leave it out")

    @property
    def _not_isolated(self) -> str:
        """Why episodes can't be isolated; empty: they can."""
        if self.mcp:
            return "servers of tools (mcp) are processes of their own"
        if self.env_kind.is_workflow:
            return (
                "a workflow needs the network, to ask the policy; it runs with the run's own rights: start a program "
                "that isolates itself (env.runs_in=command, an env.command that begins with docker run), or write an "
                "env (env=custom)"
            )
        return f"kind={self.kind} has none" if self.env_kind.is_single else ""

    def _where_needed(self, key: str) -> str:
        kinds = [name for name, kind in ENVS.items() if key in kind.needs]
        places = [name for name, place in WORKFLOW_PLACES.items() if place.needs == key]
        if places and (self.env_kind.is_workflow or not kinds):
            return f"env.kind=workflow env.runs_in={' or '.join(places)}"
        return f"env.kind={' or '.join(kinds)}"

    @property
    def env_kind(self) -> EnvKind:
        return ENVS[self.kind]

    @property
    def mcp_servers(self) -> dict[str, McpServerConfig]:
        return {name: mcp_server(name, values) for name, values in self.mcp.items()}

    @property
    def workflow_place(self) -> WorkflowPlace:
        return WORKFLOW_PLACES[self.runs_in]

    @property
    def is_custom(self) -> bool:
        """Whether its class is the user's."""
        return not self.env_kind.path

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the class."""
        given = {key: getattr(self, key) for key in self.env_kind.needs if key != "target"} | self.options
        return given | {"limits": self._call_limits} if self.env_kind.has_tools else given

    @property
    def _call_limits(self) -> ToolCallLimits:
        turn_s = CALLS_SHARE * self.step_s
        call_s = turn_s if self.call_s is None else self.call_s
        return ToolCallLimits(
            call_s=call_s,
            turn_s=max(call_s, turn_s),
            max_parallel_calls=self.max_parallel_calls,
            policy_errors=tuple(self.policy_errors),
        )

    @property
    def path(self) -> str:
        """The dotted path of the environment's class."""
        return self.env_kind.path or self.target
