"""How long a call to another process may take: every one has a limit, by what it does. Calls nothing itself."""

from __future__ import annotations

from dataclasses import dataclass

# Words between two processes, and waits that are asked for anew all the time.
CONTROL = frozenset({"deliver", "collect", "pressure", "pause", "resume", "node_address", "free_port", "open_rpc"})
# What reads or writes whole models, or waits for a process to come up.
LOAD = frozenset({"process_id", "start", "make", "load", "save", "begin_save", "export"})
WORK_FACTOR, LOAD_FACTOR = 6, 12  # of the limit of control calls; work queues behind other work
MEMBER_CALL = "ask"  # carries a method of the member's own


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """call_timeout_s: of a call that does no work, `cluster.call_timeout_s`; the others have a multiple of it."""

    call_timeout_s: float

    def of(self, method: str, args: tuple[object, ...]) -> float:
        """In seconds. Whatever isn't known is work."""
        name = str(args[0]) if method == MEMBER_CALL and args else method
        if name in CONTROL:
            return self.call_timeout_s
        return self.call_timeout_s * (LOAD_FACTOR if name in LOAD else WORK_FACTOR)

    def words(self, method: str, args: tuple[object, ...]) -> str:
        """Why a call was given up, for a report of the process."""
        name = str(args[0]) if method == MEMBER_CALL and args else method
        return (
            f"its process did not answer {name!r} within {self.of(method, args):g} s "
            f"(cluster.call_timeout_s={self.call_timeout_s:g}): it hangs, or the limit is too short"
        )
