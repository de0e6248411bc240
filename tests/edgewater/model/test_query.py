from __future__ import annotations

import pickle
import re
from typing import Any

import pyarrow as pa
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.errors import InvalidQuery
from edgewater.base.streams import MIN_TIME_MS
from edgewater.model.measure import Measure
from edgewater.model.query import CombinedBudget, ErrorBudget, QuerySpec, StalenessBudget
from edgewater.model.windows import SlidingWindow
from tests.refusals import refused

COLUMNS = {"carrier": pa.string(), "bytes": pa.int64(), "delay": pa.float64(), "ok": pa.bool_()}


def mapping(**changes: Any) -> dict[str, Any]:
    given_ = {"name": "q", "from": "flights", "measures": {"n": "count()"}, "window": {"tumbling": "1h"}}
    given_.update({k.rstrip("_"): v for k, v in changes.items()})
    return {k: v for k, v in given_.items() if v is not ...}


def spec(**changes: Any) -> QuerySpec:
    return QuerySpec.from_mapping(mapping(**changes))


def refuses(field: str, **changes: Any) -> InvalidQuery:
    """Returns the error of a query with these changes, which names the field and says what would be right."""
    with pytest.raises(InvalidQuery) as caught:
        spec(**changes)
    assert caught.value.field == field and caught.value.accepted
    return caught.value


YAML = """
name: bytes_by_url
from: downloads
where: status < 400 AND url NOT LIKE '/internal/%'
group_by: [provider, country, url]
measures:
  bytes: sum(bytes)
  clients: distinct(client_ip, precision=12)
  latency: quantiles(latency_ms)
  largest: max(CASE WHEN ok THEN bytes END)
  records: count()
window: {sliding: 5m, every: 30s, offset: 10s}
budget: {staleness: 2s}
lateness: 10m
edges: [lga, jfk, jfk]
seed: 4
"""


@pytest.mark.parametrize(
    ("given", "canonical", "columns"),
    [
        (["carrier"], ["carrier"], ["carrier"]),
        ("carrier", ["carrier"], ["carrier"]),
        (["http.route", "a-b"], ["http.route", "a-b"], ["http.route", "a-b"]),
        (['"a b"'], ["a b"], ["a b"]),
        ([{"carrier": "carrier"}], ["carrier"], ["carrier"]),
        ([{"line": "carrier"}], [{"line": "carrier"}], ["carrier"]),
        (["lower(carrier)"], [{"lower_carrier": "LOWER(carrier)"}], ["carrier"]),
        ([{"carrier": "lower(carrier)"}], [{"carrier": "LOWER(carrier)"}], ["carrier"]),
        (
            ["ok", {"route": "carrier || '-' || bytes"}],
            ["ok", {"route": "carrier || '-' || bytes"}],
            ["ok", "carrier", "bytes"],
        ),
    ],
)
def test_keys_are_columns_or_expressions(given: Any, canonical: list[Any], columns: list[str]) -> None:
    query = spec(group_by=given)
    assert query.to_mapping()["group_by"] == canonical and sorted(query.columns) == sorted(columns)
    assert spec(group_by=canonical) == query
    assert query.group_by == tuple(key if isinstance(key, str) else next(iter(key)) for key in canonical)


def test_the_type_of_a_computed_key_is_that_of_its_expression() -> None:
    keys = [{"route": "carrier || bytes"}, "hour(bytes)", {"slow": "delay > 5"}, {"bin": "cast(delay / 10 as bigint)"}]
    bound = spec(group_by=[*keys, "ok"]).bind(COLUMNS)
    assert bound.group_types == (pa.string(), pa.int64(), pa.bool_(), pa.int64(), pa.bool_())
    batch = pa.record_batch(
        {"carrier": ["UA", None], "bytes": [3_600_000, 7], "delay": [12.0, 5.0], "ok": [True, None]}
    )
    assert [key.to_pylist() for key in bound.key_arrays(batch)] == [
        ["UA3600000", None], [1, 0], [True, False], [1, 0], [True, None],
    ]  # fmt: skip
    for expression, field in (("lower(bytes)", "group_by.0"), ("NULL", "group_by.0"), ("lower(none)", "group_by.0")):
        with refused(InvalidQuery, field):
            spec(group_by=[{"x": expression}]).bind(COLUMNS)


def test_a_query_is_read_from_yaml() -> None:
    query = QuerySpec.from_yaml(YAML)
    assert (query.name, query.stream, query.group_by) == ("bytes_by_url", "downloads", ("provider", "country", "url"))
    assert query.window == SlidingWindow("5m", "30s", "10s")
    assert query.budget == StalenessBudget(2000) and query.lateness_ms == 600_000
    assert query.edges == ("jfk", "lga") and query.seed == 4
    assert [m.name for m in query.measures] == ["bytes", "clients", "latency", "largest", "records"]
    assert query.measures[1].parameters == (("precision", 12),)
    assert query.columns == [
        "provider", "country", "url", "status", "bytes", "client_ip", "latency_ms", "ok"]  # fmt: skip


def test_defaults() -> None:
    query = spec()
    assert (query.where, query.group_by, query.budget, query.lateness_ms, query.edges, query.seed) == (
        None, (), None, 0, None, None)  # fmt: skip
    assert spec(group_by="carrier").group_by == ("carrier",)
    assert spec(lateness=None, edges=None, budget=None, group_by=None, where=None) == query


def test_the_canonical_mapping_is_read_back_and_omits_defaults() -> None:
    query = QuerySpec.from_yaml(YAML)
    canonical = query.to_mapping()
    assert QuerySpec.from_mapping(canonical) == query
    assert QuerySpec.from_mapping(canonical).to_mapping() == canonical
    assert spec().to_mapping() == mapping()
    budget = spec(measures={"b": "sum(bytes)"}, budget={"error": {"b": "1MB"}})
    assert (
        budget.to_mapping()["budget"] == {"error": {"b": 1e6}} and QuerySpec.from_mapping(budget.to_mapping()) == budget
    )


MEASURES = [
    "count()",
    "sum(bytes + 1)",
    "avg(delay)",
    "distinct(carrier, 9)",
    "quantiles(delay, accuracy=0.05)",
    "min(-delay)",
    "max(abs(bytes))",
    "count(DISTINCT carrier)",
    "var_samp(bytes)",
]


@given(
    st.lists(st.sampled_from(["carrier", "ok", "delay"]), unique=True),
    st.lists(st.sampled_from(MEASURES), min_size=1, max_size=5),
    st.none() | st.sampled_from(["bytes > 0", "carrier IN ('AA', 'it''s')", "NOT ok", "delay IS NOT NULL OR ok"]),
    st.integers(0, 10**7),
    st.integers(1, 256),
)
def test_any_spec_is_read_back_from_its_mapping(
    groups: list[str], measures: list[str], where: str | None, lateness: int, seed: int
) -> None:
    query = spec(group_by=groups or None, measures={f"m{i}": m for i, m in enumerate(measures)}, where=where,
                 lateness=f"{lateness}ms", seed=seed)  # fmt: skip
    again = QuerySpec.from_mapping(query.to_mapping())
    assert again == query
    query.bind(COLUMNS)


# Reading


@pytest.mark.parametrize("name", ["", "Q", "1q", "q-1", "a" * 64, "ä", None, 5, ["q"]])
def test_names_are_identifiers(name: Any) -> None:
    refuses("name", name=name)
    refuses("from", from_=name)
    if isinstance(name, str):
        refuses(f"measures.{name}", measures={name: "count()"})


@pytest.mark.parametrize("key", ["name", "from", "measures", "window"])
def test_missing_keys_are_named(key: str) -> None:
    refuses(key, **{f"{key}_": ...})


def test_unknown_keys_and_other_shapes_are_refused() -> None:
    refuses("groupby", groupby=["a"])
    for given_ in (None, [], "text", 5):
        with refused(InvalidQuery, ""):
            QuerySpec.from_mapping(given_)
    with refused(InvalidQuery, ""):
        QuerySpec.from_yaml("name: [unclosed")
    with refused(InvalidQuery, ""):
        QuerySpec.from_yaml("")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 5_000,
        "lateness: 2013-02-30",
        "name: a\nname: b",
        "measures: {n: count(), n: sum(x)}",
        "? [a]\n: b",
        "seed: " + "9" * 5_000,
        "seed: !!int ''",
        "name: !!timestamp soon",
    ],
)
def test_invalid_yaml_and_duplicate_keys_are_refused(text: str) -> None:
    with refused(InvalidQuery, ""):
        QuerySpec.from_yaml(text)


def test_text_and_numbers_that_cannot_be_serialised_are_refused() -> None:
    refuses("where", where="carrier = '\ud800'")
    refuses("name", name="\ud800")
    refuses("budget.error", budget={"error": {"\ud800": 5}})
    refuses("edges.1", edges=["jfk", "\udfff"])
    refuses("seed", seed=10**5_000)
    recursive: dict[str, Any] = mapping()
    recursive["edges"] = [recursive]
    with refused(InvalidQuery, "edges"):
        QuerySpec.from_mapping(recursive)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("measures", {"measures": {}}),
        ("cache.eager", {"cache": {"eager": 10**400}}),
        ("measures.h.hi", {"measures": {"h": "histogram(x, lo=0, hi=" + "9" * 400 + ")"}}),
        ("budget.error.n", {"budget": {"error": {"n": 10**400}}}),
        ("budget.error.n", {"budget": {"error": {"n": "9" * 400}}}),
        ("measures", {"measures": ["count()"]}),
        ("measures", {"measures": {f"m{i}": "count()" for i in range(33)}}),
        ("where", {"where": 5}),
        ("where", {"where": "status <"}),
        ("lateness", {"lateness": 5}),
        ("lateness", {"lateness": "-5s"}),
        ("edges", {"edges": []}),
        ("edges", {"edges": "jfk"}),
        ("edges", {"edges": ["jfk", 5]}),
        ("group_by.0", {"group_by": 5}),
        ("group_by.1", {"group_by": ["a", ""]}),
        ("group_by.1", {"group_by": ["a", "a"]}),
        ("group_by.1", {"group_by": ["a", {"a": "lower(b)"}]}),
        ("group_by.0", {"group_by": [{"A": "lower(b)"}]}),
        ("group_by.0.a", {"group_by": [{"a": 5}]}),
        ("group_by.0", {"group_by": [{"a": "b", "c": "d"}]}),
        ("group_by.0.a", {"group_by": [{"a": "lower("}]}),
        ("group_by.0", {"group_by": ["nothing(a)"]}),
        ("group_by.0", {"group_by": ["lower(a) || '" + 70 * "x" + "'"]}),
        ("measures.a", {"group_by": [{"a": "lower(b)"}], "measures": {"a": "count()"}}),
        ("group_by", {"group_by": [f"c{i}" for i in range(17)]}),
        ("window.count", {"window": {"count": 1000}}),
        ("budget", {"budget": {}}),
        ("budget.staleness", {"budget": {"staleness": "0s", "error": {"n": 1}}}),
        ("budget.error", {"budget": {"staleness": "2s", "error": {}}}),
        ("budget.error.m", {"budget": {"staleness": "2s", "error": {"m": 1}}}),
        ("budget.error.n", {"budget": {"staleness": "2s", "error": {"n": 1}}, "accuracy": {"error": "5%"}}),
        ("budget", {"budget": "2s"}),
        ("budget.megabytes", {"budget": {"megabytes": 5}}),
        ("budget.bytes", {"budget": {"bytes": 5}}),
        ("budget.bytes.per", {"budget": {"bytes": "50MB"}}),
        ("budget.bytes.per", {"budget": {"bytes": "50MB per week"}}),
        ("budget.bytes.per", {"budget": {"bytes": {"amount": "50MB", "per": ["day"]}}}),
        ("budget.bytes.amount", {"budget": {"bytes": "much per day"}}),
        ("budget.bytes.over", {"budget": {"bytes": {"amount": "1MB", "per": "day", "over": "us"}}}),
        ("budget.bytes.over", {"budget": {"bytes": {"amount": "1MB", "per": "day", "over": "all"}}}),
        ("budget.bytes", {"budget": {"bytes": "1KB per day"}, "window": {"tumbling": "1m"}}),
        ("budget.bytes", {"budget": {"bytes": "1MB per day"}, "window": {"session": "1m"}}),
        ("budget.bytes", {"budget": {"bytes": "1MB per day"}, "accuracy": {"error": "5%"}}),
        ("budget.staleness", {"budget": {"staleness": "0s"}}),
        ("budget.staleness", {"budget": {"staleness": 2}}),
        ("budget.error", {"budget": {"error": 5}}),
        ("budget.error", {"budget": {"error": {}}}),
        ("budget.error.x", {"budget": {"error": {"x": 5}}}),
        ("budget.error.n", {"budget": {"error": {"n": "-5%"}}}),
        ("budget.error.n", {"budget": {"error": {"n": -1}}}),
        ("budget.error.n", {"budget": {"error": {"n": -1.5}}}),
        ("budget.error.n", {"budget": {"error": {"n": float("nan")}}}),
        ("budget.error.n", {"budget": {"error": {"n": float("inf")}}}),
        ("budget.error.n", {"budget": {"error": {"n": True}}}),
        ("budget.error.n", {"budget": {"error": {"n": None}}}),
        ("measures.group", {"measures": {"group": "count()"}}),
        ("measures.carrier", {"measures": {"carrier": "count()"}, "group_by": ["carrier"]}),
        ("measures.a_lower", {"measures": {"a": "count()", "a_lower": "count()"}}),
        ("measures.a", {"measures": {"a_upper": "count()", "a": "count()"}}),
    ],
)  # fmt: skip
def test_a_bad_field_is_named_with_what_is_accepted(field: str, changes: dict[str, Any]) -> None:
    refuses(field, **changes)


def test_budgets_are_read_in_the_measures_unit() -> None:
    measures = {"b": "sum(bytes)", "n": "count()", "top": "max(bytes)"}
    query = spec(measures=measures, budget={"error": {"n": 10, "b": "1MB", "top": 0.5}})
    assert query.budget == ErrorBudget((("b", 1e6), ("n", 10.0), ("top", 0.5)))
    assert spec(budget={"error": {"n": 0}}).budget == ErrorBudget((("n", 0.0),))


def test_a_combined_budget_is_both_budgets() -> None:
    query = spec(budget={"error": {"n": 10}, "staleness": "2s"})
    assert query.budget == CombinedBudget(ErrorBudget((("n", 10.0),)), StalenessBudget(2000))
    assert (query.error_budget, query.staleness_budget) == (query.budget.error, query.budget.staleness)
    assert query.saves_bytes and not spec(budget={"staleness": "2s"}).saves_bytes
    assert query.to_mapping()["budget"] == {"error": {"n": 10.0}, "staleness": "2s"}
    assert QuerySpec.from_mapping(query.to_mapping()) == query
    relative = spec(budget={"error": {"n": "1%"}, "staleness": "2s"})
    assert len(relative.notes) == 1


def test_a_budget_on_a_measure_without_an_error_function_counts_records_and_a_percentage_is_relative() -> None:
    measures = {"n": "count()", "q": "quantiles(delay)"}
    query = spec(measures=measures, budget={"error": {"q": 10, "n": "5%"}})
    assert query.budget == ErrorBudget((("q", 10.0),), (("n", 0.05),))


# Measures


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("count()", "count()"),
        ("COUNT(*)", "count()"),
        ("count(bytes)", "count(bytes)"),
        ("count(DISTINCT carrier)", "distinct(carrier)"),
        (" sum ( bytes ) ", "sum(bytes)"),
        ("sum(bytes*8)", "sum(bytes * 8)"),
        ("sum(CASE WHEN ok THEN 1 ELSE 0 END)", "sum(CASE WHEN ok THEN 1 ELSE 0 END)"),
        ("avg(delay)", "mean(delay)"),
        ("var_samp(delay)", "var(delay)"),
        ("variance(delay)", "var(delay)"),
        ("minimum(delay)", "min(delay)"),
        ("max(-delay)", "max(-delay)"),
        ("distinct(carrier)", "distinct(carrier)"),
        ("Distinct (carrier, 14)", "distinct(carrier)"),
        ("distinct(lower(carrier), precision=9)", "distinct(LOWER(carrier), precision=9)"),
        ("quantiles(delay, 0.05)", "quantiles(delay, accuracy=0.05)"),
        ("quantile(delay, 0.99)", "quantile(delay, q=0.99)"),
        ("QUANTILE(delay)", "quantile(delay)"),
        ("quantile(delay, 0.9, accuracy=0.05)", "quantile(delay, q=0.9, accuracy=0.05)"),
        ('sum("weird col")', 'sum("weird col")'),
    ],
)
def test_measures_have_a_canonical_text(text: str, canonical: str) -> None:
    measure = Measure.parse("m", text)
    assert measure.to_text() == canonical
    assert Measure.parse("m", canonical) == measure


@pytest.mark.parametrize(
    "text",
    [
        5,
        None,
        "",
        "bytes",
        "sum",
        "sum()",
        "mean()",
        "distinct()",
        "median(bytes)",
        "sum(a) + 1",
        "a AND b",
        "CASE WHEN a THEN 1 END",
        "CASE WHEN (a) THEN 1 END",
        "CAST(a AS BIGINT)",
        "sum(a) OVER ()",
        "sum(a",
        "min(a, b)",
        "count(a, 3)",
        "distinct(a, precision=b)",
        "distinct(a, precision=3)",
        "distinct(a, width=3)",
        "distinct(a, 12, precision=12)",
        "distinct(a, precision=12, precision=13)",
        "quantiles(a, accuracy=0)",
        "quantiles(a, accuracy='1%')",
        "sum(DISTINCT a)",
        "quantiles(DISTINCT a)",
        "quantile(a, 99)",
        "quantile(a, delay)",
        "mean(a, b=1)",
    ],
)
def test_a_bad_measure_is_refused_with_what_is_accepted(text: Any) -> None:
    with pytest.raises(InvalidQuery) as caught:
        Measure.parse("m", text)
    assert caught.value.field.startswith("measures.m") and caught.value.accepted


@given(st.text(max_size=20) | st.text("sumcountdistinct()ab,=*1 ", max_size=20))
def test_any_text_is_a_measure_or_refused(text: str) -> None:
    try:
        measure = Measure.parse("m", text)
    except InvalidQuery:
        return
    assert Measure.parse("m", measure.to_text()) == measure


# Binding


def test_binding_compiles_against_the_columns_of_a_stream() -> None:
    query = spec(where="bytes > 0", group_by=["carrier", "ok"], measures={"n": "count()", "kb": "sum(bytes / 1000)"})
    bound = query.bind(COLUMNS)
    assert bound.group_types == (pa.string(), pa.bool_()) and bound.spec is query
    batch = pa.record_batch({"carrier": ["AA"], "bytes": [500], "delay": [0.5], "ok": [True]})
    assert bound.where is not None and bound.where.array(batch).to_pylist() == [True]
    count, kilobytes = bound.measures
    assert count.argument is None
    assert kilobytes.argument is not None and kilobytes.argument.array(batch).to_pylist() == [0.5]


def test_event_time_is_a_column_of_every_stream() -> None:
    query = spec(measures={"last": "max(event_time_ms)"}, group_by=["event_time_ms"])
    assert query.bind({}).group_types == (pa.int64(),)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("group_by.1", {"group_by": ["carrier", "url"]}),
        ("where", {"where": "url = 'x'"}),
        ("where", {"where": "bytes + 1"}),
        ("where", {"where": "carrier > 5"}),
        ("measures.s", {"measures": {"s": "sum(carrier)"}}),
        ("measures.s", {"measures": {"s": "sum(ok)"}}),
        ("measures.q", {"measures": {"q": "quantiles(carrier)"}}),
        ("measures.m", {"measures": {"m": "max(url)"}}),
        ("measures.m", {"measures": {"m": "mean(NULL)"}}),
    ],
)
def test_a_query_that_does_not_fit_the_stream_is_refused(field: str, changes: dict[str, Any]) -> None:
    query = spec(**changes)
    with refused(InvalidQuery, field):
        query.bind(COLUMNS)


def test_count_and_distinct_accept_every_type() -> None:
    for column in COLUMNS:
        spec(measures={"n": f"count({column})", "d": f"distinct({column})"}).bind(COLUMNS)


def test_errors_survive_pickling() -> None:
    try:
        spec(name="Bad Name")
    except InvalidQuery as error:
        again = pickle.loads(pickle.dumps(error))
        assert (again.field, again.value, again.accepted, str(again)) == (
            "name",
            "Bad Name",
            error.accepted,
            str(error),
        )
        assert again.code == "invalid-query"


@pytest.mark.parametrize(
    ("value", "since_ms", "text"),
    [
        ("2013-01-01T00:00:00Z", 1_356_998_400_000, "2013-01-01T00:00:00Z"),
        ("2013-01-01T01:00:00.250+01:00", 1_356_998_400_250, "2013-01-01T00:00:00.250Z"),
        (1_356_998_400_000, 1_356_998_400_000, "2013-01-01T00:00:00Z"),
        ("beginning", MIN_TIME_MS, "beginning"),
    ],
)
def test_since_is_a_time_or_the_beginning(value: Any, since_ms: int, text: str) -> None:
    found = spec(since=value)
    assert found.since_ms == since_ms
    assert found.to_mapping()["since"] == text
    assert QuerySpec.from_mapping(found.to_mapping()) == found


def test_since_may_be_written_without_quotes_in_yaml() -> None:
    text = "name: q\nfrom: s\nmeasures: {n: count()}\nwindow: {tumbling: 1h}\nsince: 2013-01-01T01:00:00+01:00\n"
    assert QuerySpec.from_yaml(text).since_ms == 1_356_998_400_000
    assert QuerySpec.from_yaml(text.replace("T01:00:00+01:00", "T00:00:00Z")).since_ms == 1_356_998_400_000
    with refused(InvalidQuery, "since"):
        QuerySpec.from_yaml(text.replace("T01:00:00+01:00", ""))


@pytest.mark.parametrize("value", ["2h", "yesterday", "2013-01-01", "2013-01-01T00:00:00", "", True, 1.5, [], 10**18])
def test_another_since_is_refused(value: Any) -> None:
    refuses("since", since=value)


def test_since_is_refused_where_it_could_not_be_right() -> None:
    accuracy = {"error": "5%", "confidence": "95%"}
    refuses("since", since="beginning", accuracy=accuracy)


ACCURATE = {"measures": {"total": "sum(bytes)", "n": "count()"}, "accuracy": {"error": "5%", "measure": "total"}}


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"total": "6%"}, "budget.error.total"),
        ({"total": 100}, "budget.error.total"),
        ({"n": "1%"}, "budget.error.total"),
    ],
)
def test_an_error_budget_that_would_not_keep_the_accuracy_is_refused(limits: dict[str, Any], field: str) -> None:
    refuses(field, **ACCURATE, budget={"error": limits})


@pytest.mark.parametrize("measure", ["mean(bytes)", "exact_quantile(bytes, 0.5)"])
def test_an_error_budget_beside_an_accuracy_about_a_value_that_records_move_without_a_bound_is_refused(
    measure: str,
) -> None:
    parts = {"measures": {"v": measure}, "accuracy": {"error": "5%"}, "budget": {"error": {"v": "1%"}}}
    refuses("budget.error", **parts)


@pytest.mark.parametrize("staleness", [{}, {"staleness": "2s"}])
def test_an_error_budget_beside_an_accuracy_lets_edges_withhold_and_saves_no_early_answer(
    staleness: dict[str, str],
) -> None:
    exact = spec(**ACCURATE, budget=staleness or None)
    assert not exact.may_withhold and not exact.saves_bytes
    both = spec(**ACCURATE, budget={"error": {"total": "5%", "n": 100}, **staleness})
    assert both.may_withhold and not both.saves_bytes and QuerySpec.from_mapping(both.to_mapping()) == both
    assert spec(budget={"error": {"n": 1}}).may_withhold and spec(budget={"staleness": "2s"}).may_withhold


@pytest.mark.parametrize(
    ("changes", "field", "meant"),
    [
        ({"froms": "flights", "from": ...}, "froms", "from"),
        ({"groupby": ["carrier"]}, "groupby", "group_by"),
        ({"measures": {"n": "summ(bytes)"}}, "measures.n", "sum"),
        ({"measures": {"n": "cuont()"}}, "measures.n", "count"),
        ({"measures": {"n": "p99(bytes)"}}, "measures.n", "quantile"),
        ({"measures": {"n": "percentile_approx(bytes, 0.99)"}}, "measures.n", "quantile"),
        ({"measures": {"n": "stddev(bytes)"}}, "measures.n", "var"),
        ({"measures": {"n": "approx_count_distinct(bytes)"}}, "measures.n", "distinct"),
        ({"measures": {"n": "distinct(carrier, precison=12)"}}, "measures.n.precison", "precision"),
        ({"where": "abbs(bytes) > 1"}, "where", "abs"),
        ({"window": {"tumblin": "60s"}}, "window", "tumbling"),
        ({"window": {"sliding": "60s", "evry": "30s"}}, "window.evry", "every"),
        ({"budget": {"eror": {"n": 1}}}, "budget.eror", "error"),
        ({"budget": {"error": {"m": 1}}, "measures": {"mm": "count()"}}, "budget.error.m", "mm"),
        ({"cache": {"evictoin": "lru"}}, "cache.evictoin", "eviction"),
        ({"cache": {"estimate": "acccc"}}, "cache.estimate", "acc"),
        ({"accuracy": {"eror": "5%"}}, "accuracy.eror", "error"),
    ],
)
def test_a_misspelt_word_is_refused_with_the_word_that_was_meant(
    changes: dict[str, Any], field: str, meant: str
) -> None:
    assert f"did you mean {meant}" in str(refuses(field, **changes))


@pytest.mark.parametrize(
    ("changes", "field", "meant"),
    [
        ({"group_by": ["carier"]}, "group_by.0", "carrier"),
        ({"where": "byts > 1"}, "where", "bytes"),
        ({"measures": {"n": "sum(dlay)"}}, "measures.n", "delay"),
    ],
)
def test_a_misspelt_column_is_refused_with_the_column_that_was_meant(
    changes: dict[str, Any], field: str, meant: str
) -> None:
    with pytest.raises(InvalidQuery) as caught:
        spec(**changes).bind(COLUMNS)
    assert caught.value.field == field and f"did you mean {meant}?" in caught.value.reason


@pytest.mark.parametrize(
    ("line", "field", "whole"),
    [
        ("measures: {p99: quantiles(bytes, 0.99)}", "measures.p99", "quantiles(bytes, 0.99)"),
        ("measures: {m: count(), t: top_k(bytes, 10, 5)}", "measures.t", "top_k(bytes, 10, 5)"),
        ("measures: {n: count()}\n{where: coalesce(bytes, 0) > 1}", "where", "coalesce(bytes, 0) > 1"),
    ],
)
def test_a_value_that_yaml_cuts_at_a_comma_is_refused_with_the_quotes_that_it_needs(
    line: str, field: str, whole: str
) -> None:
    if "where" in line:
        text = "{name: q, from: flights, measures: {n: count()}, window: {tumbling: 1h}, where: coalesce(bytes, 0) > 1}"
    else:
        text = f"name: q\nfrom: flights\nwindow: {{tumbling: 1h}}\n{line}\n"
    with pytest.raises(InvalidQuery) as caught:
        QuerySpec.from_yaml(text)
    assert caught.value.field == field
    assert f'"{whole}"' in caught.value.accepted


@pytest.mark.parametrize("window", [{}, "60s", {"hopping": "5s"}, {"tumbling": "60s", "session": "5s"}, {"count": 10}])
def test_each_window_that_the_refusal_of_a_window_offers_is_accepted(window: Any) -> None:
    with pytest.raises(InvalidQuery) as caught:
        spec(window=window)
    for offered in re.findall(r"\{.*?\}", caught.value.accepted):
        assert spec(window=yaml.safe_load(offered)).window is not None


def test_a_priority_is_a_weight_from_1_to_100() -> None:
    assert spec().priority == 10 and "priority" not in spec().to_mapping()
    urgent = spec(priority=100)
    assert urgent.priority == 100 and QuerySpec.from_mapping(urgent.to_mapping()) == urgent
    for value in (0, 101, 1.5, "high", True):
        refuses("priority", priority=value)


def test_a_byte_budget_is_written_as_it_was_read() -> None:
    alone = spec(budget={"bytes": "50MB per day"})
    assert alone.to_mapping()["budget"] == {"bytes": "50000000B per day"}
    assert alone.may_withhold and alone.omits_values
    both = spec(budget={"bytes": {"amount": "1MB", "per": "hour", "over": "all"}, "error": {"n": 5}}, edges=["a", "b"])
    assert both.budget == ErrorBudget((("n", 5.0),)) and not both.omits_values
    for query in (alone, both):
        assert QuerySpec.from_mapping(query.to_mapping()) == query


@pytest.mark.parametrize("edges", [None, ["a", "b", "c"]])
def test_the_least_byte_budget_that_is_named_is_accepted(edges: list[str] | None) -> None:
    over = {} if edges is None else {"over": "all"}
    given_ = {"window": {"sliding": "10m", "every": "1m"}, **({} if edges is None else {"edges": edges})}
    with pytest.raises(InvalidQuery) as caught:
        spec(budget={"bytes": {"amount": 1, "per": "hour", **over}}, **given_)
    found = re.search(r"at least (\d+)B", caught.value.accepted)
    assert found is not None
    spec(budget={"bytes": {"amount": int(found[1]), "per": "hour", **over}}, **given_)
