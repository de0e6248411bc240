"""An edge's own part of a window that many queries close: pull, journal and fsync, without a link."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from bench.first_light.synthetic_edge import STREAM, WINDOW_MS, spec
from edge.core import Acked, Configured, EdgeCore, Ingested, SourcesOpened, StreamSpec, TickEvent
from edge.durability import DurableCore, JournalGroupCommit
from edge.uplink import UplinkOutbox, outbox
from edgewater.model.query import QuerySpec
from edgewater.model.streams import TIME_COLUMN
from edgewater.wire import QueryRef
from edgewater.wire import uplink_pb2 as pb

COLUMNS = {"key": pa.string(), "value": pa.int64()}
CAPACITY_BYTES = 256 << 10
START_MS = 1_700_000_000_000


def measure(smoke: bool) -> dict[str, Any]:
    """Returns rows by number of queries and frames of a pull."""
    counts, windows = ((5,), 1) if smoke else ((20, 100, 500), 3)
    return {
        f"{queries} queries, {frames} a pull": asyncio.run(_measure(queries, frames, windows))
        for queries in counts
        for frames in (1, outbox.MAX_PULLED_FRAMES)
    }


async def _measure(queries: int, frames_per_pull: int, windows: int) -> dict[str, float]:
    now_ms, used_s, took_s, taken, messages = START_MS, 0.0, 0.0, 0, []
    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.object(outbox, "MAX_PULLED_FRAMES", frames_per_pull),
        mock.patch.object(os, "fsync", wraps=os.fsync) as fsync,
    ):
        durable = DurableCore(Path(directory), lambda: EdgeCore({STREAM: StreamSpec(COLUMNS)}), _never, "i")
        durable.handle(SourcesOpened(((STREAM, "s"),)))
        specs = [QuerySpec.from_mapping({**spec(f"q{n}"), "edges": None}) for n in range(queries)]
        durable.handle(Configured(tuple((QueryRef(s.name, 1), s) for s in specs)))
        commit = JournalGroupCommit(durable)
        committing = asyncio.create_task(commit.run())
        box = UplinkOutbox("e", {}, durable, commit, lambda: now_ms)
        _ingest(durable, now_ms)
        for window in range(windows + 1):
            now_ms += WINDOW_MS
            _ingest(durable, now_ms)
            durable.handle(TickEvent(now_ms))
            if window == 1:  # the first window warms up
                used_s, took_s, taken, messages = 0.0, 0.0, 0, []
                fsync.reset_mock()
            cpu_s, began_s, got = time.process_time(), time.perf_counter(), 0
            while got < queries:
                frames = [frame.to_wire() for frame in await box.take(CAPACITY_BYTES)]
                got += len(frames)
                messages.append(pb.FromEdge(frames=pb.Frames(frames=frames)).SerializeToString())
            used_s, took_s, taken = (
                used_s + time.process_time() - cpu_s, took_s + time.perf_counter() - began_s, taken + got
            )  # fmt: skip
            durable.handle(Acked(durable.core.next_seq - 1))
        committing.cancel()
        await asyncio.gather(committing, return_exceptions=True)
        durable.close()
    return {
        "cpu_us_per_frame": round(used_s / taken * 1e6, 1),
        "close_cpu_s": round(used_s / windows, 3),
        "close_s": round(took_s / windows, 3),
        "fsyncs_per_close": fsync.call_count / windows,
        "messages_per_close": len(messages) / windows,
        "bytes_per_frame": round(sum(map(len, messages)) / taken, 1),
    }


def _ingest(durable: DurableCore, at_ms: int) -> None:
    columns = {"key": ["a", "b"], "value": [1, 2], TIME_COLUMN: pa.array([at_ms, at_ms], pa.int64())}
    durable.ingest_payload(Ingested(STREAM, "s", pa.record_batch(columns), at_ms))


def _never(*_: object) -> pa.RecordBatch:
    raise AssertionError("nothing is recovered")
