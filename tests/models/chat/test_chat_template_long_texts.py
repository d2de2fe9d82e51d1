"""Long texts are worked on in a thread, short ones where they are."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from grmpipe.models.chat.chat_template import LONG_CHARS, count_chars, off_loop_if_long
from grmpipe.models.types import Message, ToolCall


@pytest.mark.parametrize(("num_chars", "off_loop"), [(LONG_CHARS - 1, False), (LONG_CHARS, True)])
def test_only_work_on_long_texts_leaves_the_loops_thread(num_chars: int, off_loop: bool) -> None:
    thread = asyncio.run(off_loop_if_long(num_chars, threading.current_thread))

    assert (thread is not threading.current_thread()) == off_loop


def test_event_loop_runs_during_long_work() -> None:
    async def turns_meanwhile() -> int:
        work = asyncio.ensure_future(off_loop_if_long(LONG_CHARS, lambda: time.sleep(0.2)))
        turns = 0
        while not work.done():
            await asyncio.sleep(0.001)
            turns += 1
        return turns

    assert asyncio.run(turns_meanwhile()) > 5


def test_the_exception_of_long_work_arrives() -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(off_loop_if_long(LONG_CHARS, lambda: 1 // 0))


def test_arguments_of_calls_count_as_text() -> None:
    call = ToolCall(name="write", arguments={"text": ["abc", {"more": "de"}], "n": 5})

    assert count_chars([Message(role="assistant", content="xy", tool_calls=(call,))]) == len("xytextabcmoreden")
