"""Queries in SQL: the same queries as in YAML, and errors that say what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.errors import InvalidQuery
from edgewater.model.calendar_units import CALENDAR_UNITS
from edgewater.model.query import QuerySpec
from edgewater.model.sql import (
    CreateQuery,
    DescribeTable,
    DropQuery,
    SelectRows,
    ShowCreate,
    parse_statement,
    split_statements,
    to_sql,
)
from tests.examples import examples
from tests.written_queries import written_queries


def read(sql: str) -> QuerySpec:
    statement = parse_statement(sql)
    assert isinstance(statement, CreateQuery)
    return statement.spec()


def create(select: str = "count(*) AS n", options: str = "", rest: str = "", window: str = "TUMBLE('1m')") -> str:
    return f"CREATE MATERIALIZED VIEW q {options} AS SELECT {select} FROM s {rest} GROUP BY {window}"


def test_every_written_query_is_the_same_in_sql() -> None:
    for where, spec in written_queries().items():
        assert read(to_sql(spec)) == spec, where


def test_queries_are_collected_from_documents_demonstrations_and_measurements() -> None:
    folders = {where.split("/")[0].split("#")[0] for where in written_queries()}
    assert {"docs", "sim", "bench", "tests"} <= folders
    assert len(written_queries()) > 60


WORDS = (
    "select from where group by order limit with as create view table distinct session tumble hop count sum end case "
    "cast if interval map struct array date time left right filter window rows all only desc show and or not null "
    "true values union explain replace error error_n row first last format rollup cube top into using on"
)
NAMES = st.one_of(
    st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True),
    st.sampled_from(WORDS.split()),
)  # fmt: skip
COLUMNS = st.one_of(NAMES, st.text("aB \"'.-;%", min_size=1, max_size=5).map(lambda text: f"{text}x"))
EXPRESSIONS = (
    "bytes",
    "bytes / 2 + 1",
    "CASE WHEN a > 1 THEN 1 ELSE 0 END",
    "coalesce(a, -1.5)",
    "length(host || 'a, b')",
)
MEASURES = st.one_of(
    st.sampled_from([
        "count()", "distinct(ip)", "distinct(ip, precision=12)", "quantiles(ms, 0.01)", "kmeans((x, y), k=3)",
        "count_min(ip, width=1024)", "top_k(url)", "variance(x)", "kll(x)", "max(x)",
        "sum(bytes) / count()", "1 - count(a) / count()",
    ]),
    st.builds("{}({})".format, st.sampled_from(["sum", "mean", "min"]), st.sampled_from(EXPRESSIONS)),
)  # fmt: skip
KEYS = st.one_of(
    COLUMNS,
    st.builds(
        lambda name, text: {name: text},
        NAMES,
        st.sampled_from(["lower(host)", "hour(event_time_ms AT TIME ZONE 'Europe/Berlin')", "a || 'x'", '"a b"']),
    ),
)
MS = st.integers(1, 10_000_000)
WINDOWS = st.one_of(
    st.builds(lambda size, offset: {"tumbling": f"{size}ms", "offset": f"{offset}ms"}, MS, MS),
    st.builds(
        lambda unit, zone, hours: {"tumbling": f"1 {unit}", "zone": zone, "offset": f"{hours}h"},
        st.sampled_from(sorted(CALENDAR_UNITS)),
        st.sampled_from(["UTC", "Europe/Berlin"]),
        st.integers(-23, 23),
    ),
    st.builds(lambda every, times: {"sliding": f"{every * times}s", "every": f"{every}s"}, MS, st.integers(1, 50)),
    st.builds(lambda gap, times: {"session": f"{gap}s", "max": f"{gap * times}s"}, MS, st.integers(1, 300)),
)
LIMITS = st.one_of(
    st.floats(0, 1e300), st.integers(0, 10**12), st.floats(0, 0.99).map(lambda share: f"{share * 100!r}%")
)


@st.composite
def mappings(draw: Any) -> dict[str, object]:
    measures = draw(st.dictionaries(NAMES, MEASURES, min_size=1, max_size=4))
    limited = st.dictionaries(st.sampled_from(sorted(measures)), LIMITS, min_size=1)
    optional = {
        "where": st.sampled_from(["a > 1", "host = 'it''s' AND NOT b", "a IN (1, 2) OR c IS NULL", "x LIKE 'a%'"]),
        "group_by": st.lists(KEYS, min_size=1, max_size=3),
        "budget": st.one_of(
            st.fixed_dictionaries({"error": limited}, optional={"staleness": st.just("2s")}),
            st.just({"staleness": "1500ms"}),
        ),
        "cache": st.just({"eviction": "lru", "eager": 0.125}),
        "lateness": MS.map(lambda ms: f"{ms}ms"),
        "edges": st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3),
        "since": st.sampled_from(["beginning", "2013-01-01T00:00:00Z"]),
        "seed": st.integers(0, 2**64 - 1),
    }
    required = {"name": NAMES, "from": NAMES, "measures": st.just(measures), "window": WINDOWS}
    return dict(draw(st.fixed_dictionaries(required, optional=optional)))


@given(mappings())
@examples(300)
def test_every_query_is_the_same_in_sql(mapping: dict[str, object]) -> None:
    try:
        spec = QuerySpec.from_mapping(mapping)
    except InvalidQuery:
        return
    assert read(to_sql(spec)) == spec


def test_a_query_has_every_part_in_sql() -> None:
    statement = parse_statement(
        "CREATE OR REPLACE MATERIALIZED VIEW slow WITH (error_n = '1%', staleness = INTERVAL '2' SECOND,"
        " lateness = INTERVAL '1 hour 30 minutes', edges = ARRAY['b', 'a'], cache_eager = 0.5, seed = 7,"
        " since = TIMESTAMP '2013-01-01T00:00:00Z') AS"
        " SELECT host, lower(path) AS route, count(*) AS n, distinct(ip, precision => 12) AS ips"
        " FROM access WHERE status < 400"
        " GROUP BY HOP(event_time_ms, INTERVAL '30 seconds', INTERVAL '5 minutes', INTERVAL '10 seconds'),"
        " host, route, hour(event_time_ms) AS hour;"
    )
    assert isinstance(statement, CreateQuery)
    assert statement.replaces
    assert not statement.explains
    assert statement.spec() == QuerySpec.from_mapping(
        {
            "name": "slow", "from": "access", "where": "status < 400",
            "group_by": ["host", {"route": "lower(path)"}, {"hour": "hour(event_time_ms)"}],
            "measures": {"n": "count()", "ips": "distinct(ip, precision=12)"},
            "window": {"sliding": "5m", "every": "30s", "offset": "10s"},
            "budget": {"error": {"n": "1%"}, "staleness": "2s"}, "lateness": "1h30m", "edges": ["a", "b"],
            "cache": {"eager": 0.5}, "seed": 7, "since": "2013-01-01T00:00:00Z",
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sql", "statement"),
    [
        ("-- all\nshow create q;", ShowCreate("q")),
        ("SHOW CREATE MATERIALIZED VIEW q", ShowCreate("q")),
        ("SHOW CREATE q", ShowCreate("q")),
        ("DROP MATERIALIZED VIEW IF EXISTS q", DropQuery("q", if_exists=True)),
        ("drop materialized view if", DropQuery("if", if_exists=False)),
        ("DESCRIBE stream", DescribeTable("stream", None)),
        ("DESC STREAM s", DescribeTable("s", "stream")),
        ("WITH a AS (SELECT 1) SELECT * FROM a", SelectRows("WITH a AS (SELECT 1) SELECT * FROM a")),
    ],
)
def test_statements(sql: str, statement: object) -> None:
    assert parse_statement(sql) == statement


def test_an_explanation_is_no_registration() -> None:
    statement = parse_statement(f"EXPLAIN {create()}")
    assert isinstance(statement, CreateQuery)
    assert statement.explains


@pytest.mark.parametrize(
    ("sql", "field"),
    [
        ("", "sql"),
        ("-- nothing", "sql"),
        ("'", "sql"),
        ("DELETE FROM q", "sql"),
        ("EXPLAIN SELECT 1", "sql"),
        ("SHOW QUERIES", "sql"),
        ("DROP TABLE q", "sql"),
        ("CREATE TABLE q AS SELECT 1", "sql"),
        ("CREATE MATERIALIZED VIEW IF NOT EXISTS q AS SELECT 1", "sql"),
        ("CREATE MATERIALIZED VIEW Q AS SELECT 1", "name"),
        ("DESCRIBE a; DESCRIBE b", "sql"),
        (f"{create()} HAVING n > 1", "sql"),
        (f"{create()} ORDER BY n", "sql"),
        (f"{create()} LIMIT 1", "sql"),
        (f"{create()} UNION SELECT 1", "sql"),
        (f"{create()} nonsense , x y z", "sql"),
        (create(rest="JOIN t ON a = b"), "sql"),
        (create("DISTINCT host"), "sql"),
        (create("*"), "measures"),
        (create("count(*)"), "measures"),
        (create("host, count(*) AS n"), "measures.host"),
        (create("window_start, count(*) AS n"), "measures.window_start"),
        (create("sum(a) / b AS n"), "measures.n"),
        (create("median(a) AS n"), "measures.n"),
        (create("count(*) AS n, sum(a) AS n"), "measures.n"),
        (create(window="host"), "window"),
        (create(window="TUMBLE('1m'), TUMBLE('1m')"), "window"),
        (create(window="TUMBLE(ts, '1m')"), "window"),
        (create(window="TUMBLE()"), "window"),
        (create(window="TUMBLE(INTERVAL '2 months')"), "window.tumbling"),
        (create(window="HOP('2m', '1m')"), "window.every"),
        (create(window="TUMBLE('1m'), 1"), "group_by"),
        (create(window="TUMBLE('1m'), ROLLUP(a)"), "group_by"),
        (create(options="WITH (stalenes = '2s')"), "stalenes"),
        (create(options="WITH (staleness = '2x')"), "staleness"),
        (create(options="WITH (staleness = '2s', staleness = '3s')"), "staleness"),
        (create(options="WITH (error_m = 1)"), "error_m"),
        (create(options="WITH (error_n = 'x')"), "error_n"),
        (create(options="WITH (accuracy = 5)"), "accuracy"),
        (create(options="WITH (accuracy = '5%', accuracy_range = 'a,b')"), "accuracy_range"),
        (create(options="WITH (lateness = now())"), "lateness"),
        ("CREATE MATERIALIZED VIEW q AS SELECT count(*) AS n FROM (SELECT 1) GROUP BY TUMBLE('1m')", "from"),
        ("CREATE MATERIALIZED VIEW q AS SELECT count(*) AS n FROM a.b GROUP BY TUMBLE('1m')", "from"),
        ("CREATE MATERIALIZED VIEW q AS SELECT count(*) AS n FROM a b GROUP BY TUMBLE('1m')", "from"),
    ],
)
def test_an_error_names_its_place(sql: str, field: str) -> None:
    with pytest.raises(InvalidQuery) as refused:
        statement = parse_statement(sql)
        assert isinstance(statement, CreateQuery)
        statement.spec()
    assert refused.value.field == field
    assert refused.value.accepted


@pytest.mark.parametrize(
    "expression",
    ["(" * 20_000 + "1", "struct(" * 2_000 + "1", "a," * 12_000, "CASE WHEN " * 5_000, "(SELECT " * 3_000, "[" * 9_000],
    ids=lambda text: text[:8],
)
def test_hostile_statements_are_refused_in_bounded_work(expression: str) -> None:
    with pytest.raises(InvalidQuery):
        parse_statement(create(expression))


def test_a_file_is_split_into_its_statements() -> None:
    text = "DESCRIBE q; -- a; b\nSELECT ';' ;;\n/* c; */ DESCRIBE r"
    assert split_statements(text) == ["DESCRIBE q", "-- a; b\nSELECT ';'", "/* c; */ DESCRIBE r"]
    assert split_statements(" ;; ") == []


@pytest.mark.parametrize("column", ["a (b)", 'say "x"', "a || b"])
def test_a_column_whose_name_looks_like_an_expression_is_read_back(column: str) -> None:
    quoted = '"' + column.replace('"', '""') + '"'
    spec = QuerySpec.from_mapping({**SMALL, "group_by": [quoted]})
    assert spec.group_by == (column,)
    assert QuerySpec.from_mapping(spec.to_mapping()) == spec
    assert read(to_sql(spec)) == spec


SMALL = {"name": "q", "from": "s", "measures": {"n": "count()"}, "window": {"tumbling": "1m"}}


def test_an_accuracy_of_sql_may_be_about_several_synopses() -> None:
    options = "WITH (accuracy = '30%', accuracy_measure = 'p90, top')"
    spec = read(create("quantile(x, 0.9) AS p90, top_k(k, 5) AS top", options))
    assert spec.accuracy is not None and spec.accuracy.measures == ("p90", "top")
    assert read(to_sql(spec)) == spec
