"""Spark's daemon of Python workers (`spark.python.daemon.module`). Its workers have all modules of a task when they are
forked, and acknowledge received data at once.

Without it, each new worker would load PySpark, Arrow and the merge itself: 1.1 s, 0.6 s of CPU. A process with threads
must not fork. NumPy and Arrow each start a thread unless `SINGLE_THREADED` is in the environment. If there is a thread
for another reason, the daemon begins again and loads nothing.

Spark's JVM writes a task's input in small pieces without TCP_NODELAY. So each piece waits until the previous piece is
acknowledged. On a connection that a worker keeps, Linux delays acknowledgements by 40 ms, so each task would wait for
40 ms. (With `spark.python.unix.domain.socket.enabled` no task waits. But the JVM then stores the path of each result's
socket until the JVM ends. A job runs for months, with several results a second.)
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import socket
import sys
from typing import Any

import pyspark.daemon

from edgewater.runtime.allocator import leave_out_pandas

BUFFER_BYTES = 1 << 16  # format: of Spark's daemon; the same as in Spark's daemon
LOADS = "EDGEWATER_DAEMON_LOADS"
"""A variable of the environment. ``0``: the daemon loads no modules before it forks."""
MODULES = "pyspark.worker", "center.job.merge"
_spark_worker = pyspark.daemon.worker


def load() -> None:
    """Loads the modules that workers need. Begins this process again if it has threads then."""
    if os.environ.get(LOADS) == "0":
        return
    for name in MODULES:
        importlib.import_module(name)
    leave_out_pandas()  # each worker would import it
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        os.environ[LOADS] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    gc.collect()
    gc.freeze()


class Acknowledged(io.RawIOBase):
    """The input that a worker reads from a TCP socket. Data is acknowledged before the worker waits for more data."""

    def __init__(self, file: io.BufferedReader, connection: socket.socket) -> None:
        self._file, self._connection = file, connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = self._file.readinto1(buffer)
        # Linux resets this option, so it is set after each read.
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return read


def worker(connection: socket.socket, authenticated: bool) -> int:
    """Runs one task, like Spark's own `worker`. Called in a process that Spark's daemon has forked."""
    import pyspark.worker  # here if `load` has loaded nothing: pyarrow may start threads

    main = pyspark.worker.main

    def acknowledging(infile: io.BufferedReader, outfile: Any) -> None:
        main(io.BufferedReader(Acknowledged(infile, connection), BUFFER_BYTES), outfile)

    pyspark.worker.main = acknowledging
    try:
        return int(_spark_worker(connection, authenticated))
    finally:
        pyspark.worker.main = main


if __name__ == "__main__":
    load()
    pyspark.daemon.worker = worker
    pyspark.daemon.manager()
