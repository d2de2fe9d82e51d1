"""Destinations of log lines: run.log gets all of them, the console only this project's warnings."""

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from grmpipe.config.keys.secrets import environment_secrets, mask
from grmpipe.models.terminal_text import replace_controls
from grmpipe.observe.json_console import JsonConsole, JsonLogHandler

OURS = "grmpipe"
REQUESTS = ("httpx", "httpx2", "httpcore")  # they log one line per request
NOISY = ("ray", "transformers", "torch", "vllm", "sglang", "asyncio")
_LOCK = threading.Lock()
# By each run in a user's process: whether warnings were logged; loggers, handlers, levels, propagation.
_KEPT: list[tuple[bool, list[tuple[logging.Logger, list[logging.Handler], int, bool]]]] = []
LINE = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"


def setup_logging(run_dir: Path, console: Console | None = None, trackers: Sequence[str] = ()) -> None:
    """Send the root logger, including Python warnings, to run_dir/run.log. May be called again: the last call counts.

    Call it (again) after importing the noisy libraries, which install their own console handlers.
    console:  the one that shows the steps.
    trackers: libraries of which run.log gets warnings only: they have files of their own, and log the whole
              configuration.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    replace_handlers(root, _file_handler(run_dir / "run.log", trackers))
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for name in (*NOISY, *trackers):
        library = logging.getLogger(name)
        replace_handlers(library)
        library.propagate = True
    for name in REQUESTS:
        logging.getLogger(name).setLevel(logging.WARNING)
    replace_handlers(logging.getLogger(OURS), _console_handler(console or Console(stderr=True)))


@contextlib.contextmanager
def kept_logging() -> Iterator[None]:
    """Context of a run in its user's own process, which gets its handlers, levels and warnings back. Of runs that
    overlap, the first one's beginning and the last one's end count.
    """
    with _LOCK:
        if not _KEPT:
            captured = warnings.showwarning is logging._showwarning  # type: ignore[attr-defined]
            loggers = [logging.getLogger(name) for name in ("", *NOISY, *REQUESTS, OURS)]
            kept = [(one, one.handlers, one.level, one.propagate) for one in loggers]
            for one in loggers:
                one.handlers = []  # else the run would close the user's
        else:
            captured, kept = _KEPT[0]
        _KEPT.append((captured, kept))
    try:
        yield
    finally:
        with _LOCK:
            _KEPT.pop()
            if not _KEPT:
                logging.captureWarnings(False)
                logging.captureWarnings(captured)
                for one, handlers, level, propagate in kept:
                    replace_handlers(one, *handlers)
                    one.setLevel(level)
                    one.propagate = propagate


def replace_handlers(logger: logging.Logger, *handlers: logging.Handler) -> None:
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    for handler in handlers:
        logger.addHandler(handler)


class MaskingFormatter(logging.Formatter):
    """Masks secrets of the environment in messages and tracebacks, and replaces control characters: servers, tools and
    models wrote parts of them, and people read them in a terminal.
    """

    def __init__(self, fmt: str) -> None:
        super().__init__(fmt, datefmt="%Y-%m-%d %H:%M:%S")
        self._secrets = environment_secrets()

    def format(self, record: logging.LogRecord) -> str:
        return replace_controls(mask(super().format(record), self._secrets))


class LogFile(logging.FileHandler):
    """A log file. An error of the disk is reported once, in one line: logging itself prints a traceback for each
    record.
    """

    _reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported:
            self._reported = True
            print(f"grmpipe: {self.baseFilename} can't be written: {error.strerror}", file=sys.stderr)

    def close(self) -> None:
        """Close the file. The rest of the buffer is lost on a full disk, which is no reason to fail."""
        with contextlib.suppress(OSError):
            super().close()


def _file_handler(path: Path, trackers: Sequence[str]) -> logging.Handler:
    handler = LogFile(path, encoding="utf-8", errors="backslashreplace")
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.partition(".")[0] not in trackers)
    handler.addFilter(lambda record: not is_mcps(record))
    handler.setFormatter(MaskingFormatter(LINE))
    return handler


def is_mcps(record: logging.LogRecord) -> bool:
    """Whether the library mcp logs it: what a server wrote, unmasked. grmpipe/envs/tools/mcp_tools.py logs that masked.
    The library's session has a logger called `client`, as others may have.
    """
    return record.name.startswith("mcp.") or (record.name == "client" and "/mcp/client/" in record.pathname)


class BriefFormatter(MaskingFormatter):
    """A format without tracebacks: run.log has them."""

    def format(self, record: logging.LogRecord) -> str:
        record = logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None, "stack_info": None})
        return super().format(record)


def _console_handler(console: Console) -> logging.Handler:
    handler: logging.Handler = RichHandler(logging.WARNING, console, show_time=False, show_path=False, markup=False)
    if isinstance(console, JsonConsole):
        handler = JsonLogHandler(logging.WARNING, console)
    handler.setFormatter(BriefFormatter("%(message)s"))
    handler.addFilter(lambda record: not record.__dict__.get("file_only"))  # the console shows these anyway
    return handler
