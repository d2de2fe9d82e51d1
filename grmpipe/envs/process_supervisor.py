"""Runs a program in a process group, and ends with it all that it started: at the latest when the process that started
it ends. A script of the standard library alone, started by its path: it must be there in milliseconds.

    python process_supervisor.py <pid of the starting process> <program> <arguments ..>

SIGTERM ends everything. What left the group, such as a daemon, comes to this process when its parent has ended.
"""

import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILLING_S = 1.0  # until all descendants have ended
AGAIN_S = 0.001
STAT_BYTES = 1024


def end_group(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the kernel sends it for each thread of the starter
    end_descendants()
    os.killpg(0, signal.SIGKILL)


def end_descendants() -> None:
    """Kill one generation after the other. Imports nothing: it may interrupt itself anywhere."""
    end_s = time.monotonic() + KILLING_S
    while time.monotonic() < end_s:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        kill_children()
        time.sleep(AGAIN_S)


def kill_children() -> None:
    with os.scandir("/proc") as entries:
        for process in [int(entry.name) for entry in entries if entry.name.isdigit()]:
            if find_parent(process) == os.getpid():
                os.kill(process, signal.SIGKILL)


def find_parent(process: int) -> int:
    """0: it has ended, or is another user's."""
    try:
        stat = os.open(f"/proc/{process}/stat", os.O_RDONLY)
        try:
            return int(os.read(stat, STAT_BYTES).rpartition(b")")[2].split()[1])
        finally:
            os.close(stat)
    except OSError:
        return 0


def wait_for(child: int) -> int:
    """Until it ends. Returns its exit code, as a shell has it."""
    while True:
        process, status = os.wait()
        if process == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def main() -> int:
    starter, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, end_group)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
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
    code = wait_for(child)
    end_descendants()
    return code


if __name__ == "__main__":
    sys.exit(main())
