"""`EdgeCore`: all decisions of an edge, as a deterministic state machine.

    core.handle(event) -> list[Effect]

It has no clock, no I/O and no randomness, so that recovery, the simulator and tests run the same program as
production.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial, singledispatchmethod
from typing import Any, Protocol

import google_crc32c
import pyarrow as pa

from edge.core.arrival_reports import SamplingSettings
from edge.core.backfill import FIRST_RECORD_NUMBER
from edge.core.events import (
    Acked,
    BackfillEnded,
    BackfillIngested,
    BudgetSet,
    Configured,
    Dropped,
    Effect,
    Event,
    FrameBuilt,
    FrameDiverged,
    FunctionFailed,
    Ingested,
    InputLost,
    MemoryLimited,
    PullEvent,
    PullReplayed,
    QueryAccepted,
    QueryRefused,
    SamplesEnded,
    SamplingSet,
    SourceEnded,
    SourcesOpened,
    TickEvent,
)
from edge.core.frame_state import Decision
from edge.core.memory import HeldMemory
from edge.core.pull_planner import PullPlanner, has_closed
from edge.core.query_pipeline import QueryPipeline
from edge.core.shared_batch import BatchRecords, Sharing
from edge.core.streams import StreamSpec, StreamState
from edge.core.turn import Turn
from edgewater.base.errors import InvalidQuery, StorageError
from edgewater.base.streams import MAX_TIME_MS, TIME_COLUMN
from edgewater.model.query import QuerySpec
from edgewater.model.window_range import ALL_WINDOWS
from edgewater.synopses import GroupedAggregate
from edgewater.synopses.encoding.state import State
from edgewater.wire import Frame, QueryRef, encode_body
from edgewater.wire import uplink_pb2 as pb

QUEUED = (
    "the state has batches that queries have not processed, because limits.scheduling was on; run Edgewater 0.3.0 with "
    "limits.scheduling: off until edgewater_edge_queued_bytes is 0, and stop it before the upgrade"
)
"""The error for a state of an earlier release whose queries had queues."""
_KIND = "edge-core"


class CostMeter(Protocol):
    """Measures the CPU that queries use. It has a clock, which the core must not have."""

    def begin(self) -> None:
        """Called before the first of several queries processes records."""

    def end(self, query: QueryRef, records: int) -> None:
        """Called when a query has processed records. Its time began at `begin` or at the last `end`."""


class EdgeCore:
    """The state of one edge.

    Args:
        streams: the streams of this edge, by name.
        source: a number of this edge (`sample_rows.source_of` its id and incarnation). With the number of a record in
            its stream it identifies the record, so that edges draw independent samples.
        encode: serialises a partial. The simulator replaces it where it does not measure bytes.

    Attributes:
        queries: the running queries.
        pulls: when and how pulls are made.
        refused: the queries that do not match this edge's streams.
        configured: whether the core has received a set of queries.
        next_seq: the number of the next frame.
        unacked: frames that the center has not acknowledged, ascending.
        cost_meter: measures how long each query processes records. The core's decisions do not depend on it.
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
        self.pulls = PullPlanner(self.streams, self.queries)
        self.refused: dict[QueryRef, QueryRefused] = {}
        self.configured = False
        self.next_seq = 1
        self.unacked: deque[Frame] = deque()
        self.cost_meter: CostMeter | None = None
        self._batch_number = 0
        self._max_state_bytes: int | None = None
        self._columns: dict[str, dict[str, str]] = {}
        self._changed: dict[str, tuple[str, str]] = {}  # only in a replay: (type when read, type now) by column
        self._now_ms = 0
        self._served_bytes = self._first_pulls = self._turns = 0

    def handle(self, event: Event) -> list[Effect]:
        """Applies an event. Events are applied in the order of the journal, each exactly once."""
        return self._handle(event)

    @singledispatchmethod
    def _handle(self, event: Event) -> list[Effect]:
        raise TypeError(f"{type(event).__name__} is not an event of the edge")

    @_handle.register
    def _(self, event: Configured) -> list[Effect]:
        self.configured = True
        specs = dict(event.queries)
        removed = {ref: pipeline for ref, pipeline in self.queries.items() if ref not in specs}
        for ref in [r for r in (*self.queries, *self.refused) if r not in specs]:
            self.queries.pop(ref, None)
            self.refused.pop(ref, None)
        added = [(ref, spec) for ref, spec in specs.items() if ref not in self.queries and ref not in self.refused]
        for ref, pipeline in self.queries.items():
            pipeline.store.set_windows(event.windows.get(ref, ALL_WINDOWS))
        effects = [self._add(ref, spec, event) for ref, spec in added]
        # The oldest version of a query counts the late records of versions that are gone.
        for ref, pipeline in self.queries.items():
            older = [r for r in specs if r.name == ref.name and r.version < ref.version]
            pipeline.store.counts_earlier = event.counts_earlier and not older
            for was, before in removed.items():
                if was.name == ref.name and pipeline.store.counts_earlier:
                    pipeline.store.losses.drops.inherit(before.store.losses.drops)
        self._set_max_state_bytes(self._max_state_bytes)
        return effects

    def _add(self, ref: QueryRef, spec: QuerySpec, event: Configured) -> Effect:
        stream = self.streams.get(spec.stream)
        if stream is None:
            return self._refuse(
                ref,
                InvalidQuery("from", spec.stream, f"one of {', '.join(self.streams)}", "this edge has no such stream"),
            )
        if spec.accuracy is not None and spec.accuracy.kind is not None and stream.spec.clock is None:
            return self._refuse(
                ref,
                InvalidQuery(
                    "accuracy",
                    spec.accuracy.to_mapping(),
                    "a stream with a clock",
                    f"{spec.stream} is read as fast as it comes",
                ),
            )
        try:
            bound = spec.bind(stream.spec.columns)
            for lookup in spec.lookups:
                lookup.require_rows()
        except InvalidQuery as exc:
            return self._refuse(ref, exc)
        self.queries[ref] = QueryPipeline.begin(
            ref,
            bound,
            stream,
            source=self.source,
            encode=self._encode,
            windows=event.windows.get(ref, ALL_WINDOWS),
            now_ms=event.now_ms,
        )
        return QueryAccepted(ref)

    def _refuse(self, ref: QueryRef, error: InvalidQuery) -> Effect:
        self.refused[ref] = QueryRefused(ref, error.code, error.message)
        return self.refused[ref]

    @_handle.register
    def _(self, event: SourcesOpened) -> list[Effect]:
        self._read_as(event.columns)
        for stream, source in event.sources:
            self._stream(stream, source)
        for name, state in self.streams.items():
            state.set_sources((source for stream, source in event.sources if stream == name), event.replayable)
            for pipeline in self.queries_of(name):
                if pipeline.backfill is not None:
                    pipeline.end_backfill(pipeline.backfill.unread.keys() - state.replayable)
        self._set_max_state_bytes(event.max_state_bytes)
        # A query may have been refused because of the previous configuration.
        self.refused.clear()
        return []

    def _set_max_state_bytes(self, value: int | None) -> None:
        self._max_state_bytes = value
        for pipeline in self.queries.values():
            pipeline.intake.max_state_bytes = value

    def _stream(self, name: str, source: str) -> StreamState:
        if name not in self.streams:
            raise StorageError(
                f"the journal has records of source {source} of stream {name}, which is not in the configuration; "
                "put it back until the edge has run once more"
            )
        return self.streams[name]

    def _read_as(self, columns: Mapping[str, Mapping[str, str]]) -> None:
        """Sets the types of columns with which the next records of the journal were read, and notes changed types."""
        self._columns = {name: dict(types) for name, types in columns.items()}
        self._changed = {
            f"{stream}.{column}": (before, now[column])
            for stream, types in self._columns.items()
            for column, before in types.items()
            if stream in self.streams and before != (now := self.streams[stream].column_types).get(column, before)
        }

    @_handle.register
    def _(self, event: Ingested) -> list[Effect]:
        self._now_ms = max(self._now_ms, event.arrival_ms)
        stream = self._stream(event.stream, event.source)
        if self._changed:
            changed = ", ".join(f"{column} was {before}, is {now}" for column, (before, now) in self._changed.items())
            raise StorageError(
                f"the journal has records with other types ({changed}); restore them until the edge has run once more "
                "and was stopped cleanly"
            )
        self._batch_number += 1
        effects: list[Effect] = []
        queries = self.queries_of(event.stream)
        if event.rejected:
            _count_rejected(event, stream, queries)
        sharing = Sharing.among((pipeline.intake.reading for pipeline in queries), event.batch)
        records = BatchRecords.numbered(event.batch, stream.records, sharing)
        if self.cost_meter is not None:
            self.cost_meter.begin()
        for pipeline in queries:
            effects += self._ingest(pipeline, records, event.arrival_ms, stream.watermark_ms)
        stream.advance(event.source, event.batch, event.arrival_ms)
        return effects

    def _ingest(
        self, pipeline: QueryPipeline, records: BatchRecords, arrival_ms: int, watermark_ms: int
    ) -> list[Effect]:
        dropped = pipeline.ingest(records, watermark_ms, self._batch_number, arrival_ms)
        failed = pipeline.bound.failures.take()
        if self.cost_meter is not None:
            self.cost_meter.end(pipeline.ref, len(records))
        return [
            *(Dropped(pipeline.ref, reason, count) for reason, count in dropped.items()),
            *(FunctionFailed(pipeline.ref, f.function, f.reason, f.detail, f.calls) for f in failed),
        ]

    @_handle.register
    def _(self, event: BackfillIngested) -> list[Effect]:
        self._now_ms = max(self._now_ms, event.arrival_ms)
        pipeline = self.queries.get(event.query)
        if pipeline is None or pipeline.backfill is None or event.source not in pipeline.backfill.unread:
            return []
        self._batch_number += 1
        times = event.batch.column(TIME_COLUMN).to_numpy()
        batch = (
            event.batch
            if times.min(initial=MAX_TIME_MS) >= pipeline.store.since_ms
            else event.batch.filter(pa.array(times >= pipeline.store.since_ms))
        )
        first = FIRST_RECORD_NUMBER + pipeline.backfill.records
        if self.cost_meter is not None:
            self.cost_meter.begin()
        records = BatchRecords.numbered(batch, first)
        for rejected in event.rejected:
            pipeline.store.losses.reject(rejected, event.arrival_ms)
        effects = self._ingest(pipeline, records, event.arrival_ms, pipeline.watermark_ms)
        pipeline.backfill.read(event.source, times)
        return effects

    @_handle.register
    def _(self, event: BackfillEnded) -> list[Effect]:
        pipeline = self.queries.get(event.query)
        if pipeline is not None and pipeline.backfill is not None:
            pipeline.end_backfill(pipeline.backfill.unread.keys() & {event.source})
        return []

    @_handle.register
    def _(self, event: InputLost) -> list[Effect]:
        self._now_ms = max(self._now_ms, event.at_ms)
        self._batch_number += event.was_ingested
        loss = self._stream(event.stream, event.source).lose(event)
        for pipeline in self.queries_of(event.stream):
            pipeline.lose(loss)
        return []

    @_handle.register
    def _(self, event: SourceEnded) -> list[Effect]:
        self._stream(event.stream, event.source).end(event.source)
        return []

    @_handle.register
    def _(self, event: TickEvent) -> list[Effect]:
        self._now_ms = max(self._now_ms, event.now_ms)
        for stream in self.streams.values():
            stream.tick(self._now_ms, event.unread, event.empty_ms)
        return []

    @_handle.register
    def _(self, event: PullEvent) -> list[Effect]:
        ended, effects = self._end_samples(event), list[Effect]()
        demands, shares = partial(self.pulls.demands, event), self.pulls.shares(event.now_ms)
        turn = Turn(event, list(self.queries.values()), demands, self._served_bytes, self._first_pulls, self._turns)
        self._first_pulls = turn.first_pulls
        for pipeline in turn.queries:
            room_bytes = turn.room_bytes(pipeline)
            if not room_bytes or (effects and not _may_follow(pipeline)):
                continue
            conditions = self.pulls.conditions(pipeline, event, room_bytes, shares[pipeline.ref], turn.first_groups)
            decision = pipeline.shipper.decide(conditions)
            if decision is None:
                continue
            body = pipeline.frames.apply(decision)
            frame = Frame.pack(self.next_seq, pipeline.ref, body)
            omitted = pipeline.shipper.entry_bytes if pipeline.store.policy.lacks_bytes else 0.0
            pipeline.load.add(frame.plain_wire_bytes, body.closes, decision.closed, omitted)
            self._append_unacked(frame)
            self._count_bytes(event, frame, decision)
            counts_only = decision.report is not None and decision.report.counts_only
            effects.append(FrameBuilt(frame, decision.closed, counts_only))
            self._served_bytes, self._turns = turn.serve(pipeline, frame.plain_wire_bytes), turn.turns
            if turn.is_full:
                break
        if not effects:
            self.pulls.defer(event)
        return [*ended, *effects]

    def _end_samples(self, pull: PullEvent) -> list[Effect]:
        """Tops up the samples of windows that have ended when a pull comes."""
        effects = list[Effect]()
        for pipeline in self.queries.values():
            if not pipeline.intake.tops_up:
                continue
            now_ms = self.pulls.conditions(pipeline, pull, 0, 1.0).now_ms
            if pipeline.intake.top_up(now_ms, self._batch_number + 1):
                self._batch_number += 1
                effects = [SamplesEnded()]
        return effects

    @_handle.register
    def _(self, event: PullReplayed) -> list[Effect]:
        self._end_samples(event.pull)
        effects = list[Effect](event.built)
        for built in event.built:
            self._append_unacked(built.frame)
            pipeline = self.queries.get(built.frame.query)
            if pipeline is None or not self._replay(pipeline, event.pull, built):
                effects.append(FrameDiverged(built.frame.seq))
        return effects

    def _replay(self, pipeline: QueryPipeline, pull: PullEvent, built: FrameBuilt) -> bool:
        """Applies a recorded frame; returns whether this state gives it the same body."""
        decision = pipeline.frames.read(built, self.pulls.conditions(pipeline, pull, 0, 1.0))
        own = encode_body(pipeline.frames.apply(decision))
        self._count_bytes(pull, built.frame, decision)
        return decision.closed == built.closed and google_crc32c.value(own) == built.frame.crc32c

    def _count_bytes(self, pull: PullEvent, frame: Frame, decision: Decision) -> None:
        """Counts a frame against the byte budgets of all versions of its query."""
        for ref, pipeline in self.queries.items():
            if ref.name == frame.query.name and pipeline.byte_count is not None:
                pipeline.byte_count.add(pull.now_ms, frame)
        prices = self.queries[frame.query].store.policy.prices
        if prices is not None:
            prices.sent(frame, sum(len(send.shipment.groups) for send in decision.sends))

    def _append_unacked(self, frame: Frame) -> None:
        self.next_seq = frame.seq + 1
        self.unacked.append(frame)

    @_handle.register
    def _(self, event: Acked) -> list[Effect]:
        while self.unacked and self.unacked[0].seq <= event.through:
            self.unacked.popleft()
        return []

    @_handle.register
    def _(self, event: BudgetSet) -> list[Effect]:
        pipeline = self.queries.get(event.query)
        if pipeline is not None:
            pipeline.store.set_shares(event.version, event.shares, event.from_ms)
        return []

    @_handle.register
    def _(self, event: SamplingSet) -> list[Effect]:
        pipeline = self.queries.get(event.query)
        if pipeline is not None:
            clock = pipeline.stream.spec.clock
            speed = clock.speed if clock is not None else 1.0
            offset_ms = round(event.clock_offset_ms * speed)
            settings = SamplingSettings(event.rate, offset_ms, event.reason, event.expected_records)
            pipeline.intake.set_sampling(settings)
        return []

    @_handle.register
    def _(self, event: MemoryLimited) -> list[Effect]:
        pipeline = self.queries.get(event.query)
        if pipeline is not None:
            pipeline.store.limit_memory(event.action, pipeline.watermark_ms)
        return []

    def held_memory(self) -> dict[QueryRef, HeldMemory]:
        """Returns, by query, the memory that acknowledgements do not free (`edge.core.memory`)."""
        return {ref: pipeline.store.held_memory(pipeline.watermark_ms) for ref, pipeline in self.queries.items()}

    def queries_of(self, stream: str) -> list[QueryPipeline]:
        """Returns the running queries of a stream."""
        return [p for p in self.queries.values() if p.spec.stream == stream]

    def next_deadline(self) -> int | None:
        """Returns the wall time (ms) at which the next `TickEvent` is due, or None."""
        return min((d for s in self.streams.values() if (d := s.next_deadline()) is not None), default=None)

    @property
    def pending_bytes(self) -> int:
        """Memory of queries and unacknowledged frames, limited by backpressure on the sources."""
        return sum(p.nbytes for p in self.queries.values()) + self.unacked_bytes

    @property
    def unacked_bytes(self) -> int:
        return sum(len(f.body) for f in self.unacked)

    def to_state(self) -> bytes:
        """Serialises the whole state. Equal states give equal bytes."""
        numbers: dict[str, Any] = {
            "configured": self.configured,
            "next_seq": self.next_seq,
            "source": self.source,
            "batch_number": self._batch_number,
            "now_ms": self._now_ms,
            "served_bytes": self._served_bytes,
            "first_pulls": self._first_pulls,
            "turns": self._turns,
            "max_state_bytes": self._max_state_bytes,
            "columns": self._columns,
            "streams": {name: stream.to_state() for name, stream in self.streams.items()},
            "refused": [[r.query.name, r.query.version, r.code, r.message] for r in self.refused.values()],
        }
        arrays = {str(f.seq): f.to_wire().SerializeToString(deterministic=True) for f in self.unacked}
        queries = {str(n): pipeline.to_state() for n, pipeline in enumerate(self.queries.values())}
        return State(numbers, arrays, queries).pack(_KIND)

    def restore(self, data: bytes) -> None:
        """Puts a new core into the state that `to_state` returned.

        The caller builds the core from the configuration first. Streams that the configuration no longer has are
        dropped, with their queries.

        Raises:
            CorruptSynopsis, UnsupportedVersion: the bytes are damaged, or of a newer release.
            StorageError: a query needs a column that the configuration no longer has, or the state has batches that
                queries have not processed (`QUEUED`).
        """
        state = State.unpack(data, _KIND)
        numbers = state.numbers
        if "queues" in numbers:
            raise StorageError(QUEUED)
        self.configured, self.next_seq = numbers["configured"], numbers["next_seq"]
        self.source = numbers["source"]  # records keep their identities, even if the edge is renamed
        self._batch_number, self._now_ms = numbers["batch_number"], numbers["now_ms"]
        self._served_bytes = numbers.get("served_bytes", 0)
        self._first_pulls, self._turns = numbers.get("first_pulls", 0), numbers.get("turns", 0)
        for name, stream in numbers["streams"].items():
            if name in self.streams:
                self.streams[name] = StreamState.from_state(stream, self.streams[name].spec)
        for name, version, code, message in numbers["refused"]:
            ref = QueryRef(name, version)
            self.refused[ref] = QueryRefused(ref, code, message)
        frames = [frame for name, frame in state.arrays.items() if name.isdecimal()]
        self.unacked.extend(Frame.from_wire(pb.Frame.FromString(frame)) for frame in frames)
        for query in state.components.values():
            pipeline = QueryPipeline.from_state(query, self.streams, self.source, self._encode)
            if pipeline is not None:
                self.queries[pipeline.ref] = pipeline
        self._set_max_state_bytes(numbers["max_state_bytes"])
        self._read_as(numbers["columns"])


def _may_follow(pipeline: QueryPipeline) -> bool:
    """Whether a query may add another frame to a pull: its slices have closed, or it may have arrivals to report."""
    return pipeline.monitor is not None or has_closed(pipeline)


def _count_rejected(event: Ingested, stream: StreamState, queries: Iterable[QueryPipeline]) -> None:
    """States rejected records. Called before the batch advances the watermark, while the affected windows are open."""
    for rejected in stream.reject(event.source, event.rejected, event.arrival_ms):
        for pipeline in queries:
            pipeline.store.losses.reject(rejected, event.arrival_ms)
