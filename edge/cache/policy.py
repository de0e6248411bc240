"""The cache policy: which entries of a slice may be sent, and in which order. Combines partitioning and eviction."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import numpy as np

from edge.cache.entries import SliceEntries, ratio
from edge.cache.error_target import nth_largest
from edge.cache.eviction import EVICTION_POLICIES, Gains, SliceView, gains, most_accumulated_error
from edge.cache.exact_sends import ExactSends
from edge.cache.forecast import RecordsToCome
from edge.cache.history import GroupHistory
from edge.cache.partition import ErrorLimits, primary_mask
from edge.cache.send_queue import SendQueue
from edge.cache.sizing import SIZINGS, SendSlots, accumulated_errors, error_scales, explicit_errors, target_level
from edgewater.caching import CacheSpec
from edgewater.synopses import BoolArray, FloatArray, IntArray

MIN_GAIN_WITHOUT_PRESSURE = 0.05
"""Without pressure an entry of an open slice is sent only if its gain is at least this."""
STALENESS_EAGER_FACTOR = 0.2
"""Under a staleness budget `CacheSpec.eager` is multiplied by this: spare capacity of the link costs nothing."""
EXACT = ErrorLimits({})
NEARLY_SURE = 0.95
"""An entry with this gain is sent early even if nothing is spared: in 1 of 20 cases it has to be sent again."""
MAX_OVERSPENT = 0.1
"""Once a slice is expected to take this fraction more sends than exact results, only what an exact query would have
sent is sent early."""
SPENDING = 2.0
"""How fast an idle link spends what a budget spares: an early send may cost, in expected repeated sends, this many
times what is spared per entry that is still to be sent."""
SAMPLED_GROUPS = 1 << 10
"""The number of groups from which the expected sends of those are estimated whose gain is not computed."""
RANKED_FROM = 0.05
"""Entries that have used up less than this fraction of their limit are not ranked before their slice closes."""


@dataclass(frozen=True, slots=True)
class RankingContext:
    """The time at which an open slice is ranked.

    Attributes:
        now_ms: event time.
        elapsed: the elapsed fraction of the slice, 0 to 1.
        pressure: the fraction of the remaining time that sending all that must be sent would take, 0 to 1 (1: all of
            it, or more).
    """

    now_ms: int
    elapsed: float
    pressure: float


def rank_open(
    entries: SliceEntries, limits: ErrorLimits, spec: CacheSpec, history: GroupHistory, context: RankingContext
) -> SendQueue:
    """Ranks an open slice of an exact query, of a combined budget, or by another eviction policy than `gain`."""
    groups = np.flatnonzero(primary_mask(entries, limits, RANKED_FROM if spec.eviction == "gain" else 1.0))
    view = SliceView(entries, limits, history, context.elapsed, _min_gain(spec, context))
    return _ranked(view, groups, spec, context)


def rank_exact_sends(
    entries: SliceEntries, spec: CacheSpec, history: GroupHistory, context: RankingContext, to_come: RecordsToCome
) -> SendQueue:
    """Ranks an open slice as an exact query would (`ExactSends`)."""
    groups = np.flatnonzero(entries.unsent_if_exact)
    view = SliceView(entries, EXACT, history, context.elapsed, _min_gain(spec, context), to_come)
    return _ranked(view, groups, spec, context)


def rank_open_by_gain(
    entries: SliceEntries,
    limits: ErrorLimits,
    spec: CacheSpec,
    history: GroupHistory,
    context: RankingContext,
    to_come: RecordsToCome,
    exact: ExactSends,
) -> SendQueue:
    """Ranks an open slice of an error-bound query by gain, without groups whose early send costs more than is spared.

    Args:
        to_come: the forecast for all groups of the slice.
        exact: the sends of an exact query so far, this pull included.
    """
    groups = np.flatnonzero(primary_mask(entries, limits, RANKED_FROM))
    view = SliceView(entries, limits, history, context.elapsed, _min_gain(spec, context), to_come)
    found = gains(view, groups)
    left = _expected_sends(view, groups, found)
    exact_sends = exact.expected(entries, to_come.any_arrival)
    enough = np.flatnonzero((found.gain >= view.min_gain) & (found.gain > 0.0))
    gain, groups = found.gain[enough], groups[enough]
    # What the exact query has sent may be sent too: both then risk the same.
    allowed, cost = ~entries.unsent_if_exact[groups], 1.0 - gain
    spared = exact_sends - float(entries.sends.sum()) - left - history.overspent - float(cost[allowed].sum())
    if spared >= -MAX_OVERSPENT * exact_sends:
        # A link that is busy until the slice ends has no better use for its time.
        spending = SPENDING / max(1.0 - context.pressure, 1e-3)
        allowed |= (gain >= NEARLY_SURE) | (
            (cost <= spending * spared / max(left, 1.0)) & _within(spared, cost, allowed)
        )
    return SendQueue.for_open_slice(-gain[allowed], groups[allowed], entries.newest_batch, context.now_ms)


def _within(total: float, cost: FloatArray, paid: BoolArray) -> BoolArray:
    """Returns a mask of the costs whose running sum, smallest first, is at most `total`. Paid costs count as 0."""
    costs = np.where(paid, 0.0, cost)
    if costs.sum() <= total:
        return np.ones(len(costs), bool)
    order = np.argsort(costs, kind="stable")
    result = np.empty(len(costs), bool)
    result[order] = np.cumsum(costs[order]) <= total
    return result


def _min_gain(spec: CacheSpec, context: RankingContext) -> float:
    return max(spec.eager, MIN_GAIN_WITHOUT_PRESSURE * (1.0 - context.pressure))


def _expected_sends(view: SliceView, groups: IntArray, found: Gains) -> float:
    """Returns how many groups are expected to be sent at the close if none is sent before; `found` is of `groups`."""
    others = np.ones(len(view.entries), bool)
    others[groups[found.computed]] = False
    rest = np.flatnonzero(others)
    sample = rest[:: max(1, -(-len(rest) // SAMPLED_GROUPS))]
    sampled = float(gains(replace(view, min_gain=0.0), sample).if_kept.sum())
    return float(found.if_kept.sum()) + sampled * len(rest) / max(len(sample), 1)


def _ranked(view: SliceView, groups: IntArray, spec: CacheSpec, context: RankingContext) -> SendQueue:
    """Ranks by the eviction policy; with `gain` only the groups whose gain is at least `view.min_gain`."""
    ranks = EVICTION_POLICIES[spec.eviction](view, groups)
    if spec.eviction == "gain":
        enough = (ranks <= -view.min_gain) & (ranks < 0.0)
        ranks, groups = ranks[enough], groups[enough]
    return SendQueue.for_open_slice(ranks, groups, view.entries.newest_batch, context.now_ms)


def rank_closed(entries: SliceEntries, limits: ErrorLimits) -> SendQueue:
    """Queues the primary cache of a closed slice of an exact or error-bound query. All of it is sent, in any order."""
    return SendQueue.for_closed_slice(np.flatnonzero(primary_mask(entries, limits)), entries.newest_batch)


def rank_closed_by_error(entries: SliceEntries, limits: ErrorLimits, history: GroupHistory) -> SendQueue:
    """Queues the primary cache of a closed slice, the largest errors first: they matter most in an answer that is due
    before all of it has arrived."""
    groups = np.flatnonzero(primary_mask(entries, limits))
    ranks = most_accumulated_error(SliceView(entries, limits, history, 1.0), groups)
    return SendQueue.for_closed_slice(groups[np.argsort(ranks, kind="stable")], entries.newest_batch)


def rank_open_by_deadline(
    entries: SliceEntries, spec: CacheSpec, history: GroupHistory, context: RankingContext, slots: SendSlots
) -> SendQueue:
    """Ranks an open slice of a staleness-bound query."""
    elapsed = context.elapsed
    groups = np.flatnonzero(entries.has_pending)
    errors = accumulated_errors(entries, history, groups)
    if spec.sizing == "target":
        threshold = target_level(entries, history, elapsed, slots, errors)
        if spec.eviction != "gain":
            groups = groups[errors > threshold]
    else:
        size = SIZINGS[spec.sizing](entries, history, elapsed, slots)
        ranked = errors if spec.estimate == "acc" else explicit_errors(entries, history, groups, elapsed)
        if spec.sizing == "pure_pess" and size < 1.0:
            # TR 16-003, section 5.3: without a primary cache "this policy degrades to evicting keys in order of
            # estimated initial prefix error". To send nothing would waste the sends of the whole slice.
            return SendQueue.for_open_slice(-ranked, groups, entries.newest_batch, context.now_ms)
        threshold = nth_largest(ranked, size)
        groups = groups[ranked > threshold]
    scales = error_scales(entries, history)
    limits = ErrorLimits({m: min(threshold * scale, sys.float_info.max) for m, scale in scales.items()})
    view = SliceView(entries, limits, history, elapsed, STALENESS_EAGER_FACTOR * spec.eager)
    return _ranked(view, groups, spec, context)


def rank_closed_by_deadline(entries: SliceEntries, history: GroupHistory) -> SendQueue:
    """Ranks a closed slice of a staleness-bound query: the largest accumulated errors are sent first."""
    groups = np.flatnonzero(entries.has_pending)
    order = np.argsort(-accumulated_errors(entries, history, groups), kind="stable")
    return SendQueue.for_closed_slice(groups[order], entries.newest_batch)


def learn_overspent(entries: SliceEntries, history: GroupHistory, limits: ErrorLimits, exact: ExactSends) -> None:
    """Updates the history with the sends of a slice that has just closed, beside those of an exact query."""
    sends = int(entries.sends.sum()) + int(np.count_nonzero(primary_mask(entries, limits)))
    history.learn_overspent(sends, exact.sends + int(np.count_nonzero(entries.unsent_if_exact)))


def learn(
    entries: SliceEntries, history: GroupHistory, slots: SendSlots | None, limits: ErrorLimits | None = None
) -> None:
    """Updates the history with a slice that has just closed, before any of it is sent.

    Args:
        slots: under a staleness budget, the sends until the deadline.
        limits: under a combined budget, what the slice may withhold.
    """
    if limits is not None:
        history.learn_needed(int(np.count_nonzero(primary_mask(entries, limits) | (entries.sends > 0))))
    if slots is not None:
        errors = accumulated_errors(entries, history, np.flatnonzero(entries.has_pending))
        totals = np.zeros(len(entries))
        for measure, scale in error_scales(entries, history).items():
            totals = np.maximum(totals, ratio(entries.size(measure), scale))
        important = totals > nth_largest(totals, slots.total)
        history.learn_curve(entries.first_seen[important])
        history.error_target.learn(errors, slots.remaining)
    history.learn(entries)
