"""The sink `postgres` on a real server: its tables equal what REST answers, whatever happens between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from sqlalchemy.engine import make_url

from center.catalog import Change
from center.sinks import SinkContext, SinkQuery, SinkRunner, SinkStore, read_definition, testing
from center.sinks.definitions import SinkDefinition, read_definitions
from edgewater.base.errors import InvalidConfig
from edgewater.base.streams import EdgeId
from edgewater.model.registered_query import RegisteredQuery
from tests.center.api.conftest import HOUR, T0, Desk
from tests.center.postgres import PostgresServer


class Warehouse:
    """A database of its own, and a sink of the desk's center that writes to it."""

    def __init__(self, desk: Desk, path: Path, server: PostgresServer) -> None:
        self.desk = desk
        self.url = make_url(server.new_database()).set(drivername="postgresql", query={}).render_as_string(False)
        self.schema = f"sink_{abs(hash(str(path)))}"
        self.store = SinkStore(desk.results.engine)
        self.document: dict[str, Any] = {"kind": "postgres", "url": self.url, "schema": self.schema}
        self.runner = self.new_runner()

    def definition(self, **changes: Any) -> SinkDefinition:
        return read_definition("warehouse", {**self.document, **changes})

    def new_runner(self, owner: str = "host:1", **changes: Any) -> SinkRunner:
        return SinkRunner(
            self.definition(**changes), self.desk.catalog, self.desk.results, self.store, owner=owner,
            now_ms=lambda: self.desk.now,
        )  # fmt: skip

    def catch_up(self) -> None:
        for _ in range(1_000):
            self.desk.now += 1_000
            if self.runner.step() > 0:
                assert not self.runner.problem, self.runner.problem
                return
        raise AssertionError("the sink never rests")

    def take(self, query: RegisteredQuery, edge: str, start_ms: int, flights: Mapping[str | None, int]) -> None:
        """An edge ships records, and the sink writes what the center answers."""
        self.desk.report(query, edge, start_ms, flights)
        self.catch_up()

    def ask(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, options=f"-c timezone=UTC -c search_path={self.schema}") as connection:
            cursor = connection.execute(text, values)
            return cursor.fetchall() if cursor.description else []

    def rows(self, view: str = "flights") -> list[tuple[Any, ...]]:
        found = self.ask(
            "SELECT window_start, carrier, revision, phase, n, n_lower, n_upper, miles, delay, delay_upper,"
            f" completeness FROM {view}"
        )
        return sorted(found, key=lambda row: (row[0], row[1] is None, row[1]))

    def truth(self, name: str = "flights") -> list[tuple[Any, ...]]:
        """What REST answers."""
        answers, cursor = list[dict[str, Any]](), ""
        while True:
            page = self.desk.get(f"/v1/queries/{name}/windows?limit=1000{cursor}").json()
            answers += page["answers"]
            if page["next_cursor"] is None:
                break
            cursor = f"&cursor={page['next_cursor']}"
        return [
            (
                datetime.fromisoformat(answer["window"]["start"]).astimezone(UTC), row["group"]["carrier"],
                answer["revision"], answer["phase"], row["n"]["estimate"], row["n"]["lower"], row["n"]["upper"],
                row["miles"]["estimate"], row["delay"]["estimate"], row["delay"]["upper"],
                answer["quality"]["completeness"]["ratio"],
            )
            for answer in answers
            for row in sorted(answer["data"], key=lambda r: (r["group"]["carrier"] is None, r["group"]["carrier"]))
        ]  # fmt: skip


@pytest.fixture
def warehouse(desk: Desk, tmp_path: Path, postgres: PostgresServer) -> Iterator[Warehouse]:
    with ExitStack() as stack:
        made = Warehouse(desk, tmp_path, postgres)
        stack.callback(lambda: made.runner.stop())
        yield made


pytestmark = pytest.mark.slow


def test_the_view_equals_the_answers_and_follows_each_revision(desk: Desk, warehouse: Warehouse) -> None:
    query = desk.register_over("jfk", "lga")
    warehouse.take(query, "jfk", T0, {"UA": 3, "AA": 1, None: 2})
    desk.report(query, "lga", T0, {"UA": 5})
    desk.report(query, "jfk", T0 + HOUR, {"DL": 1})
    warehouse.take(query, "lga", T0 + HOUR, {"DL": 1, "B6": 2})
    assert warehouse.rows() == warehouse.truth() and len(warehouse.rows()) == 5
    desk.report(query, "jfk", T0, {"UA": 1}, closed=False)
    warehouse.catch_up()
    assert warehouse.rows() == warehouse.truth() and {row[2] for row in warehouse.rows()} == {1, 2}
    (statement,) = warehouse.ask("SELECT statement FROM edgewater_windows WHERE window_start = '2013-01-01'")[0]
    answer = desk.get(f"/v1/queries/flights/windows/{T0}").json()
    assert statement["quality"] == answer["quality"] and statement["total"] == answer["total"]


def test_records_that_come_for_a_final_window_change_its_quality(desk: Desk, warehouse: Warehouse) -> None:
    query = desk.register_over("jfk", "lga", lateness="0s")
    desk.report(query, "jfk", T0, {"UA": 3})
    warehouse.take(query, "lga", T0, {"UA": 1})
    before = desk.get(f"/v1/queries/flights/windows/{T0}").json()
    assert before["phase"] == "final"
    desk.report(query, "jfk", T0, {"UA": 9}, closed=False)
    desk.results.correct(desk.now)
    warehouse.catch_up()
    after = desk.get(f"/v1/queries/flights/windows/{T0}").json()
    assert after["data_of"] == before["revision"] and after["quality"] != before["quality"]
    (statement,) = warehouse.ask("SELECT statement FROM edgewater_windows")[0]
    assert statement["quality"] == after["quality"]
    assert warehouse.rows() == warehouse.truth()


def test_a_process_that_lost_its_lease_writes_nothing(desk: Desk, warehouse: Warehouse) -> None:
    query = desk.register()
    warehouse.take(query, "jfk", T0, {"UA": 3})
    stalled, warehouse.runner = warehouse.runner, warehouse.new_runner("host:2")
    desk.now += 60_000
    warehouse.take(query, "jfk", T0 + HOUR, {"UA": 1})
    desk.report(query, "jfk", T0 + 2 * HOUR, {"UA": 1})
    answers = warehouse.ask("SELECT count(*) FROM edgewater_windows")
    sink = stalled._sink
    assert sink is not None
    with pytest.raises(Exception, match="another process"):
        sink.write([], {query.ref: 1})
    assert stalled.step() > 0
    assert warehouse.ask("SELECT count(*) FROM edgewater_windows") == answers
    warehouse.catch_up()
    assert warehouse.rows() == warehouse.truth()


def test_a_sink_that_fails_is_an_alarm_and_readyz_names_it_to_those_who_may_read_all(
    desk: Desk, warehouse: Warehouse, postgres: PostgresServer
) -> None:
    app = desk.app(token="x", principals={"reader": {"token": "r", "queries": ["flights"]}})

    def readyz(token: str) -> dict[str, Any]:
        reply = desk.get("/readyz", app=app, headers={"Authorization": f"Bearer {token}"})
        return dict(reply.json()["sinks"])

    warehouse.catch_up()
    assert readyz("x") == {}
    postgres.kill()
    desk.report(desk.register(), "jfk", T0, {"UA": 3})
    pause = warehouse.runner.step()
    assert [a.kind for a in desk.catalog.alarms.latest()] == [], "a connection that was lost once"
    assert warehouse.runner.step() > pause
    (alarm,) = desk.catalog.alarms.latest()
    assert alarm.kind == "sink-failing" and "warehouse" in alarm.message and "PostgreSQL" in alarm.message
    assert "PostgreSQL" in readyz("x")["warehouse"] and readyz("r") == {}
    postgres.start()
    warehouse.runner.step()
    warehouse.catch_up()
    assert readyz("x") == {} and desk.catalog.alarms.latest() == [] and warehouse.rows() == warehouse.truth()
    warehouse.runner.stop()
    assert "no process" in readyz("x")["warehouse"]
    warehouse.store.pause("warehouse", True)
    assert readyz("x") == {}


def test_a_sink_that_is_deleted_while_it_runs_does_not_come_back(desk: Desk, warehouse: Warehouse) -> None:
    warehouse.store.define("warehouse", {**warehouse.document, "url": {"env": "URL"}})
    runner = SinkRunner(
        warehouse.definition(), desk.catalog, desk.results, warehouse.store, owner="host:1",
        now_ms=lambda: desk.now, is_stored=True,
    )  # fmt: skip
    runner.step()
    assert warehouse.store.status("warehouse").owner == "host:1"
    warehouse.store.remove("warehouse")
    for _ in range(3):
        desk.now += 60_000
        assert runner.step() > 0
    assert warehouse.store.statuses() == []


def test_a_page_ends_where_its_data_are_large(desk: Desk) -> None:
    query = desk.register(lateness="9h")
    for hour in (0, 1, 2):
        desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 3})
    whole = desk.results.changes_after(0, 99).records
    assert [r.answer_id for r in whole] == [1, 2, 3]
    sizes = [len(r.synopsis or b"") for r in whole]
    for most, ids in ((1, [1]), (sizes[0], [1]), (sizes[0] + 1, [1, 2]), (sum(sizes), [1, 2, 3]), (1 << 30, [1, 2, 3])):
        assert [r.answer_id for r in desk.results.changes_after(0, 99, max_bytes=most).records] == ids
    assert desk.results.changes_after(3, 99, max_bytes=1).records == []


def test_odd_names_values_and_types_arrive(desk: Desk, warehouse: Warehouse) -> None:
    long = "m" * 63
    query = desk.register(
        name="select",
        measures={"n": "count()", long: "sum(distance)", "xmin": "max(dep_delay)", "q": "quantiles(distance)"},
    )
    desk.report(query, "jfk", T0, {"a\0b": 1, "": 1, 'it\'s "x", y\n': 2})
    desk.report(query, "jfk", T0 + HOUR, {"NaN": 1}, delay_from=float("nan"))
    desk.report(query, "jfk", T0 + 2 * HOUR, {"inf": 1}, delay_from=float("inf"))
    warehouse.catch_up()
    rows = warehouse.ask('SELECT carrier, n, xmin_ FROM "select" ORDER BY window_start, n, carrier')
    assert [row[0] for row in rows[:3]] == ["", '"a\\u0000b"', 'it\'s "x", y\n']
    assert rows[3][2] != rows[3][2] and rows[4][2] == float("inf")
    columns = [name for (name,) in warehouse.ask(
        "SELECT column_name FROM information_schema.columns WHERE table_schema = %s AND table_name = 'select'",
        warehouse.schema,
    )]  # fmt: skip
    assert sum(name.startswith("mmmm") for name in columns) == 3 and all(len(name) <= 63 for name in columns)
    assert "q_0.99_upper" in columns


def test_a_session_that_was_merged_into_another_leaves_nothing(warehouse: Warehouse) -> None:
    sink = warehouse.definition().make(SinkContext("kit"))
    sink.open([SinkQuery(testing.REF, testing.QUERY, testing.SCHEMA)])
    sink.write([testing.answer(1, 0, {"a": 1}), testing.answer(2, HOUR, {"a": 2})], {testing.REF: 2})
    merged = replace(testing.answer(3, HOUR, {}, revision=2), window_end_ms=HOUR)
    for _ in range(2):  # as after a kill
        sink.write([merged, testing.answer(4, 0, {"a": 3}, revision=2)], {testing.REF: 4})
        assert warehouse.ask("SELECT extract(epoch FROM window_start)::int, n FROM kit") == [(0, 3)]
        assert warehouse.ask("SELECT extract(epoch FROM window_start)::int FROM edgewater_windows") == [(0,)]
    sink.close()


def test_sinks_behind_a_pooler_of_transactions_write_to_their_own_schemas(
    postgres: PostgresServer, pgbouncer: str, warehouse: Warehouse
) -> None:
    """All clients share one session, and one of them leaves its own settings and names there."""
    schemas = [f"{warehouse.schema}_50%", f"{warehouse.schema}_two"]
    with postgres.pooled(pgbouncer) as url, psycopg.connect(url, autocommit=True) as other:
        sinks = [warehouse.definition(url=url, schema=name).make(SinkContext(name)) for name in schemas]
        kit = [SinkQuery(testing.REF, testing.QUERY, testing.SCHEMA)]
        assert [sink.open(kit) for sink in sinks] == [{}, {}]
        for name, value in {"search_path": schemas[1], "timezone": "Asia/Tokyo", "datestyle": "German"}.items():
            other.execute("SELECT set_config(%s, %s, false)", [name, value])
        for i in range(1, 8):  # psycopg prepares a statement when it comes for the sixth time
            for sink, first in zip(sinks, (10, 20), strict=True):
                merged = replace(testing.answer(1, testing.DAY, {}, revision=i), window_end_ms=testing.DAY)
                sink.write([testing.answer(i, i * HOUR, {"a": first + i}), merged], {testing.REF: i})
        assert [sink.open(kit) for sink in sinks] == [{testing.REF: 7}] * 2
        for sink in sinks:
            sink.close()
    for schema, first in zip(schemas, (10, 20), strict=True):
        place = f'"{schema}"'.replace("%", "%%")
        rows = f"SELECT extract(epoch FROM window_start)::int * 1000, n FROM {place}.kit ORDER BY 1"
        assert warehouse.ask(rows) == [(i * HOUR, first + i) for i in range(1, 8)]
        ((windows, positions),) = warehouse.ask(
            f"SELECT (SELECT count(*) FROM {place}.edgewater_windows),"
            f" (SELECT array_agg(sink) FROM {place}.edgewater_marks)"
        )
        assert (windows, positions) == (7, [schema])


def test_a_change_goes_on_in_the_view_while_the_old_version_still_gets_answers(
    desk: Desk, warehouse: Warehouse
) -> None:
    desk.now = T0
    old = desk.register(lateness="0s")
    spec = replace(old.spec, group_by=())
    new, _ = desk.catalog.queries.register(spec, desk.now, change=Change(T0 + HOUR))
    desk.ledger_knows(new)
    warehouse.take(new, "jfk", T0 + HOUR, {"UA": 5})
    desk.ledger_knows(desk.catalog.queries.versions("flights")[0])
    desk.report(old, "jfk", T0, {"UA": 3, "AA": 1})
    desk.catalog.queries.end(old.ref, desk.now)
    warehouse.catch_up()
    rows = warehouse.ask("SELECT version, window_start, carrier, n FROM flights ORDER BY version, carrier")
    first, second = (datetime(2013, 1, 1, hour, tzinfo=UTC) for hour in (0, 1))
    assert rows == [(1, first, "AA", 1), (1, first, "UA", 3), (2, second, None, 5)]


def test_a_new_version_gets_a_table_and_the_view_has_both(desk: Desk, warehouse: Warehouse) -> None:
    query = desk.register()
    warehouse.take(query, "jfk", T0, {"UA": 3})
    desk.catalog.queries.delete("flights", desk.now)
    newer = desk.register(measures={"n": "count()", "far": "max(distance)"})
    warehouse.take(newer, "jfk", T0 + HOUR, {"AA": 2})
    assert warehouse.ask("SELECT version, carrier, n, miles, far FROM flights ORDER BY version") == [
        (query.ref.version, "UA", 3, 300, None),
        (newer.ref.version, "AA", 2, None, 100),
    ]


def test_a_table_that_was_altered_by_hand_is_named_and_its_repair_is_enough(desk: Desk, warehouse: Warehouse) -> None:
    query = desk.register(lateness="9h")
    warehouse.take(query, "jfk", T0, {"UA": 3})
    table = f"flights_v{query.ref.version}"
    warehouse.ask("DROP VIEW flights")
    for change in ("ALTER COLUMN n TYPE text", "DROP COLUMN miles"):
        warehouse.ask(f"ALTER TABLE {table} {change}")
    warehouse.runner.stop()
    desk.report(query, "jfk", T0 + HOUR, {"UA": 1})
    warehouse.runner = warehouse.new_runner()
    while warehouse.runner.step() == 0:
        pass
    assert table in warehouse.runner.problem and "column n is of type text" in warehouse.runner.problem
    warehouse.ask("DROP VIEW flights")
    warehouse.ask(f"ALTER TABLE {table} ALTER COLUMN n TYPE bigint USING n::bigint")
    warehouse.runner.step()
    warehouse.catch_up()
    assert warehouse.ask("SELECT n, miles FROM flights ORDER BY window_start") == [(3, None), (1, 100)]
    warehouse.store.replay("warehouse", 0)
    desk.now += 10_000
    warehouse.catch_up()
    assert warehouse.rows() == warehouse.truth()


def test_a_new_sink_begins_where_it_is_told_and_a_paused_one_waits(desk: Desk, warehouse: Warehouse) -> None:
    query = desk.register(lateness="9h")
    desk.report(query, "jfk", T0, {"UA": 3})
    warehouse.runner = warehouse.new_runner(begin="now", schema=f"{warehouse.schema}_now")
    warehouse.schema += "_now"
    warehouse.catch_up()
    desk.report(query, "jfk", T0 + HOUR, {"UA": 1})
    warehouse.store.pause("warehouse", True)
    desk.now += 10_000
    warehouse.catch_up()
    assert warehouse.ask("SELECT count(*) FROM edgewater_windows") == [(0,)]
    warehouse.store.pause("warehouse", False)
    desk.now += 10_000
    warehouse.runner.step()
    warehouse.catch_up()
    assert warehouse.ask("SELECT window_start FROM edgewater_windows") == [(datetime(2013, 1, 1, 1, tzinfo=UTC),)]


def test_answers_that_were_deleted_before_the_sink_had_them_are_a_stated_gap(desk: Desk, warehouse: Warehouse) -> None:
    query = desk.register(lateness="0s")
    warehouse.take(query, "jfk", T0, {"UA": 3})
    warehouse.runner.stop()
    for hour in (1, 2):
        desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 1})
    first = desk.results.last_answer_id()
    kept = warehouse.store.lowest_answer()
    assert kept is not None and kept < first
    assert desk.results.trim(desk.now + 1, through=kept) == 1, "the answer that the sink has"
    assert desk.results.trim(desk.now + 1) == 2
    warehouse.runner = warehouse.new_runner()
    warehouse.catch_up()
    assert warehouse.store.status("warehouse").gap == (kept + 1, first)
    (alarm,) = desk.catalog.alarms.latest()
    assert alarm.kind == "sink-gap" and f"{kept + 1} to {first}" in alarm.message
    assert warehouse.store.lowest_answer() == first


def test_a_table_keeps_its_types_when_no_edge_says_them_any_more(desk: Desk, warehouse: Warehouse) -> None:
    query = desk.register(group_by=["distance"], measures={"n": "count()", "miles": "sum(distance)"})
    desk.ship(query, "jfk", T0, {"distance": pa.array([1 << 60, 100, 100])})
    warehouse.catch_up()
    desk.catalog.edges.retire(EdgeId("jfk"))
    warehouse.runner.stop()
    warehouse.runner = warehouse.new_runner()
    desk.ship(query, "jfk", T0 + HOUR, {"distance": pa.array([7])})
    warehouse.catch_up()
    assert sorted(warehouse.ask("SELECT distance, n, miles, pg_typeof(miles)::text FROM flights")) == [
        (7, 1, 7, "bigint"),
        (100, 2, 200, "bigint"),
        (1 << 60, 1, 1 << 60, "bigint"),
    ]


def test_a_column_without_values_gets_the_type_of_its_first_one(desk: Desk, warehouse: Warehouse) -> None:
    """As it has other types if the edges are gone when the first answer comes."""
    query = desk.register()
    warehouse.catch_up()
    table = f"flights_v{query.ref.version}"
    warehouse.ask("DROP VIEW flights")
    warehouse.ask(
        f"ALTER TABLE {table} ALTER COLUMN miles TYPE double precision, ALTER COLUMN carrier TYPE jsonb USING NULL"
    )
    warehouse.runner.stop()
    warehouse.runner = warehouse.new_runner()
    warehouse.take(query, "jfk", T0, {"UA": 3})
    assert warehouse.ask("SELECT carrier, miles, pg_typeof(miles)::text FROM flights") == [("UA", 300, "bigint")]


def test_names_of_queries_and_columns_that_the_sink_uses_itself_do_not_clash(desk: Desk, warehouse: Warehouse) -> None:
    measures = {"window_start": "count()", "version": "sum(distance)", "phase": "max(distance)"}
    flights = desk.register(measures=measures)
    twins = [f"flights_v{flights.ref.version}", f"flights_v{flights.ref.version}_", "edgewater_windows"]
    twins.append("q_edgewater_windows")
    queries = [flights, *(desk.register(name=name, measures=measures) for name in twins)]
    for count, query in enumerate(queries, 1):
        desk.report(query, "jfk", T0, {"UA": count})
    warehouse.catch_up()
    warehouse.take(flights, "jfk", T0 + HOUR, {"UA": 1})
    warehouse.store.replay("warehouse", 0)
    warehouse.catch_up()
    v = f"flights_v{flights.ref.version}"
    views = ["flights", f"{v}_", f"{v}__", "q_edgewater_windows", "q_q_edgewater_windows"]
    for count, (view, query) in enumerate(zip(views, queries, strict=True), 1):
        rows = warehouse.ask(f"SELECT answer_window_start, window_start, version, phase, answer_version FROM {view}")
        expected = [(datetime(2013, 1, 1, tzinfo=UTC), count, 100 * count, 100, query.ref.version)]
        assert [row for row in sorted(rows) if row[0].hour == 0] == expected, view


def test_lists_of_texts_with_nul_and_backslashes_arrive(desk: Desk, warehouse: Warehouse) -> None:
    query = desk.register(group_by=[], measures={"top": "top_k(carrier, 3)"})
    desk.ship(query, "jfk", T0, {"carrier": pa.array(["a\0\0b", "a\0\0b", "c\\u0000", "c\\u0000", "c\\u0000"])})
    warehouse.catch_up()
    (top,) = warehouse.ask('SELECT "top.top" FROM flights')[0]
    assert [item["item"] for item in top] == ["c\\u0000", "a\ufffd\ufffdb"]


def test_a_query_that_is_registered_and_answered_between_two_looks_is_not_left_out(
    desk: Desk, warehouse: Warehouse
) -> None:
    warehouse.take(desk.register(), "jfk", T0, {"UA": 3})
    newer = desk.register(name="newer")
    desk.report(newer, "jfk", T0, {"AA": 2})
    while warehouse.runner.step() == 0:  # the clock stands
        pass
    assert warehouse.rows("newer") == warehouse.truth("newer") and len(warehouse.rows("newer")) == 1


def test_a_gap_is_stated_if_answers_are_deleted_just_before_they_are_read(desk: Desk, warehouse: Warehouse) -> None:
    query = desk.register(lateness="0s")
    warehouse.take(query, "jfk", T0, {"UA": 3})
    first = desk.results.last_answer_id() + 1
    for hour in (1, 2):
        desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 1})
    last = desk.results.last_answer_id()
    assert desk.results.trim(desk.now + 1) > 0
    desk.report(query, "jfk", T0 + 3 * HOUR, {"UA": 1})
    while warehouse.runner.step() == 0:  # the clock stands: no report before the page is read
        pass
    assert warehouse.store.status("warehouse").gap == (first, last)
    kinds = [(a.kind, a.message) for a in desk.catalog.alarms.latest()]
    assert [kind for kind, _ in kinds] == ["sink-gap"] and f"{first} to {last}" in kinds[0][1]


def test_views_of_a_user_on_the_view_stay_when_a_version_is_added(desk: Desk, warehouse: Warehouse) -> None:
    query = desk.register()
    warehouse.take(query, "jfk", T0, {"UA": 3})
    warehouse.ask("CREATE VIEW of_user AS SELECT carrier, n FROM flights")
    desk.catalog.queries.delete("flights", desk.now)
    newer = desk.register(measures={"far": "max(distance)", "n": "count()"})
    warehouse.take(newer, "jfk", T0 + HOUR, {"AA": 2})
    assert sorted(warehouse.ask("SELECT * FROM of_user")) == [("AA", 2), ("UA", 3)]


def test_versions_whose_types_differ_have_the_wider_type_in_the_view_and_its_grants_stay(
    desk: Desk, warehouse: Warehouse
) -> None:
    query = desk.register()
    warehouse.take(query, "jfk", T0, {"UA": 3})
    role = f"reader_{warehouse.schema}"
    warehouse.ask(f"CREATE ROLE {role}")
    warehouse.ask(f"GRANT SELECT ON flights TO {role} WITH GRANT OPTION")
    warehouse.ask("GRANT SELECT ON flights TO PUBLIC")
    desk.catalog.queries.delete("flights", desk.now)
    newer = desk.register(measures={"n": "count()", "miles": "mean(distance)"})
    warehouse.take(newer, "jfk", T0 + HOUR, {"AA": 2})
    assert warehouse.ask("SELECT carrier, miles, pg_typeof(miles)::text FROM flights ORDER BY version") == [
        ("UA", 300, "numeric"),
        ("AA", 100, "numeric"),
    ]
    grants = warehouse.ask("SELECT relacl::text FROM pg_class WHERE oid = 'flights'::regclass")[0][0]
    assert f"{role}=r*/" in grants and ("{=r/" in grants or ",=r/" in grants)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kind": "postgresql"}, "sinks.warehouse.kind"),
        ({"url": {"env": "NOT_SET_ANYWHERE"}}, "sinks.warehouse.url"),
        ({"url": "mysql:host=top-secret y"}, "sinks.warehouse.url"),
        ({"url": "postgres//user:top-secret@host/db"}, "sinks.warehouse.url"),
        ({"url": "postgresql://user:p@top-secret@host/db"}, "sinks.warehouse.url"),
        ({"url": "postgresql://user:top-secret/x@host/db"}, "sinks.warehouse.url"),
        ({"queries": []}, "sinks.warehouse.queries"),
        ({"scheme": "x"}, "sinks.warehouse.scheme"),
        ({"min_phase": "late"}, "sinks.warehouse.min_phase"),
    ],
)
def test_a_wrong_definition_is_refused_with_its_key_and_without_its_secret(changes: dict[str, Any], field: str) -> None:
    document = {"kind": "postgres", "url": "postgresql://user:top-secret@host/db", **changes}
    with pytest.raises(InvalidConfig) as refused:
        read_definitions({"warehouse": document})
    assert refused.value.field == field and "top-secret" not in refused.value.message
    with pytest.raises(InvalidConfig) as refused:
        read_definitions({"warehouse": document, "lake": {"kind": "parquet", "pth": "/x"}})
    fields = [fault.partition(":")[0] for fault in refused.value.faults()]
    assert fields == [field, "sinks.lake.pth", "sinks.lake.path"] and "top-secret" not in refused.value.message


def test_a_query_whose_columns_no_edge_says_gets_exact_columns(desk: Desk, warehouse: Warehouse) -> None:
    desk.catalog.edges.retire(EdgeId("jfk"))
    query = desk.register(measures={"n": "count()", "far": "max(distance)"})
    warehouse.catch_up()
    assert warehouse.ask("SELECT to_regclass(%s)::text", f"flights_v{query.ref.version}") == [(None,)]
    warehouse.take(query, "jfk", T0, {"UA": 3})
    found = warehouse.ask("SELECT carrier, far, pg_typeof(far)::text, pg_typeof(n)::text FROM flights")
    assert found == [("UA", 100, "bigint", "bigint")]
