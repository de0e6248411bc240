"""The values that a closed slice withholds: a summary of its pending values over all groups."""

from __future__ import annotations

import math

import numpy as np

from edge.cache.entries import SliceEntries
from edgewater.synopses import ExtremumStack, FloatArray, MaxStack, SumStack
from edgewater.synopses.rests import NOTHING, rest_of
from edgewater.wire import Signs, Withheld

_UNKNOWN = None, None


def withheld_of(entries: SliceEntries, *, shares: bool = False) -> tuple[Withheld, ...]:
    """Returns the withheld error of each measure of the budget.

    Args:
        shares: also state the groups' largest shares and the signs of sums. Needed for a relative limit.
    """
    result, pending = [], np.flatnonzero(entries.has_pending)
    records = int(entries.pending_records.sum())
    for name in entries.bounded:
        stack, error = entries.pending.measures[name], np.where(entries.has_pending, entries.error(name), 0.0)
        unknown = np.isnan(error)
        above = np.where(unknown, np.inf, np.maximum(error, 0.0))
        below = np.where(unknown, np.inf, np.maximum(-error, 0.0))
        groups, unsent = int(np.count_nonzero(error)), _largest_unsent(entries, name)
        signs = entries.signs(name) if shares and isinstance(stack, SumStack) else Signs.NOT_NEGATIVE
        # A pending value may change no group. In a sum it still counts. Of an extremum, a better value was sent.
        is_irrelevant = isinstance(stack, ExtremumStack) and not groups and unsent is None
        rest = NOTHING if is_irrelevant else rest_of(stack, pending, records)
        if groups or unsent is not None or signs is not Signs.NOT_NEGATIVE or rest != NOTHING:
            amounts = float(above.max(initial=0.0)), float(below.max(initial=0.0))
            both = (_largest_share(entries, name, above), _largest_share(entries, name, below)) if shares else _UNKNOWN
            result.append(Withheld(name, *amounts, groups, unsent, signs, *both, rest))
    return tuple(result)


def _largest_share(entries: SliceEntries, measure: str, amounts: FloatArray) -> float | None:
    """Returns the largest amount as a fraction of its group's own value, rounded up; None: unknown."""
    withheld = amounts > 0.0
    if not withheld.any():
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        share = float((amounts[withheld] / np.abs(entries.total(measure)[withheld])).max())
    return math.nextafter(share, math.inf) if math.isfinite(share) else None


def _largest_unsent(entries: SliceEntries, measure: str) -> float | None:
    """Returns the largest maximum of the groups that have a value and were never sent; None: there is no such group, or
    the measure is not a maximum."""
    if not isinstance(entries.pending.measures[measure], MaxStack):
        return None
    never = entries.never_sent(measure)
    largest = entries.total(measure)[never].max(initial=-np.inf)
    if not never.any():
        return None
    return math.inf if math.isnan(largest) else float(largest)
