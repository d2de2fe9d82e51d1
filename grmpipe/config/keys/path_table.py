"""Tables of the values of a key: of objects, or of dotted paths to objects that are imported only when used."""

from collections.abc import Mapping
from typing import Generic, TypeVar, cast

from grmpipe.config.keys.dotted_path import check_callable, check_takes, find_at, is_dotted, unknown_value

T = TypeVar("T")


class ObjectTable(dict[str, T], Generic[T]):
    """Name -> object. A user's own value is a dotted path."""

    def __init__(
        self, key: str, rows: Mapping[str, T], *, arguments: tuple[str, ...] = (), kind: type[T] | None = None
    ) -> None:
        """key: for example algorithm.correction. arguments: what functions take. kind: for objects that are none."""
        super().__init__(rows)
        self.key, self.name = key, key.rpartition(".")[2]
        self._arguments, self._kind = arguments, kind

    def check(self, name: str) -> None:
        """Check a value; a user's own is imported. Raises ValueError that begins with the key's last part."""
        self._find(name, self.name)

    def find_object(self, name: str) -> T:
        """The object of a name or dotted path. Raises ValueError if it can't be imported, or used."""
        return self._find(name, self.key)

    def _find(self, name: str, key: str) -> T:
        if name in self:
            return self[name]
        if not is_dotted(name):
            raise unknown_value(name, key, self)
        found = find_at(name, key)
        if self._kind is None:
            check_callable(found, name, key, self._arguments)
        elif not isinstance(found, self._kind):
            raise ValueError(f"{key}: {name} is no {self._kind.__name__} (see {self._kind.__module__})")
        return cast(T, found)


class PathTable(dict[str, str]):
    """Name -> dotted path. A user's own value is a dotted path."""

    def __init__(
        self, key: str, arguments: tuple[str, ...], module: str, rows: Mapping[str, str], others: tuple[str, ...] = ()
    ) -> None:
        """key: for example algorithm.correction. arguments: what the functions take; empty: they are no functions.
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
