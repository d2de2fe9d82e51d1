"""How often a dead member of a role may still be replaced."""

import asyncio

WINDOW_S = 3600.0  # in which tries are counted


class ReplacementTries:
    """Tries by member, at most `most` within the last WINDOW_S seconds of the event loop's clock."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._times_s: dict[str, list[float]] = {}

    def may_try(self, name: str) -> bool:
        """Whether there is a try left for this member; uses it up."""
        now_s = asyncio.get_running_loop().time()
        times_s = self._times_s[name] = [at_s for at_s in self._times_s.get(name, []) if now_s - at_s < WINDOW_S]
        if len(times_s) >= self._most:
            return False
        times_s.append(now_s)
        return True

    def num_made(self, name: str) -> int:
        """The tries of this member that still count."""
        return len(self._times_s.get(name, ()))

    def give_back(self, name: str) -> None:
        """Undo the last try of this member, if it had any."""
        if times_s := self._times_s.get(name):
            times_s.pop()
