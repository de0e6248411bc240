"""An API over the real stores (SQLite in a directory of the test), fed as the job feeds them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from fastapi import FastAPI
from sqlalchemy import insert, select

from center.api import create_app
from center.api.server import ApiServer, server_config
from center.api.sql_guard import SqlGuard
from center.catalog import Catalog, ComponentRegistry, SessionStart
from center.config import ApiSection
from center.ledger import EdgesChanged, FrameSummary, Ledger, QueryRegistered
from center.results import ResultStore
from center.results.schema import answers
from center.storage.delta_segments import Delta
from edgewater.base.streams import LIVE, MAX_TIME_MS, Delivery, EdgeId
from edgewater.model.edge_records import HeartbeatRecord, StreamRecord
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.runtime.health import bound_address, listen
from edgewater.synopses import GroupedAggregate
from edgewater.wire import SliceClose, Withheld
from tests.center.catalog_world import begin_session
from tests.insides import engine_of

HOUR = 3_600_000
T0 = 1_356_998_400_000  # 2013-01-01T00:00:00Z
COLUMNS = {"carrier": pa.string(), "distance": pa.int64(), "dep_delay": pa.float64()}
SPEC: dict[str, Any] = {
    "name": "flights",
    "from": "flights",
    "group_by": ["carrier"],
    "measures": {"n": "count()", "miles": "sum(distance)", "delay": "mean(dep_delay)"},
    "window": {"tumbling": "1h"},
    "lateness": "1h",
}


class Desk:
    """The center as the API sees it, with a clock that tests set."""

    sink_secrets: tuple[str, ...] = ("WAREHOUSE_URL",)

    def __init__(self, path: Path) -> None:
        self.now = T0 + 1000 * HOUR
        url = f"sqlite:///{path}/catalog.db"
        self.catalog = Catalog(url)
        self.components = ComponentRegistry(url)
        self.results = ResultStore(f"sqlite:///{path}/results.db")
        self.ledger = Ledger()
        self._positions: dict[str, int] = {}
        self._apps: dict[tuple[object, ...], FastAPI] = {}

    def app(self, **config: Any) -> FastAPI:
        section = ApiSection(**config)
        clock = lambda: self.now  # noqa: E731
        secrets = self.sink_secrets
        return create_app(self.catalog, self.results, self.components, section, now_ms=clock, sink_secrets=secrets)

    def ask(self, method: str, path: str, *, app: FastAPI | None = None, **request: Any) -> httpx.Response:
        if app is None:  # to make one takes longer than most requests
            made_of = id(self.catalog), id(self.components), id(self.results), self.sink_secrets
            app = self._apps[made_of] = self._apps.get(made_of) or self.app()

        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, path, **request)

        return asyncio.run(once())

    def get(self, path: str, **request: Any) -> httpx.Response:
        return self.ask("GET", path, **request)

    def connect(self, *edges: str, deliveries: tuple[Delivery, ...] = ()) -> None:
        for edge in edges:
            streams = [StreamRecord("flights", COLUMNS, LIVE, deliveries)]
            begin_session(self.catalog, SessionStart(
                EdgeId(edge), f"{edge}-1", labels={"city": edge}, streams=streams, oldest_seq=0, next_seq=0,
                now_ms=self.now,
            ))  # fmt: skip

    def beat(self, edge: str, watermark_ms: int, **drops: int) -> None:
        marks, records = {"flights": watermark_ms}, {"flights": 7}
        record = HeartbeatRecord(EdgeId(edge), marks, records, drops, 0, 1000.0, 20.0, 0.0, self.now)
        self.catalog.edges.record_heartbeats([record])

    def register(self, **changes: object) -> RegisteredQuery:
        query = self.catalog.queries.register(QuerySpec.from_mapping({**SPEC, **changes}), self.now)[0]
        self.ledger_knows(query)
        return query

    def register_over(self, *edges: str, **changes: object) -> RegisteredQuery:
        """Connects edges, and registers a query over their stream."""
        self.connect(*edges)
        return self.register(**changes)

    def ledger_knows(self, query: RegisteredQuery) -> None:
        self.results.tick(
            self.ledger, [EdgesChanged(tuple(self.catalog.edges.all())), QueryRegistered(query)], self.now
        )

    def report(
        self,
        query: RegisteredQuery,
        edge: str,
        start_ms: int,
        flights: Mapping[str | None, int],
        *,
        closed: bool = True,
        withheld: tuple[Withheld, ...] = (),
        delay_from: float = 0.0,
    ) -> None:
        """An edge ships `flights` per carrier of one slice, and (closed) says that this was all of it."""
        carriers = pa.array([c for c, n in flights.items() for _ in range(n)], pa.string())
        rows = len(carriers)
        columns = {"distance": np.full(rows, 100), "dep_delay": np.arange(rows) + delay_from, "carrier": carriers}
        self.ship(query, edge, start_ms, columns, closed=closed, withheld=withheld)

    def report_both(self, query: RegisteredQuery, start_ms: int, flights: Mapping[str | None, int]) -> None:
        """`jfk` and `lga` ship the same."""
        for edge in ("jfk", "lga"):
            self.report(query, edge, start_ms, flights)

    def ship(
        self,
        query: RegisteredQuery,
        edge: str,
        start_ms: int,
        columns: Mapping[str, Any],
        *,
        closed: bool = True,
        withheld: tuple[Withheld, ...] = (),
    ) -> None:
        """As `report`, with records as columns."""
        self._positions[query.key] = self._positions.get(query.key, 0) + 1
        position = self._positions[query.key]
        bound = query.spec.bind(COLUMNS)
        stacks = {b.measure.name: b.measure.stack(b.argument.type if b.argument else None) for b in bound.measures}
        part = GroupedAggregate(dict(zip(query.spec.group_by, bound.group_types, strict=True)), stacks)
        rows = len(next(iter(columns.values())))
        read = {b.measure.name: b.measure.argument for b in bound.measures}
        keys = [pa.array(columns[name]) for name in query.spec.group_by]
        part.update(keys, {k: pa.array(columns[c]) if c else None for k, c in read.items()}, rows)
        delta = Delta(query.key, start_ms, part.to_bytes())
        through = start_ms + HOUR if closed else start_ms
        close = SliceClose(start_ms, rows, 0, withheld)
        fact = FrameSummary(
            query.ref, position, EdgeId(edge), through, (close,), (start_ms,), 500, self.now, f"{edge}-1"
        )  # fmt: skip
        self.results.apply(self.ledger, [delta], [fact], {query.key: position}, self.now)

    def end(self, query: RegisteredQuery, edge: str) -> None:
        """An edge says that its input has ended."""
        self._positions[query.key] = position = self._positions.get(query.key, 0) + 1
        fact = FrameSummary(query.ref, position, EdgeId(edge), MAX_TIME_MS, (), (), 500, self.now, f"{edge}-1")
        self.results.apply(self.ledger, [], [fact], {query.key: position}, self.now)

    def repeat(self, query: RegisteredQuery, count: int) -> None:
        """Stores the query's only answer again for the `count` - 1 windows after it."""
        with engine_of(self.results).begin() as connection:
            (row,) = connection.execute(select(answers).where(answers.c.query == query.key)).mappings()
            connection.execute(
                insert(answers),
                [
                    {
                        **row,
                        "answer_id": row["answer_id"] + n,
                        "window_start_ms": row["window_start_ms"] + n * HOUR,
                        "window_end_ms": row["window_end_ms"] + n * HOUR,
                    }
                    for n in range(1, count)
                ],
            )

    @contextmanager
    def served(self, address: str = "127.0.0.1:0", **config: Any) -> Iterator[str]:
        """The API behind a real server, for streams; the base URL."""
        started = threading.Event()

        class Server(ApiServer):
            async def startup(self, *args: Any, **kwargs: Any) -> None:
                await super().startup(*args, **kwargs)
                started.set()

        app, section = self.app(**config), ApiSection(**config)
        listener = listen(address, "api.listen")
        services = app.state.services
        configured = server_config(app, section, services.metrics.on_refused)
        server = Server(configured, section, services.feed.changes.end, reload_s=0.05)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert started.wait(30)
            yield f"{'http' if section.tls is None else 'https'}://{bound_address(listener)}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


class LastingGuard(SqlGuard):
    """The guard of all tests' APIs. Its spare child outlives an API: to start one takes longer than most tests."""

    def close(self) -> None:
        pass


@pytest.fixture(scope="session", autouse=True)
def one_guard() -> Iterator[None]:
    guard = LastingGuard(timeout_s=30.0)  # other processes of the tests take the cores
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("center.api.services.SqlGuard", lambda: guard)
        yield
    SqlGuard.close(guard)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    for store in (desk.catalog, desk.components, desk.results):
        store.close()


@pytest.fixture
def two_hours(desk: Desk) -> tuple[Desk, RegisteredQuery]:
    """Two edges and two hours: the first is final (in revision 2), the second complete (in revision 1)."""
    query = desk.register_over("jfk", "lga")
    desk.report(query, "jfk", T0, {"UA": 3, "AA": 1})
    desk.report(query, "lga", T0, {"UA": 2})
    desk.report(query, "jfk", T0 + HOUR, {"UA": 5})
    desk.report(query, "lga", T0 + HOUR, {"DL": 4})
    return desk, query
