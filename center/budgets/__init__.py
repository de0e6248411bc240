"""Error budgets: decides which share of a query's error budget each edge may use, and from which slice on.

Called by `center.ingest`, which stores the state in the catalog and sends the grants. This package has no I/O and reads
no clock.
"""

from center.budgets.allocation import (
    AllocationPolicy,
    BudgetAllocator,
    BudgetReport,
    MembersChanged,
    RebalanceEvent,
    ShareReported,
    ShareViolation,
    error_limits,
)
from center.budgets.holdings import Grant, Holding

__all__ = [
    "AllocationPolicy",
    "BudgetAllocator",
    "BudgetReport",
    "Grant",
    "Holding",
    "MembersChanged",
    "RebalanceEvent",
    "ShareReported",
    "ShareViolation",
    "error_limits",
]
