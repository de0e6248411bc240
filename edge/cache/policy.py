"""Which entries of a slice may leave, and in which order: partitioning and eviction put together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge.cache.entries import SliceEntries
from edge.cache.error_target import nth_largest
from edge.cache.eviction import POLICIES, View
from edge.cache.history import GroupHistory
from edge.cache.partition import Limits, primary
from edge.cache.send_queue import Ranking
from edge.cache.sizing import SIZINGS, Slots, accumulated, explicit, level, scales
from edgewater.caching import CacheSpec
from edgewater.synopses import FloatArray, IntArray

SURE = 0.05
"""Without any pressure an entry of an open slice leaves only if its gain is at least this."""
IDLE_EAGER = 0.2
"""Under a staleness budget entries leave at so many times `CacheSpec.eager`: what the link can carry is free."""
SLIGHT = 0.05
"""Entries that have used up less of their limit than this are not looked at before their slice closes."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When an open slice is ranked.

    Attributes:
        now_ms: event time.
        elapsed: the part of the slice that has passed, 0 to 1.
        pressure: how much of the time left it would take to send what must be sent, 0 to 1 (all of it, or more).
    """

    now_ms: int
    elapsed: float
    pressure: float


def of_open(entries: SliceEntries, limits: Limits, spec: CacheSpec, history: GroupHistory, moment: Moment) -> Ranking:
    """Exact and error-bound: a slice that is still open."""
    margin = SLIGHT if spec.eviction == "gain" else 1.0
    groups = np.flatnonzero(primary(entries, limits, margin))
    least = max(spec.eager, SURE * (1.0 - moment.pressure))
    return _ranked(View(entries, limits, history, moment.elapsed, least=least), groups, spec, moment)


def _ranked(view: View, groups: IntArray, spec: CacheSpec, moment: Moment) -> Ranking:
    """By the policy; with `gain` those whose gain is at least `view.least`."""
    ranks = POLICIES[spec.eviction](view, groups)
    if spec.eviction == "gain":
        worth = (ranks <= -view.least) & (ranks < 0.0)
        ranks, groups = ranks[worth], groups[worth]
    return Ranking.of_open(ranks, groups, view.entries.newest, moment.now_ms)


def of_closed(entries: SliceEntries, limits: Limits) -> Ranking:
    """Exact and error-bound: the slice is closed, its primary cache is flushed; all of it must go, so the
    order does not matter."""
    return Ranking.of_closed(np.flatnonzero(primary(entries, limits)), entries.newest)


def by_deadline(entries: SliceEntries, spec: CacheSpec, history: GroupHistory, moment: Moment, slots: Slots) -> Ranking:
    """Staleness-bound: a slice that is still open."""
    elapsed = moment.elapsed
    groups = np.flatnonzero(entries.has_pending)
    errors = accumulated(entries, history, groups)
    if spec.sizing == "target":
        border = level(entries, history, elapsed, slots, errors)
        if spec.eviction != "gain":
            groups = groups[errors > border]
    else:
        size = SIZINGS[spec.sizing](entries, history, elapsed, slots)
        ranked = errors if spec.estimate == "acc" else explicit(entries, history, groups, elapsed)
        border = nth_largest(ranked, size)
        groups = groups[ranked > border]
    unit = scales(entries, history)
    limits = Limits({measure: border * scale for measure, scale in unit.items()})
    view = View(entries, limits, history, elapsed, IDLE_EAGER * spec.eager)
    # Bytes are not what is to be saved here: what the link can carry until the deadline may be used.
    return _ranked(view, groups, spec, moment)


def until_deadline(entries: SliceEntries, history: GroupHistory) -> Ranking:
    """Staleness-bound: the slice is closed; the largest accumulated errors leave first."""
    groups = np.flatnonzero(entries.has_pending)
    order = np.argsort(-accumulated(entries, history, groups), kind="stable")
    return Ranking.of_closed(groups[order], entries.newest)


def learn(entries: SliceEntries, history: GroupHistory, slots: Slots | None) -> None:
    """Takes a slice in that has just closed, before anything leaves it. `slots`: under a staleness budget."""
    if slots is not None:
        errors = _pending_errors(entries, history)
        totals = np.zeros(len(entries))
        for measure, scale in scales(entries, history).items():
            totals = np.maximum(totals, np.abs(entries.total(measure)) / scale)
        important = totals > nth_largest(totals, slots.whole)
        history.learn_curve(entries.first_seen[important])
        history.aim.learn(errors, slots.left)
    history.learn(entries)


def _pending_errors(entries: SliceEntries, history: GroupHistory) -> FloatArray:
    return accumulated(entries, history, np.flatnonzero(entries.has_pending))
