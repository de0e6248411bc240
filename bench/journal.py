"""`python -m bench.journal [--smoke]`: the cost of journaling frames, and of their checksum at the gateway.

An access log (20,000 records/s, Zipf 1.1 over the groups) and one query with an error budget. After each second, frames
are pulled until there are none, and each is made durable before the next. Compared alternately on one disk: the record
of a pull with its frame; with the numbers of the sent groups (differences, int32, zstd) and a checksum; and with a
checksum only, which requires a replay to select the groups again. Then the time of the gateway's checksum before it
acknowledges a frame: of the received bytes, and of the decompressed body.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import google_crc32c
import numpy as np
import pyarrow as pa

from bench.first_light.edge_rates import COLUMNS, START_MS, access_log
from edge.core import BudgetSet, Configured, EdgeCore, FrameBuilt, Ingested, PullEvent, SourcesOpened, StreamSpec
from edge.durability import DurableCore
from edge.durability import durable_core as durable
from edge.durability.event_records import PULL, payload_record, pull_record
from edge.durability.journal import Record
from edge.records import Position
from edgewater.model.query import QuerySpec
from edgewater.model.streams import TIME_COLUMN
from edgewater.synopses import GroupedAggregate
from edgewater.wire import Frame, QueryRef

OUT = Path("bench/out")
RATE, REPEATS = 20_000, 3
REF = QueryRef("bytes_by_url", 1)
CASES = {
    "small": (20, 2_000, "1s", 1e6),
    "medium": (2_000, 16_000, "10s", 5e5),
    "large": (100_000, 256_000, "10s", 1e5),
}
"""Groups, capacity of a frame in bytes, window, share of the error budget in bytes."""
PullRecorder = Callable[[PullEvent, Sequence[FrameBuilt]], Record]


def _with_checksum(pull: PullEvent, built: Sequence[FrameBuilt]) -> Record:
    return _shortened(pull, built, lambda _: b"")


def _with_groups(pull: PullEvent, built: Sequence[FrameBuilt]) -> Record:
    return _shortened(pull, built, _groups)


def _shortened(pull: PullEvent, built: Sequence[FrameBuilt], extra: Callable[[Frame], bytes]) -> Record:
    times_ms = {stream: (now_ms, now_ms) for stream, now_ms in pull.times_ms.items()}
    head = {"capacity": pull.capacity_bytes, "drain_windows": times_ms}
    record = Record(PULL, json.dumps(head).encode())
    if not built:
        return record
    return Record(record.kind, record.payload + bytes(12) + b"".join(extra(b.frame) for b in built))


def _groups(frame: Frame) -> bytes:
    """Encodes the numbers of the groups, which their URLs contain."""
    numbers = [
        [int(url.split("/")[2]) for url in GroupedAggregate.from_bytes(p.synopsis).rows()[2].to_pylist()]
        for p in frame.unpack().partials
    ]
    deltas = [np.diff(np.sort(n), prepend=0).astype("<i4").tobytes() for n in numbers]
    return b"".join(pa.compress(d, codec="zstd", asbytes=True) for d in deltas)


VARIANTS: dict[str, PullRecorder] = {
    "checksum": _with_checksum, "groups": _with_groups, "frame": pull_record,
}  # fmt: skip


class LogSource:
    def __init__(self, groups: int, seconds: int) -> None:
        self.batches = []
        for n in range(seconds):
            batch = access_log(RATE, groups, n)
            times = pa.array(batch.column(TIME_COLUMN).to_numpy() + 1000 * n)
            self.batches.append(batch.set_column(batch.schema.get_field_index(TIME_COLUMN), TIME_COLUMN, times))

    def reread(self, source: str, start: Position | None, end: Position) -> pa.RecordBatch:
        return self.batches[end["n"]]


def open_edge(directory: Path, source: LogSource) -> DurableCore:
    return DurableCore(directory, lambda: EdgeCore({"access": StreamSpec(COLUMNS)}), source.reread, "i")


def run(directory: Path, source: LogSource, capacity: int, window: str, share: float) -> dict[str, Any]:
    """Ingests and pulls; returns the time of a sync after a frame, the frames and the size of the journal."""
    edge = open_edge(directory, source)
    query = {
        "name": REF.name, "from": "access", "group_by": ["provider", "country", "url"],
        "measures": {"bytes": "sum(bytes)", "requests": "count()"}, "window": {"tumbling": window},
        "budget": {"error": {"bytes": share}},
    }  # fmt: skip
    edge.handle(SourcesOpened((("access", "file"),)))
    edge.handle(Configured(((REF, QuerySpec.from_mapping(query)),)))
    edge.handle(BudgetSet(REF, {"bytes": share}, 1))
    waits, frames = [], []
    for n, batch in enumerate(source.batches):
        now = START_MS + 1000 * (n + 1)
        edge.ingest_range(Ingested("access", "file", batch, now), None, {"n": n})
        edge.sync()
        while built := [e for e in edge.handle(PullEvent(capacity, {"access": now}, 1e6)) if isinstance(e, FrameBuilt)]:
            began = time.perf_counter()
            edge.sync()
            waits.append((time.perf_counter() - began) * 1000)
            frames.append(built[0].frame)
    edge.sync()
    size = edge.journal_bytes
    edge.close()
    return {"sync_ms_p50": float(np.median(waits)), "frames": frames, "journal_bytes": size}


def journal_cell(name: str, seconds: int) -> dict[str, Any]:
    groups, capacity, window, share = CASES[name]
    source = LogSource(groups, seconds)
    waits: dict[str, list[float]] = {v: [] for v in VARIANTS}
    pushed = payload_record(Ingested("access", "file", source.batches[0], START_MS), None, None, None)
    row: dict[str, Any] = {"case": name, "groups": groups, "pushed_records_b_s": len(pushed.payload)}
    for _ in range(REPEATS):
        for variant, record in VARIANTS.items():
            with tempfile.TemporaryDirectory() as directory:
                durable.pull_record = record
                found = run(Path(directory), source, capacity, window, share)
                durable.pull_record = pull_record
                waits[variant].append(found["sync_ms_p50"])
                row[f"{variant}_journal_b_s"] = round(found["journal_bytes"] / seconds)
                if variant == "frame":
                    began = time.perf_counter()
                    open_edge(Path(directory), source).close()
                    row["recovery_s"] = round(time.perf_counter() - began, 3)
    frames = found["frames"]
    row |= {"frames": len(frames), "frame_bytes": round(float(np.mean([f.wire_bytes for f in frames])))}
    row |= {f"{v}_sync_ms": round(float(np.median(w)), 3) for v, w in waits.items()}
    return row | check_cell(frames)


def check_cell(frames: list[Frame]) -> dict[str, Any]:
    """Returns the time of each kind of check, in µs per frame."""
    whole = [replace(f) for f in frames]
    shipped = _us(lambda f: google_crc32c.value(f.body), whole)
    return {
        "raw_bytes": round(float(np.mean([f.raw_bytes for f in frames]))),
        "check_shipped_us": shipped,
        "check_plain_us": _us(Frame.plain_body, whole),
    }


def _us(check: Callable[[Frame], object], frames: list[Frame]) -> float:
    times = []
    for _ in range(5):
        began = time.process_time()
        for frame in frames:
            check(frame)
        times.append((time.process_time() - began) / len(frames) * 1e6)
    return round(min(times), 1)


@click.command()
@click.option("--seconds", default=30, show_default=True, help="Length of the log per case, in seconds.")
@click.option(
    "--smoke",
    is_flag=True,
    help="Check that the bench runs: seconds: two seconds of the log, and the smallest case alone.",
)
def main(seconds: int, smoke: bool) -> None:
    """Print one row per case as JSON, and write them to bench/out/journal.json."""
    rows = [journal_cell("small", 2)] if smoke else [journal_cell(name, seconds) for name in CASES]
    for row in rows:
        click.echo(json.dumps(row))
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "journal.json").write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
