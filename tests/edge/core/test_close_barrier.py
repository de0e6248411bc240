"""The close barrier: slices with sampled-out records whose arrivals have not been reported."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from edge.core.close_barrier import close_barrier_ms
from edge.core.core import EdgeCore
from edge.core.events import Ingested, PullEvent, SamplingSet
from edge.core.streams import StreamSpec
from edgewater.base.streams import LIVE, TIME_COLUMN
from edgewater.model.query import QuerySpec
from edgewater.wire import FrameBody, QueryRef
from tests.cores import open_core, pulled

REF = QueryRef("q", 1)
COLUMNS = {"x": pa.float64()}
STEP_MS = 10


def core(disorder_ms: int = 200, **parts: object) -> EdgeCore:
    given = {
        "name": "q", "from": "s", "measures": {"total": "sum(x)"}, "window": {"tumbling": "1s"},
        "accuracy": {"error": "5%", "substream": "500ms"}, "lateness": "20s",
    }  # fmt: skip
    edge = open_core(
        StreamSpec(COLUMNS, LIVE, disorder_ms), (REF, QuerySpec.from_mapping({**given, **parts})), source="f", number=3
    )
    edge.handle(SamplingSet(REF, 0.5))
    return edge


def come(edge: EdgeCore, arrival_ms: int, *times_ms: int) -> None:
    times = np.array(times_ms, np.int64)
    batch = pa.record_batch({"x": pa.array(np.ones(len(times))), TIME_COLUMN: times})
    edge.handle(Ingested("s", "f", batch, arrival_ms))


def pulls(edge: EdgeCore, now_ms: int) -> list[FrameBody]:
    """All bodies that are due now. A pull that is due must send something, or the caller would loop."""
    bodies = []
    while (due := edge.pulls.next_pull_ms(1e9, now_ms)) is not None and due <= now_ms:
        built = pulled(edge, PullEvent(1 << 16, edge.pulls.event_times(now_ms)))
        assert built, f"nothing leaves at {now_ms}"
        bodies += [frame.unpack() for frame in built]
    return bodies


def test_no_pull_is_due_before_the_report_that_a_slice_waits_for() -> None:
    hour = 3_600_000
    edge = core(1_000, window={"tumbling": "1h"}, accuracy={"error": "5%"}, lateness="1h")
    come(edge, hour - 50, *range(hour - 1_000, hour - 60, 10))
    pulls(edge, hour)
    come(edge, hour + 200_000, hour - 40, hour + 199_000)
    pulls(edge, hour + 200_000)
    due = edge.pulls.next_pull_ms(1e9, hour + 200_000)
    assert due == hour + 360_000, "the next end of a sub-stream"
    assert [c.slice_start_ms for body in pulls(edge, due) for c in body.closes] == [0]


@pytest.mark.nightly
@pytest.mark.parametrize("window", [{"tumbling": "1s"}, {"sliding": "4s", "every": "2s"}])
def test_late_records_do_not_hold_back_later_slices(window: dict[str, str]) -> None:
    edge, rng, lags = core(window=window), np.random.default_rng(1), []
    slice_ms = edge.queries[REF].spec.window.slice_ms
    for now in range(STEP_MS, 6_000, STEP_MS):
        late = max(now - int(rng.exponential(3_000)), 0)  # one in each step: one is unreported at each report slot
        come(edge, now, *sorted([late, *(now - rng.integers(1, 16, 5)).tolist()]))
        pulls(edge, now)
        lags.append(now - edge.queries[REF].through_ms)
    # A slice is closed 200 ms behind its end, or at one of the points behind that, 500 ms apart at most.
    assert max(lags[500:]) <= slice_ms + 200 + 1_000


def test_late_records_of_a_closed_slice_hold_back_only_the_close_that_makes_their_window_final() -> None:
    edge = core(lateness="20s")
    come(edge, 900, *range(0, 900, 10))
    store, spec = edge.queries[REF].store, edge.queries[REF].spec
    assert store.slices[0].unreported_until_ms == 900

    def barrier_ms(watermark_ms: int, through_ms: int) -> int:
        return close_barrier_ms(store.slices, spec, 500, watermark_ms, through_ms)

    assert barrier_ms(6_000, 500) == 999, "it has not been closed"
    assert barrier_ms(6_000, 3_000) == 6_000
    assert barrier_ms(30_000, 3_000) == 20_999
    assert barrier_ms(30_000, 21_000) == 30_000


def test_a_late_record_is_reported_before_its_window_is_final() -> None:
    edge = core(lateness="2s")
    come(edge, 900, *range(0, 900, 10))
    come(edge, 1_490, 1_250)
    pulls(edge, 1_500)
    assert edge.queries[REF].through_ms >= 1_000, "closed"
    come(edge, 2_960, 2_760)
    pulls(edge, 3_000)
    come(edge, 3_210, 500, 3_210)  # the watermark is at 3,010: with it the first window would be final
    before = [body for now in range(3_210, 3_500) for body in pulls(edge, now)]
    untold = [b for b in before if b.arrivals is None or not b.arrivals.substreams]
    assert all(b.through_ms < 3_000 for b in untold)
    told = [*before, *pulls(edge, 3_500)]
    first = next(i for i, b in enumerate(told) if any(c.slice_start_ms == 0 for c in b.closes))
    assert all(b.through_ms < 3_000 for b in told[:first])
    assert edge.queries[REF].through_ms >= 3_000


def test_an_edge_whose_clock_was_ahead_continues_with_the_corrected_time() -> None:
    edge, ahead = core(), 3_600_000
    come(edge, ahead + 900, *range(0, 900, 10))
    told = [b.arrivals.through_ms for b in pulls(edge, ahead + 1_000) if b.arrivals is not None]
    assert told == [ahead + 1_000], "what it is worth it does not know yet"
    edge.handle(SamplingSet(REF, 0.5, float(ahead)))
    come(edge, ahead + 1_490, 950, 1_250)
    fresh = core()
    fresh.restore(edge.to_state())
    for each in (edge, fresh):
        bodies = pulls(each, ahead + 1_500)
        assert [b.arrivals.through_ms for b in bodies if b.arrivals is not None] == [1_500]
        assert [c.slice_start_ms for b in bodies for c in b.closes] == [0]
        assert each.pulls.next_pull_ms(1e9, ahead + 1_500) == ahead + 2_000
