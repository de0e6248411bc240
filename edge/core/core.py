"""`EdgeCore`: everything an edge decides, as a deterministic state machine.

    core.handle(event) -> list[Effect]

There is no clock, no I/O and no randomness in here, so that the program that runs in production is
the one that recovery replays, tests crash at every step and the simulator measures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import singledispatchmethod

import google_crc32c

from edge.core.arrival_reports import Observing
from edge.core.events import (
    Acked,
    BudgetSet,
    Configured,
    Dropped,
    Effect,
    Event,
    FrameBuilt,
    FrameDiverged,
    FunctionFailed,
    Ingested,
    Pull,
    Pulled,
    QueryAccepted,
    QueryRefused,
    SamplingSet,
    SourceEnded,
    SourcesOpened,
    Tick,
)
from edge.core.query import NOTHING_OPEN, QueryPipeline
from edge.core.selection import Departure, Recorded
from edge.core.slices import Carrier
from edge.core.streams import StreamSpec, StreamState
from edgewater.errors import InvalidQuery, StorageError
from edgewater.query import QuerySpec
from edgewater.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.synopses import GroupedAggregate
from edgewater.wire.frames import Frame, QueryRef, encode_body

MAX_FRAME_BYTES = 256 * 1024
"""Bytes of partials that one frame carries, about, before compression."""

DRAIN_SAFETY = 2.0
REST_PART = 0.02
"""After a pull that found nothing worth its bytes, the part of the slice's time left that the next one waits."""
REST_MIN_MS = 20
WORTH_SPREADING_MS = 20
"""What drains faster leaves when its slice closes: earlier would only be sent twice."""


class EdgeCore:
    """The state of one edge.

    Args:
        streams: what this edge serves, by name.
        source: a number of this edge's own (`sample_rows.source_of` its id and incarnation). With the number
            of a record in its stream it identifies the record, so that edges draw independent samples.
        encode: a partial's bytes. The simulator has its own where bytes are not what is measured.

    Attributes:
        next_seq: the number of the next frame.
        unacked: frames that the center has not acknowledged, ascending.
    """

    def __init__(
        self,
        streams: Mapping[str, StreamSpec],
        source: int = 0,
        encode: Callable[[GroupedAggregate], bytes] = GroupedAggregate.to_bytes,
    ) -> None:
        self.source = source
        self._encode = encode
        self.streams = {name: StreamState(spec) for name, spec in streams.items()}
        self.queries: dict[QueryRef, QueryPipeline] = {}
        self.refused: dict[QueryRef, QueryRefused] = {}
        self.configured = False
        self.next_seq = 1
        self.unacked: deque[Frame] = deque()
        self._touch = 0
        # Event time. Not part of the state: it says when to ask, and an event says what was asked.
        self._rest_until_ms: dict[str, int] = {}
        self._now_ms = 0

    def handle(self, event: Event) -> list[Effect]:
        """Applies one event. Events are applied in the order of the journal, each exactly once."""
        return self._handle(event)

    @singledispatchmethod
    def _handle(self, event: Event) -> list[Effect]:
        raise TypeError(f"{type(event).__name__} is no event of the edge")

    @_handle.register
    def _(self, event: Configured) -> list[Effect]:
        self.configured = True
        wanted = dict(event.queries)
        for ref in [r for r in (*self.queries, *self.refused) if r not in wanted]:
            self.queries.pop(ref, None)
            self.refused.pop(ref, None)
        added = [(ref, spec) for ref, spec in wanted.items() if ref not in self.queries and ref not in self.refused]
        return [self._add(ref, spec) for ref, spec in added]

    def _add(self, ref: QueryRef, spec: QuerySpec) -> Effect:
        stream = self.streams.get(spec.stream)
        if stream is None:
            return self._refuse(ref, InvalidQuery("from", spec.stream, f"one of {', '.join(self.streams)}",
                                                  "this edge serves no such stream"))  # fmt: skip
        if spec.accuracy is not None and spec.accuracy.kind is not None and stream.spec.clock is None:
            return self._refuse(ref, InvalidQuery("accuracy", spec.accuracy.to_mapping(), "a stream with a clock",
                                                  f"{spec.stream} is read as fast as it comes"))  # fmt: skip
        try:
            bound = spec.bind(stream.spec.columns)
        except InvalidQuery as exc:
            return self._refuse(ref, exc)
        # What was read before the query came is gone: it starts with the first whole slice.
        since = (
            MIN_TIME_MS
            if stream.newest_ms == MIN_TIME_MS
            else spec.window.slice_start(stream.newest_ms) + spec.window.slice_ms
        )
        self.queries[ref] = QueryPipeline(ref, bound, since, source=self.source, encode=self._encode)
        return QueryAccepted(ref)

    def _refuse(self, ref: QueryRef, error: InvalidQuery) -> Effect:
        self.refused[ref] = QueryRefused(ref, error.code, error.message)
        return self.refused[ref]

    @_handle.register
    def _(self, event: SourcesOpened) -> list[Effect]:
        for stream, source in event.sources:
            self._stream(stream, source)
        for name, state in self.streams.items():
            state.open_only(source for stream, source in event.sources if stream == name)
        # Why a query was refused may have gone with the configuration before.
        self.refused.clear()
        return []

    def _stream(self, name: str, source: str) -> StreamState:
        if name not in self.streams:
            raise StorageError(
                f"the journal has records of source {source} of stream {name}, which the configuration no longer "
                "names; put it back until the edge has run once more"
            )
        return self.streams[name]

    @_handle.register
    def _(self, event: Ingested) -> list[Effect]:
        self._now_ms = max(self._now_ms, event.arrival_ms)
        stream = self._stream(event.stream, event.source)
        watermark = stream.watermark_ms
        self._touch += 1
        clock = stream.spec.clock
        arrival_ms = clock.to_event_ms(event.arrival_ms) if clock is not None else MIN_TIME_MS
        effects: list[Effect] = []
        for pipeline in self._reading(event.stream):
            dropped = pipeline.ingest(event.batch, watermark, self._touch, stream.records, arrival_ms)
            effects += [Dropped(pipeline.ref, reason, count) for reason, count in dropped.items()]
            failed = pipeline.bound.failures.take()
            effects += [FunctionFailed(pipeline.ref, f.function, f.reason, f.detail, f.calls) for f in failed]
        stream.advance(event.source, event.batch, event.arrival_ms)
        return effects

    @_handle.register
    def _(self, event: SourceEnded) -> list[Effect]:
        self._stream(event.stream, event.source).end(event.source)
        return []

    @_handle.register
    def _(self, event: Tick) -> list[Effect]:
        self._now_ms = max(self._now_ms, event.now_ms)
        for stream in self.streams.values():
            stream.tick(self._now_ms, event.unread)
        return []

    @_handle.register
    def _(self, event: Pull) -> list[Effect]:
        for pipeline in self._most_urgent_first():
            left = self._pull(pipeline, event)
            if left is not None:
                built = FrameBuilt(Frame.pack(self.next_seq, pipeline.ref, left.body), left.closed)
                self._number(built.frame)
                return [built]
        self._rest(event)
        return []

    @_handle.register
    def _(self, event: Pulled) -> list[Effect]:
        if event.built is None:
            for pipeline in self._most_urgent_first():
                self._pull(pipeline, event.pull, Recorded(None))
            self._rest(event.pull)
            return []
        frame, closed = event.built.frame, event.built.closed
        self._number(frame)
        for pipeline in self._most_urgent_first():
            if pipeline.ref != frame.query:
                self._pull(pipeline, event.pull, Recorded(None))
                continue
            again = self._pull(pipeline, event.pull, Recorded(Departure(frame.unpack(), closed)))
            assert again is not None, "what is recorded leaves"
            if again.closed == closed and google_crc32c.value(encode_body(again.body)) == frame.crc32c:
                return [event.built]
            break
        return [event.built, FrameDiverged(frame.seq)]

    def _pull(self, pipeline: QueryPipeline, event: Pull, recorded: Recorded | None = None) -> Departure | None:
        stream = pipeline.spec.stream
        return pipeline.pull(
            min(event.capacity_bytes, MAX_FRAME_BYTES),
            self.streams[stream].watermark_ms,
            event.open_between.get(stream, NOTHING_OPEN),
            self._carrier(stream, event),
            stream in event.unread,
            recorded,
        )

    def _number(self, frame: Frame) -> None:
        self.next_seq = frame.seq + 1
        self.unacked.append(frame)

    def _rest(self, event: Pull) -> None:
        """After a pull that found nothing."""
        for stream, (after_ms, _) in event.open_between.items():
            ends = [p.spec.window.slice_start(after_ms) + p.spec.window.slice_ms for p in self._reading(stream)]
            left_ms = max(min(ends, default=after_ms) - after_ms, 0)
            self._rest_until_ms[stream] = after_ms + max(int(REST_PART * left_ms), REST_MIN_MS)

    def _carrier(self, stream: str, event: Pull) -> Carrier:
        """The link in the stream's event time, by which budgets and deadlines go."""
        clock = self.streams[stream].spec.clock
        speed = clock.speed if clock is not None else 1.0
        return Carrier(event.bandwidth_bytes_s / 1000.0 / speed, event.way_ms * speed)

    def _most_urgent_first(self) -> list[QueryPipeline]:
        """Queries with the oldest news first, so that none starves behind one that is always busy."""
        return sorted(self.queries.values(), key=lambda p: (p.progress.through_ms, p.ref.name))

    @_handle.register
    def _(self, event: Acked) -> list[Effect]:
        while self.unacked and self.unacked[0].seq <= event.through:
            self.unacked.popleft()
        return []

    @_handle.register
    def _(self, event: BudgetSet) -> list[Effect]:
        pipeline = self.queries.get(event.query)
        if pipeline is not None:
            pipeline.set_shares(event.version, event.shares, event.from_ms)
        return []

    @_handle.register
    def _(self, event: SamplingSet) -> list[Effect]:
        pipeline = self.queries.get(event.query)
        if pipeline is not None and pipeline.monitor is not None:
            clock = self.streams[pipeline.spec.stream].spec.clock
            speed = clock.speed if clock is not None else 1.0
            pipeline.observe_as(Observing(event.rate, round(event.clock_offset_ms * speed), event.reason))
        elif pipeline is not None and pipeline.ships_rows and event.rate > 0:
            pipeline.drawn_at = event.rate
        return []

    def _reading(self, stream: str) -> list[QueryPipeline]:
        return [p for p in self.queries.values() if p.spec.stream == stream]

    def next_deadline(self) -> int | None:
        """Wall time (ms) at which a `Tick` will change something, or None."""
        return min((d for s in self.streams.values() if (d := s.next_deadline()) is not None), default=None)

    def next_pull_ms(self, bandwidth_bytes_s: float, now_ms: int) -> int | None:
        """Wall time from which a `Pull` is worth its bytes; None: nothing to send.

        Closed slices leave at once. Of open ones may leave what is worth it (`edge/cache/eviction.py`) once
        there is so much to send that it would not drain in a moment; after a pull that found nothing
        worth its bytes the next one waits a little.
        """
        earliest: int | None = None
        for name, stream in self.streams.items():
            watermark = stream.watermark_ms
            if any(p.has_news(watermark) or p.closed_bytes(watermark) for p in self._reading(name)):
                return now_ms
            told = self._next_point_ms(name, now_ms)
            if told is not None:
                earliest = told if earliest is None else min(earliest, told)
            drain_ms, first_end = self._drain(name, bandwidth_bytes_s, now_ms)
            if first_end is not None and stream.spec.clock is not None:
                end = stream.spec.clock.to_wall_ms(first_end)
                rest = stream.spec.clock.to_wall_ms(self._rest_until_ms.get(name, MIN_TIME_MS))
                due = min(max(now_ms, rest), end) if drain_ms else end
                earliest = due if earliest is None else min(earliest, due)
        return earliest

    def _next_point_ms(self, stream: str, now_ms: int) -> int | None:
        """Wall time, from now on, at which a query with an accuracy tells of arrivals; None: there is none."""
        clock, earliest = self.streams[stream].spec.clock, None
        for monitor in (p.monitor for p in self._reading(stream)):
            if monitor is None or clock is None:
                continue
            offset = monitor.observing.clock_offset_ms
            due_ms = monitor.next_due_ms(clock.to_event_ms(now_ms) - offset) + offset
            wall_ms = max(clock.to_wall_ms(due_ms), now_ms)
            wall_ms += clock.to_event_ms(wall_ms) < due_ms  # a fast clock's rounding
            earliest = wall_ms if earliest is None else min(earliest, wall_ms)
        return earliest

    def open_between(self, bandwidth_bytes_s: float, now_ms: int) -> dict[str, tuple[int, int]]:
        """What `Pull.open_between` should say now, per stream: from now, in event time, until when what open slices
        have to send would take to drain, twice over. How much of a slice's time left that is, is the pressure
        under which its entries leave."""
        result = {}
        for name, stream in self.streams.items():
            if stream.spec.clock is not None:
                drain_ms, _ = self._drain(name, bandwidth_bytes_s, now_ms)
                clock = stream.spec.clock
                result[name] = (clock.to_event_ms(now_ms), clock.to_event_ms(now_ms + drain_ms))
        return result

    def _drain(self, stream: str, bandwidth_bytes_s: float, now_ms: int) -> tuple[int, int | None]:
        """How long the open slices of a stream would take to send (ms, twice over, for what changes
        meanwhile), and the end of the first."""
        state = self.streams[stream]
        if state.spec.clock is None:
            return 0, None
        after = state.spec.clock.to_event_ms(now_ms)
        open_slices = [p.open_bytes(state.watermark_ms, after) for p in self._reading(stream)]
        size = sum(size for size, _ in open_slices)
        first_end = min((end for _, end in open_slices if end is not None), default=None)
        drain_ms = int(DRAIN_SAFETY * 1000 * size / max(bandwidth_bytes_s, 1.0))
        return (drain_ms if drain_ms >= WORTH_SPREADING_MS else 0), first_end

    @property
    def pending_bytes(self) -> int:
        """Memory held for what has not been acknowledged: the bound at which sources are held back."""
        return sum(p.nbytes for p in self.queries.values()) + self.unacked_bytes

    @property
    def unacked_bytes(self) -> int:
        return sum(len(f.body) for f in self.unacked)

    def stream_ended(self, name: str) -> bool:
        return self.streams[name].watermark_ms >= MAX_TIME_MS
