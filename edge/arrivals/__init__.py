"""Collects arrival statistics and samples at an edge: arrival times and values of events, by sub-stream and group.

`edge.core` calls this package for queries with an accuracy, and so does the simulator. It is deterministic: times are
arguments, and samples depend only on the number of an event. It decides neither sampling rates nor when statistics are
sent.
"""

from edge.arrivals.monitor import SubstreamMonitor
from edge.arrivals.sampler import BernoulliSampler
from edge.arrivals.top_up import EdgeSample
