"""Landlock: a process gives up access to files, for itself and all that it starts.

https://docs.kernel.org/userspace-api/landlock.html
"""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from grmpipe.envs.sandbox.kernel import syscall

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


def restrict(read: Iterable[str], write: Iterable[str], *, listed: Iterable[str] = (), tcp: bool = True) -> None:
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
