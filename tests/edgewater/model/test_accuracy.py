from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.arrivals.schedule import REPORT_SLOTS_AFTER_END, ReportSchedule
from edgewater.base.errors import InvalidQuery
from edgewater.model.accuracy import group_key, group_values, report_schedule
from edgewater.model.query import QuerySpec
from tests.refusals import refused

WELL = {"error": "5%", "confidence": "95%"}


def spec(**changes: object) -> QuerySpec:
    given = {"name": "q", "from": "s", "measures": {"b": "sum(x)"}, "window": {"tumbling": "3s"}, "accuracy": WELL}
    return QuerySpec.from_mapping({**given, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accuracy": {"error": "0.5%", "confidence": "99.9%", "substream": "200ms"}},
        {"accuracy": {"error": "99.9999999999%", "confidence": "99.9999999999%"}},
        {"accuracy": {**WELL, "delays": "900ms"}},
        {"accuracy": {"error": "5%", "measure": "n"}, "measures": {"n": "count()", "b": "sum(x)"}},
        {"accuracy": {"error": "5%", "range": [-1, 2.5]}},
        {"measures": {"m": "avg(x)"}, "window": {"sliding": "5m", "every": "30s", "offset": "7s"}},
        {"budget": {"staleness": "2s"}},
        {"group_by": ["k"]},
        {"group_by": ["k", "l"], "accuracy": {**WELL, "scope": "all"}},
    ],
)
def test_a_spec_with_an_accuracy_is_read_back_from_its_mapping(changes: dict[str, Any]) -> None:
    once = spec(**changes)
    assert QuerySpec.from_mapping(once.to_mapping()) == once
    assert once.accuracy is not None


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("accuracy.confidence", {"accuracy": {"error": "5%", "confidence": "100%"}}),
        ("accuracy.confidence", {"accuracy": {"error": "5%", "confidence": "99.9999999999999%"}}),
        ("accuracy.confidence", {"accuracy": {"error": "5%", "confidence": "0%"}}),
        ("accuracy.error", {"accuracy": {"error": "99.99999999999999%"}}),
        ("accuracy.confidence", {"accuracy": {"error": "5%", "confidence": 0.95}}),
        ("accuracy.error", {"accuracy": {"error": "0%"}}),
        ("accuracy.error", {"accuracy": {"error": "100%"}}),
        ("accuracy.error", {"accuracy": {"error": "1MB"}}),
        ("accuracy.error", {"accuracy": {"confidence": "95%"}}),
        ("accuracy.sample", {"accuracy": {**WELL, "sample": 1}}),
        ("accuracy.measure", {"measures": {"b": "sum(x)", "n": "count()"}}),
        ("accuracy.measure", {"accuracy": {**WELL, "measure": "c"}}),
        ("accuracy.measure", {"measures": {"q": "var(x)"}}),
        ("accuracy.substream", {"accuracy": {**WELL, "substream": "700ms"}}),
        ("accuracy.delays", {"accuracy": {**WELL, "delays": "soon"}}),
        ("accuracy", {"window": {"session": "30s"}}),
        ("accuracy.groups", {"accuracy": {**WELL, "groups": "each"}}),
        ("accuracy.range", {"accuracy": {**WELL, "range": [1, 0]}}),
        ("accuracy.range", {"accuracy": {**WELL, "range": [0, float("nan")]}}),
        ("accuracy.range", {"accuracy": {**WELL, "range": "0..1"}}),
        ("accuracy.range", {"accuracy": {**WELL, "range": [0, 1]}, "measures": {"b": "count()"}}),
        ("accuracy.scope", {"accuracy": {**WELL, "scope": "each"}}),
        ("accuracy.scope", {"accuracy": {**WELL, "scope": "some"}, "group_by": ["k"]}),
        ("accuracy.scope", {"accuracy": {**WELL, "scope": 1}, "group_by": ["k"]}),
        ("accuracy", {"window": {"session": "30s"}, "group_by": ["k"]}),
        ("budget.error.b", {"budget": {"error": {"b": 5}}}),
    ],
)
def test_an_unsupported_accuracy_is_refused_with_what_is_accepted(field: str, changes: dict[str, Any]) -> None:
    with refused(InvalidQuery, field):
        spec(**changes)


def test_the_scope_of_an_accuracy_with_groups_is_each_by_default() -> None:
    scopes = {name: spec(group_by=["k"], accuracy={**WELL, **more}).accuracy for name, more in
              {"default": {}, "each": {"scope": "each"}, "all": {"scope": "all"}}.items()}  # fmt: skip
    assert {name: a.scope for name, a in scopes.items() if a} == {"default": "each", "each": "each", "all": "all"}
    assert spec().accuracy.scope is None  # type: ignore[union-attr]


@given(st.lists(st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text())))
def test_a_group_key_encodes_the_values_and_their_types(values: list[object]) -> None:
    key = group_key(values)
    again = group_values(key)
    assert group_key(again) == key
    assert [type(v) for v in again] == [type(v) for v in values]


windows = st.sampled_from(
    [{"tumbling": "3s"}, {"tumbling": "1s", "offset": "300ms"}, {"sliding": "6s", "every": "2s"}, {"tumbling": "7ms"}]
)


def clock_of(window: dict[str, str]) -> ReportSchedule:
    query = spec(window=window)
    clock = report_schedule(query.window, query.accuracy, query.lateness_ms)
    assert clock is not None
    return clock


@given(windows, st.integers(-10_000, 10_000))
def test_report_slots_ascend_and_each_window_ends_on_one(window: dict[str, str], slot: int) -> None:
    clock = clock_of(window)
    before, after = clock.last_report_slot(slot), clock.next_report_slot(slot)
    assert before <= slot < after
    assert clock.last_report_slot(after) == after
    assert clock.last_report_slot(after - 1) == before
    end = (slot // clock.every_slots) * clock.every_slots + clock.window_slots
    assert clock.last_report_slot(end) == end
    for offset in REPORT_SLOTS_AFTER_END:
        if offset < clock.grid.substream_slots:
            assert clock.last_report_slot(end + offset) == end + offset


def test_without_an_accuracy_there_is_no_report_schedule() -> None:
    query = spec(accuracy=None)
    assert report_schedule(query.window, query.accuracy, 0) is None


@pytest.mark.parametrize("size", ["100ms", "1s", "3s", "10s", "1m", "1h", "1d"])
def test_substreams_divide_the_window_and_the_number_of_lags_is_bounded(size: str) -> None:
    clock = clock_of({"tumbling": size})
    assert clock.window_slots % clock.grid.substream_slots == 0
    assert clock.window_slots * clock.grid.slot_ms == spec(window={"tumbling": size}).window.longest_ms
    assert 4 <= clock.window_slots // clock.grid.substream_slots <= 30
    assert clock.grid.lags <= 1024
