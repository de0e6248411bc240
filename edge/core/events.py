"""The inputs of `EdgeCore` (events) and its outputs (effects).

Every event carries its time; the core never reads a clock. The journal records events, so a new event needs a new kind
of journal record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from edge.core.memory import MemoryAction
from edge.records import RejectedRecords
from edgewater.base.streams import MAX_TIME_MS
from edgewater.model.query import QuerySpec
from edgewater.model.window_range import WindowRange
from edgewater.wire import Frame, QueryRef, SamplingReason


@dataclass(frozen=True, slots=True)
class Configured:
    """The complete set of queries has been received. A running query that is not in the set is removed.

    Attributes:
        windows: by query, the windows of a query that does not have all windows.
        counts_earlier: whether the oldest version of a query counts the records that belong to windows of versions that
            are removed. It is false in journals of 0.3.0, whose frames must be built again as they were.
        now_ms: wall time, at which byte budgets of new queries begin.
    """

    queries: tuple[tuple[QueryRef, QuerySpec], ...]
    windows: Mapping[QueryRef, WindowRange] = field(default_factory=dict)
    counts_earlier: bool = True
    now_ms: int = 0


@dataclass(frozen=True, slots=True)
class SourcesOpened:
    """The sources have been opened. A stream's watermark is the minimum over its sources.

    Attributes:
        sources: all (stream, source) pairs.
        replayable: names of the sources whose records can be read again.
        max_state_bytes: maximum size of a query's groups, estimated before a batch is applied; None: unbounded.
        columns: the types of the streams' columns, with which the next records of the journal were read.
    """

    sources: tuple[tuple[str, str], ...]
    replayable: tuple[str, ...] = ()
    max_state_bytes: int | None = None
    columns: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ingested:
    """A batch has been decoded: the stream's columns and `event_time_ms` (int64, no nulls).

    Attributes:
        rejected: the records of the same input that the source rejected, or counted or left out on a guess.
    """

    stream: str
    source: str
    batch: pa.RecordBatch
    arrival_ms: int
    rejected: tuple[RejectedRecords, ...] = ()


@dataclass(frozen=True, slots=True)
class BackfillIngested:
    """A source has read a batch again for one query. The batch was delivered before the query was registered."""

    query: QueryRef
    source: str
    batch: pa.RecordBatch
    arrival_ms: int
    rejected: tuple[RejectedRecords, ...] = ()


@dataclass(frozen=True, slots=True)
class BackfillEnded:
    """The backfill of a query has read all records of a source that can still be read."""

    query: QueryRef
    source: str


@dataclass(frozen=True, slots=True)
class MemoryLimited:
    """The core applies a `MemoryAction` to the open slices of a query."""

    query: QueryRef
    action: MemoryAction


@dataclass(frozen=True, slots=True)
class SourceEnded:
    """A source has ended: it delivers no more records."""

    stream: str
    source: str


@dataclass(frozen=True, slots=True)
class InputLost:
    """Input of a source is lost, or its loss cannot be excluded.

    Attributes:
        reason: a `LossReason`.
        at_ms: wall time at which the loss was noticed; the lost records arrived before.
        from_ms, to_ms: event times of the lost records, [from_ms, to_ms). None: unknown. If the stream has a clock,
            `at_ms` and the stream's newest record then bound `to_ms`.
        records: number of lost records; None: unknown.
        was_ingested: the journal had an `Ingested` of these records, and recovery cannot repeat it.
    """

    stream: str
    source: str
    reason: str
    at_ms: int
    from_ms: int | None = None
    to_ms: int | None = None
    records: int | None = None
    was_ingested: bool = False


@dataclass(frozen=True, slots=True)
class TickEvent:
    """Time has passed. Due at `EdgeCore.next_deadline`; harmless at any other time.

    Attributes:
        unread: names of the sources that could not be read until now. Their silence does not mean that they are idle.
        empty_ms: by source, the wall time at which the last read of it returned nothing; absent: `now_ms`.
    """

    now_ms: int
    unread: tuple[str, ...] = ()
    empty_ms: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PullEvent:
    """The link has room for about `capacity_bytes`: the core builds the most urgent frame, or frames.

    Attributes:
        capacity_bytes: bytes of frame bodies before compression. The shell computes this number, and
            `bandwidth_bytes_s`, from the session's compression ratio, which the core does not have.
        times_ms: event time now, by stream with a clock. Entries of open slices may then be sent before they close.
        bandwidth_bytes_s: the measured bandwidth, in bytes before compression; 0: unknown. Under staleness budgets it
            determines how many sends remain.
        path_delay_ms: wall time from sending a frame to its arrival at the center.
        processing_ms: per query, the wall time from the arrival of a frame at the center until its values are in an
            answer; 0 for an absent query. The edge's own deadline is the staleness budget less both delays.
        unread: the streams that may have unread input.
        max_frames: with more than 1, frames of other queries with closed slices follow, as long as the link has room.
        mid_bytes_s: the median of the link's bandwidth, in the same bytes. `bandwidth_bytes_s` and `path_delay_ms` are
            then what the link carries with 90 %, which counts for frames that are sent. The median says whether entries
            may wait. 0: the bandwidth is certain.
        now_ms: wall time, for byte budgets.
    """

    capacity_bytes: int
    times_ms: Mapping[str, int] = field(default_factory=dict)
    bandwidth_bytes_s: float = 0.0
    path_delay_ms: int = 0
    unread: tuple[str, ...] = ()
    max_frames: int = 1
    processing_ms: Mapping[QueryRef, int] = field(default_factory=dict)
    mid_bytes_s: float = 0.0
    now_ms: int = 0


@dataclass(frozen=True, slots=True)
class PullReplayed:
    """A `PullEvent` has been read from the journal, with its frames, which the core applies again
    (`edge.core.frame_state`).

    Attributes:
        built: the frames of the pull, each of another query.
    """

    pull: PullEvent
    built: tuple[FrameBuilt, ...]


@dataclass(frozen=True, slots=True)
class Acked:
    """The center has acknowledged all frames up to and including `through`."""

    through: int


@dataclass(frozen=True, slots=True)
class BudgetSet:
    """This edge's shares of a query's error budget have been set.

    Attributes:
        shares: per measure, in its unit.
        version: an update that is not newer than the last one is ignored; 0: unversioned, applies to all slices.
        from_ms: event time of the first slice to which the shares apply.
    """

    query: QueryRef
    shares: Mapping[str, float]
    version: int = 0
    from_ms: int = -MAX_TIME_MS


@dataclass(frozen=True, slots=True)
class SamplingSet:
    """The sampling rate of a query with an accuracy has been set.

    Attributes:
        rate: probability with which a record is processed.
        clock_offset_ms: wall time, this edge's clock less the center's.
        reason: why the rate is below 1.
        expected_records: as in `SamplingSettings`.
    """

    query: QueryRef
    rate: float
    clock_offset_ms: float = 0.0
    reason: SamplingReason = SamplingReason.NONE
    expected_records: int = 0


Event = (
    Configured
    | SourcesOpened
    | Ingested
    | BackfillIngested
    | BackfillEnded
    | SourceEnded
    | InputLost
    | TickEvent
    | PullEvent
    | PullReplayed
    | Acked
    | BudgetSet
    | SamplingSet
    | MemoryLimited
)


@dataclass(frozen=True, slots=True)
class FrameBuilt:
    """A frame has been built; it has to be made durable, then sent.

    Attributes:
        closed: the starts of the slices that the frame closes.
        counts_only: whether its report of arrivals leaves out the statistics of groups; None: a journal of 0.3.0 does
            not say it.
    """

    frame: Frame
    closed: tuple[int, ...] = ()
    counts_only: bool | None = False


@dataclass(frozen=True, slots=True)
class FrameDiverged:
    """In a replay, the state gives a frame another body than the recorded frame has."""

    seq: int


@dataclass(frozen=True, slots=True)
class SamplesEnded:
    """A pull has ended the samples of windows. It is journaled even if it built no frame, so that a replay ends them at
    the same time.
    """


@dataclass(frozen=True, slots=True)
class Dropped:
    """Records were deliberately not counted in a query."""

    query: QueryRef
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class FunctionFailed:
    """Calls of a user-defined function in a query's expressions failed; their value is null.

    Attributes:
        reason: a stable label of the kind of failure.
        detail: the message of the first failed call.
        calls: number of failed calls.
    """

    query: QueryRef
    function: str
    reason: str
    detail: str
    calls: int


@dataclass(frozen=True, slots=True)
class QueryAccepted:
    query: QueryRef


@dataclass(frozen=True, slots=True)
class QueryRefused:
    """A query does not match this edge's streams; the other queries are not affected."""

    query: QueryRef
    code: str
    message: str


Effect = FrameBuilt | FrameDiverged | SamplesEnded | Dropped | FunctionFailed | QueryAccepted | QueryRefused
