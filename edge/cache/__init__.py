"""The two-level cache: which groups of a slice may leave (primary), and which leaves first.

Source: Heintz, Chandra, Sitaraman, "Trading Timeliness and Accuracy in Geo-Distributed Streaming
Analytics" (TR 16-003), section 5.
"""
