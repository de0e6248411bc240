"""NaN, infinities and values of any size in a slice.

Groups that are not finite are sent first, and neither the history nor a forecast of other groups takes part of them.
Finite values are ranked without a warning, which the tests' configuration makes an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from edge.cache.entries import SliceEntries
from edge.cache.error_limits import ErrorLimits, primary_mask
from edge.cache.forecast import forecast
from edge.cache.history import GroupHistory
from edge.cache.policy import RankingContext, learn, rank_closed_by_deadline, rank_open
from edge.cache.sizing import SendSlots, accumulated_errors
from edge.cache.withheld import withheld_of
from edge.core.core import EdgeCore
from edge.core.events import BudgetSet, Configured, FrameBuilt, Ingested, PullEvent, SourceEnded
from edge.core.streams import StreamSpec
from edgewater.base.streams import TIME_COLUMN
from edgewater.model.caching import EVICTIONS, CacheSpec
from edgewater.model.query import QuerySpec
from edgewater.wire import QueryRef
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


QUERY = QueryRef("q", 1)
MEASURES = {"s": "sum(x)", "m": "max(x)", "n": "min(x)", "a": "mean(x)", "v": "var(x)"}
VALUES: dict[str, list[list[float]]] = {
    "1e300": [[1e300, -1e300, 3e299]],
    "largest": [[1.7e308, -1.7e308, 1e308]],
    "smallest": [[1e-310, 5e-324, 1e-300]],
    "mixed": [[1e300, 1.0, 1e-300, 0.0, -5e18]],
    "zero-first": [[0.0], [1e9, 5e12, 1e300]],
    "not-finite": [[np.inf, np.nan, 1e300]],
}
CASES: list[tuple[dict[str, Any], dict[str, str]]] = [
    *(
        ({"error": limits}, {"eviction": policy})
        for limits in ({"s": 10.0}, {"s": "5%"}, {"s": 1e300, "m": 1e300})
        for policy in ("spe", "mae", "rate", "gain")
    ),
    *(({"staleness": "2s"}, {"sizing": "linear", "estimate": e}) for e in ("acc", "explicit")),
    ({"staleness": "2s"}, {"sizing": "target"}),
]


def core_of(**parts: Any) -> EdgeCore:
    mapping = {"name": "q", "from": "s", "group_by": ["k"], "measures": MEASURES, "window": {"tumbling": "10s"}}
    core = EdgeCore({"s": StreamSpec({"k": pa.int64(), "x": pa.float64()})})
    core.handle(Configured(((QUERY, QuerySpec.from_mapping(mapping | parts)),)))
    core.handle(BudgetSet(QUERY, {"s": 5.0, "m": 5.0}))
    return core


def ingest(core: EdgeCore, at_ms: int, keys: list[int], values: list[float]) -> None:
    times = np.full(len(keys), at_ms)
    batch = {"k": pa.array(keys), "x": pa.array(values, pa.float64()), TIME_COLUMN: pa.array(times)}
    core.handle(Ingested("s", "f", pa.record_batch(batch), 1 << 50))


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.nightly
def test_every_policy_ranks_them(values: list[list[float]]) -> None:
    for budget, cache in CASES:
        core = core_of(budget=budget, cache=cache)
        for step in range(4):
            at_ms, given = 5_000 * step, values[min(step // 2, len(values) - 1)]
            keys = [(7 * step + i) % 12 for i in range(15)]
            ingest(core, at_ms, keys, [given[k % len(given)] for k in keys])
            core.pulls.next_pull_ms(100.0, at_ms)
            core.handle(PullEvent(300, {"s": at_ms + 5}, 300.0, 5))
        core.handle(SourceEnded("s", "f"))
        while any(isinstance(e, FrameBuilt) for e in core.handle(PullEvent(2000, {"s": 20_500}, 300.0, 5))):
            pass


def test_the_largest_errors_come_first_whatever_their_unit() -> None:
    for unit in (1.0, 1e-200, 1e200, 1e300):
        core = core_of(measures={"s": "sum(x)"}, budget={"staleness": "2s"})
        ingest(core, 0, [0, 1, 2, 3], [unit, 3 * unit, -7 * unit, 5 * unit])
        entries = core.queries[QUERY].store.slices[0].entries
        errors = accumulated_errors(entries, GroupHistory(("s",)), np.arange(4))
        assert errors == pytest.approx([1 / 7, 3 / 7, 1.0, 5 / 7])
