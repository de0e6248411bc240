"""Arrival statistics and sampling at an edge: which events arrived when, with which values, per sub-stream and group.

Called by `edge.core` for queries with an accuracy, and by the simulator. Deterministic: times are arguments, and
samples depend only on the number of an event. It decides neither rates nor when statistics are sent.
"""

from edge.arrivals.group_monitor import GroupMonitor
from edge.arrivals.monitor import SubstreamMonitor
from edge.arrivals.sampler import BernoulliSampler

__all__ = ["BernoulliSampler", "GroupMonitor", "SubstreamMonitor"]
