"""Staleness budgets: the size of the primary cache, and the errors that order it (TR 16-003, section 5.3).

The primary cache has the s(t) entries with the largest estimated initial prefix errors, s(t) = B(t) − f(t). B(t) sends
remain until the deadline, and f(t) of them are reserved for groups that have not appeared yet.

`prev_window`  f(t) is the number of important groups that appeared after t in the previous slice, and every entry is
               expected to be sent as often as the most sent group;
`linear`       important groups appear evenly: f(t) = k·(T + W − t) / W (the sign in the report is corrected);
`pure_pess`    every group to come will be important; their rate is averaged exponentially. While s(t) < 1 there is no
               primary cache, and all entries are sent in the order of their errors;
`target`       not a size: the primary cache has the entries above an error that this edge can reach (`ErrorTarget`).

Errors of different measures are compared in units of `GroupHistory.scale`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from edge.cache.entries import SMALLEST_UNIT, SliceEntries, largest_size, ratio
from edge.cache.error_target import nth_largest
from edge.cache.forecast import forecast
from edge.cache.history import GroupHistory
from edgewater.synopses import FloatArray, IntArray

NEW_GROUPS_WINDOW = 0.1
"""Time constant, as a fraction of a slice, with which `pure_pess` averages the rate of new groups."""


@dataclass(frozen=True, slots=True)
class SendSlots:
    """Numbers of entries that the link's bandwidth allows to send.

    Attributes:
        remaining: B(t), from now until the deadline.
        total: in a whole slice and its staleness budget.
    """

    remaining: float
    total: float


def error_scales(entries: SliceEntries, history: GroupHistory) -> Mapping[str, float]:
    """Returns the unit of each measure's error; without history, the largest value of this slice."""
    return {m: history.scale.get(m) or max(largest_size(entries, m), SMALLEST_UNIT) for m in entries.bounded}


def accumulated_errors(entries: SliceEntries, history: GroupHistory, groups: IntArray) -> FloatArray:
    """Estimate `acc`: the accumulated error, as initial prefix error.

    It is the maximum over the measures, in their units.
    """
    result = np.zeros(len(groups))
    for measure, scale in error_scales(entries, history).items():
        errors, totals = np.abs(entries.accumulated_error(measure, groups)), entries.total(measure, groups)
        finite = np.isfinite(totals)
        # The error of an extremum that was never sent is unbounded. Its value is used instead.
        errors = np.where(np.isfinite(errors), errors, np.where(finite, np.abs(totals), 0.0))
        # A group whose value becomes infinite or NaN gets a finite error, above the errors of all others.
        odd = ~finite & (entries.accumulated_error(measure, groups) != 0.0)
        ranks = ratio(errors, scale)
        result = np.maximum(result, np.where(odd, 2.0 * max(float(ranks.max(initial=0.0)), 1.0), ranks))
    return result


def explicit_errors(entries: SliceEntries, history: GroupHistory, groups: IntArray, elapsed: float) -> FloatArray:
    """Estimate `explicit`: the predicted final value, as initial prefix error."""
    expected = forecast(entries, groups, history, elapsed)
    result = np.zeros(len(groups))
    for measure, scale in error_scales(entries, history).items():
        result = np.maximum(result, ratio(entries.size(measure)[groups] + expected.mean(measure), scale))
    return result


def prev_window(entries: SliceEntries, history: GroupHistory, elapsed: float, slots: SendSlots) -> float:
    sends = max(1, int(entries.sends.max(initial=1)))
    return (slots.remaining - history.expected_new_groups(elapsed)) / sends


def linear(entries: SliceEntries, history: GroupHistory, elapsed: float, slots: SendSlots) -> float:
    groups = history.groups if history.slices else len(entries) / max(elapsed, 0.02)
    return slots.remaining - min(slots.total, groups) * (1.0 - elapsed)


def pure_pess(entries: SliceEntries, history: GroupHistory, elapsed: float, slots: SendSlots) -> float:
    ages = np.maximum(elapsed - entries.first_seen, 0.0)
    rate = float(np.exp(-ages / NEW_GROUPS_WINDOW).sum()) / NEW_GROUPS_WINDOW
    return slots.remaining - rate * (1.0 - elapsed)


Sizing = Callable[[SliceEntries, GroupHistory, float, SendSlots], float]
SIZINGS: dict[str, Sizing] = {"prev_window": prev_window, "linear": linear, "pure_pess": pure_pess}
"""s(t), by name. `target` has no size: see `target_level`."""


def target_level(
    entries: SliceEntries, history: GroupHistory, elapsed: float, slots: SendSlots, errors: FloatArray
) -> float:
    """Returns, for `target`, the error above which an entry is in the primary cache.

    Args:
        errors: the accumulated errors of the groups with pending values.
    """
    if history.error_target.target is None:
        return nth_largest(errors, max(0.0, linear(entries, history, elapsed, slots)))
    until_end = (slots.total - slots.remaining) * (1.0 - elapsed) / elapsed if elapsed > 0.0 else np.inf
    return history.error_target.level(errors, 1.0 - elapsed, slots.remaining, slots.remaining - until_end)
