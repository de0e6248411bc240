"""Every synopsis by its name in a query: parameters, goals, canonical text, and what is refused."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from edgewater.base.errors import InvalidQuery
from edgewater.base.streams import COLUMN_TYPES
from edgewater.model.measure import Measure
from edgewater.model.query import QuerySpec
from edgewater.model.syntax import parse_sql
from edgewater.synopses import Parameter, SampleFunction, registry, require_fit, sample_function
from edgewater.synopses.registry import MAX_STATE_BYTES
from tests.insides import forget_registrations
from tests.query_specs import query_spec
from tests.refusals import refused


@pytest.mark.parametrize(
    ("text", "canonical", "kind"),
    [
        ("count_min(ip, 4096, 3)", "count_min(ip, width=4096, depth=3)", "count_min"),
        ("count_min(ip, epsilon=0.001)", "count_min(ip, width=4096)", "count_min"),
        ("fast_agms(ip, epsilon=0.1, delta=0.05)", "fast_agms(ip, width=2048, depth=3)", "fast_agms"),
        ("top_k(ip, 10)", "top_k(ip, k=10)", "top_k"),
        ("top_k(ip, 10, epsilon=0.001)", "top_k(ip, k=10, capacity=1000)", "top_k"),
        ("bloom(ip)", "bloom(ip)", "bloom"),
        ("bloom(ip, capacity=1000, fpr=0.001)", "bloom(ip, bits=15360, hashes=11)", "bloom"),
        ("cuckoo(ip, capacity=1000)", "cuckoo(ip, buckets=512)", "cuckoo"),
        ("counting_cuckoo(ip, buckets=64)", "counting_cuckoo(ip, buckets=64)", "counting_cuckoo"),
        ("sample(ip, 50)", "reservoir(ip, size=50)", "reservoir"),
        ("reservoir(ip, epsilon=0.05)", "reservoir(ip, size=385)", "reservoir"),
        ("fifo(ip)", "fifo(ip)", "fifo"),
        ("biased_reservoir(ip, 64)", "biased(ip, size=64)", "biased_reservoir"),
        ("bernoulli(ip, 0.1, limit=100)", "bernoulli(ip, rate=0.1, limit=100)", "bernoulli"),
        ("histogram(ip, lo=-5, hi=10, buckets=8)", "equi_width(ip, lo=-5.0, hi=10.0, buckets=8)", "equi_width"),
        ("equi_depth(ip, buckets=10)", "equi_depth(ip, buckets=10)", "equi_depth"),
    ],
)
def test_a_synopsis_is_configured_by_its_parameters_or_by_its_accuracy(text: str, canonical: str, kind: str) -> None:
    measure = Measure.parse("m", text)
    assert measure.to_text() == canonical
    assert Measure.parse("m", canonical) == measure
    for type_ in measure.function.types:
        stack = measure.stack(COLUMN_TYPES[type_])
        stack.grow(1)
        assert stack.kind == kind and stack.nbytes < MAX_STATE_BYTES
        assert getattr(stack, "item_type", type_) == type_


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("count_min(ip, width=1000)", "measures.m.width"),
        ("count_min(ip, width=262144, depth=9)", "measures.m"),
        ("count_min(ip, width=64, epsilon=0.1)", "measures.m.width"),
        ("count_min(ip, delta=0.1)", "measures.m.epsilon"),
        ("count_min(ip, epsilon=1e-9)", "measures.m.epsilon"),
        ("count_min(ip, epsilon=2)", "measures.m.epsilon"),
        ("top_k(ip, 20, capacity=3)", "measures.m.capacity"),
        ("top_k(ip, 0)", "measures.m.k"),
        ("bloom(ip, bits=100)", "measures.m.bits"),
        ("bloom(ip, capacity=100000000)", "measures.m"),
        ("cuckoo(ip, fpr=0.1)", "measures.m.fpr"),
        ("bernoulli(ip)", "measures.m.rate"),
        ("bernoulli(ip, rate=2)", "measures.m.rate"),
        ("histogram(ip, lo=0)", "measures.m.hi"),
        ("histogram(ip, lo=3, hi=3)", "measures.m.hi"),
        ("reservoir(ip, size=100000000)", "measures.m.size"),
        ("equi_depth(ip, accuracy=3)", "measures.m.accuracy"),
        ("haar(ip)", "measures.m"),
    ],
)
def test_an_invalid_measure_is_refused_with_its_field(text: str, field: str) -> None:
    with refused(InvalidQuery, field):
        Measure.parse("m", text)


def test_measures_too_large_for_a_frame_are_refused_with_the_size_of_each() -> None:
    def fit(*texts: str) -> None:
        measures = [Measure.parse(f"m{i}", text) for i, text in enumerate(texts)]
        require_fit({m.name: m.entry_bytes for m in measures})

    fit(*["count_min(ip)"] * 3)
    fit("kmeans(a, b, c, d, limit=65536)")
    with refused(InvalidQuery, "measures"):
        fit(f"kmeans({', '.join('abcdefghijklmnop')}, limit=65536)")
    fit(*["bernoulli(ip, rate=0.1)"] * 3)
    too_much = {"1.2": ["count_min(ip)"] * 4, "2.0": ["bloom(ip, bits=16777216)"] * 2, "1.0": ["sample(ip, 65536)"] * 4}
    for texts in too_much.values():
        with refused(InvalidQuery, "measures"):
            fit(*texts)


@pytest.mark.parametrize("text", ["sum(x)", "mean(x)"])
def test_infinities_of_both_signs_merge_to_nan_without_a_warning(text: str) -> None:
    measure = Measure.parse("m", text)
    above, below = (measure.stack(COLUMN_TYPES["float64"]) for _ in range(2))
    for stack, value in ((above, np.inf), (below, -np.inf)):
        stack.grow(1)
        stack.update(np.zeros(1, np.int64), np.array([value]))
    above.merge(below, np.zeros(1, np.int64))
    assert np.isnan(above.query().value).all()
    below.update(np.zeros(2, np.int64), np.array([np.inf, 1.0]))
    assert np.isnan(below.query().value).all()


def test_a_function_with_the_name_of_an_sql_function_gets_all_of_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_registrations(monkeypatch)
    del registry._FUNCTIONS["quantile"]
    for name in ("corr", "quantile"):
        registry.register_function(sample_function(name, SampleFunction(), {"q": Parameter.number(0.5, 0, 1)}))

    assert Measure.parse("m", "corr(x, y)").argument == "(x, y)"
    assert dict(Measure.parse("m", "quantile(x, 0.9)").parameters)["q"] == 0.9


CONDITIONS = [
    "status >= 500", "status = 500", "status == 500", "(status <> 500)", "NOT retried", "status IN (500, 502)",
    "status BETWEEN 500 AND 599", "path LIKE '/api%'", "path IS NULL", "retried OR status > 500",
    "starts_with(path, '/api')", "regexp_like(path, 'api')",
]  # fmt: skip


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("function", ["count", "distinct", "sum", "mean", "min", "max", "var", "quantiles"])
def test_a_condition_as_an_argument_is_refused_with_what_counts_its_records(function: str, condition: str) -> None:
    with pytest.raises(InvalidQuery) as refused:
        Measure.parse("m", f"{function}({condition})").require_no_condition()
    assert refused.value.field == "measures.m"
    *value, counted = refused.value.accepted.split(", or ")
    for offered in (*value, counted):
        Measure.parse("m", offered).require_no_condition()
    case = parse_sql(Measure.parse("m", counted).argument or "", "where")
    assert case.args["ifs"][0].this == parse_sql(condition, "where").unnest()


def test_a_count_of_a_boolean_column_is_refused_once_its_type_is_known() -> None:
    flag, status = Measure.parse("m", "count(retried)"), Measure.parse("m", "count(status)")
    status.require_no_condition(COLUMN_TYPES["int64"])
    with pytest.raises(InvalidQuery):
        flag.require_no_condition(COLUMN_TYPES["bool"])


@pytest.mark.parametrize(
    "text", ["count()", "count(*)", "count(1)", "count(status)", "sum(if(status >= 500, 1, 0))", "top_k(status >= 500)",
             "count(CASE WHEN status >= 500 THEN 1 END)", "mean(CAST(status >= 500 AS BIGINT))"]
)  # fmt: skip
def test_what_counts_records_values_or_a_number_is_accepted(text: str) -> None:
    Measure.parse("m", text).require_no_condition()


def test_sum_of_if_counts_the_records_of_a_condition() -> None:
    spec = query_spec(window={"tumbling": "1m"}, measures={"m": "sum(if(status >= 500, 1, 0))"})
    (bound,) = spec.bind({"status": COLUMN_TYPES["int64"]}).measures
    assert bound.argument is not None
    batch = pa.record_batch({"status": pa.array([200, 500, None, 503], pa.int64())})
    assert bound.argument.evaluate(batch).to_pylist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("called", "offered"),
    [("count_if", "sum(if("), ("countIf", "sum(if("), ("sumif", "sum(if("), ("median", "quantile("), ("cuont", "count"),
     ("top_kk", "top_k")],
)  # fmt: skip
def test_an_unknown_function_is_met_with_one_of_the_same_meaning(called: str, offered: str) -> None:
    with pytest.raises(InvalidQuery) as refused:
        Measure.parse("m", f"{called}(x)")
    assert f"did you mean {offered}" in refused.value.reason


@pytest.mark.parametrize("called", ["count_max", "width", "quantile_over_time", "last"])
def test_a_name_that_only_shares_a_word_is_not_suggested(called: str) -> None:
    with pytest.raises(InvalidQuery) as refused:
        Measure.parse("m", f"{called}(x)")
    assert "did you mean" not in refused.value.reason


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("count(*) FILTER (WHERE status >= 500)", "count(CASE WHEN status >= 500 THEN 1 END)"),
        ("count() filter (status >= 500)", "count(CASE WHEN status >= 500 THEN 1 END)"),
        ("distinct(ip) filter (where a or b)", "distinct(CASE WHEN a OR b THEN ip END)"),
        ("quantile(ms, 0.99) filter (where ok)", "quantile(CASE WHEN ok THEN ms END, q=0.99)"),
    ],
)
def test_a_filter_is_an_argument_that_is_null_in_all_other_records(text: str, meant: str) -> None:
    measure = Measure.parse("m", text)
    assert measure.to_text() == meant and Measure.parse("m", meant) == measure


@pytest.mark.parametrize("text", ["sum(bytes) filter (where 1)", "count() filter (where bytes)"])
def test_a_filter_is_a_condition(text: str) -> None:
    spec = query_spec(window={"tumbling": "1m"}, measures={"m": text})
    with refused(InvalidQuery, "measures.m"):
        spec.bind({"bytes": pa.int64()})


def test_a_function_of_sampled_records_has_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_registrations(monkeypatch)
    registry.register_function(sample_function("corr", SampleFunction(), {}))
    with pytest.raises(InvalidQuery) as refused:
        Measure.parse("m", "corr(x, y) filter (where status >= 500)")
    assert "where: status >= 500" in refused.value.accepted


def test_a_query_in_a_file_is_refused_like_one_that_is_registered() -> None:
    text = "{name: q, from: s, window: {tumbling: 1m}, measures: {m: count(status >= 500)}}"
    with refused(InvalidQuery, "measures.m"):
        QuerySpec.from_yaml(text)
