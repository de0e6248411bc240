"""Processing of a micro-batch: merged on the executors, applied to the result store exactly once.

Spark may run a batch again, in whole or in part, after any crash. Only the result store knows which frames have been
applied: the source does not read them again, and the store ignores a batch that it has applied.

Measured with PySpark 4.3 on two busy cores, 20 frames/s of a 3.3 KB partial over 10 queries, seconds
per batch from DataFrame to driver: reading alone 0.08, `mapInArrow` 0.12–0.15, `groupBy().applyInArrow`
0.26–0.38 (a shuffle, and a Python call per key). So each task merges the rows that it has read (`FrameReader.read`),
and the few keys that are in two tasks (`frame_source.divide` keeps them few) are merged once more here. A `mapInArrow`
after the source needs a second Python worker in every task: under load 10, alternating batches with and without it
took 188 and 114 ms at the median, 311 and 180 at the 95th percentile.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
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
from edgewater.streams import MIN_TIME_MS, EdgeId
from edgewater.wire import InputLoss, LossReason, QueryRef

logger = logging.getLogger(__name__)

FRAMES = "frames"
"""The source of losses that the center states: frames and partials that it cannot read or merge."""


class BatchFailed(Exception):
    """A micro-batch was not applied. Its message is short: see `BatchProcessor.__call__`."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch in the driver, of one query or of all.

    Attributes:
        through: by query key, the last position read.
        skipped: DAMAGED and REFUSED rows.
    """

    deltas: tuple[MergedDelta, ...]
    summaries: tuple[FrameSummary, ...]
    through: Mapping[str, int]
    skipped: tuple[FrameRow, ...]

    def of(self, key: str) -> MicroBatch:
        """The batch of one query."""
        ref = query_from_key(key)
        return MicroBatch(
            tuple(d for d in self.deltas if d.query == ref),
            tuple(f for f in self.summaries if f.query == ref),
            {key: self.through[key]},
            tuple(r for r in self.skipped if r.query == key),
        )


def to_micro_batch(rows: Iterable[FrameRow]) -> MicroBatch:
    """Groups merged rows for the store, and merges the keys that came from two tasks. Pure."""
    partials: defaultdict[tuple[str, int, int], list[FrameRow]] = defaultdict(list)
    summaries: list[FrameSummary] = []
    skipped: list[FrameRow] = []
    through: dict[str, int] = {}
    for row in rows:
        if row.kind is RowKind.PARTIAL:
            partials[row.query, row.slice_start_ms, row.shard].append(row)
            continue
        if row.kind is RowKind.CONTROL:
            summaries.append(_summary(row))
        else:
            skipped.append(row)
        if row.kind is not RowKind.REFUSED:
            through[row.query] = max(row.position, through.get(row.query, 0))
    lost = [(row, False) for row in skipped]
    deltas: list[MergedDelta] = []
    for same_key in partials.values():
        for row in same_key if len(same_key) == 1 else merge_key(same_key):
            if row.kind is RowKind.PARTIAL:
                deltas.append(MergedDelta(query_from_key(row.query), row.slice_start_ms, row.shard, row.payload))
            else:
                skipped.append(row)
                lost.append((row, True))
    for row, merged in lost:
        _state_loss(summaries, row, merged)
    summaries.sort(key=lambda summary: (summary.query.name, summary.query.version, summary.position))
    return MicroBatch(tuple(deltas), tuple(summaries), through, tuple(skipped))


def _state_loss(summaries: list[FrameSummary], row: FrameRow, merged: bool) -> None:
    """States what a skipped row lacks as lost input of its edge, so that no answer counts it as complete.

    Args:
        merged: the row is a merge of several frames: each frame that has a partial of the slice may be in it.
    """
    query = query_from_key(row.query)
    if row.kind is RowKind.DAMAGED:
        summaries.append(
            FrameSummary(
                query=query,
                position=row.position,
                edge=EdgeId(row.edge),
                through_ms=MIN_TIME_MS,
                closes=(),
                touched=(),
                wire_bytes=row.wire_bytes,
                received_at_ms=row.received_at_ms,
                incarnation=row.incarnation,
                losses=(InputLoss(FRAMES, LossReason.FRAME_DAMAGED),),
            )
        )
        return
    start_ms = row.slice_start_ms
    # The loss is stated of one moment in the slice; the same windows contain all of them.
    loss = InputLoss(FRAMES, LossReason.PARTIAL_REFUSED, start_ms, start_ms + 1)
    for i, summary in enumerate(summaries):
        concerned = start_ms in summary.touched if merged else summary.position == row.position
        if concerned and summary.query == query:
            summaries[i] = replace(summary, losses=(*summary.losses, loss))


def unapplied(rows: Iterable[FrameRow], consumed: Mapping[str, int]) -> list[FrameRow]:
    """The rows of queries with positions beyond the consumed ones; of the others Spark has run the batch again.

    Whole queries only. Should the source ever read frames on both sides of the consumed position, their partials are
    merged; the store refuses them (`Conflict`), and they must not be lost here.
    """
    rows, through = list(rows), dict[str, int]()
    for row in rows:
        through[row.query] = max(row.position, through.get(row.query, 0))
    return [row for row in rows if through[row.query] > consumed.get(row.query, 0)]


def gaps(rows: Iterable[FrameRow], consumed: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """By query key, the first and last position without a row between the consumed and the last read position."""
    read: defaultdict[str, set[int]] = defaultdict(set)
    for row in rows:
        if row.kind in (RowKind.CONTROL, RowKind.DAMAGED):
            read[row.query].add(row.position)
    found = {}
    for key, positions in read.items():
        missing = set(range(consumed.get(key, 0) + 1, max(positions) + 1)) - positions
        if missing:
            found[key] = (min(missing), max(missing))
    return found


def _summary(row: FrameRow) -> FrameSummary:
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
        losses=body.losses,
        dropped=body.dropped,
    )


class BatchProcessor:
    """The function of `foreachBatch`. Called by one thread at a time.

    Args:
        writer: shared with the deadline thread.
        now_ms: wall clock, ms.
        monotonic: clock in seconds, for durations.
        margin_ms: how long before a staleness budget runs out the early answer is given.

    Attributes:
        failure: the exception of the last failed batch.
        applied: number of batches that were applied.
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
        self._delays = ProcessingDelays(margin_ms)
        self._rates: dict[QueryRef, dict[EdgeId, float]] = {}
        self._rates_at_ms = 0
        self._stuck: dict[str, str] = {}
        self.failure: Exception | None = None
        self.applied = 0

    @property
    def stuck(self) -> Mapping[str, str]:
        """Queries whose frames cannot be applied, by key, with the reason."""
        return dict(self._stuck)

    def __call__(self, frame: Any, batch_id: int) -> None:
        try:
            began_s = self._monotonic()
            frames = self._process(frame)
            took_s = self._monotonic() - began_s
            self.applied += 1
            self._metrics.batch_seconds.observe(took_s)
            logger.debug("batch %d: %d frames applied in %.3f s", batch_id, frames, took_s)
        except Exception as exc:
            self.failure = exc
            # The JVM applies a recursive regular expression to the traceback of an exception raised here. One that
            # quotes a Java stack overflows the JVM's stack, and the stream's thread dies without a message.
            raise BatchFailed(f"batch {batch_id}: {type(exc).__name__}") from None

    def _process(self, frame: Any) -> int:
        """Returns the number of applied frames."""
        began_ms = self._now_ms()
        consumed = self._writer.consumed()
        # Evaluated once, here; everything below works on the returned rows.
        rows = [row for row in unapplied(from_table(frame.toArrow()), consumed) if row.query not in self._stuck]
        self._check_gaps(gaps(rows, consumed))
        batch = to_micro_batch(rows)
        self._raise_alarms(batch.skipped)
        self._report_losses(batch.summaries)
        merged_ms = self._now_ms()
        emissions = self._apply(batch) if batch.through else []
        now_ms = self._now_ms()
        self._metrics.observe_batch(batch.summaries, emissions, began_ms, merged_ms, now_ms)
        self._store_processing_delays(batch.summaries, now_ms)
        self._store_sampling_rates(now_ms)
        self._metrics.batches.inc()
        self._metrics.rows.inc(len(rows))
        self._metrics.frames.inc(len(batch.summaries))
        self._metrics.last_batch.set(now_ms / 1000)
        return len(batch.summaries)

    def _store_processing_delays(self, summaries: Iterable[FrameSummary], now_ms: int) -> None:
        """Stores changed processing delays in the catalog, from which gateways send them to edges."""
        delays: defaultdict[QueryRef, list[int]] = defaultdict(list)
        for summary in summaries:
            delays[summary.query].append(now_ms - summary.received_at_ms)
        for ref, delays_ms in delays.items():
            self._delays.add(ref, delays_ms, now_ms)
        for ref, delay_ms in self._delays.take_changes(now_ms).items():
            try:
                self._catalog.record_processing_delay(ref, delay_ms, now_ms)
            except StorageError as exc:  # the batch has been applied; later batches report the delay again
                self._delays.mark_unreported(ref)
                logger.warning("the processing delay of %s is not stored: %s", ref.name, exc)

    def _store_sampling_rates(self, now_ms: int) -> None:
        """Stores changed sampling rates in the catalog, for the gateways."""
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
            except StorageError as exc:  # the batch has been applied; the rates matter only to overloaded edges
                logger.warning("the sampling rates of %s are not stored: %s", ref.name, exc)

    def _apply(self, batch: MicroBatch) -> list[Emission]:
        try:
            return self._writer.apply(batch.deltas, batch.summaries, batch.through)
        except SynopsisError:
            # One query's synopses do not merge with those in the store. It must not block the others.
            return [emission for key in batch.through for emission in self._apply_alone(key, batch.of(key))]

    def _apply_alone(self, key: str, batch: MicroBatch) -> list[Emission]:
        try:
            return self._writer.apply(batch.deltas, batch.summaries, batch.through)
        except SynopsisError as exc:
            # Nothing of it is consumed, so its frames stay in the log for an operator.
            self._stuck[key] = str(exc)
            self._metrics.stuck.set(len(self._stuck))
            logger.error("query %s is stuck, its frames are kept: %s", key, exc)
            self._catalog.add_alarm("query-stuck", f"query {key}: {exc}", EdgeId(""), self._now_ms())
            return []

    def _check_gaps(self, missing: Mapping[str, tuple[int, int]]) -> None:
        """Handles frames that were not read although later ones were; they must not be skipped if they exist.

        Raises:
            StorageError: the index has them; the stream must restart at the consumed positions.
        """
        for key, (first, last) in missing.items():
            where = f"query {key}: frames {first} to {last}"
            if self._catalog.frames(key, first - 1, last):
                raise StorageError(f"{where} were not read before later ones")
            logger.error("%s are no longer in the index and were never applied", where)
            self._metrics.skipped.labels("lost").inc()
            self._catalog.add_alarm("frames-lost", f"{where} were dropped unread", EdgeId(""), self._now_ms())

    def _report_losses(self, summaries: Iterable[FrameSummary]) -> None:
        """Counts stated losses of input and adds alarms; as `_raise_alarms`."""
        for summary in summaries:
            for loss in summary.losses:
                if loss.reason == LossReason.BEFORE_QUERY or loss.source == FRAMES:
                    continue  # no assumption is violated, or the skipped row has an alarm: the answers state both
                count = "an unknown number of" if loss.records is None else f"{loss.records}"
                message = (
                    f"edge {summary.edge}, source {loss.source}: {count} records are lost or may be: {loss.reason}"
                )
                logger.error("%s (query %s)", message, summary.query.name)
                self._metrics.losses.labels(loss.reason).inc()
                self._catalog.add_alarm("input-lost", message, summary.edge, self._now_ms())

    def _raise_alarms(self, skipped: Iterable[FrameRow]) -> None:
        """Counts skipped rows and adds alarms, before the batch is applied: after a crash twice rather than never."""
        for row in skipped:
            kind = "frame-damaged" if row.kind is RowKind.DAMAGED else "partial-refused"
            what = f"query {row.query}, frame {row.position}"
            if row.kind is RowKind.REFUSED:
                what += f", slice {row.slice_start_ms}"
            message = f"{what}: {row.payload.decode(errors='replace')}"
            logger.error("%s: %s", kind, message)
            self._metrics.skipped.labels(kind).inc()
            self._catalog.add_alarm(kind, message, EdgeId(row.edge), self._now_ms())
