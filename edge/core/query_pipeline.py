"""`QueryPipeline`: one query at one edge. It connects the parts through which records pass.

Records enter the slices through an `Intake`, slices are in a `SliceStore`, a `Shipper` decides what frames have, and a
`FrameState` applies the decisions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from edge.core.arrival_reports import ArrivalMonitor
from edge.core.backfill import Backfill
from edge.core.byte_budget import ByteCount, ByteRoom
from edge.core.frame_state import Encode, FrameState
from edge.core.intake import Intake
from edge.core.shared_batch import BatchRecords
from edge.core.shipper import Shipper
from edge.core.slice_load import SliceLoad
from edge.core.slice_store import SliceStore
from edge.core.streams import StreamState, constant_type
from edgewater.base.errors import InvalidQuery, StorageError
from edgewater.base.streams import MIN_TIME_MS, Constant
from edgewater.model.accuracy import report_schedule
from edgewater.model.query import BoundQuery, QuerySpec
from edgewater.model.window_range import ALL_WINDOWS, WindowRange
from edgewater.synopses.encoding.state import State
from edgewater.wire import InputLoss, LossReason, QueryRef

TYPES_REMEDY = "Restore the columns, delete the query at the center, and change them then"


class QueryPipeline:
    """The state of one query.

    Args:
        stream: the stream that the query reads.
        monitor: as in `monitor_of`.

    Attributes:
        store: the slices.
        intake: takes records into the slices.
        frames: changes the slices by frames.
        shipper: decides what frames have.
        backfill: while records from before the registration are read again.
        served_bytes: as in `Turn`.
        byte_count: the used bytes of a byte budget; None: there is none.
        load: what its slices take of the link.
    """

    def __init__(
        self, ref: QueryRef, stream: StreamState, store: SliceStore, monitor: ArrivalMonitor | None, encode: Encode
    ) -> None:
        self.ref, self.bound, self.spec = ref, store.bound, store.spec
        self.stream, self.store, self.monitor = stream, store, monitor
        self.intake = Intake(ref, store, monitor)
        self.frames = FrameState(store, monitor, encode)
        self.shipper = Shipper(store, self.frames, monitor)
        self.backfill: Backfill | None = None
        self.served_bytes = 0
        self.byte_count: ByteCount | None = None
        self.load = SliceLoad()

    @classmethod
    def begin(
        cls,
        ref: QueryRef,
        bound: BoundQuery,
        stream: StreamState,
        *,
        source: int,
        encode: Encode,
        windows: WindowRange = ALL_WINDOWS,
        now_ms: int = 0,
    ) -> QueryPipeline:
        """Returns the pipeline of a query that was registered now.

        Without `since` the query begins with the first complete slice, because earlier records are gone. With `since`,
        earlier records are read again, as far as the windows need them.

        Args:
            source, windows: as in `SliceStore`.
            now_ms: wall time.
        """
        spec, since_ms = bound.spec, MIN_TIME_MS
        window, asked_ms = spec.window, spec.since_ms
        if asked_ms is not None:
            asked_ms = max(asked_ms, windows.from_ms)
            since_ms = asked_ms if asked_ms == MIN_TIME_MS else window.next_slice(asked_ms - 1)
        elif stream.newest_ms > MIN_TIME_MS:
            since_ms = window.next_slice(stream.newest_ms)
        store = SliceStore(bound, since_ms, source, windows)
        result = cls(ref, stream, store, monitor_of(bound, source), encode)
        if spec.byte_budget is not None:
            result.byte_count = ByteCount(spec, now_ms)
        for loss in stream.losses:
            result.lose(loss)
        if asked_ms is not None:
            result._begin_backfill(since_ms)
        else:
            # Records ahead of the clock are gone too. Only windows with such records lack them.
            ahead = stream.losses_ahead(max(since_ms, store.begin_ms), counted=bound.where is None)
            store.losses.unsent += ahead
        return result

    @property
    def nbytes(self) -> int:
        """Memory of the slices, of their history and of arrival statistics."""
        monitored = self.monitor.nbytes if self.monitor is not None else 0
        return self.store.nbytes + self.shipper.history.nbytes + monitored

    @property
    def through_ms(self) -> int:
        """Event time up to which slices are closed."""
        return self.store.through_ms

    @property
    def watermark_ms(self) -> int:
        """The stream's watermark, or less while the backfill may have records before it."""
        return self.bounded_ms(self.stream.watermark_ms)

    def bounded_ms(self, watermark_ms: int) -> int:
        """Returns the watermark, or less while the backfill may have records before it."""
        return watermark_ms if self.backfill is None else min(watermark_ms, self.backfill.watermark_ms)

    def ingest(self, records: BatchRecords, watermark_ms: int, batch_number: int, arrival_ms: int) -> dict[str, int]:
        """Updates the slices with a batch; returns how many records were not counted, by reason.

        Args:
            watermark_ms: the stream's watermark before the batch.
            batch_number: ascending over the batches of all streams.
            arrival_ms: wall time.
        """
        clock = self.stream.spec.clock
        event_ms = clock.to_event_ms(arrival_ms) if clock is not None else MIN_TIME_MS
        dropped = self.intake.take(
            records, self.bounded_ms(watermark_ms), batch_number, event_ms, is_backfill=self.backfill is not None
        )
        self.store.losses.drops.begin(arrival_ms)
        return dropped

    def _begin_backfill(self, since_ms: int) -> None:
        delivered = {source: counts.since(since_ms) for source, counts in self.stream.delivered.items()}
        backfill = Backfill(since_ms, {source: counts for source, counts in delivered.items() if counts.records})
        if backfill.unread:
            self.backfill = backfill
            self.end_backfill(backfill.unread.keys() - self.stream.replayable)

    def end_backfill(self, sources: Collection[str]) -> None:
        """Ends the backfill of these sources. The unread records are stated as lost to this query."""
        assert self.backfill is not None
        for source in sorted(sources):
            for from_ms, to_ms, records in self.backfill.end(source):
                number = records if self.bound.where is None else None
                self.lose(InputLoss(source, LossReason.BEFORE_QUERY, from_ms, to_ms, number), apart=True)
        if not self.backfill.unread:
            self.backfill = None

    def lose(self, loss: InputLoss, *, apart: bool = False) -> None:
        """Adds a loss of input, to be sent with the next frame, if the query may lack its records.

        Args:
            apart: as in `QueryLosses.lose`.
        """
        self.store.losses.lose(loss, self.through_ms, apart=apart)

    def byte_room(self, now_ms: int) -> ByteRoom | None:
        """Returns what a byte budget permits at a wall time; None: there is none."""
        return None if self.byte_count is None else self.byte_count.room(now_ms)

    def bytes_due_ms(self, now_ms: int) -> int:
        """Returns the wall time at which a byte budget permits the smallest frame; now if it does, or there is none."""
        return now_ms if self.byte_count is None else self.byte_count.due_ms(now_ms, self.shipper.least_bytes)

    def to_state(self) -> State:
        """Returns the state. On reading, the spec is bound again, because a new release may evaluate it differently."""
        numbers = {
            "query": [self.ref.name, self.ref.version],
            "spec": self.spec.to_mapping(),
            "types": _types_of(self.bound, self.stream.spec.constants),
            "sampling_rate": self.intake.sampling_rate,
            "backfill": None if self.backfill is None else self.backfill.to_state(),
            "served_bytes": self.served_bytes,
        }
        if self.byte_count is not None:
            numbers["bytes"] = sorted(self.byte_count.used.items())
        components = {"store": self.store.to_state(), "shipper": self.shipper.to_state()}
        if self.monitor is not None:
            components["monitor"] = self.monitor.to_state()
        return State(numbers, {}, components)

    @classmethod
    def from_state(
        cls, state: State, streams: Mapping[str, StreamState], source: int, encode: Encode
    ) -> QueryPipeline | None:
        """Builds the pipeline from its state; returns None if the configuration no longer has the query's stream.

        Raises:
            StorageError: the stream no longer has a column that the query needs.
        """
        numbers, components = state.numbers, state.components
        ref, spec = QueryRef(*numbers["query"]), QuerySpec.from_mapping(numbers["spec"])
        stream = streams.get(spec.stream)
        if stream is None:
            return None
        bound = _bind_again(ref, spec, stream, numbers["types"])
        monitor = monitor_of(bound, source)
        if monitor is not None:
            reports, key_types = monitor.schedule, monitor.key_types
            monitor = ArrivalMonitor.from_state(components["monitor"], reports, source, key_types, spec.sampling_seed)
        store = SliceStore.from_state(components["store"], bound, source)
        result = cls(ref, stream, store, monitor, encode)
        result.shipper.restore(components["shipper"])
        result.intake.sampling_rate = numbers["sampling_rate"]
        result.served_bytes = numbers.get("served_bytes", 0)
        if "bytes" in numbers:
            result.byte_count = ByteCount(spec, 0)
            result.byte_count.used = dict(numbers["bytes"])
        if numbers["backfill"] is not None:
            result.backfill = Backfill.from_state(numbers["backfill"])
        return result


def monitor_of(bound: BoundQuery, source: int) -> ArrivalMonitor | None:
    """Returns the arrival statistics of a query with early answers; None: it has none."""
    spec = bound.spec
    schedule = report_schedule(spec.window, spec.accuracy, spec.lateness_ms)
    return None if schedule is None else ArrivalMonitor(schedule, source, bound.group_types, spec.sampling_seed)


def _bind_again(ref: QueryRef, spec: QuerySpec, stream: StreamState, types: Sequence[Sequence[str]]) -> BoundQuery:
    try:
        bound = spec.bind(stream.spec.columns)
    except InvalidQuery as exc:
        # If the query were dropped, the values that it has not sent yet would be lost.
        raise StorageError(
            f"the columns of stream {spec.stream} do not match query {ref.name}, which this edge runs: {exc}. "
            f"{TYPES_REMEDY}"
        ) from exc
    now = _types_of(bound, stream.spec.constants)
    if now != types:
        raise StorageError(
            f"query {ref.name}, which this edge runs, has counted keys and values of other types than the columns "
            f"of stream {spec.stream} have now: {types}, now {now}. {TYPES_REMEDY}"
        )
    return bound


def _types_of(bound: BoundQuery, constants: Mapping[str, Constant]) -> list[list[str]]:
    """Returns the types of a query's keys, with their constants, and of its measures' arguments. States depend on
    them."""
    arguments = [str(m.argument.type) if m.argument is not None else "" for m in bound.measures]
    own_constants = {name: value for name, value in constants.items() if name in bound.spec.plain_keys}
    keys = zip(bound.spec.group_by, bound.group_types, strict=True)
    return [[constant_type(t, own_constants.get(name)) for name, t in keys], arguments]
