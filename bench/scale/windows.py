"""The CPU of a window where a backfill has many of them: one million records over 72,074 windows of a minute.

The edge's part is the production core with its journal, checkpoints and pulls. Each frame is acknowledged at once. The
center's part is the merge, the ledger and the store on SQLite, without Spark, gateway and frame log.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.first_light.synthetic_edge import STREAM
from center.job.merge import SlicePartial, merge_partials
from center.ledger import EdgesChanged, FrameSummary, Ledger, QueryRegistered
from center.results import MergedDelta, ResultStore
from edge.agent.agent import CHECKPOINT_PAUSES
from edge.core import Acked, Configured, EdgeCore, Ingested, SourcesOpened, StreamSpec
from edge.durability import DurableCore, JournalGroupCommit
from edge.uplink import UplinkOutbox
from edge.uplink.flow_control import LinkForecast
from edgewater.model.edge_records import EdgeRecord, StreamRecord
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery, query_key
from edgewater.model.streams import LIVE, TIME_COLUMN, EdgeId
from edgewater.wire import Frame, QueryRef

COLUMNS = {"key": pa.string(), "value": pa.int64()}
START_MS, WINDOW_MS = 1_700_000_040_000, 60_000
RECORDS_PER_WINDOW, WINDOWS, SMOKE_WINDOWS = 14, 72_074, 300
CHUNK_ROWS = 65_536
CAPACITY_BYTES = 64 << 10
BATCH_FRAMES = (1, 4)
"""Frames of a batch. Four have the about 1,000 slices that a batch reads of a query."""
REF = QueryRef("q", 1)
REF_KEY = query_key(REF)
SPEC = {
    "name": "q",
    "from": STREAM,
    "group_by": ["key"],
    "measures": {"n": "count()", "total": "sum(value)"},
    "window": {"tumbling": "1m"},
    "lateness": "1m",
}


def measure(smoke: bool) -> dict[str, Any]:
    """Returns the CPU of a window at the edge, and at the center in batches of several sizes, by step."""
    windows = SMOKE_WINDOWS if smoke else WINDOWS
    edge, frames = asyncio.run(_edge(windows))
    return {"edge": edge} | {f"center, batches of {size} frames": _center(frames, size) for size in BATCH_FRAMES}


def batches(windows: int) -> list[pa.RecordBatch]:
    rng, rows = np.random.default_rng(1), windows * RECORDS_PER_WINDOW
    times = START_MS + np.arange(rows, dtype=np.int64) * WINDOW_MS // RECORDS_PER_WINDOW
    columns = {
        "key": pa.array(np.array(["a", "b", "c"])[rng.integers(0, 3, rows)]),
        "value": pa.array(rng.integers(0, 1000, rows)),
        TIME_COLUMN: pa.array(times),
    }
    whole = pa.record_batch(columns)
    return [whole.slice(at, CHUNK_ROWS) for at in range(0, rows, CHUNK_ROWS)]


async def _edge(windows: int) -> tuple[dict[str, Any], list[Frame]]:
    """Returns the cost, and the frames."""
    now_ms = START_MS + (windows + 60) * WINDOW_MS
    cpu: dict[str, float] = {"ingest": 0.0, "pulls": 0.0, "checkpoints": 0.0, "acks": 0.0}
    closes, frames, next_s = 0, list[Frame](), 0.0
    with tempfile.TemporaryDirectory() as directory:
        durable = DurableCore(Path(directory), lambda: EdgeCore({STREAM: StreamSpec(COLUMNS)}), _never, "i")
        durable.handle(SourcesOpened(((STREAM, "s"),), ("s",)))
        durable.handle(Configured(((REF, QuerySpec.from_mapping(SPEC)),)))
        commit = JournalGroupCommit(durable)
        committing = asyncio.create_task(commit.run())
        box = UplinkOutbox("e", {}, durable, commit, lambda: now_ms)
        box.on_link(lambda: LinkForecast(1e7, 1e7, 1e7))
        for number, batch in enumerate(batches(windows)):
            began = time.process_time()
            durable.ingest_range(Ingested(STREAM, "s", batch, now_ms), {"n": number}, {"n": number + 1})
            began = _add(cpu, "ingest", began)
            if began >= next_s:
                await commit.checkpoint()
                next_s = time.process_time() + CHECKPOINT_PAUSES * (time.process_time() - began)
            began = _add(cpu, "checkpoints", began)
            while (due := durable.core.pulls.next_pull_ms(1e7, now_ms, 0, {}, 1e7)) is not None and due <= now_ms:
                taken = await box.take(CAPACITY_BYTES)
                frames += taken
                closes += sum(len(frame.unpack().closes) for frame in taken)
                began = _add(cpu, "pulls", began)
                durable.handle(Acked(durable.core.next_seq - 1))
                began = _add(cpu, "acks", began)
        committing.cancel()
        await asyncio.gather(committing, return_exceptions=True)
        durable.close()
    return _row(closes, cpu) | {"frames": len(frames)}, frames


def _center(frames: list[Frame], size: int) -> dict[str, Any]:
    """Merges and applies batches of frames as the job does, each followed by the answers that the batch left."""
    cpu: dict[str, float] = {"merge": 0.0, "apply": 0.0, "ticks": 0.0}
    spec, answers, now_ms = QuerySpec.from_mapping(SPEC), 0, START_MS + 10 * WINDOWS * WINDOW_MS
    record = EdgeRecord(
        EdgeId("e"), "i", {}, (StreamRecord(STREAM, {}, LIVE),), 0, 0, True, {}, {}, {}, 0, 0.0, 0.0, 0.0,
        retired=False, incarnations=1,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        store, ledger = ResultStore(f"sqlite:///{directory}/results.db"), Ledger()
        store.load_ledger(ledger)
        store.tick(ledger, [EdgesChanged((record,)), QueryRegistered(RegisteredQuery(REF, spec, 0, None))], now_ms)
        for at in range(0, len(frames), size):
            began = time.process_time()
            bodies = [(at + n + 1, frame.unpack()) for n, frame in enumerate(frames[at : at + size])]
            merged, _ = merge_partials(
                SlicePartial(REF_KEY, p.slice_start_ms, p.synopsis, n) for n, body in bodies for p in body.partials
            )
            deltas = [MergedDelta(REF, p.slice_start_ms, p.synopsis, p.position) for p in merged]
            began = _add(cpu, "merge", began)
            summaries = [
                FrameSummary(
                    REF, n, EdgeId("e"), body.through_ms, body.closes, tuple(p.slice_start_ms for p in body.partials),
                    100, now_ms, "i",
                )
                for n, body in bodies
            ]  # fmt: skip
            answers += len(store.apply(ledger, deltas, summaries, {REF_KEY: at + len(bodies)}, now_ms))
            began = _add(cpu, "apply", began)
            while (due := ledger.next_deadline()) is not None and due <= now_ms:
                answers += len(store.tick(ledger, [], now_ms))
            _add(cpu, "ticks", began)
        store.close()
    return _row(answers, cpu)


def _row(windows: int, cpu: dict[str, float]) -> dict[str, Any]:
    return {
        "windows": windows,
        "cpu_ms_per_window": {name: round(1000 * used / windows, 4) for name, used in cpu.items()},
        "cpu_s": round(sum(cpu.values()), 1),
    }


def _add(cpu: dict[str, float], name: str, began: float) -> float:
    now = time.process_time()
    cpu[name] += now - began
    return now


def _never(*_: object) -> pa.RecordBatch:
    raise AssertionError("nothing is recovered")
