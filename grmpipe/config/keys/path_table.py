"""A table from the values of a key to dotted paths. Imports an object only when it is used."""

from collections.abc import Mapping
from typing import TypeVar

from grmpipe.config.keys.dotted_path import check_takes, find_at, is_dotted, unknown_value

T = TypeVar("T")


class PathTable(dict[str, str]):
    """Name -> dotted path. A user's own value is a dotted path."""

    def __init__(
        self, key: str, arguments: tuple[str, ...], module: str, rows: Mapping[str, str], others: tuple[str, ...] = ()
    ) -> None:
        """key: for example algorithm.correction. arguments: of the functions; empty: the objects are no functions.
        rows: name -> its name in the module. others: further values of the key, without an object.
        """
        super().__init__({name: f"{module}.{place}" for name, place in rows.items()})
        self.key, self.arguments, self._others = key, arguments, others
        self.name = key.rpartition(".")[2]

    def check(self, name: str) -> None:
        """Check a value; a user's own is imported. Raises ValueError that begins with the key's last part."""
        if name in self or name in self._others:
            return
        if not is_dotted(name):
            raise unknown_value(name, self.name, (*self, *self._others))
        self.check_path(name)

    def check_path(self, path: str) -> None:
        if self.arguments:
            check_takes(path, self.name, self.arguments)
        else:
            find_at(path, self.name)

    def find_object(self, name: str, kind: type[T] = object) -> T:  # type: ignore[assignment]
        """The object of a name or dotted path. Raises ValueError if it can't be imported, or isn't a `kind`."""
        found = find_at(self.get(name, name), self.key)
        if not isinstance(found, kind):
            raise ValueError(f"{self.key}: {name} is no {kind.__name__} (see {kind.__module__})")
        return found
