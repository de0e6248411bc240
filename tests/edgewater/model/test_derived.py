"""Derived measures of a query: what they may read, their canonical form, and what edges get."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from edgewater.base.errors import InvalidQuery
from edgewater.model.query import MAX_MEASURES, QuerySpec
from edgewater.model.sql import CreateQuery, parse_statement, to_sql
from tests.query_specs import query_spec
from tests.refusals import refused

COUNTS = {"requests": "count()", "errors": "count() filter (where status >= 500)"}


def spec(measures: dict[str, object], **parts: Any) -> QuerySpec:
    return query_spec(parts, measures=measures, window={"tumbling": "1m"})


def created(select: str, keys: str = "") -> QuerySpec:
    statement = parse_statement(f"CREATE MATERIALIZED VIEW q AS SELECT {select} FROM s GROUP BY TUMBLE('1m'){keys}")
    assert isinstance(statement, CreateQuery)
    return statement.spec()


@pytest.mark.parametrize(
    ("measures", "shipped"),
    [
        ({**COUNTS, "rate": "errors / requests"}, ["requests", "errors"]),
        ({"rate": "100 * (errors / requests)", **COUNTS}, ["requests", "errors"]),
        ({"rate": "count() filter (where status >= 500) / count()"}, ["part_1", "part_2"]),
        ({"requests": "count()", "size": "sum(bytes) / count()"}, ["requests", "part_1"]),
        (
            {"each": "distinct(user) / count()", "fast": "quantile(ms, 0.9) - quantile(ms)"},
            [f"part_{n}" for n in (1, 2, 3, 4)],
        ),
        ({"part_1_lower": "count()", "each": "sum(x) / sum(y) -- each"}, ["part_1_lower", "part_2", "part_3"]),
        ({"part_1": "sum(x)", "end": "count()", "ratio": '-sum(y) / "end" + part_1'}, ["part_1", "end", "part_2"]),
    ],
)
def test_edges_get_the_measures_that_a_derived_one_reads(measures: dict[str, object], shipped: list[str]) -> None:
    query = spec(measures)
    assert [measure.name for measure in query.measures] == shipped
    assert set(query.shown) == set(measures)
    assert QuerySpec.from_mapping(query.to_mapping()) == query
    statement = parse_statement(to_sql(query))
    assert isinstance(statement, CreateQuery) and statement.spec() == query
    at_edges = QuerySpec.from_mapping(query.shipped.to_mapping())
    assert list(at_edges.shown) == shipped and at_edges.derived == ()
    assert {m.name: m.to_text() for m in at_edges.measures} == {m.name: m.to_text() for m in query.measures}


def test_a_part_has_no_name_of_a_column_of_groups() -> None:
    query = spec({"each": "sum(x) / sum(y)"}, group_by=["part_1_upper"])
    assert QuerySpec.from_mapping(query.shipped.to_mapping()).group_by == ("part_1_upper",)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("errors / request", "unknown measure request, did you mean requests?"),
        ("rate / requests", "rate is derived itself"),
        ("top / requests", "no single number"),
        ("sample / requests", "no single number"),
        ("1 / 2", "reads no measure"),
        ("'a' / requests", "'a' is not supported"),
        ("errors / s.requests", "s.requests is not supported"),
        ("count(status > 1) / requests", "count(x) counts each record"),
        ("lower(url) / requests", "unknown function lower"),
        ("errors /", "operand of Div is missing"),
    ],
)
def test_a_wrong_derived_measure_is_refused_with_the_reason(text: str, reason: str) -> None:
    others = {**COUNTS, "rate": "errors / requests", "top": "top_k(url)", "sample": "reservoir(bytes)"}
    with pytest.raises(InvalidQuery) as refused:
        spec({**others, "wrong": text})
    assert refused.value.field == "measures.wrong" and reason in refused.value.message and refused.value.accepted


def test_budgets_and_accuracies_are_about_what_edges_ship() -> None:
    measures: dict[str, object] = {**COUNTS, "rate": "errors / requests"}
    for parts, field in (
        ({"budget": {"error": {"rate": "1%"}}}, "budget.error.rate"),
        ({"accuracy": {"error": "5%", "measure": "rate"}}, "accuracy.measure"),
    ):
        with pytest.raises(InvalidQuery) as caught:
            spec(measures, **parts)
        assert caught.value.field == field and "one for requests and one for errors" in caught.value.accepted
    assert spec(measures, budget={"error": {"requests": 5, "errors": 5}}).error_budget is not None
    with refused(InvalidQuery, "accuracy.measure"):
        spec({"each": "sum(bytes) / count()"}, accuracy={"error": "5%"})


def test_names_and_numbers_of_measures_are_checked_with_the_derived_ones() -> None:
    with refused(InvalidQuery, "measures.rate"):
        spec({**COUNTS, "rate": "errors / requests", "rate_lower": "count()"})
    with refused(InvalidQuery, "measures.host"):
        spec({**COUNTS, "host": "errors / requests"}, group_by=["host"])
    with refused(InvalidQuery, "measures"):
        spec({f"m{n}": f"sum(x{n}) / sum(y{n})" for n in range(MAX_MEASURES // 2)})
    with refused(InvalidQuery, "measures.Rate"):
        spec({**COUNTS, "Rate": "errors / requests"})


def test_an_unknown_column_names_the_derived_measure() -> None:
    with refused(InvalidQuery, "measures.each"):
        spec({"each": "sum(byte) / count()"}).bind({"bytes": pa.int64()})


@pytest.mark.parametrize(
    ("select", "keys", "measures"),
    [
        ("count(*) FILTER (WHERE status >= 500) / count(*) AS rate", "", {"rate"}),
        ("e / n AS rate, count(*) AS n, count(*) FILTER (WHERE status >= 500) AS e", "", {"n", "e", "rate"}),
        ("100.0 * sum(a) / sum(b) AS percent", "", {"percent"}),
        ("distinct(ip) / count(DISTINCT host) AS each", "", {"each"}),
        ("status / 100 AS class, count(*) AS n", ", class", {"n"}),
        ("count(*) AS status, status / 100 AS class", ", class", {"status"}),
    ],
)
def test_select_has_derived_measures(select: str, keys: str, measures: set[str]) -> None:
    query = created(select, keys)
    assert set(query.shown) == measures
    assert bool(query.group_by) == bool(keys)


def test_arithmetic_over_other_columns_is_neither_a_measure_nor_a_key() -> None:
    with refused(InvalidQuery, "measures.size"):
        created("count(*) AS n, bytes / n AS size")
    with refused(InvalidQuery, "measures"):
        created("count(*) AS n, count(x) AS e, e / n")
    query = created("count(*) AS n, count(x) AS e, e / n AS a, sum(x) / n AS b")
    assert query.shown == ("n", "e", "a", "b"), "in the order of SELECT"


def test_an_error_of_a_part_names_the_derived_measure() -> None:
    measures = {"rate": "count(b) / count()"}
    spec = query_spec(measures=measures)
    with pytest.raises(InvalidQuery) as refused:
        for measure in spec.measures:
            measure.require_no_condition(pa.bool_())
    assert refused.value.field == "measures.rate"
