"""The user's code in errors: what it is called, where it stands, what it raised. And the numbers and texts that it
returns. Imports none of it.
"""

import asyncio
import functools
import inspect
import math
import numbers
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from grmpipe.models.import_path import is_library, list_our_folders

MAX_CHARS = 2000  # shown of a text in an error
MAX_SHOWN = 120  # characters of a value in an error
NEEDS_MAIN_THREAD = re.compile(r"signal only works in main thread|signal\.(?:alarm|setitimer)")
NO_SIGNALS = (
    "; it runs in a thread, and signals need the main one: turn the time limit of the library off, which uses them "
    "(math-verify: parse(.., parsing_timeout=None), verify(.., timeout_seconds=None)); the limit on this call holds "
    "without it"
)


class UserCodeError(Exception):
    """Code of the user's raised its `__cause__`, whatever that is. The text names the code, and the line."""


class BadValueError(Exception):
    """Code of the user's returned what can't be used. The text goes on after the code's name: "returned .."."""


@contextmanager
def call_guarded(owner: str, passed: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Context: a call of the user's code. What it raises becomes a UserCodeError: also what would end the process, as
    SystemExit does. A cancellation from outside, and the types in `passed`, stay as they are.
    """
    try:
        yield
    except passed:
        raise
    except BaseException as error:
        if comes_from_outside(error):
            raise
        words = str(error) if isinstance(error, BadValueError) else f"raised {describe_error(error)}"
        raise UserCodeError(f"{owner} {words}") from error


@contextmanager
def note_owner(owner: str) -> Iterator[None]:
    """Context: an exception keeps its type, and says in which code of the user's it was raised. What would end the
    process becomes an exception.
    """
    try:
        with call_guarded(owner, (Exception, asyncio.CancelledError)):
            yield
    except UserCodeError:
        raise
    except Exception as error:
        place = find_place(error)
        error.add_note(f"in {owner}{f', {place}' if place else ''}:")
        raise


def comes_from_outside(error: BaseException) -> bool:
    """Whether somebody else ends the present task with this: its canceller, or the end of the event loop."""
    if isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs here
            return False
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit)


def describe_code(code: object) -> str:
    """A function, a class, or the class of an object: its dotted name, with file and line where they are known."""
    while isinstance(code, functools.partial):
        code = code.func
    named = code if inspect.isroutine(code) or inspect.isclass(code) else type(code)
    name = f"{named.__module__}.{named.__qualname__}"
    function = inspect.unwrap(named.__func__ if inspect.ismethod(named) else named)
    if inspect.isfunction(function):
        return f"{name} ({function.__code__.co_filename}:{function.__code__.co_firstlineno})"
    try:
        return f"{name} ({inspect.getsourcefile(named)}:{inspect.getsourcelines(named)[1]})"
    except (OSError, TypeError):  # built in, or typed into a shell
        return name


def describe_error(error: BaseException) -> str:
    """The type and the text of an exception, and the innermost line of the user's own files that it came from."""
    try:
        text = plain_text(str(error))
    except Exception:  # its __str__ is the user's code, too
        text = "it has no text that could be shown"
    place = find_place(error)
    said = f"{type(error).__name__}: {shorten(text, MAX_CHARS)}" if text else type(error).__name__
    said = f"{said} ({place})" if place else said
    return said + NO_SIGNALS if NEEDS_MAIN_THREAD.search(text) else said


def find_place(error: BaseException) -> str:
    """file:line; empty if the exception didn't pass through a file that is neither ours nor installed."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [one for one in frames if not one.filename.startswith((*list_our_folders(), "<"))]
    own = [one for one in theirs if not is_library(one.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def format_value(value: object) -> str:
    """A value in an error: short, whatever it is."""
    try:
        text = plain_text(repr(value))
    except Exception:  # a number of 5,000 digits has none, and a __repr__ may be the user's
        return f"a {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}.. (a {type(value).__name__})"


def to_number(value: object) -> float | None:
    """A finite number as a plain float, also a bool and a scalar of numpy or torch. None for anything else: an array,
    a text, None, NaN, what is too large for a float.
    """
    value = to_scalar(value)
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if math.isfinite(number) else None


def to_scalar(value: object) -> object:
    """A scalar of numpy, torch or another array library as Python's own; any other value as it is."""
    if getattr(value, "ndim", None) != 0:  # the library need not be installed here
        return value
    item: Callable[[], object] | None = getattr(value, "item", None)
    try:
        return item() if item is not None else value
    except Exception:  # such as a tensor without data
        return value


def plain_text(text: str) -> str:
    """A text as a str that can be written to a file: half characters (lone surrogates) become question marks."""
    text = str.__str__(text)
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def shorten(text: str, max_chars: int) -> str:
    """The text without its middle, if it is too long."""
    if len(text) <= max_chars:
        return text
    begin = (max_chars + 1) // 2
    end = len(text) - (max_chars - begin)
    return f"{text[:begin]}\n[{end - begin} characters left out]\n{text[end:]}"
