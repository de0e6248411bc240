"""The two-level cache of TR 16-003: which groups of a slice may be sent (primary cache), and in which order.

Called by `edge.core`, per query and slice. `entries` has the groups of a slice. `error_limits` (error budgets) and
`sizing` with `error_target` (staleness budgets) decide which groups are in the primary cache. `send_ranking` orders
these groups by the `history` of earlier slices, its `arrival_profile` and `timetable`, and a `forecast`. `policy`
combines these modules into a `send_queue`, from which pulls take groups. Deterministic: no clock, no I/O; times are
arguments.

Source: Heintz, Chandra, Sitaraman, "Trading Timeliness and Accuracy in Geo-Distributed Streaming Analytics" (TR
16-003), section 5.
"""

from edge.cache.arrival_profile import parts_of
from edge.cache.entries import Shipment, SliceEntries
from edge.cache.error_limits import ErrorLimits, primary_mask
from edge.cache.error_target import NEWEST_WEIGHT
from edge.cache.history import GroupHistory
from edge.cache.policy import (
    RankingContext,
    errors_left,
    learn,
    rank_closed,
    rank_closed_by_deadline,
    rank_closed_by_error,
    rank_open,
    rank_open_by_deadline,
)
from edge.cache.send_queue import EMPTY_SELECTION, MAX_QUEUED, RERANK_FRACTION, GroupSelection, SendQueue
from edge.cache.sizing import SendSlots
from edge.cache.timetable import positions_of
from edge.cache.withheld import withheld_of
