"""Staleness budgets: how large the primary cache is, and by what it is filled (TR 16-003, section 5.3).

The primary cache holds the s(t) entries of the largest estimated initial prefix errors, s(t) = B(t) − f(t): B(t)
sends are left until the deadline, and f(t) of them are kept for groups that are still to appear.

`prev_window`  f(t) is what appeared of the important groups after t in the slice before, and every entry is
               expected to be sent as often as the group that was sent most;
`linear`       important groups appear evenly: f(t) = k·(T + W − t) / W (the report's sign is corrected);
`pure_pess`    every group to come will be important; their rate is averaged exponentially;
`target`       not by size: the primary cache is what exceeds an error that this edge can reach (`aim`).

Errors of different measures are compared in units of `GroupHistory.scale`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from edge.cache.entries import SliceEntries
from edge.cache.error_target import nth_largest
from edge.cache.forecast import forecast
from edge.cache.history import GroupHistory
from edgewater.synopses import FloatArray, IntArray

NEW_GROUPS_WINDOW = 0.1
"""Part of a slice over which `pure_pess` averages the rate at which groups appear."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Sends, as the link's bandwidth allows.

    Attributes:
        left: B(t), until the deadline.
        whole: in a whole slice and its staleness budget.
    """

    left: float
    whole: float


def scales(entries: SliceEntries, history: GroupHistory) -> Mapping[str, float]:
    """The unit of each measure's error; of the first slice's own largest values as long as there is no history."""
    return history.scale or {m: max(float(np.abs(entries.total(m)).max(initial=0.0)), 1e-300) for m in entries.bounded}


def accumulated(entries: SliceEntries, history: GroupHistory, groups: IntArray) -> FloatArray:
    """`acc`: the accumulated error stands for the initial prefix error. The largest over the measures."""
    result = np.zeros(len(groups))
    for measure, scale in scales(entries, history).items():
        errors = np.abs(entries.accumulated_error(measure, groups))
        # An extremum that was never sent has no bound; how much it matters is told by its size.
        errors = np.where(np.isfinite(errors), errors, np.abs(entries.total(measure, groups)))
        result = np.maximum(result, errors / scale)
    return result


def explicit(entries: SliceEntries, history: GroupHistory, groups: IntArray, elapsed: float) -> FloatArray:
    """`explicit`: the initial prefix error is the final value, which is predicted."""
    coming = forecast(entries, groups, history, elapsed)
    result = np.zeros(len(groups))
    for measure, scale in scales(entries, history).items():
        result = np.maximum(result, (np.abs(entries.total(measure)[groups]) + coming.mean(measure)) / scale)
    return result


def prev_window(entries: SliceEntries, history: GroupHistory, elapsed: float, slots: Slots) -> float:
    sends = max(1, int(entries.sends.max(initial=1)))
    return (slots.left - history.still_to_come(elapsed)) / sends


def linear(entries: SliceEntries, history: GroupHistory, elapsed: float, slots: Slots) -> float:
    groups = history.groups if history.slices else len(entries) / max(elapsed, 0.02)
    return slots.left - min(slots.whole, groups) * (1.0 - elapsed)


def pure_pess(entries: SliceEntries, history: GroupHistory, elapsed: float, slots: Slots) -> float:
    ages = np.maximum(elapsed - entries.first_seen, 0.0)
    rate = float(np.exp(-ages / NEW_GROUPS_WINDOW).sum()) / NEW_GROUPS_WINDOW
    return slots.left - rate * (1.0 - elapsed)


Sizing = Callable[[SliceEntries, GroupHistory, float, Slots], float]
SIZINGS: dict[str, Sizing] = {"prev_window": prev_window, "linear": linear, "pure_pess": pure_pess}
"""s(t), by name. `target` has no size: see `level`."""


def level(entries: SliceEntries, history: GroupHistory, elapsed: float, slots: Slots, errors: FloatArray) -> float:
    """`target`: the error above which an entry is in the primary cache. `errors`: those now pending."""
    if history.aim.target is None:
        return nth_largest(errors, max(0.0, linear(entries, history, elapsed, slots)))
    until_end = (slots.whole - slots.left) * (1.0 - elapsed) / elapsed if elapsed > 0.0 else np.inf
    return history.aim.level(errors, 1.0 - elapsed, slots.left, slots.left - until_end)
