"""Queries and answers through `Center` against a real server."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from edgewater.base.errors import (
    Conflict,
    InvalidConfig,
    InvalidQuery,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    ProtocolError,
    Unauthenticated,
)
from edgewater.client import Center, RequestRefused, Unreachable, WaitTimeout
from edgewater.client.requests import Params, pages
from edgewater.runtime.health import bound_address, listen
from sim.demo.ports import free_address
from tests.cells import at_night
from tests.center.api.conftest import HOUR, SPEC, T0
from tests.certificates import make_certificates
from tests.refusals import refused

START = datetime(2013, 1, 1, tzinfo=UTC)


def test_a_query_is_registered_from_a_mapping_yaml_or_a_file_and_the_same_one_is_no_conflict(desk, tmp_path):
    text = "name: flights\nfrom: flights\nmeasures: {n: count()}\nwindow: {tumbling: 1h}\n"
    (tmp_path / "flights.yaml").write_text(text)
    with desk.served() as url, Center(url) as center:
        query = center.register(text)
        assert (query.name, query.version, query.spec["measures"]) == ("flights", 1, {"n": "count()"})
        assert center.register(tmp_path / "flights.yaml").version == 1
        with pytest.raises(Conflict):
            center.register(SPEC)
        assert center.put(SPEC).version == 2
        assert [q.name for q in center.queries()] == ["flights"]
        center.query("flights").delete()
        with pytest.raises(NotFound):
            center.query("flights")


def test_tables_are_put_from_files_and_rows_and_read_and_deleted(desk, tmp_path):
    (tmp_path / "names.csv").write_text("carrier,name\nUA,United\n")
    desk.connect("jfk")
    with desk.served() as url, Center(url) as center:
        assert center.put_table("names", tmp_path / "names.csv")["version"] == 1
        center.register({**SPEC, "lookup": {"names": {"key": "carrier"}}, "group_by": ["name"]})
        changed = center.put_table("names", [{"name": "United Airlines", "carrier": "UA"}], key="carrier")
        assert (changed["version"], changed["queries"]) == (2, ["flights"])
        assert center.table("names")["data"] == [{"name": "United Airlines", "carrier": "UA"}]
        with refused(InvalidRequest, "rows"):
            center.put_table("names", tmp_path / "names.xlsx")
        assert [table["name"] for table in center.tables()] == ["names"]
        with pytest.raises(Conflict):
            center.delete_table("names")


def test_a_refusal_names_the_field_the_value_and_what_would_be_right(desk, two_hours):
    with desk.served() as url, Center(url) as center:
        with pytest.raises(InvalidQuery) as caught:
            center.register({**SPEC, "name": "x", "window": {"tumbling": "soon"}})
        assert (caught.value.field, caught.value.value) == ("window.tumbling", "soon")
        assert "duration" in caught.value.accepted
        for bad in ("[1, 2]", "a: [", {"from": "flights"}, "name: 7"):
            with pytest.raises(InvalidQuery):
                center.register(bad)
        query = center.query("flights")
        with refused(InvalidRequest, "measure"):
            query.latest(measure="miels")
        with refused(InvalidRequest, "mesure"):
            query.latest(mesure="n")
        with refused(InvalidRequest, "start"):
            query.windows(datetime(2013, 1, 1))
        with refused(InvalidRequest, "start"):
            query.windows("soon")
        with pytest.raises(NotFound):
            query.window(T0 + 5 * HOUR)
        with refused(InvalidRequest, "measure"):
            query.window(START).explain("miels")


def test_an_answer_is_explained_and_a_registration_tried(desk, two_hours):
    with desk.served() as url, Center(url) as center:
        answer = center.query("flights").window(START)
        explained = answer.explain("miles", {"carrier": "UA"})
        assert (explained["measure"], explained["group"], explained["estimate"]) == ("miles", {"carrier": "UA"}, 500)
        assert {e["edge"] for e in explained["edges"]} == {"jfk", "lga"}
        tried = center.dry_run({**SPEC, "name": "tried"})
        assert [(e["edge"], e["accepted"]) for e in tried["edges"]] == [("jfk", True), ("lga", True)]
        border = datetime.fromtimestamp(desk.now / 1000 + 3600, UTC)
        changed = center.dry_run({**SPEC, "lateness": "5m"}, change=True, at=border, version=1)
        assert (changed["registered"], changed["begins"]) == (False, border.isoformat().replace("+00:00", "Z"))
        assert [(q.name, q.version) for q in center.queries()] == [("flights", 1)]


def test_an_answer_has_intervals_by_measure_and_group(desk, two_hours):
    with desk.served() as url, Center(url) as center:
        query = center.query("flights")
        answer = query.window(START)
        assert (answer.phase, answer.revision, answer.completeness, answer.missing) == ("final", 2, 1.0, [])
        assert (answer.start, answer.end) == (START, datetime(2013, 1, 1, 1, tzinfo=UTC))
        assert answer.groups == [{"carrier": "AA"}, {"carrier": "UA"}]
        assert answer.measures == ["n", "miles", "delay"]
        assert answer["n"]["UA"] == 5
        assert answer["miles"][{"carrier": "AA"}] == 100
        assert {group["carrier"]: float(i) for group, i in answer["n"]} == {"AA": 1, "UA": 5}
        assert query.window(START, revision=1).revision == 1
        with refused(InvalidRequest, "group"):
            _ = answer["n"].interval
        with refused(InvalidRequest, "group"):
            _ = answer["n"]["ZZ"]
        with refused(InvalidRequest, "measure"):
            _ = answer["m"]
        one = query.latest(group={"carrier": "DL"}, measure=["n", "delay"])
        assert (one["n"].interval == 4, one.measures) == (True, ["n", "delay"])
        assert query.latest(group={"carrier": ["DL", "UA"]})["n"].values == [4, 5]


@pytest.mark.slow
def test_windows_are_one_table_over_all_pages(two_hours, monkeypatch):
    desk, query = two_hours
    for hour in range(2, 5):
        desk.report_both(query, T0 + hour * HOUR, {"UA": hour})
    monkeypatch.setattr("edgewater.client.requests.PAGE", 2)
    with desk.served() as url, Center(url) as center:
        answers = center.query("flights").windows(START, T0 + 4 * HOUR)
        assert [a.start.hour for a in answers] == [0, 1, 2, 3]
        table = answers.to_arrow()
        assert table.column("n").to_pylist() == [1, 5, 4, 5, 4, 6]
        assert table.column_names[:5] == ["window_start", "window_end", "phase", "revision", "completeness"]
        assert answers[1].to_arrow().equals(table.slice(2, 2))
        assert answers.to_pandas()["n"].tolist() == answers.to_polars()["n"].to_list() == [1, 5, 4, 5, 4, 6]
        assert answers[0].to_pandas()["carrier"].tolist() == answers[0].to_polars()["carrier"].to_list() == ["AA", "UA"]
        assert len(center.query("flights").windows("2030-01-01T00:00:00Z")) == 0
        merged = center.query("flights").windows(every="2h")
        assert [(a.start.hour, a["n"].values) for a in merged] == [(0, [1, 4, 10]), (2, [10]), (4, [8])]
        assert [len(a) for a in center.query("flights").windows(every="day", zone="Asia/Tokyo", measure="n")] == [3]
        filtered = center.query("flights").windows(group={"carrier": "AA"})
        assert [len(a) for a in filtered] == [1, 0, 0, 0, 0]


@pytest.mark.nightly
@pytest.mark.parametrize("windows", [200, *at_night(1000)])  # the next test has the sizes of pages
def test_a_range_of_many_rows_is_a_table_within_a_time_out_that_is_short_for_all_of_them(desk, windows):
    query = desk.register_over("jfk", measures={"n": "count()", "delay": "quantiles(dep_delay)"}, lateness="0s")
    desk.report(query, "jfk", T0, {f"C{i}": 3 for i in range(28)})
    desk.repeat(query, windows)
    with desk.served() as url, Center(url, timeout=4 if windows == 1000 else 30) as center:
        answers = center.query("flights").windows()
        assert len(answers) == windows
        for frame in (answers.to_pandas(), answers.to_polars()):
            assert len(frame) == 28 * windows and frame["n"].sum() == 84 * windows


@pytest.mark.parametrize(("seconds", "limits"), [(0.0, [50, 200, 800, 1000]), (5.0, [50, 10, 2, 1]), (1.0, [50, 50])])
def test_pages_of_a_range_are_as_large_as_the_center_is_fast(seconds, limits):
    now = 0.0
    link = {"Link": '<http://center/v1/queries/flights/windows?cursor=7>; rel="next"'}
    table = pa.table({"n": [1]}).replace_schema_metadata({b"edgewater.answers": b"[{}]"})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    asked: list[int] = []

    def ask(page: Params) -> httpx.Response:
        nonlocal now
        now += seconds
        asked.append(int(dict(page)["limit"]))
        assert dict(page).get("cursor") == ("7" if len(asked) > 1 else None)
        headers = link if len(asked) <= len(limits) else {}
        return httpx.Response(200, headers=headers, content=sink.getvalue().to_pybytes())

    found = pages(ask, lambda: now)
    assert asked[: len(limits)] == limits
    assert [(table.num_rows, len(heads)) for table, heads in found] == [(1, 1)] * (len(limits) + 1)


def test_a_time_out_names_the_argument_that_sets_it():
    listener = listen("127.0.0.1:0", "silent")
    with listener:
        url = f"http://{bound_address(listener)}"
        with Center(url, timeout=0.1) as center, pytest.raises(Unreachable) as late:
            center.queries()
    assert late.value.timeout_s == 0.1 and "timeout=" in str(late.value)


def test_names_that_the_describing_columns_have_may_be_groups_and_measures(desk):
    desk.connect("jfk")
    measures = {"phase": "count()", "contract": "sum(distance)", "completeness": "max(distance)"}
    query = desk.register(measures=measures, window={"tumbling": "1h"}, lateness="0s")
    desk.report(query, "jfk", T0, {"UA": 3})
    with desk.served() as url, Center(url) as center:
        answer = center.query("flights").latest()
        assert answer.measures == list(measures)
        assert [answer[m]["UA"] == v for m, v in zip(measures, (3, 300, 100), strict=True)] == [True] * 3


def test_an_answer_without_groups_and_an_early_one_have_unknown_bounds(desk):
    query = desk.register_over("jfk", "lga", group_by=[], budget={"staleness": "2s"}, measures={"n": "count()"})
    with desk.served() as url, Center(url) as center:
        with pytest.raises(NotFound):
            center.query("flights").latest()
        assert center.query("flights").status()["state"] in ("waiting", "center_not_ready")
        assert center.query("flights").detail()["edges"][0]["edge"] == "jfk"
    assert query.ref.name == "flights"


def test_a_window_is_waited_for_until_it_has_the_phase(two_hours):
    desk, query = two_hours
    third = T0 + 2 * HOUR

    def report() -> None:
        desk.report_both(query, third, {"UA": 1})

    with desk.served() as url, Center(url) as center:
        timer = threading.Timer(0.3, report)
        timer.start()
        answer = center.query("flights").wait(third, "complete", timeout=30)
        with pytest.raises(WaitTimeout, match=r"window 2013-01-01T02:00:00Z: complete after 0\.05 s, not final"):
            center.query("flights").wait(third, timeout=0.05)
        with pytest.raises(WaitTimeout, match="no answer"):
            center.query("flights").wait(T0 + 9 * HOUR, timeout=0)
        timer.join()
    assert (answer.phase, answer.start.hour) == ("complete", 2)


@pytest.mark.slow
def test_a_query_and_the_lists_of_the_center_are_read_until_it_is_deleted(desk, two_hours):
    with desk.served() as url, Center(url) as center:
        query = center.register(SPEC)
        assert query.latest()["n"]["DL"] == 4
        assert [a.start.hour for a in query.windows()] == [0, 1]
        assert {e["edge"] for e in center.edges()} == {"jfk", "lga"}
        assert center.streams()[0]["stream"] == "flights"
        assert query.status()["query"] == query.detail()["name"] == "flights"
        assert center.get("/v1/alarms")["alarms"] == []
        query.delete()
        with pytest.raises(NotFound):
            query.latest()


def test_a_token_comes_from_the_argument_the_environment_or_a_file_and_is_never_shown(two_hours, monkeypatch, tmp_path):
    desk, _ = two_hours
    for name in ("EDGEWATER_TOKEN", "EDGEWATER_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    principals = {"reader": {"token": "right", "role": "reader"}}
    with desk.served(principals=principals) as url:
        with Center(url) as center, pytest.raises(Unauthenticated):
            center.queries()
        with Center(url, token="right") as center:
            assert "right" not in repr(center)
            assert center.queries()
            with pytest.raises(RequestRefused) as caught:
                center.register({**SPEC, "name": "other"})
            assert (caught.value.code, caught.value.status) == ("forbidden", 403)
        monkeypatch.setenv("EDGEWATER_TOKEN", "right")
        monkeypatch.setenv("EDGEWATER_URL", url)
        with Center() as center:
            assert center.queries()
        monkeypatch.delenv("EDGEWATER_TOKEN")
        (tmp_path / "token").write_text("right\n")
        monkeypatch.setenv("EDGEWATER_TOKEN_FILE", str(tmp_path / "token"))
        with Center() as center:
            assert center.queries()
    monkeypatch.setenv("EDGEWATER_TOKEN_FILE", str(tmp_path / "none"))
    with refused(InvalidConfig, "EDGEWATER_TOKEN_FILE"):
        Center()
    with pytest.raises(InvalidConfig) as bad:
        Center(token="two words")
    assert "two words" not in str(bad.value)


@pytest.mark.parametrize("url", ["127.0.0.1", "localhost:port", "ftp://x", "http://", "nothing"])
def test_an_address_that_is_none_is_refused(url):
    with refused(InvalidConfig, "url"):
        Center(url)


def test_a_proxy_is_taken_from_no_variable_but_the_one_of_the_client(desk, two_hours, monkeypatch) -> None:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with desk.served() as url:
        with Center(url) as center:
            assert [query.name for query in center.queries()] == ["flights"]
        monkeypatch.setenv("EDGEWATER_PROXY", "http://127.0.0.1:9")
        with Center(url) as center, pytest.raises(Unreachable) as failed:
            center.queries()
        assert "127.0.0.1:9" in failed.value.message
        monkeypatch.setenv("EDGEWATER_PROXY", "nonsense")
        with refused(InvalidConfig, "EDGEWATER_PROXY"):
            Center(url)


def test_an_address_without_a_scheme_is_one_of_http() -> None:
    with Center("127.0.0.1:7480") as center, Center("localhost:7480", token="t") as other:
        assert (center.url, other.url) == ("http://127.0.0.1:7480", "http://localhost:7480")


def test_a_token_leaves_the_machine_without_tls_only_where_the_address_says_http() -> None:
    with refused(InvalidConfig, "url", "center.example:7480"):
        Center("center.example:7480", token="t")
    with Center("http://center.example:7480", token="t") as center:
        assert center.url == "http://center.example:7480"


def test_a_center_that_is_not_there_and_a_server_that_is_none_are_told_apart(tmp_path):
    with Center(f"http://{free_address()}") as center, pytest.raises(Unreachable):
        center.queries()
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "queries").write_text("<html>a page</html>")
    with _file_server(tmp_path) as url, Center(url) as center:
        with pytest.raises(ProtocolError):
            center.queries()
        with pytest.raises(ProtocolError):
            center.query("flights")


class _file_server:  # noqa: N801
    """Python's own web server over a directory."""

    def __init__(self, directory: Path) -> None:
        from functools import partial
        from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

        class Quiet(SimpleHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(directory)))
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *args: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def test_over_tls_the_certificate_authority_is_an_argument(desk, two_hours, tmp_path, monkeypatch):
    monkeypatch.delenv("EDGEWATER_CA", raising=False)
    make_certificates(tmp_path, {"center": "IP:127.0.0.1"})
    tls = {"cert": str(tmp_path / "center.pem"), "key": str(tmp_path / "center.key")}
    with desk.served(tls=tls) as url:
        with Center(url, ca=tmp_path / "ca.pem") as center:
            assert center.query("flights").latest()["n"]["DL"] == 4
        with Center(url) as center, pytest.raises(Unreachable):
            center.queries()
    with refused(InvalidConfig, "ca"):
        Center(url, ca=tmp_path / "none.pem")


@pytest.mark.slow
def test_windows_are_read_over_the_border_of_two_versions(desk):
    desk.now = T0
    desk.register_over("jfk", lateness="0s")
    with desk.served() as url, Center(url) as center:
        spec = {**SPEC, "group_by": [], "measures": {"n": "count()"}, "lateness": "0s"}
        query = center.put(spec, at=T0 + HOUR, version=1)
        assert (query.version, query.registered["begins"]) == (2, "2013-01-01T01:00:00Z")
        with pytest.raises(PreconditionFailed):
            center.put(SPEC, version=1)
        for version in desk.catalog.queries.versions("flights"):
            desk.ledger_knows(version)
            desk.report(version, "jfk", version.windows.from_ms if version.ref.version == 2 else T0, {"UA": 3})
        answers = query.windows()
        assert [(a.version, a.groups, a["n"].values) for a in answers] == [
            (1, [{"carrier": "UA"}], [3]),
            (2, [{}], [3]),
        ]
        assert answers.to_arrow().column("version").to_pylist() == [1, 2]
        assert query.latest().version == 2
