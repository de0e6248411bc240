"""A whole system as a release leaves it on disk: ``python -m tests.golden.whole_system --code CHECKOUT RELEASE``.

A center and two edges run as processes for about a minute, answer queries of every kind, and are killed in the middle:
windows are open, lateness runs, a version of a query is about to begin, frames are not acknowledged or not applied, and
sinks lag behind. `write` packs what is on disk, and every answer that was given. `tests/e2e/test_stored_system.py`
starts the system with another release and lets it end.

The records follow from arithmetic (`records`), so the archives need no truth.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pyarrow as pa
from sqlalchemy.engine import make_url

from edgewater.model.query import QuerySpec
from edgewater.model.window_range import ALL_WINDOWS, WindowRange
from sim.demo.ports import free_port
from sim.demo.run import Demo
from tests.center.postgres import PostgresServer, find_binaries, serving
from tests.e2e.link import Link
from tests.simulation.truth import QueryTruth, TrueRecord

HERE = Path(__file__).parent
EDGES = ("a", "b")
STORES = ("sqlite", "postgres")
"""What keeps catalog and results."""
SCHEMA, TABLES = "edgewater", "answers"
"""Of PostgreSQL: the schema of the stores, and the sink's."""
STREAM = "events"
COLUMNS = {"k": "string", "src": "string", "n": "int64", "v": "int64", "p": "int64", "x": "float64", "user": "string"}
ARROW_COLUMNS = {name: pa.string() if of == "string" else getattr(pa, of)() for name, of in COLUMNS.items()}
STEP_MS, RUN, PAUSE_MS = 50, 160, 2_500
"""A record of each source every 50 ms. After 8 s, there are none for 2.5 s."""
LATE_MS = 2_000
MADE_MS, ALL_MS, END_MS = 45_000, 60_000, 240_000
"""Times after the begin: until then the making release reads, the reading release reads, and the last window ends."""
CHANGES_MS = (20_000, 55_000)
"""Where the second and the third version of the query `changed` begin. The third one has not begun at the kill."""
NDJSON = {"Content-Type": "application/x-ndjson"}
BAD_LINE, BAD_AT = '{"k": "half a rec\n', 1604
"""A line that edge `a` rejects, and the record of its file that follows."""
_WHOLE: dict[str, Any] = {"from": STREAM, "window": {"tumbling": "5s"}, "lateness": "10s", "edges": list(EDGES)}
_TOTALS = {"rows": "count()", "total": "sum(v)", "most": "max(v)"}
_PARTS: dict[str, dict[str, Any]] = {
    "exact": {
        "group_by": ["k", "src"],
        "measures": {**_TOTALS, "least": "min(v)", "average": "mean(p)", "spread": "var(p)", "float": "sum(x)"},
    },
    "seconds": {
        "group_by": ["k"], "window": {"tumbling": "1s"},
        "measures": {"rows": "count()", "total": "sum(v)", "users": "distinct(user)", "x": "quantiles(x)"},
    },
    "sliding": {"where": "v > 100", "group_by": ["k"], "window": {"sliding": "10s", "every": "5s"},
                "measures": _TOTALS},
    "sessions": {"window": {"session": "800ms", "max": "10s"}, "measures": _TOTALS},
    "sketches": {
        "group_by": ["k"],
        "measures": {
            "ids": "distinct(n)", "x": "quantiles(x)", "ranks": "kll(x)", "top": "top_k(user, 5)",
            "sample": "reservoir(v, size=20)", "frequent": "count_min(user, width=256, depth=4)",
        },
    },
    "errors": {"group_by": ["k", "src"], "measures": _TOTALS,
               "budget": {"error": {"rows": 4, "total": 4000, "most": 900}}},
    "stale": {"group_by": ["k", "src"], "measures": _TOTALS, "budget": {"staleness": "1500ms"}},
    "early": {"measures": {"total": "sum(p)"}, "accuracy": {"error": "10%", "confidence": "95%"}},
    "changed": {"group_by": ["src"], "measures": {"rows": "count()", "total": "sum(v)"}},
}  # fmt: skip
SPECS = tuple({"name": name, **_WHOLE, **parts} for name, parts in _PARTS.items())
CHANGED = (
    {**SPECS[-1], "group_by": ["k"], "window": {"tumbling": "10s"}},
    {**SPECS[-1], "measures": {"rows": "count()", "average": "mean(p)"}},
)
"""The second and the third version of `changed`."""
CLOCK = """import time
real = time.time
time.time = lambda: real() - {behind_s}
"""
"""A module that Python imports before a program: the clock of the system's processes is behind."""
Answer = dict[str, Any]


class Line(NamedTuple):
    """A record, with the time after the begin at which a source gets it."""

    due_ms: int
    at_ms: int
    values: dict[str, Any]


def records(begin_ms: int, edge: str, source: str, start_ms: int, end_ms: int) -> list[Line]:
    """The records that a source gets within a range of time after the begin, in order. Some come late."""
    number = [*EDGES].index(edge) * 2 + (source == "push")
    lines = []
    for i in range(max(end_ms, 0) // STEP_MS + 1):
        due_ms = i * STEP_MS + i // RUN * PAUSE_MS
        if not start_ms <= due_ms < end_ms:
            continue
        n = i * 4 + number
        at_ms = begin_ms + due_ms - (LATE_MS if i % 23 == 7 else 0)
        values = {
            "k": ("x", "y", "z/é:", None)[n * 7 % 11 % 4], "src": f"{edge}/{source}", "n": n,
            "v": (1 << 40) + n if n % 301 == 5 else n * 7919 % 1483 - 200, "x": (n * 13 % 257 - 60) / 4,
            "p": None if n % 37 == 1 else n * 31 % 97 + 50, "user": f"u{n * n % 53}",
        }  # fmt: skip
        lines.append(Line(due_ms, at_ms, values))
    return lines


def ends(begin_ms: int, edge: str, source: str) -> list[Line]:
    """The record after which all windows of the others end."""
    values = dict.fromkeys(COLUMNS) | {"src": f"{edge}/{source}", "n": -1}
    return [Line(END_MS, begin_ms + END_MS, values)]


def ndjson(lines: Iterable[Line]) -> str:
    return "".join(json.dumps({"at": line.at_ms, **line.values}) + "\n" for line in lines)


def truths(begin_ms: int) -> dict[tuple[str, int], QueryTruth]:
    """The truth about each version of each query, once every record has come."""
    given = [
        TrueRecord(edge, line.at_ms, line.values, late=line.at_ms < begin_ms + line.due_ms)
        for edge, source in SOURCES
        for line in records(begin_ms, edge, source, 0, ALL_MS)
    ]
    found = {(spec["name"], 1): QueryTruth(QuerySpec.from_mapping(spec), given, ARROW_COLUMNS) for spec in SPECS}
    borders = [ALL_WINDOWS.from_ms, *(begin_ms + at for at in CHANGES_MS), ALL_WINDOWS.until_ms]
    for at, spec in enumerate((SPECS[-1], *CHANGED)):
        own = WindowRange(*borders[at : at + 2])
        found[spec["name"], at + 1] = QueryTruth(QuerySpec.from_mapping(spec), given, ARROW_COLUMNS, own)
    return found


SOURCES = (("a", "file"), ("b", "file"), ("b", "push"))


class System(Demo):
    """A center and two edges, whose files are in a directory that may be moved.

    Args:
        server: has the stores and the sink's tables; None: SQLite, and sinks that write files.
    """

    def __init__(self, directory: Path, begin_ms: int, server: str | None = None) -> None:
        super().__init__(directory, 0.0)
        self.begin_ms, self.server = begin_ms, server
        self.ports = {edge: free_port() for edge in EDGES}
        self.environment = dict(os.environ)

    def wake_up_at(self, at_ms: int) -> None:
        """Sets the clock of the processes that are started from now on.

        By the true clock, the center would answer each window of years that a staleness budget makes due.
        """
        folder = self.directory / "clock"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(CLOCK.format(behind_s=time.time() - at_ms / 1000))  # noqa: TID251
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        self.environment["PYTHONPATH"] = path

    @property
    def sinks(self) -> dict[str, dict[str, Any]]:
        if self.server is not None:
            url = make_url(self.server).set(drivername="postgresql", query={}).render_as_string(hide_password=False)
            return {"warehouse": {"kind": "postgres", "url": url, "schema": TABLES}}
        return {
            "archive": {"kind": "parquet", "path": str(self.directory / "parquet"), "batch": "1s"},
            "lake": {"kind": "delta", "path": str(self.directory / "delta"), "batch": "1s"},
        }

    def start_center(self) -> None:
        """Starts the center on the files that the directory has, and waits until it is ready."""
        self.settings = {
            "data_dir": str(self.directory / "center"), "spark": {"master": "local[1]"}, "sinks": self.sinks,
            "gateway": {"listen": f"127.0.0.1:{self.gateway_port}"}, "api": {"listen": f"127.0.0.1:{self.api_port}"},
        }  # fmt: skip
        if self.server is not None:
            self.settings |= {"catalog_url": self.server, "results_url": self.server}
        self._start("center", ["center", "run", "--config", self._write("center.yaml", self.settings)])
        self.wait_until_ready()

    def start_edges_at(self, ports: Mapping[str, int]) -> None:
        """Starts the edges, which connect to these ports, and waits until they accept records."""
        stream = {"columns": COLUMNS, "time": {"column": "at", "unit": "ms"}, "disorder": "200ms", "idle": "1h"}
        for edge in EDGES:
            file = {"file": {"path": f"{edge}.ndjson", "follow": True}}
            push: list[dict[str, Any]] = [{"http": {}}] if (edge, "push") in SOURCES else []
            config = {
                "edge": edge, "center": {"address": f"127.0.0.1:{ports[edge]}"}, "state_dir": f"edge-{edge}",
                "http": {"listen": f"127.0.0.1:{self.ports[edge]}"}, "limits": {"checkpoint": "10s"},
                "streams": {STREAM: {**stream, "sources": [file, *push]}},
            }  # fmt: skip
            self.run_edge(config)
            self.wait_for_edge(edge, config)

    def _start(self, name: str, arguments: list[str]) -> None:
        # The edges' paths are relative: what they have stored is valid wherever the directory is.
        with (self.directory / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-P", "-m", "edgewater", *arguments]
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.directory, env=self.environment
            )

    def give(self, edge: str, source: str, lines: Sequence[Line], before: str = "") -> None:
        """Gives records to a source: at the end of its file, or as a push."""
        if not lines:
            return
        if source == "file":
            with (self.directory / f"{edge}.ndjson").open("a") as file:
                file.write(before + ndjson(lines))
            return
        url = f"http://127.0.0.1:{self.ports[edge]}/v1/streams/{STREAM}"
        reply = self.client.post(url, content=ndjson(lines), headers=NDJSON)
        assert (reply.status_code, reply.json()["accepted"]) == (200, len(lines)), reply.text

    def pids(self) -> dict[str, int]:
        """The processes of the center."""
        return {path.stem: int(path.read_text()) for path in (self.directory / "center" / "pids").glob("*.pid")}

    def halt(self, part: str) -> None:
        """Stops a process of the center as it is; it neither works nor ends."""
        for name, pid in self.pids().items():
            if name.partition("-")[0] == part:
                os.killpg(pid, signal.SIGSTOP)

    def kill_all(self) -> None:
        """Ends every process as `kill -9` does."""
        pids = self.pids()
        for name in list(self.processes):
            self.kill(name)
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def every_answer(self, queries: Iterable[str]) -> list[Answer]:
        """Each revision of each window, in order."""
        found = []
        for query in queries:
            for newest in self.answers(query):
                path = f"/v1/queries/{query}/windows/{newest['window']['start']}"
                older = ({"revision": revision} for revision in range(1, newest["revision"]))
                found += [self.client.get(path, params=params).raise_for_status().json() for params in older]
                found.append(newest)
        return found


def make(system: System, links: Mapping[str, Link]) -> dict[str, Any]:
    """Runs a new system until it is killed; returns the begin, and the answers that it has given."""
    system.start_center()
    for spec in SPECS:
        system.client.post("/v1/queries", json=spec).raise_for_status()
    for edge in EDGES:
        (system.directory / f"{edge}.ndjson").touch()
    system.start_edges_at({edge: link.port for edge, link in links.items()})
    system.begin_ms = (time.time_ns() // 10**10 + 1) * 10_000
    at = {"begin_ms": 0}

    def read_on(until_ms: int) -> None:
        while at["begin_ms"] < until_ms:
            time.sleep(0.1)
            now_ms = min(time.time_ns() // 10**6 - system.begin_ms, until_ms)
            for edge, source in SOURCES:
                lines = records(system.begin_ms, edge, source, at["begin_ms"], now_ms)
                system.give(edge, source, lines, BAD_LINE if any(line.values["n"] == BAD_AT for line in lines) else "")
            at["begin_ms"] = max(at["begin_ms"], now_ms)

    def change(version: int) -> None:
        border = {"at": str(system.begin_ms + CHANGES_MS[version - 2])}
        system.client.put("/v1/queries/changed", json=CHANGED[version - 2], params=border).raise_for_status()

    read_on(10_000)
    change(2)
    read_on(32_000)
    system.halt("sink")
    read_on(36_000)
    change(3)
    system.halt("job")
    read_on(39_000)
    links["a"].hold_replies()
    read_on(42_000)
    given = system.every_answer(spec["name"] for spec in SPECS)
    system.halt("gateway")
    read_on(MADE_MS)
    time.sleep(1)
    system.kill_all()
    return {"begin_ms": system.begin_ms, "answers": given}


def write(store: str, target: Path, code: Path, server: PostgresServer | None) -> None:
    """Makes a system with the release at `code`, and packs it."""
    with ExitStack() as stack:
        directory, metadata = (Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2))
        # What a process takes from the installed package: the release, which the state names, and the commands.
        project = tomllib.loads((code / "pyproject.toml").read_text())["project"]
        groups = {
            group: "".join(f"{name} = {of}\n" for name, of in e.items()) for group, e in project["entry-points"].items()
        }
        (metadata / "edgewater.dist-info").mkdir()
        (metadata / "edgewater.dist-info" / "METADATA").write_text(f"Name: edgewater\nVersion: {project['version']}\n")
        (metadata / "edgewater.dist-info" / "entry_points.txt").write_text(
            "".join(f"[{group}]\n{entries}" for group, entries in groups.items())
        )
        os.environ["PYTHONPATH"] = f"{metadata}:{code}"
        url = None if server is None else in_schema(server)
        system = System(directory, 0, url)
        stack.callback(system.stop)
        links = {edge: Link(system.gateway_port) for edge in EDGES}
        for link in links.values():
            stack.callback(link.close)
        expected = make(system, links)
        if server is not None:
            (directory / "dump.sql").write_text(dump(system))
        (directory / "given.json").write_text(json.dumps(expected, indent=0, ensure_ascii=False))
        for path in [*directory.glob("*.yaml"), *directory.glob("*.log"), *directory.glob("center/pids/*")]:
            path.unlink()  # the configuration has the password of the server
        with tarfile.open(target / f"system-{store}.tar.xz", "w:xz", preset=9) as archive:
            archive.add(directory, ".")


def unpack(archive: Path, directory: Path, server: PostgresServer | None) -> tuple[System, dict[str, Any]]:
    """Returns a system that has not been started, and what `make` returned.

    Args:
        server: gets the stores; None: the archive has them as SQLite files.
    """
    with tarfile.open(archive) as packed:
        packed.extractall(directory, filter="data")
    given = json.loads((directory / "given.json").read_text())
    url = None
    if server is not None:
        url = in_schema(server)
        with psycopg.connect(_plain(url), autocommit=True) as connection:
            connection.execute(f"DROP SCHEMA {SCHEMA}")
            connection.execute((directory / "dump.sql").read_bytes())
    system = System(directory, given["begin_ms"], url)
    system.wake_up_at(system.begin_ms + END_MS)
    return system, given


def in_schema(server: PostgresServer) -> str:
    """Returns the URL of a schema that every system has, on a server of its own."""
    url = make_url(server.new_database()).set(query={"options": f"-c search_path={SCHEMA}"})
    text = url.render_as_string(hide_password=False)
    with psycopg.connect(_plain(text), autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {SCHEMA}")
    return text


def dump(system: System) -> str:
    """Returns SQL that makes the schemas of the stores and of the sink with their rows."""
    assert system.server is not None
    binaries = find_binaries()
    assert binaries is not None
    schemas = [f"--schema={name}" for name in (SCHEMA, TABLES)]
    said = subprocess.run(
        [binaries / "pg_dump", "--inserts", "--rows-per-insert=100", "--no-owner", *schemas, _plain(system.server)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    # What psql alone knows, and what an older server does not know.
    return "".join(
        line for line in said.stdout.splitlines(keepends=True) if not line.startswith(("\\", "SET transaction_timeout"))
    )


def _plain(url: str) -> str:
    """Returns a URL as psycopg takes it, without a search path."""
    return make_url(url).set(drivername="postgresql", query={}).render_as_string(hide_password=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("release")
    parser.add_argument("--code", type=Path, required=True, help="a checkout of the release")
    arguments = parser.parse_args()
    binaries = find_binaries()
    if binaries is None:
        raise SystemExit("PostgreSQL 15 or newer is not installed")
    for store in STORES:
        with serving(binaries) if store == "postgres" else contextlib.nullcontext() as server:
            write(store, HERE / arguments.release, arguments.code.resolve(), server)


if __name__ == "__main__":
    main()
