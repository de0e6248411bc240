"""CPU time of arrival statistics and sampling per event, compared with the core's CPU time for the same batches.

The batches are those of an edge at its limit of 500,000 events/s; statistics are taken at the report slots of windows
of 3 s. The core runs alone, and after Arrow's NDJSON reader. At a sampling rate of 1 all values are summed, as for an
unsampled sum or mean. At 0 no values are summed, as for a count. `accuracy_in_core` is the total additional time of an
ungrouped sum with an accuracy. All variants run alternately on one core; each result is the minimum of several rounds,
in CPU time.

`sent_bytes` compares what an edge sends with and without an error budget beside the accuracy.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json

from edge.arrivals import BernoulliSampler, SubstreamMonitor
from edge.core import Acked, Configured, EdgeCore, FrameBuilt, Ingested, PullEvent, SourcesOpened, StreamSpec
from edgewater.arrivals import ReportSchedule
from edgewater.model.accuracy import report_schedule
from edgewater.model.query import QuerySpec
from edgewater.model.streams import LIVE, TIME_COLUMN
from edgewater.synopses import FloatArray, IntArray
from edgewater.wire import Frame, QueryRef

EVENTS, RATE, URLS = 400_000, 500_000, 977
QUERY = {
    "name": "bytes", "from": "downloads", "group_by": ["url"], "measures": {"bytes": "sum(bytes)", "n": "count()"},
    "window": {"tumbling": "3s"}, "lateness": "1h",
}  # fmt: skip
PLAIN = {
    "name": "bytes", "from": "downloads", "measures": {"bytes": "sum(bytes)"}, "window": {"tumbling": "3s"},
    "lateness": "1h",
}  # fmt: skip
ACCURATE = PLAIN | {"accuracy": {"error": "5%"}}

Batch = tuple[pa.RecordBatch, IntArray, FloatArray, int]


def overhead(batch: int = 10_000, repeats: int = 7) -> list[dict[str, Any]]:
    """Returns one row per sampling rate: ns per event of monitor and sampler, core and NDJSON ingest, and ratios."""
    batches = _batches(batch)
    text = [_ndjson(b[0]) for b in batches[:10]]
    core = _least(lambda: _ingest(batches, QUERY), repeats)
    inside = _least(lambda: _ingest(batches, ACCURATE), repeats) - _least(lambda: _ingest(batches, PLAIN), repeats)
    decode = _least(lambda: [pa_json.read_json(io.BytesIO(t)) for t in text], repeats) * len(batches) / len(text)
    rows = []
    for rate in (0.0, 0.1, 1.0):
        ours = _least(lambda rate=rate: _watch(batches, rate), repeats)  # type: ignore[misc]
        rows.append({
            "batch": batch, "sampling_rate": rate, "monitor_and_sampler_ns": ours / EVENTS * 1e9,
            "accuracy_in_core_ns": inside / EVENTS * 1e9, "edge_core_ns": core / EVENTS * 1e9,
            "ndjson_ingest_ns": (core + decode) / EVENTS * 1e9,
            "share_of_edge_core": ours / core, "share_of_ndjson_ingest": ours / (core + decode),
        })  # fmt: skip
    return rows


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


def _batches(size: int) -> list[Batch]:
    rng = np.random.default_rng(1)
    arrival = np.sort(rng.random(EVENTS)) * EVENTS / RATE * 1000
    born = (arrival - rng.exponential(240, EVENTS)).astype(np.int64) + 1_700_000_000_000
    value = rng.lognormal(1, 0.8, EVENTS)
    urls = pa.array([f"/p/{i}" for i in range(URLS)])
    url = urls.take(pa.array(np.minimum(rng.zipf(1.3, EVENTS) - 1, URLS - 1)))
    result = []
    for at in range(0, EVENTS, size):
        part = slice(at, at + size)
        columns = {TIME_COLUMN: pa.array(born[part]), "url": url.slice(at, size), "bytes": pa.array(value[part])}
        now = int(arrival[part][-1]) + 1 + 1_700_000_000_000
        result.append((pa.RecordBatch.from_pydict(columns), born[part], value[part], now))
    return result


def _ndjson(batch: pa.RecordBatch) -> bytes:
    lines = [f'{{"{TIME_COLUMN}":{t},"url":"{u}","bytes":{b}}}\n' for t, u, b in zip(
        *(c.to_pylist() for c in batch.columns), strict=True)]  # fmt: skip
    return "".join(lines).encode()


def _ingest(batches: list[Batch], query: dict[str, Any]) -> None:
    core = EdgeCore({"downloads": StreamSpec({"url": pa.string(), "bytes": pa.float64()})})
    core.handle(Configured(((QueryRef("bytes", 1), QuerySpec.from_mapping(query)),)))
    core.handle(SourcesOpened((("downloads", "file"),)))
    for batch, _, _, now in batches:
        core.handle(Ingested("downloads", "file", batch, now))


def _watch(batches: list[Batch], rate: float) -> None:
    clock = _schedule()
    monitor, sampler = SubstreamMonitor(clock.grid), BernoulliSampler(7)
    seen, reported = 0, 0
    for _, born, values, now in batches:
        point = clock.last_report_slot(clock.slot_at(now))
        if point > reported:
            monitor.take()
            reported = point
        if rate == 1:
            monitor.observe(born, now, values)
        elif rate == 0:
            monitor.observe(born, now)
        else:
            kept = sampler.keep(seen, len(born), rate)
            monitor.observe(born, now, values[kept], kept)
        seen += len(born)
    monitor.take()


def _schedule() -> ReportSchedule:
    spec = QuerySpec.from_mapping(ACCURATE)
    found = report_schedule(spec.window, spec.accuracy, 0)
    assert found is not None
    return found


def _least(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


if __name__ == "__main__":
    for size in (1_000, 10_000, 50_000):
        for row in overhead(size):
            print("  ".join(f"{k} {v:.3f}" for k, v in row.items()))
    for sent in sent_bytes():
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in sent.items()))
