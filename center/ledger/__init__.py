"""Decides when each window of a query is answered, and states the quality of the answer.

The ledger is a state machine without I/O and without a clock. It decides from the reports of edges and from the time.
`center.job` sends events to it through `center.results`, which stores its state.
"""

from center.ledger.accuracy_quality import ALL_RECORDS_NEEDED
from center.ledger.events import (
    FRAMES,
    ClockStepped,
    EdgesChanged,
    Emission,
    FramesMerged,
    FrameSummary,
    LateSlice,
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
from center.ledger.quality import LATE_COUNTS, Phase, Quality, late_counts, united_late_counts, with_late_records
from center.ledger.stored_state import QueryChanges, pack_state
from center.ledger.violations import ACCURACY, STALENESS, WITHHELD, Violation, with_violations
from center.ledger.withheld import WithheldBound

__all__ = [
    "ACCURACY",
    "ALL_RECORDS_NEEDED",
    "AT_ONCE_MS",
    "FRAMES",
    "LATE_COUNTS",
    "STALENESS",
    "WITHHELD",
    "ClockStepped",
    "EdgesChanged",
    "Emission",
    "FrameSummary",
    "FramesMerged",
    "LateSlice",
    "Ledger",
    "LedgerEvent",
    "LedgerTransaction",
    "Phase",
    "Quality",
    "QueryChanges",
    "QueryDeleted",
    "QueryFailed",
    "QueryRegistered",
    "QueryTooLarge",
    "SlicesRefused",
    "TimeAdvanced",
    "Violation",
    "WithheldBound",
    "late_counts",
    "pack_state",
    "state_refusal",
    "united_late_counts",
    "with_late_records",
    "with_violations",
]
