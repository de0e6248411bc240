"""What happens to a micro-batch: merged on the executors, applied to the result store once.

Spark may run a batch again, whole or not, after any crash. Which frames have been applied is known to
the result store alone: the source does not read them again, and the store passes over a batch that it has.

Measured with PySpark 4.3 on two busy cores, 20 frames/s of a 3.3 KB partial over 10 queries, seconds
per batch from DataFrame to driver: reading alone 0.08, `mapInArrow` 0.12–0.15, `groupBy().applyInArrow`
0.26–0.38 (a shuffle, and a Python call per key). So each task merges what it has read, where it has read it
(`FrameReader.read`), and the few keys that lie in two tasks (`source.divide` keeps them few) are merged once more here.
A `mapInArrow` behind the source is a second Python worker in every task: under load 10, batches by turns with and
without it took 188 and 114 ms at the median, 311 and 180 at the 95th percentile.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from center.catalog import Catalog, query_from_key
from center.job.ledger_writer import LedgerWriter
from center.job.merge import merge_key
from center.job.metrics import JobMetrics
from center.job.processing_delay import ProcessingDelays
from center.job.rows import FrameRow, RowKind, control_body, from_table
from center.ledger import Emission, FrameSummary
from center.results import MergedDelta
from center.sampling import RATES_EVERY_MS, rates_differ
from edgewater.errors import StorageError, SynopsisError
from edgewater.streams import EdgeId
from edgewater.wire.frames import QueryRef

logger = logging.getLogger(__name__)


class BatchFailed(Exception):
    """A micro-batch was not applied. Short on purpose: see `BatchProcessor.__call__`."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch as the driver gets it, of one query or of all.

    Attributes:
        through: by query key, the last position read.
        passed_over: DAMAGED and REFUSED rows.
    """

    deltas: tuple[MergedDelta, ...]
    facts: tuple[FrameSummary, ...]
    through: Mapping[str, int]
    passed_over: tuple[FrameRow, ...]

    def of(self, key: str) -> MicroBatch:
        """The part of one query."""
        ref = query_from_key(key)
        return MicroBatch(
            tuple(d for d in self.deltas if d.query == ref),
            tuple(f for f in self.facts if f.query == ref),
            {key: self.through[key]},
            tuple(r for r in self.passed_over if r.query == key),
        )


def digest(rows: Iterable[FrameRow]) -> MicroBatch:
    """Sorts merged rows into what the store wants. Pure."""
    partials: defaultdict[tuple[str, int, int], list[FrameRow]] = defaultdict(list)
    facts: list[FrameSummary] = []
    passed_over: list[FrameRow] = []
    through: dict[str, int] = {}
    for row in rows:
        if row.kind is RowKind.PARTIAL:
            partials[row.query, row.slice_start_ms, row.shard].append(row)
            continue
        if row.kind is RowKind.CONTROL:
            facts.append(_fact(row))
        else:
            passed_over.append(row)
        if row.kind is not RowKind.REFUSED:
            through[row.query] = max(row.position, through.get(row.query, 0))
    deltas: list[MergedDelta] = []
    for parts in partials.values():
        for row in parts if len(parts) == 1 else merge_key(parts):
            if row.kind is RowKind.PARTIAL:
                deltas.append(MergedDelta(query_from_key(row.query), row.slice_start_ms, row.shard, row.payload))
            else:
                passed_over.append(row)
    facts.sort(key=lambda fact: (fact.query.name, fact.query.version, fact.position))
    return MicroBatch(tuple(deltas), tuple(facts), through, tuple(passed_over))


def news(rows: Iterable[FrameRow], consumed: Mapping[str, int]) -> list[FrameRow]:
    """The rows of queries of which something is new: of the others Spark has run the batch again.

    Whole queries only. A partial may be merged from frames on both sides of what is consumed, if ever the source
    has read such; the store refuses those (`Conflict`), and here they must not be lost.
    """
    rows, through = list(rows), dict[str, int]()
    for row in rows:
        through[row.query] = max(row.position, through.get(row.query, 0))
    return [row for row in rows if through[row.query] > consumed.get(row.query, 0)]


def gaps(rows: Iterable[FrameRow], consumed: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """By query key, the first and last position between those consumed and those read that has no row."""
    read: defaultdict[str, set[int]] = defaultdict(set)
    for row in rows:
        if row.kind in (RowKind.CONTROL, RowKind.DAMAGED):
            read[row.query].add(row.position)
    missing = {}
    for key, positions in read.items():
        lacking = set(range(consumed.get(key, 0) + 1, max(positions) + 1)) - positions
        if lacking:
            missing[key] = (min(lacking), max(lacking))
    return missing


def _fact(row: FrameRow) -> FrameSummary:
    body = control_body(row.payload)
    return FrameSummary(
        query=query_from_key(row.query),
        position=row.position,
        edge=EdgeId(row.edge),
        through_ms=body.through_ms,
        closes=body.closes,
        touched=tuple(sorted({p.slice_start_ms for p in body.partials})),
        wire_bytes=row.wire_bytes,
        received_at_ms=row.received_at_ms,
        incarnation=row.incarnation,
        since_ms=body.since_ms,
        arrivals=body.arrivals,
    )


class BatchProcessor:
    """`foreachBatch`'s function. Called by one thread at a time.

    Args:
        writer: the one way to the ledger and the store, shared with the deadline thread.
        now_ms: wall clock, ms.
        monotonic: clock in seconds, for durations.
        margin_ms: how long before a staleness budget runs out the early answer is given.
    """

    def __init__(
        self,
        writer: LedgerWriter,
        catalog: Catalog,
        metrics: JobMetrics,
        *,
        now_ms: Callable[[], int],
        monotonic: Callable[[], float],
        margin_ms: int = 0,
    ) -> None:
        self._writer = writer
        self._catalog = catalog
        self._metrics = metrics
        self._now_ms = now_ms
        self._monotonic = monotonic
        self._ways = ProcessingDelays(margin_ms)
        self._rates: dict[QueryRef, dict[EdgeId, float]] = {}
        self._rates_at_ms = 0
        self._stuck: dict[str, str] = {}
        self.failure: Exception | None = None

    @property
    def stuck(self) -> Mapping[str, str]:
        """Queries whose frames are not applied, by key, and why."""
        return dict(self._stuck)

    def __call__(self, frame: Any, batch_id: int) -> None:
        try:
            began_s = self._monotonic()
            frames = self._process(frame)
            took_s = self._monotonic() - began_s
            self._metrics.batch_seconds.observe(took_s)
            logger.debug("batch %d: %d frames applied in %.3f s", batch_id, frames, took_s)
        except Exception as exc:
            self.failure = exc
            # The JVM runs a recursive regular expression over the traceback of whatever leaves here; one
            # that quotes a Java stack overflows its own, and the stream's thread dies without a word.
            raise BatchFailed(f"batch {batch_id}: {type(exc).__name__}") from None

    def _process(self, frame: Any) -> int:
        """Returns how many frames were applied."""
        began_ms = self._now_ms()
        consumed = self._writer.consumed()
        # Evaluated once, here: everything else happens on what came back.
        rows = [row for row in news(from_table(frame.toArrow()), consumed) if row.query not in self._stuck]
        self._check_gaps(gaps(rows, consumed))
        batch = digest(rows)
        self._tell(batch.passed_over)
        merged_ms = self._now_ms()
        emissions = self._apply(batch) if batch.through else []
        now_ms = self._now_ms()
        self._metrics.note_batch(batch.facts, emissions, began_ms, merged_ms, now_ms)
        self._note_ways(batch.facts, now_ms)
        self._note_rates(now_ms)
        self._metrics.batches.inc()
        self._metrics.rows.inc(len(rows))
        self._metrics.frames.inc(len(batch.facts))
        self._metrics.last_batch.set(now_ms / 1000)
        return len(batch.facts)

    def _note_ways(self, facts: Iterable[FrameSummary], now_ms: int) -> None:
        """Tells the edges, by way of the catalog, how long frames take here."""
        delays: defaultdict[QueryRef, list[int]] = defaultdict(list)
        for fact in facts:
            delays[fact.query].append(now_ms - fact.received_at_ms)
        for ref, each in delays.items():
            self._ways.note(ref, each, now_ms)
        for ref, way_ms in self._ways.news(now_ms).items():
            try:
                self._catalog.record_processing_delay(ref, way_ms, now_ms)
            except StorageError as exc:  # The batch has been applied; this is for later ones.
                self._ways.forget(ref)
                logger.warning("how long frames of %s take is not written down: %s", ref.name, exc)

    def _note_rates(self, now_ms: int) -> None:
        """Tells the gateways, by way of the catalog, what part of its records an accuracy needs of each edge."""
        if now_ms - self._rates_at_ms < RATES_EVERY_MS:
            return
        self._rates_at_ms = now_ms
        for ref, rates in self._writer.needed_rates().items():
            for edge, rate in rates.items():
                self._metrics.needed_rate.labels(ref.name, edge).set(rate)
            if not rates_differ(self._rates.get(ref, {}), rates):
                continue
            try:
                self._catalog.record_sampling_rates(ref, rates)
                self._rates[ref] = rates
            except StorageError as exc:  # The batch has been applied; this is for edges that cannot keep up.
                logger.warning("the sampling rates of %s are not written down: %s", ref.name, exc)

    def _apply(self, batch: MicroBatch) -> list[Emission]:
        try:
            return self._writer.apply(batch.deltas, batch.facts, batch.through)
        except SynopsisError:
            # One query's synopses do not merge with those in the store. The others must not wait for it.
            return [emission for key in batch.through for emission in self._apply_alone(key, batch.of(key))]

    def _apply_alone(self, key: str, batch: MicroBatch) -> list[Emission]:
        try:
            return self._writer.apply(batch.deltas, batch.facts, batch.through)
        except SynopsisError as exc:
            # Nothing of it is consumed, so its frames stay in the log until somebody has looked.
            self._stuck[key] = str(exc)
            self._metrics.stuck.set(len(self._stuck))
            logger.error("query %s is stuck, its frames are kept: %s", key, exc)
            self._catalog.add_alarm("query-stuck", f"query {key}: {exc}", EdgeId(""), self._now_ms())
            return []

    def _check_gaps(self, missing: Mapping[str, tuple[int, int]]) -> None:
        """Frames that were not read, although ones behind them were, must never be passed over.

        Raises:
            StorageError: the index has them; the stream has to begin at the consumed positions again.
        """
        for key, (first, last) in missing.items():
            where = f"query {key}: frames {first} to {last}"
            if self._catalog.frames(key, first - 1, last):
                raise StorageError(f"{where} were not read before those behind them")
            logger.error("%s are in the index no more and were never applied", where)
            self._metrics.passed_over.labels("lost").inc()
            self._catalog.add_alarm("frames-lost", f"{where} were dropped unread", EdgeId(""), self._now_ms())

    def _tell(self, passed_over: Iterable[FrameRow]) -> None:
        """Counts and alarms, before the batch is applied: told twice after a crash is better than never."""
        for row in passed_over:
            kind = "frame-damaged" if row.kind is RowKind.DAMAGED else "partial-refused"
            what = f"query {row.query}, frame {row.position}"
            if row.kind is RowKind.REFUSED:
                what += f", slice {row.slice_start_ms}"
            message = f"{what}: {row.payload.decode(errors='replace')}"
            logger.error("%s: %s", kind, message)
            self._metrics.passed_over.labels(kind).inc()
            self._catalog.add_alarm(kind, message, EdgeId(row.edge), self._now_ms())
