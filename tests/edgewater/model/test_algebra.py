from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgewater.base.errors import InvalidQuery
from edgewater.model import algebra
from edgewater.model.algebra import LateRecordPolicy, late_record_policy_of, needs_order
from edgewater.model.query import QuerySpec
from edgewater.synopses import CountStack, Function, Properties, function_named, function_names
from edgewater.synopses.registry import register_function
from tests.insides import forget_registrations
from tests.query_specs import query_spec
from tests.refusals import refused

ORDERED = Properties(commutative=False, ordered=True)
BUILT_IN = tuple(function_names())
"""Before other tests register theirs."""
WINDOWS = ({"tumbling": "1m"}, {"sliding": "5m", "every": "1m"}, {"session": "30s"})
ARGUMENTS = {"count": "", "equi_width": "x, lo=0, hi=1", "bernoulli": "x, rate=0.5"}


def _register(name: str, properties: Properties) -> None:
    class Stack(CountStack):
        pass

    Stack.properties = properties
    if function_named(name) is None:
        register_function(Function(name, lambda parameters, data_type: Stack(), argument="none"))


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch) -> None:

    forget_registrations(monkeypatch)
    _register("in_order", ORDERED)
    _register("alone", Properties(mergeable=False))
    _register("by_chance", Properties(reproducible=False))


def query(measure: str, **parts: object) -> QuerySpec:
    return query_spec(parts, measures={"m": measure}, window={"tumbling": "1m"})


@pytest.mark.parametrize("window", WINDOWS)
def test_every_built_in_function_is_accepted_with_every_window_edges_and_lateness(window: dict[str, str]) -> None:
    for name in BUILT_IN:
        if not function_named(name).unavailable:  # type: ignore[union-attr]
            spec = query(f"{name}({ARGUMENTS.get(name, 'x')})", window=window, lateness="10m")
            assert late_record_policy_of(spec) is LateRecordPolicy.MERGED


def test_kll_and_top_k_do_not_commute_but_need_no_order() -> None:
    for name in ("kll", "top_k"):
        properties = algebra.properties_of(query(f"{name}(x)").measures[0])
        assert not properties.commutative and not needs_order(properties)
    assert not needs_order(algebra.properties_of(query("fifo(x)").measures[0]))


@pytest.mark.parametrize(
    ("measure", "parts", "field", "value"),
    [
        ("alone()", {"edges": ["a"]}, "measures.m", "alone()"),
        ("by_chance()", {"edges": ["a"]}, "measures.m", "by_chance()"),
        ("in_order()", {"edges": ["a"], "window": {"session": "30s", "max": "5m"}}, "window",
         {"session": "30s", "max": "5m"}),
        ("in_order()", {"edges": ["a"], "window": WINDOWS[1]}, "window", WINDOWS[1]),
        ("in_order()", {}, "edges", None),
        ("in_order()", {"edges": ["b", "a"]}, "edges", ["a", "b"]),
        ("in_order()", {"edges": ["a"], "lateness": "2s"}, "lateness", "2s"),
    ],
)  # fmt: skip
def test_a_violated_rule_is_refused_with_field_value_and_what_is_accepted(
    measure: str, parts: dict[str, Any], field: str, value: object
) -> None:
    with refused(InvalidQuery, field, value):
        query(measure, **parts)


def test_a_query_that_needs_order_is_accepted_where_the_order_is_unique_and_drops_late_records() -> None:
    spec = query("in_order()", edges=["a"])
    assert late_record_policy_of(spec) is LateRecordPolicy.DROPPED
    assert late_record_policy_of(replace(spec, measures=(*query("count()").measures, *spec.measures))) is (
        LateRecordPolicy.DROPPED
    )


def test_a_count_window_is_refused_with_the_alternatives() -> None:
    with refused(InvalidQuery, "window.count", 1000):
        query("count()", window={"count": 1000}, edges=["a"])
