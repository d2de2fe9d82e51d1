"""The folders that Python imports from, and whose code a file is: ours, a library's or the user's.

`models` and `scheduler` are common names, so ours are imported as grmpipe.models and grmpipe.scheduler, by links in a
checkout. The checkout itself comes last on the path: `import models` means the user's.
"""

import csv
import functools
import importlib
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]  # by the name grmpipe/models/import_path.py
IS_CHECKOUT = (ROOT / "grmpipe" / "models").is_symlink()
STDLIB = tuple(dict.fromkeys(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")))
SITES = frozenset(("site-packages", "dist-packages"))  # folders that installers write to, of this Python or of another


def put_working_folder_last(*more: Path) -> None:
    """Move the working folder, and that of the running script, behind all others, and a checkout of ours behind them.

    more: folders of the user's to add behind them, where the path lacks them.
    """
    last = {"", str(Path.cwd()), str(Path(sys.argv[0] if sys.argv else "").absolute().parent)}
    first = [path for path in sys.path if path not in last]
    moved = [path for path in (*sys.path, *map(str, more)) if path in last or path not in sys.path]
    if IS_CHECKOUT:
        sys.path[:] = [path for path in dict.fromkeys([*first, *moved]) if path != str(ROOT)] + [str(ROOT)]
    else:  # beside libraries
        sys.path[:] = dict.fromkeys([*first, str(ROOT), *moved])


def list_import_paths() -> list[str]:
    """Folders and archives that this process imports from; the current folder by its name."""
    return [str(Path(path).absolute()) for path in sys.path]


@functools.cache
def list_our_folders() -> tuple[str, ...]:
    """The folders of our package, and those that links in it lead to; with a slash at their ends."""
    linked = (ROOT / "models", ROOT / "scheduler") if IS_CHECKOUT else ()
    return tuple(f"{folder}/" for folder in (ROOT / "grmpipe", *linked))


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
            "PYTHONPATH"
        ) from error


def worker_setup() -> Callable[[], None]:
    """What another process does before it imports anything by name: it finds our package as Ray sent it, else where
    this process has it, and the user's modules behind it. A function within a function is sent by its value.
    """
    root, last = str(ROOT), [str(ROOT)] if IS_CHECKOUT else []
    paths = [path for path in list_import_paths() if path not in last]

    def find_package() -> None:
        import importlib
        import sys

        before = list(sys.path)
        sys.path[:0] = [*(path for path in before if "/py_modules_files/" in path), root]
        importlib.import_module("grmpipe")  # from now on it is ours
        sys.path[:] = [*before, *(path for path in paths if path not in before)]
        importlib.import_module("grmpipe.models.import_path").put_working_folder_last()
        sys.path += [path for path in last if path not in sys.path]

    return find_package
