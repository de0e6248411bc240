"""The cache policy: which entries of a slice may be sent, and in which order. Combines partitioning and eviction."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from edge.cache.entries import SliceEntries, ratio
from edge.cache.error_target import nth_largest
from edge.cache.eviction import EVICTION_POLICIES, SliceView, most_accumulated_error
from edge.cache.history import GroupHistory
from edge.cache.partition import ErrorLimits, primary_mask
from edge.cache.send_queue import SendQueue
from edge.cache.sizing import SIZINGS, SendSlots, accumulated_errors, error_scales, explicit_errors, target_level
from edgewater.caching import CacheSpec
from edgewater.synopses import ExtremumStack, IntArray

MIN_GAIN_WITHOUT_PRESSURE = 0.05
"""Without pressure an entry of an open slice is sent only if its gain is at least this."""
STALENESS_EAGER_FACTOR = 0.2
"""Under a staleness budget `CacheSpec.eager` is multiplied by this: spare capacity of the link costs nothing."""
EXACT = ErrorLimits({})
FEW_SPARED = 0.02
"""Up to this fraction of the groups that need no send, a budget keeps the order of exact results."""
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
    """Ranks an open slice of an exact or error-bound query."""
    gain = spec.eviction == "gain"
    sends = _SparedSends.of(entries, limits)
    min_gain = max(spec.eager, MIN_GAIN_WITHOUT_PRESSURE * (1.0 - context.pressure))
    min_done = 0.0 if limits.is_exact or sends.left else min_gain
    groups = np.flatnonzero(primary_mask(entries, limits, RANKED_FROM if gain else 1.0))
    extrema = any(isinstance(entries.pending.measures[m], ExtremumStack) for m in limits.measures)
    if gain and sends.are_few and not extrema and not limits.is_exact:
        # The order of exact results, without the groups that the budget skips: another one repeats as many, or more.
        groups, limits, min_done = np.flatnonzero(primary_mask(entries, limits)), EXACT, 0.0
    return _ranked(SliceView(entries, limits, history, context.elapsed, min_gain, min_done), groups, spec, context)


@dataclass(frozen=True, slots=True)
class _SparedSends:
    """The sends that a budget spares, so that it costs hardly ever more of them than exact results.

    An exact query sends every group once, and repeats a send after a record that its forecast did not expect. Once the
    repeated sends have used up what the budget saves, groups are only sent early where an exact query would send them
    too.

    Attributes:
        left: whether the groups that need no send are still more than the sends that were repeated.
        are_few: whether they are so few of all groups that the repeated sends alone decide.
    """

    left: bool
    are_few: bool

    @classmethod
    def of(cls, entries: SliceEntries, limits: ErrorLimits) -> _SparedSends:
        sends = entries.sends
        unsent = np.flatnonzero(sends == 0)
        needed = int(np.count_nonzero(primary_mask(entries, limits, groups=unsent)))
        spared, repeated = len(unsent) - needed, int(sends.sum()) - (len(sends) - len(unsent))
        return cls(repeated < spared, spared <= FEW_SPARED * len(sends))


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
