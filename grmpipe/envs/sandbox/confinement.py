"""What a worker's process may do: namespaces, limits, Landlock.

A worker is two processes. The supervisor enters the namespaces (`enter_namespaces`) and stays outside of the bounds;
its child, in which the environment lives, is the first process in them, and gives up all else (`confine`).

Processes are counted by RLIMIT_NPROC in the worker's own user namespace, by a user id that is not root's: root has no
such limit. So where the run is root's, the worker becomes another user, who may still read what belongs to root and
Landlock allows. Without user namespaces and without root nothing counts them, and the report says so.
"""

import contextlib
import ctypes
import os
import resource
import signal
import stat
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grmpipe.envs.sandbox import kernel, seccomp
from grmpipe.envs.sandbox.kernel import syscall

MEGABYTE = 2**20
FIRST_USER = 0x70000000  # the users that workers become where the run is root's; plus the supervisor's process id
INSIDE_USER = 1000  # what such a user is called in its namespace
# Not all of /etc/ssl: the keys of root's servers are there.
NETWORK_FILES = (
    "/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl/certs", "/etc/ssl/openssl.cnf",
    "/run/systemd/resolve",
)  # fmt: skip
DEVICES = ("/dev/null", "/dev/urandom", "/dev/random")
ZERO, FULL = "/dev/zero", "/dev/full"
MOST_FILES = 256  # open ones of a process: Python needs 16, and each costs the kernel memory that `memory_mb` misses


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a worker may do at most. The units are those of `IsolationConfig`.

    folder: the worker's own, the only one in which it may write.
    memory_mb: most of each process's address space, and of what all processes hold together.
    read: files and folders. listed: folders of which the names of files may be read, though not the files.
    mapped_bytes: address space that the environment's code takes before the episode; `memory_mb` is beyond it.
    without: steps to leave out, so that tests see what remains on a kernel that lacks them.
    """

    folder: str
    memory_mb: int
    cpu_s: int
    max_processes: int
    file_mb: int
    network: bool = False
    read: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    mapped_bytes: int = 0
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A part of the isolation that is not had, and why."""

    part: str
    reason: str


@dataclass(slots=True)
class IsolationSteps:
    """The steps of the isolation, as they are taken one after the other."""

    without: Sequence[str] = ()
    missing: list[Missing] = field(default_factory=list)

    def take(self, part: str, act: Callable[[], object]) -> bool:
        """Whether the kernel granted a part."""
        try:
            if part in self.without:
                raise OSError(0, "left out")
            act()
        except OSError as error:
            self.missing.append(Missing(part=part, reason=error.strerror or str(error)))
            return False
        return True


@dataclass(slots=True)
class Namespaces:
    """What the supervisor had.

    zeros: /dev/zero can only be read.
    user:  the user that the worker becomes, by its name in the namespace; None: as before."""

    steps: IsolationSteps
    users: bool = False
    processes: bool = False
    network: bool = False
    zeros: bool = False
    user: int | None = None


def enter_namespaces(bounds: Bounds, map_ids: Callable[[int], None]) -> Namespaces:
    """Leave the namespaces of the run. `map_ids` maps a user id of the worker into its namespace, from outside."""
    had = Namespaces(steps=IsolationSteps(without=bounds.without))
    take = had.steps.take
    user, group = os.geteuid(), os.getegid()
    is_root = user == 0
    outside = FIRST_USER + os.getpid()
    had.users = take("user namespace", lambda: kernel.unshare(kernel.NEW_USER)) and take(
        "map of users", (lambda: map_ids(outside)) if is_root else (lambda: map_own_ids(user, group))
    )
    if is_root:
        had.user = INSIDE_USER if had.users else outside
    had.processes = take("process namespace", lambda: kernel.unshare(kernel.NEW_PIDS))
    take("IPC namespace", lambda: kernel.unshare(kernel.NEW_IPC))
    if not bounds.network:
        had.network = take("network namespace", lambda: kernel.unshare(kernel.NEW_NET))
        if had.network:
            with contextlib.suppress(OSError):  # a worker without its loopback has no network at all
                kernel.bring_loopback_up()
    if take("mount namespace", lambda: kernel.unshare(kernel.NEW_MOUNTS)):
        had.zeros = take("zeros that take no memory", replace_zero)
        take("read-only mounts", kernel.make_mounts_read_only)
    mounted = not any(each.part == "mount namespace" for each in had.steps.missing)
    if (
        not (mounted and take("folder of bounded size", lambda: mount_folder(bounds, had.user)))
        and had.user is not None
    ):
        os.chown(bounds.folder, had.user, had.user)
    return had


def replace_zero() -> None:
    """A mapping of /dev/zero that is shared holds memory that no limit counts; /dev/full reads alike, and has none."""
    kernel.make_mounts_private()
    kernel.bind(FULL, ZERO)


def mount_folder(bounds: Bounds, user: int | None) -> None:
    owner = "" if user is None else f",uid={user},gid={user}"
    options = f"size={bounds.file_mb}m,nr_inodes={16 * 1024},mode=700{owner}"
    kernel.mount("grmpipe", bounds.folder, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, options)


def map_own_ids(user: int, group: int) -> None:
    """Map this process's own user and group, as they were outside, to themselves, which needs no rights."""
    kernel.own_proc_files()
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")


def map_ids(process: int, outside: int) -> None:
    """Root maps one user of another process's namespace, and itself, so that what belongs to root can be read there.

    Raises OSError.
    """
    for name in ("gid_map", "uid_map"):
        Path(f"/proc/{process}/{name}").write_text(f"0 0 1\n{INSIDE_USER} {outside} 1\n", encoding="ascii")


def confine(bounds: Bounds, had: Namespaces) -> tuple[Missing, ...]:
    """Give up all that a worker may not do. Returns what couldn't be given up. Not to be undone."""
    take, user = had.steps.take, had.user
    os.setsid()
    own_proc = had.processes and take("own /proc", mount_proc)
    kept = (kernel.CAP_DAC_READ_SEARCH,) if had.users and user is not None else ()
    if had.users or user is not None:
        take("no new capabilities", lambda: kernel.forbid_capabilities(*kept))
    if user is not None:
        take("user of its own", lambda: kernel.become(user))
    take("no capabilities", lambda: kernel.keep_capabilities(*kept))
    is_counted = os.getuid() != 0 and (had.users or user is not None)
    set_limits(bounds, is_counted=is_counted, shares_user=user is None)
    if not is_counted:
        had.steps.missing.append(Missing(part="process count", reason="it needs a user namespace, or root"))
    take("no new privileges", kernel.set_no_new_privileges)
    take("Landlock", lambda: restrict_files(bounds, had, own_proc))
    take("filter of system calls", seccomp.restrict)
    take("memory and descriptors of its own", kernel.hide_from_others)
    kernel.set_parent_death_signal(signal.SIGKILL)
    return tuple(had.steps.missing)


def mount_proc() -> None:
    kernel.mount("proc", "/proc", "proc", kernel.READ_ONLY | kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC)


def restrict_files(bounds: Bounds, had: Namespaces, own_proc: bool) -> None:
    read = (*bounds.read, *(("/proc",) if own_proc else ()), *(NETWORK_FILES if bounds.network else ()))
    write = (bounds.folder, *DEVICES, *((ZERO,) if had.zeros else ()))
    restrict_by_landlock(read, write, listed=bounds.listed, tcp=bounds.network or had.network)


def set_limits(bounds: Bounds, *, is_counted: bool, shares_user: bool) -> None:
    """Limits of each process, and on the number of all of them: the supervisor counts too, if it has the same user."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: bounds.cpu_s,
        resource.RLIMIT_FSIZE: bounds.file_mb * MEGABYTE,
        resource.RLIMIT_NOFILE: MOST_FILES,
        resource.RLIMIT_AS: bounds.memory_mb * MEGABYTE + bounds.mapped_bytes,
    }
    if is_counted:
        limits[resource.RLIMIT_NPROC] = bounds.max_processes + shares_user
    for limit, value in limits.items():
        _, most = resource.getrlimit(limit)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))


def measure_address_space() -> int:
    """Address space that this process takes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


# -- Landlock: a process gives up access to files, for itself and all that it starts -----------------------------------
# https://docs.kernel.org/userspace-api/landlock.html

_CREATE, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER, _REFER, _TRUNCATE, _IOCTL = 1, 2, 4, 8, 1 << 13, 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_FOLDER
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_TCP = 0b11  # bind, connect
_SCOPES = 0b11  # abstract Unix sockets, signals


def abi() -> int:
    """The version of Landlock in this kernel. Raises OSError without it."""
    return syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION)


def _all_access(version: int) -> int:
    access = (1 << 13) - 1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL)):
        access |= right if version >= since else 0
    return access


def restrict_by_landlock(
    read: Iterable[str], write: Iterable[str], *, listed: Iterable[str] = (), tcp: bool = True
) -> None:
    """Allow no more than to read and execute what is in `read`, and everything in `write`. Missing paths are left out.

    listed: folders in which, and in all below which, the names of files may be read.
    tcp: whether TCP stays as it is; False needs version 4. Needs `set_no_new_privileges` before. Raises OSError.
    """
    version = abi()
    access = _all_access(version)
    sizes = 8 if version < 4 else 16 if version < 6 else 24
    wanted = struct.pack("QQQ", access, 0 if tcp or version < 4 else _TCP, _SCOPES)[:sizes]
    ruleset = syscall(_CREATE, wanted, ctypes.c_size_t(sizes), 0)
    try:
        for path in read:
            _allow(ruleset, path, _READ)
        for path in listed:
            _allow(ruleset, path, _READ_FOLDER)
        for path in write:
            _allow(ruleset, path, access)
        syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # it is missing, or out of reach anyway
        return
    try:
        is_folder = stat.S_ISDIR(os.fstat(opened).st_mode)
        allowed = struct.pack("=Qi", access if is_folder else access & _OF_A_FILE, opened)
        syscall(_ADD_RULE, ruleset, _PATH_BENEATH, allowed, 0)
    finally:
        os.close(opened)
