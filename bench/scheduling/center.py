"""200 queries at one center that is short of CPU, by slack and round robin.

The production reader, admission, ledger and stores, without a JVM. Time is virtual: it advances by the CPU time that
batches take, so that other work of the machine does not matter. First the capacity is measured, then CPU time is
stretched so that the frames need a share of it. The latency is that of the frames that close a window, from their
arrival until their batch is applied.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.plans import JobCenter
from bench.scheduling.cells import Row
from bench.scheduling.round_robin import RoundRobin
from center.catalog import UnindexedFrame
from center.job.admission import BatchLimits, LeastSlack
from center.storage.frame_facts import split_body
from center.storage.frame_log import StoredFrame
from edgewater.base.streams import EdgeId
from edgewater.guard.frame_work import FrameWork
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import query_key
from edgewater.synopses import GroupedAggregate
from edgewater.wire import Frame, FrameBody, Partial, QueryRef, SliceClose

BEGIN_MS = 1_790_000_000_000
STEP_MS = 5_000
EDGES = 3
PARTS = 4
"""Frames of one edge and window that have a partial; the last one closes the window."""
LOADS = (0.7, 0.95, 1.2)
COLUMNS = {"key": pa.string(), "x": pa.int64()}
LIMITS = BatchLimits(frames=256)
"""Below the default, so that a short run has many batches."""


@dataclass(frozen=True, order=True)
class _Send:
    at_ms: float
    query: int
    edge: int
    window: int
    part: int


class Center(JobCenter):
    """One center, whose clock is the CPU time of its job."""

    def __init__(self, directory: Path, queries: int, admission: LeastSlack | None) -> None:
        self.clock_ms = float(BEGIN_MS)
        self.offsets_ms = [number * STEP_MS // queries for number in range(queries)]
        self._specs = [_spec(number, offset_ms) for number, offset_ms in enumerate(self.offsets_ms)]
        self._edges = [EdgeId(f"edge{number}") for number in range(EDGES)]
        super().__init__(directory, self._specs, self._edges, COLUMNS, self.now_ms, LIMITS, admission)
        self._partial = _partial(self._specs[0])
        self._seqs = dict.fromkeys(self._edges, 0)
        self._closing: dict[QueryRef, dict[int, float]] = {ref: {} for ref in self.refs}
        self._positions: dict[QueryRef, int] = dict.fromkeys(self.refs, 0)
        self._through_ms: dict[tuple[int, int], int] = {}
        self.slowness = 1.0

    def now_ms(self) -> int:
        return int(self.clock_ms)

    def receive(self, sends: Sequence[_Send]) -> None:
        """Writes and indexes frames; a gateway does it on another core, so it takes no time here."""
        if not sends:
            return
        stored, rows = [], []
        for send in sends:
            spec, ref, edge = self._specs[send.query], self.refs[send.query], self._edges[send.edge]
            start_ms = BEGIN_MS + self.offsets_ms[send.query] + send.window * STEP_MS
            closes = (SliceClose(start_ms, PARTS, 0),) if send.part == PARTS - 1 else ()
            # A frame of the next window may arrive before the frame that closes this window.
            through_ms = start_ms + STEP_MS if closes else self._through_ms.get((send.query, send.edge), BEGIN_MS)
            self._through_ms[send.query, send.edge] = through_ms
            body = FrameBody(through_ms, (Partial(start_ms, self._partial),), closes)
            frame = Frame.pack(self._seqs[edge], ref, body)
            self._seqs[edge] += 1
            self._positions[ref] += 1
            if closes:
                self._closing[ref][self._positions[ref]] = send.at_ms
            partials, facts = split_body(body)
            stored.append(StoredFrame(ref, edge, "i", frame.seq, partials))
            work = FrameWork.of(spec)
            work.add_slice(start_ms, work.of_partial(len(self._partial)) + work.of_close(0) * len(closes))
            rows.append((ref, edge, frame, facts, work.units, through_ms, int(send.at_ms)))
        locations = self.log.append(stored)
        self.catalog.frames.index([
            UnindexedFrame(
                ref, edge, "i", f.seq, f.crc32c, f.wire_bytes, at_ms, location, f.raw_bytes, units, through_ms,
                facts=facts,
            )
            for (ref, edge, f, facts, units, through_ms, at_ms), location in zip(rows, locations, strict=True)
        ])  # fmt: skip

    def batch(self) -> list[float]:
        """Runs a plan and advances the clock. Returns the latencies of closing frames that it applied, in ms."""
        began_s = time.process_time()
        run = self.next_run()
        if run is None:
            return []
        merged = self.merge(run)
        self.planner.done(run, self.slowness * (time.process_time() - began_s))
        self.apply(run, merged)
        self.clock_ms += 1e3 * self.slowness * (time.process_time() - began_s)
        latencies = []
        for ref, closing in self._closing.items():
            applied = run.through.get(query_key(ref), 0)
            latencies += [self.clock_ms - closing.pop(position) for position in list(closing) if position <= applied]
        return latencies


def _spec(number: int, offset_ms: int) -> QuerySpec:
    window = {"tumbling": f"{STEP_MS}ms", "offset": f"{offset_ms}ms"} if offset_ms else {"tumbling": f"{STEP_MS}ms"}
    return QuerySpec.from_mapping(
        {"name": f"q{number:03}", "from": "s", "group_by": ["key"], "measures": {"m": "sum(x)"}, "window": window}
    )


def _partial(spec: QuerySpec, groups: int = 20) -> bytes:
    measures = spec.bind(COLUMNS).measures
    stacks = {m.measure.name: m.measure.stack(pa.int64()) for m in measures}
    aggregate = GroupedAggregate({"key": pa.string()}, stacks)
    keys = pa.array([f"key-{number:03}" for number in range(groups)])
    aggregate.update([keys], {"m": pa.array(range(groups), pa.int64())}, groups)
    return aggregate.to_bytes()


def _sends(offsets_ms: list[int], windows: int, rng: np.random.Generator) -> list[_Send]:
    result = []
    for query, offset_ms in enumerate(offsets_ms):
        for edge in range(EDGES):
            for window in range(windows):
                begin_ms = BEGIN_MS + offset_ms + window * STEP_MS
                times = [*np.sort(rng.uniform(0, STEP_MS, PARTS - 1)), STEP_MS + rng.uniform(20, 200)]
                result += [_Send(begin_ms + at, query, edge, window, part) for part, at in enumerate(times)]
    return sorted(result)


def center_rows(queries: int = 200, windows: int = 4, loads: Sequence[float] = LOADS) -> list[Row]:
    busy_s, frames = _run("round robin", 0.0, queries, 1)[1:]
    slowness = STEP_MS / 1e3 / (busy_s / frames * queries * EDGES * PARTS)
    rows = []
    for load in loads:
        for policy in ("least slack", "round robin"):
            latencies, busy_s, frames = _run(policy, load * slowness, queries, windows)
            p90, p99 = np.quantile(latencies, [0.9, 0.99])
            rows.append(
                {
                    "part": "center",
                    "policy": policy,
                    "load": load,
                    "down_s": 0,
                    "queries": queries,
                    "ms_per_frame": float(1e3 * busy_s / frames),
                    "latency_ms_mean": float(np.mean(latencies)),
                    "latency_ms_p90": float(p90),
                    "latency_ms_p99": float(p99),
                }
            )
    return rows


def _run(policy: str, slowness: float, queries: int, windows: int) -> tuple[list[float], float, int]:
    """Returns latencies, CPU seconds of the job, and frames. A CPU second counts as `slowness` seconds; 0: all frames
    come at once.
    """
    with tempfile.TemporaryDirectory(prefix="edgewater-scheduling-") as directory:
        center = Center(Path(directory), queries, RoundRobin() if policy == "round robin" else None)
        center.slowness = slowness or 1.0
        sends = _sends(center.offsets_ms, windows, np.random.default_rng(1))
        if not slowness:
            center.clock_ms = sends[-1].at_ms
        latencies: list[float] = []
        at, busy_s = 0, 0.0
        while at < len(sends) or len(latencies) < queries * EDGES * windows:
            next_at = at
            while next_at < len(sends) and sends[next_at].at_ms <= center.clock_ms:
                next_at += 1
            center.receive(sends[at:next_at])
            at, before_ms = next_at, center.clock_ms
            latencies += center.batch()
            busy_s += (center.clock_ms - before_ms) / 1e3 / center.slowness
            if center.clock_ms == before_ms:
                center.clock_ms = sends[at].at_ms
        center.close()
    return latencies, busy_s, len(sends)
