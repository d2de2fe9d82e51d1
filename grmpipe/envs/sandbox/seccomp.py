"""A filter of system calls: no socket that leads to other processes of the machine, no memory that no limit counts.

https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

import ctypes
import errno
import platform
import socket
import struct
from collections.abc import Iterator

from grmpipe.envs.sandbox.kernel import check_result, libc

_SET_SECCOMP, _FILTER = 22, 2
# linux/bpf_common.h, linux/seccomp.h, linux/audit.h
_LOAD, _EQUAL, _AT_LEAST, _RETURN, _AND = 0x20, 0x15, 0x35, 0x06, 0x54
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _FOURTH_ARGUMENT = 0, 4, 16, 40  # offsets in what a filter reads
# linux/mman.h, two bits: pages stay while one of them is mapped, so that no address space counts them.
_SHARED_ANONYMOUS = 0x21
_OTHER_NUMBERS = 0x40000000  # x32's, a second set of calls on x86_64
# Sockets of paths and of virtual machines know no network namespace. Pairs of connected sockets stay allowed.
FAMILIES = (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
# name -> (number on x86_64, on aarch64, the error). ENOSYS where programs have another way.
REFUSED = {
    "pidfd_getfd": (438, 438, errno.EPERM),  # descriptors of other processes
    "process_vm_readv": (310, 270, errno.EPERM),  # memory of other processes
    "process_vm_writev": (311, 271, errno.EPERM),
    "memfd_create": (319, 279, errno.ENOSYS),  # memory that is in no process's address space
    "memfd_secret": (447, 447, errno.ENOSYS),
    "shmget": (29, 194, errno.ENOSYS),
    "msgget": (68, 186, errno.ENOSYS),
    "semget": (64, 190, errno.ENOSYS),
    "vmsplice": (278, 75, errno.ENOSYS),  # a pipe holds pages that are unmapped
    "io_uring_setup": (425, 425, errno.ENOSYS),  # its requests pass no filter
    "add_key": (248, 217, errno.EPERM),  # keys of the run's user
    "request_key": (249, 218, errno.EPERM),
    "keyctl": (250, 219, errno.EPERM),
    "bpf": (321, 280, errno.EPERM),  # large parts of the kernel that no program of an episode needs
    "perf_event_open": (298, 241, errno.EPERM),
    "userfaultfd": (323, 282, errno.EPERM),
}
# column, architecture, socket(2), mmap(2)
MACHINES = {"x86_64": (0, 0xC000003E, 41, 9), "aarch64": (1, 0xC00000B7, 198, 222)}


def restrict() -> None:
    """Refuse these calls to this process and all that it starts, after `set_no_new_privileges`. Raises OSError."""
    if platform.machine() not in MACHINES:
        raise OSError(errno.ENOSYS, f"no filter is known for {platform.machine()}")
    program = b"".join(instructions(*MACHINES[platform.machine()]))
    code = ctypes.create_string_buffer(program, len(program))
    pointer = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    check_result(libc.prctl(_SET_SECCOMP, _FILTER, pointer, 0, 0))


def instructions(column: int, architecture: int, socket_call: int, mmap_call: int) -> Iterator[bytes]:
    """The program: one comparison after the other, each followed by what it returns."""
    yield instruction(_LOAD, _ARCHITECTURE)
    yield instruction(_EQUAL, architecture, if_so=1)
    yield refuse(errno.ENOSYS)
    yield instruction(_LOAD, _NUMBER)
    yield instruction(_AT_LEAST, _OTHER_NUMBERS, if_not=1)
    yield refuse(errno.ENOSYS)
    for numbers in REFUSED.values():
        yield instruction(_EQUAL, numbers[column], if_not=1)
        yield refuse(numbers[2])
    yield instruction(_EQUAL, mmap_call, if_not=5)
    yield instruction(_LOAD, _FOURTH_ARGUMENT)
    yield instruction(_AND, _SHARED_ANONYMOUS)
    yield instruction(_EQUAL, _SHARED_ANONYMOUS, if_not=1)
    yield refuse(errno.EPERM)
    yield instruction(_RETURN, _ALLOW)
    yield instruction(_EQUAL, socket_call, if_so=1)
    yield instruction(_RETURN, _ALLOW)
    yield instruction(_LOAD, _FIRST_ARGUMENT)
    for family in FAMILIES:
        yield instruction(_EQUAL, family, if_not=1)
        yield instruction(_RETURN, _ALLOW)
    yield refuse(errno.EAFNOSUPPORT)


def instruction(code: int, value: int, *, if_so: int = 0, if_not: int = 0) -> bytes:
    """One instruction; a comparison skips that many after it."""
    return struct.pack("HBBI", code, if_so, if_not, value)


def refuse(code: int) -> bytes:
    return instruction(_RETURN, _ERRNO | code)
