"""CPU time that sampling saves for an expensive function: all records processed, compared with the needed sample.

A production `EdgeCore` reads package downloads (a week of CRAN's logs, in order) at a fixed rate, with delays. A
production ledger computes the needed sampling rate after each window, and answers. Everything runs under a virtual
clock. Then a second edge handles the same events, batches and pulls, and its CPU time is measured. Both results exclude
the first windows, in which all records are processed.

A case is a measure; `likeness` compares a package's name with names that typosquatters imitate, by difflib, one string
at a time.

    python -m bench.sampling_pays [--windows 20] [--smoke] [--json]
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from bench.data import DOWNLOADS_WEEK, existing, made_downloads
from center.early import rates_differ
from center.ledger import EdgesChanged, Emission, FramesMerged, FrameSummary, Ledger, QueryRegistered, TimeAdvanced
from edge.core import (
    Acked,
    Configured,
    EdgeCore,
    Effect,
    Event,
    FrameBuilt,
    Ingested,
    PullEvent,
    SamplingSet,
    SourcesOpened,
    StreamSpec,
)
from edgewater.answers import Phase
from edgewater.model import record_functions
from edgewater.model.edge_records import EdgeRecord, StreamRecord
from edgewater.model.query import QuerySpec
from edgewater.model.record_functions import RecordFunction, RecordFunctions
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.streams import LIVE, TIME_COLUMN, EdgeId
from edgewater.synopses import FloatArray, IntArray
from edgewater.wire import Frame, QueryRef, SamplingReason

IMITATED = ("ggplot2", "data.table")
REF, EDGE = QueryRef("q", 1), EdgeId("edge")
COLUMNS = {"package": pa.string()}
WINDOW_MS, DELAY_MS, DISORDER_MS, LATENCY_MS, BEGIN_MS = 3_000, 80.0, 2_000, 30, 1_000_000
STEP_MS = (10, 70)
"""Range of the time between batches, which varies, so that batches are not aligned with windows."""
WARM_UP = 3
"""Windows at the start that are not evaluated, because the edge has no sampling rate yet."""


def likeness(names: pa.Array) -> pa.Array:
    """Returns the similarity of each name to the most similar imitated one, 0 to 1."""
    found = [max(SequenceMatcher(None, name, known).ratio() for known in IMITATED) for name in names.to_pylist()]
    return pa.array(found, pa.float64())


FUNCTIONS = (RecordFunction("likeness", ("string",), "float64", likeness),)


@dataclass(frozen=True, slots=True)
class ExpensiveCase:
    """A measure, and its true value from all records of a window."""

    measure: str
    truth: Callable[[pa.RecordBatch], float]


def _likeness_of(records: pa.RecordBatch) -> FloatArray:
    """Returns the similarity per record, computed once per name."""
    names = records.column("package").dictionary_encode()
    return np.asarray(likeness(names.dictionary).to_numpy()[names.indices.to_numpy()])


CASES = {
    "sum": ExpensiveCase("sum(likeness(package))", lambda r: float(_likeness_of(r).sum())),
    "mean": ExpensiveCase("mean(likeness(package))", lambda r: float(_likeness_of(r).mean())),
}


@dataclass(frozen=True, slots=True)
class SamplingRow:
    case: str
    rate: str
    windows: int
    records: int
    processed: float
    records_s: float
    us_record: float
    error_mean: float
    error_max: float
    within_error: float
    interval_coverage: float


@dataclass(slots=True)
class PackageTrace:
    """The records in order of arrival: event time, arrival time, package."""

    event_ms: IntArray
    arrival: IntArray
    package: pa.Array

    @classmethod
    def read(cls, logs: Path, windows: int, per_s: int, seed: int) -> PackageTrace:
        count = (windows + 2) * WINDOW_MS * per_s // 1000
        rng = np.random.default_rng(seed)
        event_ms = np.arange(count) * 1000 // per_s
        arrival = event_ms + np.ceil(rng.exponential(DELAY_MS, count)).astype(np.int64)
        order = np.argsort(arrival, kind="stable")
        return cls(BEGIN_MS + event_ms[order], BEGIN_MS + arrival[order], _packages(logs, count).take(pa.array(order)))

    def batch(self, rows: slice) -> pa.RecordBatch:
        return pa.record_batch({"package": self.package[rows], TIME_COLUMN: self.event_ms[rows]})

    def window(self, start_ms: int) -> pa.RecordBatch:
        mine = (self.event_ms >= start_ms) & (self.event_ms < start_ms + WINDOW_MS)
        return pa.record_batch({"package": self.package.filter(pa.array(mine))})


def _packages(logs: Path, count: int) -> pa.Array:
    """Returns the packages of the first records of the logs."""
    days: list[pa.Array] = []
    found = 0
    for log in sorted(logs.glob("*.csv.gz")):
        with gzip.open(log) as file:
            table = pa_csv.read_csv(file, convert_options=pa_csv.ConvertOptions(include_columns=["package"]))
        days += table.column("package").cast(pa.string()).chunks
        if (found := sum(map(len, days))) >= count:
            return pa.concat_arrays(days).slice(0, count)
    raise click.UsageError(f"{logs} has {found} records; {count} are needed")


@dataclass(slots=True)
class SamplingRun:
    """One edge and one ledger.

    Attributes:
        sampled: whether the edge uses the sampling rate that the ledger requests.
        events: the events of the edge; from number `counted_from`, after the warm-up.
        read, processed: records after the warm-up, and the sum of their sampling rates.
    """

    trace: PackageTrace
    spec: QuerySpec
    sampled: bool
    core: EdgeCore = field(init=False)
    ledger: Ledger = field(default_factory=lambda: Ledger(margin_ms=50))
    emissions: list[Emission] = field(default_factory=list)
    in_flight: list[tuple[int, Frame]] = field(default_factory=list)
    rate: float = 1.0
    events: list[Event] = field(default_factory=list)
    counted_from: int = 0
    read: int = 0
    processed: float = 0.0

    def __post_init__(self) -> None:
        self.core = _core()
        self._edge(SourcesOpened((("log", "f"),)))
        self._edge(Configured(((REF, self.spec),)))
        record = EdgeRecord(
            edge=EDGE, incarnation="i", labels={}, streams=(StreamRecord("log", COLUMNS, LIVE),), first_seen_ms=0,
            last_seen_ms=0, connected=True, watermarks={}, records={}, drops={}, backlog_bytes=0,
            bandwidth_bytes_s=1e6, rtt_ms=1.0, clock_offset_ms=0.0, retired=False, incarnations=1,
        )  # fmt: skip
        self.ledger.handle(EdgesChanged((record,)))
        self.ledger.handle(QueryRegistered(RegisteredQuery(REF, self.spec, BEGIN_MS - 1, None)))

    def _edge(self, event: Event) -> list[Effect]:
        self.events.append(event)
        return self.core.handle(event)

    def cost_s(self) -> float:
        """Returns the CPU time of another edge for the same events after the warm-up."""
        core = _core()
        for event in self.events[: self.counted_from]:
            core.handle(event)
        began = time.process_time()
        for event in self.events[self.counted_from :]:
            core.handle(event)
        return time.process_time() - began

    def run(self, windows: int) -> None:
        at, warm_ms = 0, BEGIN_MS + WARM_UP * WINDOW_MS
        steps = np.random.default_rng(2).integers(*STEP_MS, (windows + 1) * WINDOW_MS // STEP_MS[0]).cumsum()
        for now in (BEGIN_MS + steps[steps < (windows + 1) * WINDOW_MS]).tolist():
            to = int(np.searchsorted(self.trace.arrival, now, side="right"))
            if now >= warm_ms:
                self.counted_from = self.counted_from or len(self.events)
                self.read, self.processed = self.read + to - at, self.processed + self.rate * (to - at)
            if to > at:
                self._edge(Ingested("log", "f", self.trace.batch(slice(at, to)), now))
            at = to
            self.in_flight += [(now + LATENCY_MS, frame) for frame in self._frames(now)]
            self._center(now)

    def _frames(self, now: int) -> list[Frame]:
        frames: list[Frame] = []
        while (due := self.core.pulls.next_pull_ms(1e9, now)) is not None and due <= now:
            effects = self._edge(PullEvent(1 << 18, self.core.pulls.event_times(now)))
            built = [e.frame for e in effects if isinstance(e, FrameBuilt)]
            if not built:
                break
            frames += built
        if frames:
            self._edge(Acked(frames[-1].seq))
        return frames

    def _center(self, now: int) -> None:
        facts = tuple(_fact(frame, now) for at, frame in self.in_flight if at <= now)
        self.in_flight = [(at, frame) for at, frame in self.in_flight if at > now]
        if facts:
            self.emissions += self.ledger.handle(FramesMerged(facts, now))
        due = self.ledger.next_deadline()
        if due is not None and due <= now:
            self.emissions += self.ledger.handle(TimeAdvanced(now))
        needed = self.ledger.needed_rates().get(REF, {}).get(EDGE, 1.0)
        if self.sampled and rates_differ({EDGE: self.rate}, {EDGE: needed}):
            self.rate = needed
            self._edge(SamplingSet(REF, needed, 0.0, SamplingReason.MEASURE))


def _core() -> EdgeCore:
    return EdgeCore({"log": StreamSpec(COLUMNS, LIVE, DISORDER_MS)}, source=1)


def _fact(frame: Frame, now: int) -> FrameSummary:
    body = frame.unpack()
    touched = tuple(sorted({p.slice_start_ms for p in body.partials}))
    return FrameSummary(
        REF, frame.seq, EDGE, body.through_ms, body.closes, touched, frame.wire_bytes, now, "i", body.since_ms,
        body.arrivals,
    )  # fmt: skip


def measure(name: str, trace: PackageTrace, windows: int, sampled: bool, error: float) -> SamplingRow:
    case = CASES[name]
    spec = QuerySpec.from_mapping(
        {
            "name": "q", "from": "log", "measures": {"m": case.measure}, "window": {"tumbling": f"{WINDOW_MS}ms"},
            "accuracy": {"error": f"{100 * error:g}%", "confidence": "95%"}, "lateness": "2s",
        }
    )  # fmt: skip
    run = SamplingRun(trace, spec, sampled)
    run.run(windows)
    cost_s = run.cost_s()
    errors, contained = [], []
    for answer in run.emissions:
        counted = answer.window_start_ms >= BEGIN_MS + WARM_UP * WINDOW_MS
        if answer.revision > 1 or answer.phase is not Phase.EARLY or not counted:
            continue
        prediction = answer.prediction
        assert prediction is not None
        truth = case.truth(trace.window(answer.window_start_ms))
        errors.append(abs(prediction.estimate - truth) / truth)
        contained.append(prediction.lower <= truth <= prediction.upper)
    return SamplingRow(
        name, "needed" if sampled else "all", len(errors), run.read, run.processed / run.read, run.read / cost_s,
        1e6 * cost_s / run.read, float(np.mean(errors)), float(np.max(errors)),
        float(np.mean(np.array(errors) <= error)), float(np.mean(contained)),
    )  # fmt: skip


@click.command()
@click.option("--windows", default=20, show_default=True)
@click.option("--rate", default=5_000, show_default=True, help="Records per second.")
@click.option("--error", default=0.05, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--smoke", is_flag=True, help="Check that the bench runs: seconds, on a few generated records.")
@click.option("--json", "as_json", is_flag=True)
def main(windows: int, rate: int, error: float, seed: int, smoke: bool, as_json: bool) -> None:
    """Measure each case with all records, and with the sample that the contract needs."""
    point = EntryPoint("bench", "bench.sampling_pays:FUNCTIONS", record_functions.GROUP)
    record_functions.INSTALLED = RecordFunctions(lambda: [point])
    cases = list(CASES)
    with tempfile.TemporaryDirectory() as scratch:
        if smoke:
            cases, windows, rate, logs = cases[:1], 4, 100, made_downloads(Path(scratch), 10_000, days=1)
        else:
            logs = existing(DOWNLOADS_WEEK)
        trace = PackageTrace.read(logs, windows, rate, seed)
    rows = [measure(name, trace, windows, sampled, error) for name in cases for sampled in (False, True)]
    document: dict[str, Any] = {"rows": [asdict(r) for r in rows]}
    document["times_faster"] = {
        all_.case: needed.records_s / all_.records_s for all_, needed in zip(rows[::2], rows[1::2], strict=True)
    }
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    click.echo("case  processed  rate      records/s  µs/record  error mean   max    within  held  windows")
    for r in rows:
        click.echo(
            f"{r.case:5} {r.rate:9} {r.processed:6.1%} {r.records_s:12,.0f} {r.us_record:10.2f} {r.error_mean:10.2%} "
            f"{r.error_max:7.2%} {r.within_error:7.0%} {r.interval_coverage:5.0%} {r.windows:8}"
        )
    click.echo("times faster: " + ", ".join(f"{n} {x:.1f}" for n, x in document["times_faster"].items()))


if __name__ == "__main__":
    main()
