"""Runs one SELECT on DuckDB in a separate process, with little memory and without files; see `center.api.sql_guard`.

The process is started by the path of this file, so that it imports nothing of the center. It reads one request from its
standard input: JSON in a line, and tables as Arrow IPC streams. It writes one reply to its standard output: JSON in a
line, and the rows in the form that the request names.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import duckdb
import pyarrow as pa


class _WithoutPandas:
    """Hides pandas, which pyarrow would import for most of a second to look at the type of a text."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, _WithoutPandas)
sys.path.append(str(Path(__file__).resolve().parents[2]))
from edgewater.model.table_texts import JSON, TooLong, rendered  # noqa: E402  # of the same installation

READY = b"+"
MEMORY_BYTES = 512 << 20  # limit: memory of a statement
MAX_RESULT_ROWS = 100_000  # limit: size of a result
MAX_VALUES = 2_000_000  # limit: size of a result
MAX_RESULT_BYTES = 64 << 20
"""Of the table, and of its text."""
SETTINGS = (
    "enable_external_access = false",
    "autoinstall_known_extensions = false",
    "autoload_known_extensions = false",
    "allow_community_extensions = false",
    "python_enable_replacements = false",
    "TimeZone = 'UTC'",
    "lock_configuration = true",
)


def limit_memory() -> None:
    """Limits the process: `MEMORY_BYTES` in addition to its present memory, no further open files, no writing."""
    with open("/proc/self/statm") as statm:  # noqa: PTH123  # a path for one file
        used = int(statm.read().split()[0]) * resource.getpagesize()
    for kind, limit in (
        (resource.RLIMIT_AS, used + MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def answer(connection: duckdb.DuckDBPyConnection) -> tuple[dict[str, str], bytes]:
    """Reads the request, and returns the head and the rows of its reply."""
    request = json.loads(sys.stdin.buffer.readline())
    for name in request["tables"]:
        size = int(sys.stdin.buffer.readline())
        connection.register(name, pa.ipc.open_stream(sys.stdin.buffer.read(size)).read_all())
    try:
        table = connection.sql(request["sql"]).limit(MAX_RESULT_ROWS + 1).to_arrow_table()
        rows, values = table.num_rows, table.num_rows * table.num_columns
        if rows > MAX_RESULT_ROWS or values > MAX_VALUES or table.nbytes > MAX_RESULT_BYTES:
            return {"error": "rows"}, b""
        return {}, rendered(table, request["form"], MAX_RESULT_BYTES)
    except TooLong:
        return {"error": "text"}, b""
    except (duckdb.OutOfMemoryException, MemoryError, pa.ArrowMemoryError):
        return {"error": "memory"}, b""
    except (duckdb.Error, pa.ArrowException) as exc:
        return {"error": "statement", "message": str(exc).splitlines()[0]}, b""


def main() -> None:
    connection = duckdb.connect(":memory:", config={"threads": 1})
    for setting in SETTINGS:
        connection.execute(f"SET {setting}")
    # Loads the code that the first statement needs.
    rendered(connection.sql("SELECT 1 AS a").to_arrow_table(), JSON, MAX_RESULT_BYTES)
    limit_memory()
    out = sys.stdout.buffer
    out.write(READY)
    out.flush()
    head, rows = answer(connection)
    out.write(json.dumps(head).encode() + b"\n" + rows)
    out.flush()


if __name__ == "__main__":
    main()
