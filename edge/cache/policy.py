"""The cache policy: which entries of a slice may be sent, and in which order. Combines partitioning and eviction."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from edge.cache.entries import SliceEntries, ratio
from edge.cache.error_limits import ErrorLimits, primary_mask
from edge.cache.error_target import nth_largest
from edge.cache.history import GroupHistory
from edge.cache.send_queue import SendQueue
from edge.cache.send_ranking import EVICTION_POLICIES, SliceView, most_accumulated_error
from edge.cache.sizing import SIZINGS, SendSlots, accumulated_errors, error_scales, explicit_errors, target_level
from edgewater.model.caching import CacheSpec
from edgewater.synopses import FloatArray, IntArray

STALENESS_EAGER_FACTOR, ERROR_EAGER_FACTOR = 0.2, 10.0  # default: `cache.eager` of a query scales both
"""`CacheSpec.eager` is multiplied by these factors. Under a staleness budget spare capacity of the link costs nothing.
Under an error budget alone, and for an exact query, a repeated send takes capacity from other entries."""
MAX_REPEATED, FEW_GROUPS = 0.25, 16
"""The maximum of a slice's expected repeated sends, without a staleness budget: a fraction of the groups that the slice
has to send, or of `FEW_GROUPS` if these are more."""
NEARLY_SURE = 0.8
"""Entries with this gain are sent early even if the slice has used up its repeated sends."""
RANKED_FROM = 0.05  # limit: time of rankings
"""Entries that have used up less than this fraction of their limit are not ranked before their slice closes."""


@dataclass(frozen=True, slots=True)
class RankingContext:
    """The time at which an open slice is ranked.

    Attributes:
        now_ms: event time.
        elapsed: the elapsed fraction of the slice, 0 to 1.
    """

    now_ms: int
    elapsed: float


def rank_open(
    entries: SliceEntries,
    limits: ErrorLimits,
    spec: CacheSpec,
    history: GroupHistory,
    context: RankingContext,
    *,
    waits: bool = False,
) -> SendQueue:
    """Ranks an open slice of an exact query, or of an error or combined budget.

    Args:
        waits: whether only entries are sent early that cannot wait. A small gain is then enough.
    """
    groups = np.flatnonzero(primary_mask(entries, limits, RANKED_FROM if spec.eviction == "gain" else 1.0))
    least = spec.eager if waits else min(ERROR_EAGER_FACTOR * spec.eager, 1.0)
    view = SliceView(entries, limits, history, context.elapsed, least)
    most_repeated = np.inf if waits else _repeats_left(entries, limits, history)
    return _ranked(view, groups, spec, context, most_repeated)


def _repeats_left(entries: SliceEntries, limits: ErrorLimits, history: GroupHistory) -> float:
    """Returns how many more repeated sends may be expected of an open slice."""
    sent, pending = entries.sends > 0, primary_mask(entries, limits)
    again = int(entries.sends.sum()) - int(np.count_nonzero(sent)) + int(np.count_nonzero(sent & pending))
    return MAX_REPEATED * max(int(np.count_nonzero(sent | pending)), history.needed, FEW_GROUPS) - again


def _ranked(
    view: SliceView, groups: IntArray, spec: CacheSpec, context: RankingContext, most_repeated: float = np.inf
) -> SendQueue:
    """Ranks by the eviction policy.

    With `gain`, it ranks only groups with a gain of at least `view.min_gain`. The expected number of their repeated
    sends is at most `most_repeated`. Groups with a gain of `NEARLY_SURE` are ranked in any case.
    """
    ranks = EVICTION_POLICIES[spec.eviction](view, groups)
    if spec.eviction == "gain":
        enough = (ranks <= -view.min_gain) & (ranks < 0.0)
        ranks, groups = ranks[enough], groups[enough]
        if most_repeated < np.inf:
            order = np.argsort(ranks, kind="stable")
            ranks, groups = ranks[order], groups[order]
            paid = (np.cumsum(1.0 + ranks) <= most_repeated) | (ranks <= -NEARLY_SURE)
            ranks, groups = ranks[paid], groups[paid]
    return SendQueue.for_open_slice(ranks, groups, view.entries.newest_batch, context.now_ms)


def rank_closed(entries: SliceEntries, limits: ErrorLimits) -> SendQueue:
    """Queues the primary cache of a closed slice of an exact or error-bound query.

    The whole primary cache is sent, in the order of the keys: the keys of one frame then have much in common.
    """
    groups = entries.in_key_order(np.flatnonzero(primary_mask(entries, limits)))
    return SendQueue.for_closed_slice(groups, entries.newest_batch)


def rank_closed_by_error(entries: SliceEntries, limits: ErrorLimits, history: GroupHistory) -> SendQueue:
    """Queues the primary cache of a closed slice, the largest errors first.

    They matter most in an answer that is due before all entries have arrived.
    """
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
            # estimated initial prefix error". Without this rule, the sends of the whole slice would be unused.
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


def errors_left(entries: SliceEntries, history: GroupHistory, queue: SendQueue) -> FloatArray | None:
    """Returns the errors that a closed slice still has to send, descending; None: it has not been ranked."""
    if queue.expired_closed(entries):
        return None
    if len(queue.errors) != len(queue.groups):
        queue.errors = accumulated_errors(entries, history, queue.groups.astype(np.int64))
    return queue.errors[queue.position :]


def learn(
    entries: SliceEntries, history: GroupHistory, slots: SendSlots | None, limits: ErrorLimits | None = None
) -> None:
    """Updates the history with a slice that has just closed, before any of its entries are sent.

    Args:
        slots: under a staleness budget, the sends until the deadline.
        limits: under all budgets except a staleness budget alone, the errors that the slice may withhold.
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
