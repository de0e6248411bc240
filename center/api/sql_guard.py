"""`SqlGuard`: runs SELECTs on DuckDB in child processes that are bounded in memory and time.

DuckDB's own limits do not suffice: in the process of the API, ``repeat('x', 1e9)`` took 2 GiB in spite of its
`memory_limit`, and ignored an interrupt for 30 s. A child runs one statement, so that it leaves no effects for the next
statement.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa

from center.api.problems import HttpProblem
from edgewater.answers.work import require_client, waiting
from edgewater.base.errors import InvalidQuery, StorageError, installation

TIMEOUT_S = 3.0  # limit: time of a statement
START_S = 30.0  # limit: the wait for a child that hangs
"""Time after which a child that is not ready is killed."""
LOOK_S = 0.1  # limit: work for a client that has left
"""Interval at which it is checked whether the client of a statement is still there."""
MAX_CHILDREN = 2
"""Statements that run at the same time; others wait."""
MAX_BYTES = 128 << 20
"""Maximum bytes of all tables of a statement."""
_CHILD = Path(__file__).with_name("sql_child.py")
_ACCEPTED = {
    "memory": "a statement that needs at most 512 MiB of memory",
    "time": f"a statement that takes at most {TIMEOUT_S:g} s",
    "rows": "a result of at most 100,000 rows, 2,000,000 values and 64 MiB; add LIMIT, or GROUP BY",
    "text": "a text of at most 64 MiB; ask for fewer rows or columns, or for application/vnd.apache.arrow.stream",
    "statement": "a SELECT in the SQL of DuckDB over the columns that DESCRIBE lists",
}


class SqlGuard:
    """Runs SELECTs. Thread-safe. After the first SELECT, a spare child is always ready, which takes about 110 MB.

    Args:
        timeout_s: time that a statement may take.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._running = threading.Semaphore(MAX_CHILDREN)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._spares: list[subprocess.Popen[bytes]] = []
        self._finalizer = weakref.finalize(self, _end_all, self._spares)

    def close(self) -> None:
        """Ends the spare child."""
        self._finalizer()

    def run(self, text: str, tables: Mapping[str, pa.Table], form: str) -> bytes:
        """Returns the rows of a SELECT, rendered. Blocks for the time of the statement at most.

        Args:
            text: a SELECT that `check_select` has passed.
            tables: the tables that it may read, by name.
            form: a form of `edgewater.model.table_texts.rendered`.

        Raises:
            InvalidQuery: it fails, or needs more time, memory, rows or text than allowed.
            HttpProblem: DuckDB is not installed.
        """
        if find_spec("duckdb") is None:
            raise HttpProblem("unavailable", f"SELECT needs the package duckdb at the center: {installation('sql')}")
        parts = [json.dumps({"sql": text, "tables": list(tables), "form": form}).encode() + b"\n"]
        for table in tables.values():
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            data = sink.getvalue()
            parts += [b"%d\n" % data.size, data.to_pybytes()]
        if sum(map(len, parts)) > MAX_BYTES:
            raise InvalidQuery("sql", text, f"tables of at most {MAX_BYTES >> 20} MiB; read fewer windows")
        head, body = self._exchange(b"".join(parts))
        if (error := head.get("error")) is not None:
            raise InvalidQuery("sql", text, _ACCEPTED[error], head.get("message", ""))
        return body

    def _exchange(self, request: bytes) -> tuple[dict[str, str], bytes]:
        """Sends a request to a child, and returns the head and the rows of its reply."""
        with waiting():
            while not self._running.acquire(timeout=LOOK_S):
                require_client()
            try:
                return self._exchanged(request)
            finally:
                self._running.release()

    def _exchanged(self, request: bytes) -> tuple[dict[str, str], bytes]:
        child = self._take()
        try:
            _await_ready(child)
            reply = self._communicate(child, request)
        except TimeoutError:
            return {"error": "time"}, b""
        finally:
            _end(child)
        line, _, body = reply.partition(b"\n")
        if child.returncode != 0 or not line:
            return {"error": "memory"}, b""  # an allocation failed where DuckDB cannot report it
        return json.loads(line), body

    def _communicate(self, child: subprocess.Popen[bytes], request: bytes) -> bytes:
        """Returns the reply of a child, unless the client goes meanwhile. Raises TimeoutError."""
        left_s: float = self._timeout_s
        given: bytes | None = request
        while left_s > 0:
            require_client()
            try:
                return child.communicate(given, min(LOOK_S, left_s))[0]
            except subprocess.TimeoutExpired:
                left_s, given = left_s - LOOK_S, None
        raise TimeoutError

    def _take(self) -> subprocess.Popen[bytes]:
        """Returns a child, and starts the next spare child."""
        with self._lock:
            child = self._spares.pop() if self._spares else None
            if child is not None and child.poll() is not None:
                _end(child)
                child = None
            ready = _start() if child is None else child
            self._spares.append(_start())
            return ready


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", str(_CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env={"PATH": os.defpath},
        cwd="/",
        start_new_session=True,
    )


def _await_ready(child: subprocess.Popen[bytes]) -> None:
    """Returns when a child is ready for a statement. Raises StorageError if it cannot be started."""
    assert child.stdout is not None
    readable, _, _ = select.select([child.stdout], [], [], START_S)
    if not readable or child.stdout.read(1) != b"+":
        raise StorageError("the process that runs SELECT cannot be started")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kills a child, and waits for its end."""
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _end_all(children: list[subprocess.Popen[bytes]]) -> None:
    while children:
        _end(children.pop())
