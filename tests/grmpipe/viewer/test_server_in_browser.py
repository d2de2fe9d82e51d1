"""The viewer's pages in a real browser."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from viewed_run import SCRIPT, answer, write_run

from grmpipe.observe.recorder import Recorder
from grmpipe.types import Prompt
from grmpipe.viewer.runs import find_runs

pytest.importorskip("aiohttp")
from aiohttp import web
from browser import CHROMIUM, Page, open_page

from grmpipe.viewer.server import Viewer, listen

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
PAGES = (
    "run/run?since=1",
    "rollouts/run",
    "group/run?group=g1",
    "group/run?group=g2",
    "failures/run?cause=unparseable",
    "annotations/run",
    "compare?a=run&b=run",
)


async def look(folder: Path, profile: Path) -> None:
    viewer = Viewer(folder, find_runs(folder))
    runner = web.AppRunner(viewer.app(), shutdown_timeout=0.1)
    await runner.setup()
    address = f"http://127.0.0.1:{await listen(runner, 0)}"
    viewer.indexer.start()
    try:
        async with open_page(profile, width=360) as page:
            await page.open(f"{address}/rollouts/run?token={viewer.token}")
            await page.wait_for("document.body.innerText.includes('3 rollouts')")  # it comes back by itself
            for path in PAGES:
                await look_at(page, f"{address}/{path}")
            await page.open(f"{address}/rollouts/run")
            await skip_to_the_content(page)
            await page.wait_for("document.querySelector('.state').ariaBusy == 'false'")
            add_rollout(folder)
            await page.wait_for("document.querySelector('.state a')?.textContent == 'reload'")
    finally:
        viewer.indexer.stop()
        await runner.cleanup()


async def look_at(page: Page, url: str) -> None:
    """A page that fits a phone, in which no planted script ran and every control has a name."""
    await page.open(url)
    title = await page.value("document.title")
    assert title not in ("", "owned"), url
    assert await page.value("document.querySelectorAll('h1').length") == 1, url
    assert await page.value("document.documentElement.scrollWidth") <= 360, url
    controls = "[...document.querySelectorAll('input:not([type=hidden]), select, textarea')]"
    nameless = f"{controls}.filter(x => !x.labels.length && !x.ariaLabel).length"
    assert await page.value(nameless) == 0, url
    assert await page.value("getComputedStyle(document.body).margin") == "0px", "without its style sheet"


async def skip_to_the_content(page: Page) -> None:
    """By the keyboard: the first link is seen once it has the focus, and leads into the content."""
    for key, code in (("Tab", 9), ("Enter", 13)):
        press = {"key": key, "code": key, "windowsVirtualKeyCode": code, "text": "\r" if key == "Enter" else ""}
        await page.send("Input.dispatchKeyEvent", type="keyDown", **press)
        if key == "Tab":
            assert await page.value("document.activeElement.className") == "skip"
            assert await page.value("document.activeElement.getBoundingClientRect().left") >= 0
            assert await page.value("getComputedStyle(document.activeElement).outlineWidth") == "2px"
    await page.wait_for("document.activeElement.id == 'content'")


def add_rollout(run_dir: Path) -> None:
    recorder = Recorder(run_dir)
    recorder.rollout(2, Prompt(prompt_id="p9", messages=()), answer("g3", 0, "later"))
    recorder.close()


def test_pages_fit_a_phone_follow_the_run_and_run_no_planted_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "profile").mkdir()
    asyncio.run(look(write_run(tmp_path / "run", experiment=SCRIPT), tmp_path / "profile"))


async def press(page: Page, *keys: str) -> None:
    for key in keys:
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        await page.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        await page.send("Input.dispatchKeyEvent", type="keyUp", key=key)


async def annotate_by_keys(folder: Path, profile: Path) -> None:
    viewer = Viewer(folder, find_runs(folder))
    runner = web.AppRunner(viewer.app(), shutdown_timeout=0.1)
    await runner.setup()
    address = f"http://127.0.0.1:{await listen(runner, 0)}"
    viewer.indexer.start()
    mine = "[...document.querySelectorAll('.annotate .badge')].map(x => x.textContent).join('|')"
    loaded = "document.readyState == 'complete'"
    try:
        async with open_page(profile, width=1280) as page:
            await page.open(f"{address}/annotations/run?token={viewer.token}")
            await page.wait_for("!!document.querySelector('input[name=rater]')")
            await page.value("document.querySelector('input[name=rater]').focus()")
            await press(page, *"anna", "Enter")
            await page.wait_for("document.querySelector('main button')?.textContent == 'Change' && " + loaded)
            await page.open(f"{address}/rollouts/run?sort=oldest")
            await press(page, "f")
            assert await page.value("document.activeElement.name") == "step_from"
            await press(page, "Escape", "/")
            assert await page.value("document.activeElement.type") == "search"
            await press(page, "Escape", "j", "o")  # the second row
            await page.wait_for("location.search.includes('sibling=1') && " + loaded)
            await press(page, "w")
            await page.wait_for(f"{mine} == 'wrong' && {loaded}")
            await press(page, "r")
            await page.wait_for(f"{mine} == 'right' && {loaded}")
            await press(page, "8")
            await page.wait_for(f"{mine} == 'right|score 8' && {loaded}")
            await press(page, "c", *"so 9")
            await page.send("Input.dispatchKeyEvent", type="rawKeyDown", key="Enter", modifiers=2)
            await page.wait_for(f"{mine} == 'right|score 8|so 9' && {loaded}")
            await press(page, "u")
            await page.wait_for(f"{mine} == 'right|score 8' && {loaded}")
            path = folder / "annotations.jsonl"
            path.rename(folder / "aside")
            path.mkdir()
            await press(page, "c", *"kept")
            await page.send("Input.dispatchKeyEvent", type="rawKeyDown", key="Enter", modifiers=2)
            await page.wait_for(
                "document.querySelector('form .box')?.textContent.startsWith('Not written: annotations')"
            )
            assert await page.value("document.querySelector('textarea').value") == "kept"
            path.rmdir()
            (folder / "aside").rename(path)
            await press(page, "Escape", "n")
            await page.wait_for("location.search.includes('g2') && " + loaded)
            await press(page, "p")
            await page.wait_for("location.search.includes('g1') && " + loaded)
            await page.open(f"{address}/group/run?group=g1")
            await press(page, "j", "w")  # the second sibling, also once its page comes back
            await page.wait_for(f"{mine} == 'score 8|wrong' && {loaded}")
            await press(page, "3")
            await page.wait_for(f"{mine} == 'wrong|score 3' && {loaded}")
            await press(page, "?")
            assert await page.value("document.querySelector('footer details').open")
    finally:
        viewer.indexer.stop()
        await runner.cleanup()


@pytest.mark.long
def test_answers_are_annotated_by_keys_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "profile").mkdir()
    asyncio.run(annotate_by_keys(write_run(tmp_path / "run"), tmp_path / "profile"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "annotations.jsonl").read_text().splitlines()]
    assert [line["sibling"] for line in lines[:4]] == [1] * 4
    assert [line.get("right", line.get("score", line.get("note"))) for line in lines[:4]] == [False, True, 8, "so 9"]
    assert lines[4]["undoes"] == lines[3]["id"]
