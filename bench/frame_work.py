"""``python -m bench.frame_work``: what the largest frames that the gateway accepts cost the job, by kind.

One edge sends one frame that asks for far more than a frame may have. The gateway's check cuts it, and the job's reader
and processor apply what is left, without a JVM: Spark only carries rows between the two. All queries wait for one
transaction, so the greatest CPU time of one is what a frame can delay other queries' answers by. It is also given per
unit of work, which is what bounds frames (`edgewater/frame_work.py`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadMaxBytes

from center.catalog import Catalog, StreamRecord, UnindexedFrame
from center.ingest.frame_check import FrameCheck
from center.job.frame_source import FrameReader, SourceOptions
from center.job.ledger_writer import CatalogEvents, LedgerWriter
from center.job.metrics import JobMetrics
from center.job.microbatch import BatchProcessor
from center.job.rows import ROW_SCHEMA
from center.ledger import Ledger
from center.results import ResultStore
from center.storage.frame_log import FrameLog, StoredFrame
from edgewater.frame_work import MAX_FRAME_WORK
from edgewater.query import QuerySpec
from edgewater.streams import LIVE, EdgeId
from edgewater.synopses import GroupedAggregate
from edgewater.wire import Frame, FrameBody, Partial, SliceClose, Withheld

NOW_MS = 1_790_000_000_000
COLUMNS = {"key": pa.string(), "x": pa.int64()}
ONE = {"m": "sum(x)"}
SUMS = {f"m{i}": "sum(x)" for i in range(32)}
MIXED = {
    "n": "count()", "least": "min(x)", "most": "max(x)", "mean": "mean(x)", "var": "var(x)",
    "q": "quantiles(x)", "d": "distinct(x)", "top": "top_k(x, 10)",
}  # fmt: skip
GOAL_S = 1.0


@dataclass(frozen=True)
class Collected:
    """What `foreachBatch` passes, as far as the job uses it."""

    rows: pa.Table

    def toArrow(self) -> pa.Table:  # noqa: N802
        return self.rows


def spec(measures: Mapping[str, str], window: Mapping[str, str]) -> QuerySpec:
    return QuerySpec.from_mapping(
        {"name": "q", "from": "s", "group_by": ["key"], "measures": dict(measures), "window": dict(window)}
    )


def partial(query: QuerySpec, groups: int = 1) -> bytes:
    """Returns a partial of a query with one record in each group."""
    measures = query.bind(COLUMNS).measures
    stacks = {m.measure.name: m.measure.function.make(m.measure.parameters, pa.int64()) for m in measures}
    aggregate = GroupedAggregate({"key": pa.string()}, stacks)
    columns = {m.measure.name: None if m.measure.function.name == "count" else pa.array([5] * groups) for m in measures}
    aggregate.update([pa.array([f"key-{i:07d}" for i in range(groups)])], columns, groups)
    return aggregate.to_bytes()


def partials(measures: Mapping[str, str], count: int, every_ms: int, groups: int = 1) -> Callable[..., FrameBody]:
    def body(query: QuerySpec) -> FrameBody:
        data = partial(query, groups)
        return FrameBody(0, tuple(Partial(NOW_MS - every_ms * i, 0, data) for i in range(1, count + 1)))

    return body


def closes(count: int, every_ms: int, *, withheld: int = 0, session: bool = False) -> Callable[..., FrameBody]:
    def body(query: QuerySpec) -> FrameBody:
        report = tuple(Withheld(f"m{i}", 1.0, 0.0, 1.0, 0.0, 1) for i in range(withheld))
        starts = [NOW_MS - every_ms * i for i in range(1, count + 1)]
        return FrameBody(0, (), tuple(SliceClose(s, 1, 0, report, *((s, s) if session else ())) for s in starts))

    return body


TUMBLING, SLIDING, SESSION = {"tumbling": "1s"}, {"sliding": "500s", "every": "1s"}, {"session": "1s"}
KINDS: dict[str, tuple[Mapping[str, str], Mapping[str, str], Callable[..., FrameBody]]] = {
    "partials": (ONE, TUMBLING, partials(ONE, 20_000, 1_000)),
    "partials, 32 sums": (SUMS, TUMBLING, partials(SUMS, 2_000, 1_000)),
    "partials, 8 functions": (MIXED, TUMBLING, partials(MIXED, 3_000, 1_000)),
    "partial, 1 M groups": (ONE, TUMBLING, partials(ONE, 1, 1_000, groups=1_000_000)),
    "partials, sliding": (ONE, SLIDING, partials(ONE, 2_000, 500_000)),
    "closes": (ONE, TUMBLING, closes(60_000, 1_000)),
    "closes, withheld": (SUMS, TUMBLING, closes(1_900, 1_000, withheld=32)),
    "closes, sliding": (ONE, SLIDING, closes(60_000, 1_000)),
    "closes, sessions": (ONE, SESSION, closes(60_000, 2_000, session=True)),
}


def cost(kind: str, directory: Path) -> dict[str, Any]:
    """Sends a frame of a kind; returns its size, its work and CPU seconds."""
    measures, window, body_of = KINDS[kind]
    query, edge, url = spec(measures, window), EdgeId("evil"), f"sqlite:///{directory}/center.db"
    catalog, log, store, ledger = Catalog(url), FrameLog(directory / "log"), ResultStore(url), Ledger()
    streams = (StreamRecord("s", COLUMNS, LIVE),)
    catalog.begin_session(edge, "i", labels={}, streams=streams, oldest_seq=0, next_seq=0, now_ms=NOW_MS, session="s")
    ref = catalog.register(query, NOW_MS).ref
    frame = Frame.pack(0, ref, body_of(query))
    began_s = time.process_time()
    checked = FrameCheck(query, COLUMNS).check(frame, NOW_MS)
    check_s = time.process_time() - began_s
    (location,) = log.append([StoredFrame(edge, "i", checked.frame)])
    row = UnindexedFrame(
        ref, edge, "i", 0, frame.crc32c, frame.wire_bytes, NOW_MS, location, frame.raw_bytes, checked.work
    )
    catalog.index([row])
    reader = FrameReader(SourceOptions(url, url, str(directory / "log"), keep_frames_ms=1 << 42))
    metrics = JobMetrics()
    writer = LedgerWriter(ledger, store, CatalogEvents(catalog), metrics, now_ms=lambda: NOW_MS)
    process = BatchProcessor(
        writer, catalog, metrics, directory / "log", now_ms=lambda: NOW_MS, monotonic=time.monotonic
    )
    start, taken = reader.initialOffset(), []
    while (end := reader.latestOffset(start, ReadMaxBytes(1 << 30))) != start:
        began_s = time.process_time()
        read = [batch for part in reader.partitions(start, end) for batch in reader.read(part)]
        process(Collected(pa.Table.from_batches(read, ROW_SCHEMA)), 0)
        taken.append(time.process_time() - began_s)
        start = end
    writer.close()
    return {
        "wire_kib": frame.wire_bytes >> 10,
        "work": checked.work,
        "refused": checked.reason or "",
        "gateway_s": check_s,
        "job_s": max(taken),
        "us_per_unit": 1e6 * max(taken) / checked.work,
    }


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"{'frame of':24}{'wire KiB':>9}{'work':>8}{'gateway':>9}{'job':>8}{'per unit':>10}  refused"]
    for kind, r in rows.items():
        lines.append(
            f"{kind:24}{r['wire_kib']:>9}{r['work']:>8}{r['gateway_s']:>7.2f} s{r['job_s']:>6.2f} s"
            f"{r['us_per_unit']:>7.1f} µs  {r['refused']}"
        )
    worst = max(r["job_s"] for r in rows.values())
    return "\n".join([*lines, f"at most {MAX_FRAME_WORK} units; the worst delays others {worst:.2f} s, goal {GOAL_S}"])


@click.command()
@click.option("--smoke", is_flag=True, help="Two kinds of frames.")
def main(smoke: bool) -> None:
    """Measure the largest frames that the gateway accepts."""
    rows = {}
    for kind in ("partials", "closes, sliding") if smoke else KINDS:
        with tempfile.TemporaryDirectory(prefix="edgewater-frame-work-") as directory:
            rows[kind] = cost(kind, Path(directory))
    click.echo(table(rows))


if __name__ == "__main__":
    main()
