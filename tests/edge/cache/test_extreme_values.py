"""NaN and infinities in a slice: such groups are sent first, and neither the history nor a forecast of other groups
takes part of them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from edge.cache import (
    ErrorLimits,
    GroupHistory,
    RankingContext,
    SendSlots,
    SliceEntries,
    learn,
    primary_mask,
    rank_closed_by_deadline,
    rank_open,
    withheld_of,
)
from edge.cache.forecast import forecast
from edgewater.model.caching import EVICTIONS, CacheSpec
from tests.query_specs import query_spec

ODD = [np.nan, np.inf, -np.inf, 1e300]


def filled(function: str, values: list[float]) -> SliceEntries:
    """One group per value."""
    spec = query_spec(
        group_by=["k"], measures={"v": f"{function}(x)"}, window={"tumbling": "1m"}, budget={"staleness": "2s"}
    )
    entries = SliceEntries.for_query(spec.bind({"k": pa.int64(), "x": pa.float64()}), 0, ["v"])
    rows = len(values)
    keys, times = pa.array(range(rows)), np.zeros(rows, np.int64)
    entries.update([keys], {"v": pa.array(values, from_pandas=False)}, rows, times, 1, elapsed=0.1)
    return entries


@pytest.mark.parametrize("function,odd", [("sum", ODD), ("max", [np.nan, np.inf]), ("min", [np.nan, -np.inf])])
def test_odd_groups_are_sent_first_by_the_deadline(function: str, odd: list[float]) -> None:
    entries = filled(function, [5.0, *odd, 7.0, 9.0])
    queue = rank_closed_by_deadline(entries, GroupHistory(("v",)))
    count = len(odd)
    assert sorted(queue.groups[:count].tolist()) == list(range(1, count + 1))
    assert queue.groups[count:].tolist() == [count + 2, count + 1, 0]


@pytest.mark.parametrize("function", ["sum", "max", "min"])
def test_what_is_learned_of_odd_groups_is_finite(function: str) -> None:
    history = GroupHistory(("v",))
    for _ in range(4):
        learn(filled(function, [5.0, *ODD, 7.0]), history, SendSlots(2.0, 4.0))
    assert np.isfinite(history.scale["v"]) and np.isfinite(history.error_target.target)
    assert np.isfinite(history._values).all()
    entries = filled(function, [5.0, *ODD, 7.0])
    expected = forecast(entries, np.arange(6), history, 0.5)
    assert all(np.isfinite(a).all() for a in (expected.mean("v"), *expected.exceeds("v", np.ones(6))))
    assert expected.mean("v")[5] > 0.0


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("limits", [ErrorLimits({"v": 6.0}), ErrorLimits({}, {"v": 0.5})])
@pytest.mark.parametrize("function", ["sum", "max", "min"])
def test_odd_groups_are_in_the_primary_cache_and_can_be_ranked(
    function: str, limits: ErrorLimits, eviction: str
) -> None:
    entries = filled(function, [5.0, *ODD, 7.0])
    assert primary_mask(entries, limits)[1:5].all()
    queue = rank_open(entries, limits, CacheSpec(eviction), GroupHistory(("v",)), RankingContext(0, 0.5))
    assert len(set(queue.groups.tolist())) == len(queue.groups)


def test_what_is_withheld_of_odd_groups_has_no_bound() -> None:
    (held,) = withheld_of(filled("sum", [np.nan, 3.0]))
    assert (held.largest_above, held.largest_below) == (np.inf, np.inf)
    (held,) = withheld_of(filled("sum", [np.inf, -3.0]))
    assert (held.largest_above, held.largest_below) == (np.inf, 3.0)
    entries = filled("sum", [np.nan])
    entries.send(entries.shipment(np.array([0])))
    assert withheld_of(entries) == ()
