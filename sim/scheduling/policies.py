"""Which query runs next: Klink's least slack, and the baselines that it is compared with. Pure.

A policy gives a key to each query with a queue. The query with the least key runs. Of equal keys, the query that was
registered first runs.
"""

from __future__ import annotations

from typing import Protocol

from edgewater.scheduling import PATIENCE
from sim.scheduling.queries import ScheduledQuery

_DUE_FIRST = 1e13
"""Larger than any time in ms, and small enough for a resolution of 2 µs."""


class Policy(Protocol):
    """An order of queries.

    Attributes:
        name: as the command line has it.
        timed: keys change as time passes, so they are renewed every cycle.
        sticky: a chosen query runs until a sweeping watermark has been processed or its queue is empty.
    """

    name: str
    timed: bool
    sticky: bool

    def key(self, query: ScheduledQuery, now_ms: float) -> float: ...


class LeastSlack:
    """Klink, as corrected: least expected slack first, work-conserving.

    The thesis' Algorithm 3 runs only queries with a slack of at most 0. It treats a query whose sweeping watermark is
    queued like any other. Here the least slack runs whatever its sign. A query whose watermark is queued is due, and
    comes before queries that still expect their watermark. Due queries run in the order of their window ends plus
    `PATIENCE` times the work that remains until the answer.
    """

    name = "klink"
    timed, sticky = True, False

    def key(self, query: ScheduledQuery, now_ms: float) -> float:
        if query.sweeps:
            return self._due_key(query, query.sweeps[0][1])
        # The common - now of all slacks does not change the order.
        return query.expected_ingestion_ms(now_ms) - query.queued_ms

    def room_key(self, query: ScheduledQuery, now_ms: float) -> float:
        """Orders queries whose sources wait for room. Their watermarks wait too.

        So they count as due from the expected time of their watermark on. The time of a window's end does not grow, so
        no query waits forever.
        """
        if not query.sweeps and (mean_ms := query.mean_ingestion_ms) <= now_ms:
            return self._due_key(query, mean_ms)
        return self.key(query, now_ms)

    def _due_key(self, query: ScheduledQuery, since_ms: float) -> float:
        return since_ms + PATIENCE * query.queued_ms - _DUE_FIRST


class Fair:
    """Round robin: the query whose last turn is longest ago."""

    name = "fair"
    timed, sticky = False, False

    def key(self, query: ScheduledQuery, now_ms: float) -> float:
        return query.turn


class FirstCome:
    """First come, first served: the oldest queued item."""

    name = "fcfs"
    timed, sticky = False, False

    def key(self, query: ScheduledQuery, now_ms: float) -> float:
        return query.queue[0].ingested_ms


class HighestRate:
    """Highest Rate (Sharaf et al.): most records out per ms of processing."""

    name = "hr"
    timed, sticky = False, False

    def key(self, query: ScheduledQuery, now_ms: float) -> float:
        return -query.costs.output_rate


class LongestQueue:
    """EdgeWise (Fu et al., ATC 2019): the longest queue."""

    name = "edgewise"
    timed, sticky = False, False

    def key(self, query: ScheduledQuery, now_ms: float) -> float:
        return -query.records


class EarliestDeadline:
    """Earliest deadline first; the deadline is the window's end."""

    name = "edf"
    timed, sticky = False, False

    def key(self, query: ScheduledQuery, now_ms: float) -> float:
        return query.sweeps[0][0] if query.sweeps else query.end_ms


class StreamBox(EarliestDeadline):
    """StreamBox (Miao et al., ATC 2017): the closest window end, and that query until its watermark is processed."""

    name = "streambox"
    timed, sticky = False, True


class ShortestRemaining:
    """Shortest remaining processing time first: the least queued work."""

    name = "srpt"
    timed, sticky = False, False

    def key(self, query: ScheduledQuery, now_ms: float) -> float:
        return query.queued_ms


_POLICIES = (LeastSlack, Fair, FirstCome, HighestRate, StreamBox, LongestQueue, EarliestDeadline, ShortestRemaining)
POLICIES = tuple(policy.name for policy in _POLICIES)


def make_policy(name: str) -> Policy:
    """Returns the policy of that name, one of `POLICIES`."""
    return next(policy for policy in _POLICIES if policy.name == name)()
