"""Imports the object at a dotted path."""

import inspect
from collections.abc import Iterable

from grmpipe.models.import_path import import_module


def is_dotted(path: str) -> bool:
    """Whether a name is a dotted path, instead of a row of a table."""
    return "." in path


def find_at(path: str, key: str) -> object:
    """The object at `path`, such as my_package.my_module.my_name. Raises ValueError that begins with the key."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ValueError(f"{key}: {path!r} is not a dotted path; type it like my_package.my_module.my_name")
    names = vars(import_module(module_name, key))
    if name not in names:
        raise ValueError(f"{key}: the module {module_name} has no {name}")
    return names[name]


def unknown_value(name: str, key: str, known: Iterable[str]) -> ValueError:
    """The error for a value that is neither a row of a table nor a dotted path."""
    own = "or the dotted path of one of yours, as my_module.my_name"
    return ValueError(f"{key}: unknown value {name!r}; known: {', '.join(known)}; {own}")


def check_takes(path: str, key: str, arguments: tuple[str, ...]) -> None:
    """Raises ValueError, which begins with the key, if the object at `path` can't be called with these arguments."""
    check_callable(find_at(path, key), path, key, arguments)


def check_callable(function: object, path: str, key: str, arguments: tuple[str, ...]) -> None:
    """The same of an object that `path` led to."""
    wanted = f"{key}: {path} must be a function that takes ({', '.join(arguments)})"
    if not callable(function):
        raise ValueError(f"{wanted}, and is a {type(function).__name__}")
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError) as error:  # ValueError: it has no readable signature
        raise ValueError(f"{wanted}: {error}") from error
