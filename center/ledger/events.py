"""The ledger's events, and its decisions.

Windows, slices and `through_ms` are event times. `now_ms`, `answered_at_ms` and `received_at_ms` are wall times. All
times are int64 ms since the epoch, UTC.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from center.early import Prediction
from edgewater.answers import Facts, Phase
from edgewater.answers.statement import violations_of_facts
from edgewater.base.streams import MIN_TIME_MS, EdgeId
from edgewater.model.edge_records import EdgeRecord
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.wire import Arrivals, DroppedRecords, InputLoss, LossReason, QueryRef, SliceClose

FRAMES = "frames"
"""The source of losses that the center states itself: frames and partials that it cannot read or merge."""


@dataclass(frozen=True, slots=True)
class FrameSummary:
    """A frame without its synopses.

    Attributes:
        position: number of the frame in its query.
        through_ms: event time up to which the edge has answered the query.
        touched: start times of the slices for which the frame has partials.
        incarnation: incarnation of the edge. The counters of closes are totals per incarnation.
        since_ms: event time from which the edge has all records of the query; None if it has all records.
        arrivals: arrival statistics, for a query with an accuracy; None if the frame has no such statistics.
        losses: input of the edge that is lost or may be lost.
        dropped: records that came too late, that a source rejected, or that the edge counted or left out on a guess.
        late: records that came after the close of their slice, and are counted.
    """

    query: QueryRef
    position: int
    edge: EdgeId
    through_ms: int
    closes: tuple[SliceClose, ...]
    touched: tuple[int, ...]
    wire_bytes: int
    received_at_ms: int
    incarnation: str = ""
    since_ms: int | None = None
    arrivals: Arrivals | None = None
    losses: tuple[InputLoss, ...] = ()
    dropped: tuple[DroppedRecords, ...] = ()
    late: tuple[DroppedRecords, ...] = ()

    def within(self, begin_ms: int, end_ms: int) -> FrameSummary:
        """Returns the frame without slices outside of [begin_ms, end_ms).

        An edge may send such slices before it receives a border.
        """
        dropped, late = (
            tuple(d for d in each if d.slice_start_ms == MIN_TIME_MS or begin_ms <= d.slice_start_ms < end_ms)
            for each in (self.dropped, self.late)
        )
        return replace(
            self,
            touched=tuple(start for start in self.touched if begin_ms <= start < end_ms),
            closes=tuple(c for c in self.closes if begin_ms <= c.slice_start_ms < end_ms),
            dropped=dropped,
            late=late,
        )


def state_refusal(frames: list[FrameSummary], query: QueryRef, slice_start_ms: int, position: int | None) -> None:
    """Adds the loss of a partial that the center refused to the edge's frames.

    Args:
        frames: the frames, which are changed in place.
        position: position of the frame with the partial. If None, the partial was merged from several frames, and the
            loss is added to each frame that has a partial of the slice.
    """
    for i, frame in enumerate(frames):
        concerned = slice_start_ms in frame.touched if position is None else frame.position == position
        if concerned and frame.query == query:
            frames[i] = replace(frame, losses=(*frame.losses, refusal(slice_start_ms)))


def refusal(slice_start_ms: int) -> InputLoss:
    """Returns the loss of a partial of a slice.

    The loss has the time of one moment in the slice. This is enough, because each window contains the whole slice or no
    part of it.
    """
    return InputLoss(FRAMES, LossReason.PARTIAL_REFUSED, slice_start_ms, slice_start_ms + 1)


@dataclass(frozen=True, slots=True)
class QueryRegistered:
    """A query was registered, or a border of its windows was set. The event may be applied again."""

    query: RegisteredQuery


@dataclass(frozen=True, slots=True)
class QueryDeleted:
    """A query was deleted. Its state is dropped, and its remaining frames are ignored."""

    ref: QueryRef


@dataclass(frozen=True, slots=True)
class EdgesChanged:
    """The catalog's full list of edges, including retired edges. If the list completes windows, the next `TimeAdvanced`
    answers these windows.
    """

    edges: tuple[EdgeRecord, ...]


@dataclass(frozen=True, slots=True)
class FramesMerged:
    """The partials of these frames were merged. The frames are one batch, of any number of queries."""

    frames: tuple[FrameSummary, ...]
    now_ms: int


@dataclass(frozen=True, slots=True)
class SlicesRefused:
    """Stored partials of a query could not be merged, and were dropped.

    Attributes:
        slice_starts: the slices that lack the partials.
    """

    query: QueryRef
    slice_starts: tuple[int, ...]


class QueryFailed(Exception):
    """Raised if a query's state, or an answer to the query, raised an exception. Other queries can continue.

    That exception is the `__cause__` of this one.
    """

    def __init__(self, query: QueryRef) -> None:
        super().__init__(f"query {query.name}@{query.version}")
        self.query = query


class QueryTooLarge(QueryFailed):
    """Raised if a query costs the job more than the limit. All other queries would wait for it."""

    def __init__(self, query: QueryRef, reason: str) -> None:
        super().__init__(query)
        self.reason = reason

    def __str__(self) -> str:
        return f"{super().__str__()}: {self.reason}"


@dataclass(frozen=True, slots=True)
class ClockStepped:
    """The wall clock was set forward by `by_ms`, or back if negative. The event is not stored: it matters until the
    process ends or an edge reports the new time.
    """

    by_ms: int


@dataclass(frozen=True, slots=True)
class TimeAdvanced:
    """The wall clock reached `now_ms`."""

    now_ms: int


@dataclass(frozen=True, slots=True)
class LateSlice:
    """Records of one or several slices that are missing in answers to windows over the slices, or may be.

    The windows were final when the records came, a source rejected the records, or an edge guessed.

    Attributes:
        slice_start_ms, slice_end_ms: the slice, or a range of slices. A range means that the event time of rejected
            records could not be read. Each window over the range may then lack the records. `slice_start_ms` is
            `MIN_TIME_MS` if the slice is not known.
        through_ms: the records are missing in the windows over the slice that end at or before this event time.
        reason: ``after-final`` (the center had given the final answer) or a `DroppedRecords.kind`.
    """

    edge: EdgeId
    slice_start_ms: int
    slice_end_ms: int
    through_ms: int
    reason: str


LedgerEvent = QueryRegistered | QueryDeleted | EdgesChanged | FramesMerged | SlicesRefused | ClockStepped | TimeAdvanced


@dataclass(frozen=True, slots=True)
class Emission:
    """The decision to answer a window now: an `AnswerRecord` without its data.

    Attributes:
        slices_from_ms, slices_to_ms: the data are the merge of the slices that start in [from, to).
        spec: the spec of the query.
        prediction: the estimate from which `facts.predicted` comes, for simulators; None: there is none.
    """

    query: QueryRef
    window_start_ms: int
    window_end_ms: int
    revision: int
    phase: Phase
    answered_at_ms: int
    facts: Facts
    slices_from_ms: int
    slices_to_ms: int
    spec: QuerySpec
    prediction: Prediction | None = None

    def codes(self) -> list[str]:
        """Returns the codes of the violations that follow from the facts, without the values of the answer."""
        return [violation.code for violation in violations_of_facts(self.facts, self.spec)]
