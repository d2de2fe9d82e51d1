"""The fork server in bubblewrap, where that works: a root of its own, in which nothing is but what workers may read.

https://github.com/containers/bubblewrap
"""

import functools
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence

from grmpipe.envs.sandbox.confinement import NETWORK_FILES
from grmpipe.envs.sandbox.readable_files import ReadablePart, is_folder

COMMAND = "bwrap"
TRIED_S = 10.0


@functools.cache
def bubblewrap_missing() -> str | None:
    """Why environments can't be started in bubblewrap here. None: they can."""
    if shutil.which(COMMAND) is None:
        return "bubblewrap is not installed; type `apt-get install bubblewrap`, or your system's command"
    try:
        tried = subprocess.run(
            [*make_command(map(ReadablePart.at, ("/usr", "/bin", "/lib", "/lib64")), (), network=False), "true"],
            capture_output=True,
            text=True,
            timeout=TRIED_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not start here: {error}"
    said = tried.stderr.strip()
    return (
        None if tried.returncode == 0 else f"bubblewrap does not work here: {said or f'exit code {tried.returncode}'}"
    )


def make_command(read: Iterable[ReadablePart], write: Sequence[str], *, network: bool) -> list[str]:
    """The beginning of a command line that starts a program in bubblewrap: it sees these files and folders only, and
    ends with the thread that started it. Paths that this user doesn't see are left out.
    """
    emptied = []
    arguments = [
        COMMAND, *users(), "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
        "--die-with-parent", "--new-session", "--tmpfs", "/tmp",
    ]  # fmt: skip
    if not network:
        arguments.append("--unshare-net")
    for part in (*read, *map(ReadablePart.at, NETWORK_FILES if network else ())):
        if not os.access(part.path, os.F_OK):  # bubblewrap fails at a path that this user has no way to
            continue
        arguments += ["--ro-bind-try", part.real, part.path]  # it misreads absolute symbolic links
        for masked in part.masked:
            if is_folder(masked):
                arguments += ["--tmpfs", masked]
                emptied.append(masked)
            elif os.access(masked, os.F_OK):
                arguments += ["--ro-bind", os.devnull, masked]
    for path in write:
        arguments += ["--bind", path, path]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    for path in ("/", *emptied):  # in which the paths above had to be made
        arguments += ["--remount-ro", path]
    return arguments


def users() -> tuple[str, ...]:
    """Root stays what it is, so that the fork server can give each worker a user of its own. Others get a user
    namespace, which needs no rights, and in which they have none.
    """
    return ("--cap-add", "ALL") if os.geteuid() == 0 else ("--unshare-user", "--cap-drop", "ALL")
