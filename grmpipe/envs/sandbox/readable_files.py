"""Which files workers may read: the system's programs, Python and what is installed for it, the modules that the
environment imports from the user's own code, and what `env.isolation.read` names. Never a run or its data.

Folders on the import path hold a project's prompts, answers, journals and keys as well: of the user's own code only
files of modules are read, one by one. They are found by the names in import statements, wherever they stand, so that a
module may also be imported in the middle of an episode.
"""

from __future__ import annotations

import importlib.util
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from grmpipe.config.env import EnvConfig
from grmpipe.models.import_path import SITES, is_library, list_import_paths, list_installed, list_our_folders

SYSTEM_FILES = ("/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
NO_SYSTEM = ("/etc", "/local", "/src")  # within /usr and /usr/local; images for containers keep projects in src
PYTHON_FILES = ("bin", "sbin", "lib", "lib64", "libexec", "include", "share", "ssl", "pyvenv.cfg")
IS_MODULE = re.compile(r"\.(py|pyc|so(\.\d+)*)$")
IMPORTS = re.compile(rb"(?:^|[;:])[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([^\n;#]+))|import_module\(\s*['\"](\w+)", re.M)
MANY = 256  # files of modules in a package; from there on, a folder in it that holds nothing else is read as a folder


@dataclass(frozen=True, slots=True)
class ReadablePart:
    """A file, or a folder with all that is in it but the real paths `without`. real: its own real path."""

    path: str
    real: str
    without: tuple[str, ...]

    @staticmethod
    def at(path: str, without: Iterable[str] = ()) -> ReadablePart:
        real = os.path.realpath(path)
        return ReadablePart(path, real, tuple(left_out for left_out in without if is_below(left_out, real)))

    @property
    def masked(self) -> list[str]:
        """What is left out, by the name that it has below `path`."""
        return [self.path + path.removeprefix(self.real) for path in self.without]

    def holds(self, real: str) -> bool:
        is_inside = real == self.real or is_below(real, self.real)
        return is_inside and not any(real == path or is_below(real, path) for path in self.without)

    def carve(self) -> Iterator[str]:
        """Files and folders that hold this part and nothing that is left out."""
        return carve(self.real, self.without)


def carve(path: str, without: Sequence[str]) -> Iterator[str]:
    inside = [left_out for left_out in without if is_below(left_out, path)]
    if not inside:
        yield path
        return
    for entry in list_entries(path):
        if entry not in inside and not Path(entry).is_symlink():  # which may lead to what is left out
            yield from carve(entry, inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadableFiles:
    """What may be read. listed: folders from which modules are imported, so that the names of files in them are read
    too.
    """

    parts: tuple[ReadablePart, ...]
    listed: tuple[str, ...]


def find_readable_files(config: EnvConfig, data: Iterable[str], imported: Iterable[str] = ()) -> ReadableFiles:
    """data: the run and its data, which are only read where `read` names them. imported: names of modules that the
    environment has imported.
    """
    hidden = tuple(os.path.realpath(path) for path in data)
    named = {path.partition(".")[0] for path in (config.path, config.functions)} - {"grmpipe"}
    folders = [path for path in list_import_paths() if os.access(path, os.F_OK)]
    homes: list[str] = []  # the environment's own code, which is the user's also where it is installed
    for name in named:
        files, packages = locate(name)
        homes += packages or [str(Path(file).parent) for file in files[:1] if Path(file).parent.name not in SITES]
    sites = [path for path in folders if is_library(path) and path not in homes]
    entries = [str(Path(path, name)) for path in folders if path not in sites for name in list_installed(path)]
    own = [path for path in folders if path not in sites and is_folder(path)]
    keys = [entry for path in sites for entry in list_entries(path) if Path(entry).name.startswith(".")]
    without = (*hidden, *sorted({*map(os.path.realpath, (*own, *homes, *keys))}))

    system = [entry for entry in (*list_entries("/usr"), *list_entries("/usr/local")) if not entry.endswith(NO_SYSTEM)]
    python = [f"{prefix}/{name}" for prefix in (sys.prefix, sys.base_prefix) for name in PYTHON_FILES]
    program = os.path.realpath(sys.executable)
    archives = [path for path in folders if not is_folder(path)]
    ours = [folder.rstrip("/") for folder in list_our_folders()]
    parts: list[ReadablePart] = []
    for path in (*SYSTEM_FILES, *system, *python, program, *sites, *archives, *entries, *ours):
        if os.path.lexists(path) and not any(one.path == one.real and one.holds(path) for one in parts):
            parts.append(ReadablePart.at(path, without))
    parts += [ReadablePart.at(path, hidden) for path in config.isolation.read]
    files, packages = find_modules([*named, *list_names(config), *imported], parts, hidden)
    holding = {str(Path(path).parent) for path in (*files, *packages, *entries, *ours)}
    listed = (*sites, *(path for path in own if path in holding), *packages)
    return ReadableFiles(parts=(*parts, *map(ReadablePart.at, files)), listed=listed)


def list_names(config: EnvConfig) -> Iterator[str]:
    """Names of modules that other settings of the environment may hold: the arguments of its class, its exceptions."""
    for value in (*config.options.values(), *config.policy_errors):
        if isinstance(value, str):
            yield value.partition(".")[0]


def list_imported() -> list[str]:
    """Names of the user's modules and packages that this process has imported."""
    modules = [(name, found) for name, found in sys.modules.items() if isinstance(found, ModuleType)]
    files = [(name.partition(".")[0], vars(module).get("__file__")) for name, module in modules]
    return sorted({name for name, file in files if file is not None and not is_library(file)})


def find_modules(
    names: Iterable[str], parts: Sequence[ReadablePart], hidden: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Files of the modules and packages with these names, and of those that they import, that no part holds; and the
    folders of the packages. All modules of a package are among them: which of them are imported may be decided late.
    """
    files: list[str] = []
    packages: list[str] = []
    todo, seen = list(names), {"__main__", "grmpipe", *sys.stdlib_module_names}
    while todo:
        if (name := todo.pop()) in seen:
            continue
        seen.add(name)
        found, folders = locate(name)
        found = [path for path in found if not any(part.holds(os.path.realpath(path)) for part in parts)]
        files += found
        for folder in folders:
            if any(part.holds(os.path.realpath(folder)) for part in parts):
                continue
            packages.append(folder)
            inside = list_modules(folder, hidden, {os.path.realpath(folder)})
            files += inside if len(inside) < MANY else fold_folders(folder, {*inside})
            found += inside
        todo += [imported for file in found if file.endswith(".py") for imported in read_imports(file)]
    return files, packages


def locate(name: str) -> tuple[list[str], list[str]]:
    """The files of a module, or the folders of a package, without importing it. Nothing for what isn't there."""
    spec: ModuleSpec | None = None
    with suppress(ImportError, ValueError, AttributeError):  # of a module that was made by hand
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None:
        return [], []
    if spec.submodule_search_locations is not None:
        return [], list(dict.fromkeys(str(Path(folder).absolute()) for folder in spec.submodule_search_locations))
    files = [spec.origin, spec.cached] if spec.has_location else []
    return [file for file in files if file is not None and os.access(file, os.F_OK)], []


def list_modules(folder: str, hidden: Sequence[str], seen: set[str]) -> list[str]:
    """Files of modules in a folder, and in all below that may be packages. seen: real paths of folders to leave out."""
    found: list[str] = []
    for entry in list_entries(folder):
        if not is_folder(entry):
            found += [entry] if IS_MODULE.search(entry) else []
        elif Path(entry).name.isidentifier() and (real := os.path.realpath(entry)) not in {*hidden, *seen}:
            seen.add(real)
            found += list_modules(entry, hidden, seen)
    return found


def fold_folders(folder: str, files: set[str]) -> list[str]:
    """The files, with a folder in the place of all that are in it where it holds nothing else."""
    entries, found, is_whole = list_entries(folder), [], True
    for entry in entries:
        below = is_folder(entry) and not Path(entry).is_symlink()
        inside = fold_folders(entry, files) if below else [entry] if entry in files else []
        is_whole &= inside == [entry]
        found += inside
    return [folder] if is_whole and entries else found


def read_imports(file: str) -> Iterator[str]:
    """Names of the modules and packages that a module's text imports, and perhaps of some that it doesn't."""
    text = b""
    with suppress(OSError):
        text = Path(file).read_bytes()
    for origin, several, literal in IMPORTS.findall(text):
        for one in (origin, literal, *several.split(b",")):
            if found := re.match(rb"\s*(\w+)", one):
                yield found[1].decode("utf-8", "replace")


def is_below(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")


def is_folder(path: str) -> bool:
    with suppress(OSError):  # no way to it
        return stat.S_ISDIR(Path(path).stat().st_mode)
    return False


def list_entries(folder: str) -> list[str]:
    """Paths of all that is in a folder; nothing for one that can't be read."""
    with suppress(OSError):
        return sorted(entry.path for entry in os.scandir(folder))
    return []
