"""The folders that Python imports from. `models` and `scheduler` are common names: a working folder comes last, so that
folders of a user's with these names hide none of ours.
"""

import csv
import functools
import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
COMMON_NAMES = ("models", "scheduler")
PACKAGES = (*COMMON_NAMES, "grmpipe")
STDLIB = tuple(dict.fromkeys(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")))
SITES = frozenset(("site-packages", "dist-packages"))  # folders that installers write to, of this Python or of another


def put_working_folder_last(*more: Path) -> None:
    """Move the working folder, and that of the running script, behind all others; ours is among these.

    more: folders of the user's to add behind them, where the path lacks them.
    """
    last = {"", str(Path.cwd()), str(Path(sys.argv[0] if sys.argv else "").absolute().parent)}
    first = [path for path in sys.path if path not in last]
    moved = [path for path in (*sys.path, *map(str, more)) if path in last or path not in sys.path]
    sys.path[:] = dict.fromkeys([*first, str(ROOT), *moved])


def list_import_paths() -> list[str]:
    """Folders and archives that this process imports from; the current folder by its name."""
    return [str(Path(path).absolute()) for path in sys.path]


@functools.cache
def list_our_folders() -> tuple[str, ...]:
    """The folders of our packages, which Ray sends to a machine one by one; with a slash at their ends."""
    specs = (importlib.util.find_spec(name) for name in PACKAGES)
    return tuple(f"{folder}/" for spec in specs if spec is not None for folder in spec.submodule_search_locations or ())


def is_library(file: str) -> bool:
    """Whether a file or folder is Python's own, or was installed: also by `pip install --target`, beside modules of the
    user's. An editable installation is where its source is, and the user's.
    """
    if f"{file}/".startswith(STDLIB) or not SITES.isdisjoint(Path(file).parts):
        return True
    return any(
        file[len(folder) + 1 :].partition("/")[0] in list_installed(folder)
        for folder in list_import_paths()
        if file.startswith(f"{folder}/")
    )


@functools.cache
def list_installed(folder: str) -> frozenset[str]:
    """Names of the files and folders in a folder that installers wrote, by the records that they left beside them."""
    found = set()
    for information in Path(folder).glob("*.dist-info"):
        found.add(information.name)
        with suppress(OSError), (information / "RECORD").open(encoding="utf-8", newline="") as record:
            found.update(row[0].partition("/")[0] for row in csv.reader(record) if row)
    return frozenset(found - {"", ".."})


def import_module(module: str, key: str) -> ModuleType:
    """A module of the user's, by its dotted path. Raises ValueError that begins with the key."""
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise ValueError(
            f"{key}: {module} can't be imported ({type(error).__name__}: {error}); install it, or put its folder on "
            f"PYTHONPATH{explain_hidden_package(error.name or '' if isinstance(error, ImportError) else '')}"
        ) from error


def explain_hidden_package(module: str) -> str:
    """What to say of a module that isn't found because its package has a name of ours; empty for others."""
    name = module.partition(".")[0]
    folders = [Path(path or ".").absolute() for path in sys.path if name in COMMON_NAMES]
    found = [path for folder in folders if folder != ROOT for path in (folder / name, folder / f"{name}.py")]
    theirs = next((path for path in found if path.exists()), None)
    return f"; {name} is a package of grmpipe ({ROOT / name}), which hides {theirs}: rename that" if theirs else ""


def worker_setup() -> Callable[[], None]:
    """What another process does before it imports anything by name: it finds our packages as Ray sent them, else where
    this process has them, and the user's modules behind them. A function within a function is sent by its value.
    """
    root, names, paths = str(ROOT), PACKAGES, [str(Path(path or ".").absolute()) for path in sys.path]

    def find_packages() -> None:
        import importlib
        import sys

        before = list(sys.path)
        sys.path[:0] = [*(path for path in before if "/py_modules_files/" in path), root]
        for name in names:  # from now on they are ours
            importlib.import_module(name)
        sys.path[:] = [*before, *(path for path in paths if path not in before)]
        importlib.import_module("models.import_path").put_working_folder_last()

    return find_packages
