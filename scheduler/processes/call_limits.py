"""Time limits of calls to other processes: every call has one, by what it does."""

from dataclasses import dataclass

# Short calls, and waits that are repeated all the time.
CONTROL = frozenset(
    {"deliver", "collect", "pause", "resume", "node_address", "free_port", "open_rpc", "open_network_rpc"}
)
# Calls that read or write whole models, or wait for a process to start.
LOAD = frozenset({"process_id", "start", "make", "load", "save", "begin_save", "export"})
# Whole pushes of weights, of any size: a push has its own deadline, which grows with its bytes.
PUSH = frozenset({"receive_weights", "sender.broadcast"})
WORK_FACTOR, LOAD_FACTOR, PUSH_FACTOR = 6, 12, 48  # times the limit of control calls; work queues behind other work
MEMBER_CALL = "ask"  # wraps a method of the member


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """call_timeout_s: limit of a control call, `cluster.call_timeout_s`; other calls have a multiple of it."""

    call_timeout_s: float

    def of(self, method: str, args: tuple[object, ...]) -> float:
        """The limit in seconds. An unknown method counts as work."""
        name = str(args[0]) if method == MEMBER_CALL and args else method
        if name in CONTROL:
            return self.call_timeout_s
        factor = LOAD_FACTOR if name in LOAD else PUSH_FACTOR if name in PUSH else WORK_FACTOR
        return self.call_timeout_s * factor

    def words(self, method: str, args: tuple[object, ...]) -> str:
        """Why a call timed out, for a process's report."""
        name = str(args[0]) if method == MEMBER_CALL and args else method
        return (
            f"its process did not answer {name!r} within {self.of(method, args):g} s "
            f"(cluster.call_timeout_s={self.call_timeout_s:g}): it hangs, or the limit is too short"
        )
