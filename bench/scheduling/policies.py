"""Which query runs next: Klink's least slack, and the baselines that it is compared with. Pure.

A policy gives a key to each query with a queue. The query with the least key runs. Of equal keys, the query that was
registered first runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.scheduling.queries import ScheduledQuery
from edgewater.scheduling import PATIENCE

_DUE_FIRST = 1e13  # derived: resolution of float64
"""Larger than any time in ms, and small enough for a resolution of 2 µs."""


@dataclass(frozen=True, slots=True)
class Policy:
    """An order of queries.

    Attributes:
        key: of a query with a queue, at a time in ms.
        timed: keys change as time passes, so they are renewed every cycle.
        sticky: a chosen query runs until a sweeping watermark has been processed or its queue is empty.
    """

    key: Callable[[ScheduledQuery, float], float]
    timed: bool = False
    sticky: bool = False


def least_slack(query: ScheduledQuery, now_ms: float) -> float:
    """Klink, as corrected: least expected slack first, work-conserving.

    The thesis' Algorithm 3 runs only queries with a slack of at most 0. It treats a query whose sweeping watermark is
    queued like any other. Here the least slack runs whatever its sign. A query whose watermark is queued is due, and
    comes before queries that still expect their watermark. Due queries run in the order of their window ends plus
    `PATIENCE` times the work that remains until the answer.
    """
    if query.sweeps:
        return _due_key(query, query.sweeps[0][1])
    # The common - now of all slacks does not change the order.
    return query.expected_ingestion_ms(now_ms) - query.queued_ms


def room_key(query: ScheduledQuery, now_ms: float) -> float:
    """Orders queries whose sources wait for room. Their watermarks wait too.

    So they count as due from the expected time of their watermark on. The time of a window's end does not grow, so
    no query waits forever.
    """
    if not query.sweeps and (mean_ms := query.mean_ingestion_ms) <= now_ms:
        return _due_key(query, mean_ms)
    return least_slack(query, now_ms)


def _due_key(query: ScheduledQuery, since_ms: float) -> float:
    return since_ms + PATIENCE * query.queued_ms - _DUE_FIRST


def _deadline(query: ScheduledQuery, now_ms: float) -> float:
    return query.sweeps[0][0] if query.sweeps else query.end_ms


POLICIES = {
    "klink": Policy(least_slack, timed=True),
    # Round robin: the query whose last turn is longest ago.
    "fair": Policy(lambda query, _: query.turn),
    # First come, first served: the oldest queued item.
    "fcfs": Policy(lambda query, _: query.queue[0].ingested_ms),
    # Highest Rate (Sharaf et al.): most records out per ms of processing.
    "hr": Policy(lambda query, _: -query.costs.output_rate),
    # StreamBox (Miao et al., ATC 2017): the closest window end, and that query until its watermark is processed.
    "streambox": Policy(_deadline, sticky=True),
    # EdgeWise (Fu et al., ATC 2019): the longest queue.
    "edgewise": Policy(lambda query, _: -query.records),
    # Earliest deadline first; the deadline is the window's end.
    "edf": Policy(_deadline),
    # Shortest remaining processing time first: the least queued work.
    "srpt": Policy(lambda query, _: query.queued_ms),
}
