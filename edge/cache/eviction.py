"""Eviction: in which order entries leave the primary cache when the link has room.

A policy ranks groups; the lowest rank leaves first. Those of TR 16-003, section 5.2:

`lru`   the group that was touched longest ago is the likeliest to have its final value;
`spe`   smallest potential error, the final value predicted explicitly: as large as in earlier slices;
`mae`   most accumulated error;

and two that do better (`docs/decisions/0005-cache-policy.md`):

`rate`  smallest potential error, the final value extrapolated from the rate so far;
`gain`  largest gain: P(the link is spared a flush of this group after the slice's end, if it leaves now).
        Sent now, a group must be sent again if its residual comes to exceed the limit; left here, it must be
        sent if its pending value does. The difference of the two probabilities is what a send is worth, for
        entries on either side of the limit: so it promotes eagerly what will exceed it anyway, leaves heavy
        groups for later, and says when sending is not worth its bytes yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from edge.cache.entries import SliceEntries
from edge.cache.forecast import Forecast, forecast
from edge.cache.history import GroupHistory
from edge.cache.partition import Limits
from edgewater.synopses import FloatArray, IntArray

LAST_DIGIT = 1e-6
"""Gains are rounded to it."""


@dataclass(frozen=True, slots=True)
class View:
    """What a policy sees of an open slice.

    Attributes:
        elapsed: the part of the slice that has passed, 0 to 1.
        least: `gain` only: smaller gains need not be worked out, for nothing leaves for them.
    """

    entries: SliceEntries
    limits: Limits
    history: GroupHistory
    elapsed: float
    least: float = 0.0


Policy = Callable[[View, IntArray], FloatArray]
"""(view, candidate groups) -> rank per candidate, lowest first."""


def _measures(view: View) -> list[str]:
    return view.limits.measures or list(view.entries.bounded)


def least_recently_used(view: View, groups: IntArray) -> FloatArray:
    return view.entries.touched[groups].astype(np.float64)


def smallest_potential_error(view: View, groups: IntArray) -> FloatArray:
    """|predicted final value − F ⊕ V|, the final value taken to be that of earlier slices; the sum over
    measures, each by its limit. An exact query counts records."""
    past = view.history.recall(view.entries, groups)
    if view.limits.exact:
        return np.maximum(past.arrivals - view.entries.arrivals[groups], 0.0)
    result = np.zeros(len(groups))
    for measure in _measures(view):
        now = view.entries.total(measure)[groups]
        left = np.maximum(past.totals[measure] - np.abs(now), 0.0)
        result += left / np.maximum(view.limits.of(measure, now), 1e-300)
    return result


def most_accumulated_error(view: View, groups: IntArray) -> FloatArray:
    if not view.entries.bounded:
        return -view.entries.pending_records[groups].astype(np.float64)
    result = np.zeros(len(groups))
    for measure in _measures(view):
        now = view.entries.total(measure)[groups]
        limit = np.ones(len(groups)) if view.limits.exact else np.maximum(view.limits.of(measure, now), 1e-300)
        result -= np.abs(view.entries.accumulated_error(measure)[groups]) / limit
    return result


def extrapolated_rate(view: View, groups: IntArray) -> FloatArray:
    """What is still to come if the slice goes on as it began."""
    left = (1.0 - view.elapsed) / max(view.elapsed, 1e-3)
    if view.limits.exact:
        return np.asarray(view.entries.arrivals[groups] * left, np.float64)
    result = np.zeros(len(groups))
    for measure in _measures(view):
        now = view.entries.total(measure)[groups]
        result += np.abs(now) * left / np.maximum(view.limits.of(measure, now), 1e-300)
    return result


def largest_gain(view: View, groups: IntArray) -> FloatArray:
    """Minus the gain."""
    coming = forecast(view.entries, groups, view.history, view.elapsed)
    if view.limits.exact:
        return np.round(coming.any_arrival() - 1.0, 6)
    ranks = np.zeros(len(groups))
    rooms = {m: _rooms(view, groups, coming, m) for m in view.limits.measures}
    hopeful = np.zeros(len(groups), bool)
    for measure, (_, room) in rooms.items():
        hopeful |= coming.mean(measure) >= max(view.least - LAST_DIGIT, 0.0) * room
    chosen = np.flatnonzero(hopeful)
    ranks[chosen] = -_gain(coming.of(chosen), {m: (lim[chosen], room[chosen]) for m, (lim, room) in rooms.items()})
    return ranks


def _rooms(view: View, groups: IntArray, coming: Forecast, measure: str) -> tuple[FloatArray, FloatArray]:
    """Per group its limit, and what of it the pending value leaves; below 0: it must be sent."""
    now = view.entries.total(measure, groups)
    limit = view.limits.of(measure, np.abs(now) + coming.mean(measure))
    pending = np.abs(view.entries.accumulated_error(measure, groups))
    return limit, limit - pending


def _gain(coming: Forecast, rooms: Mapping[str, tuple[FloatArray, FloatArray]]) -> FloatArray:
    sent, kept = np.zeros(len(coming.arrivals)), np.zeros(len(coming.arrivals))
    for measure, (limit, room) in rooms.items():
        again, at_all = coming.exceeds(measure, limit, np.maximum(room, 0.0))
        sent = np.maximum(sent, again)
        kept = np.maximum(kept, np.where(room < 0.0, 1.0, at_all))
    # Rounded, so that another processor's last bit of an exponential does not change who leaves.
    return np.asarray(np.round(kept - sent, 6), np.float64)


POLICIES: dict[str, Policy] = {
    "lru": least_recently_used,
    "spe": smallest_potential_error,
    "mae": most_accumulated_error,
    "rate": extrapolated_rate,
    "gain": largest_gain,
}


def first_to_leave(ranks: FloatArray, groups: IntArray, count: int) -> IntArray:
    """The `count` groups of the lowest ranks, in ascending group order; O(n) in the candidates.

    Equal ranks leave in group order, so that the same state always gives the same frame.
    """
    if count >= len(groups):
        return groups
    border = np.partition(ranks, count - 1)[count - 1]
    below = groups[ranks < border]
    ties = groups[ranks == border][: count - len(below)]
    return np.sort(np.concatenate([below, ties]))
