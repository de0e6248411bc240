"""The log of a process: lines that are one record each, and a reader of stderr that does not read."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from edgewater.runtime.log_output import TEXT, TextLines
from tests.cells import at_night

TIMEOUT_S = 30
WAITING = 500
"""The pipe has room for about as many lines."""
PROGRAM = """
import logging, sys
from edgewater.runtime import log_output
from edgewater.runtime.log_output import configure_logging
configure_logging("info", sys.argv[1])
log = logging.getLogger("center.api")
"""


@contextmanager
def started(form: str, text: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a program, which is killed if it has not ended in time."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PROGRAM + text, form]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as process:
        timer = threading.Timer(TIMEOUT_S, process.kill)
        timer.start()
        yield process
        timer.cancel()


def test_a_log_is_lines_of_json_if_it_is_asked_for() -> None:
    with started(
        "json", "try: raise ValueError('a\\nb')\nexcept ValueError: log.exception('it %s', 'failed')"
    ) as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    found = json.loads(errors)
    assert (found["level"], found["logger"], found["message"]) == ("error", "center.api", "it failed")
    assert "ValueError: a\nb" in found["exception"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", found["time"])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["text", *at_night("json")])
def test_a_process_goes_on_while_nobody_reads_its_log_and_states_what_it_left_out(form: str) -> None:
    """The pipe and the queue are full long before the last line."""
    lines = WAITING + 2_000
    text = f"""
log_output.MAX_WAITING = {WAITING}
for i in range({lines}): log.info("line %d " + "x" * 100, i)
print("went on", flush=True)
sys.stdin.read(1)
log.info("after")
"""
    with started(form, text) as process:
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline() == b"went on\n"
        reader = io.BufferedReader(process.stderr)  # type: ignore[type-var]
        read = [reader.readline()]
        while b"left out" not in read[-1]:
            assert read[-1], "it has ended"
            read.append(reader.readline())
        process.stdin.write(b"x")
        read += reader.readlines()
        assert process.wait() == 0
    written = [int(found[1]) for line in read if (found := re.search(rb"line (\d+) x", line))]
    left_out = sum(int(found[1]) for line in read if (found := re.search(rb"(\d+) lines were left out", line)))
    assert written == sorted({*written}) and len(written) + left_out == lines and left_out > 0
    assert b"after" in read[-1]


@pytest.mark.slow
def test_a_process_ends_while_nobody_reads_its_log() -> None:
    with started("text", f"for i in range({4 * WAITING}): log.info('x' * 100)\nsys.exit(3)") as process:
        assert process.wait() == 3


def test_a_message_is_one_line_whatever_it_quotes() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextLines(TEXT))
    name = "a\n2026-01-01 00:00:00,000 INFO    center: all is well\x1b[2J\u202eé"
    record = logging.LogRecord("center.ingest", logging.WARNING, "", 0, "edge %s: refused", (name,), None)
    handler.emit(record)
    assert stream.getvalue().count("\n") == 1 and "\x1b" not in stream.getvalue() and "é: refused" in stream.getvalue()
