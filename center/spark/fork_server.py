"""Starts Spark's Python processes by fork, from one process that has loaded the modules that they need.

Before a stream runs, Spark starts five Python processes one after the other: to look for data sources, to create one,
to plan, to read, and for its workers. Without this server, each process would load PySpark, Arrow and the center's
modules itself. `center.spark.spark_session` starts this server beside the JVM. The interpreter that Spark starts is
`fork_client.py`.

A process with threads must not fork. NumPy and Arrow each start a thread unless `SINGLE_THREADED` is in the
environment. If there is a thread for another reason, the server ends, and the clients start interpreters of their own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Iterable
from typing import NoReturn

SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
SPARKS_MODULES = (
    "center.spark.daemon",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.worker",
)
STANDARD_FILES = 3
STARTED = b"+"
_LENGTH, _CODE = struct.Struct("!I"), struct.Struct("!i")


def serve(path: str, modules: Iterable[str] = ()) -> None:
    """Serves clients at the Unix socket `path` until standard input ends. Returns early if the process cannot fork
    safely.

    Args:
        modules: modules that are loaded first, together with the modules that Spark's own processes need.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends this process
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(path)
        listener.listen()  # a client may wait already while modules are loaded
        for name in (*SPARKS_MODULES, *modules):
            importlib.import_module(name)
        if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
            return
        gc.collect()
        gc.freeze()
        selector.register(listener, selectors.EVENT_READ, functools.partial(_accept, listener, selector))
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    return
                key.data()


def _accept(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    connection, _ = listener.accept()
    try:
        process = _start(connection, selector)
    except (OSError, ValueError):
        connection.close()  # the client starts an interpreter of its own
        return
    ended = os.pidfd_open(process)
    selector.register(ended, selectors.EVENT_READ, functools.partial(_report, process, ended, connection, selector))
    selector.register(connection, selectors.EVENT_READ, functools.partial(_end, process, connection, selector))


def _start(connection: socket.socket, selector: selectors.BaseSelector) -> int:
    """Forks the process that a client requests, and returns the id of the process."""
    head, files, _, _ = socket.recv_fds(connection, _LENGTH.size, STANDARD_FILES)
    try:
        with connection.makefile("rb") as request:
            arguments, environment = json.loads(request.read(*_LENGTH.unpack(head)))
        connection.sendall(STARTED)
        if (process := os.fork()) == 0:
            for key in selector.get_map().values():
                if key.fileobj is not sys.stdin:
                    os.close(key.fd)
            selector.close()
            connection.close()
            _become(arguments, environment, files)
    finally:
        for file in files:
            os.close(file)
    return process


def _become(arguments: list[str], environment: dict[str, str], files: list[int]) -> NoReturn:
    """Runs ``-m module argument…`` with the client's files and environment, as a new interpreter would."""
    code = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        path = environment.get("PYTHONPATH", "").split(os.pathsep)
        first = 0 if sys.flags.safe_path else 1  # without safe_path, the working directory is the first entry
        sys.path[first:first] = [directory for directory in path if directory and directory not in sys.path]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # runpy warns that the module is loaded already.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if not isinstance(exc.code, int | None):
            sys.stderr.write(f"{exc.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _report(process: int, ended: int, connection: socket.socket, selector: selectors.BaseSelector) -> None:
    """Tells the client the exit code of its process."""
    _, status = os.waitpid(process, 0)
    selector.unregister(ended)
    os.close(ended)
    if connection.fileno() >= 0:
        with contextlib.suppress(OSError):
            connection.sendall(_CODE.pack(os.waitstatus_to_exitcode(status)))
        _close(connection, selector)


def _end(process: int, connection: socket.socket, selector: selectors.BaseSelector) -> None:
    """Ends the process of a client that has ended."""
    if connection.fileno() >= 0:  # closed if the process has ended at the same moment
        os.kill(process, signal.SIGTERM)
        _close(connection, selector)


def _close(connection: socket.socket, selector: selectors.BaseSelector) -> None:
    selector.unregister(connection)
    connection.close()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
