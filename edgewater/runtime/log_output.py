"""The log of a process on stderr: text for people, or a line of JSON per record for collectors."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import Queue
from typing import Any

import click

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
MAX_WAITING = 10_000
"""The most lines that wait until stderr is read. Further lines are left out."""
END_S = 2  # limit: the end of a process
"""The time that a process that ends waits until its log is read."""
log = logging.getLogger(__name__)


class TextLines(logging.Formatter):
    """Formats a message as one line of text. Other machines choose parts of messages, so control characters are
    escaped: a line break would begin a line that looks like another record.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        line = super().formatMessage(record)
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


class JsonLines(logging.Formatter):
    """Formats a record as a line of JSON: `time` (RFC 3339), `level`, `logger`, `message`, and `exception` if there is
    one.
    """

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": at, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options `log_level` and `log_format` to a command, for `configure_logging`."""
    level = click.option(
        "--log-level", default="info", show_default=True, type=click.Choice(LEVELS), help="Level of the log on stderr."
    )
    form = click.option(
        "--log-format",
        default="text",
        show_default=True,
        type=click.Choice(FORMATS),
        envvar="EDGEWATER_LOG_FORMAT",
        show_envvar=True,
        help="Text, or a line of JSON per record.",
    )
    return level(form(command))


def configure_logging(level: str, form: str) -> None:
    """Sends the log of this process to stderr. A command calls it once."""
    root = logging.getLogger()
    if root.handlers or sys.stderr is None:
        return
    handler = _Lines(sys.stderr.fileno())
    handler.setFormatter(JsonLines() if form == "json" else TextLines(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class _Lines(QueueHandler):
    """Passes lines to a thread that writes them, so that no other thread waits for the reader of stderr.

    If the queue is full, lines are left out. A line in their place states how many. The thread starts with the first
    line, because a process with threads must not fork (`center.ops.forking`).
    """

    def __init__(self, descriptor: int) -> None:
        self._waiting: Queue[logging.LogRecord] = Queue()
        super().__init__(self._waiting)
        self._writer, self._is_started = _Writer(self._waiting, descriptor), False
        self._left_out = 0
        self._gap: logging.LogRecord | None = None

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return logging.makeLogRecord({"msg": self.format(record)})

    def enqueue(self, record: logging.LogRecord) -> None:
        if not self._is_started:
            self._is_started = True
            self._writer.start()
        if self._waiting.qsize() < MAX_WAITING:
            self._gap = None
        else:
            self._left_out = 1 if self._gap is None else self._left_out + 1
            stated = f"{self._left_out} lines were left out, because the log was not read"
            line = self.format(logging.LogRecord(log.name, logging.WARNING, "", 0, stated, None, None))
            if self._gap is not None:
                self._gap.msg = line
                return
            self._gap = record = logging.makeLogRecord({"msg": line})
        self._waiting.put(record)

    def flush(self) -> None:
        """Waits until the lines are written, at most `END_S`. Called when the process ends."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(lambda: not self._waiting.unfinished_tasks, END_S)


class _Writer(QueueListener):
    def __init__(self, waiting: Queue[logging.LogRecord], descriptor: int) -> None:
        super().__init__(waiting)
        self._descriptor = descriptor

    def handle(self, record: logging.LogRecord) -> None:
        # Not `sys.stderr`: a thread that waits in its lock is fatal when the interpreter ends.
        line = f"{record.msg}\n".encode(errors="backslashreplace")
        with contextlib.suppress(OSError):
            while line:
                line = line[os.write(self._descriptor, line) :]
