"""New versions of what judges: asked for by a client, made once nothing is being judged."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from grmpipe.observe.journal import Journal, read_what_can_be
from grmpipe.serve.admission import Refused

CHANGES = "judge_versions.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeChange:
    """The model of a judge is to be read from another path. made: its version, or why it has none."""

    judge: str
    path: str
    made: asyncio.Future[int]


class JudgeChanges:
    """One change at a time. Questions that come meanwhile wait, so that no group is judged by two versions.

    version: of all models of the service together; 0: as they were typed. The numbers go on where an earlier process of
             the service ended.
    """

    def __init__(self, run_dir: Path, run_id: str) -> None:
        self.version = 0
        self._newest = max((one["version"] for one in read_what_can_be(run_dir / CHANGES)), default=0)
        self._journal = Journal(run_dir / CHANGES, run_id=run_id)
        self._change: JudgeChange | None = None
        self._num_judging = 0
        self._turn = asyncio.Condition()

    @asynccontextmanager
    async def begin_group(self) -> AsyncIterator[None]:
        """Context of a group that is being judged."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._change is None)
            self._num_judging += 1
        try:
            yield
        finally:
            self._num_judging -= 1
            await self._notify()

    async def ask(self, judge: str, path: str) -> int:
        """The version, once it judges. Raises Refused."""
        if self._change is not None:
            raise Refused(409, f"{self._change.judge} is being changed; ask again")
        made = asyncio.get_running_loop().create_future()
        self._change = JudgeChange(judge=judge, path=path, made=made)
        await self._notify()
        return int(await asyncio.shield(made))  # it is made even if who asked has gone

    async def wait_for_change(self) -> JudgeChange:
        """The next one that is asked for, once nothing is being judged."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._change is not None and not self._num_judging)
        assert self._change is not None
        return self._change

    async def end(self, problem: str = "") -> None:
        """End the change, if one is open: questions go on to the new version or, with a problem, to the old one."""
        change, self._change = self._change, None
        if change is None:
            return
        if problem:
            change.made.set_exception(Refused(409, problem))
        else:
            self.version = self._newest = self._newest + 1
            self._journal.append({"version": self.version, "judge": change.judge, "path": change.path})
            change.made.set_result(self.version)
        await self._notify()

    async def _notify(self) -> None:
        async with self._turn:
            self._turn.notify_all()

    def close(self) -> None:
        self._journal.close()
