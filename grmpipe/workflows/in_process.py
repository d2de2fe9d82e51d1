"""Workflows as functions in this process: for code that you trust, and that never blocks the event loop."""

from __future__ import annotations

import inspect
from typing import cast

from grmpipe.config.dotted_path import check_takes, found_at
from grmpipe.workflows.policy import Policy, Task, Workflow


def workflow_at(path: str) -> Workflow:
    """The user's function. Raises ValueError that begins with the key."""
    check_takes(path, "target", ("task", "policy"))
    found = found_at(path, "target")
    if not inspect.iscoroutinefunction(found):
        raise ValueError(f"target: {path} must be an `async def solve(task, policy)`")
    return cast(Workflow, found)


class InProcess:
    """Calls the function as it is."""

    def __init__(self, path: str) -> None:
        self._workflow = workflow_at(path)

    async def solve(self, task: Task, policy: Policy) -> object:
        return await self._workflow(task, policy)

    async def close(self) -> None:
        """It holds nothing."""
