"""The console's lines as JSON, an object per line, for collectors of logs. The fields' names are prime-rl's."""

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from rich.text import Text

from grmpipe.observe.console import ConsoleSink, RunConsole, step_lines
from grmpipe.observe.plain_json import json_bytes
from grmpipe.trackers.tracker import SampleRow
from grmpipe.types import Metrics


class JsonConsole(RunConsole):
    """A console on which everything printed is a line of JSON, also what others print on it."""

    def __init__(self, file: IO[str] | None = None) -> None:
        super().__init__(file=file, force_terminal=False, highlight=False)

    def print(self, *objects: object, **options: object) -> None:
        self.begin_capture()
        super().print(*objects, **options)  # type: ignore[arg-type]
        if text := self.end_capture().strip():
            self.tell(text, {"type": "note"})

    def tell(self, message: str, fields: Mapping[str, object], level: str = "INFO") -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json_bytes({"timestamp": now, "level": level, "message": message, **fields}, strict=True)
        super().print(Text(line.decode(errors="replace")), soft_wrap=True)


class JsonConsoleSink(ConsoleSink):
    """Steps with all their metrics, alarms, notes and the end. Samples are in the run's files only."""

    console: JsonConsole

    def log(self, step: int, metrics: Metrics) -> None:
        lines = "\n".join(step_lines(step, self._num_steps, metrics, self._shown)) or f"step {step}"
        self._tell(lines, {"type": "step", "step": step, **metrics})

    def note(self, text: str) -> None:
        self._tell(text, {"type": "note"})

    def alarm(self, text: str) -> None:
        self._tell(text, {"type": "alarm"}, "WARNING")

    def remark(self, about: str, text: str, style: str = "") -> None:
        self._tell(text, {"type": about.replace(" ", "_")})

    def print_samples(self, rows: Sequence[SampleRow]) -> None:
        """None: a text of many lines is no log line."""

    def print_files(self, run_dir: Path, files: Mapping[str, str]) -> None:
        self._tell(f"files are in {run_dir}", {"type": "files", "run_dir": str(run_dir), "files": list(files)})

    def end(self, status: str, failure: str | None) -> None:
        words = f"{status}: {failure}" if failure else status
        fields = {"type": "end", "status": status, "failure": failure}
        self._tell(words, fields, "ERROR" if status == "failed" else "INFO")

    def _tell(self, message: str, fields: Mapping[str, object], level: str = "INFO") -> None:
        with self._guard.watch("console"):
            self.console.tell(message, fields, level)


class JsonLogHandler(logging.Handler):
    """Writes what a logger says on a console of JSON lines."""

    def __init__(self, level: int, console: JsonConsole) -> None:
        super().__init__(level)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.tell(self.format(record), {"type": "log", "logger": record.name}, record.levelname)
