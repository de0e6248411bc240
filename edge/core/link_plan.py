"""The plan of an edge's link: what each query has in the next message. Pure: numbers in, numbers out.

The demands of all queries compete for one link, in classes:

1. Closes. They are small, and come before everything else (`edge/core/turn.py`).
2. *Required* bytes: what an error limit or an exact result needs. They are due by the staleness budget, or one window
   after the close.
3. *Optional* bytes, of staleness budgets. They are shared by *water level*: of all queries, the groups whose errors are
   above one level are sent. The level is the lowest one for which all of them arrive by their deadlines. So the largest
   error over the queries is least (lexicographic min-max, with nested deadlines).

The earliest due time is first. This order alone would starve queries without a deadline, and one query that needs more
than the link would delay all others. So

- if the required bytes do not fit, as many queries as possible are in time: the largest demands for their priority are
  late. Late queries have at most `LATE_QUERIES_SHARE` of the link while others wait;
- the link is also divided by start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996), in one message of
  `MESSAGES_PER_FAIR`. Queries that had fewer bytes for their priority are first there. So each query with due bytes has
  at least its share of a quarter of the link.

Errors are in units of the query's usual largest value. An error relative to the own value of a group would be 100 % for
each group that was not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from edgewater.synopses import FloatArray

LEVELS: FloatArray = 2.0 ** (np.arange(16.0, -112.0, -1.0) / 4.0)
"""Errors at which bytes are counted: quarters of octaves, the largest first."""
MESSAGES_PER_FAIR = 4  # limit: how long a query with due bytes waits for others
LATE_QUERIES_SHARE = 1 / 2  # limit: of the link, so that late queries delay no others
LEAST_BYTES = 256
"""A frame of fewer bytes before compression is mostly overhead, unless it is the rest of a demand."""


def bytes_above(errors: FloatArray, entry_bytes: float) -> FloatArray:
    """Returns the bytes of the groups with at least each error of `LEVELS`; the last element has all groups.

    Args:
        errors: per group, descending.
    """
    counts = np.searchsorted(-errors, -LEVELS, side="right")
    counts[-1] = len(errors)
    return np.asarray(counts * entry_bytes, np.float64)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a query has to send of closed slices with one due time, in bytes before compression.

    Attributes:
        query: a number.
        left_ms: wall time until it should have been sent; infinite in a stream without a clock.
        required: bytes that are sent in any case.
        optional: float64 [level], the bytes of groups with at least this error. They are sent until then.
        priority: of the query, above 0.
    """

    query: int
    left_ms: float
    required: float = 0.0
    optional: FloatArray = field(default_factory=lambda: np.zeros(len(LEVELS)))
    priority: float = 1.0


def message(demands: Sequence[Demand], bytes_per_ms: float, room_bytes: float) -> dict[int, float]:
    """Returns the queries of the next message with their bytes, the most urgent first.

    Args:
        bytes_per_ms: of the link; 0: unknown, treated as unlimited.
        room_bytes: of the message.
    """
    result, left = dict[int, float](), room_bytes
    late = _late(demands, bytes_per_ms)
    levels = _levels(demands, bytes_per_ms, late)

    def serve(served: Sequence[tuple[int, float]], most: float) -> float:
        """Adds bytes to the message, at most so many; returns how many."""
        nonlocal left
        before = left
        for query, wanted in served:
            size = min(wanted, left, most - (before - left))
            if size >= 1.0 and (size >= min(wanted, LEAST_BYTES) or not result):
                result[query] = result.get(query, 0.0) + size
                left -= size
        return before - left

    timely = [(d, level) for d, level in zip(demands, levels, strict=True) if d.query not in late]
    # While late queries wait, optional bytes leave them their share of each message.
    most = room_bytes * (1.0 - LATE_QUERIES_SHARE) if late else room_bytes
    for left_ms in sorted({d.left_ms for d, _ in timely}):
        of_time = [(d, level) for d, level in timely if d.left_ms == left_ms]
        serve([(d.query, d.required) for d, _ in of_time], left)
        needs = [(d.query, np.minimum(d.optional, level)) for d, level in of_time]
        most -= serve(_filled(needs, min(left, most)), most)
    serve(
        [(d.query, d.required) for d in sorted(demands, key=lambda d: (-d.priority, d.left_ms)) if d.query in late],
        left,
    )
    above = [(d.query, d.optional - np.minimum(d.optional, level)) for d, level in zip(demands, levels, strict=True)]
    serve(_filled(above, left), left)
    return result


def _late(demands: Sequence[Demand], bytes_per_ms: float) -> set[int]:
    """Returns the queries whose required bytes are late, so that the others are in time (Moore, Hodgson 1968)."""
    late, taken, kept = set[int](), 0.0, list[tuple[float, int, float]]()
    for demand in sorted(demands, key=lambda d: d.left_ms):
        if demand.required <= 0.0 or bytes_per_ms <= 0.0:
            continue
        heappush(kept, (-demand.required / demand.priority, demand.query, demand.required))
        taken += demand.required
        while taken > bytes_per_ms * max(demand.left_ms, 0.0):
            _, query, required = heappop(kept)
            late.add(query)
            taken -= required
    return late


def _levels(demands: Sequence[Demand], bytes_per_ms: float, late: set[int]) -> FloatArray:
    """Returns per demand how many of the optional bytes arrive in time, by water level."""
    optional = np.array([d.optional for d in demands]).reshape(-1, len(LEVELS))
    result, dues = optional[:, -1].copy(), np.array([d.left_ms for d in demands], np.float64)
    if bytes_per_ms <= 0.0:
        return result
    required = np.array([0.0 if d.query in late else d.required for d in demands])
    rate = bytes_per_ms * (1.0 - LATE_QUERIES_SHARE if late else 1.0)
    times = np.unique(dues)
    before = dues[np.newaxis] <= times[:, np.newaxis]  # [time, demand]
    room = np.maximum(rate * np.maximum(times, 0.0) - before @ required, 0.0)
    open_ = optional[:, -1] > 0.0
    while open_.any():
        need = before[:, open_] @ optional[open_]  # [time, level]
        fitting = (need <= room[:, np.newaxis]).sum(axis=1)
        fitting[~before[:, open_].any(axis=1)] = len(LEVELS)
        if fitting.min() == len(LEVELS):
            break  # everything fits
        # The binding deadline: its demands have this level and a part of the next one.
        rows, level = np.flatnonzero(fitting == fitting.min()), int(fitting.min())
        below = need[rows, level - 1] if level else np.zeros(len(rows))
        at = int(rows[np.argmin((room[rows] - below) / (need[rows, level] - below))])
        chosen = np.flatnonzero(open_ & before[at])
        result[chosen] = _between(optional[chosen], level, float(room[at]))
        room = np.maximum(room - before[:, chosen] @ result[chosen], 0.0)
        open_[chosen] = False
    return result


def _between(needs: FloatArray, level: int, room: float) -> FloatArray:
    """Returns per demand the bytes above a level that does not fit, reduced to the room."""
    below = needs[:, level - 1] if level else np.zeros(len(needs))
    step = needs[:, level] - below
    return np.asarray(below + step * max(room - below.sum(), 0.0) / max(step.sum(), 1.0))


def _filled(needs: Sequence[tuple[int, FloatArray]], room: float) -> list[tuple[int, float]]:
    """Returns the bytes of each query that fill the room of a message, by water level, the most bytes first."""
    waiting = [(query, need) for query, need in needs if need[-1] >= 1.0]
    if not waiting or room <= 0.0:
        return []
    array = np.array([need for _, need in waiting])
    fitting = int((array.sum(axis=0) <= room).sum())
    sizes = array[:, -1] if fitting == len(LEVELS) else _between(array, fitting, room)
    chosen = [
        (query, max(size, min(LEAST_BYTES, need[-1]))) for (query, need), size in zip(waiting, sizes, strict=True)
    ]
    return [chosen[k] for k in np.argsort(-sizes, kind="stable")]
