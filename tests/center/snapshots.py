"""The whole state of a query in a ledger, as a store has it."""

from __future__ import annotations

from center.ledger import Ledger
from center.ledger.stored_state import StoredEdges, pack_state
from edgewater.wire import QueryRef


def snapshot(ledger: Ledger, ref: QueryRef) -> bytes:
    """Returns the state in the form of `pack_state`."""
    book = ledger.book(ref)
    stored = StoredEdges(book.stored._members)
    rows = stored.rows(book.state)
    for start, value in sorted(book.slices.open.items()):
        rows += stored.slice_rows(start, None, value)
    for kind, table in book._tables():
        rows += [(kind, start, value.to_state()) for start, value in sorted(table.items())]
    return pack_state(stored.state_json(book.state), ((kind, start, text) for kind, start, text in rows if text))
