"""Workflows as functions in this process: for code that you trust, and that never blocks the event loop."""

import functools
import inspect
from collections.abc import Mapping
from typing import cast

from grmpipe.config.keys.dotted_path import check_takes, find_at
from grmpipe.workflows.policy import Policy, Task, Workflow


def workflow_at(path: str, options: Mapping[str, object]) -> Workflow:
    """The user's function with its options. Raises ValueError that begins with the key."""
    if not options:
        check_takes(path, "target", ("task", "policy"))
    found = find_at(path, "target")
    if not inspect.iscoroutinefunction(found):
        raise ValueError(f"target: {path} must be an `async def solve(task, policy)`")
    try:
        inspect.signature(found).bind("task", "policy", **options)
    except TypeError as error:
        raise ValueError(f"options: {path} can't be called with (task, policy) and {options}: {error}") from error
    return cast(Workflow, functools.partial(found, **options))


class InProcess:
    """Calls the function as it is."""

    def __init__(self, path: str, options: Mapping[str, object]) -> None:
        self._workflow = workflow_at(path, options)

    async def solve(self, task: Task, policy: Policy) -> object:
        return await self._workflow(task, policy)

    async def close(self) -> None:
        """It holds nothing."""
