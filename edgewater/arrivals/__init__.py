"""Arrival statistics of a query with an accuracy: which events arrived when, per slot, sub-stream and group.

Edges collect and ship the statistics, and the center's early-answer estimator reads them. The classes are plain values:
no code here reads a clock or decides anything.
"""

from edgewater.arrivals.report import encode_report, fits_report, read_report
from edgewater.arrivals.schedule import ReportSchedule, SlotGrid, lag_groups
from edgewater.arrivals.substream import DEFAULT_MAX_SKEW_MS, NO_VALUES, SubstreamStatistics, distinct_codes, summed
