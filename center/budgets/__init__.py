"""Error budgets: decides which share of a query's error budget each edge may use, and from which slice on. And links
that several edges share: decides which part of the link each edge may use. And the processing delay of the center
(`processing_delay`), which edges subtract from staleness budgets.

Called by `center.ingest`, which stores the state in the catalog and sends the grants; the delays by `center.job`. This
package has no I/O and reads no clock.
"""

from center.budgets.allocation import AllocationPolicy, BudgetAllocator, BudgetReport, ShareViolation, error_limits
from center.budgets.holdings import Grant, Holding
from center.budgets.link_division import LEASE_MS, LinkDivision
