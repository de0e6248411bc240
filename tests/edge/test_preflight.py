import gzip
import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edge.config import parse_config
from edge.preflight import OK_ADVISED, PreflightReport, check
from edgewater.base.errors import InvalidConfig, InvalidQuery
from edgewater.model.query import QuerySpec
from tests.refusals import refused

NOW_MS = 1_700_000_000_000


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Checks a configuration with one file source over the given files."""

    def run(
        files: dict[str, str | bytes],
        *,
        path: str = "*",
        file: Any = None,
        query: dict[str, Any] | None = None,
        **stream: Any,
    ) -> PreflightReport:
        data = tmp_path / "data"
        data.mkdir(exist_ok=True)
        for name, content in files.items():
            (data / name).write_bytes(content.encode() if isinstance(content, str) else content)
        given = {
            "columns": {"carrier": "string", "distance": "int64"},
            "time": {"column": "t"},
            "sources": [{"file": {"path": str(data / path), "format": "csv", **(file or {})}}],
            **stream,
        }
        config = {"edge": "jfk", "state_dir": str(tmp_path / "state"), "streams": {"flights": given}}
        spec = None if query is None else QuerySpec.from_mapping(query)
        return check(parse_config(config), lambda: NOW_MS, query=spec)

    return run


def rows(*times: int) -> str:
    return "t,carrier,distance\n" + "".join(f"{t},AA,{n}\n" for n, t in enumerate(times))


def test_a_configuration_that_fits_is_ok(run: Any, tmp_path: Path) -> None:
    report = run({"a.csv": rows(NOW_MS, NOW_MS + 5), "b.csv.gz": gzip.compress(rows(NOW_MS + 9).encode())})
    (source,) = report.streams[0].sources
    assert report.ok
    assert (source.files, source.records, source.rejected, source.advice) == (2, 3, (), ())
    assert (source.first_ms, source.last_ms) == (NOW_MS, NOW_MS + 9)
    assert "3 valid records" in report.to_text()
    assert report.to_text().endswith("ok")
    assert not (tmp_path / "state").exists()


def test_the_delivery_of_each_source_is_shown(run: Any) -> None:
    sources = [{"stdin": {}}, {"http": {}}, {"file": {"path": "none.csv", "follow": True}}]
    report = run({}, sources=sources)
    deliveries = [source["delivery"] for source in report.to_json()["streams"]["flights"]]
    assert deliveries == ["at-most-once", "exactly-once", "exactly-once"]
    assert "at-most-once: no record counts twice" in report.to_text()
    (source,) = run({}, sources=[{"http": {"dedupe": "key"}}]).to_json()["streams"]["flights"]
    assert source["delivery"] == "at-least-once"
    mqtt = {"broker": "127.0.0.1:1", "topics": ["a"], "client_id": "c"}
    kafka = {"brokers": ["127.0.0.1:1"], "topic": "t"}
    report = run({}, sources=[{"mqtt": mqtt}, {"kafka": kafka}])
    deliveries = [source["delivery"] for source in report.to_json()["streams"]["flights"]]
    assert deliveries == ["at-least-once", "exactly-once"]


def test_bad_records_are_shown_with_their_reason_and_are_no_problem(run: Any) -> None:
    report = run({"a.csv": rows(NOW_MS) + "17,AA\n"})
    (source,) = report.streams[0].sources
    assert report.ok
    assert [(r.reason, r.count, r.example) for r in source.rejected] == [("malformed", 1, "17,AA")]
    assert "rejected, malformed: 1 record(s); 2 fields; expected 3" in report.to_text()


def test_a_wrong_unit_is_a_problem_with_its_cure(run: Any) -> None:
    report = run({"a.csv": rows(NOW_MS // 1000)})
    assert not report.ok
    assert "looks like seconds; set time.unit: s" in report.to_text()
    assert "problem: every record that was read is rejected" in report.to_text()


def test_a_missing_column_is_a_problem_and_the_other_files_are_still_looked_at(run: Any) -> None:
    report = run({"a.csv": "t,carrier\n", "b.csv": rows(NOW_MS)})
    (source,) = report.streams[0].sources
    assert not report.ok
    assert "missing column" in source.problems[0]
    assert "present: t, carrier" in source.problems[0]
    assert source.records == 1


def test_no_file_is_a_problem_unless_files_are_waited_for(run: Any) -> None:
    assert "no file matches" in run({}).to_text()
    assert not run({}).ok
    assert run({}, file={"follow": True}).ok


@pytest.mark.parametrize("files", [{}, {"a.csv": ""}, {"a.csv": "t,carrier,distance\n"}])
def test_a_path_from_which_nothing_is_read_is_advised(run: Any, files: dict[str, str]) -> None:
    report = run(files, file={"follow": True})
    (source,) = report.streams[0].sources
    assert report.ok and report.to_text().endswith(OK_ADVISED)
    assert "no record was read" in source.advice[0]


def test_a_pattern_that_no_line_matches_is_a_problem(run: Any) -> None:
    pattern = r"(?P<t>\d+) (?P<carrier>\w+)"
    report = run(
        {"a.csv": "AA 5\n"}, file={"format": "regex", "regex": {"pattern": pattern}}, columns={"carrier": "string"}
    )
    assert not report.ok and "every record that was read is rejected" in report.to_text()


def test_a_lookup_without_a_row_for_any_record_and_a_condition_that_none_fulfils_are_advised(
    run: Any, tmp_path: Path
) -> None:
    cities = tmp_path / "cities.csv"
    lookups = [{"file": str(cities), "key": "carrier", "columns": {"city": "string"}}]
    for text, advised in (("carrier,city\nAA,Dallas\n", False), ("carrier,city\naa,Dallas\n", True)):
        cities.write_text(text)
        report = run({"a.csv": rows(NOW_MS, NOW_MS + 1)}, lookups=lookups)
        assert bool(report.streams[0].advice) == advised == ("advice" in report.to_text())
        assert report.to_json()["advice"].keys() == ({"flights"} if advised else set())
    report = run({"a.csv": rows(NOW_MS)}, query={**QUERY, "group_by": [], "where": "distance > 9"})
    assert report.ok and "no record fulfils" in report.to_text() and report.to_text().endswith(OK_ADVISED)


def test_a_truncated_archive_is_shown(run: Any) -> None:
    whole = gzip.compress(rows(*range(NOW_MS, NOW_MS + 1000)).encode())
    report = run({"a.csv.gz": whole[: len(whole) // 2]})
    assert [r.reason for r in report.streams[0].sources[0].rejected] == ["truncated"]


def test_disorder_beyond_the_allowed_is_advised(run: Any) -> None:
    files = {"a.csv": rows(NOW_MS, NOW_MS - 90_000, NOW_MS + 1)}
    (source,) = run(files).streams[0].sources
    assert source.disorder_ms == 90_000
    assert "records arrive up to 90s behind the newest" in source.advice[0]
    assert run(files, disorder="2m").streams[0].sources[0].advice == ()


def test_a_column_that_never_has_a_value_is_advised(run: Any) -> None:
    lines = f'{{"t": {NOW_MS}, "carrier": "AA", "dist": 5}}\n'
    report = run({"a.ndjson": lines}, file={"format": "ndjson"})
    assert "column distance is null in every record" in report.streams[0].sources[0].advice[0]


def test_records_outside_a_replay_are_advised(run: Any) -> None:
    replay = {"speed": 1, "start": "2023-11-14T22:00:00Z"}
    late = run({"a.csv": rows(NOW_MS)}, replay=replay).streams[0].sources[0].advice
    assert late == ("the first record is released 800s after the replay's start",)
    early = run({"a.csv": rows(NOW_MS - 3_600_000)}, replay=replay).streams[0].sources[0].advice
    assert "before replay.start" in early[0]


def test_a_state_folder_that_cannot_be_made_is_a_problem(run: Any, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    report = run({"a.csv": rows(NOW_MS)})
    assert not report.ok
    assert "is not a writable directory" in report.problems[0]


def test_the_report_is_json_too(run: Any) -> None:
    report = json.loads(json.dumps(run({"a.csv": rows(NOW_MS) + "x\n"}).to_json()))
    (source,) = report["streams"]["flights"]
    assert (report["edge"], report["ok"], source["records"]) == ("jfk", True, 1)
    assert source["first_event_time"] == "2023-11-14T22:13:20.000Z"
    assert source["rejected"][0]["reason"] == "malformed"


def test_dates_without_a_time_of_day_are_advised_with_what_is_right(run: Any) -> None:
    lines = "t,at,carrier,distance\n2023-11-13,05:15:00,AA,1\n2023-11-14,22:13:20,AA,2\n"
    report = run({"a.csv": lines}, time={"column": "t", "unit": "iso8601"})
    (source,) = report.streams[0].sources
    (advice,) = source.advice
    assert "time.column t: every event time is a midnight, such as 2023-11-13T00:00:00.000Z" in advice
    assert "time.time_of_day" in advice
    assert report.ok, "whole days are a right window for it"
    assert report.to_text().endswith(OK_ADVISED)
    both = run({"a.csv": lines}, time={"column": "t", "time_of_day": "at", "unit": "iso8601"})
    (source,) = both.streams[0].sources
    assert (source.advice, source.last_ms, both.to_text().splitlines()[-1]) == ((), NOW_MS, "ok")


@pytest.mark.parametrize("kind", ["csv", "ndjson", "parquet"])
def test_every_format_reads_a_date_and_a_time_of_day(run: Any, tmp_path: Path, kind: str) -> None:
    stamp = datetime(2023, 11, 14, 22, 13, 20)
    if kind == "parquet":
        columns = {"t": [stamp.date()], "at": [stamp.time()], "carrier": ["AA"], "distance": [1]}
        pq.write_table(pa.table(columns), tmp_path / "t.parquet")
        content: str | bytes = (tmp_path / "t.parquet").read_bytes()
    elif kind == "csv":
        content = "t,at,carrier,distance\n2023-11-14,22:13:20,AA,1\n"
    else:
        content = '{"t": "2023-11-14", "at": "22:13:20", "carrier": "AA", "distance": 1}\n'
    time = {"column": "t", "time_of_day": "at", "unit": "iso8601"}
    (source,) = run({f"a.{kind}": content}, file={"format": kind}, time=time).streams[0].sources
    assert (source.records, source.first_ms, source.problems) == (1, NOW_MS, ())


def test_a_time_of_day_is_refused_where_it_cannot_be(run: Any, tmp_path: Path) -> None:
    with refused(InvalidConfig, "streams.flights"):
        run({}, time={"column": "t", "time_of_day": "at"})
    with refused(InvalidConfig, "streams.flights"):
        run({}, time={"column": "t", "time_of_day": "t", "unit": "iso8601"})
    pq.write_table(pa.table({"t": [1], "at": ["1"], "carrier": ["AA"], "distance": [1]}), tmp_path / "t.parquet")
    time = {"column": "t", "time_of_day": "at", "unit": "iso8601"}
    content = (tmp_path / "t.parquet").read_bytes()
    (source,) = run({"a.parquet": content}, file={"format": "parquet"}, time=time).streams[0].sources
    assert "column t: 'int64' is not accepted; expected text, or Parquet's own date" in source.problems[0]


def test_access_logs_are_checked_in_rotated_files_too(run: Any) -> None:
    line = '203.0.113.9 - - [14/Nov/2023:22:13:2{} +0000] "GET /a HTTP/1.1" 200 {} "-" "curl"\n'
    log = "".join(line.format(n, 10 * n) for n in range(9))
    report = run(
        {"access.log": log + "oops\n", "access.log.1.gz": gzip.compress(log.encode())},
        file={"format": "combined"}, columns={"path": "string", "status": "int64"}, time={"column": "time"},
    )  # fmt: skip
    (source,) = report.streams[0].sources
    assert report.ok
    assert (source.files, source.records, source.first_ms) == (2, 18, NOW_MS)
    assert [(r.reason, r.count) for r in source.rejected] == [("malformed", 1)]


QUERY = {
    "name": "q", "from": "flights", "where": "distance > 0", "measures": {"n": "count()"}, "window": {"tumbling": "1m"},
    "group_by": ["city", {"even": "distance % 2 = 0"}],
}  # fmt: skip


def test_a_query_is_tried_on_the_records(run: Any, tmp_path: Path) -> None:
    cities = tmp_path / "cities.csv"
    cities.write_text("carrier,city\nAA,Dallas\n")
    lookups = [{"file": str(cities), "key": "carrier", "columns": {"city": "string"}}]
    report = run({"a.csv": rows(*range(NOW_MS, NOW_MS + 6))}, lookups=lookups, query=QUERY)
    found = report.to_json()["query"]
    assert (found["records"], found["counted"], found["groups"]) == (6, 5, 2)
    assert found["largest_groups"] == [
        {"group": {"city": "Dallas", "even": False}, "records": 3},
        {"group": {"city": "Dallas", "even": True}, "records": 2},
    ]
    first = found["examples"][0]
    assert first["columns"] == {"city": "Dallas", "distance": 1} and first["group"]["even"] is False
    assert len(found["examples"]) == 3 and "counts 5 of 6 records" in report.to_text()
    cities.unlink()
    report = run({}, lookups=lookups, query=QUERY)
    assert not report.ok and report.to_json()["query"]["largest_groups"][0]["group"]["city"] is None
    assert run({}, lookups=[], query={**QUERY, "group_by": [], "where": "distance > 9"}).to_json()["query"] == {
        "query": "q", "stream": "flights", "records": 6, "counted": 0, "examples": [], "groups": 0,
        "largest_groups": [],
    }  # fmt: skip


@pytest.mark.parametrize(("changes", "field"), [({"from": "x"}, "from"), ({"where": "speed > 1"}, "where")])
def test_a_query_that_does_not_fit_the_edge_is_refused(run: Any, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidQuery) as caught:
        run({"a.csv": rows(NOW_MS)}, query={**QUERY, "group_by": [], **changes})
    assert caught.value.field == field and caught.value.accepted


def test_the_state_directory_is_looked_at(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "identity.json").write_text('{"incarnation": "i", "format": 99, "release": "9.9.9"}')
    report = run({"a.csv": rows(NOW_MS)})
    assert not report.ok and "9.9.9" in report.problems[0] and "state_dir" in report.problems[0]
    (state / "identity.json").write_text("{")
    assert "is damaged" in run({"a.csv": rows(NOW_MS)}).problems[0]
    (state / "identity.json").unlink()
    usage = type(shutil.disk_usage(tmp_path))(1 << 30, 1 << 30, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    (problem,) = run({"a.csv": rows(NOW_MS)}).problems
    assert "1000 bytes are free; expected at least limits.max_pending_bytes" in problem
    assert list(state.iterdir()) == []


def test_names_that_are_almost_right_are_named(run: Any) -> None:
    report = run({"a.csv": rows(NOW_MS).replace("carrier", "carier")})
    assert "missing column, did you mean carier?" in report.streams[0].sources[0].problems[0]
    query = {"name": "n", "from": "flight", "measures": {"n": "count()"}, "window": {"tumbling": "1h"}}
    with refused(InvalidQuery, "from"):
        run({"a.csv": rows(NOW_MS)}, query=query)
    with refused(InvalidConfig, "streams.flights.columns.distance"):
        run({}, columns={"carrier": "string", "distance": "int"})
