"""`Losses` finds the records that are known to be missing in a query's windows. The other functions compute losses for
the state.

A window lacks records of an edge if the edge has not closed the window, has a gap in it, has lost input or its state,
or has left. A span is the event time [from, to), in ms, that an edge must have closed for a window to have all its
records.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from center.ledger.events import FrameSummary
from center.ledger.state import QueryState
from edgewater.answers import UNKNOWN, Amount, Cause, Deviation
from edgewater.base.streams import LIVE, MAX_TIME_MS, MIN_TIME_MS, Delivery, EdgeId, StreamClock
from edgewater.model.edge_records import EdgeRecord
from edgewater.model.windows import SlicedWindow
from edgewater.wire import DroppedRecords, InputLoss, LossReason

LEAVING_MS = 10_000  # limit: how long answers wait for a retired edge
"""Wall time after the last heartbeat of a retired edge. After this time, the edge has received its retirement and
accepts no more records."""
MAX_AHEAD_MS = 60_000
"""The longest wall time by which an edge's clock may be ahead of the center's clock."""
MAX_LOSS_TEXT = 500
"""The most characters of a loss's source and reason. The texts are limited because the answer to every window that may
lack records repeats them."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Losses:
    """The records that the edges of a query lack, according to the query's state."""

    state: QueryState

    def missing_edges(self, span: Span, stated_by: Collection[str]) -> tuple[EdgeId, ...]:
        """Returns the expected edges whose records are missing in a window.

        Such an edge has not closed the window, or does not have the records itself.

        Args:
            stated_by: edges that state what they have not sent of the window (`ReportedSlices.stated_by`).
        """
        through, end = self.state.through_ms, span[1]
        return tuple(
            edge
            for edge in self.state.expected
            if (through.get(edge, MIN_TIME_MS) < end and edge not in stated_by) or self._edge_lacks_records(edge, span)
        )

    def concern(self, span: Span) -> bool:
        """Returns whether a window cannot become complete because an expected edge does not have all its records."""
        state = self.state
        if not state.gaps and not state.losses and not state.lost_states:
            return False
        return any(self._edge_lacks_records(edge, span) for edge in state.expected)

    def deviations(self, span: Span, missing: Sequence[EdgeId]) -> tuple[Deviation, ...]:
        """Returns what a window lacks because of its edges, by cause and edge.

        An edge has left if it left after the window had begun and before it had closed it with all its records. An edge
        has lost its state if it lost it after the window had begun and before the window was final.

        Args:
            missing: see `missing_edges`.
        """
        state = self.state
        edges, through, constants = self._contributors(span), state.through_ms, state.constants
        left = [
            edge
            for edge in edges[len(state.expected) :]
            if through.get(edge, MIN_TIME_MS) < span[1] or self._edge_lacks_records(edge, span)
        ]
        lost = [edge for edge in edges if self._has_lost_state(edge, span)]
        inputs = [(edge, each) for edge in edges for each in state.losses.get(edge, ()) if each.overlaps(*span)]
        return (
            *(Deviation(Cause.MISSING, e, lacks=UNKNOWN, only=constants.get(e, {})) for e in missing),
            *(Deviation(Cause.LEFT, e, lacks=UNKNOWN, only=constants.get(e, {})) for e in left),
            *(Deviation(Cause.LOST_STATE, e, lacks=UNKNOWN, extra=UNKNOWN, only=constants.get(e, {})) for e in lost),
            *(
                Deviation(
                    Cause.INPUT_LOST,
                    edge,
                    loss.source,
                    loss.reason,
                    lacks=Amount(0, loss.records),
                    from_ms=loss.from_ms,
                    to_ms=loss.to_ms,
                    only=constants.get(edge, {}),
                )
                for edge, loss in inputs
            ),
        )

    def doubtful_before(self) -> int:
        """Returns an event time. Windows that start at or after it lack no records of an edge that has closed them."""
        state = self.state
        ends = [MIN_TIME_MS, *(end for edge, (_, end) in state.gaps.items() if edge in state.expected)]
        for losses in state.losses.values():  # an edge that is no longer expected may state a loss of its last records
            ends += [MAX_TIME_MS if loss.to_ms is None else loss.to_ms for loss in losses]
        ends += [until + 1 for edge, (_, until) in state.lost_states.items() if edge in state.expected]
        ends += [until + 1 for edge, until in state.left.items() if edge not in state.expected]
        return max(ends)

    def deliveries(self, span: Span) -> Mapping[str, tuple[Delivery, ...]]:
        """Returns the deliveries of the edges that do not count each record of a window exactly once."""
        known = self.state.deliveries
        edges = frozenset(self._contributors(span)) if known else frozenset[EdgeId]()
        return {edge: each for edge, each in known.items() if edge in edges}

    def _contributors(self, span: Span) -> tuple[EdgeId, ...]:
        """Returns the edges that may have records of a window: the expected ones, then those that left later."""
        state = self.state
        if not state.left:
            return state.expected
        expected, begin = frozenset(state.expected), span[0]
        left = (EdgeId(e) for e, until in sorted(state.left.items()) if begin <= until and e not in expected)
        return (*state.expected, *left)

    def _edge_lacks_records(self, edge: EdgeId, span: Span) -> bool:
        """Returns whether the edge has a gap in the span, may have lost input of the span, or has lost its state."""
        begin, end = span
        gap_from, gap_to = self.state.gaps.get(edge, (MIN_TIME_MS, MIN_TIME_MS))
        has_lost_input = any(loss.overlaps(begin, end) for loss in self.state.losses.get(edge, ()))
        return has_lost_input or max(begin, gap_from) < min(end, gap_to) or self._has_lost_state(edge, span)

    def _has_lost_state(self, edge: EdgeId, span: Span) -> bool:
        _, until = self.state.lost_states.get(edge, (0, MIN_TIME_MS - 1))
        return span[0] <= until


def bounded_loss(loss: InputLoss, frame: FrameSummary, clock: StreamClock) -> InputLoss:
    """Returns a loss of a frame with shortened texts. If the frame is damaged, the loss also gets an end.

    A damaged frame has no records that are newer than the frame, except for records ahead of the clock.
    """
    loss = replace(loss, source=loss.source[:MAX_LOSS_TEXT], reason=loss.reason[:MAX_LOSS_TEXT])
    if loss.reason != LossReason.FRAME_DAMAGED:
        return loss
    return replace(loss, to_ms=clock.to_event_ms(frame.received_at_ms + MAX_AHEAD_MS))


def loss_of_uncertain(records: DroppedRecords, window: SlicedWindow) -> InputLoss:
    """Returns rejected or guessed records as a loss of input, from which the windows of the records follow."""
    start_ms = records.slice_start_ms
    until_ms = window.slice_end(start_ms) if records.until_ms is None else records.until_ms
    from_ms = None if start_ms == MIN_TIME_MS else start_ms
    return InputLoss("", records.reason.label, from_ms, None if until_ms == MAX_TIME_MS else until_ms)


def edges_leaving(state: QueryState, edges: Sequence[EdgeRecord], expected: Collection[EdgeId]) -> dict[str, int]:
    """Returns the edges that are no longer expected. The value is an event time up to which the edge may have accepted
    records.

    Args:
        expected: the edges that are expected from now on.
    """
    clock = state.running_clock
    before = frozenset(state.expected)
    gone = (e for e in edges if e.edge in before and e.edge not in expected)
    return {e.edge: clock.to_event_ms(_by_own_clock(e, e.seen_before_ms + LEAVING_MS)) for e in gone}


def lost_states(
    state: QueryState, edges: Sequence[EdgeRecord], clock: StreamClock | None
) -> Mapping[str, tuple[int, int]]:
    """Returns `QueryState.lost_states` with the losses in the list of edges added.

    Args:
        clock: the stream's clock from now on. A replay starts again with a new state, so the event time on the previous
            clock counts, too.
    """
    lost = dict(state.lost_states)
    clocks = [c for c in (state.clock, clock) if c is not None] or [LIVE]
    for edge in edges:
        at_ms = edge.state_lost_at_ms
        is_news = at_ms is not None and at_ms != lost.get(edge.edge, (None, 0))[0]
        if at_ms is not None and is_news and edge.stream(state.query.spec.stream):
            until = max(c.to_event_ms(_by_own_clock(edge, at_ms)) for c in clocks)
            lost[edge.edge] = at_ms, max(until, lost.get(edge.edge, (0, MIN_TIME_MS))[1])
    return lost


def _by_own_clock(edge: EdgeRecord, wall_ms: int) -> int:
    """Converts a wall time of the center to the edge's clock, if the edge's clock is ahead."""
    return wall_ms + max(0, round(edge.clock_offset_ms))
