"""Spark's daemon of Python workers, which acknowledge what they read at once: `spark.python.daemon.module`.

Spark's JVM writes a task's input in small pieces without TCP_NODELAY, so each waits until the one before is
acknowledged. On a connection that a worker keeps, Linux delays acknowledgements by 40 ms, so each task waited as long.
(With `spark.python.unix.domain.socket.enabled` none does, but the JVM then keeps the path of each result's socket until
it ends. A job runs for months, with several results a second.)
"""

from __future__ import annotations

import io
import socket
from typing import Any

import pyspark.daemon

BUFFER_BYTES = 1 << 16  # as Spark's own
_spark_worker = pyspark.daemon.worker


class Acknowledged(io.RawIOBase):
    """What a worker reads from a TCP socket; what has been read is acknowledged before more is waited for."""

    def __init__(self, file: io.BufferedReader, connection: socket.socket) -> None:
        self._file, self._connection = file, connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = self._file.readinto1(buffer)
        # Linux forgets the option, so it is set each time.
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return read


def worker(connection: socket.socket, authenticated: bool) -> int:
    """Runs one task, as Spark's own `worker`; called in a process that Spark's daemon has forked."""
    import pyspark.worker  # after the fork, as Spark does: pyarrow starts threads

    main = pyspark.worker.main

    def acknowledging(infile: io.BufferedReader, outfile: Any) -> None:
        main(io.BufferedReader(Acknowledged(infile, connection), BUFFER_BYTES), outfile)

    pyspark.worker.main = acknowledging
    try:
        return int(_spark_worker(connection, authenticated))
    finally:
        pyspark.worker.main = main


if __name__ == "__main__":
    pyspark.daemon.worker = worker
    pyspark.daemon.manager()
