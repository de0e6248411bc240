"""Tables that queries look up columns in: their bodies, their versions, the queries that follow, and who may change
them.
"""

from __future__ import annotations

import io
import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from edgewater.base.timestamps import rfc3339
from edgewater.model.lookups import MAX_TABLE_BYTES, MAX_TABLE_ROWS, decode_rows, encode_rows
from edgewater.model.query import QuerySpec
from edgewater.model.sql import parse_statement, to_sql
from tests.center.api.conftest import COLUMNS, HOUR, SPEC, T0
from tests.center.api.test_api_access import PRINCIPALS, bearer
from tests.center.api.test_api_versions import BORDER

PATH = "/v1/tables/airlines"
NAMES = "carrier,name,hub\nUA,United,ORD\nAA,American,DFW\n"
LOOKUP = {**SPEC, "lookup": {"airlines": {"key": "carrier"}}, "group_by": ["name"]}


def put(desk, body, path=PATH, media_type="text/csv", headers=(), **params):
    content = body.encode() if isinstance(body, str) else body
    headers = {**dict(headers), "Content-Type": media_type}
    return desk.ask("PUT", path, content=content, headers=headers, params=params)


def post(desk, spec, **params):
    return desk.ask("POST", "/v1/queries", json=spec, params=params)


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("body", "media_type"),
    [
        ("id,hall,floor,code\na,H1,1,007\nb,,2,8\n", "text/csv"),
        ("\ufeffid,hall,floor,code\r\na,H1,1,007\r\n\r\nb,,2,8\r\n", "text/csv"),
        (
            '{"id": "a", "hall": "H1", "floor": 1, "code": "007"}\n{"id": "b", "floor": 2, "code": "8"}\n',
            "application/x-ndjson; charset=utf-8",
        ),
        (
            parquet(
                pa.table(
                    {
                        "id": pa.array(["a", "b"]).dictionary_encode(),
                        "hall": ["H1", None],
                        "floor": pa.array([1, 2], pa.int16()),
                        "code": pa.array(["007", "8"], pa.large_string()),
                    }
                )
            ),
            "application/vnd.apache.parquet",
        ),
    ],
)
def test_a_table_is_read_from_each_format_and_equal_rows_change_nothing(desk, body, media_type):
    made = put(desk, body, "/v1/tables/halls", media_type)
    assert made.status_code == 201
    again = put(desk, body, "/v1/tables/halls", media_type)
    assert (again.status_code, again.json()["version"]) == (200, 1)
    found = desk.get("/v1/tables/halls").json()
    assert (found["version"], found["key"], found["rows"], found["queries"]) == (1, "id", 2, [])
    types = [(column["name"], column["type"]) for column in found["columns"]]
    assert types == [("id", "string"), ("hall", "string"), ("floor", "int64"), ("code", "string")]
    assert found["data"] == [
        {"id": "a", "hall": "H1", "floor": 1, "code": "007"},
        {"id": "b", "hall": None, "floor": 2, "code": "8"},
    ]
    assert [table["name"] for table in desk.get("/v1/tables").json()["tables"]] == ["halls"]


def test_numbers_of_csv_are_numbers_only_if_all_are_written_as_such(desk):
    put(desk, "id,a,b,c,d,e\n1,1,1.5,true,+1,9223372036854775808\n2,,-2e3,false,2,1\n", "/v1/tables/kinds")
    types = {column["name"]: column["type"] for column in desk.get("/v1/tables/kinds").json()["columns"]}
    assert types == {"id": "int64", "a": "int64", "b": "float64", "c": "bool", "d": "string", "e": "float64"}


@pytest.mark.parametrize("integer", ["9007199254740993", "-9007199254740993", "18446744073709551615", "9" * 400])
def test_an_integer_that_a_float64_cannot_have_is_not_rounded(desk, integer):
    put(desk, f"id,n\n1,{integer}\n2,1.5\n", "/v1/tables/kinds")
    assert [row["n"] for row in desk.get("/v1/tables/kinds").json()["data"]] == [integer, "1.5"]


UNUSABLE = [
    ("id,hall\na,H1\nb,H2\na,H3\n", "text/csv", "key", "rows 1 and 3 have the key 'a'"),
    ("id,hall\na,H1\n,H2\n", "text/csv", "key", "row 2 has no key"),
    ("id,hall\n1.5,H1\n", "text/csv", "key", "float64"),
    (b"id,hall\na,H\xe4lle\n", "text/csv", "body", "line 2 has other bytes"),
    ("id,hall\na,H1,x\n", "text/csv", "body", "row 1"),
    ("id;hall\na;H1\n", "text/csv", "body", "a key and another column"),
    ("id,id\na,b\n", "text/csv", "body", "different names"),
    ("id,hall\n", "text/csv", "body", "at least one row"),
    ("", "text/csv", "body", "a key and another column"),
    ('id,hall\n"a,H1\n', "text/csv", "body", "unexpected end of data"),
    ("id,n\n" + "\n".join(f"{n},1" for n in range(MAX_TABLE_ROWS + 1)), "text/csv", "body", "at most 10000 rows"),
    ('{"id": "a", "n": 1}\n{"id": "b", "n": "2"}\n', "application/x-ndjson", "body", "int, str"),
    ('{"id": "a", "n": [1]}\n', "application/x-ndjson", "body", "list"),
    ('{"id": "a", "n": 1}\n[1]\n', "application/x-ndjson", "body", "line 2"),
    ('{"id": "a", "n": NaN}\n', "application/x-ndjson", "body", "NaN is not JSON"),
    ('{"id": "a", "n": 1, "n": 2}\n', "application/x-ndjson", "body", "duplicate key n"),
    ("[" * 200_000, "application/x-ndjson", "body", "line 1"),
    ('{"id": "\\ud800", "n": 1}\n', "application/x-ndjson", "body", "Unicode"),
    ('{"id": "a", "n": 9223372036854775808}\n', "application/x-ndjson", "body", "64 bits"),
    ("id,n\na,1e999\n", "text/csv", "body", "infinity"),
    (b"PAR1", "application/vnd.apache.parquet", "body", "a Parquet file"),
    (parquet(pa.table({"id": ["a"], "at": [[1]]})), "application/vnd.apache.parquet", "body", "list"),
    (parquet(pa.table({"id": ["a"], "n": ["x" * (3 << 20)]})), "application/vnd.apache.parquet", "body", "bytes"),
]


def test_a_table_that_cannot_be_used_is_refused_with_the_place(desk):
    for body, media_type, field, shown in UNUSABLE:
        refused = put(desk, body, media_type=media_type)
        assert (refused.status_code, refused.json()["field"]) == (422, field), body[:40]
        assert shown in refused.json()["detail"]
    assert desk.get(PATH).status_code == 404


def test_a_table_has_a_limit_of_bytes_a_media_type_and_a_name(desk):
    assert put(desk, b"x" * (MAX_TABLE_BYTES + 1)).status_code == 413
    assert put(desk, NAMES, media_type="application/json").status_code == 415
    assert put(desk, NAMES, "/v1/tables/Air").json()["field"] == "name"
    assert put(desk, NAMES, key="nothing").json()["field"] == "key"
    assert put(desk, NAMES, key="name").json()["key"] == "name"


def test_a_query_has_the_columns_of_a_table_and_edges_get_the_rows(desk):
    desk.connect("jfk")
    put(desk, NAMES)
    checked = post(desk, LOOKUP, dry_run="true").json()
    assert checked["edges"][0]["code"] == "old-release", "jfk has stated none, and 0.3.0 has no lookup"
    assert "name" in [column["name"] for column in checked["columns"]]
    made = post(desk, LOOKUP)
    assert made.status_code == 201
    lookup = made.json()["spec"]["lookup"]["airlines"]
    assert lookup == {
        "key": "carrier", "columns": {"name": "string", "hub": "string"}, "key_type": "string", "version": 1
    }  # fmt: skip
    assert post(desk, LOOKUP).status_code == 200, "the same query again changes nothing"
    assert post(desk, made.json()["spec"]).status_code == 200, "so does the query as it was read"
    (stored,) = desk.catalog.queries.all()
    assert parse_statement(to_sql(stored.spec)).spec() == stored.spec
    (delivered,) = desk.catalog.tables.with_rows([stored])
    sent = QuerySpec.from_mapping(delivered.spec.shipped.to_mapping())
    assert decode_rows(sent.lookups[0].rows).num_rows == 2
    batch = pa.RecordBatch.from_pydict(
        {**{name: pa.nulls(3, kind) for name, kind in COLUMNS.items()}, "carrier": ["AA", "ZZ", None]}
    )
    assert sent.bind(COLUMNS).joined(batch).column("name").to_pylist() == ["American", None, None]
    assert desk.get("/v1/queries/flights").json()["versions"][0]["tables"] == {"airlines": 1}


UNFIT = [
    ({"airports": {"key": "carrier"}}, ["name"], "lookup"),
    ({"airlines": {"key": "tail"}}, ["name"], "lookup.airlines.key"),
    ({"airlines": {"key": {"tail": "carrier"}}}, ["name"], "lookup.airlines.key"),
    ({"airlines": {"key": {"dep_delay": "carrier"}}}, ["name"], "lookup.airlines.key"),
    ({"airlines": {"key": {"distance": "carrier"}}}, ["name"], "lookup.airlines.key"),
    ({"airlines": {"key": ["carrier"]}}, ["name"], "lookup.airlines.key"),
    ({"airlines": {"key": "carrier", "columns": ["city"]}}, ["city"], "lookup.airlines.columns"),
    ({"airlines": {"key": "carrier", "columns": {"name": "int64"}}}, ["name"], "lookup.airlines.columns.name"),
    ({"airlines": {"key": "carrier", "columns": []}}, ["name"], "lookup.airlines.columns"),
    ({"airlines": {"key": "carrier", "version": 7}}, ["name"], "lookup.airlines.version"),
    ({"airlines": {"key": "carrier", "rows": "eJw="}}, ["name"], "lookup.airlines.rows"),
    ({"airlines": {"key": "carrier", "file": "a.csv"}}, ["name"], "lookup.airlines.file"),
    ({"airlines": {"key": "carrier", "columns": ["hub"]}}, ["name"], "group_by.0"),
    ([], ["name"], "lookup"),
    ({"distances": {"key": {"carrier": "id"}}}, ["id"], "lookup.distances.columns"),
]


def test_a_lookup_that_does_not_fit_is_refused_with_its_field(desk):
    desk.connect("jfk")
    put(desk, NAMES)
    put(desk, "id,distance\nUA,1\n", "/v1/tables/distances")
    for lookup, group_by, field in UNFIT:
        refused = post(desk, {**LOOKUP, "lookup": lookup, "group_by": group_by})
        assert (refused.status_code, refused.json()["field"]) == (422, field), lookup


def test_a_new_version_of_a_table_makes_new_versions_of_its_queries_from_a_border_on(desk):
    desk.now = T0
    desk.connect("jfk")
    put(desk, NAMES)
    post(desk, LOOKUP)
    post(desk, {**SPEC, "name": "others"})
    changed = put(desk, NAMES.replace("United", "United Airlines"), at=rfc3339(BORDER))
    assert (changed.json()["version"], changed.json()["queries"]) == (2, ["flights"])
    first, second = desk.catalog.queries.versions("flights")
    assert (first.windows.until_ms, second.windows.from_ms) == (BORDER, BORDER)
    old, new = (each.spec.lookups[0] for each in desk.catalog.tables.with_rows([first, second]))
    assert decode_rows(old.rows)["name"].to_pylist() == ["United", "American"]
    assert decode_rows(new.rows)["name"].to_pylist() == ["United Airlines", "American"]
    assert len(desk.catalog.queries.versions("others")) == 1
    assert put(desk, NAMES, at=rfc3339(T0 - HOUR)).json()["field"] == "at"
    assert desk.get(PATH).json()["version"] == 2


@pytest.mark.parametrize("body", ["carrier,hub\nUA,ORD\n", "id,name,hub\nUA,United,ORD\n"])
def test_rows_that_a_query_cannot_use_change_nothing_and_the_query_is_named(desk, body):
    desk.connect("jfk")
    put(desk, NAMES)
    post(desk, LOOKUP)
    refused = put(desk, body)
    assert (refused.status_code, refused.json()["field"]) == (422, "table")
    assert "query flights" in refused.json()["detail"] or "query flights" in refused.json()["accepted"]
    assert desk.get(PATH).json()["version"] == 1
    assert len(desk.catalog.queries.versions("flights")) == 1


def test_a_text_stays_a_text_when_all_values_of_a_new_version_are_numbers(desk):
    desk.connect("jfk")
    put(desk, NAMES)
    post(desk, LOOKUP)
    assert put(desk, "carrier,name,hub\n1,7,8\n").status_code == 201
    (query,) = desk.catalog.tables.with_rows(desk.catalog.queries.versions("flights", 1))
    batch = pa.RecordBatch.from_pydict({"carrier": ["1", "UA"]})
    assert query.spec.bind(COLUMNS).joined(batch).column("name").to_pylist() == ["7", None]


def test_a_table_that_a_query_uses_is_not_deleted_and_a_version_never_comes_again(desk):
    desk.connect("jfk")
    put(desk, NAMES)
    post(desk, LOOKUP)
    refused = desk.ask("DELETE", PATH)
    assert (refused.status_code, "flights" in refused.json()["detail"]) == (409, True)
    assert desk.ask("DELETE", "/v1/queries/flights").status_code == 204
    assert desk.ask("DELETE", PATH).status_code == 204
    assert desk.ask("DELETE", PATH).status_code == 404
    assert put(desk, NAMES).json()["version"] == 2


def test_rows_have_a_limit_over_all_queries(desk, monkeypatch):
    rows = encode_rows(pa.table({"carrier": ["UA", "AA"], "name": ["United", "American"], "hub": ["ORD", "DFW"]}))
    monkeypatch.setattr("center.catalog.table_rows.MAX_DELIVERED_BYTES", len(rows) + 1)
    desk.connect("jfk")
    put(desk, NAMES)
    assert post(desk, LOOKUP).status_code == 201
    refused = post(desk, {**LOOKUP, "name": "second"})
    assert (refused.status_code, "compressed tables" in refused.json()["detail"]) == (409, True)


def test_grants_name_tables_as_they_name_queries(desk):
    app = desk.app(principals=PRINCIPALS)
    desk.connect("jfk")
    desk.catalog.tables.put("hr_names", "carrier", pa.table({"carrier": ["UA"], "name": ["United"]}), desk.now)

    def ask(who, method, path, **request):
        headers = {**bearer(who), **request.pop("headers", {})}
        return desk.ask(method, path, app=app, headers=headers, **request).status_code

    def write(who, path):
        return ask(who, "PUT", path, content=NAMES.encode(), headers={"Content-Type": "text/csv"})

    def register(table):
        spec = {**LOOKUP, "name": "sales_n", "lookup": {table: {"key": "carrier", "columns": ["name"]}}}
        return ask(
            "seller", "POST", "/v1/queries", content=json.dumps(spec), headers={"Content-Type": "application/json"}
        )

    assert [write(who, "/v1/tables/sales_names") for who in ("watcher", "clerk", "seller")] == [403, 403, 201]
    assert [ask(who, "GET", "/v1/tables/hr_names") for who in ("watcher", "seller")] == [200, 404]
    assert write("seller", "/v1/tables/hr_names") == 404
    assert [register("hr_names"), register("sales_names")] == [404, 201]
    assert ask("clerk", "DELETE", "/v1/tables/sales_names") == 403
    assert ask("root", "DELETE", "/v1/tables/sales_names") == 409
    assert ask("seller", "GET", "/v1/tables") == 200
