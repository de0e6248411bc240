"""What several edges send, late records and sliding windows included, is within the budget of the truth, exactly; and
what they state as withheld is what they withhold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from edge.core.events import BudgetSet, Ingested, PullEvent, SourceEnded
from edge.core.streams import StreamSpec
from edgewater.base.streams import TIME_COLUMN
from edgewater.model.caching import EVICTIONS
from edgewater.model.query import QuerySpec
from edgewater.synopses import FloatArray, GroupedAggregate
from edgewater.wire import Frame, FrameBody, QueryRef
from tests.cores import drained, open_core, pulled

pytestmark = pytest.mark.slow

REF, GROUPS, EDGES, ERROR = QueryRef("q", 1), 40, 2, 600.0
SLICE_MS = 1000


def query(budget: Any, eviction: str, staleness: str | None) -> QuerySpec:
    limits = {"error": {"v": budget}, **({} if staleness is None else {"staleness": staleness})}
    return QuerySpec.from_mapping(
        {
            "name": "q", "from": "s", "group_by": ["key"], "measures": {"v": "sum(value)"}, "lateness": "1h",
            "window": {"sliding": "3s", "every": "1s"}, "budget": limits,
            "cache": {"eviction": eviction},
        }
    )  # fmt: skip


def an_edge(number: int, spec: QuerySpec) -> tuple[list[FrameBody], FloatArray]:
    """What it sends, and per slice and group the truth. One record in ten is up to two slices late."""
    rng = np.random.default_rng(number)
    core = open_core(StreamSpec({"key": pa.int64(), "value": pa.float64()}), (REF, spec), number=number)
    core.handle(BudgetSet(REF, {"v": ERROR / EDGES}))
    truth = np.zeros((6, GROUPS))
    frames: list[Frame] = []
    for now in range(100, 6000, 100):
        times = rng.integers(now - 100, now, 60)
        times[:6] = np.maximum(times[:6] - rng.integers(0, 2 * SLICE_MS, 6), 0)
        keys = np.minimum(rng.zipf(1.4, 60) - 1, GROUPS - 1)
        values = rng.integers(1, 100, 60).astype(np.float64)
        np.add.at(truth, (times // SLICE_MS, keys), values)
        batch = pa.record_batch({"key": keys, "value": values, TIME_COLUMN: times})
        core.handle(Ingested("s", "file", batch, now))
        frames += pulled(core, PullEvent(600, {"s": now}, 1000.0, 0))
    core.handle(SourceEnded("s", "file"))
    return [frame.unpack() for frame in frames + drained(core, PullEvent(600))], truth


def received(bodies: list[FrameBody]) -> FloatArray:
    sums = np.zeros((6, GROUPS))
    for partial in (p for body in bodies for p in body.partials):
        part = GroupedAggregate.from_bytes(partial.synopsis)
        keys = part.rows()[0].to_numpy()
        np.add.at(sums[partial.slice_start_ms // SLICE_MS], keys, part.query("v").value)
    return sums


@pytest.mark.parametrize(
    "budget,eviction,staleness",
    [
        *((b, "gain", s) for b in (ERROR, "10%") for s in (None, "200ms")),
        *((b, e, None) for e, b in zip(EVICTIONS[1:], (ERROR, "10%") * 2, strict=False)),
        *(
            pytest.param(b, e, None, marks=pytest.mark.nightly)
            for e, b in zip(EVICTIONS[1:], ("10%", ERROR) * 2, strict=False)
        ),
    ],
)
def test_the_error_of_every_window_and_group_is_within_the_budget_and_reported_truly(
    budget: Any, eviction: str, staleness: str | None
) -> None:
    edges = [an_edge(number, query(budget, eviction, staleness)) for number in range(EDGES)]
    missing = sum(truth - received(bodies) for bodies, truth in edges)
    true = sum(truth for _, truth in edges)
    assert (missing >= 0).all()
    assert missing.max() > 0, "a budget that withholds nothing tests nothing"
    for at in range(4):
        window, whole = missing[at : at + 3].sum(axis=0), true[at : at + 3].sum(axis=0)
        allowed = ERROR if budget == ERROR else 0.1 * whole
        assert (window <= allowed * (1 + 1e-12)).all()
    for bodies, truth in edges:
        stated = {c.slice_start_ms: c.withheld for body in bodies for c in body.closes}
        kept = truth - received(bodies)
        for at in range(6):
            largest = max((w.largest_above for w in stated[at * SLICE_MS]), default=0.0)
            assert largest == kept[at].max(initial=0.0)
