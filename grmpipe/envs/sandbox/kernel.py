"""Calls to the Linux kernel that Python's library lacks. Each raises OSError."""

import ctypes
import fcntl
import os
import socket
import struct

libc = ctypes.CDLL(None, use_errno=True)

# linux/prctl.h
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_KEEPCAPS, _SET_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 4, 8, 36, 38
_CAP_AMBIENT, _AMBIENT_RAISE = 47, 2
_CAPBSET_DROP = 24
# linux/sched.h
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NET = 0x20000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
# linux/capability.h: version 3 of the call, and the right to read files and search folders of others
_CAPABILITIES, CAP_DAC_READ_SEARCH = 0x20080522, 2
# linux/mount.h
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = 442, -100, 0x8000, 1
# linux/sockios.h, net/if.h
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1


def check_result(result: int) -> int:
    """The result of a call, or its error."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def syscall(number: int, *arguments: object) -> int:
    return check_result(libc.syscall(ctypes.c_long(number), *arguments))


def set_parent_death_signal(signal: int) -> None:
    """The signal that this process gets when the thread that forked it ends. A change of credentials clears it."""
    check_result(libc.prctl(_SET_PDEATHSIG, signal, 0, 0, 0))


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent has ended."""
    check_result(libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0))


def set_no_new_privileges() -> None:
    """No program that is started from here gains rights by a set-uid bit."""
    check_result(libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def own_proc_files() -> None:
    """Own /proc/self again, which belongs to root after a change of credentials."""
    check_result(libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0))


def hide_from_others() -> None:
    """Other processes of this user reach neither memory nor descriptors of this one. A program that it starts is open
    again.
    """
    check_result(libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0))


def unshare(flags: int) -> None:
    check_result(libc.unshare(flags))


def mount(source: str, folder: str, kind: str, flags: int, options: str = "") -> None:
    check_result(libc.mount(source.encode(), folder.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()))


def bind(source: str, target: str) -> None:
    """`target` becomes `source`, in this mount namespace."""
    check_result(libc.mount(source.encode(), target.encode(), None, ctypes.c_ulong(_BIND), None))


def make_mounts_private() -> None:
    """Changes of mounts stay in this mount namespace."""
    check_result(libc.mount(None, b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None))


def make_mounts_read_only() -> None:
    """Every mounted file system of this mount namespace becomes read-only."""
    make_mounts_private()
    attributes = struct.pack("QQQQ", _ATTR_RDONLY, 0, 0, 0)
    syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes)))


def bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))


def become(user: int) -> None:
    """Change the user and its group, with no other groups. Capabilities survive until `keep_capabilities`."""
    check_result(libc.prctl(_SET_KEEPCAPS, 1, 0, 0, 0))
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def forbid_capabilities(*kept: int) -> None:
    """No program that is started from here gains another capability by its file. Needs the right to say so."""
    for capability in range(64):
        if capability not in kept and libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            if not capability:
                check_result(-1)
            return  # beyond the last one that this kernel knows


def keep_capabilities(*kept: int) -> None:
    """Lose all capabilities but these, which programs started from here have too."""
    mask = sum(1 << capability for capability in kept)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    check_result(libc.capset(struct.pack("II", _CAPABILITIES, 0), struct.pack("6I", low, low, low, high, high, high)))
    for capability in kept:
        check_result(libc.prctl(_CAP_AMBIENT, _AMBIENT_RAISE, capability, 0, 0))
