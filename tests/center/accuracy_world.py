"""Production edge cores and ledger under a virtual clock, with generated delays and a network with latency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa

from center.budgets.processing_delay import AnswerMargin
from center.early import EarlyAnswerEstimator
from center.ledger import EdgesChanged, Emission, FramesMerged, FrameSummary, Ledger, QueryRegistered, TimeAdvanced
from center.ledger.early_answers import EarlyAnswerBook
from center.results import AnswerRecord
from edge.core.core import EdgeCore
from edge.core.events import Acked, Configured, Ingested, PullEvent
from edge.core.streams import StreamSpec
from edgewater.answers import Phase
from edgewater.base.streams import LIVE, TIME_COLUMN, EdgeId, StreamClock
from edgewater.model.edge_records import EdgeRecord, StreamRecord
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.synopses import FloatArray, GroupedAggregate, IntArray
from edgewater.wire import Frame, QueryRef
from tests.center.rendered import render
from tests.center.results_world import edge_record
from tests.center.snapshots import snapshot
from tests.cores import open_core, pulled

REF = QueryRef("q", 1)
COLUMNS = {"x": pa.float64(), "ok": pa.bool_(), "k": pa.string()}
STEP_MS = 100
"""A test takes as long as its steps; one that compares shorter waits has `FINE_MS`."""
FINE_MS = 40
WINDOW_MS = 1_000
BEGIN_MS = 1_000_000
DISORDER_MS = 2_000
"""The edges' watermark delay: windows are not `complete` earlier."""

Delays = Callable[[np.random.Generator, FloatArray], FloatArray]


def exponential(mean_ms: float) -> Delays:
    return lambda rng, born: rng.exponential(mean_ms, len(born))


def gamma(shape: float, mean_ms: float) -> Delays:
    return lambda rng, born: rng.gamma(shape, mean_ms / shape, len(born))


def spec(measures: dict[str, str] | None = None, **parts: object) -> QuerySpec:
    accuracy = {"error": "5%", "confidence": "95%", "measure": "total", "substream": "500ms"}
    defaults = {
        "name": "q", "from": "s", "measures": measures or {"total": "sum(x)"}, "window": {"tumbling": "1s"},
        "accuracy": accuracy, "lateness": "1s",
    }  # fmt: skip
    return QuerySpec.from_mapping({**defaults, **parts})


@dataclass(slots=True)
class Site:
    """An edge and the records that will arrive at it, in the order of arrival.

    Attributes:
        ahead_ms: its clock minus the true one; event times are true.
        cut: the interval [from, to) in which its link is down.
        group: number of the group of each record; its key is `g0`, `g1`, …
        slow: the interval [from, to) in which it reads at most `reads` records per step.
        down: the interval [from, to) in which it does not run; its source goes on.
    """

    name: str
    core: EdgeCore
    born: IntArray
    arrival: IntArray
    values: FloatArray
    path_delay_ms: int = 30
    ahead_ms: int = 0
    cut: tuple[int, int] = (0, 0)
    at: int = 0
    group: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    slow: tuple[int, int] = (0, 0)
    reads: int = 0
    down: tuple[int, int] = (0, 0)

    @classmethod
    def make(
        cls,
        name: str,
        seed: int,
        seconds: float,
        delays: Delays,
        *,
        rate: float = 600.0,
        scale: float = 1.0,
        shares: Sequence[float] = (1.0,),
        slower: Sequence[float] = (),
        **more: Any,
    ) -> Self:
        """Makes a site.

        Args:
            shares: of the records, by group.
            slower: factor of the delays, by group.
        """
        rng = np.random.default_rng([seed, 7])
        born = np.sort(rng.uniform(0, seconds * 1000, int(rate * seconds)))
        delay = delays(rng, born)
        group = np.random.default_rng([seed, 8]).choice(len(shares), len(born), p=np.array(shares) / sum(shares))
        arrival = born + delay * (np.array(slower)[group] if slower else 1.0)
        order = np.argsort(arrival, kind="stable")
        values = scale * rng.gamma(2.0, 5.0, len(born))
        core = open_core(StreamSpec(COLUMNS, LIVE, DISORDER_MS, 3_000), source="f", number=seed + 1)
        return cls(
            name, core, BEGIN_MS + born[order].astype(np.int64), BEGIN_MS + np.ceil(arrival[order]).astype(np.int64),
            values[order], group=group[order], **more,
        )  # fmt: skip

    def step(self, now_ms: int, ref: QueryRef) -> list[Frame]:
        """Reads the records that have arrived and returns the frames that are due."""
        if self.down[0] <= now_ms < self.down[1]:
            return []
        own_ms = now_ms + self.ahead_ms
        arrived = to = int(np.searchsorted(self.arrival, now_ms, side="right"))
        if self.slow[0] <= now_ms < self.slow[1]:
            to = min(to, self.at + self.reads)
        unread = ("s",) if to < arrived else ()
        if to > self.at:
            rows = slice(self.at, to)
            batch = pa.record_batch(
                {
                    "x": self.values[rows],
                    "ok": np.ones(to - self.at, bool),
                    "k": pa.array([f"g{i}" for i in self.group[rows].tolist()]),
                    TIME_COLUMN: self.born[rows],
                }
            )
            self.ingest(Ingested("s", "f", batch, own_ms))
            self.at = to
        frames: list[Frame] = []
        while (due := self.core.pulls.next_pull_ms(1e9, own_ms)) is not None and due <= own_ms:
            built = pulled(self.core, PullEvent(1 << 18, self.core.pulls.event_times(own_ms), unread=unread))
            if not built:
                break
            frames += built
        if frames:
            self.core.handle(Acked(frames[-1].seq))
        return frames

    def ingest(self, event: Ingested) -> None:
        self.core.handle(event)


def record_of(name: str, clock: StreamClock = LIVE) -> EdgeRecord:
    return replace(edge_record(name, StreamRecord("s", COLUMNS, clock)), bandwidth_bytes_s=1e6, rtt_ms=1.0)


@dataclass(slots=True)
class World:
    """Sites, a network and a ledger.

    Attributes:
        step_ms: how often edges read and the center looks.
        clock: of the stream, with which the sites' cores were made.
        answers: every emission, in order.
    """

    query: QuerySpec
    sites: list[Site]
    ledger: Ledger = field(default_factory=lambda: Ledger(AnswerMargin(50)))
    now_ms: int = BEGIN_MS
    answers: list[Emission] = field(default_factory=list)
    sent: list[tuple[int, int, str, Frame]] = field(default_factory=list)
    frames: int = 0
    bytes: int = 0
    step_ms: int = STEP_MS
    clock: StreamClock = LIVE

    def __post_init__(self) -> None:
        self.ledger.handle(EdgesChanged(self._records()))
        self.ledger.handle(QueryRegistered(RegisteredQuery(REF, self.query, BEGIN_MS - 1, None)))
        for site in self.sites:
            site.core.handle(Configured(((REF, self.query),)))

    def run(self, seconds: float, each: Callable[[int], None] = lambda now: None) -> list[Emission]:
        until = self.now_ms + round(seconds * 1000)
        while self.now_ms < until:
            self.now_ms += self.step_ms
            for site in self.sites:
                for frame in site.step(self.now_ms, REF):
                    leaves = site.cut[1] if site.cut[0] <= self.now_ms < site.cut[1] else self.now_ms
                    self.frames += 1
                    self.bytes += frame.wire_bytes
                    self.sent.append((leaves + site.path_delay_ms, self.frames, site.name, frame))
            each(self.now_ms)
            self._center()
        return self.answers

    def _center(self) -> None:
        arrived = sorted(s for s in self.sent if s[0] <= self.now_ms)
        if arrived:
            self.sent = [s for s in self.sent if s[0] > self.now_ms]
            summaries = tuple(self._summary(number, name, frame) for _, number, name, frame in arrived)
            self.ledger.weigh(REF, 1000)  # as a store does with the slices of a batch
            self.answers += self.ledger.handle(FramesMerged(summaries, self.now_ms))
        due = self.ledger.next_deadline()
        if due is not None and due <= self.now_ms:
            self.answers += self.ledger.handle(TimeAdvanced(self.now_ms))

    def _summary(self, number: int, name: str, frame: Frame) -> FrameSummary:
        body = frame.unpack()
        touched = tuple(sorted({p.slice_start_ms for p in body.partials}))
        return FrameSummary(
            REF, number, EdgeId(name), body.through_ms, body.closes, touched, frame.wire_bytes, self.now_ms, "i",
            body.since_ms, body.arrivals,
        )  # fmt: skip

    def restart(self) -> None:
        """Restarts the job from its stored state."""
        state = snapshot(self.ledger, REF)
        self.ledger = Ledger(AnswerMargin(50))
        self.ledger.handle(EdgesChanged(self._records()))
        self.ledger.restore(REF, state)

    def _records(self) -> tuple[EdgeRecord, ...]:
        return tuple(record_of(s.name, self.clock) for s in self.sites)

    def estimator(self) -> EarlyAnswerEstimator:
        ledger = self.ledger.book(REF)
        assert isinstance(ledger, EarlyAnswerBook)
        return ledger.estimator

    def truth(self, start_ms: int, kind: str = "sum", group: int | None = None, window_ms: int = WINDOW_MS) -> float:
        total = count = 0.0
        for site in self.sites:
            selected = (site.born >= start_ms) & (site.born < start_ms + window_ms)
            selected &= group is None or site.group == group
            total, count = total + float(site.values[selected].sum()), count + float(selected.sum())
        return {"sum": total, "count": count, "mean": total / max(count, 1.0)}[kind]


@dataclass(slots=True)
class DataWorld(World):
    """A world whose center also merges the values that edges send, and renders each answer when it is given.

    Attributes:
        stated: the JSON of each answer, in the order of `answers`.
        value_bytes: size of the values that edges sent, before compression, without the statistics of arrivals.
    """

    merged: dict[int, GroupedAggregate] = field(default_factory=dict)
    stated: list[dict[str, Any]] = field(default_factory=list)
    value_bytes: int = 0

    def _summary(self, number: int, name: str, frame: Frame) -> FrameSummary:
        for partial in frame.unpack().partials:
            start, values = partial.slice_start_ms, GroupedAggregate.from_bytes(partial.synopsis)
            self.value_bytes += len(partial.synopsis)
            known = self.merged.get(start)
            self.merged[start] = values if known is None else known.merge_many([values])
        return World._summary(self, number, name, frame)

    def _center(self) -> None:
        World._center(self)
        self.stated += [render(self.record(e), self.query) for e in self.answers[len(self.stated) :]]

    def record(self, emission: Emission) -> AnswerRecord:
        """Returns the stored answer, with the values that the center has now."""
        slices = range(emission.slices_from_ms, emission.slices_to_ms)
        parts = [values.to_bytes() for start, values in sorted(self.merged.items()) if start in slices]
        return AnswerRecord(
            1, REF, emission.window_start_ms, emission.window_end_ms, emission.revision, emission.phase,
            emission.answered_at_ms, 0, emission.facts,
            GroupedAggregate.merge_bytes(parts) if parts else None,
        )  # fmt: skip


def first_answers(answers: list[Emission], skip: int = 0) -> list[Emission]:
    """Returns the first answer to each window, without the first `skip` windows."""
    firsts = sorted((e for e in answers if e.revision == 1), key=lambda e: e.window_start_ms)
    return firsts[skip:]


def wait_ms(emission: Emission) -> int:
    return emission.answered_at_ms - emission.window_end_ms


def phases(answers: list[Emission], start_ms: int) -> list[Phase]:
    return [e.phase for e in answers if e.window_start_ms == start_ms]


def without_times(emission: Emission) -> Emission:
    return replace(emission, answered_at_ms=0)
