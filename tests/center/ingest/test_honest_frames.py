"""The gateway's check keeps every frame that an edge builds, byte for byte, whatever the query."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from center.ingest.frame_check import FrameCheck
from edge.core.events import Ingested, InputLost, PullEvent, SourceEnded, TickEvent
from edge.core.streams import StreamSpec
from edgewater.base.streams import LIVE, TIME_COLUMN
from edgewater.guard.frame_work import FULL_FRAME_WORK
from edgewater.model.query import QuerySpec
from edgewater.wire import QueryRef, encode_body
from tests.center.kept_frames import kept_body
from tests.cores import drained, open_core
from tests.edge.core.test_shipped_partials import COLUMNS, MEASURES, OTHERS, batch
from tests.query_specs import query_spec

REF = QueryRef("q", 1)
EARLY = {
    "accuracy of one group": {
        "group_by": None,
        "accuracy": {"measure": "m", "error": "5%", "confidence": "95%"},
        "measures": {"m": "mean(amount)"},
    },
    "lateness": {"group_by": ["flag"], "lateness": "7s", "measures": {"n": "count()"}},
}


@pytest.mark.parametrize("name", [*OTHERS, *EARLY])
@pytest.mark.nightly
def test_an_edges_frames_pass(name: str) -> None:
    query = {"name": "q", "from": "s", "group_by": ["word", "flag"], "window": {"tumbling": "5s"},
             "measures": MEASURES, **(OTHERS | EARLY)[name]}  # fmt: skip
    spec = QuerySpec.from_mapping({key: value for key, value in query.items() if value is not None})
    core = open_core(StreamSpec(COLUMNS, LIVE), (REF, spec))
    check, rng, now_ms, shipped = FrameCheck(spec), np.random.default_rng(7), 0, 0
    # The last batch is late, and drops records.
    for round_, start_ms in enumerate((0, 6_000, 12_000, 40_000, 1_000)):
        now_ms = max(now_ms, start_ms + 12_000)
        core.handle(Ingested("s", "file", batch(rng, start_ms), now_ms))
        core.handle(TickEvent(now_ms))
        if round_ == 2:
            core.handle(InputLost("s", "file", "file-truncated", now_ms))
        if round_ == 4:
            core.handle(SourceEnded("s", "file"))
        for frame in drained(core, PullEvent(1 << 14, {"s": now_ms})):
            checked = check.check(frame, now_ms)
            kept = encode_body(kept_body(checked))  # values may be NaN
            assert (kept, checked.reason, checked.message) == (frame.plain_body(), None, "")
            shipped += 1
    assert shipped > 1


def test_the_slices_of_a_long_outage_come_in_frames_that_no_query_waits_long_for() -> None:
    slices, every_ms, windows = 200, 1_000_000, 500
    spec = query_spec(window={"sliding": "500s", "every": "1s"})
    core = open_core(StreamSpec({"x": pa.int64()}, LIVE), (REF, spec))
    starts = np.arange(slices) * every_ms
    records = pa.record_batch({"x": pa.array(starts), TIME_COLUMN: pa.array(starts)})
    now_ms = int(starts[-1]) + every_ms
    core.handle(Ingested("s", "file", records, now_ms))
    core.handle(SourceEnded("s", "file"))
    check, partials, closes, through_ms = FrameCheck(spec), list[int](), list[int](), 0
    for frame in drained(core, PullEvent(1 << 20, {"s": now_ms})):
        checked, body = check.check(frame, now_ms), frame.unpack()
        assert (kept_body(checked), checked.reason) == (body, None)
        assert checked.work < FULL_FRAME_WORK + 2 * windows
        assert max(c.slice_start_ms for c in body.closes) < body.through_ms
        partials += [p.slice_start_ms for p in body.partials]
        closes += [c.slice_start_ms for c in body.closes]
        assert through_ms < body.through_ms and closes == starts[: len(closes)].tolist()
        through_ms = body.through_ms
        assert len(closes) == slices or through_ms < starts[len(closes)] + every_ms
    assert partials == closes == starts.tolist()
