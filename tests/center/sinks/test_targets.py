"""What targets remember: whose answers they have, how far, and which query they refuse. On the real systems."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import confluent_kafka
import deltalake
import psycopg
import pytest
from pyiceberg.catalog import load_catalog
from sqlalchemy import event, update

from center.sinks import SinkContext, SinkRunner, SinkStore, read_definition
from center.sinks.lake import MARK
from center.sinks.store import sinks
from edgewater.base.errors import StorageError
from edgewater.base.timestamps import rfc3339
from edgewater.model.registered_query import RegisteredQuery
from tests.cells import at_night
from tests.center.api.conftest import HOUR, T0, Desk
from tests.center.sinks.alert_receivers import SeriesReceiver
from tests.center.sinks.systems import SYSTEMS, Delta, Iceberg, Kafka, Parquet, Postgres, System
from tests.insides import engine_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyiceberg.*", "ignore::UserWarning:pyiceberg.*"),
]


class Series(System):
    """A receiver of remote write."""

    def __init__(self, receiver: SeriesReceiver) -> None:
        self.receiver = receiver
        self.document = {"kind": "remote_write", "url": receiver.url, "begin": "beginning"}

    def rows(self, query: str, version: int, key: str) -> Sequence[tuple[Any, ...]]:
        """The samples, at the starts of their windows."""
        return [
            (at - HOUR, dict(series)[key], int(value), 1)
            for series, samples in self.receiver.samples.items()
            if dict(series)["__name__"] == f"{query}_n"
            for at, value in samples.items()
        ]


def made(kind: str, request: pytest.FixtureRequest, path: Path) -> System:
    if kind != "remote_write":
        return SYSTEMS[kind](request, path)
    return Series(request.getfixturevalue("new_series")())


@pytest.fixture(params=[*SYSTEMS, "remote_write"])
def system(request: pytest.FixtureRequest, tmp_path: Path) -> System:
    return made(request.param, request, tmp_path)


@pytest.fixture(params=SYSTEMS)
def table(request: pytest.FixtureRequest, tmp_path: Path) -> System:
    """A target that has its positions itself."""
    return made(request.param, request, tmp_path)


class Center:
    """A center with its own stores, and queries whose windows are final at once."""

    def __init__(self, path: Path, *names: str) -> None:
        path.mkdir()
        self.desk = Desk(path)
        self.store = SinkStore(self.desk.results.engine)
        self.desk.connect("jfk")
        self.queries = {n: self.desk.register(name=n, lateness="0s", measures={"n": "count()"}) for n in names}
        self.truth: dict[str, dict[int, dict[str | None, int]]] = {name: {} for name in names}

    def answers(self, hour: int, n: int = 1, carrier: str = "UA") -> None:
        for name, query in self.queries.items():
            self.desk.report(query, "jfk", T0 + hour * HOUR, {carrier: n})
            self.truth[name][T0 + hour * HOUR] = {carrier: n}

    def runner(self, system: System, name: str = "out", **changes: Any) -> SinkRunner:
        definition = read_definition(name, {**system.document, **changes})
        catalog, results = self.desk.catalog, self.desk.results
        return SinkRunner(definition, catalog, results, self.store, owner="host:1", now_ms=lambda: self.desk.now)

    def state(self, name: str = "out") -> dict[str, Any]:
        return dict(self.desk.get(f"/v1/sinks/{name}").json())


def catch_up(runner: SinkRunner, steps: int = 60) -> None:
    for _ in range(steps):
        if runner.step() > 0:
            return
    raise AssertionError(runner.problem)


def read(system: System, query: RegisteredQuery) -> Mapping[int, Mapping[str | None, int]]:
    return system.read(query.ref.name, query.ref.version, "carrier")


@pytest.fixture
def center(tmp_path: Path) -> Center:
    return Center(tmp_path / "center", "flights", "others")


@pytest.mark.nightly
def test_a_new_center_writes_nothing_to_what_an_old_one_has_written_and_says_so(
    center: Center, table: System, tmp_path: Path
) -> None:
    for hour in range(4):
        center.answers(hour)
    old = center.runner(table)
    catch_up(old)
    old.stop()
    query = center.queries["flights"]
    before = read(table, query)
    new = Center(tmp_path / "new", "flights", "fresh")
    for hour in range(50, 60):
        new.answers(hour, n=7)
    runner = new.runner(table)
    catch_up(runner)
    state = new.state()
    assert state["state"] == "failing" and "flights@1" in state["problem"] and state["behind_answers"] >= 10
    (failing,) = state["queries"]
    assert (failing["query"], failing["behind_answers"]) == ("flights", 10) and failing["failing_since"]
    assert read(table, query) == before
    assert read(table, new.queries["fresh"]) == new.truth["fresh"]
    runner.stop()


@pytest.mark.nightly
def test_a_sink_with_another_name_goes_on_where_the_old_one_stopped(center: Center, system: System) -> None:
    center.answers(0)
    center.answers(1)
    old = center.runner(system, "old")
    catch_up(old)
    old.stop()
    written = messages(system)
    center.answers(2)
    center.answers(3)
    renamed = center.runner(system, "renamed")
    catch_up(renamed)
    assert not renamed.problem and center.store.status("renamed").answers == 4, "two new answers of two queries"
    renamed.stop()
    for name, query in center.queries.items():
        assert read(system, query) == center.truth[name]
    assert messages(system) == 2 * written, "nothing twice"


@pytest.mark.nightly
def test_a_correction_reaches_each_target_once_through_kills(
    center: Center, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = center.queries["flights"]
    center.answers(0)
    center.answers(1)
    runner = center.runner(system)
    catch_up(runner)
    report = center.store.report

    def killed(*given: Any, **changes: Any) -> Any:  # the process ends when the target has the answer
        return sys.exit() if changes["written"]["answers"] else report(*given, **changes)

    for restart in range(3):
        center.desk.report(query, "jfk", T0, {"UA": 2 + restart}, closed=False)
        center.desk.now += 2 * HOUR
        assert center.desk.results.correct(center.desk.now) == 1
        before = center.store.status("out").answers
        with monkeypatch.context() as patched:
            patched.setattr(center.store, "report", killed)
            with pytest.raises(SystemExit):
                catch_up(runner)
        dead, runner = runner, center.runner(system)
        catch_up(runner)
        dead.stop()
        assert not runner.problem and center.store.status("out").answers == before, "nothing is written again"
        assert read(system, query) == center.truth["flights"], "the data of a final answer stay"
        (row,) = [row for row in system.rows("flights", 1, "carrier") if int(row[0]) == T0]
        assert row[-1] == (1 if system.only_final else restart + 2), "only a system that adds rows keeps the first one"
    if isinstance(system, Kafka):
        assert {value["data_of"] for value in system.values("flights", 1) if value["window_start"] == rfc3339(T0)} == {
            1
        }
    runner.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_correction_brings_the_data_of_a_final_answer_that_no_sink_has(
    center: Center, system: System, is_waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, kind = center.queries["flights"], type(system.sink(SinkContext("kit", 1)))
    runner, opens = center.runner(system, begin="now"), kind.open

    def fail(sink: Any, queries: Any) -> Any:
        if queries:
            raise StorageError("the target cannot be used")
        return opens(sink, queries)

    with monkeypatch.context() as patched:
        if is_waiting:
            patched.setattr(kind, "open", fail)
        catch_up(runner)
        for hour in (1, 2):
            center.answers(hour)
    for hour in (2, 1):
        center.desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 7}, closed=False)
        assert center.desk.results.correct(center.desk.now) == 1
    for _ in range(2):  # a query that its target refuses waits
        catch_up(runner)
        center.desk.now += HOUR
    assert not runner.problem and read(system, query) == center.truth["flights"]
    center.desk.report(query, "jfk", T0 + HOUR, {"UA": 9}, closed=False)
    center.desk.now += HOUR
    assert center.desk.results.correct(center.desk.now) == 1
    catch_up(runner)
    runner.stop()
    assert read(system, query) == center.truth["flights"] and center.state()["refused"] == 0


def messages(system: System) -> int:
    """The number of messages of groups in the topic; 0 for other kinds, whose rows `read` counts."""
    return sum("group" in json.loads(key) for key, _ in system.messages()) if isinstance(system, Kafka) else 0


@pytest.mark.parametrize("kind", [*SYSTEMS, "remote_write"])
@pytest.mark.parametrize("begin", ["beginning", "now"])
def test_a_changed_target_begins_as_the_sink_says(
    kind: str, begin: str, center: Center, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    (tmp_path / "two").mkdir()
    before, after = made(kind, request, tmp_path), made(kind, request, tmp_path / "two")
    for hour in range(3):
        center.answers(hour)
    runner = center.runner(before)
    catch_up(runner)
    runner.stop()
    runner = center.runner(after, begin=begin)
    catch_up(runner)
    center.answers(3)
    catch_up(runner)
    query, truth = center.queries["flights"], center.truth["flights"]
    last = {start: row for start, row in truth.items() if start == T0 + 3 * HOUR}
    assert read(after, query) == (truth if begin == "beginning" else last)
    runner.stop()
    back = center.runner(before)
    catch_up(back)
    assert read(before, query) == truth
    back.stop()


class Broken:
    """Makes one query of a target fail, as an operator would do by mistake."""

    def __init__(self, system: System, query: RegisteredQuery) -> None:
        self.system, self.name = system, f"{query.ref.name}_v{query.ref.version}"
        self.restricted = ""

    def breaks(self) -> None:
        if isinstance(self.system, Postgres):
            self._as_owner(
                f"ALTER TABLE {self.system.schema}.{self.name} RENAME COLUMN n TO n_before",
                f"ALTER TABLE {self.system.schema}.{self.name} ADD COLUMN n point NOT NULL DEFAULT '(0,0)'",
            )
        elif isinstance(self.system, Parquet):
            self._swap(self.system.path / self.name)
        elif isinstance(self.system, Delta):
            self._swap(self.system.path / self.name / "_delta_log")
        elif isinstance(self.system, Iceberg):
            self._swap(Path(str(self.system.properties["warehouse"]).removeprefix("file://")) / "edgewater" / self.name)

    def mends(self) -> None:
        if isinstance(self.system, Postgres):
            self._as_owner(
                f"ALTER TABLE {self.system.schema}.{self.name} DROP COLUMN n CASCADE",
                f"ALTER TABLE {self.system.schema}.{self.name} RENAME COLUMN n_before TO n",
            )
        else:
            self.path.unlink()
            shutil.move(f"{self.path}.moved", self.path)

    def _swap(self, path: Path) -> None:
        self.path = path
        shutil.move(path, f"{path}.moved")
        path.write_text("a file in the place of a directory")

    def _as_owner(self, *statements: str) -> None:
        assert isinstance(self.system, Postgres)
        with psycopg.connect(self.system.url) as connection:
            for statement in statements:
                connection.execute(statement)


@pytest.mark.parametrize("at", ["open", "write"])
@pytest.mark.parametrize("kind", ["postgres", "parquet", "delta", "iceberg"])
def test_one_query_that_its_target_refuses_stops_no_other_one_and_recovers(
    kind: str, at: str, center: Center, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("center.sinks.runner.MAX_ANSWERS", 2)  # several pages wait for the query
    system = made(kind, request, tmp_path)
    broken = Broken(system, center.queries["flights"])
    center.answers(0)
    runner = center.runner(system)
    catch_up(runner)
    if at == "open":
        runner.stop()
        runner = center.runner(system)
    broken.breaks()
    for hour in (1, 2, 3):
        center.answers(hour)
    catch_up(runner)
    state = center.state()
    assert state["state"] == "failing" and "flights@1" in state["problem"] and "others" not in state["problem"]
    (failing,) = state["queries"]
    assert (failing["query"], failing["behind_answers"], state["behind_answers"]) == ("flights", 3, 3)
    assert failing["problem"] and failing["failing_since"]
    assert read(system, center.queries["others"]) == center.truth["others"]
    lowest = center.store.lowest_answer()
    assert lowest is not None and lowest < center.desk.results.last_answer_id()
    center.desk.now += 61_000
    runner.step()
    alarms = [alarm for alarm in center.desk.catalog.alarms.latest() if alarm.kind == "sink-failing"]
    assert alarms and "flights@1" in alarms[0].message
    broken.mends()
    center.desk.now += 61_000
    catch_up(runner)
    assert not runner.problem and center.state()["queries"] == [] and center.state()["behind_answers"] == 0
    for name, query in center.queries.items():
        assert read(system, query) == center.truth[name]
    assert not [alarm for alarm in center.desk.catalog.alarms.latest() if alarm.kind == "sink-failing"]
    runner.stop()


def test_a_message_that_is_too_large_is_stated_by_query_and_window_and_stops_nothing(
    center: Center, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    system = made("kafka", request, tmp_path)
    runner = center.runner(system)
    center.answers(0)
    center.desk.report(center.queries["flights"], "jfk", T0 + HOUR, {"x" * 1_200_000: 1, "AA": 2})
    center.answers(2)
    catch_up(runner)
    state = center.state()
    assert (state["state"], state["refused"], state["behind_answers"]) == ("running", 1, 0)
    assert "flights@1" in state["refusal"] and "2013-01-01T01:00:00" in state["refusal"]
    (alarm,) = center.desk.catalog.alarms.latest()
    assert alarm.kind == "sink-refused" and "flights@1" in alarm.message
    expected = {**center.truth["flights"], T0 + HOUR: {"AA": 2}}
    assert read(system, center.queries["flights"]) == expected
    assert read(system, center.queries["others"]) == center.truth["others"]
    runner.stop()


def test_a_process_that_is_killed_between_write_and_report_loses_and_repeats_nothing(
    center: Center, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(SystemExit):
        pass

    center.answers(0)
    runner = center.runner(system)
    catch_up(runner)
    written = messages(system)
    center.answers(1)
    report = SinkStore.report

    def dies(store: SinkStore, *arguments: Any, **named: Any) -> Any:
        if named["written"]["answers"]:
            raise Killed
        return report(store, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(SinkStore, "report", dies)
        with pytest.raises(Killed):
            for _ in range(60):
                runner.step()
    runner._close()  # as the kernel does for a process that has ended
    center.desk.now += 60_000
    center.answers(2)
    again = center.runner(system)
    catch_up(again)
    assert not again.problem
    for name, query in center.queries.items():
        assert read(system, query) == center.truth[name]
    assert messages(system) == 3 * written
    again.stop()


@pytest.mark.parametrize(
    "system", ["parquet", *at_night("postgres", "kafka", "delta", "iceberg", "remote_write")], indirect=True
)
def test_a_copy_of_a_center_that_has_given_fewer_answers_stops_and_says_so(
    center: Center, system: System, tmp_path: Path
) -> None:
    center.answers(0)
    shutil.copytree(tmp_path / "center", tmp_path / "copy")
    for hour in (1, 2, 3):
        center.answers(hour)
    runner = center.runner(system)
    catch_up(runner)
    runner.stop()
    if not isinstance(system, Series):  # the memory of the copy has no position
        copy = Desk(tmp_path / "copy")
        store = SinkStore(copy.results.engine)
        with engine_of(center.store).begin() as connection:
            number = connection.exec_driver_sql("SELECT value FROM result_counters WHERE name = 'center'").scalar_one()
        with engine_of(store).begin() as connection:
            connection.exec_driver_sql("INSERT INTO result_counters VALUES ('center', ?)", (number,))
        definition = read_definition("out", system.document)
        second = SinkRunner(definition, copy.catalog, copy.results, store, owner="b:1", now_ms=lambda: copy.now)
        catch_up(second)
        assert "flights@1" in second.problem and "restored" in second.problem
        second.stop()


@pytest.mark.nightly
def test_hundreds_of_queries_at_rest_are_one_read(center: Center, tmp_path: Path, series: SeriesReceiver) -> None:
    for number in range(100):
        center.desk.register(name=f"q{number}")
    runner = center.runner(Series(series))
    center.answers(0)
    catch_up(runner)
    statements: list[str] = []
    event.listen(center.desk.results.engine, "before_cursor_execute", lambda *a: statements.append(a[2]))
    for _ in range(5):
        assert runner.step() > 0
    assert len(statements) <= 5 * len(["BEGIN", "the newest answer"])
    lowest = center.store.lowest_answer()
    assert lowest == center.desk.results.last_answer_id(), "idle queries make no answer wait"
    runner.stop()


def as_of_03(center: Center, system: System, last: int) -> None:
    """Turns what this release has written into what release 0.3 would have written."""
    old = json.dumps({"answer_id": last, "late": 0})
    with engine_of(center.store).begin() as connection:
        connection.execute(update(sinks).values(is_earlier=-1))
        connection.exec_driver_sql("DELETE FROM result_counters WHERE name = 'center'")
        if isinstance(system, Series):
            connection.exec_driver_sql(f"UPDATE sink_memories SET positions = '', target = '', answer_id = {last}")
    center.store = SinkStore(center.desk.results.engine)
    if isinstance(system, Postgres):
        with psycopg.connect(system.url) as database:
            database.execute(f"DROP TABLE {system.schema}.edgewater_marks")
            positions = f"{system.schema}.edgewater_positions"
            columns = "sink text PRIMARY KEY, answer_id bigint, late bigint, epoch bigint, written_at timestamptz"
            database.execute(f"CREATE TABLE {positions} ({columns})")
            database.execute(f"INSERT INTO {positions} VALUES ('out', {last}, 0, 1, now())")
    elif isinstance(system, Kafka):
        producer = confluent_kafka.Producer({"bootstrap.servers": system.broker.address})
        for name, query in center.queries.items():
            key = json.dumps({"query": name, "version": query.ref.version}, sort_keys=True, separators=(",", ":"))
            producer.produce(f"{system.topic}.positions", key=key, value=None)
        producer.produce(f"{system.topic}.positions", key="out", value=old)
        assert producer.flush(10) == 0
    elif isinstance(system, Parquet):
        for mark in system.path.glob(f"*/{MARK}"):
            mark.unlink()
    elif isinstance(system, Delta):
        for path in list(system.path.iterdir()):
            rows = deltalake.DeltaTable(path).to_pyarrow_table()
            shutil.rmtree(path)
            commit = deltalake.CommitProperties(
                app_transactions=[
                    deltalake.Transaction("edgewater sink out", max(rows.column("answer_id").to_pylist()))
                ]
            )
            deltalake.DeltaTable.create(path, rows.schema, partition_by=["day"])
            deltalake.write_deltalake(path, rows, mode="append", commit_properties=commit)
    elif isinstance(system, Iceberg):
        catalog = load_catalog("edgewater", **system.properties)
        for name in catalog.list_tables("edgewater"):
            rows = catalog.load_table(name).scan().to_arrow()
            catalog.drop_table(name)
            table = catalog.create_table(name, rows.schema)
            table.append(rows, snapshot_properties={"edgewater.out": str(max(rows.column("answer_id").to_pylist()))})


def test_marks_of_release_03_go_on_with_their_center_and_stop_another_one(
    center: Center, system: System, tmp_path: Path
) -> None:
    for hour in range(3):
        center.answers(hour)
    runner = center.runner(system)
    catch_up(runner)
    runner.stop()
    written = messages(system)
    as_of_03(center, system, center.desk.results.last_answer_id())
    if not isinstance(system, Series):
        new = Center(tmp_path / "new", "flights")
        new.answers(70)
        other = new.runner(system)
        catch_up(other)
        assert "flights@1" in other.problem and "0.3" in other.problem
        other.stop()
    for hour in (3, 4, 5):
        center.answers(hour)
    runner = center.runner(system)
    catch_up(runner)
    assert not runner.problem and center.store.status("out").answers == 12, "each answer of each query once"
    for name, query in center.queries.items():
        assert read(system, query) == center.truth[name]
    assert messages(system) == 2 * written
    runner.stop()
    again = center.runner(system)
    center.answers(6)
    catch_up(again)
    assert not again.problem and center.store.status("out").answers == 14
    again.stop()
