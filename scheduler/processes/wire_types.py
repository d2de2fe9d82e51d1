"""The types that a call may send: those of each method's arguments and answer, and errors by name.

Both ends know the types before the first call; only these are decoded. Arrays are sent as type, shape and bytes. A
class whose methods have other types can't be called this way (`UntypedCall`).
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, get_type_hints, runtime_checkable

import msgspec
import numpy as np
from msgspec import inspect as types_of

from grmpipe.models.types import EngineDied, EngineRefused, Payload
from grmpipe.scheduler.run_together import RemoteTraceback

DTYPES = {dtype.str: dtype for dtype in map(np.dtype, ("?", "B", "b", "h", "i", "q", "e", "f", "d"))}
Plain = str | int | float | bool | None | tuple[str, ...]
# Errors that callers distinguish. Any other arrives as the nearest base class in this list, or as a RuntimeError.
ERRORS: tuple[type[Exception], ...] = (
    EngineDied, EngineRefused, ValueError, ConnectionError, TimeoutError, OSError, ArithmeticError, AttributeError,
    TypeError, LookupError, AssertionError, MemoryError, NotImplementedError, RuntimeError,
)  # fmt: skip
KNOWN_ERRORS: dict[str, type[Exception]] = {error.__name__: error for error in ERRORS}


class UntypedCall(TypeError):
    """A method has types that can't be sent."""


@runtime_checkable
class HasOwnErrors(Protocol):
    """A class with errors of its own that arrive at callers as themselves: they are made from their `args`."""

    own_errors: ClassVar[tuple[type[Exception], ...]]


@runtime_checkable
class HasComponents(Protocol):
    """A class with components that are called too, as `component.method`: attribute -> class."""

    components: ClassVar[Mapping[str, type]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTypes:
    """The types of one method. args: name, type and, if it is optional, the default (in a tuple)."""

    args: tuple[tuple[str, Any, tuple[object, ...]], ...]
    answer: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """All methods that one end may call and the other answers."""

    calls: Mapping[str, CallTypes]
    errors: Mapping[str, type[Exception]]

    @staticmethod
    def of(kind: type, but: Collection[str] = ()) -> Dialect:
        """The public methods of a class and its components, except those in `but`. Raises UntypedCall that names one
        whose types aren't plain data.
        """
        methods = inspect.getmembers(kind, inspect.isfunction)
        own = kind.own_errors if isinstance(kind, HasOwnErrors) else ()
        calls = {name: types_of_call(each) for name, each in methods if name[0] != "_" and name not in but}
        for name, component in (kind.components if isinstance(kind, HasComponents) else {}).items():
            calls |= Dialect.of(component).under(name).calls
        return Dialect(
            calls=calls,
            errors=KNOWN_ERRORS | {error.__name__: error for error in own},
        )

    def under(self, prefix: str) -> Dialect:
        """The same methods as `prefix.name`."""
        return replace(self, calls={f"{prefix}.{name}": types for name, types in self.calls.items()})


class RemoteError(msgspec.Struct, frozen=True, kw_only=True):
    """An error to send: its class by name, the arguments to make it from, and where it was raised."""

    kind: str
    args: tuple[Plain, ...]
    trace: str = ""


def remote_error(error: BaseException, known: Mapping[str, type[Exception]]) -> RemoteError:
    """The error to send: as itself if its class is known, else as the nearest known base class, else as its
    traceback.
    """
    trace = "".join(traceback.format_exception(error))
    if known.get(type(error).__name__) is type(error) and isinstance(error, Exception):
        return RemoteError(kind=type(error).__name__, args=tuple(map(_plain, error.args)), trace=trace)
    for kind in type(error).__mro__:
        if known.get(kind.__name__) is kind:
            return RemoteError(kind=kind.__name__, args=(str(error),), trace=trace)
    return RemoteError(kind="RuntimeError", args=(trace,), trace=trace)


def rebuild_error(error: RemoteError, known: Mapping[str, type[Exception]], where: str = "") -> Exception:
    """The error, made from what was sent; returned, not raised. `where`: the process in which it was raised."""
    again = known.get(error.kind, RuntimeError)(*error.args)
    if where:
        again.__cause__ = RemoteTraceback(where, error.trace)
    return again


def types_of_call(method: Callable[..., object]) -> CallTypes:
    try:
        hints = get_type_hints(method)
        _, *parameters = inspect.signature(method).parameters.values()
        # Arguments are positional: callers never use keyword-only ones (Ray adds its own to the methods of an actor).
        by_place = [each for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]
        args = tuple((each.name, hints[each.name], _default(each)) for each in by_place)
        answer = hints["return"]
        for type_ in (*(type_ for _, type_, _ in args), answer):
            _check(types_of.type_info(type_))
    except (NameError, KeyError, TypeError) as error:
        raise UntypedCall(f"{method.__qualname__}: {error}") from None
    return CallTypes(args=args, answer=answer)


def decoder(type_: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(type_, dec_hook=_decoded)


def encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=_encoded)


def args_type(call: CallTypes) -> type[msgspec.Struct]:
    """The arguments in order, as an array; those with defaults may be missing at the end."""
    fields = [(name, type_, *default) for name, type_, default in call.args]
    return msgspec.defstruct("Args", fields, array_like=True)


def _plain(arg: object) -> Plain:
    if isinstance(arg, tuple):
        return tuple(map(str, arg))
    return arg if isinstance(arg, (str, int, float)) or arg is None else str(arg)


def _default(parameter: inspect.Parameter) -> tuple[object, ...]:
    if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise TypeError(f"its argument {parameter.name} has no place of its own")
    return () if parameter.default is inspect.Parameter.empty else (parameter.default,)


def _encoded(value: object) -> object:
    if isinstance(value, np.ndarray):
        flat = np.ascontiguousarray(value).reshape(-1)
        return value.dtype.str, value.shape, flat.view(np.uint8).data
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} doesn't cross")


def _decoded(type_: type, value: Any) -> object:
    if type_ is np.ndarray:
        dtype, shape, data = value
        return np.ndarray(tuple(shape), DTYPES[dtype], data)
    if type_ is Payload:
        return msgspec.convert(value, _payloads()[value["type"]], dec_hook=_decoded)
    raise TypeError(f"{type_.__name__} doesn't cross")


def _payloads() -> dict[str, type[Payload]]:
    """Payload classes that this process has imported."""
    kinds = list(Payload.__subclasses__())
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {kind.__name__: kind for kind in reversed(kinds)}  # of two with the same name, the earlier one


def _check(info: types_of.Type) -> None:
    """Raises TypeError for a type that isn't plain data."""
    if isinstance(info, types_of.CustomType) and info.cls not in (np.ndarray, Payload):
        raise TypeError(f"{info.cls.__name__} is no plain data")
    if isinstance(info, (types_of.AnyType, types_of.RawType)):
        raise TypeError("anything at all is no type")
    for part in _parts(info):
        _check(part)


def _parts(info: types_of.Type) -> Iterator[types_of.Type]:
    if isinstance(info, types_of.CollectionType):
        yield info.item_type
    elif isinstance(info, types_of.TupleType):
        yield from info.item_types
    elif isinstance(info, types_of.DictType):
        yield from (info.key_type, info.value_type)
    elif isinstance(info, types_of.UnionType):
        yield from info.types
    elif isinstance(info, (types_of.StructType, types_of.DataclassType)):
        yield from (field.type for field in info.fields)
