"""Decides when each window of a query is answered, and states the facts of the answer.

The ledger is a state machine without I/O and without a clock. It decides from the reports of edges and from the time.
`center.job` sends events to it through `center.results`, which stores its state.
"""

from center.ledger.events import (
    FRAMES,
    ClockStepped,
    EdgesChanged,
    Emission,
    FramesMerged,
    FrameSummary,
    LedgerEvent,
    QueryDeleted,
    QueryFailed,
    QueryRegistered,
    QueryTooLarge,
    SlicesRefused,
    TimeAdvanced,
    state_refusal,
)
from center.ledger.ledger import AT_ONCE_MS, Ledger, LedgerTransaction
from center.ledger.stored_state import QueryChanges, pack_state
