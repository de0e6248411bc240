"""The baselines Streaming, Batching and Random (TR 16-003, section 6), for one edge and consecutive windows."""

from __future__ import annotations

import numpy as np

from edgewater.synopses import FloatArray, IntArray
from sim.budgets.optimal import ROUNDING, WindowSchedule, WindowTrace

RANDOM_STEPS = 500  # limit: time of a simulation
"""How often per window the policy Random sends. Each time it sends as many random groups as the link carries until the
next."""


def accumulate(state: FloatArray, groups: IntArray, values: FloatArray, aggregate: str) -> None:
    """Adds records to the aggregate per group, in place; NaN marks groups without records."""
    fold = {"max": np.fmax, "min": np.fmin}.get(aggregate)
    if fold is not None:
        fold.at(state, groups, values)
        return
    added = np.bincount(groups, None if aggregate == "count" else values, len(state))
    touched = np.bincount(groups, minlength=len(state)) > 0
    state[:] = np.where(touched, np.nan_to_num(state) + added, state)


def _error(sent: FloatArray, total: FloatArray) -> FloatArray:
    error = np.abs(np.nan_to_num(total) - np.nan_to_num(sent))
    return np.where(error <= ROUNDING * np.abs(np.nan_to_num(total)), 0.0, error)


def _empty(window: WindowTrace) -> FloatArray:
    return np.full(window.count, np.nan)


def _flush(
    window: WindowTrace,
    error: FloatArray,
    at_ms: float,
    updates: int,
    service_ms: float,
    budget: float | None,
    staleness_ms: float | None,
) -> WindowSchedule:
    """Returns the schedule with the updates after the window's end.

    Under an error budget these are all groups with a larger error; under a staleness budget the groups with the largest
    errors, until the deadline.
    """
    at = max(at_ms, window.end_ms)
    ordered = np.sort(error)[::-1]
    if budget is not None:
        count = int(np.count_nonzero(error > budget * (1 + ROUNDING)))
    else:
        assert staleness_ms is not None
        room = int((window.end_ms + staleness_ms - at) / service_ms + ROUNDING)
        count = min(max(room, 0), int(np.count_nonzero(error)))
    done = at + count * service_ms
    stale = done - window.end_ms if count or at_ms > window.end_ms else 0.0
    unsent = float(ordered[count]) if count < len(ordered) else 0.0
    return WindowSchedule(stale, unsent, updates + count, done if count else at_ms)


def batching(
    window: WindowTrace, service_ms: float, free_ms: float, budget: float | None, staleness_ms: float | None
) -> WindowSchedule:
    """Sends nothing before the window's end."""
    total = _empty(window)
    accumulate(total, window.groups, window.values, window.aggregate)
    start = max(free_ms, window.end_ms)
    return _flush(window, _error(_empty(window), total), start, 0, service_ms, budget, staleness_ms)


def random_early(
    window: WindowTrace, service_ms: float, free_ms: float, budget: float | None, staleness_ms: float | None, seed: int
) -> WindowSchedule:
    """Sends random groups whenever the link is idle before the window's end, and then the rest like `batching`."""
    rng = np.random.default_rng(seed)
    value, sent = _empty(window), _empty(window)
    pending = np.zeros(window.count, bool)
    at, row, updates, busy = max(free_ms, window.start_ms), 0, 0, free_ms
    step = (window.end_ms - window.start_ms) / RANDOM_STEPS
    while at < window.end_ms:
        until = int(np.searchsorted(window.times_ms, at, "right"))
        accumulate(value, window.groups[row:until], window.values[row:until], window.aggregate)
        pending[window.groups[row:until]] = True
        row = until
        waiting = np.flatnonzero(pending)
        count = min(len(waiting), max(1, int(step / service_ms)))
        leaving = rng.choice(waiting, count, replace=False) if count else waiting
        sent[leaving], pending[leaving] = value[leaving], False
        updates += count
        at += count * service_ms if count else step
        busy = at if count else busy
    accumulate(value, window.groups[row:], window.values[row:], window.aggregate)
    return _flush(window, _error(sent, value), busy, updates, service_ms, budget, staleness_ms)


def streaming(
    window: WindowTrace, service_ms: float, free_ms: float, budget: float | None, staleness_ms: float | None
) -> WindowSchedule:
    """Sends every record as an update, in order of arrival, until the error is within the budget or the deadline."""
    if not len(window.times_ms):
        return WindowSchedule(0.0, 0.0, 0, free_ms)
    ahead = np.arange(len(window.times_ms)) * service_ms
    done = np.maximum(np.maximum.accumulate(window.times_ms - ahead), free_ms) + ahead + service_ms
    order, error, initial = window.errors()
    position = np.argsort(order)  # maps records in order of time to records ordered by group
    error, initial, groups = error[position], initial[position], window.groups
    if budget is not None:
        count = 0
        over = error > budget * (1 + ROUNDING)
        if bool((initial > budget * (1 + ROUNDING)).any()):
            needed = _first_within(groups, over, initial > budget * (1 + ROUNDING), window.count)
            count = max(needed, int(np.searchsorted(done, window.end_ms, "right")))
    else:
        assert staleness_ms is not None
        count = int(np.searchsorted(done, window.end_ms + staleness_ms, "right"))
    unsent = np.zeros(window.count)
    np.maximum.at(unsent, groups, initial)
    unsent[groups[:count]] = error[:count]  # if an index occurs several times, the last one wins
    free = float(done[count - 1]) if count else free_ms
    return WindowSchedule(max(free - window.end_ms, 0.0) if count else 0.0, float(unsent.max()), count, free)


def _first_within(groups: IntArray, over: np.ndarray, needed: np.ndarray, count: int) -> int:
    """Returns how many records must be sent until every group in `needed` stays within the budget."""
    last_over = np.full(count, -1)
    at = np.flatnonzero(over)
    np.maximum.at(last_over, groups[at], at)
    # The first record after the last one over the budget brings the group within it.
    after = np.arange(len(groups)) > last_over[groups]
    first = np.full(count, len(groups))
    chosen = np.flatnonzero(after & needed)
    np.minimum.at(first, groups[chosen], chosen)
    bounded = np.unique(groups[needed])
    return int(first[bounded].max()) + 1 if len(bounded) else 0
