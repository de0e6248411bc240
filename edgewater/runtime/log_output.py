"""The log of a process on stderr: text for people, or a line of JSON per record for collectors."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TextIO

import click

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


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
        "--log-format", default="text", show_default=True, type=click.Choice(FORMATS), envvar="EDGEWATER_LOG_FORMAT",
        show_envvar=True, help="Text, or a line of JSON per record.",
    )  # fmt: skip
    return level(form(command))


def configure_logging(level: str, form: str, stream: TextIO | None = None) -> None:
    """Sends the log of this process to stderr. A command calls it once."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
