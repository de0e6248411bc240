from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgewater import algebra
from edgewater.algebra import LateRule, late_rule, late_rule_of, needs_order
from edgewater.errors import InvalidQuery
from edgewater.query import QuerySpec
from edgewater.synopses.base import Properties
from edgewater.synopses.exact.aggregates import CountStack
from edgewater.synopses.registry import Function, function_named, function_names, register_function
from edgewater.windows import CountWindow, Session, Sliding, Tumbling

ORDERED = Properties(commutative=False, ordered=True)
OURS = tuple(function_names())
"""As they stand before other tests register theirs."""
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
    from edgewater.synopses import registry

    monkeypatch.setattr(registry, "_FUNCTIONS", dict(registry._FUNCTIONS))
    _register("in_order", ORDERED)
    _register("alone", Properties(mergeable=False))
    _register("by_chance", Properties(reproducible=False))


def query(measure: str, **parts: object) -> QuerySpec:
    return QuerySpec.from_mapping(
        {"name": "q", "from": "s", "measures": {"m": measure}, "window": {"tumbling": "1m"}, **parts}
    )


@pytest.mark.parametrize("window", WINDOWS)
def test_every_function_of_ours_is_taken_with_every_window_edges_and_lateness(window: dict[str, str]) -> None:
    for name in OURS:
        if not function_named(name).unavailable:  # type: ignore[union-attr]
            spec = query(f"{name}({ARGUMENTS.get(name, 'x')})", window=window, lateness="10m")
            assert late_rule_of(spec) is LateRule.TAKEN


def test_kll_and_top_k_do_not_commute_and_yet_need_no_order() -> None:
    for name in ("kll", "top_k"):
        properties = algebra.properties_of(query(f"{name}(x)").measures[0])
        assert not properties.commutative and not needs_order(properties)
    assert not needs_order(algebra.properties_of(query("fifo(x)").measures[0]))


@pytest.mark.parametrize(
    ("measure", "parts", "field", "value", "said"),
    [
        ("alone()", {"edges": ["a"]}, "measures.m", "alone()", "does not merge"),
        ("by_chance()", {"edges": ["a"]}, "measures.m", "by_chance()", "may give other bytes"),
        ("in_order()", {"edges": ["a"], "window": {"session": "30s", "max": "5m"}}, "window",
         {"session": "30s", "max": "5m"}, "a tumbling window"),
        ("in_order()", {"edges": ["a"], "window": WINDOWS[1]}, "window", WINDOWS[1], "a tumbling window"),
        ("in_order()", {}, "edges", None, "exactly one edge"),
        ("in_order()", {"edges": ["b", "a"]}, "edges", ["a", "b"], "exactly one edge"),
        ("in_order()", {"edges": ["a"], "lateness": "2s"}, "lateness", "2s", "dropped and counted"),
    ],
)  # fmt: skip
def test_what_the_algebra_forbids_is_refused_by_field_value_and_what_is_accepted(
    measure: str, parts: dict[str, Any], field: str, value: object, said: str
) -> None:
    with pytest.raises(InvalidQuery, match=said) as caught:
        query(measure, **parts)
    assert (caught.value.field, caught.value.value) == (field, value)


def test_a_query_that_needs_order_is_taken_where_there_is_one_and_follows_the_watermark() -> None:
    spec = query("in_order()", edges=["a"])
    assert late_rule_of(spec) is LateRule.FOLLOWS_WATERMARK
    assert late_rule_of(replace(spec, measures=(*query("count()").measures, *spec.measures))) is (
        LateRule.FOLLOWS_WATERMARK
    )


def test_late_records_of_count_windows_are_mended_where_what_they_push_out_can_be_taken_out() -> None:
    invertible = Properties(invertible=True)
    assert late_rule([invertible], CountWindow(10)) is LateRule.MENDED
    assert late_rule([invertible, Properties()], CountWindow(10)) is LateRule.FOLLOWS_WATERMARK
    for window in (Tumbling("1s"), Sliding("2s", "1s"), Session("1s")):
        assert late_rule([Properties()], window) is LateRule.TAKEN
        assert late_rule([invertible, ORDERED], window) is LateRule.FOLLOWS_WATERMARK


def test_a_count_window_is_refused_with_where_it_is_to_be_had() -> None:
    with pytest.raises(InvalidQuery, match=r"center\.batch\.build.*center\.slicing") as caught:
        query("count()", window={"count": 1000}, edges=["a"])
    assert (caught.value.field, caught.value.value) == ("window.count", 1000)
