"""A headless Chromium that a test opens pages in, over its DevTools protocol."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0")
WAIT_S = 60.0


class Page:
    """A tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0

    async def send(self, method: str, **params: object) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while (answer := await self._socket.receive_json(timeout=WAIT_S)).get("id") != self._number:
            pass
        return answer["result"]

    async def value(self, expression: str) -> Any:
        """The value of JavaScript in the page."""
        return (await self.send("Runtime.evaluate", expression=expression))["result"].get("value")

    async def open(self, url: str) -> None:
        """Open a page and wait until it is complete."""
        await self.send("Page.navigate", url=url)  # answers once the new document is there
        await self.wait_for("document.readyState == 'complete'")

    async def wait_for(self, expression: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while not await self.value(expression):
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def open_page(profile: Path, *, width: int, height: int = 800) -> AsyncIterator[Page]:
    """A tab of this size in a browser of its own. profile: an empty folder for the browser."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=null, stderr=pipe)
    try:
        async with asyncio.timeout(WAIT_S):
            assert process.stderr is not None
            while not (found := re.search(rb"ws://(\S+?)/", await process.stderr.readline())):
                pass
        async with aiohttp.ClientSession() as session:
            tabs = await (await session.get(f"http://{found[1].decode()}/json/list")).json()
            url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            async with session.ws_connect(url, max_msg_size=0) as socket:
                page = Page(socket)
                size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                await page.send("Emulation.setDeviceMetricsOverride", **size)
                yield page
    finally:
        process.kill()
        await process.wait()
