"""The frame path of a window that many queries close: log, index, planning, reading and retention, without a center."""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from bench.first_light.synthetic_edge import spec, synopsis
from bench.plans import JobCenter
from center.catalog import UnindexedFrame
from center.storage.frame_facts import split_body
from center.storage.frame_log import StoredFrame
from edgewater.base.streams import EdgeId
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import query_key
from edgewater.wire import Frame, FrameBody, Partial, SliceClose

EDGE, STEP_MS = EdgeId("jfk"), 1000


def measure(smoke: bool) -> dict[str, Any]:
    """Returns µs of CPU per frame of each step, fsyncs and segments per commit; one commit a window."""
    queries, windows = (20, 2) if smoke else (500, 6)
    with tempfile.TemporaryDirectory() as directory:
        return _measure(Path(directory), queries, windows)


def _measure(directory: Path, queries: int, windows: int) -> dict[str, Any]:
    specs = [QuerySpec.from_mapping(spec(f"q{n}")) for n in range(queries)]
    center = JobCenter(directory, specs, [EDGE], {"key": pa.string(), "value": pa.int64()}, lambda: 0)
    used_s: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def timed(step: str) -> Iterator[None]:
        began_s = time.process_time()
        yield
        used_s[step] += time.process_time() - began_s

    partial = synopsis(1, 0)
    for window in range(windows + 1):
        if window == 1:  # the first window warms up
            used_s.clear()
        start_ms, seq = window * STEP_MS, window * queries
        closed = FrameBody(start_ms + STEP_MS, (Partial(start_ms, partial),), (SliceClose(start_ms, 1, 0),))
        frames = [Frame.pack(seq + n, ref, closed) for n, ref in enumerate(center.refs)]
        partials, facts = split_body(closed)
        stored = [StoredFrame(f.query, EDGE, "i", f.seq, partials) for f in frames]
        with mock.patch.object(os, "fsync", wraps=os.fsync) as fsync, timed("log"):
            located = center.log.append(stored)
        rows = [
            UnindexedFrame(f.query, EDGE, "i", f.seq, f.crc32c, f.wire_bytes, start_ms, at, f.raw_bytes, 4, facts=facts)
            for f, at in zip(frames, located, strict=True)
        ]
        with timed("index"):
            center.catalog.frames.index(rows)
        with timed("plan"):
            run = center.next_run()
        if run is None or len(run.frames) != queries:
            raise RuntimeError(f"not {queries} frames are planned: {run}")
        with timed("merge"):
            center.merge(run)
        center.after |= run.through
    segments = len(center.log.segments())
    with timed("retention"):
        center.catalog.frames.drop({query_key(ref): windows + 1 for ref in center.refs})
    used_s["retention"] *= windows / (windows + 1)
    center.close()
    return {
        "queries": queries,
        "cpu_us_per_frame": {step: round(s / windows / queries * 1e6, 1) for step, s in used_s.items()},
        "fsyncs_per_commit": fsync.call_count,
        "segments_per_commit": segments / (windows + 1),
    }
