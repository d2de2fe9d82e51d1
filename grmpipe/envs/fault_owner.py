"""Whose fault it is, the policy's or the environment's: what was raised, and how a process ended. Decides this for
environments and workflows, wherever they run (docs/agents.md has the table).
"""

import errno
import inspect
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar, get_args

from grmpipe.config.keys.dotted_path import find_at
from grmpipe.config.keys.user_code import (
    MAX_CHARS,
    BadValueError,
    UserCodeError,
    comes_from_outside,
    describe_error,
    plain_text,
    shorten,
)
from grmpipe.envs.env import EnvFault, PolicyFault
from grmpipe.types import EnvCause

Fault = TypeVar("Fault", PolicyFault, EnvFault)

LIMIT = "limit"  # the kind of a policy's fault: it reached a limit of its box
# Module and name of the exceptions with which agent frameworks end an episode because of what the model did. They are
# compared by name: none of these is imported.
KNOWN_POLICY_ERRORS = (
    "agents.exceptions.MaxTurnsExceeded",  # openai-agents
    "agents.exceptions.ModelBehaviorError",
    "dspy.utils.exceptions.AdapterParseError",
    "google.adk.agents.invocation_context.LlmCallsLimitExceededError",
    "langchain.agents.middleware.model_call_limit.ModelCallLimitExceededError",
    "langchain.agents.middleware.tool_call_limit.ToolCallLimitExceededError",
    "langchain_core.exceptions.OutputParserException",
    "langgraph.errors.GraphRecursionError",
    "pydantic_ai.exceptions.UnexpectedModelBehavior",
    "pydantic_ai.exceptions.UsageLimitExceeded",
    "smolagents.utils.AgentMaxStepsError",
    "smolagents.utils.AgentParsingError",
    "strands.types.exceptions.MaxTokensReachedException",
)
# What the kernel answers at a limit of a box: on files and their number, descriptors, processes, memory.
LIMITS = {
    errno.ENOSPC: "its folder is full",
    errno.EDQUOT: "its folder is full",
    errno.EFBIG: "a file became too large",
    errno.EMFILE: "too many files were open",
    errno.EAGAIN: "too many processes ran",
    errno.ENOMEM: "it took more memory than it may",
}
NOT_READ = (
    "; an isolated environment reads its modules, what is installed, its own folder, and what env.isolation.read "
    "names: type env.isolation.read=[/a/file,/a/folder]"
)
# Errors of the operating system that an argument brings about; others come from the machine or the network.
ABOUT_A_PATH = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
NO_THREAD = "can't start new thread"  # Python's text at the limit on processes
# Signals that end a process and that neither the run nor a broken program sends to a box: its programs do.
SENT_BY_PROGRAMS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRules:
    """What counts as the policy's doing.

    policy_errors: module and name of further exceptions.
    in_box:        the code runs within limits that only this episode can reach.
    """

    policy_errors: tuple[str, ...] = ()
    in_box: bool = False


def fault_rules(policy_errors: Sequence[str], *, in_box: bool = False) -> FaultRules:
    """The rules by `env.policy_errors`: also by the names that those exceptions have where they are defined, if they
    can be imported here.
    """
    names = set(policy_errors)
    for path in policy_errors:
        with suppress(ValueError):
            names.add(name_type(exception_at(path)))
    return FaultRules(policy_errors=tuple(sorted(names)), in_box=in_box)


def exception_at(path: str) -> type[BaseException]:
    """Raises ValueError that begins with the key, for what isn't here or is no exception."""
    found = find_at(path, "policy_errors")
    if not (inspect.isclass(found) and issubclass(found, BaseException)):
        raise ValueError(f"policy_errors: {path} is no exception; name a class such as my_agent.TooManyMoves")
    return found


class RaisedElsewhere(Exception):
    """The user's code raised in another process, or a program of his failed. types: as `list_types` gives them."""

    def __init__(self, text: str, types: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.types = tuple(types)


def decide_fault(error: BaseException, owner: str, rules: FaultRules, *, has_acted: bool) -> PolicyFault | EnvFault:
    """The fault that an exception of the user's code is. Its cause is the exception, if it was none itself.

    owner:     the code, in words: the beginning of the fault's text.
    has_acted: whether the policy has had a turn: before it, nothing is its fault.
    """
    if isinstance(error, EnvFault):
        return error if error.cause in get_args(EnvCause) else _caused(EnvFault(str(error)), error)
    if has_acted and (fault := _policys(error, rules)) is not None:
        return fault
    if isinstance(error, PolicyFault):
        words = f"{owner} raised a PolicyFault, and the policy has done nothing so far: {error}"
        return _caused(EnvFault(words), error)
    said = isinstance(error, UserCodeError | RaisedElsewhere)
    words = str(error) if said else f"{owner} raised {describe_error(error)}"
    if rules.in_box and not has_acted and isinstance(error, MemoryError):
        return _caused(EnvFault(f"{words}: no memory was left; raise env.isolation.memory_mb", "boot"), error)
    words += explain_unread(error) if rules.in_box else ""
    is_answer = isinstance(error.__cause__, BadValueError)
    return _caused(EnvFault(words, "protocol" if is_answer else "broken"), error)


@contextmanager
def raise_faults(owner: str, rules: FaultRules, *, has_acted: bool) -> Iterator[None]:
    """Context: a call of the user's code. What it raises becomes a fault (see `decide_fault`), but a cancellation from
    outside.
    """
    try:
        yield
    except BaseException as error:
        if comes_from_outside(error):
            raise
        fault = decide_fault(error, owner, rules, has_acted=has_acted)
        if fault is error:
            raise
        raise fault from error


def _policys(error: BaseException, rules: FaultRules) -> PolicyFault | None:
    """The policy's fault that an exception is, if it is one."""
    if isinstance(error, PolicyFault):
        return error
    known = {*KNOWN_POLICY_ERRORS, *rules.policy_errors}
    if (found := next((name for name in list_types(error) if name in known), "")) != "":
        return _caused(PolicyFault(describe_error(error), found.rpartition(".")[2], ends=True), error)
    if rules.in_box and (limit := limit_reached(error)):
        return _caused(PolicyFault(f"{limit}: {describe_error(error)}", LIMIT, ends=True), error)
    return None


def is_answer_to_call(error: BaseException, rules: FaultRules) -> bool:
    """Whether what a tool raised is about its call, as a wrong argument is, so that its caller can read it: not what
    ends an episode by these rules, the process, or comes from the machine.
    """
    cause = error.__cause__ if isinstance(error, UserCodeError) else error
    if not isinstance(cause, Exception) or isinstance(cause, BadValueError | MemoryError | ImportError):
        return False
    if isinstance(cause, OSError) and not isinstance(cause, ABOUT_A_PATH):
        return False
    return _policys(error, replace(rules, in_box=True)) is None


def _caused(fault: Fault, error: BaseException) -> Fault:
    fault.__cause__ = error
    return fault


def list_types(error: BaseException) -> list[str]:
    """Module and name of an exception's type and its bases, then those of its cause, and so on."""
    found: list[str] = []
    for one in causes(error):
        found += one.types if isinstance(one, RaisedElsewhere) else [name_type(base) for base in type(one).__mro__]
    return found


def name_type(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def causes(error: BaseException) -> Iterator[BaseException]:
    """The exception, its cause, the cause's cause."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__


def explain_unread(error: BaseException) -> str:
    """The way out for code in a box that found no file or module, which may be there outside; empty for others."""
    for one in causes(error):
        is_unread = isinstance(one, FileNotFoundError | PermissionError) and str(one.filename).startswith("/")
        if is_unread or isinstance(one, ModuleNotFoundError):
            return NOT_READ
    return ""


def limit_reached(error: BaseException) -> str:
    """Which limit of a box an exception says was reached, in words; empty: none."""
    for one in causes(error):
        if isinstance(one, MemoryError):
            return LIMITS[errno.ENOMEM]
        if isinstance(one, OSError) and one.errno in LIMITS:
            return LIMITS[one.errno]
        if isinstance(one, RuntimeError) and NO_THREAD in str(one):
            return LIMITS[errno.EAGAIN]
    return ""


def policys_end(signal_number: int, limit: str) -> str:
    """How the policy ended a box in a step, in words; empty: the environment did. limit: that the kernel kept."""
    if limit:
        return limit
    return f"a {signal.Signals(signal_number).name}" if signal_number in SENT_BY_PROGRAMS else ""


def readable(fault: PolicyFault, max_chars: int) -> PolicyFault:
    """A fault of the policy as it may read it: a plain text that isn't too long, and a kind that is a word."""
    text = shorten(plain_text(str(fault)), max_chars)
    kind = plain_text(fault.kind)[:MAX_CHARS] if isinstance(fault.kind, str) else type(fault.kind).__name__
    if (text, kind) == (str(fault), fault.kind):
        return fault
    shown = PolicyFault(text, kind, ends=fault.ends)
    shown.__cause__ = fault.__cause__
    return shown
