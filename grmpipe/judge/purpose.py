"""What a model that judges is asked for: training, or one of the questions beside it. Follows the task that asks."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

# monitoring: canaries and adversarial replies.  evaluation: labelled work of task=evaluate.
Purpose = Literal["training", "held_out", "preflight", "monitoring", "evaluation"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
_PURPOSE: ContextVar[Purpose] = ContextVar("purpose", default="training")


@contextmanager
def set_purpose(purpose: Purpose) -> Iterator[None]:
    """Within it, and in the tasks that are begun within it, requests have this purpose."""
    before = _PURPOSE.set(purpose)
    try:
        yield
    finally:
        _PURPOSE.reset(before)


def current_purpose() -> Purpose:
    return _PURPOSE.get()
