"""What goes into `EdgeCore` (events) and what comes out (effects).

Every event carries the time it happened at; the core itself never asks for it. Events are what the
journal records, so a new field needs a default and a new event a new journal kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from edgewater.query import QuerySpec
from edgewater.streams import MAX_TIME_MS
from edgewater.wire.frames import Frame, QueryRef, SamplingReason


@dataclass(frozen=True, slots=True)
class Configured:
    """The complete set of queries to answer; queries not in it end."""

    queries: tuple[tuple[QueryRef, QuerySpec], ...]


@dataclass(frozen=True, slots=True)
class SourcesOpened:
    """The sources that feed each stream from now on: a stream's watermark waits for all of its own."""

    sources: tuple[tuple[str, str], ...]
    """(stream, source) pairs."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """A decoded batch: the stream's columns and `event_time_ms` (int64, no nulls)."""

    stream: str
    source: str
    batch: pa.RecordBatch
    arrival_ms: int


@dataclass(frozen=True, slots=True)
class SourceEnded:
    """A source has delivered all it ever will."""

    stream: str
    source: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. Called when `next_deadline` says so; harmless at any other time.

    Attributes:
        unread: names of sources that could not be read until now, and so are not known to be quiet.
    """

    now_ms: int
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pull:
    """The link has room for about `capacity_bytes`: build the frame that is worth most now.

    Attributes:
        open_between: per stream, in event time: now, and when what open slices have to send would be drained
            (`EdgeCore.open_between`). Slices still open may be drawn from if they end behind now, so that
            what can leave early is spread over the window instead of queueing at its end.
        bandwidth_bytes_s: what the link carries, as measured; 0: not known. Staleness budgets count the
            sends that are left by it.
        way_ms: wall time from a frame's leaving to its answer's standing at the center: a staleness budget
            less this is the edge's own deadline.
        unread: streams that may have input which this edge has not read.
    """

    capacity_bytes: int
    open_between: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    bandwidth_bytes_s: float = 0.0
    way_ms: int = 0
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pulled:
    """A `Pull` as the journal has it, with its outcome: what left then has left, whatever would be chosen now.

    Which groups leave may hang on the last bit of an exponential, and that on a library or a processor.

    Attributes:
        built: None: nothing left.
    """

    pull: Pull
    built: FrameBuilt | None


@dataclass(frozen=True, slots=True)
class Acked:
    """The center holds every frame up to and including `through`."""

    through: int


@dataclass(frozen=True, slots=True)
class BudgetSet:
    """This edge's shares of a query's error budget, per measure, in the measure's unit.

    Attributes:
        version: a word not newer than the last one is passed over; 0: the center does not count them.
        from_ms: slices that start earlier do not get these shares.
    """

    query: QueryRef
    shares: Mapping[str, float]
    version: int = 0
    from_ms: int = -MAX_TIME_MS


@dataclass(frozen=True, slots=True)
class SamplingSet:
    """How a query with an accuracy is observed from now on.

    Attributes:
        rate: probability with which a record is processed.
        clock_offset_ms: wall time, this edge's clock less the center's.
        reason: why the rate is below 1.
    """

    query: QueryRef
    rate: float
    clock_offset_ms: float = 0.0
    reason: SamplingReason = SamplingReason.NONE


Event = Configured | SourcesOpened | Ingested | SourceEnded | Tick | Pull | Pulled | Acked | BudgetSet | SamplingSet


@dataclass(frozen=True, slots=True)
class FrameBuilt:
    """A frame to be made durable, then shipped.

    Attributes:
        closed: the starts of the slices that are closed by it.
    """

    frame: Frame
    closed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FrameDiverged:
    """The state of a replay gives a frame another body than the one that left."""

    seq: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """Records not counted in a query, on purpose."""

    query: QueryRef
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class FunctionFailed:
    """Calls of a user's function in a query's expressions gave no values: their records have null.

    Attributes:
        reason: one of few words, the same for failures of one kind.
        detail: of the first call.
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
    """A query that does not fit this edge's streams; the others go on."""

    query: QueryRef
    code: str
    message: str


Effect = FrameBuilt | FrameDiverged | Dropped | FunctionFailed | QueryAccepted | QueryRefused
