"""Why a query has no answer yet, or no newer one: which edges it waits for, since when, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from center.api.edge_progress import edge_state
from center.api.time_params import time_text
from center.catalog import SetAsideRecord
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS, EdgeId
from edgewater.base.timestamps import rfc3339
from edgewater.model.edge_records import EdgeRecord, QueryStatusRecord, expected_edges
from edgewater.model.query import ErrorBudget
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.replies import EdgeCause, QueryStatus, WaitState
from edgewater.wire import DropReason

NAMED_EDGES = 3  # limit: length of a message
"""A reason names this many edges, and the number of the others."""

REMEDIES: dict[WaitState, str] = {
    "refused": "register the query in another form or for other `edges`, or change or upgrade the edges",
    "no_edges": "start an edge whose configuration has this stream, or correct `from`",
    "no_records": "register the query before the edges read their records or with `since`, or check `where`",
    "merging": "wait: the answers follow within seconds",
    "paused": "the job tries the query again at its next start, or at once: edgewater center quarantine retry NAME. "
    "Its frames are kept. A query under another name gets answers",
    "quarantined": "delete the query, or let an operator retry it: edgewater center quarantine retry NAME",
    "center_not_ready": "see /readyz and the log of the component",
}
EDGE_REMEDIES: dict[EdgeCause, str] = {
    "never_connected": "start the edge, or register the query with other `edges`",
    "retired": "start the edge again, or register the query with other `edges`",
    "unreachable": "start the edge, or mend its link; retire it if it is gone for good",
    "refused": REMEDIES["refused"],
    "no_records": "see /readyz of the edge, and whether its sources have input",
}

REJECTED = "correct the format, the columns or the time of the stream at the edge: `edgewater edge check` says why"
LATE = "raise `disorder` of the stream at the edge, or the query's `lateness`"

SAVES_NOTHING = (
    "the edges withheld nothing of the last window: a limit relative to each group's own value is used up by a group's "
    "first record, so every group is sent once; only what would be sent again can stay behind. A limit as an amount, "
    "such as {error: {bytes: 1MB}}, lets small groups stay behind. `edgewater plan` shows what a budget saves on your "
    "data"
)


@dataclass(frozen=True, slots=True)
class EdgeWait:
    """What a query waits for at an expected edge.

    Attributes:
        text: a sentence without its full stop.
        since_ms: wall time since which it waits; None: unknown.
        lacks: remedies for records that the edge has not counted.
    """

    edge: EdgeId
    cause: EdgeCause
    text: str
    since_ms: int | None = None
    lacks: tuple[str, ...] = ()

    @property
    def holds_back(self) -> bool:
        """Whether windows cannot be complete because of this edge."""
        return self.cause not in ("ended", "open")


def explain(
    query: RegisteredQuery,
    edges: Sequence[EdgeRecord],
    statuses: Mapping[EdgeId, QueryStatusRecord],
    *,
    latest_ms: int | None,
    withheld: bool,
    unmerged: int,
    set_aside: SetAsideRecord | None,
    not_ready: Sequence[str],
    now_ms: int,
) -> QueryStatus:
    """Explains what a query waits for.

    Args:
        latest_ms: start of its last window that has an answer; None: none has.
        withheld: whether edges withheld anything of the last such window.
        unmerged: number of its frames that the job has not merged yet.
        set_aside: state and reason of a query that is set aside; None: it is not set aside.
        not_ready: components that are not ready, with the reason.
    """
    known, answered = {e.edge: e for e in edges}, latest_ms is not None
    expected = expected_edges(query.spec, edges)
    waits = tuple(_at_edge(edge, known.get(edge), statuses.get(edge), query, now_ms) for edge in expected)
    blocking = [w for w in waits if w.holds_back]

    def result(state: WaitState, reason: str, remedy: str = "", since_ms: int | None = None) -> QueryStatus:
        saves_nothing = answered and not withheld and _is_relative(query.spec.error_budget)
        return {
            "query": query.ref.name,
            "version": query.ref.version,
            "state": state,
            "reason": reason,
            "remedy": remedy or REMEDIES.get(state, ""),
            "since": time_text(since_ms),
            "waits_for": [w.edge for w in blocking],
            "edges": [
                {"edge": w.edge, "cause": w.cause, "text": w.text, "since": time_text(w.since_ms)} for w in waits
            ],
            "budget": SAVES_NOTHING if saves_nothing else "",
            "registered_at": rfc3339(query.registered_at_ms),
            "latest_window": time_text(latest_ms),
        }

    if set_aside is not None:
        return result(set_aside.state.value, set_aside.reason, since_ms=set_aside.since_ms)
    if query.ended_at_ms is not None:
        reason = f"the query has ended: all windows that start before {rfc3339(query.windows.until_ms)} are final"
        return result("answered" if answered else "no_records", reason)
    if not_ready:
        return result("center_not_ready", "; ".join(not_ready))
    if not expected:
        served = sorted({s.name for e in edges if not e.retired for s in e.streams})
        hint = f"; the edges serve {', '.join(served)}" if served else "; no edge has connected"
        return result("no_edges", f"no edge serves stream {query.spec.stream}{hint}", since_ms=query.registered_at_ms)
    if blocking and all(w.cause == "refused" for w in waits):
        return result("refused", _joined(blocking), since_ms=query.registered_at_ms)
    if blocking:
        remedies = dict.fromkeys(remedy for w in blocking for remedy in _remedies(w))
        since = [w.since_ms for w in blocking if w.since_ms is not None]
        state: WaitState = "answered" if answered else "waiting"
        return result(state, _joined(blocking), "; ".join(remedies), min(since, default=None))
    if unmerged and not answered:
        return result("merging", f"{unmerged} frames wait for the job")
    return result(*_unblocked(query, waits, answered))


def _unblocked(
    query: RegisteredQuery, waits: Sequence[EdgeWait], answered: bool
) -> tuple[WaitState, str, str, int | None]:
    """Returns state, reason, remedy and time of a query that no edge holds back."""
    ended, lacks = all(w.cause == "ended" for w in waits), dict.fromkeys(x for w in waits for x in w.lacks)
    if answered:
        return "answered", "every expected edge has ended the stream" if ended else "", "", None
    if ended:
        reason = (
            "the stream has ended at every expected edge, and no record that was read since the query was registered"
        )
        remedy = "; ".join([*lacks, REMEDIES["no_records"]])
        return "no_records", f"{reason} counts in it: {_joined(waits)}", remedy, query.registered_at_ms
    begins = "" if query.windows.from_ms == MIN_TIME_MS else f"its windows begin at {rfc3339(query.windows.from_ms)}; "
    reason = f"{begins}no window has been closed by every expected edge: {_joined(waits)}"
    return "waiting", reason, "; ".join(lacks), None


def _remedies(wait: EdgeWait) -> Iterator[str]:
    yield from wait.lacks
    # An edge whose sources reject everything has input.
    if wait.cause in EDGE_REMEDIES and not (wait.cause == "no_records" and wait.lacks):
        yield EDGE_REMEDIES[wait.cause]


def _not_counted(record: EdgeRecord, stream: str) -> tuple[str, tuple[str, ...]]:
    """Returns what an edge has not counted of its records, as the end of a sentence, and the remedies."""
    rejected = sum(n for _, _, n in record.rejected.get(stream, ()))
    late = sum(record.drops.get(reason.label, 0) for reason in (DropReason.TOO_LATE, DropReason.OUT_OF_ORDER))
    text = ""
    if rejected:
        reasons = ", ".join(sorted({reason for _, reason, _ in record.rejected[stream]}))
        text += f"; its sources rejected {rejected} records of {stream} ({reasons})"
    if late:
        text += f"; {late} records came too late"
    return text, tuple(remedy for remedy, n in ((REJECTED, rejected), (LATE, late)) if n)


def _is_relative(budget: ErrorBudget | None) -> bool:
    return budget is not None and bool(budget.relative) and not budget.limits


def _at_edge(
    edge: EdgeId, record: EdgeRecord | None, status: QueryStatusRecord | None, query: RegisteredQuery, now_ms: int
) -> EdgeWait:
    stream = query.spec.stream
    if record is None:
        return EdgeWait(edge, "never_connected", f"{edge} has never connected", query.registered_at_ms)
    if status is not None and not status.accepted and not record.retired:
        return EdgeWait(edge, "refused", f"{edge} refuses the query: {status.message}", query.registered_at_ms)
    state = edge_state(record, now_ms)
    watermark_ms, records = record.watermarks.get(stream), record.records.get(stream, 0)
    lost, lacks = _not_counted(record, stream)
    if watermark_ms is not None and watermark_ms >= MAX_TIME_MS and status is not None:
        text = f"{edge} has read {records} records of {stream} to the end{lost}"
        return EdgeWait(edge, "ended", text, lacks=lacks)
    if state == "retired":
        return EdgeWait(edge, "retired", f"{edge} is retired", record.last_seen_ms)
    if state == "unreachable":
        text = f"{edge} has been unreachable since {rfc3339(record.last_seen_ms)}"
        return EdgeWait(edge, "unreachable", text, record.last_seen_ms)
    if status is None:
        return EdgeWait(edge, "unconfirmed", f"{edge} has not confirmed the query yet", query.registered_at_ms)
    if watermark_ms is None:
        text = f"{edge} has read no {'valid ' if lost else ''}record of {stream}{lost}"
        return EdgeWait(edge, "no_records", text, record.first_seen_ms, lacks)
    text = f"{edge} has read {records} records of {stream} and expects more from {rfc3339(watermark_ms)} on{lost}"
    return EdgeWait(edge, "open", text, lacks=lacks)


def _joined(waits: Sequence[EdgeWait]) -> str:
    shown = [w.text for w in waits[:NAMED_EDGES]]
    if len(waits) > NAMED_EDGES:
        shown.append(f"and {len(waits) - NAMED_EDGES} more edges, see `edges`")
    return "; ".join(shown)
