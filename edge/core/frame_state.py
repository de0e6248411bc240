"""`FrameState`: how a frame changes the state of its query, live and in a replay.

A `Shipper` decides what a frame has, and `FrameState.apply` changes the state by this `Decision`. No other code changes
the state of a query because of a frame. A replay reads the decision from the recorded frame (`FrameState.read`), and
never decides: policies rank by exponentials, logarithms and sums, whose last bit may depend on the library or the
processor. `apply` reads nothing that policies have written, so the state after a replay is the state before the crash,
whatever the policies remember.

`apply` returns the body that this state gives the frame. Live, it is the frame. In a replay it is compared with the
recorded frame, so that a changed file or function is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

from edge.cache.entries import Shipment, SliceEntries
from edge.core.arrival_reports import ArrivalMonitor, ArrivalReport
from edge.core.drift import estimate_drift
from edge.core.dropped import as_recorded
from edge.core.events import FrameBuilt
from edge.core.policies import PullConditions
from edge.core.slice_store import SliceStore
from edgewater.base.streams import MIN_TIME_MS
from edgewater.model.windows import SessionWindow
from edgewater.synopses import GroupedAggregate, IntArray
from edgewater.wire import Arrivals, FrameBody, Partial, SliceClose

Encode = Callable[[GroupedAggregate], bytes]
"""Serialises a partial."""


class CloseKind(Enum):
    """Why a frame has a `SliceClose`."""

    LAST = auto()
    """The slice has been sent completely."""
    PROVISIONAL = auto()
    """The slice has ended, and the edge goes on sending values of it."""
    OPEN = auto()
    """A slice of session windows has records in the frame, so its extent is stated."""


@dataclass(frozen=True, slots=True)
class Send:
    """The groups of a slice in a frame.

    Attributes:
        shipment: what changes the state; in a replay, with the recorded values.
        partial: the values of this state.
    """

    shipment: Shipment
    partial: Partial


@dataclass(frozen=True, slots=True)
class Decision:
    """What a frame of a query has. The rest of its body follows from the state.

    Attributes:
        through_ms: as in `FrameBody`.
        watermark_ms: the watermark that the query sees.
        sends: at most one of each slice.
        closes: the starts of slices in the order of their closes.
        report: the report of arrivals.
        recorded: in a replay, the recorded frame. What it states has been sent, even if this state lacks its input.
    """

    through_ms: int
    watermark_ms: int
    sends: tuple[Send, ...] = ()
    closes: tuple[tuple[int, CloseKind], ...] = ()
    report: ArrivalReport | None = None
    recorded: FrameBody | None = None

    @property
    def closed(self) -> tuple[int, ...]:
        """The starts of the slices that are now sent completely."""
        return tuple(start for start, kind in self.closes if kind is CloseKind.LAST)


class FrameState:
    """Changes the state of one query by its frames.

    Args:
        monitor: the arrival statistics of a query with early answers; None: it has none.
        encode: serialises a partial. The simulator replaces it where bytes are not measured.

    Attributes:
        drift: per measure, the sum of `estimate_drift` since this process began.
    """

    def __init__(self, store: SliceStore, monitor: ArrivalMonitor | None, encode: Encode) -> None:
        self._store, self._monitor, self._encode = store, monitor, encode
        self._spec = store.spec
        self.has_session_windows = isinstance(self._spec.window, SessionWindow)
        self.drift: dict[str, float] = {}

    def send(self, start: int, groups: IntArray, recorded: GroupedAggregate | None = None) -> Send:
        """Returns the pending values of these groups for a frame. It changes nothing.

        Args:
            recorded: in a replay, the values that were sent, in the order of the groups.
        """
        entries = self._store.slices[start].entries
        quanta = self._store.policy.quanta(self._store.slice_shares(start), entries.pending.measures)
        shipment = entries.shipment(groups, quanta)
        partial = Partial(start, self._encode(shipment.values))
        return Send(shipment if recorded is None else replace(shipment, values=recorded), partial)

    def read(self, built: FrameBuilt, at: PullConditions) -> Decision:
        """Returns the decision that a recorded frame shows. Called in a replay.

        Groups are looked up by key, because they are numbered differently if a source's records have changed. Groups
        that this state lacks are added. Slices that it lacks are left out, because their input is lost.

        Args:
            at: the conditions of the pull.
        """
        body = built.frame.unpack()
        slices, sends, closes = self._store.slices, list[Send](), list[tuple[int, CloseKind]]()
        for partial in (p for p in body.partials if p.slice_start_ms in slices):
            values = GroupedAggregate.from_bytes(partial.synopsis)
            groups = slices[partial.slice_start_ms].entries.codes(values.rows(), len(values))
            sends.append(self.send(partial.slice_start_ms, groups, values))
        for close in (c for c in body.closes if c.slice_start_ms in slices):
            is_last = close.slice_start_ms in built.closed
            kind = CloseKind.PROVISIONAL if close.provisional else CloseKind.LAST if is_last else CloseKind.OPEN
            closes.append((close.slice_start_ms, kind))
        report = self._report_again(body.arrivals, built.counts_only, at)
        return Decision(body.through_ms, at.watermark_ms, tuple(sends), tuple(closes), report, body)

    def _report_again(
        self, recorded: Arrivals | None, counts_only: bool | None, at: PullConditions
    ) -> ArrivalReport | None:
        """Returns the report that this state gives a recorded frame."""
        monitor = self._monitor
        if monitor is None or recorded is None or at.now_ms == MIN_TIME_MS:
            return None
        if counts_only is None:
            counts_only = monitor.choose_detail(at.link.likely_bytes_per_ms)
        now_ms, count = at.now_ms - monitor.sampling.clock_offset_ms, monitor.count(recorded)
        return monitor.report(now_ms, 0, counts_only=counts_only, unread=recorded.unread, count=count)

    def apply(self, decision: Decision) -> FrameBody:
        """Changes the state by a frame; returns the body of the frame."""
        store, monitor, recorded = self._store, self._monitor, decision.recorded
        if decision.report is not None and monitor is not None:
            monitor.apply(decision.report)
        changed = {*(s.partial.slice_start_ms for s in decision.sends), *(start for start, _ in decision.closes)}
        for start in changed:
            store.slices[start].forget_unchanged(store.limits(start))
        for send in decision.sends:
            self._remove(send)
        closes = tuple(self._close(start, kind) for start, kind in decision.closes)
        store.sent(changed, decision.closed)
        for close in recorded.closes if recorded is not None else ():
            store.restore_counters(close)
        through_ms = max(decision.through_ms, store.through_ms)
        stated = store.losses.unsent if recorded is None else recorded.losses
        losses = store.losses.take(store.through_ms, through_ms, stated, monitored=monitor is not None)
        store.through_ms = through_ms
        store.drop_final(decision.watermark_ms)
        since = None if store.since_ms == MIN_TIME_MS else store.since_ms
        partials = tuple(send.partial for send in decision.sends)
        arrivals = decision.report.arrivals if decision.report is not None else None
        dropped, late = store.losses.drops.take()
        if recorded is not None:
            dropped, late = as_recorded(dropped, late, recorded)
        return FrameBody(through_ms, partials, closes, since, arrivals, losses, dropped, late)

    def _remove(self, send: Send) -> None:
        start, groups = send.partial.slice_start_ms, send.shipment.groups
        slice_ = self._store.slices[start]
        self._record_drift(start, slice_.entries, groups)
        slice_.discount_pending(self._store.limits(start), groups)
        slice_.entries.send(send.shipment)

    def _close(self, start: int, kind: CloseKind) -> SliceClose:
        """Returns the report of a slice after its sends."""
        store, slice_ = self._store, self._store.slices[start]
        first_ms, last_ms = (slice_.first_ms, slice_.last_ms) if self.has_session_windows else (None, None)
        withheld = store.policy.withheld(slice_.entries)
        is_provisional = kind is CloseKind.PROVISIONAL
        report = SliceClose(start, slice_.observed, slice_.late, withheld, first_ms, last_ms, is_provisional)
        slice_.is_stated |= is_provisional
        if kind is CloseKind.LAST:
            self._record_drift(start, slice_.entries)
        return report

    def _record_drift(self, start: int, entries: SliceEntries, groups: IntArray | None = None) -> None:
        """Adds the drift of groups that are sent, or (None) of all groups that a closed slice withholds."""
        for measure, share in self._store.slice_shares(start).items():
            error = entries.accumulated_error(measure, groups)
            amount = estimate_drift(error if groups is not None else error[entries.has_pending], share)
            self.drift[measure] = self.drift.get(measure, 0.0) + amount
