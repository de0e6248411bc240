"""Computes from the catalog's list of edges the edges for which a query's windows wait, and the clock of the stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from center.ledger.losses import edges_leaving, lost_states
from center.ledger.state import QueryState
from edgewater.answers import Constants
from edgewater.base.streams import EdgeId, StreamClock
from edgewater.model.edge_records import EdgeRecord, expected_edges

FirstDueWindow = Callable[[StreamClock | None, int], int | None]
"""A function that returns the start of the first window that becomes due without data, or None if there is no such
window. Its arguments are the stream's clock, and the wall time at which an edge first served the stream."""


def with_edges(state: QueryState, edges: Sequence[EdgeRecord], first_due_window: FirstDueWindow) -> QueryState:
    """Returns a query's state after a change of the catalog's list of edges. If nothing changes, returns the same
    object.

    Args:
        edges: all edges, including retired edges.
    """
    spec = state.query.spec
    retired = {e.edge for e in edges if e.retired}
    expected = {e for e in expected_edges(spec, edges) if e not in retired}
    if spec.edges is None:
        # An edge that has reported, but is newer than the list, is expected, too.
        listed = {e.edge for e in edges}
        expected.update(EdgeId(e) for e in state.through_ms if e not in listed)
    serving = [e for e in sorted(edges, key=lambda e: e.edge) if not e.retired and e.stream(spec.stream)]
    clock = _choose_clock(state, serving)
    due_from_ms = state.due_from_ms
    if serving and clock != state.clock:
        due_from_ms = first_due_window(clock, min(e.first_seen_ms for e in serving))
    deliveries = dict(state.deliveries)
    deliveries.update((e.edge, served.deliveries) for e in serving if (served := e.stream(spec.stream)))
    left = {**state.left, **edges_leaving(state, edges, expected)}
    changed = replace(
        state,
        expected=tuple(sorted(expected)),
        retired=tuple(sorted(e.edge for e in edges if e.retired and e.stream(spec.stream))),
        clock=clock,
        due_from_ms=due_from_ms,
        lost_states=lost_states(state, edges, clock),
        left=left,
        deliveries={edge: each for edge, each in deliveries.items() if each and (edge in expected or edge in left)},
        constants=_constants(state, (e for e in edges if e.edge in expected or e.edge in left)),
    )
    return state if changed == state else changed


def _choose_clock(state: QueryState, serving: Sequence[EdgeRecord]) -> StreamClock | None:
    """Returns the stream's clock. The clock does not change while an edge has it, so a new edge does not move
    deadlines.
    """
    clocks = [s.clock for e in serving if (s := e.stream(state.query.spec.stream)) is not None]
    if not clocks or state.clock in clocks:
        return state.clock
    return clocks[0]


def _constants(state: QueryState, edges: Iterable[EdgeRecord]) -> Mapping[str, Constants]:
    """Returns, by edge, the columns of `group_by` that have one value in all records of the edge."""
    spec = state.query.spec
    result: dict[str, Constants] = {}
    for edge in edges:
        stream = edge.stream(spec.stream)
        named = {n: v for n, v in stream.constants.items() if n in spec.plain_keys} if stream else {}
        if named:
            result[edge.edge] = named
    return state.constants if result == state.constants else result
