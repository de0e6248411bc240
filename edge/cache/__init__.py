"""The two-level cache: which groups of a slice may leave (primary), and which leaves first.

`entries` holds the groups; `budgets` and `sizing` draw the line between the two levels; `eviction` orders the
primary one; `history` and `forecast` are what the order may rest on; `choice` puts them together into a `ranking`, from
which pulls are served.

Source: Heintz, Chandra, Sitaraman, "Trading Timeliness and Accuracy in Geo-Distributed Streaming
Analytics" (TR 16-003), section 5.
"""
