"""What the values of a key name: a table from names to dotted paths. Imports nothing before it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from grmpipe.config.dotted_path import check_takes, found_at, is_dotted, unknown_value

T = TypeVar("T")


class PathTable(dict[str, str]):
    """Name -> dotted path. A user names his own by its path."""

    def __init__(
        self, key: str, arguments: tuple[str, ...], module: str, rows: Mapping[str, str], others: tuple[str, ...] = ()
    ) -> None:
        """key: as algorithm.correction. arguments: that the functions take; empty: the paths name no functions.
        rows: name -> its name in the module. others: values of the key that name nothing."""
        super().__init__({name: f"{module}.{place}" for name, place in rows.items()})
        self.key, self.arguments, self._others = key, arguments, others
        self.name = key.rpartition(".")[2]

    def check(self, name: str) -> None:
        """What is the user's own is imported and looked at. Raises ValueError that begins with the key's last part."""
        if name in self or name in self._others:
            return
        if not is_dotted(name):
            raise unknown_value(name, self.name, (*self, *self._others))
        self.check_path(name)

    def check_path(self, path: str) -> None:
        if self.arguments:
            check_takes(path, self.name, self.arguments)
        else:
            found_at(path, self.name)

    def found(self, name: str, kind: type[T] = object) -> T:  # type: ignore[assignment]
        """What the name, or the dotted path, stands for. Raises ValueError where that isn't here, or is no `kind`."""
        found = found_at(self.get(name, name), self.key)
        if not isinstance(found, kind):
            raise ValueError(f"{self.key}: {name} is no {kind.__name__} (see {kind.__module__})")
        return found
