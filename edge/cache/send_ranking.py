"""Eviction: the order in which entries are sent from the primary cache when the link has room.

A policy ranks groups; the lowest rank is sent first. The policies of TR 16-003, section 5.2:

`lru`   the least recently updated group first: it is the most likely to have its final value; `spe`   smallest
potential error, with the final value of earlier slices as an explicit prediction; `mae`   most accumulated error;

and two better policies (`docs/decisions/0006-budgets-and-early-sends.md`):

`rate`  smallest potential error, with the final value extrapolated from the rate so far; `gain`  largest gain: the
probability that sending the group now saves sending it after the slice's end.

A group that is sent now must be sent again if its later changes exceed the limit. A group that is not sent now must be
sent later if its pending value and later changes exceed the limit. The gain is the difference of the two probabilities.
So the policy sends groups early that will exceed the limit anyway, and defers heavy groups. If no gain is large enough,
it sends nothing yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from edge.cache.entries import SliceEntries, ratio
from edge.cache.error_limits import ErrorLimits
from edge.cache.forecast import Forecast, any_arrival, arrivals_to_come, dispersion_of, forecast
from edge.cache.history import GroupHistory
from edgewater.synopses import FloatArray, IntArray
from edgewater.wire import Signs

GAIN_RESOLUTION = 1e-6  # derived: above the rounding of an exponential
"""Gains are rounded to this, so that the order does not depend on the last bit of a processor's exponential."""


@dataclass(frozen=True, slots=True)
class SliceView:
    """The input of an eviction policy: the state of an open slice.

    Attributes:
        elapsed: the elapsed fraction of the slice, 0 to 1.
        min_gain: for `gain`: smaller gains need not be computed, because such groups are not sent.
    """

    entries: SliceEntries
    limits: ErrorLimits
    history: GroupHistory
    elapsed: float
    min_gain: float = 0.0


EvictionPolicy = Callable[[SliceView, IntArray], FloatArray]
"""(view, candidate groups) -> rank per candidate, the lowest sent first."""


def _measures(view: SliceView) -> list[str]:
    return view.limits.measures or list(view.entries.bounded)


def least_recently_used(view: SliceView, groups: IntArray) -> FloatArray:
    return view.entries.last_batch[groups].astype(np.float64)


def smallest_potential_error(view: SliceView, groups: IntArray) -> FloatArray:
    """Returns |predicted final value − F ⊕ V|, with the mean of earlier slices as prediction.

    It is the sum over measures, in units of their limits. For an exact query it is the expected number of records to
    come.
    """
    past = view.history.averages_of(view.entries, groups)
    if view.limits.is_exact:
        return np.maximum(past.arrivals - view.entries.arrivals[groups], 0.0)
    result = np.zeros(len(groups))
    for measure in _measures(view):
        now = view.entries.size(measure, groups)
        left = np.maximum(past.totals[measure] - now, 0.0)
        result += ratio(left, view.limits.for_values(measure, now))
    return result


def most_accumulated_error(view: SliceView, groups: IntArray) -> FloatArray:
    if not view.entries.bounded:
        return -view.entries.pending_records[groups].astype(np.float64)
    result = np.zeros(len(groups))
    for measure in _measures(view):
        now = view.entries.total(measure)[groups]
        limit = np.ones(len(groups)) if view.limits.is_exact else view.limits.for_values(measure, now)
        result -= ratio(np.abs(view.entries.accumulated_error(measure)[groups]), limit)
    return result


def extrapolated_rate(view: SliceView, groups: IntArray) -> FloatArray:
    """Returns the expected change until the slice's end at the rate so far, in units of the limits."""
    left = (1.0 - view.elapsed) / max(view.elapsed, 1e-3)
    if view.limits.is_exact:
        return np.asarray(view.entries.arrivals[groups] * left, np.float64)
    result = np.zeros(len(groups))
    for measure in _measures(view):
        now = view.entries.size(measure, groups)
        result += ratio(now * left, view.limits.for_values(measure, now))
    return result


def largest_gain(view: SliceView, groups: IntArray) -> FloatArray:
    """Returns minus the gain. A gain that must be below `SliceView.min_gain` is not computed, and counts as 0."""
    if view.limits.is_exact:
        arrivals = arrivals_to_come(view.entries, view.history, view.elapsed, groups)
        return np.round(any_arrival(arrivals, dispersion_of(view.history, arrivals)) - 1.0, 6)
    expected = forecast(view.entries, groups, view.history, view.elapsed)
    slacks = {m: _slack(view, groups, expected, m) for m in view.limits.measures}
    possible = np.zeros(len(groups), bool)
    for measure, (_, slack) in slacks.items():
        # Markov's inequality: the probability of exceeding the slack is at most mean / slack.
        least = max(view.min_gain - GAIN_RESOLUTION, 0.0) * np.maximum(slack, 0.0)
        possible |= (slack < 0.0) | (expected.mean(measure) >= least)
    chosen = np.flatnonzero(possible)
    chosen_slacks = {m: (limit[chosen], slack[chosen]) for m, (limit, slack) in slacks.items()}
    result = np.zeros(len(groups))
    result[chosen] = -_gain(expected.take(chosen), chosen_slacks)
    return result


def _slack(view: SliceView, groups: IntArray, expected: Forecast, measure: str) -> tuple[FloatArray, FloatArray]:
    """Returns per group its limit, and the limit less the pending error; below 0 the group must be sent."""
    now = view.entries.size(measure, groups)
    if measure in view.limits.relative and view.entries.signs(measure) is Signs.BOTH:
        limit = np.zeros(len(groups))  # the same limit as in `primary_mask`
    else:
        limit = view.limits.for_values(measure, now + expected.mean(measure))
    pending = np.abs(view.entries.accumulated_error(measure, groups))
    return limit, limit - pending


def _gain(expected: Forecast, slacks: Mapping[str, tuple[FloatArray, FloatArray]]) -> FloatArray:
    """Returns P(the group must be sent later if it is not sent now) − P(it must be sent again if it is sent now)."""
    if_sent, if_kept = np.zeros(len(expected.arrivals)), np.zeros(len(expected.arrivals))
    for measure, (limit, slack) in slacks.items():
        over_limit, over_slack = expected.exceeds(measure, limit, np.maximum(slack, 0.0))
        if_sent = np.maximum(if_sent, over_limit)
        if_kept = np.maximum(if_kept, np.where(slack < 0.0, 1.0, over_slack))
    return np.asarray(np.round(if_kept - if_sent, 6), np.float64)


EVICTION_POLICIES: dict[str, EvictionPolicy] = {
    "lru": least_recently_used,
    "spe": smallest_potential_error,
    "mae": most_accumulated_error,
    "rate": extrapolated_rate,
    "gain": largest_gain,
}
