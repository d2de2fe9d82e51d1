"""Typed functions as tools: their specifications, and checked calls of them."""

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import get_type_hints

import msgspec

from grmpipe.config.keys.user_code import BadValueError, format_value, to_scalar
from grmpipe.envs.env import EnvFault, PolicyFault, State
from grmpipe.models.import_path import import_module
from grmpipe.models.types import ToolCall, ToolSpec
from grmpipe.scheduler.daemon_threads import TooManyStuck, in_own_thread

ARGUMENTS_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters)\s*:?\s*$")
ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$")
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTool:
    """A function that the policy may call.

    arguments: a struct that checks them by the function's own types.
    state:     the parameter that takes a State, which no caller gives; empty: there is none.
    """

    spec: ToolSpec
    function: Callable[..., object]
    arguments: type[msgspec.Struct]
    state: str = ""

    async def call(self, call: ToolCall, state: bytes = b"") -> str:
        """The result as text. Raises PolicyFault for wrong arguments, and what the function raises.

        A function that isn't `async` runs in a thread of its own, so that one that hangs holds up no other.
        """
        try:
            checked = msgspec.convert(call.arguments, self.arguments)
        except msgspec.ValidationError as error:
            raise PolicyFault(f"wrong arguments of {self.spec.name}: {error}", "arguments") from error
        given = {name: getattr(checked, name) for name in self.arguments.__struct_fields__}
        if self.state:
            given[self.state] = state
        if inspect.iscoroutinefunction(self.function):
            return to_text(await self.function(**given))
        try:
            return to_text(await in_own_thread(self.function, **given))
        except TooManyStuck as error:
            raise EnvFault(
                f"{error}: give what it waits for a time limit, make it async, or type env.isolation.kind=process, "
                "which ends the process with the call",
                "capacity",
            ) from error


def to_text(result: object) -> str:
    """A text as it is, anything else as JSON, also with scalars of numpy and torch. Raises BadValueError."""
    if isinstance(result, str):
        return result
    try:
        return msgspec.json.encode(to_scalar(result), enc_hook=plain_scalar).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadValueError(
            f"returned {format_value(result)}, which is no JSON ({error}): return a text, numbers, lists and dicts"
        ) from error


def plain_scalar(value: object) -> object:
    if (plain := to_scalar(value)) is value:
        raise TypeError(f"it holds a {type(value).__name__}")
    return plain


@functools.cache
def load_tools(path: str) -> tuple[FunctionTool, ...]:
    """The public functions of the module at a dotted path: those in its `__all__`, else those that it defines itself.

    Raises ValueError that begins with the key.
    """
    module = import_module(path, "functions")
    functions = public_functions(module)
    if not functions:
        raise ValueError(
            f"functions: the module {path} has no public function; define one, such as `def add(a: int, b: int) -> int`"
        )
    return tuple(make_tool(function) for function in functions)


def are_replayable(path: str) -> bool:
    """Whether the module of functions says that of itself."""
    return getattr(import_module(path, "functions"), "replayable", False) is True


def check_state(path: str, *, is_given: bool) -> None:
    """Check that functions read a state where one is given, and only there. Raises ValueError that begins with a key of
    `tools`, or with `functions` for those of a policy.
    """
    readers = [tool.spec.name for tool in (load_tools(path) if path else ()) if tool.state]
    if is_given and not readers:
        raise ValueError(
            f"state: {path or 'no module'} has no function that reads the state; give one a parameter such as "
            "`files: State` (grmpipe.envs.env), or type judge.tools.state=false"
        )
    if readers and not is_given:
        raise ValueError(
            f"functions: {readers[0]} reads a rollout's final state, which only a judge's tools get; type "
            f"judge.tools.functions={path} judge.tools.state=true, or another module"
        )


def public_functions(module: ModuleType) -> list[Callable[..., object]]:
    names = vars(module).get("__all__")
    found = [vars(module).get(name) for name in (vars(module) if names is None else names)]
    return [
        one
        for one in found
        if inspect.isfunction(one)
        and (names is not None or (one.__module__ == module.__name__ and not one.__name__.startswith("_")))
    ]


def make_tool(function: Callable[..., object]) -> FunctionTool:
    """A typed function as a tool. Raises ValueError if its arguments have no types, or can't be given by name."""
    name, where = function.__name__, f"functions: {function.__module__}.{function.__name__}"
    hints = get_type_hints(function)
    state = next((one for one, kind in hints.items() if kind is State), "")
    fields: list[tuple[str, object] | tuple[str, object, object]] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in NAMED:
            raise ValueError(
                f"{where}: the parameter {parameter.name} has no name to give it by; write plain parameters"
            )
        if parameter.name not in hints:
            raise ValueError(
                f"{where}: the parameter {parameter.name} has no type; write for example `{parameter.name}: int`"
            )
        if parameter.name == state:
            continue
        typed = (parameter.name, hints[parameter.name])
        fields.append(typed if parameter.default is parameter.empty else (*typed, parameter.default))
    arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
    description, of_arguments = parse_docstring(inspect.getdoc(function) or "")
    try:
        parameters = make_schema(arguments, of_arguments)
    except TypeError as error:
        raise ValueError(f"{where}: a type that JSON doesn't know: {error}") from error
    return FunctionTool(
        spec=ToolSpec(name=name, description=description, parameters=parameters),
        function=function,
        arguments=arguments,
        state=state,
    )


def make_schema(arguments: type[msgspec.Struct], descriptions: dict[str, str]) -> dict[str, object]:
    """The JSON Schema of an object with these arguments."""
    _, components = msgspec.json.schema_components([arguments])
    own = dict(components.pop(arguments.__name__))
    properties = {
        name: {**field, "description": descriptions[name]} if name in descriptions else field
        for name, field in own["properties"].items()
    }
    parameters = {"type": "object", "properties": properties, "required": list(own.get("required", ()))}
    return parameters | ({"$defs": components} if components else {})


def parse_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """The first paragraph of a docstring, and what its section of arguments says of each ("Args:", Google's style)."""
    lines = docstring.splitlines()
    begin = next((i for i, line in enumerate(lines) if ARGUMENTS_SECTION.match(line)), len(lines))
    first = "\n".join(lines[:begin]).split("\n\n")[0]
    found = (ARGUMENT.match(line) for line in lines[begin + 1 :])
    return " ".join(first.split()), {match[1]: match[2].strip() for match in found if match}
