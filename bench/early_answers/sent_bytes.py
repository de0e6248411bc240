"""The bytes that an edge sends with and without an error budget beside the accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from edge.core.core import EdgeCore
from edge.core.events import Acked, Configured, FrameBuilt, Ingested, PullEvent, SourcesOpened
from edge.core.streams import StreamSpec
from edgewater.base.streams import LIVE, TIME_COLUMN
from edgewater.model.query import QuerySpec
from edgewater.wire import Frame, QueryRef

QUERY = {
    "name": "bytes", "from": "downloads", "group_by": ["url"], "measures": {"bytes": "sum(bytes)", "n": "count()"},
    "window": {"tumbling": "3s"}, "lateness": "1h",
}  # fmt: skip


def sent_bytes(budgets: Sequence[str | None] = (None, "1%", "5%"), seconds: int = 60) -> list[dict[str, Any]]:
    """Returns one row per error budget beside an accuracy: the bytes that one edge sends, by kind, and their ratio to
    the first row. Values are the partials, before the compression of the session."""
    rows: list[dict[str, Any]] = []
    for budget in budgets:
        query = QUERY | {"accuracy": {"error": "5%", "measure": "bytes"}, "group_by": ["url"]}
        if budget is not None:
            query |= {"budget": {"error": {"bytes": budget}}}
        frames = _frames(QuerySpec.from_mapping(query), seconds)
        values = sum(len(p.synopsis) for frame in frames for p in frame.unpack().partials)
        whole = sum(frame.wire_bytes for frame in frames)
        first = rows[0] if rows else {"value_bytes": values, "bytes": whole}
        rows.append({
            "budget": budget, "value_bytes": values, "bytes": whole,
            "value_ratio": values / first["value_bytes"], "ratio": whole / first["bytes"],
        })  # fmt: skip
    return rows


def _frames(spec: QuerySpec, seconds: int, rate: int = 5_000, groups: int = 200) -> list[Frame]:
    """Returns the frames of a live edge whose records have exponential delays."""
    rng, begin = np.random.default_rng(1), 1_700_000_001_000
    arrival = begin + np.sort(rng.random(rate * seconds)) * seconds * 1000
    born = (arrival - rng.exponential(240, len(arrival))).astype(np.int64)
    urls = pa.array([f"/p/{i}" for i in range(groups)])
    url = urls.take(pa.array(np.minimum(rng.zipf(1.3, len(born)) - 1, groups - 1)))
    value = pa.array(rng.lognormal(1, 0.8, len(born)))
    core = EdgeCore({"downloads": StreamSpec({"url": pa.string(), "bytes": pa.float64()}, LIVE, 2_000)})
    core.handle(Configured(((QueryRef("bytes", 1), spec),)))
    core.handle(SourcesOpened((("downloads", "file"),)))
    frames: list[Frame] = []
    at = 0
    for now in range(begin + 20, begin + seconds * 1000, 20):
        to = int(np.searchsorted(arrival, now))
        columns = {TIME_COLUMN: pa.array(born[at:to]), "url": url[at:to], "bytes": value[at:to]}
        core.handle(Ingested("downloads", "file", pa.RecordBatch.from_pydict(columns), now))
        at = to
        while (due := core.pulls.next_pull_ms(1e9, now)) is not None and due <= now:
            effects = core.handle(PullEvent(1 << 18, core.pulls.event_times(now)))
            built = [e.frame for e in effects if isinstance(e, FrameBuilt)]
            if not built:
                break
            core.handle(Acked(built[-1].seq))
            frames += built
    return frames


if __name__ == "__main__":
    for sent in sent_bytes():
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in sent.items()))
