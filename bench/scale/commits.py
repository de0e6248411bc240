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
from bench.plans import merge, next_run
from center.catalog import Catalog, UnindexedFrame
from center.job.admission import BatchLimits
from center.job.planner import FramePlanner
from center.storage.frame_facts import split_body
from center.storage.frame_log import FrameLog, StoredFrame
from edgewater.model.edge_records import StreamRecord
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import query_key
from edgewater.model.streams import LIVE, EdgeId
from edgewater.wire import Frame, FrameBody, Partial, SliceClose

EDGE, STEP_MS = EdgeId("jfk"), 1000


def measure(smoke: bool) -> dict[str, Any]:
    """Returns µs of CPU per frame of each step, fsyncs and segments per commit; one commit a window."""
    queries, windows = (20, 2) if smoke else (500, 6)
    with tempfile.TemporaryDirectory() as directory:
        return _measure(Path(directory), queries, windows)


def _measure(directory: Path, queries: int, windows: int) -> dict[str, Any]:
    url = f"sqlite:///{directory}/center.db"
    catalog, log = Catalog(url), FrameLog(directory / "log")
    specs = [QuerySpec.from_mapping(spec(f"q{n}")) for n in range(queries)]
    columns = {"key": pa.string(), "value": pa.int64()}
    catalog.edges.begin_session(
        EDGE, "i", labels={}, streams=(StreamRecord(specs[0].stream, columns, LIVE),), oldest_seq=0, next_seq=0,
        now_ms=0, session="s",
    )  # fmt: skip
    refs = [catalog.queries.register(query, 0)[0].ref for query in specs]
    planner, after = FramePlanner(catalog, dict, BatchLimits(), time.monotonic), dict[str, int]()
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
        frames = [Frame.pack(seq + n, ref, closed) for n, ref in enumerate(refs)]
        partials, facts = split_body(closed)
        stored = [StoredFrame(f.query, EDGE, "i", f.seq, partials) for f in frames]
        with mock.patch.object(os, "fsync", wraps=os.fsync) as fsync, timed("log"):
            located = log.append(stored)
        rows = [
            UnindexedFrame(f.query, EDGE, "i", f.seq, f.crc32c, f.wire_bytes, start_ms, at, f.raw_bytes, 4, facts=facts)
            for f, at in zip(frames, located, strict=True)
        ]
        with timed("index"):
            catalog.frames.index(rows)
        with timed("plan"):
            run = next_run(planner, after)
        if run is None or len(run.frames) != queries:
            raise RuntimeError(f"not {queries} frames are planned: {run}")
        with timed("merge"):
            merge(run, directory / "log")
        after |= run.through
    segments = len(log.segments())
    with timed("retention"):
        catalog.frames.drop({query_key(ref): windows + 1 for ref in refs})
    used_s["retention"] *= windows / (windows + 1)
    catalog.close()
    return {
        "queries": queries,
        "cpu_us_per_frame": {step: round(s / windows / queries * 1e6, 1) for step, s in used_s.items()},
        "fsyncs_per_commit": fsync.call_count,
        "segments_per_commit": segments / (windows + 1),
    }
