"""What the ledger is told, and what it decides. Times: `…_ms` of windows and `through_ms` are event
time; `now_ms`, `given_at_ms` and `received_at_ms` are wall time. All int64 ms since the epoch, UTC."""

from __future__ import annotations

from dataclasses import dataclass

from center.catalog.store import EdgeRecord, RegisteredQuery
from center.ledger.quality import Phase, Quality
from edgewater.streams import EdgeId
from edgewater.wire.frames import Arrivals, QueryRef, SliceClose


@dataclass(frozen=True, slots=True)
class FrameFact:
    """What a frame says, without the synopses it carries.

    Attributes:
        touched: the starts of the slices that the frame has partials of.
        incarnation: the edge's; counters of closes are totals per incarnation.
        since_ms: event time from which on the edge has all records of the query; None: it has all.
        arrivals: of a query with an accuracy, where the frame has any.
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


@dataclass(frozen=True, slots=True)
class Registered:
    """A query that edges may answer from now on. Telling it again changes nothing."""

    query: RegisteredQuery


@dataclass(frozen=True, slots=True)
class Deleted:
    """A query that is gone: its state is dropped, frames of it that still come are passed over."""

    ref: QueryRef


@dataclass(frozen=True, slots=True)
class EdgesChanged:
    """All edges that the catalog knows, retired ones too. What that unblocks, the next Tick answers."""

    edges: tuple[EdgeRecord, ...]


@dataclass(frozen=True, slots=True)
class Reported:
    """Frames that have been merged: a micro-batch, of any number of queries."""

    facts: tuple[FrameFact, ...]
    now_ms: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has come to `now_ms`."""

    now_ms: int


LedgerEvent = Registered | Deleted | EdgesChanged | Reported | Tick


@dataclass(frozen=True, slots=True)
class Emission:
    """The decision to answer a window now: all that an `AnswerRecord` stores but the data.

    Attributes:
        slices_from_ms, slices_to_ms: the data are the merge of the slices that start in [from, to).
    """

    query: QueryRef
    window_start_ms: int
    window_end_ms: int
    revision: int
    phase: Phase
    given_at_ms: int
    quality: Quality
    slices_from_ms: int
    slices_to_ms: int
