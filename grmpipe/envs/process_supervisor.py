"""Runs a program in a process group that ends with the process that started it. A script of the standard library
alone, started by its path: it must be there in milliseconds.

    python process_supervisor.py <pid of the starting process> <program> <arguments ..>
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_group(*_: object) -> None:
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    starter, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, end_group)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != starter:  # it died before the signal was asked for
        end_group()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]} can't be started: {error}\n".encode())
            os._exit(127)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
