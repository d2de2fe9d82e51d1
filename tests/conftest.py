"""What more than one room's tests need: a process that is left as it was found."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

from grmpipe.observe.logs import NOISY, OURS, replace_handlers

# The same examples on every machine, every time; `--hypothesis-profile=explore` draws new ones.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("repeatable")


@pytest.fixture
def restored_logging() -> Iterator[None]:
    names = ["", *NOISY, *OURS]
    kept = {name: (list(logging.getLogger(name).handlers), logging.getLogger(name).propagate) for name in names}
    level = logging.getLogger().level
    for name in names:
        logging.getLogger(name).handlers = []
    yield
    logging.captureWarnings(False)
    logging.getLogger().setLevel(level)
    for name, (handlers, propagate) in kept.items():
        replace_handlers(logging.getLogger(name), *handlers)
        logging.getLogger(name).propagate = propagate
