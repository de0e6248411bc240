"""The agent's end of the uplink: takes frames from the core, and passes control messages to it."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from heapq import nlargest
from itertools import islice

from edge.core.drift import DriftRates
from edge.core.events import Acked, BudgetSet, Configured, FrameBuilt, PullEvent, QueryRefused, SamplingSet
from edge.core.query_pipeline import QueryPipeline
from edge.core.streams import StreamState
from edge.durability import DurableCore, JournalGroupCommit
from edge.uplink.flow_control import LinkForecast
from edge.uplink.link_reports import LinkReports
from edge.uplink.ports import Input, Workload, accepted, refused
from edgewater.base.streams import LIVE, MAX_TIME_MS, Delivery, type_name
from edgewater.model.query import QuerySpec
from edgewater.model.window_range import ALL_WINDOWS, NO_BORDERS, WindowRange
from edgewater.runtime.state_release import RELEASE
from edgewater.wire import MIN_PROTOCOL, PROTOCOL, Frame, QueryRef, SamplingReason
from edgewater.wire import uplink_pb2 as pb

log = logging.getLogger(__name__)

MAX_DIGESTS = 64
"""Number of frames whose checksums are in a Hello."""
MAX_PULLED_FRAMES = 64
"""Maximum frames of one pull, each of another query. A pull takes the event loop one to two milliseconds per frame."""
EMPTY_PULL_PAUSE_S = 0.05  # limit: processor time while waiting
MAX_REJECTED, MAX_NULL_COLUMNS, MAX_SOURCE = 128, 64, 256
"""Maximum statements in a heartbeat: numbers of rejected records, and columns without values; and characters of their
names."""
CALM_SHARE, LAG_S = 0.6, 0.5  # derived: CALM_UTILIZATION and LINK_RELIEVED_S of center/early/sampling
"""An edge keeps up below this busy share, if its unacknowledged bytes are fewer than the link carries in this time.
Otherwise the center needs heartbeats soon, to decide on sampling rates."""
MIN_RELATIVE_CHANGE = 0.2
"""Smaller changes of drift rates are not reported."""
REPORT_EVERY_MS, REPORT_UNCHANGED_EVERY_MS = 20_000, 30_000  # limit: bytes of reports on a narrow link
"""Intervals of the reports of shares, while drift rates change and otherwise. They tell the center how the rates
change. The center gives shares only to edges that have reported within a minute."""


_DELIVERIES = {Delivery.AT_LEAST_ONCE: pb.Stream.AT_LEAST_ONCE, Delivery.AT_MOST_ONCE: pb.Stream.AT_MOST_ONCE}


class UplinkOutbox:
    """Implements `edge.uplink.ports.UplinkEndpoint` over the durable core.

    Args:

    Attributes:
        forecast: forecasts the link; the session provides it.
        workload: how busy the edge is; set it before the session begins.
        refused_frames: frames that the center has refused since the start, in whole or in part, by reason.
        inputs: the files that the sources read and that have a fingerprint; None until they are known.
        changed: set whenever the core has changed, which wakes a waiting `take`.
        configured: set when the first queries are known.
    """

    def __init__(
        self,
        edge: str,
        labels: Mapping[str, str],
        durable: DurableCore,
        group_commit: JournalGroupCommit,
        now_ms: Callable[[], int],
    ) -> None:
        self._edge, self._labels = edge, dict(labels)
        self._durable, self._group_commit, self._now_ms = durable, group_commit, now_ms
        self.changed = asyncio.Event()
        self.configured = asyncio.Event()
        if durable.core.configured:
            self.configured.set()
        self.workload = Workload()
        self.inputs: tuple[Input, ...] | None = None
        self._sent_inputs: tuple[Input, ...] | None = None
        self._is_pressed = False
        self._sent_news: tuple[object, ...] = ()
        self.refused_frames: dict[str, int] = {}
        self.forecast: Callable[[], LinkForecast] = LinkForecast
        self._processing_delay_ms: dict[QueryRef, int] = {}
        self._reported_ms: dict[QueryRef, int] = {}
        self._reports: dict[QueryRef, pb.BudgetReport] = {}
        self._drifts: dict[QueryRef, DriftRates] = {}
        self._link_reports = LinkReports()
        self._durable_seq = durable.core.next_seq - 1  # recovered frames are on disk
        self._recovered: Mapping[str, int] | None = durable.durable_records

    def table_rows(self) -> Iterable[str]:
        return {lookup.rows for p in self._durable.core.queries.values() for lookup in p.spec.lookups}

    def unacknowledged(self, after: int | None) -> Iterable[Frame]:
        unacked = self._durable.core.unacked
        return [f for f in unacked if f.seq <= self._durable_seq and (after is None or f.seq > after)]

    async def take(self, capacity_bytes: int) -> Sequence[Frame]:
        """Waits until a pull is due, builds frames, and waits until they are durable."""
        while True:
            now, link, processing_ms = self._now_ms(), self.forecast(), self.processing_ms
            low, mid = (rate / link.packed_fraction for rate in (link.low_bytes_s, link.mid_bytes_s))
            pulls = self._durable.core.pulls
            due_ms = pulls.next_pull_ms(low, now, link.path_delay_ms, processing_ms, mid)
            if due_ms is not None and due_ms <= now:
                pull = PullEvent(
                    capacity_bytes,
                    pulls.event_times(now),
                    low,
                    link.path_delay_ms,
                    self.workload.unread(),
                    MAX_PULLED_FRAMES,
                    processing_ms,
                    mid,
                    now,
                )
                frames = [e.frame for e in self._durable.handle(pull) if isinstance(e, FrameBuilt)]
                if frames:
                    await self._group_commit.durable()
                    self._durable_seq = frames[-1].seq
                    return frames
                await self._wait_for_change(EMPTY_PULL_PAUSE_S)
            else:
                await self._wait_for_change(None if due_ms is None else (due_ms - now) / 1000)

    @property
    def processing_ms(self) -> dict[QueryRef, int]:
        """The center's processing delays, of queries with a deadline."""
        queries = self._durable.core.queries
        return {r: ms for r, ms in self._processing_delay_ms.items() if ms and r in queries}

    async def _wait_for_change(self, timeout_s: float | None) -> None:
        self.changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # `wait_for` of Python 3.11 may swallow a cancellation
                await self.changed.wait()

    def on_welcome(self, acked_through: int | None) -> None:
        self._recovered, self._durable.state.is_damaged = None, False
        self._sent_inputs = None  # another center may have taken over
        if acked_through is not None:
            self.on_ack(acked_through)

    def on_ack(self, through: int) -> None:
        self._durable.handle(Acked(through))
        self.changed.set()

    def on_queries(
        self, queries: Sequence[tuple[QueryRef, QuerySpec]], windows: Mapping[QueryRef, WindowRange] = NO_BORDERS
    ) -> Sequence[pb.QueryStatus]:
        core = self._durable.core
        is_new = {ref for ref, _ in queries} != {*core.queries, *core.refused} or not core.configured
        if is_new or any(p.store.windows != windows.get(ref, ALL_WINDOWS) for ref, p in core.queries.items()):
            for effect in self._durable.handle(Configured(tuple(queries), windows, now_ms=self._now_ms())):
                if isinstance(effect, QueryRefused):
                    log.warning("query %s is refused: %s", effect.query.name, effect.message)
        self.configured.set()
        self.changed.set()
        return [*map(accepted, core.queries), *(refused(r, e.code, e.message) for r, e in core.refused.items())]

    def on_budget(self, budget: pb.Budget) -> None:
        ref, shares = QueryRef(budget.query, budget.query_version), dict(budget.shares)
        pipeline = self._durable.core.queries.get(ref)
        if pipeline is None:
            return
        is_other = budget.version == 0 and shares != pipeline.store.shares
        is_new = is_other or budget.version > pipeline.store.schedule.version
        if is_new:
            self._durable.handle(BudgetSet(ref, shares, budget.version, budget.from_ms))
            self.changed.set()
        before_ms = self._processing_delay_ms.get(ref, 0)
        self._processing_delay_ms[ref] = budget.center_ms
        # The center repeats a message only if the edge's report of its shares has not reached it.
        if is_new or budget.center_ms == before_ms:
            self._reported_ms.pop(ref, None)

    def on_sampling(self, sampling: pb.Sampling) -> None:
        query, rate = QueryRef(sampling.query, sampling.query_version), min(max(sampling.rate, 0.0), 1.0)
        reason, expected = SamplingReason.from_number(sampling.reason), sampling.expected_records
        if query in self._durable.core.queries:
            self._durable.handle(SamplingSet(query, rate, sampling.clock_offset_ms, reason, expected))
            self.changed.set()

    async def budget_reports(self, *, all_queries: bool) -> Sequence[pb.BudgetReport]:
        now = self._now_ms()
        queries = {r: p for r, p in self._durable.core.queries.items() if p.store.policy.limited}
        ages_ms = {r: now - self._reported_ms[r] if r in self._reported_ms else math.inf for r in queries}
        due = {
            r: self._budget_report(queries[r]) for r, age in ages_ms.items() if all_queries or age >= REPORT_EVERY_MS
        }
        reports = {
            r: report
            for r, report in due.items()
            if all_queries or ages_ms[r] >= REPORT_UNCHANGED_EVERY_MS or _has_changed(self._reports.get(r), report)
        }
        self._reported_ms = {r: t for r, t in self._reported_ms.items() if r in queries} | dict.fromkeys(reports, now)
        self._reports = {r: m for r, m in self._reports.items() if r in queries} | reports
        self._drifts = {r: m for r, m in self._drifts.items() if r in queries}
        if reports:
            await self._group_commit.durable()
        return list(reports.values())

    def _budget_report(self, pipeline: QueryPipeline) -> pb.BudgetReport:
        meter = self._drifts.setdefault(pipeline.ref, DriftRates(pipeline.spec.window.longest_ms))
        meter.update(pipeline.frames.drift, pipeline.through_ms)
        applied = pipeline.store.schedule.last
        return pb.BudgetReport(
            query=pipeline.ref.name,
            query_version=pipeline.ref.version,
            version=pipeline.store.schedule.version,
            shares=applied.shares,
            from_ms=applied.from_ms,
            update_bytes=pipeline.shipper.entry_bytes * self.forecast().packed_fraction,
            drift_per_s=meter.per_s,
        )

    def link_report(self, low_bytes_s: float, high_bytes_s: float, *, all_queries: bool) -> pb.LinkReport | None:
        packed = self.forecast().packed_fraction
        loads = {r: p.load for r, p in self._durable.core.queries.items()}
        taken = {r: (x.sent_bytes * packed, x.omitted_bytes * packed) for r, x in loads.items() if x.sent_bytes}
        if all_queries:
            self._link_reports = LinkReports()
        return self._link_reports.due(low_bytes_s, high_bytes_s, taken, self._now_ms())

    def on_refused(self, query: QueryRef, reason: str, message: str, frames: int) -> None:
        if reason not in self.refused_frames:
            log.error("the center refuses frames of query %s@%d: %s", query.name, query.version, message)
        log.debug("refused, %d frames of %s: %s", frames, query.name, message)
        self.refused_frames[reason] = self.refused_frames.get(reason, 0) + frames

    def on_link(self, forecast: Callable[[], LinkForecast]) -> None:
        self.forecast = forecast

    def hello(self) -> pb.Hello:
        core = self._durable.core
        return pb.Hello(
            protocol_min=MIN_PROTOCOL,
            protocol_max=PROTOCOL,
            edge=self._edge,
            incarnation=self._durable.incarnation,
            labels=self._labels,
            streams=[self._stream(name) for name in core.streams],
            oldest_seq=core.unacked[0].seq if core.unacked else core.next_seq,
            next_seq=core.next_seq,
            sent_at_ms=self._now_ms(),
            runs=self._durable.state.runs,
            durable_records={} if self._durable.state.is_damaged else self._comparable_records,
            frames=[pb.FrameDigest(seq=f.seq, crc32c=f.crc32c) for f in islice(core.unacked, MAX_DIGESTS)],
            release=RELEASE,
        )

    @property
    def _comparable_records(self) -> Mapping[str, int]:
        """Returns the number of durable records, by stream.

        In the first session of a process these are the recovered records. Records that it has accepted since then must
        not hide that its state lacks some.
        """
        return self._durable.durable_records if self._recovered is None else self._recovered

    def _stream(self, name: str) -> pb.Stream:
        spec = self._durable.core.streams[name].spec
        columns = [pb.Stream.Column(name=n, type=type_name(t)) for n, t in spec.columns.items()]
        constants = {column: json.dumps(value) for column, value in spec.constants.items()}
        clock = spec.clock or LIVE
        deliveries = [_DELIVERIES[delivery] for delivery in spec.deliveries]
        stream = pb.Stream(name=name, columns=columns, deliveries=deliveries, constants=constants)
        if not clock.is_live:
            stream.clock.event_origin_ms, stream.clock.wall_origin_ms = clock.event_origin_ms, clock.wall_origin_ms
            stream.clock.speed = clock.speed
        return stream

    def has_news(self) -> bool:
        """Returns whether the center should get a heartbeat at once.

        This is so if the last heartbeat showed that the edge does not keep up, or if a stream has ended, or if a source
        rejects records, lacks a column or has other files.
        """
        return self._is_pressed or self._news() != self._sent_news

    def may_omit(self) -> bool:
        return any(pipeline.store.policy.may_omit for pipeline in self._durable.core.queries.values())

    def _news(self) -> tuple[object, ...]:
        streams = self._durable.core.streams
        ended = tuple(name for name in streams if streams[name].watermark_ms >= MAX_TIME_MS)
        rejected = tuple((name, *place) for name, state in streams.items() for place in _places(state))
        columns = tuple((name, *column) for name, state in streams.items() for column in state.null_columns())
        return ended, rejected, columns, self.inputs

    def heartbeat(self) -> pb.Heartbeat:
        core, link = self._durable.core, self.forecast()
        self._sent_news = self._news()
        beat = pb.Heartbeat(
            streams=[
                pb.StreamProgress(
                    stream=name,
                    watermark_ms=state.watermark_ms,
                    ended=state.watermark_ms >= MAX_TIME_MS,
                    records=state.records,
                )
                for name, state in core.streams.items()
            ],
            backlog_bytes=core.unacked_bytes,
            bandwidth_bytes_s=_rounded(link.stated_bytes_s),
            likely_bytes_s=0.0 if link.stated_bytes_s else _rounded(link.mid_bytes_s),
            rtt_ms=_rounded(link.rtt_ms),
            drops=self._durable.state.drops,
            sent_at_ms=self._now_ms(),
            busy_share=_rounded(self.workload.busy_share()),
            inputs=self._changed_inputs(),
            durable_records=self._durable.durable_records,
        )
        _add_rejected(core.streams, beat.streams)
        self._is_pressed = beat.busy_share > CALM_SHARE or self._lags_in_accuracy()
        return beat

    def _lags_in_accuracy(self) -> bool:
        """Returns whether the center may have to lower the sampling rate of a query because of the link."""
        core = self._durable.core
        lags = core.unacked_bytes > LAG_S * self.forecast().mid_bytes_s
        return lags and any(pipeline.monitor is not None for pipeline in core.queries.values())

    def _changed_inputs(self) -> list[pb.Input]:
        """Returns all inputs if they have changed since they were sent in this session, otherwise none.

        An empty input says that there are no others, so that the center forgets earlier inputs.
        """
        if self.inputs is None or self.inputs == self._sent_inputs:
            return []
        self._sent_inputs = self.inputs
        inputs = [pb.Input(stream=i.stream, source=i.source, fingerprints=i.fingerprints) for i in self.inputs]
        return inputs or [pb.Input()]


def _add_rejected(streams: Mapping[str, StreamState], progress: Iterable[pb.StreamProgress]) -> None:
    """Adds to the progress of the streams the records that their sources rejected, and the columns without values.

    The largest numbers come first. All streams together have at most `MAX_REJECTED` numbers and `MAX_NULL_COLUMNS`
    columns.
    """
    by_stream = {each.stream: each for each in progress}
    counts = [
        (n, name, source, reason)
        for name, state in streams.items()
        for source, by_reason in state.rejected.items()
        for reason, n in by_reason.items()
    ]
    for n, name, source, reason in nlargest(MAX_REJECTED, counts):
        first = streams[name].first_rejected.get(source, {}).get(reason, "")
        by_stream[name].rejected.add(source=source[:MAX_SOURCE], reason=reason, records=n, first=first)
    columns = ((name, *each) for name, state in streams.items() for each in state.null_columns())
    for name, source, column in islice(columns, MAX_NULL_COLUMNS):
        by_stream[name].null_columns.add(source=source[:MAX_SOURCE], column=column[:MAX_SOURCE])


def _rounded(value: float) -> float:
    """Returns a measurement with two digits: more are noise, and make each heartbeat larger."""
    return float(f"{value:.2g}")


def _places(state: StreamState) -> Iterable[tuple[str, str]]:
    """Returns the sources that reject records, with the reasons."""
    return ((source, reason) for source, by_reason in state.rejected.items() for reason in by_reason)


def _has_changed(sent: pb.BudgetReport | None, report: pb.BudgetReport) -> bool:
    """Returns whether the center's allocation may depend on the difference between two reports."""
    if sent is None or (sent.version, sent.from_ms) != (report.version, report.from_ms) or sent.shares != report.shares:
        return True
    measured = {"": report.update_bytes, **report.drift_per_s}
    before = {"": sent.update_bytes, **sent.drift_per_s}
    return measured.keys() != before.keys() or any(
        abs(value - before[name]) > MIN_RELATIVE_CHANGE * before[name] for name, value in measured.items()
    )
