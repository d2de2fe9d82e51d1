"""Changes of what judges: when they are made, and what waits for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from grmpipe.serve.admission import Refused
from grmpipe.serve.judge_changes import JudgeChanges


def test_a_change_waits_for_groups_in_progress_and_later_groups_wait_for_it(tmp_path: Path) -> None:
    async def check() -> None:
        changes, seen = JudgeChanges(tmp_path, "run"), list[str]()

        async def judge(name: str, go_on: asyncio.Event) -> None:
            async with changes.begin_group():
                await go_on.wait()
                seen.append(f"{name} by {changes.version}")

        go_on = asyncio.Event()
        first = asyncio.create_task(judge("first", go_on))
        await asyncio.sleep(0)
        asked = asyncio.create_task(changes.ask("judge", "new"))
        await asyncio.sleep(0)
        second = asyncio.create_task(judge("second", go_on))
        due = asyncio.create_task(changes.wait_for_change())
        with pytest.raises(Refused, match="judge is being changed"):
            await changes.ask("judge", "other")
        await asyncio.sleep(0.01)
        assert not due.done(), "the first group is in progress"
        go_on.set()
        assert (await due).path == "new" and not second.done()
        await changes.end()
        assert await asked == 1
        await asyncio.gather(first, second)
        assert seen == ["first by 0", "second by 1"]
        changes.close()

    asyncio.run(check())


def test_a_change_that_fails_leaves_the_version_and_numbers_are_never_used_twice(tmp_path: Path) -> None:
    async def change(changes: JudgeChanges, problem: str) -> int:
        asked = asyncio.create_task(changes.ask("judge", "new"))
        await changes.wait_for_change()
        await changes.end(problem)
        return await asked

    async def check() -> None:
        changes = JudgeChanges(tmp_path, "run")
        assert await change(changes, "") == 1
        with pytest.raises(Refused, match="no room"):
            await change(changes, "no room")
        assert changes.version == 1
        changes.close()
        later = JudgeChanges(tmp_path, "run")
        assert later.version == 0, "it judges by what was typed"
        assert await change(later, "") == 2
        later.close()

    asyncio.run(check())
