"""A client of the viewer for its tests: pages of a folder of runs whose indexes are made."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp.test_utils import TestClient, TestServer

from grmpipe.config.task_settings import AnnotateConfig
from grmpipe.viewer.runs import find_runs
from grmpipe.viewer.server import DEFAULTS, Viewer


@contextlib.asynccontextmanager
async def opened(
    folder: Path, *, admitted: bool = True, settings: AnnotateConfig = DEFAULTS
) -> AsyncIterator[tuple[TestClient, Viewer]]:
    """A client of a viewer whose indexes are made."""
    runs = find_runs(folder)
    for run in runs.values():
        assert list(run.index.follow())
    viewer = Viewer(folder, runs, settings)
    async with TestClient(TestServer(viewer.app(), host="127.0.0.1")) as client:
        if admitted:
            await client.get("/", params={"token": viewer.token})
        yield client, viewer


def fetch(folder: Path, *paths: str, status: int = 200) -> list[str]:
    async def run() -> list[str]:
        async with opened(folder) as (client, viewer):
            texts = []
            for path in paths:
                answer = await client.get(path)
                assert answer.status == status, await answer.text()
                texts.append((await answer.text()).replace(viewer.form_token, "FORM TOKEN"))
            return texts

    return asyncio.run(run())


def visible(page: str) -> str:
    """The page without tags, in one line."""
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())
