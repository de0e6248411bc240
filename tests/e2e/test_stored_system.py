"""A whole system of each release since 0.3.0, killed in the middle, goes on with this release and loses nothing."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable
from psycopg import sql
from psycopg.rows import dict_row

from edgewater.model.windows import SessionWindow
from tests.cells import at_night
from tests.center.postgres import PostgresServer, serving
from tests.e2e.soak.warehouse import differing_rows
from tests.golden import whole_system
from tests.golden.test_system import differences
from tests.golden.whole_system import ALL_MS, EDGES, MADE_MS, SOURCES, Answer, System
from tests.golden.write import SETS
from tests.simulation.checkers import check_query, time_ms
from tests.simulation.truth import QueryTruth

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
WITHIN_S = 90.0
Key = tuple[str, str, int]
"""Query, start and revision of an answer."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


# The formats are the same in both; the tests of the stores run on PostgreSQL, too.
@pytest.mark.parametrize("store", ["sqlite", *at_night("postgres")])
@pytest.mark.parametrize("golden", SETS, ids=lambda p: p.name)
def test_a_stored_system_keeps_its_answers_and_ends_with_the_truth(
    golden: Path, store: str, tmp_path: Path, stack: ExitStack, request: pytest.FixtureRequest
) -> None:
    server: PostgresServer | None = None
    if store == "postgres":
        server = stack.enter_context(serving(request.getfixturevalue("postgres_binaries")))
    system, given = whole_system.unpack(golden / f"system-{store}.tar.xz", tmp_path, server)
    stack.callback(system.stop)
    system.start_center()
    truths = whole_system.truths(system.begin_ms)
    finish(system, truths)
    answers = {key(a): a for a in system.every_answer(spec["name"] for spec in whole_system.SPECS)}
    assert differences({key(a): a for a in given["answers"]}, answers) == []
    assert false_statements(system, truths, list(answers.values())) == []
    newest = {key[:2]: answer for key, answer in sorted(answers.items())}
    compare = compare_tables if store == "postgres" else compare_files
    compare(system, [answer for answer in newest.values() if answer["phase"] == "final"])
    check_rollup(system, truths)
    alarms = system.client.get("/v1/alarms").json()["alarms"]
    assert {alarm["kind"] for alarm in alarms} <= {"records-rejected"}, alarms


def key(answer: Answer) -> Key:
    return answer["query"], answer["window"]["start"], answer["revision"]


def finish(system: System, truths: dict[tuple[str, int], QueryTruth]) -> None:
    """Gives the rest of the records, and waits until every window is final."""
    for edge, source in SOURCES:
        if source == "file":
            system.give(edge, source, whole_system.records(system.begin_ms, edge, source, MADE_MS, ALL_MS))
    system.start_edges_at(dict.fromkeys(EDGES, system.gateway_port))
    for edge, source in SOURCES:
        if source == "push":
            system.give(edge, source, whole_system.records(system.begin_ms, edge, source, MADE_MS, ALL_MS))
        system.give(edge, source, whole_system.ends(system.begin_ms, edge, source))
    deadline_s = time.monotonic() + WITHIN_S
    for (query, _), truth in truths.items():
        # One window at a time: to read all answers over and over takes the center more than to give them.
        for start in sorted(truth.windows, reverse=True):
            while not system.is_final(query, str(start)):
                assert time.monotonic() < deadline_s, (query, start)
                system.check_alive()
                time.sleep(1.0)  # each look costs the center as much as a few windows


def check_rollup(system: System, truths: dict[tuple[str, int], QueryTruth]) -> None:
    """Ten seconds of `seconds` have the records of ten seconds."""
    windows = truths["seconds", 1].windows.values()
    rollup = system.client.get("/v1/queries/seconds/rollup", params={"every": "10s", "limit": 100}).json()["answers"]
    for answer in rollup:
        start, end = (time_ms(answer["window"][name]) for name in ("start", "end"))
        true = sum(len(window.records) for window in windows if start <= window.start_ms < end)
        assert answer["total"]["rows"]["lower"] <= true <= (answer["total"]["rows"]["upper"] or true), answer


def false_statements(system: System, truths: dict[tuple[str, int], QueryTruth], answers: list[Answer]) -> list[str]:
    false: list[str] = []
    for (query, version), truth in truths.items():
        own = [
            a for a in answers
            if (a["query"], a["version"]) == (query, version)
            and time_ms(a["window"]["end"]) < system.begin_ms + whole_system.END_MS
        ]  # fmt: skip
        end_ms = max(window.end_ms for window in truth.windows.values())
        found = check_query(truth, own, at_rest=True, closed_through_ms=end_ms, late_is_known=False)
        assert found.answers >= len(truth.windows) or isinstance(truth.spec.window, SessionWindow)
        false += map(str, found.false)
    return false


def compare_files(system: System, finals: list[Answer]) -> None:
    """The Parquet files and the Delta tables have the rows of each final answer, once."""
    for sink, read in (("archive", parquet_rows), ("lake", delta_rows)):
        wait_for_sink(system, sink)
        tables = {
            of: read(system.directory, f"{of[0]}_v{of[1]}") for of in {(a["query"], a["version"]) for a in finals}
        }
        compare_rows(finals, tables)


def parquet_rows(directory: Path, table: str) -> list[dict[str, Any]]:
    return list(ds.dataset(directory / "parquet" / table, format="parquet").to_table().to_pylist())


def delta_rows(directory: Path, table: str) -> list[dict[str, Any]]:
    return list(DeltaTable(directory / "delta" / table).to_pyarrow_table().to_pylist())


def compare_tables(system: System, finals: list[Answer]) -> None:
    """The tables of PostgreSQL have the rows of each final answer, once."""
    wait_for_sink(system, "warehouse")
    tables = {}
    with psycopg.connect(system.sinks["warehouse"]["url"], options="-c timezone=UTC", row_factory=dict_row) as rows:
        for query, version in {(a["query"], a["version"]) for a in finals}:
            name = sql.Identifier(whole_system.TABLES, f"{query}_v{version}")
            tables[query, version] = rows.execute(sql.SQL("SELECT * FROM {}").format(name)).fetchall()
    compare_rows(finals, tables)


def compare_rows(finals: list[Answer], tables: Mapping[tuple[str, int], list[dict[str, Any]]]) -> None:
    by_window: defaultdict[tuple[str, int, datetime], list[dict[str, Any]]] = defaultdict(list)
    for (query, version), rows in tables.items():
        for row in rows:
            by_window[query, version, row["window_start"]].append(row)
    for answer in finals:
        start = datetime.fromisoformat(answer["window"]["start"])
        found = by_window[answer["query"], answer["version"], start]  # files have all revisions of a final answer
        rows = [row for row in found if row["revision"] == answer["revision"]]
        columns = {name: [_plain(row[name]) for row in rows] for name in rows[0]} if rows else {}
        differing, compared = differing_rows(as_whole_numbers(with_numbers_only(answer), columns), columns, len(rows))
        assert differing == [] and (compared or not answer["data"]), answer


def with_numbers_only(answer: Answer) -> Answer:
    """Without the measures whose cells are lists, which tables have as text."""
    data = [
        {n: cell for n, cell in row.items() if n == "group" or {"estimate", "quantiles"} & cell.keys()}
        for row in answer["data"]
    ]
    return {**answer, "data": data}


def as_whole_numbers(answer: Answer, columns: Mapping[str, list[Any]]) -> Answer:
    """Returns an answer as lakes have it. Their columns of integers have the estimates of samples rounded, and bounds
    rounded outwards."""
    sides = {"estimate": round, "lower": math.floor, "upper": math.ceil}

    def cell(name: str, given: Any) -> Any:
        is_whole = all(isinstance(value, int | None) for value in columns.get(name, [0.5]))
        if not is_whole or "estimate" not in given:
            return given
        return {k: sides[k](v) if k in sides and isinstance(v, float) else v for k, v in given.items()}

    data = [{n: c if n == "group" else cell(n, c) for n, c in row.items()} for row in answer["data"]]
    return {**answer, "data": data}


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, Decimal) else value


def wait_for_sink(system: System, name: str) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while True:
        sink = system.client.get(f"/v1/sinks/{name}").raise_for_status().json()
        if (sink["state"], sink["behind_answers"]) == ("running", 0):
            return
        assert time.monotonic() < deadline_s, sink
        time.sleep(0.2)
