"""Paths that name something made instead of a file, such as tiny://train: who makes it. Imports the maker if asked."""

import importlib
from typing import Protocol, cast

from grmpipe.types import Labelled, Prompt

CATALOGS = {"tiny://": "grmpipe.tiny.catalog"}


class Catalog(Protocol):
    """The module of a scheme. Each function raises ValueError for a name that it doesn't know."""

    def resolve_model(self, path: str) -> str: ...

    def make_prompts(self, path: str, count: int, seed: int) -> tuple[Prompt, ...]: ...

    def make_labelled(self, path: str, count: int, seed: int) -> tuple[Labelled, ...]: ...


def find_catalog(path: str) -> Catalog | None:
    """The catalog of the scheme that a path begins with; None: the path names a file, a directory or a hub name."""
    module = next((CATALOGS[scheme] for scheme in CATALOGS if path.startswith(scheme)), None)
    return cast(Catalog, importlib.import_module(module)) if module is not None else None


def is_made(path: str) -> bool:
    """Whether a path names something made."""
    return path.startswith(tuple(CATALOGS))


def resolve_model(path: str) -> str:
    """The directory of a made model; any other path is returned unchanged. Raises ValueError for an unknown name."""
    catalog = find_catalog(path)
    return catalog.resolve_model(path) if catalog is not None else path
