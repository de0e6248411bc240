"""The two-level cache of TR 16-003: which groups of a slice may be sent (primary cache), and in which order.

Called by `edge.core`, per query and slice. `entries` has the groups of a slice. `error_limits` (error budgets) and
`sizing` with `error_target` (staleness budgets) decide which groups are in the primary cache. `send_ranking` orders
these groups by the `history` of earlier slices, its `arrival_profile` and `timetable`, and a `forecast`. `policy`
combines these modules into a `send_queue`, from which pulls take groups. Deterministic: no clock, no I/O; times are
arguments.

Source: Heintz, Chandra, Sitaraman, "Trading Timeliness and Accuracy in Geo-Distributed Streaming Analytics" (TR
16-003), section 5.
"""
