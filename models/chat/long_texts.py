"""Work on long texts in a thread of its own, so that the event loop goes on meanwhile."""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from grmpipe.models.chat.template_layout import texts_in
from grmpipe.models.types import Message

T = TypeVar("T")

LONG_CHARS = 32_768  # the tiny models' tokenizer takes 0.05 s for them
# One for all: each thread that renders keeps a copy of the tokenizer.
THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-texts")


async def off_loop_if_long(num_chars: int, work: Callable[[], T]) -> T:
    """Do the work, in the thread if it is about LONG_CHARS or more. Raises what the work raises."""
    if num_chars < LONG_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(THREAD, work)


def count_chars(messages: Iterable[Message]) -> int:
    """The length of the messages' texts, with those that calls of tools have."""
    return sum(
        len(text)
        for one in messages
        for text in (one.content, *(texts_in([call.arguments for call in one.tool_calls])))
    )
