"""The PostgreSQL database that a soak's center writes its answers to, compared with what REST answers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy.engine import make_url

from tests.center.postgres import PostgresServer
from tests.e2e.soak.reader import differences
from tests.e2e.soak.system import Center, SoakFailed
from tests.simulation.checkers import Answer, Falsehood

SINK, SCHEMA = "warehouse", "soak"
CAUGHT_UP_S = 60.0


class Warehouse:
    """A sink of the center, and the database behind it."""

    def __init__(self, server: PostgresServer) -> None:
        url = make_url(server.new_database()).set(drivername="postgresql", query={})
        self._url = url.render_as_string(hide_password=False)

    @property
    def settings(self) -> dict[str, Any]:
        """What the configuration of the center needs."""
        return {"sinks": {SINK: {"kind": "postgres", "url": self._url, "schema": SCHEMA}}}

    def compare(self, center: Center, newest: Mapping[str, Mapping[str, Answer]]) -> tuple[list[Falsehood], int]:
        """Returns how the tables differ from the newest answers, per query and start, and the number of cells."""
        self._wait(center)
        false, cells = list[Falsehood](), 0
        with psycopg.connect(self._url, options="-c timezone=UTC") as connection:
            for query, windows in newest.items():
                for start, answer in windows.items():
                    rows, names = self._rows(connection, query, start)
                    columns = {name: [_plain(row[at]) for row in rows] for at, name in enumerate(names)}
                    differing, compared = differing_rows(answer, columns, len(rows))
                    cells += compared
                    false += [
                        Falsehood("sink", query, start, int(answer["revision"]), f"PostgreSQL: {d}")
                        for d in differing[:3]
                    ]
        return false, cells

    def _wait(self, center: Center) -> None:
        """Waits until the sink has every answer. Raises SoakFailed."""
        deadline = time.monotonic() + CAUGHT_UP_S
        while time.monotonic() < deadline:
            sink = center.request("GET", f"/v1/sinks/{SINK}").json()
            if sink.get("behind_answers") == 0 and sink["state"] == "running":
                return
            time.sleep(0.3)
        raise SoakFailed(f"the sink does not catch up within {CAUGHT_UP_S:.0f} s: {sink}")

    def _rows(self, connection: psycopg.Connection[Any], query: str, start: str) -> tuple[list[Any], list[str]]:
        text = sql.SQL("SELECT * FROM {} WHERE window_start = %s").format(sql.Identifier(SCHEMA, query))
        cursor = connection.execute(text, [start])
        assert cursor.description is not None
        return cursor.fetchall(), [column.name for column in cursor.description]


def differing_rows(answer: Answer, columns: Mapping[str, list[Any]], rows: int) -> tuple[list[str], int]:
    """Returns how the rows of a window in a table differ from its answer, and the number of compared cells."""
    places = {
        tuple(str(columns[name][at]) for name in next(iter(answer["data"]), {"group": {}})["group"]): at
        for at in range(rows)
    }
    found = [places.get(tuple(str(value) for value in row["group"].values())) for row in answer["data"]]
    order = list(range(rows)) if None in found or len(found) != rows else [at for at in found if at is not None]
    differing, compared = differences(answer, {n: [values[at] for at in order] for n, values in columns.items()}, rows)
    revisions = {*columns.get("revision", ())} - {answer["revision"]}
    if revisions:
        differing.append(f"revisions {sorted(revisions)} instead of {answer['revision']}")
    return differing, compared


def _plain(value: Any) -> Any:
    if not isinstance(value, Decimal):
        return value
    return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
